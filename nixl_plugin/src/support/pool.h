// SPDX-License-Identifier: Apache-2.0
//
// An open pool, and the pool's statuses as NIXL's.
#pragma once

#include "cxl_shm.h"
#include "maps.h"
#include "options.h"
#include <array>
#include <memory>

namespace kvbm_cxl {

using PoolUuid = std::array<uint8_t, 16>;

/// NIXL's status for a cxl_shm_status.
nixl_status_t nixl_status_of(int cxl_status);

/// A failed call of the pool's C interface, with its last error of this thread as the reason. `what` names the operation.
Status pool_failure(int cxl_status, std::string_view what);

/// A joined pool. Engines of one process that name the same pool share it: the prefix cache of a pool can be opened once in a process.
class Pool {
    cxl_pool_t* handle_ = nullptr;
    cxl_shm_info_t info_{};
    mutable OwnMaps maps_;
    mutable std::mutex entries_mutex_;
    mutable std::vector<MapEntry> entries_; // of the pool's own mapping

    Pool() = default;

  public:
    /// The pool that the options name, joined; opened unless this process (not a parent that forked it) has it open through this call.
    static Status open(const Options& options, std::shared_ptr<Pool>& pool);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    cxl_pool_t* handle() const { return handle_; }
    const cxl_shm_info_t& info() const { return info_; }
    PoolUuid uuid() const;
    /// Hosts are kept coherent by the hardware.
    bool is_coherent() const { return info_.flags & CXL_SHM_INFO_COHERENT; }
    /// Address of offset 0 in this process.
    std::byte* base() const { return static_cast<std::byte*>(info_.base); }

    /// The mappings of this process.
    OwnMaps& maps() const { return maps_; }
    /// Those of the pool itself, read once: which part of which device is where in the pool never changes.
    Status own_entries(const std::vector<MapEntry>*& entries) const;

    /// The address of a range that lies in the blocks; an error for any other.
    Status range(uint64_t offset, size_t len_bytes, std::byte*& address) const;
    /// Lets the system map the pages of a range now instead of one by one in the middle of a transfer: such a fault takes longer than the
    /// copy of its page. Where it cannot, nothing changes.
    void map_ahead(std::byte* address, size_t len_bytes) const;
};

/// A scratch block of a pool, freed with this object.
class PoolBlock {
    std::shared_ptr<Pool> pool_;
    std::byte* address_ = nullptr;
    size_t len_bytes_ = 0;

  public:
    PoolBlock() = default;
    PoolBlock(PoolBlock&& other) noexcept { *this = std::move(other); }
    PoolBlock& operator=(PoolBlock&& other) noexcept;
    ~PoolBlock() { free(); }

    static Status allocate(std::shared_ptr<Pool> pool, size_t len_bytes, PoolBlock& block);
    void free();

    std::byte* address() const { return address_; }
    size_t len_bytes() const { return len_bytes_; }
    /// Offset in the pool.
    uint64_t offset() const { return static_cast<uint64_t>(address_ - pool_->base()); }
};

} // namespace kvbm_cxl
