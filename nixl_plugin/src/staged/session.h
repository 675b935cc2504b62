// SPDX-License-Identifier: Apache-2.0
//
// What goes on over a link: parts asked of the peer, parts that the peer asks for. For staged.cpp, requester.cpp and responder.cpp.
#ifndef KVBM_CXL_NIXL_STAGED_SESSION_H
#define KVBM_CXL_NIXL_STAGED_SESSION_H

#include "staged.h"

namespace kvbm_cxl {

/// Messages of staged transfers; docs/STAGED.md has their layouts.
namespace kind {
constexpr Kind limits{16};
constexpr Kind read{17};
constexpr Kind data{18};
constexpr Kind taken{19};
constexpr Kind safe{20};
constexpr Kind write{21};
constexpr Kind written{22};
} // namespace kind

/// Smallest staging block of any engine: what a peer can take before it has said more.
constexpr uint64_t LEAST_BLOCK_BYTES = 64 << 10;
/// Largest: the length of a range in a message has 32 bits.
constexpr uint64_t MOST_BLOCK_BYTES = 1 << 30;
/// Bytes of a message of limits: its kind and the size of a staging block.
constexpr size_t LIMITS_BYTES = 1 + 8;
/// Registrations that one message names.
constexpr size_t REGISTRATIONS = 64;
/// Bytes of a request before its lists, and of an entry of each of them.
constexpr size_t REQUEST_HEAD = 1 + 8 + 2 + 2 + 4, SOURCE_BYTES = 16, REGISTRATION_BYTES = 8, RANGE_BYTES = 16;
/// Parts that a peer may have asked for and that are not done.
constexpr size_t REQUESTS = 1024;

/// A part of a transfer of this engine, under way.
struct AskedPart {
    std::shared_ptr<Transfer> transfer;
    Cursor begin;
    uint64_t len_bytes = 0;
    StagingBlock block;     // of a write that is not in place
    bool is_copied = false; // of a read: only the peer's word is missing that the data were its own
};

/// A range of a request: `registration` is an index into its list.
struct AskedRange {
    Piece piece;
    uint32_t registration = 0;
};

/// What a peer asks for.
struct PeerRequest {
    Direction direction = Direction::read;
    uint64_t part = 0;
    uint64_t len_bytes = 0;
    std::vector<Piece> sources; // in the pool, by offset. Of a write what to copy; of a read, once it is served, where to
    std::vector<uint64_t> registrations;
    std::vector<AskedRange> ranges;
};

struct Session {
    explicit Session(Link& of) : link(of) {}

    Link& link;
    /// What the peer's staging takes for one part.
    uint64_t peer_block_bytes = LEAST_BLOCK_BYTES;
    /// Staging blocks of this engine that are in use here.
    size_t blocks = 0;

    uint64_t next_part = 1;
    std::deque<std::shared_ptr<Transfer>> active; // that have parts to ask for
    std::unordered_map<uint64_t, AskedPart> parts;

    // Apart from each other: a read may wait for a staging block that comes back only when a write was served.
    std::deque<PeerRequest> reads, writes;
    std::unordered_map<uint64_t, StagingBlock> lent; // by the peer's part, until it says that it has taken the data
};

} // namespace kvbm_cxl

#endif
