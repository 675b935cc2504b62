// SPDX-License-Identifier: Apache-2.0
//
// The fake CUDA driver of all tests (kvbm_cxl/pool/tests/cuda/fake.c) with addresses that a CPU can follow: what tests set and see of it.
#pragma once

#include "pools.h"
#include <dlfcn.h>
#include <string>

class FakeCuda {
    void* library_;

    template <class F> F function(const char* name) const {
        void* found = dlsym(library_, name);
        CHECK(found);
        return reinterpret_cast<F>(found);
    }
    struct Setting {
        FakeCuda* fake;
        const char* name;
        void operator=(int value) const { fake->function<void (*)(const char*, int)>("fake_set")(name, value); }
    };
    struct Count {
        FakeCuda* fake;
        const char* name;
        operator int() const { return static_cast<int>(fake->function<long (*)(const char*)>("fake_get")(name)); }
    };
    /// Calls of a test's own, with the first device's context.
    template <class Call> int within(Call call) const {
        void* context = nullptr;
        CHECK(function<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0);
        CHECK(function<int (*)(void*)>("cuCtxPushCurrent_v2")(context) == 0);
        int answer = call();
        CHECK(function<int (*)(void**)>("cuCtxPopCurrent_v2")(&context) == 0);
        CHECK(function<int (*)(int)>("cuDevicePrimaryCtxRelease_v2")(0) == 0);
        return answer;
    }

  public:
    const Setting devices{this, "devices"};
    const Setting queries_until_done{this, "queries_until_done"}; // of an event, before it has come
    const Setting is_stuck{this, "is_stuck"};                     // no event comes
    const Setting copy_error{this, "copy_error"};                 // what copies end with, instead of copying
    const Count copies{this, "copies"};
    const Count registered{this, "registered"}; // ranges of memory now
    const Count pinned{this, "pinned"};         // buffers now
    const Count pins{this, "pins"};             // buffers that were made so far
    const Count failures{this, "failures"};     // calls that are still to fail

    explicit FakeCuda(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) { CHECK(library_); }
    FakeCuda(const FakeCuda&) = delete;
    FakeCuda& operator=(const FakeCuda&) = delete;

    /// One call of that name fails, after so many that succeed.
    void fail(const char* call, int after, int error) const {
        function<void (*)(const char*, int, int, int)>("fake_fail")(call, after, 1, error);
    }
    /// What no driver would have put up with.
    std::string misuse() const { return function<const char* (*)()>("fake_misuse")(); }
    uint64_t allocate(size_t len_bytes) const {
        uint64_t address = 0;
        CHECK(within([&] { return function<int (*)(uint64_t*, size_t)>("cuMemAlloc_v2")(&address, len_bytes); }) == 0);
        return address;
    }
    void release(uint64_t address) const {
        CHECK(within([&] { return function<int (*)(uint64_t)>("cuMemFree_v2")(address); }) == 0);
    }
};
