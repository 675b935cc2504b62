// SPDX-License-Identifier: Apache-2.0
//
// A process forks while an agent of it is at work: the child has the agent's memory, and none of its threads.
#include "support/agents.h"
#include <csignal>
#include <sys/wait.h>

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t buffer_bytes = 1 << 20;
constexpr int forks_made = 20;

/// What a child does that cleans up without knowing better. Its exit status says what was wrong.
int clean_up(Agent& agent, Buffer& near, Transfer_& transfer, nixlBackendMD* own) {
    notif_list_t notes;
    if (agent->getNotifs(notes) != NIXL_ERR_NOT_ALLOWED || agent->genNotif("one", "x") != NIXL_ERR_NOT_ALLOWED)
        return 2;
    if (transfer.post() != NIXL_ERR_NOT_ALLOWED || agent->checkXfer(transfer.handle) != NIXL_ERR_NOT_ALLOWED)
        return 3;
    if (agent->releaseReqH(transfer.handle) != NIXL_ERR_NOT_ALLOWED || agent->deregisterMem(near.md) != NIXL_ERR_NOT_ALLOWED)
        return 4;
    if (agent->unloadMD(own) != NIXL_ERR_NOT_ALLOWED || agent->disconnect("one") != NIXL_ERR_NOT_ALLOWED)
        return 5;
    agent.engine.reset();
    return 0;
}

[[maybe_unused]] void children_leave_it_alone(const std::string& pool) {
    Agent one("one", pool, {{"inline_bytes", "0"}});
    Buffer near(one, false, buffer_bytes, 1), far(one, true, buffer_bytes, 2);
    nixlBackendMD* own = nullptr;
    CHECK(one->loadLocalMD(far.md, own) == NIXL_SUCCESS);
    {
        Transfer_ transfer(one, NIXL_WRITE, near, reinterpret_cast<uintptr_t>(far.address), own, "one", {{0, 0, buffer_bytes}});
        CHECK(transfer.run() == NIXL_SUCCESS);
        for (int i = 0; i < forks_made; i++) {
            // Calls from several threads, so that locks are held at the fork now and then.
            std::atomic<bool> has_ended{false};
            std::atomic<uint64_t> calls{0};
            std::vector<std::thread> threads;
            for (int thread = 0; thread < 2; thread++) {
                threads.emplace_back([&] {
                    while (!has_ended) {
                        notif_list_t notes;
                        CHECK(one->getNotifs(notes) == NIXL_SUCCESS);
                        calls++;
                    }
                });
            }
            await("calls", [&] { return calls > 100; });
            pid_t child = fork();
            CHECK(child >= 0);
            if (child == 0)
                _exit(clean_up(one, near, transfer, own));
            int status = -1;
            await("the child", [&] { return waitpid(child, &status, WNOHANG) == child; });
            has_ended = true;
            for (std::thread& thread : threads)
                thread.join();
            if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
                std::fprintf(stderr, "the child's status: %x\n", static_cast<unsigned>(status));
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
        // The parent has all of it still.
        near.fill(3);
        CHECK(transfer.run("after the forks") == NIXL_SUCCESS && far.content() == near.content());
        CHECK(next_note(one).second == "after the forks");
    }
    CHECK(one->unloadMD(own) == NIXL_SUCCESS);
}

} // namespace

int main() {
#if defined(__SANITIZE_THREAD__)
    std::puts("SKIPPED: the thread sanitizer does not go on in the child of a process with threads");
#else
    testing::Folder folder;
    children_leave_it_alone(testing::new_pool(folder, "pool", "native").pool);
#endif
}
