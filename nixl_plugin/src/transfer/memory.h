// SPDX-License-Identifier: Apache-2.0
//
// Registered memory: what it is, whether it lies in the pool, and who uses it right now.
#pragma once

#include "links/access.h"
#include "metadata.h"
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
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
    uint64_t id = 0; // the engine gives it to no other memory
    nixl_mem_t memory = DRAM_SEG;
    RegionKind kind = RegionKind::heap;
    uintptr_t base = 0; // as the application registered it
    size_t len_bytes = 0;
    uint64_t device = 0;
    uint64_t pool_offset = 0;          // RegionKind::pool: of the first byte
    std::byte* pool_address = nullptr; // RegionKind::pool: of the first byte in the pool's own mapping
    std::string label;                 // metaInfo, for kinds that it distinguishes
    std::unique_ptr<RegistrationExtra> extra;
    std::unique_ptr<Loan> loan; // of what stands for a peer's memory here

    /// Whether a range of the application's addresses lies inside.
    bool covers(uintptr_t address, size_t len) const { return address >= base && len <= len_bytes && address - base <= len_bytes - len; }

    /// Counts a user, who may touch the memory until end_use(); false once the registration is being given back. Of a loan not before its
    /// begin() has said so: the thread that closes its link looks for users after that.
    bool begin_use() {
        if (users_.fetch_add(1, std::memory_order_seq_cst) & closing) [[unlikely]] {
            end_use();
            return false;
        }
        return true;
    }
    /// Counts one more use by a transfer that uses it already; also while it is being given back.
    void share_use() { users_.fetch_add(1, std::memory_order_relaxed); }
    void end_use() { users_.fetch_sub(1, std::memory_order_release); }

    /// No new users from now on.
    void close() { users_.fetch_or(closing, std::memory_order_acq_rel); }
    bool is_closed() const { return users_.load(std::memory_order_acquire) & closing; }
    bool is_used() const { return (users_.load(std::memory_order_seq_cst) & ~closing) != 0; }
    /// Closes it and waits until no transfer uses it; false if one still does after `timeout_ms`.
    bool close_and_wait(uint64_t timeout_ms);
};

/// The registrations of one engine.
class Registry {
    mutable std::mutex mutex_;
    struct Number {
        uint64_t is = 0;
        size_t times_former = 0; // in former_
    };
    /// Which memory it is.
    using Key = std::tuple<RegionKind, uintptr_t, size_t, uint64_t, uint64_t, std::string>;
    static Key key_of(const Registration& registration);

    uint64_t next_id_ = 1;
    std::multimap<uint64_t, std::shared_ptr<Registration>> live_;
    /// Numbers of memory that is or was registered, and of the latter which was last given back when.
    std::map<Key, Number> numbers_;
    std::deque<Key> former_;

  public:
    /// Gives it a number and enters it. Memory that was registered before has its number again, so that its metadata are the same:
    /// NIXL refuses an agent's new metadata that differ for memory of the same place and length. After `most_former` others it may have
    /// been forgotten.
    void add(const std::shared_ptr<Registration>& registration);
    static constexpr size_t most_former = 1 << 16;
    void remove(const Registration& registration);
    /// The live one of that number that is not being given back, or none.
    std::shared_ptr<Registration> find(uint64_t id) const;
    /// All that are live.
    std::vector<std::shared_ptr<Registration>> all() const;
};

enum class Lies { outside, inside, across };

/// Whether a range of this process's memory is a stretch of the pool, judged by where its pages come from: `entries` are the mappings of
/// the range, `of_pool` those of the pool, which is mapped from `pool_base` for `pool_bytes`. `across` = parts of it are the pool's, or all
/// of it in another order.
Lies find_in_pool(const std::vector<MapEntry>& entries, const std::vector<MapEntry>& of_pool, uintptr_t pool_base, uint64_t pool_bytes,
                  uintptr_t address, size_t len_bytes, uint64_t& pool_offset);

/// Whether DRAM lies in the pool's data, and where; as Registration says it. Memory that lies in the pool partly, or in its metadata, is an
/// error, and so is it if the map of the process cannot be read, NIXL_ERR_BACKEND.
Status locate_dram(const Pool& pool, Registration& registration);

/// locate_dram(); and a scratch block of this process becomes a kept one, so that it is not handed to others when the
/// process ends.
Status resolve_dram(const Pool& pool, Registration& registration);

} // namespace kvbm_cxl
