// SPDX-License-Identifier: Apache-2.0
//
// Messages of staged transfers, and the bounds of what they say; docs/STAGED.md has their layouts.
#pragma once

#include "links/wire.h"
#include "memory.h"

namespace kvbm_cxl {

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
/// Registrations that one message names, at most.
constexpr size_t REGISTRATIONS = 64;
/// Bytes of a request before its lists, and of an entry of each of them.
constexpr size_t REQUEST_HEAD = 1 + 8 + 2 + 2 + 4, SOURCE_BYTES = 16, REGISTRATION_BYTES = 8, RANGE_BYTES = 16;
/// Requests of a peer that are not done, at most.
constexpr size_t REQUESTS = 1024;

/// A range of a request: `registration` is an index into its list.
struct RequestRange {
    Piece piece;
    uint32_t registration = 0;
};

} // namespace kvbm_cxl
