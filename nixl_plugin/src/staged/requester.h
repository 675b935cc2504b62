// SPDX-License-Identifier: Apache-2.0
//
// The side of a staged transfer that begins it: finds a link, cuts the transfer into parts, requests them of the peer, and copies between
// this engine's memory and the pool. Everything but start() and cancel() is called under the turn of the links.
#pragma once

#include "options.h"
#include "session.h"

namespace kvbm_cxl {

class Requester {
  public:
    Requester(Links& links, const StagedOptions& options, StagedCounts& counts, Staging& staging, Sessions& sessions)
        : links_(links), options_(options), counts_(counts), staging_(staging), sessions_(sessions) {}

    /// As Staged::start() and Staged::cancel().
    Status start(std::shared_ptr<const Plan> plan, Direction direction, std::shared_ptr<Transfer>& transfer);
    void cancel(Transfer& transfer) noexcept;

    /// Ends every transfer with `reason`.
    void end_all(const Status& reason);
    /// Ends the transfers of a session with `reason`.
    void end_all(Session& session, const Status& reason);
    /// Ends the transfers with an engine.
    void end_with(const std::string& engine_id, const Status& reason);
    /// Ends the transfers that have not moved for the time-out.
    void expire(uint64_t now);

    /// Whether a transfer waits for a link.
    bool waits() const { return !unplaced_.empty(); }
    /// Moves the transfers that wait for a link to their sessions, where the links are there.
    void place();
    /// Requests parts of a session's transfers; false if there was none to request.
    bool issue(Session& session, uint64_t now);

    // Answers of the peer. A failure ends the link.
    Status on_data(Session& session, Reader& reader);
    Status on_safe(Session& session, Reader& reader);
    Status on_written(Session& session, Reader& reader);

  private:
    void begin(const std::shared_ptr<Transfer>& transfer);
    bool place(const std::shared_ptr<Transfer>& transfer);
    Status request(Session& session, const std::shared_ptr<Transfer>& transfer, bool& waits);
    void part_done(Transfer& transfer, uint64_t len_bytes, const Status& status);
    void end(Transfer& transfer, const Status& status) noexcept;
    void fail(Transfer& transfer, const std::exception& error) noexcept;
    template <class Each> void each_transfer(Session& session, const Each& call);

    Links& links_;
    const StagedOptions& options_;
    StagedCounts& counts_;
    Staging& staging_;
    Sessions& sessions_;
    std::vector<std::shared_ptr<Transfer>> unplaced_; // wait for a link
};

} // namespace kvbm_cxl
