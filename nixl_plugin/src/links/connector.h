// SPDX-License-Identifier: Apache-2.0
//
// Connects to peers on a thread of its own, which is there once there is something to connect: asking for a connection waits for the other
// end, and that may be stopped.
#pragma once

#include "support/pool.h"
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace kvbm_cxl {

class Connector {
  public:
    struct Outcome {
        std::string engine_id;
        cxl_ring_t ring = CXL_SHM_RING_NONE;
        Status status;
    };

    /// `done` is called when there is an outcome to take: by the thread of the connector, or within ask() if there can be none.
    Connector(std::shared_ptr<Pool> pool, uint64_t timeout_ms, std::function<void()> done);
    ~Connector();

    /// Begins to connect to an engine.
    void ask(const std::string& engine_id);
    /// The outcome so far.
    std::vector<Outcome> take();

  private:
    struct Attempt {
        std::string engine_id;
        uint64_t deadline_ns = 0, slice_ms = 0;
    };
    void run();

    std::shared_ptr<Pool> pool_;
    uint64_t timeout_ms_;
    std::function<void()> done_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Attempt> asked_;
    std::vector<Outcome> outcomes_;
    bool stop_ = false;
    std::thread thread_;
};

} // namespace kvbm_cxl
