// SPDX-License-Identifier: Apache-2.0
#include "pool_memory.h"
#include "heap.h"
#include <vector>

namespace kvbm_cxl {

bool PoolMemory::contains(const Piece& piece) const {
    return lies_in(piece, whole_);
}

Status PoolMemory::copy(std::span<const Piece> pieces, uint64_t offset, bool is_to_pool) {
    std::vector<cxl_shm_copy_t> copies;
    copies.reserve(pieces.size());
    for (const Piece& piece : pieces) {
        std::byte *own = nullptr, *other = nullptr;
        if (Status found = pool_->range(offset_ + (piece.address - whole_.address), piece.len_bytes, own); !found.ok())
            return found;
        if (Status found = pool_->range(offset, piece.len_bytes, other); !found.ok())
            return found;
        copies.push_back({is_to_pool ? other : own, is_to_pool ? own : other, piece.len_bytes});
        offset += piece.len_bytes;
    }
    int status = cxl_shm_copy_list(CXL_SHM_COPY_WITHIN, copies.data(), copies.size());
    return status == CXL_SHM_OK ? Status() : pool_failure(status, "copying within the pool");
}

Status PoolMemory::publish(const Piece& piece) {
    std::byte* own = nullptr;
    if (Status found = pool_->range(offset_ + (piece.address - whole_.address), piece.len_bytes, own); !found.ok())
        return found;
    int status = cxl_shm_flush(own, piece.len_bytes);
    return status == CXL_SHM_OK ? Status() : pool_failure(status, "making a range of the pool visible");
}

} // namespace kvbm_cxl
