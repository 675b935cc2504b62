// SPDX-License-Identifier: Apache-2.0
//
// What tests set and see of the fake CUDA driver. Its copies happen late: when an event behind them is seen to have come.
#ifndef KVBM_CXL_NIXL_TESTS_FAKE_CUDA_H
#define KVBM_CXL_NIXL_TESTS_FAKE_CUDA_H

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct FakeCuda {
    std::atomic<int> devices{1};
    std::atomic<int> queries_until_done{0}; // of an event, before it has come
    std::atomic<bool> is_stuck{false};      // no event comes
    std::atomic<int> copy_error{0};         // what copies end with, instead of copying
    std::atomic<int> batch_calls{0};
    std::atomic<int> single_calls{0};
    std::atomic<int> registered{0}; // ranges of memory now
    std::atomic<int> pinned{0};     // buffers now
    std::atomic<int> pins{0};       // buffers that were made so far

    std::mutex mutex;
    std::map<std::string, std::pair<int, int>> failures; // call -> how many more succeed, and then the error of one
    std::vector<std::string> misuse;                     // what no driver would have put up with

    void fail(const std::string& call, int after, int error) {
        std::lock_guard lock(mutex);
        failures[call] = {after, error};
    }
    std::vector<std::string> take_misuse() {
        std::lock_guard lock(mutex);
        return std::exchange(misuse, {});
    }
};

/// Name of the function that gives the one of the library: FakeCuda* fake_cuda().
constexpr const char* fake_cuda_name = "fake_cuda";

#endif
