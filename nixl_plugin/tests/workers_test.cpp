// SPDX-License-Identifier: Apache-2.0
//
// Worker threads: their end, and that a worker is never the last one to let go of the engine that it works for.
#include "support/pools.h"
#include "transfer/direct.h"
#include <latch>
#include <sched.h>

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

/// Each thread begins with what it was told to, before it runs a job.
void each_thread_begins_as_told() {
    static thread_local bool has_begun = false;
    struct Look : Job {
        std::latch both{2};
        std::atomic<int> good{0};
        void run() noexcept override {
            good += has_begun;
            both.arrive_and_wait();
        }
    };
    auto look = std::make_shared<Look>();
    std::atomic<int> begun{0};
    Workers workers(2, [&] {
        has_begun = true;
        begun++;
    });
    CHECK(workers.submit(look, 2));
    look->both.wait();
    workers.shut_down();
    CHECK(begun == 2 && look->good == 2);
}

/// Workers of an engine run where CXL_CPUS wants them, and nothing else of the program is bound.
void workers_run_where_they_are_told(const testing::Folder& folder) {
    cpu_set_t all, now;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    int last = CPU_SETSIZE - 1;
    while (!CPU_ISSET(last, &all))
        last--;
    Options options = testing::new_pool(folder, "bound", "native");
    setenv("CXL_CPUS", ("workers=" + std::to_string(last)).c_str(), 1);
    auto core = testing::new_core(options);
    unsetenv("CXL_CPUS");
    struct Look : Job {
        cpu_set_t seen;
        std::latch done{1};
        void run() noexcept override {
            CHECK(sched_getaffinity(0, sizeof seen, &seen) == 0);
            done.count_down();
        }
    };
    auto look = std::make_shared<Look>();
    CHECK(core->workers.submit(look, 1));
    look->done.wait();
    core->workers.shut_down();
    CHECK(CPU_COUNT(&look->seen) == 1 && CPU_ISSET(last, &look->seen));
    CHECK(sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&all, &now));
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
    each_thread_begins_as_told();
    testing::Folder folder;
    workers_run_where_they_are_told(folder);
    a_copy_does_not_keep_the_core(testing::new_pool(folder, "pool", "native"));
}
