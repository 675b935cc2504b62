// SPDX-License-Identifier: Apache-2.0
//
// A staged transfer: ranges of local memory against ranges of a peer's registrations.
#pragma once

#include "memory.h"
#include <atomic>
#include <string>
#include <vector>

namespace kvbm_cxl {

enum class Direction { read, write };

/// As many bytes here as there.
struct Range {
    uint64_t local_address = 0;
    uint64_t remote_address = 0;
    uint64_t len_bytes = 0;
    uint64_t registration = 0; // the peer's
    uint32_t memory = 0;       // which of the plan's memories the local address is of
};

/// What to transfer; made once, used as often as one likes.
struct Plan {
    std::string engine_id; // of the peer
    std::vector<std::shared_ptr<Memory>> memories;
    std::vector<Range> ranges;
    uint64_t len_bytes = 0;

    /// NIXL_ERR_INVALID_PARAM for a range that its local memory does not have, or that ends beyond all addresses.
    static Status make(std::string engine_id, std::vector<std::shared_ptr<Memory>> memories, std::span<const Range> ranges,
                       std::shared_ptr<const Plan>& plan);
};

/// How far a walk through a plan is.
struct Cursor {
    size_t range = 0;
    uint64_t in_range_bytes = 0;
};

/// One transfer under way, or done. status() may be asked by any thread at any time; once it is not NIXL_IN_PROG, no thread touches the
/// local memory any more on its behalf.
class Transfer {
  public:
    nixl_status_t status() const { return status_.load(std::memory_order_acquire); }
    /// Why it failed; empty before it has.
    std::string reason() const { return status() < 0 ? reason_ : std::string(); }
    uint64_t done_bytes() const { return done_bytes_.load(std::memory_order_relaxed); }
    Direction direction() const { return direction_; }

  private:
    friend class Requester;
    Transfer(std::shared_ptr<const Plan> plan, Direction direction) : plan_(std::move(plan)), direction_(direction) {}

    void end(const Status& status) noexcept {
        try {
            reason_ = status.reason();
        } catch (const std::exception&) {
            // No memory for the reason. The end is reported without it.
        }
        plan_.reset();
        status_.store(status.code(), std::memory_order_release);
    }
    bool is_ended() const { return status() != NIXL_IN_PROG; }

    std::shared_ptr<const Plan> plan_; // reset at the end
    Direction direction_;
    std::atomic<nixl_status_t> status_{NIXL_IN_PROG};
    std::atomic<uint64_t> done_bytes_{0};
    std::string reason_;

    // Under the turn.
    Cursor cursor_;           // where the next part begins
    uint64_t part_bytes_ = 0; // size of its parts
    size_t parts_under_way_ = 0;
    uint64_t moved_ns_ = 0; // when a part of it was last issued or done
};

} // namespace kvbm_cxl
