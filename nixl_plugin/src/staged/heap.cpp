// SPDX-License-Identifier: Apache-2.0
#include "heap.h"
#include <cstring>

namespace kvbm_cxl {

namespace {
/// Pieces up to this size are collected before they are copied to the pool, and after they are copied from there: a copy has a fence and a
/// look-up of its own, and two pieces in a line would write it twice.
constexpr size_t SMALL_BYTES = 4'096;
/// Collected at a time; stays in the cache of the core.
constexpr size_t COLLECTED_BYTES = 32 << 10;

void* at(uint64_t address) {
    return reinterpret_cast<void*>(address);
}

std::byte* collected() {
    alignas(64) thread_local std::byte bytes[COLLECTED_BYTES];
    return bytes;
}

/// How many of the pieces to collect, and their bytes: none if the first is large.
size_t small_ones(std::span<const Piece> pieces, size_t& len_bytes) {
    size_t count = 0;
    len_bytes = 0;
    while (count < pieces.size() && pieces[count].len_bytes <= SMALL_BYTES && len_bytes + pieces[count].len_bytes <= COLLECTED_BYTES)
        len_bytes += pieces[count++].len_bytes;
    return count;
}

/// Walks through pieces in runs: `whole` for a large one, `run` for several small ones.
template <class Whole, class Run>
Status for_runs(const Pool& pool, std::span<const Piece> pieces, uint64_t offset, const Whole& whole, const Run& run) {
    while (!pieces.empty()) {
        size_t len_bytes = 0, count = small_ones(pieces, len_bytes);
        bool is_large = count == 0;
        if (is_large)
            count = 1, len_bytes = pieces[0].len_bytes;
        std::byte* place = nullptr;
        if (len_bytes > 0) {
            if (Status status = pool.range(offset, len_bytes, place); !status.ok())
                return status;
            int status = is_large ? whole(place, pieces[0]) : run(place, pieces.first(count), len_bytes);
            if (status != CXL_SHM_OK)
                return pool_failure(status, text("copying ", len_bytes, " bytes at offset ", hex(offset), " of the pool"));
        }
        pieces = pieces.subspan(count);
        offset += len_bytes;
    }
    return {};
}
} // namespace

bool lies_in(const Piece& piece, const Piece& whole) {
    return piece.address >= whole.address && piece.len_bytes <= whole.len_bytes &&
           piece.address - whole.address <= whole.len_bytes - piece.len_bytes;
}

Status heap_to_pool(const Pool& pool, std::span<const Piece> pieces, uint64_t offset) {
    return for_runs(
        pool, pieces, offset,
        [](std::byte* place, const Piece& piece) { return cxl_shm_copy_in(place, at(piece.address), piece.len_bytes); },
        [](std::byte* place, std::span<const Piece> run, size_t len_bytes) {
            std::byte* next = collected();
            for (const Piece& piece : run) {
                std::memcpy(next, at(piece.address), piece.len_bytes);
                next += piece.len_bytes;
            }
            return cxl_shm_copy_in(place, collected(), len_bytes);
        });
}

Status pool_to_heap(const Pool& pool, std::span<const Piece> pieces, uint64_t offset) {
    return for_runs(
        pool, pieces, offset,
        [](std::byte* place, const Piece& piece) { return cxl_shm_copy_out(at(piece.address), place, piece.len_bytes); },
        [](std::byte* place, std::span<const Piece> run, size_t len_bytes) {
            int status = cxl_shm_copy_out(collected(), place, len_bytes);
            const std::byte* next = collected();
            for (const Piece& piece : run) {
                if (status != CXL_SHM_OK)
                    break;
                std::memcpy(at(piece.address), next, piece.len_bytes);
                next += piece.len_bytes;
            }
            return status;
        });
}

bool HeapMemory::contains(const Piece& piece) const {
    return lies_in(piece, whole_);
}

} // namespace kvbm_cxl
