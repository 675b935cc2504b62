// SPDX-License-Identifier: Apache-2.0
//
// What tests of parts of the engine share: pools in a folder, and parts run to their end.
#pragma once

#include "transfer/core.h"
#include "transfer/transfer.h"
#include "world.h"

namespace testing {

using world::Child;
using world::Folder;

template <class Condition> void await(const char* what, Condition condition) {
    bool came = world::wait_until(condition, [] { world::nap(100); });
    if (!came)
        std::fprintf(stderr, "waited in vain for %s\n", what);
    CHECK(came);
}

/// Options as they are without parameters, of a new pool in the folder. `coherence` is the value of CXL_COHERENCE.
inline kvbm_cxl::Options new_pool(const Folder& folder, const std::string& name, const char* coherence, uint64_t cell_bytes = 0) {
    kvbm_cxl::Options options;
    CHECK_OK(kvbm_cxl::read_options({{"pool", folder.path(name)}}, options));
    setenv("CXL_COHERENCE", coherence, 1);
    world::format(options.pool, "48M", 4, 64, 16, 1 << 20, cell_bytes);
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
