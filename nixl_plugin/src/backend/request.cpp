// SPDX-License-Identifier: Apache-2.0
#include "request.h"
#include "support/log.h"
#include <utility>

namespace kvbm_cxl {

void XferRequest::fail(nixl_status_t status) noexcept {
    int none = NIXL_SUCCESS;
    failure_.compare_exchange_strong(none, status, std::memory_order_relaxed);
}

/// Starts the parts when the loans are there, for an application that does not ask.
class XferRequest::Start : public Job {
    const std::shared_ptr<XferRequest> request_;

  public:
    explicit Start(std::shared_ptr<XferRequest> request) : request_(std::move(request)) {}
    void run() noexcept override {
        std::lock_guard lock(request_->turn_);
        request_->begin_if_over();
    }
};

void XferRequest::is_complete() {
    for (const auto& region : regions_) {
        if (region->own && region->own->loan)
            loans_.push_back({region->own, region->own->loan.get()});
    }
    if (!loans_.empty())
        access_ = loans_.front()->access.get();
}

bool XferRequest::is_lent() noexcept {
    uint64_t link = access_ ? access_->link() : 0, taken_back = access_ ? access_->taken_back() : 0;
    if (link == link_ && taken_back == taken_back_)
        return !access_ || link != 0;
    bool are_lent = link != 0;
    for (const auto& loan : loans_)
        are_lent = are_lent && loan->begin() == link;
    link_ = are_lent ? link : 0;
    taken_back_ = taken_back;
    return are_lent;
}

nixl_status_t XferRequest::await_loans() noexcept {
    try {
        auto wait = std::make_shared<Wait>();
        wait_ = wait;
        peering_->borrow(*peer_, loans_, [wait, weak = weak_from_this()](const Status& status) {
            wait->outcome = status.code();
            wait->is_over.store(true, std::memory_order_release);
            // An application that polls may be first. If there is no thread, or no memory, it is the only one.
            try {
                if (auto request = weak.lock())
                    (void)request->core_->workers.submit(std::make_shared<Start>(request), 1);
            } catch (const std::exception& error) {
                log_failure("start", "CXL: a transfer that waited for memory of a peer begins only when it is asked for: ", error);
            }
        });
        begin_if_over();
        return static_cast<nixl_status_t>(status_.load(std::memory_order_acquire));
    } catch (...) {
        wait_ = nullptr;
        fail(NIXL_ERR_BACKEND);
        return finish();
    }
}

void XferRequest::begin_if_over() noexcept {
    if (!wait_ || !wait_->is_over.load(std::memory_order_acquire))
        return;
    nixl_status_t outcome = std::exchange(wait_, nullptr)->outcome;
    if (outcome != NIXL_SUCCESS) {
        fail(outcome);
        finish();
        return;
    }
    (void)is_lent();
    (void)begin();
}

nixl_status_t XferRequest::post(const nixl_opt_b_args_t* how) noexcept {
    // No access, so it may come before everything that guards the memory; of nullptr it does nothing.
    __builtin_prefetch(first_source_);
    __builtin_prefetch(first_destination_);
    std::lock_guard lock(turn_);
    if (status_.load(std::memory_order_acquire) == NIXL_IN_PROG)
        return report("repost", {NIXL_ERR_REPOST_ACTIVE, "CXL: a transfer was posted while it is active: wait until it has ended"});
    try {
        has_notif_ = how && how->hasNotif;
        if (has_notif_)
            notif_ = how->notifMsg;
    } catch (...) {
        return NIXL_ERR_BACKEND;
    }
    core_->counters.add(CXL_SHM_COUNT_NIXL_POSTED);
    // A peer that lends memory over the link that there is is not gone, whatever a thread found that looked a moment too early.
    bool is_ready = is_lent();
    if (is_ready && access_ && peer_->is_gone.load(std::memory_order_relaxed)) [[unlikely]]
        peer_->is_gone.store(false, std::memory_order_relaxed);
    failure_.store((!is_ready || !access_) && peering_->is_gone(*peer_) ? NIXL_ERR_REMOTE_DISCONNECT : NIXL_SUCCESS,
                   std::memory_order_relaxed);
    status_.store(NIXL_IN_PROG, std::memory_order_relaxed);
    return is_ready || failure_.load(std::memory_order_relaxed) != NIXL_SUCCESS ? begin() : await_loans();
}

nixl_status_t XferRequest::begin() noexcept {
    left_.store(parts_.size() + 1, std::memory_order_relaxed);
    std::shared_ptr<Completion> self = shared_from_this();
    bool has_failed = failure_.load(std::memory_order_relaxed) != NIXL_SUCCESS;
    for (const std::unique_ptr<Part>& part : parts_) {
        nixl_status_t status = has_failed ? NIXL_ERR_CANCELED : part->post(self);
        if (status == NIXL_IN_PROG)
            continue;
        if (status != NIXL_SUCCESS) {
            has_failed = true;
            fail(status);
        }
        left_.fetch_sub(1, std::memory_order_acq_rel);
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1)
        return finish();
    // A transfer that has failed in one part ends as soon as the others do; their end is awaited like any.
    return NIXL_IN_PROG;
}

void XferRequest::done(nixl_status_t status) noexcept {
    if (status != NIXL_SUCCESS)
        fail(status);
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1)
        finish();
}

