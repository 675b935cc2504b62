// SPDX-License-Identifier: Apache-2.0
//
// Ordinary memory of this process as the memory of transfers.
#pragma once

#include "memory.h"
#include "support/pool.h"
#include <vector>

namespace kvbm_cxl {

/// Copies pieces of ordinary memory to the pool, one after the other; visible to other hosts on return.
Status heap_to_pool(const Pool& pool, std::span<const Piece> pieces, uint64_t offset);
/// The reverse.
Status pool_to_heap(const Pool& pool, std::span<const Piece> pieces, uint64_t offset);

/// A range of ordinary memory. The application that registered it keeps it there while the object lives.
class HeapMemory : public Memory {
    std::shared_ptr<Pool> pool_;
    Piece whole_;

  public:
    HeapMemory(std::shared_ptr<Pool> pool, Piece whole) : pool_(std::move(pool)), whole_(whole) {}
    bool contains(const Piece& piece) const override;
    Status to_pool(std::span<const Piece> pieces, uint64_t offset) override { return heap_to_pool(*pool_, pieces, offset); }
    Status from_pool(std::span<const Piece> pieces, uint64_t offset) override { return pool_to_heap(*pool_, pieces, offset); }
};

/// `piece` lies in `whole`; safe for any numbers.
bool lies_in(const Piece& piece, const Piece& whole);

} // namespace kvbm_cxl
