// SPDX-License-Identifier: Apache-2.0
//
// This program once more, as another machine.
#pragma once

#include "pools.h"
#include <csignal>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

namespace testing {

class Child {
    pid_t pid_ = -1;

  public:
    /// Starts this program with arguments of its own, as `machine`.
    Child(const char* machine, std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "/proc/self/exe");
        std::vector<char*> list;
        for (std::string& argument : arguments)
            list.push_back(argument.data());
        list.push_back(nullptr);
        std::string was = getenv("CXL_MACHINE_ID");
        setenv("CXL_MACHINE_ID", machine, 1);
        CHECK(posix_spawn(&pid_, "/proc/self/exe", nullptr, nullptr, list.data(), environ) == 0);
        setenv("CXL_MACHINE_ID", was.c_str(), 1);
    }
    ~Child() {
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    /// Stops it, and waits until it is.
    void stop() {
        CHECK(kill(pid_, SIGSTOP) == 0);
        await_stop();
    }
    /// Waits until it has stopped itself.
    void await_stop() {
        int status = -1;
        await("the other process to stop", [&] { return waitpid(pid_, &status, WNOHANG | WUNTRACED) == pid_; });
        CHECK(WIFSTOPPED(status));
    }
    /// Waits until it ends, which has to be well.
    void finish() {
        int status = -1;
        await("the other process", [&] { return waitpid(pid_, &status, WNOHANG) == pid_; });
        pid_ = -1;
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
};

} // namespace testing
