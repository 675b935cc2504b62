// SPDX-License-Identifier: Apache-2.0
//
// An engine's other ends: engines of this process, reached directly, and of other processes, reached over links. What the links and the
// staged transfers do not know of the engine, they get here.
#pragma once

#include "cuda/gpus.h"
#include "notes.h"
#include "staged/staged.h"
#include "transfer/transfer.h"

namespace kvbm_cxl {

class StagedRun;

class Peering : public std::enable_shared_from_this<Peering> {
    const std::shared_ptr<Core> core_;
    const std::shared_ptr<cuda::Gpus> gpus_; // none where there are no GPUs
    std::unique_ptr<Links> links_;
    std::unique_ptr<Staged> staged_;
    CountReport report_; // under the turn of the links

    Peering(std::shared_ptr<Core> core, std::shared_ptr<cuda::Gpus> gpus);
    Status receive(Notification& note, notif_list_t& notifs);

  public:
    /// Begins to listen for peers, and to serve them.
    static Status create(std::shared_ptr<Core> core, std::shared_ptr<cuda::Gpus> gpus, std::shared_ptr<Peering>& peering);
    ~Peering();
    /// Ends all links, and transfers over them; nothing is served any more.
    void shut_down();
    /// Publishes the last counts, and that this engine holds no more memory. After shut_down().
    void tell_last_counts();

    Status add(const Peer& peer);
    void remove(const Peer& peer);
    /// Notes the registration that stands for a peer's, which the peer may ask back. Nothing is copied there before borrow().
    void lend(const RemoteRegion& region);
    /// Borrows memory of a peer; `done` is called once, by the thread that makes progress.
    void borrow(const Peer& peer, const std::vector<std::shared_ptr<Loan>>& loans, std::function<void(const Status&)> done);
    /// Begins to connect, so that the end of the peer is noticed.
    void reach(const Peer& peer);
    /// Whether a peer is gone, as far as it is known; looks it up now and then.
    bool is_gone(Peer& peer) noexcept;
    /// The same, looked up now.
    bool has_ended(Peer& peer) noexcept;

    /// Sends a notification after all earlier writes; to peers of this process at once.
    Status deliver(const Peer& peer, std::string message, const Extents& written);
    /// Appends the notifications that have arrived.
    void take(notif_list_t& notifs);
    /// Uses the time of an application that waits.
    void progress() noexcept;

    /// Gives a registration back: no transfer begins to use it any more, and those that did have ended. NIXL_ERR_NOT_ALLOWED if a peer may
    /// still use it, which the reason names; it may be called again.
    Status release(Registration& registration);
    /// The same with all that was lent to peers, before the engine ends: says so if one may still use some of it. Registrations are closed.
    void take_back() noexcept;

    /// The part of a transfer that goes over a link. `peer` uses the same pool.
    Status make_staged_part(nixl_xfer_op_t operation, const Peer& peer, const Pairs& pairs, std::unique_ptr<Part>& part);

  private:
    friend class StagedPart;
    /// What the engine and its links have counted. One that does not run holds nothing.
    Counters::Values count_all(bool is_running) const;
    /// A registration's memory, in use as long as a session of a peer has it.
    std::shared_ptr<Memory> find_memory(uint64_t number);
    std::shared_ptr<Memory> memory_of(Registration& registration, Status& failure);
    /// Remembers a run, so that its end is reported even if the application never polls it.
    void watch(const std::shared_ptr<StagedRun>& run);
    void settle_all();
    /// No transfer of this process begins to use what a peer asks back; true once none uses it any more.
    bool give_back(const std::string& engine_id, uint64_t registration);
    /// Whether a transfer of this process uses memory of an engine.
    bool is_used(const std::string& engine_id);

    std::mutex runs_mutex_;
    std::map<const StagedRun*, std::weak_ptr<StagedRun>> runs_;
    size_t live_runs_ = 0; // when the map was last cleared of those that are gone

    std::mutex lent_mutex_;
    std::multimap<std::pair<std::string, uint64_t>, std::weak_ptr<Registration>> lent_;
    size_t live_lent_ = 0;
};

} // namespace kvbm_cxl
