// SPDX-License-Identifier: Apache-2.0
//
// Registered memory: what it is, whether it lies in the pool, and who uses it right now.
#ifndef KVBM_CXL_NIXL_MEMORY_H
#define KVBM_CXL_NIXL_MEMORY_H

#include "links/access.h"
#include "metadata.h"
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace kvbm_cxl {

/// What a module keeps with a registration of its kind, like an open file.
struct RegistrationExtra {
    virtual ~RegistrationExtra() = default;
};

/// A registration. NIXL's handle of it and the transfers that name it share it, so that it outlives neither.
class Registration : public std::enable_shared_from_this<Registration> {
    static constexpr uint64_t closing = uint64_t{1} << 63;
    std::atomic<uint64_t> users_{0};

  public:
    uint64_t id = 0; // never used again by the engine
    nixl_mem_t memory = DRAM_SEG;
    RegionKind kind = RegionKind::heap;
    uintptr_t base = 0; // as the application registered it
    size_t len_bytes = 0;
    uint64_t device = 0;
    uint64_t pool_offset = 0;          // RegionKind::pool: of the first byte
    std::byte* pool_address = nullptr; // RegionKind::pool: of the first byte in the pool's own mapping
    std::unique_ptr<RegistrationExtra> extra;
    std::unique_ptr<Loan> loan; // of what stands for a peer's memory here

    /// Whether a range of the application's addresses lies inside.
    bool covers(uintptr_t address, size_t len) const { return address >= base && len <= len_bytes && address - base <= len_bytes - len; }

    /// Counts a user, who may touch the memory until end_use(); false once the registration is being given back. Of a loan not before its
    /// begin() has said so: whoever closes its link looks for users behind that.
    bool begin_use() {
        if (users_.fetch_add(1, std::memory_order_seq_cst) & closing) [[unlikely]] {
            end_use();
            return false;
        }
        return true;
    }
    /// Counts one more user, of somebody who uses it already; also while it is being given back.
    void share_use() { users_.fetch_add(1, std::memory_order_relaxed); }
    void end_use() { users_.fetch_sub(1, std::memory_order_release); }

    /// No new users from now on.
    void close() { users_.fetch_or(closing, std::memory_order_acq_rel); }
    bool is_closed() const { return users_.load(std::memory_order_acquire) & closing; }
    bool is_used() const { return (users_.load(std::memory_order_seq_cst) & ~closing) != 0; }
    /// Closes it and waits until nobody uses it; false if somebody still does after `timeout_ms`.
    bool close_and_wait(uint64_t timeout_ms);
};

/// The registrations of one engine.
class Registry {
    mutable std::mutex mutex_;
    uint64_t next_id_ = 1;
    std::map<uint64_t, std::shared_ptr<Registration>> live_;

  public:
    /// Gives it a number and enters it.
    void add(const std::shared_ptr<Registration>& registration);
    void remove(uint64_t id);
    /// The live one of that number, or none.
    std::shared_ptr<Registration> find(uint64_t id) const;
    /// All that are live.
    std::vector<std::shared_ptr<Registration>> all() const;
};

/// A stretch of /proc/self/maps that shows a file or device.
struct MapEntry {
    uintptr_t start = 0;
    uintptr_t end = 0;
    uint64_t device = 0; // major and minor
    uint64_t inode = 0;
    uint64_t offset = 0; // in the file, of `start`
    bool is_shared = false;
};

/// The entries that belong to files, in the order of their addresses. Lines that are not understood are left out.
std::vector<MapEntry> parse_maps(std::string_view text);

enum class Lies { outside, inside, across };

/// Whether a range of this process's memory is a stretch of the pool, judged by where its pages come from: `entries` is the map of the
/// process, the pool is mapped from `pool_base` for `pool_bytes`. `across` = parts of it are the pool's, or all of it in another order.
Lies find_in_pool(const std::vector<MapEntry>& entries, uintptr_t pool_base, uint64_t pool_bytes, uintptr_t address, size_t len_bytes,
                  uint64_t& pool_offset);

/// Whether DRAM lies in the pool's data, and where; as Registration says it. Memory that lies in the pool partly, or in its metadata, is an
/// error, and so is it if the map of the process cannot be read, NIXL_ERR_BACKEND.
Status locate_dram(const Pool& pool, Registration& registration);

/// locate_dram(); and what is found to be a scratch block of this process is made a kept one, so that it is not handed to others when the
/// process ends.
Status resolve_dram(const Pool& pool, Registration& registration);

} // namespace kvbm_cxl

#endif
