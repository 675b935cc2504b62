// SPDX-License-Identifier: Apache-2.0
//
// What tests of parts of the engine share: checks that say where they failed, a folder with pools in it, and parts run to their end.
#pragma once

#include "slower.h"
#include "transfer/core.h"
#include "transfer/transfer.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#define CHECK(condition)                                                                                                                   \
    do {                                                                                                                                   \
        if (!(condition)) {                                                                                                                \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                           \
            std::_Exit(1);                                                                                                                 \
        }                                                                                                                                  \
    } while (0)

/// The code is the one wanted; a failure has a reason, which is shown if not.
#define CHECK_STATUS(call, wanted)                                                                                                         \
    do {                                                                                                                                   \
        kvbm_cxl::Status checked = (call);                                                                                                 \
        if (checked.code() != (wanted) || checked.ok() != checked.reason().empty()) {                                                      \
            std::fprintf(stderr, "%s:%d: %s: %d \"%s\", wanted %d\n", __FILE__, __LINE__, #call, checked.code(), checked.reason().c_str(), \
                         (wanted));                                                                                                        \
            std::_Exit(1);                                                                                                                 \
        }                                                                                                                                  \
    } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, NIXL_SUCCESS)

namespace testing {

/// Longest wait for anything.
constexpr auto patience = std::chrono::seconds(60 * SLOWER);

template <class Condition> void await(const char* what, Condition condition) {
    auto deadline = std::chrono::steady_clock::now() + patience;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > deadline) {
            std::fprintf(stderr, "waited in vain for %s\n", what);
            std::_Exit(1);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

/// A folder in shared memory that goes with the process, which is a machine of its own.
class Folder {
    std::string path_;

  public:
    Folder() {
        char name[] = "/dev/shm/kvbm-cxl-test-XXXXXX";
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

/// Options as they are without parameters, of a new pool in the folder. `coherence` is the value of CXL_COHERENCE.
inline kvbm_cxl::Options new_pool(const Folder& folder, const std::string& name, const char* coherence, uint64_t cell_bytes = 0) {
    kvbm_cxl::Options options;
    CHECK_OK(kvbm_cxl::read_options({{"pool", folder.path(name)}}, options));
    setenv("CXL_COHERENCE", coherence, 1);
    cxl_shm_format_options_t how{};
    how.struct_size = sizeof how;
    how.slots = 4;
    how.locks = 64;
    how.objects = 16;
    how.chunk_bytes = 1 << 20;
    how.cell_bytes = cell_bytes;
    how.cells_percent = cell_bytes ? 50 : 0;
    if (cxl_shm_format((options.pool + ",size=48M").c_str(), &how) != CXL_SHM_OK) {
        std::fprintf(stderr, "format: %s\n", cxl_shm_last_error());
        std::_Exit(1);
    }
    return options;
}

/// A core on a new pool.
inline std::shared_ptr<kvbm_cxl::Core> new_core(const kvbm_cxl::Options& options) {
    auto core = std::make_shared<kvbm_cxl::Core>(options);
    CHECK_OK(kvbm_cxl::Pool::open(options, core->pool));
    core->agent = "agent";
    core->id = 1;
    return core;
}

/// Bytes that are different at every place and for every salt.
inline std::vector<std::byte> unique_bytes(size_t count, uint32_t salt) {
    std::vector<std::byte> bytes(count);
    for (size_t index = 0; index < count; index++)
        bytes[index] = static_cast<std::byte>(((index + 1) * 0x9e3779b97f4a7c15u ^ salt * 0x85ebca6bu) >> 29);
    return bytes;
}

/// Told of the end of a part.
struct Ended : kvbm_cxl::Completion {
    std::atomic<int> times{0};
    std::atomic<nixl_status_t> status{NIXL_IN_PROG};
    void done(nixl_status_t result) noexcept override {
        status = result;
        times++;
    }
};

/// Posts a part and waits for its end.
inline nixl_status_t run(kvbm_cxl::Part& part) {
    auto ended = std::make_shared<Ended>();
    nixl_status_t posted = part.post(ended);
    if (posted != NIXL_IN_PROG) {
        CHECK(ended->times == 0);
        return posted;
    }
    await("a part", [&] {
        part.poll();
        return ended->times != 0;
    });
    CHECK(ended->times == 1);
    return ended->status;
}

/// A registration of memory of this process.
inline std::shared_ptr<kvbm_cxl::Registration> register_dram(const kvbm_cxl::Core& core, void* address, size_t len_bytes) {
    auto registration = std::make_shared<kvbm_cxl::Registration>();
    registration->base = reinterpret_cast<uintptr_t>(address);
    registration->len_bytes = len_bytes;
    CHECK_OK(kvbm_cxl::resolve_dram(*core.pool, *registration));
    return registration;
}

/// A registration as the remote side of the engine's own transfers.
inline kvbm_cxl::RemoteRegion own_region(const std::shared_ptr<kvbm_cxl::Registration>& own) {
    kvbm_cxl::RemoteRegion region;
    region.own = own;
    region.memory = own->memory;
    region.is.kind = own->kind;
    region.is.base = own->base;
    region.is.len_bytes = own->len_bytes;
    region.pool_address = own->pool_address;
    return region;
}

} // namespace testing
