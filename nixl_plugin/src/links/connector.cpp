// SPDX-License-Identifier: Apache-2.0
#include "connector.h"
#include "links.h"
#include <utility>

namespace kvbm_cxl {

namespace {
/// First share of the time that an attempt gets before it is another peer's turn; doubled every time, so that one that is merely slow gets
/// enough, and one that is stopped does not hold up the others.
constexpr uint64_t SLICE_MS = 200;
} // namespace

Connector::Connector(std::shared_ptr<Pool> pool, uint64_t timeout_ms, std::function<void()> done)
    : pool_(std::move(pool)), timeout_ms_(timeout_ms), done_(std::move(done)) {}

Connector::~Connector() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable())
        thread_.join();
    for (auto& outcome : outcomes_)
        if (outcome.ring != CXL_SHM_RING_NONE)
            cxl_shm_ring_close(pool_->handle(), outcome.ring, 0);
}

void Connector::ask(const std::string& engine_id) {
    std::unique_lock lock(mutex_);
    asked_.push_back({engine_id, now_ns() + timeout_ms_ * 1'000'000, SLICE_MS});
    if (thread_.joinable()) {
        changed_.notify_all();
        return;
    }
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
        asked_.pop_back();
        outcomes_.push_back({engine_id, CXL_SHM_RING_NONE, {NIXL_ERR_BACKEND, text("CXL: starting a thread: ", error.what())}});
        lock.unlock();
        done_();
    } catch (...) {
        // It will be asked for once more.
        asked_.pop_back();
        throw;
    }
}

std::vector<Connector::Outcome> Connector::take() {
    std::lock_guard lock(mutex_);
    return std::exchange(outcomes_, {});
}

void Connector::run() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stop_ || !asked_.empty(); });
        if (stop_)
            return;
        Attempt attempt = std::move(asked_.front());
        asked_.pop_front();
        lock.unlock();
        Outcome outcome{attempt.engine_id, CXL_SHM_RING_NONE, {}};
        uint64_t now = now_ns(), left_ms = attempt.deadline_ns > now ? (attempt.deadline_ns - now) / 1'000'000 : 0;
        int status =
            cxl_shm_ring_connect(pool_->handle(), ring_name(attempt.engine_id).c_str(), std::min(left_ms, attempt.slice_ms), &outcome.ring);
        bool again = status == CXL_SHM_E_TIMEOUT && left_ms > attempt.slice_ms;
        if (status != CXL_SHM_OK && !again) {
            // Whether the peer has ended is for others to find out: here it cannot be reached.
            outcome.status = {NIXL_ERR_BACKEND, pool_failure(status, text("connecting to engine ", attempt.engine_id)).reason()};
        }
        lock.lock();
        if (again) {
            attempt.slice_ms *= 2;
            asked_.push_back(std::move(attempt));
            continue;
        }
        outcomes_.push_back(std::move(outcome));
        lock.unlock();
        done_();
        lock.lock();
    }
}

} // namespace kvbm_cxl
