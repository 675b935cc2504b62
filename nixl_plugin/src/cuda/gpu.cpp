// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"
#include "support/log.h"
#include <algorithm>
#include <utility>

namespace kvbm_cxl::cuda {

Status Device::open(const std::string& library, std::shared_ptr<Pool> pool, uint64_t ordinal, std::shared_ptr<Device>& device) {
    std::shared_ptr<Device> opened(new Device(std::move(pool), ordinal));
    cxl_shm_gpu_options_t options{};
    options.struct_size = sizeof options;
    options.library = library.c_str();
    // A number that is too large for the library is as little there as any other.
    auto number = static_cast<uint32_t>(std::min<uint64_t>(ordinal, UINT32_MAX));
    int status = cxl_shm_gpu_open(opened->pool_->handle(), number, &options, &opened->handle_);
    if (status != CXL_SHM_OK) {
        Status failure = pool_failure(status, text("opening GPU ", ordinal));
        // The driver was there before: it is the device that is not.
        return status == CXL_SHM_E_NOT_FOUND ? Status(NIXL_ERR_INVALID_PARAM, failure.reason()) : failure;
    }
    device = std::move(opened);
    return {};
}

Device::~Device() {
    if (handle_ != CXL_SHM_GPU_NONE)
        (void)cxl_shm_gpu_close(handle_);
}

Status Device::check_memory(uint64_t address, size_t len_bytes) const {
    int status = cxl_shm_gpu_check(handle_, address, len_bytes);
    return status == CXL_SHM_OK ? Status() : pool_failure(status, "registering memory of a GPU");
}

void Device::tell_refusal() const {
    if (!log_shown(LogLevel::info))
        return;
    cxl_shm_gpu_info_t info{};
    info.struct_size = sizeof info;
    if (cxl_shm_gpu_get_info(handle_, &info) == CXL_SHM_OK && info.refusal[0])
        log_once(LogLevel::info, "pin",
                 text("CXL: ", info.refusal, ": copies between it and GPUs go through a pinned buffer, which is slower"));
}

Status Copy::start(std::shared_ptr<Device> device, Direction direction, const std::vector<DevicePiece>& pieces, Way way,
                   std::shared_ptr<void> hold, std::unique_ptr<Copy>& copy) {
    // Made before: a copy under way needs its hold.
    std::unique_ptr<Copy> started(new Copy(std::move(device), pieces.size(), std::move(hold)));
    int status = cxl_shm_gpu_start(started->device_->handle(), static_cast<uint32_t>(direction), static_cast<uint32_t>(way), pieces.data(),
                                   pieces.size(), &started->number_);
    if (status != CXL_SHM_OK) {
        started->has_ended_ = true;
        return pool_failure(status, text("copying ", pieces.size(), " pieces of GPU memory"));
    }
    copy = std::move(started);
    if (way == Way::any)
        copy->device_->tell_refusal();
    return {};
}

Copy::~Copy() {
    if (cancel(patience_ms))
        return;
    log(LogLevel::error, text("CXL: a GPU did not end a copy within ", patience_ms, " ms: its memory is never used again"));
    static auto& mutex = *new std::mutex;
    static auto& given_up = *new std::vector<std::pair<std::shared_ptr<Device>, std::shared_ptr<void>>>;
    std::lock_guard lock(mutex);
    given_up.emplace_back(std::move(device_), std::move(hold_));
}

nixl_status_t Copy::poll() {
    std::lock_guard lock(mutex_);
    if (has_ended_)
        return result_.code();
    int status = cxl_shm_gpu_wait(number_, 0);
    if (status == CXL_SHM_E_TIMEOUT)
        return NIXL_IN_PROG;
    if (status != CXL_SHM_OK)
        result_ = pool_failure(status, text("copying ", pieces_, " pieces of GPU memory"));
    has_ended_ = true;
    (void)cxl_shm_gpu_release(number_);
    hold_.reset();
    return result_.code();
}

bool Copy::cancel(uint64_t timeout_ms) {
    {
        std::lock_guard lock(mutex_);
        if (has_ended_)
            return true;
        (void)cxl_shm_gpu_cancel(number_);
    }
    // Another thread may see the end first, and then the number is not valid any more.
    (void)cxl_shm_gpu_wait(number_, timeout_ms);
    return poll() != NIXL_IN_PROG;
}

Status Copy::result() const {
    std::lock_guard lock(mutex_);
    return result_;
}

} // namespace kvbm_cxl::cuda
