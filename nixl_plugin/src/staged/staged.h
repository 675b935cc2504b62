// SPDX-License-Identifier: Apache-2.0
//
// Transfers between memory outside the pool and memory outside the pool of another process: through staging blocks in the pool, asked for
// and answered over a link.
//
//     Staged staged(links, find_memory, options);                         // one per engine; answers peers from now on
//     std::shared_ptr<const Plan> plan;
//     Status status = Plan::make(peer_engine_id, memories, ranges, plan); // prepXfer: no I/O
//     std::shared_ptr<Transfer> transfer;
//     status = staged.start(plan, Direction::read, transfer);             // postXfer: any number of times
//     while (transfer->status() == NIXL_IN_PROG) links.progress();        // checkXfer
//     staged.cancel(*transfer);                                           // releaseReqH at any moment: final when it returns
//
// A transfer of any number of ranges is cut into parts of at most a staging block each, several of which are under way, so that one side
// gathers while the other scatters. Local memory that lies in the pool is read there by the peer (writes), without staging.
// docs/STAGED.md says what the messages are and why they are right.
#pragma once

#include "requester.h"
#include "responder.h"

namespace kvbm_cxl {

class Staged : public Service {
  public:
    Staged(Links& links, FindMemory find_memory, const StagedOptions& options);
    /// shut_down()
    ~Staged() override;
    /// Fails the transfers under way, and ends the links. No transfer begins afterwards.
    void shut_down();

    /// Begins a transfer. The status is that of the transfer already if it failed at once. Success does not say that it has ended. After a
    /// failure, and after an exception, nothing is under way.
    Status start(std::shared_ptr<const Plan> plan, Direction direction, std::shared_ptr<Transfer>& transfer) {
        return requester_.start(std::move(plan), direction, transfer);
    }
    /// Ends a transfer that is under way with NIXL_ERR_CANCELED. From its return on, its local memory is not touched. What the destination
    /// of a write holds is undefined.
    void cancel(Transfer& transfer) noexcept { requester_.cancel(transfer); }

    const StagedCounts& counts() const { return counts_; }
    /// Staging blocks in use now, and allocated from the pool. For tests and statistics.
    size_t staging_used() const { return staging_.used(); }
    size_t staging_held() const { return staging_.held(); }
    uint64_t staging_block_bytes() const { return staging_.block_bytes(); }

    // Service
    void on_linked(Link& link) override;
    void on_forgotten(const std::string& engine_id, const Status& reason) override;
    Status on_message(Link& link, Bytes message) override;
    void on_gone(Link& link, const Status& reason) override;
    bool work(uint64_t now_ns) override;
    bool is_busy() const override { return is_busy_; }

  private:
    Links& links_;
    StagedOptions options_;
    StagedCounts counts_;
    Staging staging_;
    Sessions sessions_;
    Requester requester_;
    Responder responder_;
    std::atomic<bool> is_busy_{false};
    uint64_t expire_ns_ = 0;
};

} // namespace kvbm_cxl
