// SPDX-License-Identifier: Apache-2.0
//
// Options and counters of staged transfers.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvbm_cxl {

struct StagedOptions {
    uint64_t staging_bytes = 64ull << 20; // pool memory for staging, at most
    uint64_t block_bytes = 256ull << 10;  // of it per part
    uint64_t part_bytes = 32ull << 10;    // smallest part that a transfer is cut into for the sake of the pipeline
    uint32_t parts_per_link = 8;          // under way at a time
    uint64_t timeout_ms = 10'000;         // a transfer that does not move for so long has failed
};

struct StagedCounts {
    std::atomic<uint64_t> parts_asked{0}, parts_served{0}, bytes_read{0}, bytes_written{0}, failed{0}, refused{0}, in_place{0};
    std::atomic<uint64_t> served_read_bytes{0}, served_written_bytes{0}; // for peers
};

} // namespace kvbm_cxl