nixl_status_t XferRequest::finish() noexcept {
    if (peer_->is_gone.load(std::memory_order_acquire))
        fail(NIXL_ERR_REMOTE_DISCONNECT);
    // Why it failed is, first of all, that the peer is no more, if that is proven.
    auto found = static_cast<nixl_status_t>(failure_.load(std::memory_order_relaxed));
    if ((found == NIXL_ERR_BACKEND || found == NIXL_ERR_NOT_FOUND) && peering_->has_ended(*peer_))
        failure_.store(NIXL_ERR_REMOTE_DISCONNECT, std::memory_order_relaxed);
    if (failure_.load(std::memory_order_relaxed) == NIXL_SUCCESS && has_notif_) {
        try {
            if (Status told = peering_->deliver(*peer_, std::move(notif_), written_); !told.ok())
                fail(report("notif:" + peer_->agent, told));
        } catch (...) {
            fail(NIXL_ERR_BACKEND);
        }
    }
    auto status = static_cast<nixl_status_t>(failure_.load(std::memory_order_relaxed));
    Counters& counters = core_->counters;
    if (status == NIXL_SUCCESS)
        counters.add(operation_ == NIXL_READ ? CXL_SHM_COUNT_NIXL_READS : CXL_SHM_COUNT_NIXL_WRITES);
    else if (status == NIXL_ERR_CANCELED)
        counters.add(CXL_SHM_COUNT_NIXL_CANCELLED);
    else
        counters.add(CXL_SHM_COUNT_NIXL_FAILED);
    if (status == NIXL_ERR_REMOTE_DISCONNECT)
        counters.add(CXL_SHM_COUNT_NIXL_DISCONNECTED);
    // Last: the application that sees it may release the request.
    status_.store(status, std::memory_order_release);
    return status;
}

nixl_status_t XferRequest::check() noexcept {
    std::lock_guard lock(turn_);
    if (wait_) {
        peering_->progress();
        begin_if_over();
    } else if (status_.load(std::memory_order_acquire) == NIXL_IN_PROG) {
        for (const std::unique_ptr<Part>& part : parts_)
            part->poll();
    }
    return static_cast<nixl_status_t>(status_.load(std::memory_order_acquire));
}

void XferRequest::cancel() noexcept {
    std::lock_guard lock(turn_);
    if (status_.load(std::memory_order_acquire) != NIXL_IN_PROG)
        return;
    if (std::exchange(wait_, nullptr)) {
        fail(NIXL_ERR_CANCELED);
        finish();
        return;
    }
    for (const std::unique_ptr<Part>& part : parts_)
        part->cancel();
}

uint64_t XferRequest::estimate_us() const noexcept {
    uint64_t sum = 1;
    for (const std::unique_ptr<Part>& part : parts_)
        sum += part->estimate_us();
    return sum;
}

} // namespace kvbm_cxl
