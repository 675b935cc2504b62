// SPDX-License-Identifier: Apache-2.0
//
// Copies between a GPU and memory of the host, the pool's or any other. They run while nobody waits; whoever started one polls it.
//
// Pool memory is pinned and the GPU reaches it directly. Before, the lines are dropped from this host's caches, so that the GPU reads what
// other hosts made visible, and does not merge what it writes with stale lines. Afterwards, what the GPU wrote is flushed: I/O may leave it
// in this host's cache, where other hosts do not see it, and from where it would be written back over what the memory is used for next.
// What cannot be pinned is copied through pinned buffers instead.
#ifndef KVBM_CXL_NIXL_CUDA_COPY_H
#define KVBM_CXL_NIXL_CUDA_COPY_H

#include "device.h"

namespace kvbm_cxl::cuda {

/// How long the end of a copy that nobody wants any more is waited for, before its memory is given up.
constexpr uint64_t patience_ms = 10'000;

struct DevicePiece {
    DeviceAddress device = 0;
    std::byte* host = nullptr;
    size_t len_bytes = 0;
};

enum class Direction { to_device, to_host };

/// Whether the device may reach pool memory itself, or only pinned buffers. With buffers, memory of the host is not touched any more once
/// the copy is cancelled, whatever the device does.
enum class Way { any, buffers };

/// A list of copies under way. Its memory must not be used for anything else before poll() or cancel() says that it has ended.
class Copy {
    class Work;
    std::shared_ptr<Work> work_;

    explicit Copy(std::shared_ptr<Work> work) : work_(std::move(work)) {}

  public:
    /// Starts a list of copies, in no order among them; on failure nothing is under way. `hold` is let go of when the device has finished
    /// with the memory, whatever became of the copies: it keeps what must not be given back or reused before.
    static Status start(std::shared_ptr<Device> device, std::shared_ptr<PinnedPool> pool, Direction direction,
                        std::vector<DevicePiece> pieces, Way way, std::shared_ptr<void> hold, std::unique_ptr<Copy>& copy);

    /// Cancels what is under way. If the device does not finish even then, what the copy holds is never given back.
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    /// Goes on with the copies without waiting: NIXL_IN_PROG, NIXL_SUCCESS or an error, of which result() has the reason. From any thread.
    nixl_status_t poll();

    /// Starts nothing more and waits until the device has finished with what it was given; true once it has.
    bool cancel(uint64_t timeout_ms);

    /// What became of the copies, once poll() or cancel() says that they have ended.
    Status result() const;
};

} // namespace kvbm_cxl::cuda

#endif
