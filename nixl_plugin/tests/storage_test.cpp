// SPDX-License-Identifier: Apache-2.0
//
// Parts that workers do with calls that wait, like those of a file system: what is cancelled while another one takes its time.
#include "support/no_memory.h"
#include "support/pools.h"
#include "transfer/storage.h"
#include <latch>

using namespace kvbm_cxl;

namespace {

/// A call that does not return before the test lets it.
struct SlowPart : StoragePart {
    std::latch running{1}, may_end{1};
    std::atomic<int> transfers{0};

    SlowPart(const std::shared_ptr<Core>& core, const Pairs& pairs) { CHECK_OK(prepare(core, pairs, "a slow call")); }
    ~SlowPart() override { cancel(); }
    Status transfer(const StopFlag& stop) override {
        transfers++;
        if (!running.try_wait())
            running.count_down();
        may_end.wait();
        return stop ? cancelled() : Status();
    }
};

/// One worker, and something to move between memory and a file.
struct Scene {
    std::shared_ptr<Core> core;
    std::vector<std::byte> bytes = std::vector<std::byte>(100);
    std::shared_ptr<Registration> local, file = std::make_shared<Registration>();
    RemoteRegion remote = testing::own_region(file);
    Pairs pairs;

    Scene(const testing::Folder& folder, const std::string& name) {
        Options options = testing::new_pool(folder, name, "native");
        options.inline_bytes = 0;
        options.worker_threads = 1;
        core = testing::new_core(options);
        local = testing::register_dram(*core, bytes.data(), bytes.size());
        pairs = {{local.get(), &remote, local->base, 0, bytes.size()}};
    }
    ~Scene() { core->workers.shut_down(); }
    Scene(const Scene&) = delete;
};

void queued_parts_do_not_wait_for_those_before(const testing::Folder& folder) {
    Scene scene(folder, "pool");
    auto& [core, bytes, local, file, remote, pairs] = scene;
    SlowPart before(core, pairs);
    auto before_ended = std::make_shared<testing::Ended>();
    CHECK(before.post(before_ended) == NIXL_IN_PROG);
    before.running.wait();
    auto queued = std::make_unique<SlowPart>(core, pairs);
    auto ended = std::make_shared<testing::Ended>();
    CHECK(queued->post(ended) == NIXL_IN_PROG && ended->times == 0);
    // With another thread, so that the test ends if this waits.
    std::atomic<bool> has_returned{false};
    std::thread canceller([&] {
        queued->cancel();
        has_returned = true;
    });
    testing::await("cancel()", [&] { return has_returned.load(); });
    canceller.join();
    CHECK(ended->times == 1 && ended->status == NIXL_ERR_CANCELED && queued->transfers == 0 && before_ended->times == 0);
    // Posted once more, and gone while it is queued.
    auto again = std::make_shared<testing::Ended>();
    CHECK(queued->post(again) == NIXL_IN_PROG);
    queued.reset();
    CHECK(again->times == 1 && again->status == NIXL_ERR_CANCELED && file->is_used());
    before.may_end.count_down();
    testing::await("the one before", [&] { return before_ended->times != 0; });
    CHECK(before_ended->status == NIXL_SUCCESS);
    before.cancel();
    CHECK(!file->is_used() && !local->is_used());
    // The worker has left out what was cancelled, and goes on.
    SlowPart next(core, pairs);
    next.may_end.count_down();
    CHECK(testing::run(next) == NIXL_SUCCESS && next.transfers == 1 && !file->is_used());
}

/// Memory runs out when one is posted: then it has not begun, and its memory is not in use.
void one_that_cannot_be_posted_uses_nothing(const testing::Folder& folder) {
    Scene scene(folder, "small");
    SlowPart part(scene.core, scene.pairs);
    part.may_end.count_down();
    int failures = 0;
    for (long count = 0; count < 10; count++) {
        auto ended = std::make_shared<testing::Ended>();
        allocations_left = count;
        nixl_status_t posted = part.post(ended);
        allocations_left = -1;
        failures += posted == NIXL_ERR_BACKEND;
        testing::await("the part", [&] { return posted != NIXL_IN_PROG || ended->times != 0; });
        part.cancel();
        CHECK(!scene.file->is_used() && !scene.local->is_used());
    }
    CHECK(failures > 0);
}

} // namespace

int main() {
    testing::Folder folder;
    one_that_cannot_be_posted_uses_nothing(folder);
    queued_parts_do_not_wait_for_those_before(folder);
}
