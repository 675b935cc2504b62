// SPDX-License-Identifier: Apache-2.0
//
// Memory of the pool as the memory of staged transfers.
#pragma once

#include "memory.h"
#include "support/pool.h"

namespace kvbm_cxl {

class PoolMemory : public Memory {
    std::shared_ptr<Pool> pool_;
    Piece whole_;
    uint64_t offset_; // in the pool, of the first byte

    Status copy(std::span<const Piece> pieces, uint64_t offset, bool is_to_pool);

  public:
    PoolMemory(std::shared_ptr<Pool> pool, Piece whole, uint64_t offset) : pool_(std::move(pool)), whole_(whole), offset_(offset) {}
    bool contains(const Piece& piece) const override;
    Status to_pool(std::span<const Piece> pieces, uint64_t offset) override { return copy(pieces, offset, true); }
    Status from_pool(std::span<const Piece> pieces, uint64_t offset) override { return copy(pieces, offset, false); }
    std::optional<uint64_t> pool_offset(const Piece& piece) const override { return offset_ + (piece.address - whole_.address); }
    Status publish(const Piece& piece) override;
};

} // namespace kvbm_cxl
