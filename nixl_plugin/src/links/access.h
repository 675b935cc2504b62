// SPDX-License-Identifier: Apache-2.0
//
// A peer's memory in the pool, as those see it who copy to and from it by themselves, without the turn and without a word of its owner.
//
//     begin to use the memory;                        // seen by a thread that is about to close a link
//     uint64_t link = loan.begin();                   // 0: not lent (over the link that there is now): end the use, borrow it, try again
//     copy;
//     bool is_right = loan.access->is_good(link);     // the owner cannot have used the memory for something else meanwhile
//     end the use;
//
// docs/STAGED.md, "Direct copies", says why that is so.
#pragma once

#include "support/pool.h"
#include <atomic>

namespace kvbm_cxl {

/// How long ago a link may have been seen open for a copy to be right, in nanoseconds.
constexpr uint64_t GOOD_NS = 200'000'000;
/// How long an owner that has closed a link waits before it counts what it had lent over it as free: longer than that.
constexpr uint64_t LAST_COPIES_NS = 500'000'000;

/// The way to the memory of an engine.
class Access {
    std::atomic<uint64_t> link_{0};
    std::atomic<cxl_ring_t> ring_{CXL_SHM_RING_NONE};
    std::atomic<uint64_t> taken_back_{0}; // how often some of it was taken back
    std::atomic<uint64_t> seen_ns_{0};    // when the link was open for certain, by a clock that runs while the system sleeps
    std::shared_ptr<Pool> pool_;

    bool look(uint64_t link) noexcept;

  public:
    /// To an engine that is not linked.
    explicit Access(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}

    /// Number of the link; 0 while there is none.
    uint64_t link() const { return link_.load(std::memory_order_seq_cst); }
    /// A number that changes when some of the memory is revoked: earlier loans then need a check.
    uint64_t taken_back() const { return taken_back_.load(std::memory_order_acquire); }
    /// Whether the link of that number is open, as it was within the last GOOD_NS at least. Looks at the pool only where that is not known.
    bool is_good(uint64_t link) noexcept;

    /// Under the turn: a link is there; no copy begins to use memory over it any more; it is looked at, so that others need not.
    void open(uint64_t link, cxl_ring_t ring);
    void close() { link_.store(0, std::memory_order_seq_cst); }
    void take_back() { taken_back_.fetch_add(1, std::memory_order_release); }
    void refresh() noexcept { (void)look(link()); }
};

/// A registration of a peer, lent to this engine or to be borrowed.
struct Loan {
    const std::shared_ptr<Access> access;
    const uint64_t registration;
    /// The link over which its owner has said that it is lent; 0 for none.
    std::atomic<uint64_t> over{0};

    Loan(std::shared_ptr<Access> to, uint64_t number) : access(std::move(to)), registration(number) {}

    /// The link over which the memory is lent now, or 0. For users that were counted before.
    uint64_t begin() const {
        uint64_t link = access->link();
        return over.load(std::memory_order_seq_cst) == link ? link : 0;
    }
    /// Its owner takes it back: no transfer begins to use it before it is borrowed again. A later question sees all that began.
    void take_back() {
        over.store(0, std::memory_order_seq_cst);
        access->take_back();
    }
};

} // namespace kvbm_cxl
