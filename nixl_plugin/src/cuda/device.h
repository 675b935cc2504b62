// SPDX-License-Identifier: Apache-2.0
//
// A GPU as transfers use it: its primary context, streams, and what is reused between transfers (events, pinned buffers). And the pool's
// memory, pinned for all GPUs piece by piece when it is first used.
#ifndef KVBM_CXL_NIXL_CUDA_DEVICE_H
#define KVBM_CXL_NIXL_CUDA_DEVICE_H

#include "../pool.h"
#include "driver.h"
#include <mutex>
#include <vector>

namespace kvbm_cxl::cuda {

/// Bytes that are pinned at a time, which bounds how long the first use of a part of the pool takes. No copy crosses such a border, because
/// the driver knows each as memory of its own.
constexpr uint64_t default_granule_bytes = 256u << 20;
/// Bytes of a pinned buffer, through which memory that cannot be pinned is copied.
constexpr size_t bounce_bytes = 1u << 20;

/// The pool's memory, pinned. Engines of one process that share a pool share it.
class PinnedPool {
    enum class State : uint8_t { unknown, pinned, refused };

    std::shared_ptr<const Driver> driver_;
    std::shared_ptr<Pool> pool_;
    const uint64_t granule_bytes_;
    std::mutex mutex_;
    std::vector<State> granules_;

    PinnedPool(std::shared_ptr<const Driver> driver, std::shared_ptr<Pool> pool, uint64_t granule_bytes);

  public:
    /// That of a pool. The rest is used if there is none yet.
    static std::shared_ptr<PinnedPool> of(const std::shared_ptr<const Driver>& driver, const std::shared_ptr<Pool>& pool,
                                          uint64_t granule_bytes = default_granule_bytes);
    ~PinnedPool();
    PinnedPool(const PinnedPool&) = delete;
    PinnedPool& operator=(const PinnedPool&) = delete;

    /// Whether an address lies in the pool.
    bool contains(const std::byte* address) const;
    /// Pins the granules that a range of the pool touches, if they are not; false if one cannot be. A context is current.
    bool pin(const std::byte* address, size_t len_bytes);
    /// Bytes from an address in the pool to the end of its granule.
    size_t until_border(const std::byte* address) const;
};

/// A GPU.
class Device {
    std::shared_ptr<const Driver> driver_;
    DeviceId id_ = 0;
    int ordinal_ = 0;
    Context context_ = nullptr;
    std::mutex mutex_;
    std::vector<Stream> streams_;
    size_t next_stream_ = 0;
    std::vector<Event> events_;
    std::vector<void*> buffers_;

    Device(std::shared_ptr<const Driver> driver, int ordinal) : driver_(std::move(driver)), ordinal_(ordinal) {}

  public:
    /// The device of that number, its primary context retained.
    static Status open(std::shared_ptr<const Driver> driver, uint64_t ordinal, std::shared_ptr<Device>& device);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const Driver& driver() const { return *driver_; }
    int ordinal() const { return ordinal_; }
    Context context() const { return context_; }

    /// An error unless the range is memory of this device.
    Status check_memory(DeviceAddress address, size_t len_bytes);

    /// A stream, used by several transfers in turn. The context is current for these calls.
    Status stream(Stream& stream);
    Status take_event(Event& event);
    Status take_buffer(void*& buffer);
    /// Gives back what no device and no thread uses any more.
    void give_back(Event event, void* buffer);

    /// A failed call on this device.
    Status failure(Result error, std::string_view what) const;
};

} // namespace kvbm_cxl::cuda

#endif
