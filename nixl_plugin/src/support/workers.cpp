// SPDX-License-Identifier: Apache-2.0
#include "workers.h"
#include "log.h"
#include <algorithm>
#include <pthread.h>

namespace kvbm_cxl {

Workers::~Workers() {
    shut_down();
}

void Workers::shut_down() noexcept {
    std::vector<std::thread> ending;
    {
        std::lock_guard lock(mutex_);
        is_ending_ = true;
        ending.swap(threads_);
    }
    has_work_.notify_all();
    for (std::thread& thread : ending)
        thread.join();
}

bool Workers::submit(const std::shared_ptr<Job>& job, size_t times) noexcept {
    try {
        std::lock_guard lock(mutex_);
        if (is_ending_)
            return false;
        times = std::clamp<size_t>(times, 1, most_);
        queue_.insert(queue_.end(), times, job);
        try {
            while (threads_.size() < most_ && idle_ < queue_.size() && threads_.size() < queue_.size() + (threads_.size() - idle_))
                threads_.emplace_back(&Workers::serve, this), idle_++;
        } catch (const std::exception& error) {
            log_once(LogLevel::warn, "workers", text("CXL: a worker thread cannot be started: ", error.what()));
            if (threads_.empty()) {
                queue_.erase(queue_.end() - static_cast<std::ptrdiff_t>(times), queue_.end());
                return false;
            }
        }
    } catch (...) {
        return false;
    }
    has_work_.notify_all();
    return true;
}

void Workers::serve() noexcept {
    pthread_setname_np(pthread_self(), "nixl-cxl-copy");
    if (begin_)
        begin_();
    std::unique_lock lock(mutex_);
    while (true) {
        has_work_.wait(lock, [this] { return is_ending_ || !queue_.empty(); });
        if (queue_.empty())
            return;
        std::shared_ptr<Job> job = std::move(queue_.front());
        queue_.pop_front();
        idle_--;
        lock.unlock();
        job->run();
        job.reset();
        lock.lock();
        idle_++;
    }
}

} // namespace kvbm_cxl
