// SPDX-License-Identifier: Apache-2.0
#ifndef KVBM_CXL_NIXL_COUNTERS_H
#define KVBM_CXL_NIXL_COUNTERS_H

#include <atomic>
#include <cstdint>

namespace kvbm_cxl {

/// A number that threads add to.
class Counter {
    std::atomic<uint64_t> value_{0};

  public:
    void add(uint64_t count = 1) { value_.fetch_add(count, std::memory_order_relaxed); }
    uint64_t get() const { return value_.load(std::memory_order_relaxed); }
};

/// What an engine counts from its start on.
struct Counters {
    Counter transfers;           // completed
    Counter transfers_failed;    // not completed, cancelled ones aside
    Counter transfers_cancelled; // released while active
    Counter disconnects;         // of those that failed, because the peer was gone
    Counter written_bytes;       // into the pool, directly
    Counter read_bytes;          // out of the pool, directly
    Counter local_bytes;         // between memory of this process
    Counter staged_bytes;        // through staging, as initiator
    Counter served_bytes;        // through staging, for peers
    Counter objects_published;
    Counter objects_existed; // WRITEs of objects that were there already
    Counter objects_read;
    Counter objects_missed; // READs of objects that were not there
    Counter device_bytes;   // between GPUs and the pool
    Counter notifs_sent;
    Counter notifs_received;
};

} // namespace kvbm_cxl

#endif
