// SPDX-License-Identifier: Apache-2.0
//
// What the parts of one engine share, and how engines of one process find each other.
#pragma once

#include "memory.h"
#include "support/counters.h"
#include "support/workers.h"

namespace kvbm_cxl {

/// Notifications that have arrived and wait for getNotifs(), in order.
class Inbox {
    std::mutex mutex_;
    notif_list_t waiting_;
    std::atomic<bool> has_any_{false};

  public:
    /// Adds a message of an agent. From any thread.
    void put(std::string agent, std::string message);
    /// Appends all that wait to `notifs`.
    void take(notif_list_t& notifs);
};

/// How many forks this process is away from the first one that asked.
inline std::atomic<uint32_t> forks{0};
/// Counts them from now on; how many there were.
uint32_t watch_forks();

/// One engine, as its modules know it. Modules keep a shared pointer; it keeps none of them.
struct Core {
    std::string agent;
    uint64_t id = 0; // random, of this engine
    Options options;
    bool has_thread = false; // of progress, which the application asks for when it makes its agent
    std::shared_ptr<Pool> pool;
    Registry registry;
    Inbox inbox;
    Counters counters;
    Workers workers;

    explicit Core(const Options& how) : options(how), workers(how.worker_threads, [this] { bind_worker(); }) {}
    /// Has the calling thread run where CXL_CPUS wants workers.
    void bind_worker() const noexcept;
    /// Its engine ends or has ended, though requests of others may keep this.
    std::atomic<bool> has_ended{false};
    /// Made by a process that this one was forked from: its threads are not here, and what they had locked stays locked.
    bool is_of_parent() const { return forks.load(std::memory_order_relaxed) != made_in_; }

  private:
    const uint32_t made_in_ = watch_forks();
};

/// Another engine, or this one, that connection information was loaded of.
struct Peer {
    std::string agent; // as NIXL names it here
    ConnInfo info;
    std::weak_ptr<Core> local;             // set if it is of this process
    bool is_local = false;                 // of this process
    bool is_same_pool = false;             // uses the same pool: nothing can be sent to it otherwise
    bool is_coherent = false;              // sees this process's writes at once: of the same machine, or in a coherent pool
    std::atomic<uint64_t> looked_up_ns{0}; // when is_gone was last looked up
    std::atomic<bool> is_gone{false};      // it is proven to have ended, or its name is another engine's
};

/// Registered memory of a peer, as its metadata says.
struct RemoteRegion {
    std::shared_ptr<Peer> peer;
    PublicRegion is;
    nixl_mem_t memory = DRAM_SEG;
    std::byte* pool_address = nullptr; // RegionKind::pool of the same pool: in this process
    /// Of this process: the registration itself. Of another's pool memory: what stands for it here, so that it can be given back when its
    /// owner asks for it. Of other memory: none.
    std::shared_ptr<Registration> own;
    bool is_in_process = false;

    bool covers(uint64_t address, size_t len) const {
        return address >= is.base && len <= is.len_bytes && address - is.base <= is.len_bytes - len;
    }
};

/// What a registration tells the peers.
PublicRegion public_region(const Core& core, const Registration& registration);

/// Makes an engine known to the others of its process, until it is destroyed.
void enter_engine(const std::shared_ptr<Core>& core);

/// The living engine of this process with that number, or none.
std::shared_ptr<Core> find_engine(uint64_t id);

} // namespace kvbm_cxl
