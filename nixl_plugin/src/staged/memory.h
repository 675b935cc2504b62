// SPDX-License-Identifier: Apache-2.0
//
// What staged transfers know of memory that is not theirs: the engine's registrations implement this, for the heap, for pool memory and for
// GPU memory.
#pragma once

#include "support/status.h"
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

namespace kvbm_cxl {

/// A stretch of memory, by the address that its owner knows it by.
struct Piece {
    uint64_t address = 0;
    uint64_t len_bytes = 0;
};

/// Memory that transfers copy from and to. It is there for as long as the object lives; the functions are called by one thread at a
/// time, but not always the same one.
class Memory {
  public:
    virtual ~Memory() = default;

    /// Whether a range lies in it, as a whole. The numbers come from another process and may be anything.
    virtual bool contains(const Piece& piece) const = 0;
    /// Copies pieces, one after the other, to `offset` of the pool; other hosts see them when this returns.
    virtual Status to_pool(std::span<const Piece> pieces, uint64_t offset) = 0;
    /// Whether a device may still write what a to_pool() that failed was to copy: until it may not, the place is used for nothing else.
    virtual bool may_still_write() { return false; }
    /// Copies from `offset` of the pool to pieces, what other hosts have made visible before. A failure may leave anything in them.
    virtual Status from_pool(std::span<const Piece> pieces, uint64_t offset) = 0;
    /// Where a piece lies in the pool, for memory that does: a peer reads it in place, without staging. Asked for every range: cheap.
    virtual std::optional<uint64_t> pool_offset(const Piece&) const { return std::nullopt; }
    /// Makes this host's stores to a piece that lies in the pool visible to the others.
    virtual Status publish(const Piece&) { return {}; }
};

/// The memory of a registration of this engine, as peers name it, in use while the result lives; nullptr if there is none (any more).
/// Deregistering waits until no session uses it: that takes one copy of at most a staging block.
using FindMemory = std::function<std::shared_ptr<Memory>(uint64_t registration)>;

} // namespace kvbm_cxl
