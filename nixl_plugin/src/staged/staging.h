// SPDX-License-Identifier: Apache-2.0
//
// The staging blocks of an engine: scratch blocks of the pool, all of one size, at most so many. Those not in use are kept for the next
// part, and given back to the pool when there was none for a while. Used under the turn of the links.
#pragma once

#include "memory.h"
#include "support/pool.h"
#include <atomic>
#include <vector>

namespace kvbm_cxl {

class Staging;

/// A block in use; given back when it goes. The session that lets it go knows that no peer reads it any more.
class StagingBlock {
    Staging* staging_ = nullptr;
    PoolBlock block_;
    friend class Staging;

  public:
    StagingBlock() = default;
    StagingBlock(StagingBlock&& other) noexcept { *this = std::move(other); }
    StagingBlock& operator=(StagingBlock&& other) noexcept;
    ~StagingBlock() { release(); }
    void release();
    /// As release(), after a copy to it that failed: it is in use as long as any of these memories may still write to it.
    void release_after(std::vector<std::shared_ptr<Memory>> memories);
    explicit operator bool() const { return staging_; }
    uint64_t offset() const { return block_.offset(); }
};

class Staging {
  public:
    Staging(std::shared_ptr<Pool> pool, uint64_t limit_bytes, uint64_t block_bytes);
    /// Blocks that a device may still write to are never given back.
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    /// A block. NIXL_IN_PROG: all are in use, one will come back. Other failures: the pool has no room, and nothing will come back.
    Status acquire(StagingBlock& block);
    /// Gives unused blocks back to the pool, if none was used for a while.
    void trim(uint64_t now_ns);

    uint64_t block_bytes() const { return block_bytes_; }
    /// Most blocks at a time.
    size_t limit() const { return limit_; }
    size_t used() const { return used_.load(std::memory_order_relaxed); }
    size_t held() const { return held_.load(std::memory_order_relaxed); }

  private:
    friend class StagingBlock;
    /// A block that devices may still write to.
    struct Late {
        PoolBlock block;
        std::vector<std::shared_ptr<Memory>> memories;
        bool is_written() const;
    };

    void give_back(PoolBlock block);
    /// Takes back what no device writes to any more.
    void settle();

    std::shared_ptr<Pool> pool_;
    uint64_t block_bytes_;
    size_t limit_;
    std::vector<PoolBlock> free_; // the one used last is at the end, and warm
    std::vector<Late> late_;      // in use, as far as is known
    std::atomic<size_t> used_{0}, held_{0};
    bool was_used_ = false;
    uint64_t trim_ns_ = 0;
};

} // namespace kvbm_cxl
