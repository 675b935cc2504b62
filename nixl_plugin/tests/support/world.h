// SPDX-License-Identifier: Apache-2.0
//
// A pool of its own for a test, other processes on it as other hosts, and data that are all different.
#pragma once

#include "links/links.h"
#include "slower.h"
#include "support/pool.h"
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                                   \
    do {                                                                                                                                   \
        if (!(condition)) {                                                                                                                \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                           \
            std::fflush(nullptr);                                                                                                          \
            std::_Exit(1);                                                                                                                 \
        }                                                                                                                                  \
    } while (0)

/// The code is the one wanted; a failure has a reason, which is shown if not.
#define CHECK_STATUS(call, wanted)                                                                                                         \
    do {                                                                                                                                   \
        ::kvbm_cxl::Status checked = (call);                                                                                               \
        if (checked.code() != (wanted) || checked.ok() != checked.reason().empty()) {                                                      \
            std::fprintf(stderr, "%s:%d: %s: %d \"%s\", wanted %d\n", __FILE__, __LINE__, #call, checked.code(), checked.reason().c_str(), \
                         (wanted));                                                                                                        \
            std::fflush(nullptr);                                                                                                          \
            std::_Exit(1);                                                                                                                 \
        }                                                                                                                                  \
    } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, NIXL_SUCCESS)

namespace world {

using namespace kvbm_cxl;

/// Longest wait for anything that has to happen.
constexpr uint64_t PATIENCE_S = 60 * SLOWER;

/// Waits until `done`; `between` is done meanwhile. False when it never was.
template <class Done, class Between> bool wait_until(const Done& done, const Between& between, double patience_s = PATIENCE_S) {
    uint64_t end = now_ns() + static_cast<uint64_t>(patience_s * 1e9);
    while (!done()) {
        if (now_ns() > end)
            return false;
        between();
    }
    return true;
}

inline void nap(uint64_t us = 200) {
    usleep(static_cast<useconds_t>(us));
}

/// Byte `index` of the data with a number: all data differ from all others, and so do their bytes.
inline uint8_t byte_of(uint64_t number, uint64_t index) {
    uint64_t mixed = (number * 0x9e3779b97f4a7c15ull + (index >> 3) + 1) * 0xc2b2ae3d27d4eb4full;
    mixed ^= mixed >> 29;
    return static_cast<uint8_t>((mixed * 0x165667b19e3779f9ull) >> (8 * (index & 7)));
}

inline void fill(std::byte* place, size_t len_bytes, uint64_t number, uint64_t first = 0) {
    for (size_t i = 0; i < len_bytes; ++i)
        place[i] = std::byte{byte_of(number, first + i)};
}

inline bool is_filled(const std::byte* place, size_t len_bytes, uint64_t number, uint64_t first = 0) {
    for (size_t i = 0; i < len_bytes; ++i)
        if (place[i] != std::byte{byte_of(number, first + i)})
            return false;
    return true;
}

/// A folder in shared memory that goes with the object; the process is a machine of its own.
class Folder {
    std::string path_;

  public:
    Folder() {
        char name[] = "/dev/shm/kvbm-cxl-nixl-XXXXXX";
        CHECK(mkdtemp(name));
        path_ = name;
        setenv("CXL_MACHINE_ID", "one", 1);
        setenv("CXL_STATE_DIR", path("state").c_str(), 1);
        unsetenv("CXL_POOL");
    }
    ~Folder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    std::string path(const std::string& name) const { return path_ + "/" + name; }
};

/// Makes a pool; `size` as in its name. With cells of `cell_bytes`, half of it is for those.
inline void format(const std::string& pool, const char* size, uint32_t slots, uint32_t locks, uint32_t objects, uint64_t chunk_bytes = 0,
                   uint64_t cell_bytes = 0) {
    cxl_shm_format_options_t how{};
    how.struct_size = sizeof how;
    how.slots = slots;
    how.locks = locks;
    how.objects = objects;
    how.chunk_bytes = chunk_bytes;
    how.cell_bytes = cell_bytes;
    how.cells_percent = cell_bytes ? 50 : 0;
    if (cxl_shm_format((pool + ",size=" + size).c_str(), &how) != CXL_SHM_OK) {
        std::fprintf(stderr, "format: %s\n", cxl_shm_last_error());
        std::_Exit(1);
    }
}

/// Such a folder with a pool.
struct Field : Folder {
    explicit Field(const char* size = "64M") { format(spec(), size, 8, 32, 64); }
    std::string spec() const { return path("pool"); }
};

inline std::shared_ptr<Pool> open_pool(const std::string& spec) {
    Options options;
    options.pool = spec;
    options.timeout_ms = 30'000;
    std::shared_ptr<Pool> pool;
    CHECK_OK(Pool::open(options, pool));
    return pool;
}

/// This program as another process, on the machine named; killed with the object.
class Child {
    pid_t pid_ = -1;
    std::filesystem::path log_;

