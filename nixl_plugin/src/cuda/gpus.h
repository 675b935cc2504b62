// SPDX-License-Identifier: Apache-2.0
//
// Memory of GPUs in transfers (VRAM_SEG): what an engine uses of this folder.
#pragma once

#include "gpu.h"
#include "staged/memory.h"
#include "transfer/transfer.h"
#include <condition_variable>
#include <functional>
#include <map>
#include <thread>

namespace kvbm_cxl::cuda {

/// Whether there is a driver and a device. Where not, that is said once, at INFO.
bool is_offered(const std::string& library);

/// Registered memory of a GPU.
class DeviceRange : public RegistrationExtra {
  public:
    std::shared_ptr<Device> device;
};

/// The GPUs as one engine uses them, and the thread that follows its copies, which sleeps while there are none.
class Gpus {
    /// A copy, and the part that learns its end.
    struct Running {
        std::shared_ptr<Copy> copy;
        std::function<void()> ended;
    };

    const std::string library_;
    const std::shared_ptr<Pool> pool_;
    std::mutex opens_; // held while a device is opened; before mutex_
    std::mutex mutex_;
    std::map<uint64_t, std::weak_ptr<Device>> devices_;
    std::condition_variable changed_;
    std::vector<Running> running_;
    bool is_ending_ = false;
    std::thread thread_;

    Gpus(std::string library, std::shared_ptr<Pool> pool) : library_(std::move(library)), pool_(std::move(pool)) {}
    void follow() noexcept;

  public:
    /// NIXL_ERR_NOT_SUPPORTED where GPU memory is not offered.
    static Status open(const std::string& library, std::shared_ptr<Pool> pool, std::shared_ptr<Gpus>& gpus);
    /// shut_down()
    ~Gpus();
    Gpus(const Gpus&) = delete;
    Gpus& operator=(const Gpus&) = delete;

    /// Registers memory of the device `ordinal`, after looking whether it is that.
    Status register_memory(uint64_t ordinal, uint64_t address, size_t len_bytes, std::unique_ptr<RegistrationExtra>& range);

    const std::shared_ptr<Pool>& pool() const { return pool_; }

    /// Polls a copy until it ends; then calls `ended`, from the thread. False if there is no thread: then the caller polls.
    bool watch(std::shared_ptr<Copy> copy, std::function<void()> ended) noexcept;

    /// Ends the thread, and returns when it has let go of every copy: those under way are polled by their callers from now on, as all later
    /// ones are. Not for that thread: an engine calls it before it lets go, or the last one to let go of this could be the thread itself.
    void shut_down() noexcept;
};

/// The part of a transfer one side of which is memory of GPUs, the other the pool or memory of this process.
Status make_device_part(const std::shared_ptr<Core>& core, const std::shared_ptr<Gpus>& gpus, nixl_xfer_op_t operation, const Pairs& pairs,
                        std::unique_ptr<Part>& part);

/// Registered memory of a GPU for staged transfers. The device itself writes and reads the staging block in the pool, where that can be
/// pinned. The registration stays in use until the device has finished with it, although the transfer may have failed before; so does the
/// staging block that it was to write.
class DeviceMemory : public Memory {
    std::shared_ptr<Gpus> gpus_;
    std::shared_ptr<Device> device_;
    std::shared_ptr<Registration> registration_;
    Piece whole_;
    uint64_t timeout_ms_;
    std::vector<std::shared_ptr<Copy>> late_; // that did not end in time

    Status copy(std::span<const Piece> pieces, uint64_t offset, Direction direction);

  public:
    /// A registration of that device. The transfer that copies has it in use.
    DeviceMemory(std::shared_ptr<Gpus> gpus, std::shared_ptr<Device> device, std::shared_ptr<Registration> registration,
                 uint64_t timeout_ms)
        : gpus_(std::move(gpus)), device_(std::move(device)), registration_(std::move(registration)),
          whole_{registration_->base, registration_->len_bytes}, timeout_ms_(timeout_ms) {}
    bool contains(const Piece& piece) const override;
    Status to_pool(std::span<const Piece> pieces, uint64_t offset) override;
    Status from_pool(std::span<const Piece> pieces, uint64_t offset) override;
    bool may_still_write() override;
};

} // namespace kvbm_cxl::cuda
