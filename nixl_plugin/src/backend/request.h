// SPDX-License-Identifier: Apache-2.0
//
// A transfer as NIXL's handle of it knows it: its parts, its state, and the notification after it.
#pragma once

#include "peering.h"

namespace kvbm_cxl {

/// A transfer. Its parts begin when it is posted; those on a peer's memory in the pool only when the peer has lent it over the link that
/// there is: the first post waits for that, further ones do not.
class XferRequest : public Completion, public std::enable_shared_from_this<XferRequest> {
    /// Where a read begins, in the pool and in memory.
    const void* first_source_ = nullptr;
    const void* first_destination_ = nullptr;
    const std::shared_ptr<Core> core_;
    const std::shared_ptr<Peer> peer_;
    const std::shared_ptr<Peering> peering_;
    const nixl_xfer_op_t operation_;
    Extents written_; // of the pool, by this process
    /// What the parts name by plain pointers.
    std::vector<std::shared_ptr<Registration>> registrations_;
    std::vector<std::shared_ptr<const RemoteRegion>> regions_;
    std::vector<std::unique_ptr<Part>> parts_;
    std::vector<std::shared_ptr<Loan>> loans_;
    /// The link over which all loans are there; that of a peer's memory is looked at with every post.
    const Access* access_ = nullptr;
    uint64_t link_ = 0, taken_back_ = 0;

    /// Calls on one request take turns. Not taken by done(), which comes while cancel() waits for it.
    std::mutex turn_;
    bool has_notif_ = false;
    std::string notif_;
    std::atomic<size_t> left_{0}; // parts that have not ended, and the post itself
    std::atomic<int> failure_{NIXL_SUCCESS};
    std::atomic<int> status_{NIXL_ERR_NOT_POSTED};

    /// Until the loans are there.
    struct Wait {
        std::atomic<bool> is_over{false};
        nixl_status_t outcome = NIXL_SUCCESS;
    };
    class Start;
    std::shared_ptr<Wait> wait_;

    void fail(nixl_status_t status) noexcept;
    bool is_lent() noexcept;
    nixl_status_t await_loans() noexcept;
    nixl_status_t begin() noexcept;
    void begin_if_over() noexcept;
    nixl_status_t finish() noexcept;

  public:
    XferRequest(std::shared_ptr<Core> core, std::shared_ptr<Peer> peer, std::shared_ptr<Peering> peering, nixl_xfer_op_t operation)
        : core_(std::move(core)), peer_(std::move(peer)), peering_(std::move(peering)), operation_(operation) {}

    const Peer& peer() const { return *peer_; }
    void keep(std::shared_ptr<Registration> registration) { registrations_.push_back(std::move(registration)); }
    void keep(std::shared_ptr<const RemoteRegion> region) { regions_.push_back(std::move(region)); }
    /// Everything is there: what of it a peer lends is borrowed before the parts begin.
    void is_complete();
    /// What of the pool the parts write by themselves: the receiver of the notification has to see it.
    void set_written(Extents written) { written_ = few_extents(std::move(written)); }
    /// Tells where this process begins to copy what it reads. A post lets the processor find these pages while it looks at the rest of the
    /// request: otherwise the flush waits for the first, and the second is waited for after the fence.
    void set_first(const void* source, const void* destination) {
        first_source_ = source;
        first_destination_ = destination;
    }
    void add(std::unique_ptr<Part> part) { parts_.push_back(std::move(part)); }

    /// Starts it, or starts it again. NIXL_ERR_REPOST_ACTIVE while it runs.
    nixl_status_t post(const nixl_opt_b_args_t* how) noexcept;
    /// Where it stands, after some progress.
    nixl_status_t check() noexcept;
    /// Ends it if it runs: afterwards no part touches its memory.
    void cancel() noexcept;
    uint64_t estimate_us() const noexcept;

    void done(nixl_status_t status) noexcept override;
};

/// What NIXL gets to hold.
struct RequestHandle : nixlBackendReqH {
    std::shared_ptr<XferRequest> request;
};

} // namespace kvbm_cxl