  public:
    Child(const Folder& folder, const std::string& machine, std::vector<std::string> arguments) {
        static int number = 0;
        log_ = folder.path("log-" + std::to_string(getpid()) + "-" + std::to_string(++number));
        arguments.insert(arguments.begin(), "child");
        std::vector<char*> argv;
        for (auto& argument : arguments)
            argv.push_back(argument.data());
        argv.push_back(nullptr);
        pid_ = fork();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            // Between fork and exec only what a signal handler may do, and setenv, which no other thread does meanwhile.
            int out = open(log_.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_APPEND, 0600);
            dup2(out, 1);
            dup2(out, 2);
            setenv("CXL_MACHINE_ID", machine.c_str(), 1);
            // A test that fails leaves no process behind.
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            execv("/proc/self/exe", argv.data());
            _exit(127);
        }
    }
    Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, -1)), log_(std::move(other.log_)) {}
    ~Child() { end(SIGKILL); }

    pid_t pid() const { return pid_; }
    void signal(int number) { CHECK(kill(pid_, number) == 0); }
    /// Stops it, and waits until it is.
    void stop() {
        signal(SIGSTOP);
        await_stop();
    }
    /// Waits until it has stopped itself.
    void await_stop() {
        int status = -1;
        CHECK(wait_until([&] { return waitpid(pid_, &status, WNOHANG | WUNTRACED) == pid_; }, [] { nap(); }));
        CHECK(WIFSTOPPED(status));
    }
    /// Ends it, if it is there; its exit status, or -1.
    int end(int number) {
        if (pid_ < 0)
            return -1;
        if (number != SIGKILL)
            kill(pid_, SIGCONT);
        kill(pid_, number);
        return wait();
    }
    int wait() {
        int status = 0;
        waitpid(std::exchange(pid_, -1), &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    /// Waits for its end by itself, with success.
    void succeed() {
        int status = 0;
        bool ended = wait_until([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, [] { nap(2'000); });
        bool is_ok = ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!is_ok)
            std::fprintf(stderr, "child %s: status %x\n%s\n", ended ? "failed" : "hangs", static_cast<unsigned>(status), text().c_str());
        CHECK(is_ok);
        pid_ = -1;
    }
    bool runs() { return pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == 0; }
    std::string text() const {
        std::ostringstream all;
        all << std::ifstream(log_).rdbuf();
        return all.str();
    }
    /// Waits until it has written this, and returns the rest of that line.
    std::string await_text(const std::string& wanted) {
        std::string found;
        bool ok = wait_until(
            [&] {
                std::string all = text();
                size_t at = all.find(wanted), end = at == std::string::npos ? at : all.find('\n', at);
                if (end == std::string::npos)
                    return false;
                found = all.substr(at + wanted.size(), end - at - wanted.size());
                return true;
            },
            [&] { nap(1'000); });
        if (!ok)
            std::fprintf(stderr, "never said %s:\n%s\n", wanted.c_str(), text().c_str());
        CHECK(ok);
        return found;
    }
};

inline std::string random_engine_id() {
    std::random_device device;
    char id[ENGINE_ID_CHARS + 1];
    std::snprintf(id, sizeof id, "%08x%08x", device(), device());
    return id;
}

/// CPU time of this process in seconds.
inline double cpu_s() {
    timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

/// Runs the tests whose name contains the first argument, each with its name before it.
struct Test {
    const char* name;
    void (*run)();
};
inline int run_tests(std::span<const Test> tests, int argc, char** argv) {
    for (const Test& test : tests) {
        if (argc > 1 && !std::strstr(test.name, argv[1]))
            continue;
        uint64_t since = now_ns();
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.run();
        std::printf("    ok, %.2f s\n", static_cast<double>(now_ns() - since) * 1e-9);
    }
    return 0;
}

/// The pool of all tests of a program.
inline std::shared_ptr<Pool> pool;
/// The same with such a pool.
inline int run_on_a_pool(std::span<const Test> tests, int argc, char** argv) {
    Field field("256M");
    pool = open_pool(field.spec());
    int status = run_tests(tests, argc, argv);
    pool.reset();
    return status;
}

} // namespace world
