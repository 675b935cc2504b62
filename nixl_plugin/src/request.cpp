// SPDX-License-Identifier: Apache-2.0
#include "request.h"
#include "log.h"

namespace kvbm_cxl {

void XferRequest::fail(nixl_status_t status) noexcept {
    int none = NIXL_SUCCESS;
    failure_.compare_exchange_strong(none, status, std::memory_order_relaxed);
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
    failure_.store(peering_->is_gone(*peer_) ? NIXL_ERR_REMOTE_DISCONNECT : NIXL_SUCCESS, std::memory_order_relaxed);
    status_.store(NIXL_IN_PROG, std::memory_order_relaxed);
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
    // Last: whoever sees it may release the request.
    status_.store(status, std::memory_order_release);
    return status;
}

nixl_status_t XferRequest::check() noexcept {
    std::lock_guard lock(turn_);
    if (status_.load(std::memory_order_acquire) == NIXL_IN_PROG) {
        for (const std::unique_ptr<Part>& part : parts_)
            part->poll();
    }
    return static_cast<nixl_status_t>(status_.load(std::memory_order_acquire));
}

void XferRequest::cancel() noexcept {
    std::lock_guard lock(turn_);
    if (status_.load(std::memory_order_acquire) != NIXL_IN_PROG)
        return;
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
