// SPDX-License-Identifier: Apache-2.0
//
// What transfers with objects and with files have in common: memory of this process on one side, and calls that take their time.
#pragma once

#include "transfer.h"
#include <functional>

namespace kvbm_cxl {

/// A stretch of this process's memory.
struct LocalPiece {
    std::byte* address = nullptr;
    size_t len_bytes = 0;
    bool is_pool = false; // in the pool's own mapping

    /// To be called before bytes that other hosts may have written are read from it, or before it is written.
    Status refresh() const;
    /// To be called after it was written with ordinary stores: other hosts see them when this returns.
    Status publish() const;
};

/// The local side of a pair.
LocalPiece local_piece(const Pair& pair);

/// A part that one thread does with calls that wait. Small ones end inside post(), all others run on a worker.
class StoragePart : public Part {
    struct Run; // one post

    std::shared_ptr<Core> core_;
    Uses uses_;
    uint64_t len_bytes_ = 0;
    bool ends_inside_post_ = false;
    std::string what_;
    std::shared_ptr<Run> run_; // of the last post

  protected:
    using StopFlag = std::atomic<bool>;

    /// Does all of it; looks at `stop` now and then, and ends with NIXL_ERR_CANCELED once it is set.
    virtual Status transfer(const StopFlag& stop) = 0;

    /// `what` names the part in messages. Pairs of VRAM are NIXL_ERR_NOT_SUPPORTED.
    Status prepare(std::shared_ptr<Core> core, const Pairs& pairs, std::string what);

  public:
    /// Derived classes cancel in their own destructors, before what transfer() uses goes.
    ~StoragePart() override;
    nixl_status_t post(const std::shared_ptr<Completion>& whom) noexcept override;
    void cancel() noexcept override;
    uint64_t estimate_us() const noexcept override;
};

} // namespace kvbm_cxl
