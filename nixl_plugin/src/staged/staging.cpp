// SPDX-License-Identifier: Apache-2.0
#include "staging.h"
#include <algorithm>
#include <utility>

namespace kvbm_cxl {

namespace {
/// Unused blocks go back to the pool when none was used for so long.
constexpr uint64_t TRIM_NS = 2'000'000'000;
} // namespace

StagingBlock& StagingBlock::operator=(StagingBlock&& other) noexcept {
    if (this != &other) {
        release();
        staging_ = std::exchange(other.staging_, nullptr);
        block_ = std::move(other.block_);
    }
    return *this;
}

void StagingBlock::release() {
    if (Staging* staging = std::exchange(staging_, nullptr))
        staging->give_back(std::move(block_));
}

void StagingBlock::release_after(std::vector<std::shared_ptr<Memory>> memories) {
    Staging* staging = std::exchange(staging_, nullptr);
    if (!staging)
        return;
    Staging::Late late{std::move(block_), std::move(memories)};
    if (late.is_written())
        staging->late_.push_back(std::move(late));
    else
        staging->give_back(std::move(late.block));
}

bool Staging::Late::is_written() const {
    return std::any_of(memories.begin(), memories.end(), [](auto& memory) { return memory && memory->may_still_write(); });
}

Staging::Staging(std::shared_ptr<Pool> pool, uint64_t limit_bytes, uint64_t block_bytes)
    : pool_(std::move(pool)), block_bytes_(block_bytes), limit_(std::max<size_t>(2, limit_bytes / block_bytes)) {
    free_.reserve(limit_);
    late_.reserve(limit_);
}

Staging::~Staging() {
    settle();
    // The device may write there for as long as this process lives, whatever became of the engine.
    if (!late_.empty())
        (void)new std::vector<Late>(std::move(late_));
}

void Staging::settle() {
    for (size_t at = late_.size(); at-- > 0;) {
        if (late_[at].is_written())
            continue;
        PoolBlock block = std::move(late_[at].block);
        late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(at));
        give_back(std::move(block));
    }
}

Status Staging::acquire(StagingBlock& block) {
    settle();
    PoolBlock found;
    if (!free_.empty()) {
        found = std::move(free_.back());
        free_.pop_back();
    } else if (held() >= limit_) {
        return {NIXL_IN_PROG, "CXL: all staging blocks are in use"};
    } else if (Status status = PoolBlock::allocate(pool_, block_bytes_, found); !status.ok()) {
        // What others of this engine use comes back; what the rest of the pool is used for may not.
        if (used() > 0)
            return {NIXL_IN_PROG, status.reason()};
        return status.within("staging for memory outside the pool");
    } else {
        held_.fetch_add(1, std::memory_order_relaxed);
    }
    used_.fetch_add(1, std::memory_order_relaxed);
    was_used_ = true;
    block.release();
    block.staging_ = this;
    block.block_ = std::move(found);
    return {};
}

void Staging::give_back(PoolBlock block) {
    used_.fetch_sub(1, std::memory_order_relaxed);
    free_.push_back(std::move(block));
}

void Staging::trim(uint64_t now_ns) {
    settle();
    if (free_.empty() || now_ns < trim_ns_)
        return;
    trim_ns_ = now_ns + TRIM_NS;
    if (std::exchange(was_used_, false) || used() > 0)
        return;
    held_.fetch_sub(free_.size(), std::memory_order_relaxed);
    free_.clear();
}

} // namespace kvbm_cxl
