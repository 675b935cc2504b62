// SPDX-License-Identifier: Apache-2.0
//
// What an engine counts, by the names that the pool has for it (cxl_shm_counter).
#pragma once

#include "cxl_shm.h"
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvbm_cxl {

/// Counters that many threads add to. Each thread has a share of lines that hardly any other writes, because the smallest transfers
/// take little more time than a few lines that move from core to core.
class Counters {
    static constexpr size_t first = CXL_SHM_COUNT_NIXL_POSTED;
    static constexpr size_t shares = 8;

  public:
    /// How many there are.
    static constexpr size_t count = CXL_SHM_COUNT_NIXL_ENGINES + 1 - first;
    /// A value for each of them.
    using Values = std::array<uint64_t, count>;

    /// The place of a counter among all.
    static constexpr size_t place(cxl_shm_counter counter) { return static_cast<size_t>(counter) - first; }
    /// The counter at a place.
    static constexpr cxl_shm_counter at(size_t index) { return static_cast<cxl_shm_counter>(first + index); }

    void add(cxl_shm_counter counter, uint64_t how_many = 1) {
        shares_[share_of_thread()].values[place(counter)].fetch_add(how_many, std::memory_order_relaxed);
    }
    uint64_t get(cxl_shm_counter counter) const {
        uint64_t sum = 0;
        for (const Share& share : shares_)
            sum += share.values[place(counter)].load(std::memory_order_relaxed);
        return sum;
    }
    Values all() const {
        Values sums{};
        for (const Share& share : shares_) {
            for (size_t index = 0; index < count; index++)
                sums[index] += share.values[index].load(std::memory_order_relaxed);
        }
        return sums;
    }

  private:
    struct alignas(64) Share {
        std::array<std::atomic<uint64_t>, count> values{};
    };

    static size_t share_of_thread() {
        static std::atomic<size_t> threads{0};
        static thread_local size_t mine = threads.fetch_add(1, std::memory_order_relaxed) % shares;
        return mine;
    }

    std::array<Share, shares> shares_;
};

/// Hands the values of an engine over to the pool, where `cxlctl nixl` finds them. Not for several threads at once.
class CountReport {
    Counters::Values told_{};

  public:
    /// Publishes the changes since the last call. A change that cannot be published now is published next time.
    void tell(cxl_pool_t* pool, const Counters::Values& values) noexcept;
};

} // namespace kvbm_cxl
