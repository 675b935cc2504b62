// SPDX-License-Identifier: Apache-2.0
//
// That a process has ended is said of those that have, and of no other.
#include "support/pools.h"
#include "support/process.h"
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

using namespace kvbm_cxl;

int main() {
    ProcessMark own = own_process();
    CHECK(own.pid == static_cast<uint32_t>(getpid()) && own.boot != 0 && own.namespace_id != 0 && own.start_ticks != 0);
    CHECK(!has_process_ended(own));
    CHECK(!has_process_ended({}));

    int ends[2];
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        ProcessMark mark = own_process();
        CHECK(write(ends[1], &mark, sizeof mark) == sizeof mark);
        while (true)
            pause();
    }
    ProcessMark mark;
    CHECK(read(ends[0], &mark, sizeof mark) == sizeof mark);
    CHECK(mark.pid == static_cast<uint32_t>(child) && mark.boot == own.boot && mark.namespace_id == own.namespace_id);
    CHECK(!has_process_ended(mark));
    CHECK(kill(child, SIGSTOP) == 0);
    CHECK(!has_process_ended(mark));
    // Another process with its number: the one that was meant is no more.
    ProcessMark former = mark;
    former.start_ticks += 1;
    CHECK(has_process_ended(former));
    CHECK(kill(child, SIGKILL) == 0);
    // Killed, and not waited for.
    testing::await("the end of a child", [&] { return has_process_ended(mark); });
    ProcessMark elsewhere = mark, contained = mark;
    elsewhere.boot ^= 1;
    contained.namespace_id += 1;
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(has_process_ended(mark));
    // Of another machine or namespace nothing can be told.
    CHECK(!has_process_ended(elsewhere) && !has_process_ended(contained));
}
