// SPDX-License-Identifier: Apache-2.0
//
// An engine ends while transfers of it are under way that the application asks for no more.
//   engine_ends_test                     all of it
//   engine_ends_test serve POOL FOLDER   as the other process, which is stopped in the middle
#include "support/agents.h"

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t buffer_bytes = 8 << 20;

void serve(const std::string& pool, const std::string& folder) {
    Agent agent("server", pool);
    Buffer heap(agent, false, buffer_bytes, 1);
    CHECK(agent->loadRemoteConnInfo("client", hear(folder + "/client")) == NIXL_SUCCESS);
    tell(folder + "/heap", heap.public_data());
    tell(folder + "/heap.at", number(reinterpret_cast<uintptr_t>(heap.address)));
    tell(folder + "/server", agent.conn_info());
    CHECK(next_note(agent).second == "stop");
    CHECK(raise(SIGSTOP) == 0);
}

/// Its memory is not in use any more afterwards, and nothing keeps the transfer, whether there is a link or one is only asked for.
void with_transfers(const testing::Folder& folder, const std::string& pool, bool is_linked) {
    std::string place = folder.path("talk" + std::to_string(is_linked));
    std::filesystem::create_directory(place);
    auto client = std::make_unique<Agent>("client", pool);
    tell(place + "/client", client->conn_info());
    testing::Child child(folder, "one", {"serve", pool, place});
    CHECK((*client)->loadRemoteConnInfo("server", hear(place + "/server")) == NIXL_SUCCESS);
    Buffer near(*client, false, buffer_bytes, 2);
    std::shared_ptr<Registration> registration = static_cast<LocalMd*>(near.md)->registration;
    nixlBackendMD* md = load(*client, "server", hear(place + "/heap"));
    if (is_linked) {
        CHECK((*client)->genNotif("server", "stop") == NIXL_SUCCESS);
        child.await_stop();
    } else {
        child.stop();
    }
    auto transfer = std::make_unique<Transfer_>(*client, NIXL_READ, near, std::stoull(hear(place + "/heap.at")), md, "server",
                                                std::vector<std::array<size_t, 3>>{{0, 0, buffer_bytes}});
    CHECK(transfer->post() == NIXL_IN_PROG && registration->is_used());
    client->engine.reset();
    CHECK(!registration->is_used());
    std::weak_ptr<XferRequest> request = static_cast<RequestHandle*>(transfer->handle)->request;
    delete std::exchange(transfer->handle, nullptr);
    CHECK(request.expired());
    // The handles of memory have gone with the engine.
    near.md = nullptr;
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4) {
        serve(argv[2], argv[3]);
        return 0;
    }
    testing::Folder folder;
    std::string pool = testing::new_pool(folder, "pool", "native").pool;
    with_transfers(folder, pool, true);
    with_transfers(folder, pool, false);
}
