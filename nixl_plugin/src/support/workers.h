// SPDX-License-Identifier: Apache-2.0
//
// Threads that copy large transfers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvbm_cxl {

/// Something that a worker does.
class Job {
  public:
    virtual ~Job() = default;
    /// Called by as many workers as the job was submitted for, at once or one after the other. Must not throw.
    virtual void run() noexcept = 0;
};

/// A few threads, started when the first job comes. Jobs begin in the order in which they came.
class Workers {
    const size_t most_;
    const std::function<void()> begin_;
    std::mutex mutex_;
    std::condition_variable has_work_;
    std::deque<std::shared_ptr<Job>> queue_;
    std::vector<std::thread> threads_;
    size_t idle_ = 0;
    bool is_ending_ = false;

    void serve() noexcept;

  public:
    /// At most so many threads, each of which begins with `begin`, which must not throw.
    explicit Workers(size_t most, std::function<void()> begin = {}) : most_(most), begin_(std::move(begin)) {}
    /// shut_down()
    ~Workers();
    Workers(const Workers&) = delete;

    size_t most() const { return most_; }
    /// Has up to `times` threads run the job, each once. False if not even one thread could be started, or after shut_down().
    bool submit(const std::shared_ptr<Job>& job, size_t times) noexcept;
    /// Waits for the jobs that were submitted, and until the threads have let go of them. None is taken any more. Not for a worker: what
    /// owns this and may be owned by a job has to call it before it lets go, or the last one to let go could be a worker.
    void shut_down() noexcept;
};

} // namespace kvbm_cxl
