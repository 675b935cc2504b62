// SPDX-License-Identifier: Apache-2.0
//
// Transfers: prepared once, posted any number of times. A transfer consists of parts, one for each way in which its bytes move; each module
// that knows such a way makes parts of its own.
#pragma once

#include "core.h"

namespace kvbm_cxl {

/// A local and a remote stretch of the same length. Both lie inside of what they name, which lives as long as the transfer.
struct Pair {
    Registration* local = nullptr;
    const RemoteRegion* remote = nullptr;
    uintptr_t local_address = 0; // as the application knows it
    uint64_t remote_address = 0; // as its owner registered it
    size_t len_bytes = 0;

    /// The local bytes in this process: in the pool's own mapping where it is pool memory.
    std::byte* local_bytes() const {
        return local->kind == RegionKind::pool ? local->pool_address + (local_address - local->base)
                                               : reinterpret_cast<std::byte*>(local_address);
    }
    /// The remote bytes in this process, for pool memory.
    std::byte* remote_pool_bytes() const { return remote->pool_address + (remote_address - remote->is.base); }
};

using Pairs = std::vector<Pair>;

/// Learns that a posted part has ended.
class Completion {
  public:
    virtual ~Completion() = default;
    /// Once for each post() that returned NIXL_IN_PROG, from any thread, when no thread touches the memory on its behalf any more.
    virtual void done(nixl_status_t status) noexcept = 0;
};

/// One way of moving some of a transfer's bytes.
class Part {
  public:
    virtual ~Part() = default;

    /// Starts. NIXL_SUCCESS or an error = it has ended already; NIXL_IN_PROG = whom->done() follows. Never called while it runs. Makes sure
    /// of the registrations by begin_use(), and gives them back when it has ended.
    virtual nixl_status_t post(const std::shared_ptr<Completion>& whom) noexcept = 0;

    /// Uses the time of an application that waits. Only while it runs.
    virtual void poll() noexcept {}

    /// Ends it early: when this returns, done() has been called, with NIXL_ERR_CANCELED or how it ended before that. In bounded time, but
    /// for a call of a file system that is under way, which cannot be ended.
    virtual void cancel() noexcept = 0;

    /// Rough time that a post takes, in microseconds; for estimates only.
    virtual uint64_t estimate_us() const noexcept { return 0; }
};

/// The registrations of a part, as users that come and go together.
class Uses {
    std::vector<Registration*> registrations_;
    const Loan* loan_ = nullptr; // one of those of a peer's memory, which all go over the same link
    uint64_t link_ = 0;

    bool are_lent() noexcept;

  public:
    /// Adds one, which outlives this, unless it is there.
    void add(Registration* registration);
    /// Uses all of them; none if one is being given back, and none of a peer's if they are not lent over the link that there is.
    bool begin() noexcept;
    /// Why begin() did not.
    Status refusal() const;
    /// What a copy that has ended is worth: whether a peer's memory was still lent then. While they are in use.
    bool were_lent() const noexcept { return !loan_ || loan_->access->is_good(link_); }
    void end() noexcept;
};

} // namespace kvbm_cxl
