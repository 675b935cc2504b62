// SPDX-License-Identifier: Apache-2.0
//
// A GPU of the pool library, and copies that were started on it. What they copy, how, and what the memory needs around it, is the
// library's: here is what the copies of a transfer hold until their end is known.
#pragma once

#include "support/pool.h"
#include <memory>
#include <mutex>
#include <vector>

namespace kvbm_cxl::cuda {

/// How long the end of a copy that was cancelled is waited for, before its memory is given up.
constexpr uint64_t patience_ms = 10'000;

using DevicePiece = cxl_shm_gpu_piece_t;

enum class Direction : uint32_t { to_host = CXL_SHM_GPU_TO_HOST, to_device = CXL_SHM_GPU_FROM_HOST };

/// Whether the device may reach pool memory itself, or only pinned buffers. With buffers, memory of the host is not touched any more once
/// the copy is cancelled, whatever the device does.
enum class Way : uint32_t { any = 0, buffers = CXL_SHM_GPU_BUFFERED };

/// A GPU.
class Device {
    std::shared_ptr<Pool> pool_;
    uint64_t ordinal_;
    cxl_gpu_t handle_ = CXL_SHM_GPU_NONE;

    Device(std::shared_ptr<Pool> pool, uint64_t ordinal) : pool_(std::move(pool)), ordinal_(ordinal) {}

  public:
    /// The device of that number, for copies to and from a pool.
    static Status open(const std::string& library, std::shared_ptr<Pool> pool, uint64_t ordinal, std::shared_ptr<Device>& device);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    uint64_t ordinal() const { return ordinal_; }
    cxl_gpu_t handle() const { return handle_; }

    /// An error unless the range is memory of this device.
    Status check_memory(uint64_t address, size_t len_bytes) const;
    /// Says once, at INFO, if a part of the pool cannot be pinned.
    void tell_refusal() const;
};

/// A list of copies under way. Its memory must not be used for anything else before poll() or cancel() says that it has ended.
class Copy {
    std::shared_ptr<Device> device_;
    const size_t pieces_;
    std::shared_ptr<void> hold_;
    cxl_gpu_copy_t number_ = CXL_SHM_GPU_COPY_NONE;
    bool has_ended_ = false;
    Status result_;
    mutable std::mutex mutex_;

    Copy(std::shared_ptr<Device> device, size_t pieces, std::shared_ptr<void> hold)
        : device_(std::move(device)), pieces_(pieces), hold_(std::move(hold)) {}

  public:
    /// Starts a list of copies, in no order among them; on failure nothing is under way. `hold` is let go of when the device has finished
    /// with the memory, whatever became of the copies: it keeps what must not be given back or reused before.
    static Status start(std::shared_ptr<Device> device, Direction direction, const std::vector<DevicePiece>& pieces, Way way,
                        std::shared_ptr<void> hold, std::unique_ptr<Copy>& copy);

    /// Cancels the copies under way. If the device does not finish even then, the memory of the copy is never released.
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

    /// Continues the copies without waiting: NIXL_IN_PROG, NIXL_SUCCESS or an error, of which result() has the reason. From any thread.
    nixl_status_t poll();

    /// Starts nothing more and waits until the device has finished with what it was given; true once it has.
    bool cancel(uint64_t timeout_ms);

    /// What became of the copies, once poll() or cancel() says that they have ended.
    Status result() const;
};

} // namespace kvbm_cxl::cuda
