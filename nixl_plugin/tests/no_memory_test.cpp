// SPDX-License-Identifier: Apache-2.0
//
// Memory runs out while a transfer over a link begins: then it has not begun, and its registrations are not in use.
#include "backend/peering.h"
#include "support/no_memory.h"
#include "support/pools.h"

using namespace kvbm_cxl;

namespace {

std::shared_ptr<Peering> peering(const Options& options, const char* agent, uint64_t id, std::shared_ptr<Core>& core) {
    core = testing::new_core(options);
    core->agent = agent;
    core->id = id;
    core->has_thread = true;
    std::shared_ptr<Peering> made;
    CHECK_OK(Peering::create(core, nullptr, made));
    return made;
}

void a_post_that_fails_has_begun_nothing(const testing::Folder& folder) {
    Options options = testing::new_pool(folder, "pool", "native");
    std::shared_ptr<Core> core, far_core;
    auto client = peering(options, "client", 10, core), server = peering(options, "server", 11, far_core);
    std::vector<std::byte> bytes = testing::unique_bytes(100'000, 1), far_bytes(bytes.size());
    auto local = testing::register_dram(*core, bytes.data(), bytes.size());
    auto far = testing::register_dram(*far_core, far_bytes.data(), far_bytes.size());
    far_core->registry.add(far);
    RemoteRegion region;
    region.peer = std::make_shared<Peer>();
    region.peer->agent = "server";
    region.peer->info.engine = 11;
    region.peer->is_same_pool = true;
    region.is.registration = far->id;
    region.is.base = far->base;
    region.is.len_bytes = far->len_bytes;
    CHECK_OK(client->add(*region.peer));
    std::unique_ptr<Part> part;
    CHECK_OK(client->make_staged_part(NIXL_WRITE, *region.peer, {{local.get(), &region, local->base, far->base, bytes.size()}}, part));
    CHECK(testing::run(*part) == NIXL_SUCCESS);
    int failures = 0;
    for (int turn = 0; turn < 60; turn++) {
        auto ended = std::make_shared<testing::Ended>();
        allocations_left = turn % 12;
        nixl_status_t posted = part->post(ended);
        allocations_left = -1;
        CHECK(posted == NIXL_IN_PROG || posted == NIXL_ERR_BACKEND);
        failures += posted == NIXL_ERR_BACKEND;
        CHECK(posted == NIXL_IN_PROG || !local->is_used());
        part->cancel();
        CHECK(ended->times == (posted == NIXL_IN_PROG) && !local->is_used());
    }
    CHECK(failures >= 5);
    client->shut_down();
    server->shut_down();
    // The thread that wrote them is gone: that the transfer has ended came by way of the pool, which is no order for a thread sanitizer.
    CHECK(far_bytes == bytes);
}

} // namespace

int main() {
    testing::Folder folder;
    a_post_that_fails_has_begun_nothing(folder);
}
