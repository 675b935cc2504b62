// SPDX-License-Identifier: Apache-2.0
//
// Transfers between memory outside the pool and memory outside the pool of another process: through staging blocks in the pool, asked for
// and answered over a link.
//
//     Staged staged(links, registrations, options);                       // one per engine; answers peers from now on
//     std::shared_ptr<const Plan> plan;
//     Status status = Plan::make(peer_engine_id, memories, ranges, plan); // prepXfer: no I/O
//     std::shared_ptr<Transfer> transfer;
//     status = staged.start(plan, Direction::read, note, transfer);       // postXfer: any number of times
//     while (transfer->status() == NIXL_IN_PROG) links.progress();        // checkXfer
//     staged.cancel(*transfer);                                           // releaseReqH at any moment: final when it returns
//
// A transfer of any number of ranges is cut into parts of at most a staging block each, several of which are under way, so that one side
// gathers while the other scatters. Local memory that lies in the pool is read there by the peer (writes), without staging.
// docs/STAGED.md says what the messages are and why they are right.
#ifndef KVBM_CXL_NIXL_STAGED_STAGED_H
#define KVBM_CXL_NIXL_STAGED_STAGED_H

#include "links/links.h"
#include "staging.h"
#include "transfer.h"

namespace kvbm_cxl {

struct PeerRequest;
struct Session;

struct StagedOptions {
    uint64_t staging_bytes = 64ull << 20; // pool memory for staging, at most
    uint64_t block_bytes = 256ull << 10;  // of it per part
    uint64_t part_bytes = 32ull << 10;    // smallest part that a transfer is cut into for the sake of the pipeline
    uint32_t parts_per_link = 8;          // under way at a time
    uint64_t timeout_ms = 10'000;         // a transfer that does not come on for so long has failed
};

class Staged : public Service {
  public:
    Staged(Links& links, Registrations& registrations, const StagedOptions& options);
    /// shut_down()
    ~Staged() override;
    /// Fails what is under way, and ends the links. Nothing begins afterwards.
    void shut_down();

    /// Begins a transfer; `note` is sent to the peer when the data are where they belong. The status is that of the transfer already if it
    /// failed at once. Success does not say that it has ended. After a failure, and after an exception, nothing is under way.
    Status start(std::shared_ptr<const Plan> plan, Direction direction, std::optional<std::string> note,
                 std::shared_ptr<Transfer>& transfer);
    /// Ends a transfer that is under way with NIXL_ERR_CANCELED. From its return on, its local memory is not touched. What the destination
    /// of a write holds is undefined.
    void cancel(Transfer& transfer) noexcept;

    struct Counts {
        std::atomic<uint64_t> parts_asked{0}, parts_served{0}, bytes_read{0}, bytes_written{0}, failed{0}, refused{0}, in_place{0};
        std::atomic<uint64_t> served_read_bytes{0}, served_written_bytes{0}; // for peers
    };
    const Counts& counts() const { return counts_; }
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
    Session& session(Link& link);
    void begin(const std::shared_ptr<Transfer>& transfer);
    void end(Transfer& transfer, const Status& status) noexcept;
    void fail(Transfer& transfer, const std::exception& error) noexcept;
    void place();
    bool place(const std::shared_ptr<Transfer>& transfer);
    void expire(uint64_t now);
    bool may_stage(const Session& session) const;

    // The requester.
    bool issue(Session& session, uint64_t now);
    Status ask(Session& session, const std::shared_ptr<Transfer>& transfer, bool& waits);
    Status on_data(Session& session, Reader& reader);
    Status on_safe(Session& session, Reader& reader);
    Status on_written(Session& session, Reader& reader);
    void part_done(Transfer& transfer, uint64_t len_bytes, const Status& status);

    // The responder.
    Status on_request(Session& session, Direction direction, Reader& reader);
    Status on_taken(Session& session, Reader& reader);
    bool serve(Session& session, uint64_t now);
    bool serve_read(Session& session, PeerRequest& request);
    void serve_write(Session& session, PeerRequest& request);
    /// Makes the copy of a request; `memories` become those that it names.
    Status copy(const PeerRequest& request, std::vector<std::shared_ptr<Memory>>& memories);

    Links& links_;
    Registrations& registrations_;
    StagedOptions options_;
    Counts counts_;
    Staging staging_;
    std::atomic<bool> is_busy_{false};

    // Under the turn.
    std::map<uint64_t, std::unique_ptr<Session>> sessions_; // by number of the link
    std::vector<std::shared_ptr<Transfer>> unplaced_;       // wait for a link
    uint64_t first_session_ = 0;                            // whose turn it is
    uint64_t expire_ns_ = 0;
    uint64_t more_until_ns_ = 0; // until then a peer's next part of a write is expected
};

} // namespace kvbm_cxl

#endif
