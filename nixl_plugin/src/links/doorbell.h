// SPDX-License-Identifier: Apache-2.0
//
// Wakes the progress thread of an engine of the same machine: a datagram to an abstract socket named after the engine. It carries nothing,
// and nothing depends on it: an engine that is not reached (another host, another network namespace) looks at the end of its pause.
#pragma once

#include <cstdint>
#include <string>

namespace kvbm_cxl {

class Doorbell {
    int socket_ = -1;

  public:
    /// The bell of an engine; without a socket it never rings, and rest() only waits.
    explicit Doorbell(const std::string& engine_id);
    ~Doorbell();
    Doorbell(const Doorbell&) = delete;
    Doorbell& operator=(const Doorbell&) = delete;

    /// Sleeps until the bell rings, at most so long; true if it rang.
    bool rest(uint64_t pause_us);
    /// Rings the bell of an engine (this one's too), without waiting; false if there is none within reach.
    bool ring(const std::string& engine_id);
};

} // namespace kvbm_cxl
