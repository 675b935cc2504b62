// SPDX-License-Identifier: Apache-2.0
//
// Copies that this process makes by itself: between its own memory, into the pool, out of it, and within it.
#pragma once

#include "transfer.h"

namespace kvbm_cxl {

/// From where to where, as the pool's C interface has it where the pool is involved.
enum class Way : uint32_t { in = CXL_SHM_COPY_IN, out = CXL_SHM_COPY_OUT, within = CXL_SHM_COPY_WITHIN, memory };

/// One copy: addresses in this process, pool memory in the pool's own mapping. For `in` and `out` the end in the pool is called `pool`, for
/// the others the destination is.
using Copy = cxl_shm_copy_t;

/// Copies ready to be made any number of times: sorted by destination, neighbours joined, large ones cut into slices.
class CopyPlan {
  public:
    /// Copies that one thread makes without looking up: `count` from `first` on.
    struct Slice {
        size_t first = 0;
        size_t count = 0;
    };

    CopyPlan(Way way, std::vector<Copy> copies, uint64_t inline_bytes);

    Way way() const { return way_; }
    uint64_t total_bytes() const { return total_bytes_; }
    const std::vector<Copy>& copies() const { return copies_; }
    const std::vector<Slice>& slices() const { return slices_; }
    /// Short enough to be made while the application waits.
    bool is_inline() const { return slices_.size() <= 1; }

    /// Makes the copies of a slice. Visible to other hosts on return. NIXL_SUCCESS, or an error that was reported.
    nixl_status_t make(const Slice& slice) const noexcept;
    nixl_status_t make_all() const noexcept;

  private:
    nixl_status_t make(const Copy* copies, size_t count) const noexcept;

    Way way_;
    /// Something is written twice, or written and read: copies are made one after the other, in the order in which they were given, and one
    /// onto itself as memmove() makes it.
    bool is_in_order_ = false;
    std::vector<Copy> copies_;
    std::vector<Slice> slices_;
    uint64_t total_bytes_ = 0;
};

/// A part that makes the copies of a plan: at once if it is short, else on the core's worker threads, with the help of threads that poll.
/// `uses` are the registrations that the copies touch.
std::unique_ptr<Part> make_direct_part(std::shared_ptr<Core> core, CopyPlan plan, Uses uses);

} // namespace kvbm_cxl
