// SPDX-License-Identifier: Apache-2.0
//
// Worker threads: their end, and that a worker is never the last one to let go of the engine that it works for.
#include "support/pools.h"
#include "transfer/direct.h"
#include <latch>

using namespace kvbm_cxl;

namespace {

/// Takes its time to run, as a copy does, and to go, as the last reference to an engine does.
struct SlowJob : Job {
    std::latch running{1}, may_end{1};
    std::shared_ptr<int> token = std::make_shared<int>(0);
    std::atomic<int>& runs;

    explicit SlowJob(std::atomic<int>& count) : runs(count) {}
    ~SlowJob() override {
        auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
        while (std::chrono::steady_clock::now() < end) {
        }
    }
    void run() noexcept override {
        runs++;
        running.count_down();
        may_end.wait();
    }
};

/// shut_down() returns when the job is over and no thread has it any more.
void the_end_waits_until_workers_have_let_go() {
    std::atomic<int> runs{0};
    Workers workers(2);
    auto job = std::make_shared<SlowJob>(runs);
    std::weak_ptr<int> token = job->token;
    CHECK(workers.submit(job, 1));
    job->running.wait();
    SlowJob& running = *job;
    job.reset();
    running.may_end.count_down();
    workers.shut_down();
    CHECK(runs == 1 && token.expired());
    // What comes afterwards is the caller's to run.
    CHECK(!workers.submit(std::make_shared<SlowJob>(runs), 1));
    CHECK(runs == 1);
    workers.shut_down();
}

/// Jobs that wait in the queue are run before the end.
void what_was_submitted_is_run() {
    struct Count : Job {
        std::atomic<int> runs{0};
        void run() noexcept override { runs++; }
    };
    auto count = std::make_shared<Count>();
    {
        Workers workers(1);
        for (int i = 0; i < 100; i++)
            CHECK(workers.submit(count, 1));
    }
    CHECK(count->runs == 100);
}

/// A caller that is told of the end of a copy may let go of the engine's core there and then: the worker that tells it does not have it.
void a_copy_does_not_keep_the_core(const Options& options) {
    struct Look : Completion {
        std::weak_ptr<Core> core;
        std::atomic<long> owners{0};
        void done(nixl_status_t) noexcept override { owners = core.use_count(); }
    };
    std::shared_ptr<Core> core = testing::new_core(options);
    constexpr size_t len_bytes = 1 << 20;
    std::vector<std::byte> from = testing::unique_bytes(len_bytes, 1), to(len_bytes);
    auto part = make_direct_part(core, CopyPlan(Way::memory, {{to.data(), from.data(), len_bytes}}, 0), {});
    auto look = std::make_shared<Look>();
    look->core = core;
    CHECK(part->post(look) == NIXL_IN_PROG);
    testing::await("the copy", [&] { return look->owners != 0; });
    // This function and the part.
    CHECK(look->owners == 2 && to == from);
    core->workers.shut_down();
}

} // namespace

int main() {
    the_end_waits_until_workers_have_let_go();
    what_was_submitted_is_run();
    testing::Folder folder;
    a_copy_does_not_keep_the_core(testing::new_pool(folder, "pool", "native"));
}
