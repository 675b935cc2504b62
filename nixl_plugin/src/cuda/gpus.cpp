// SPDX-License-Identifier: Apache-2.0
#include "gpus.h"
#include "support/log.h"
#include <algorithm>
#include <chrono>

namespace kvbm_cxl::cuda {

namespace {

/// Between two looks at the copies under way.
constexpr auto rest = std::chrono::microseconds(30);

/// A registration in use by a device.
struct DeviceUse {
    std::shared_ptr<Registration> registration;
    explicit DeviceUse(std::shared_ptr<Registration> of) : registration(std::move(of)) { registration->share_use(); }
    ~DeviceUse() { registration->end_use(); }
};

Status find_device(const std::string& library) {
    if (library.empty() || library == "none")
        return {NIXL_ERR_NOT_SUPPORTED, "CXL: GPU memory is not offered: the option cuda_library says so"};
    uint32_t count = 0;
    int status = cxl_shm_gpu_count(library.c_str(), &count);
    if (status != CXL_SHM_OK)
        return {NIXL_ERR_NOT_SUPPORTED, pool_failure(status, "GPU memory is not offered").reason()};
    return {};
}

} // namespace

bool is_offered(const std::string& library) {
    Status found = find_device(library);
    if (!found.ok())
        log_once(LogLevel::info, "cuda", found.reason());
    return found.ok();
}

Status Gpus::open(const std::string& library, std::shared_ptr<Pool> pool, std::shared_ptr<Gpus>& gpus) {
    if (Status found = find_device(library); !found.ok())
        return found;
    gpus.reset(new Gpus(library, std::move(pool)));
    return {};
}

Gpus::~Gpus() {
    shut_down();
}

void Gpus::shut_down() noexcept {
    std::thread ending;
    {
        std::lock_guard lock(mutex_);
        is_ending_ = true;
        ending.swap(thread_);
    }
    changed_.notify_all();
    if (ending.joinable())
        ending.join();
    std::vector<Running> left;
    {
        std::lock_guard lock(mutex_);
        left.swap(running_);
    }
}

Status Gpus::register_memory(uint64_t ordinal, uint64_t address, size_t len_bytes, std::unique_ptr<RegistrationExtra>& range) {
    std::shared_ptr<Device> device;
    {
        // Registers the pool as well, which may take minutes: copies of other devices continue.
        std::lock_guard opens(opens_);
        std::unique_lock lock(mutex_);
        device = devices_[ordinal].lock();
        lock.unlock();
        if (!device) {
            if (Status opened = Device::open(library_, pool_, ordinal, device); !opened.ok())
                return opened;
            device->tell_refusal();
            lock.lock();
            devices_[ordinal] = device;
        }
    }
    if (Status checked = device->check_memory(address, len_bytes); !checked.ok())
        return checked;
    auto made = std::make_unique<DeviceRange>();
    made->device = std::move(device);
    range = std::move(made);
    return {};
}

bool Gpus::watch(std::shared_ptr<Copy> copy, std::function<void()> ended) noexcept {
    try {
        std::lock_guard lock(mutex_);
        if (is_ending_)
            return false;
        if (!thread_.joinable())
            thread_ = std::thread([this] { follow(); });
        running_.push_back({std::move(copy), std::move(ended)});
    } catch (const std::exception& error) {
        log_once(LogLevel::warn, "gpu-thread", text("CXL: no thread follows copies of GPUs: ", error.what()));
        return false;
    }
    changed_.notify_all();
    return true;
}

void Gpus::follow() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return is_ending_ || !running_.empty(); });
        if (is_ending_)
            return;
        std::vector<Running> running = std::move(running_);
        running_.clear();
        lock.unlock();
        std::erase_if(running, [](Running& one) {
            bool has_ended = one.copy->poll() != NIXL_IN_PROG;
            if (has_ended)
                one.ended();
            return has_ended;
        });
        bool is_waiting = !running.empty();
        lock.lock();
        std::move(running.begin(), running.end(), std::back_inserter(running_));
        running.clear();
        if (is_waiting)
            changed_.wait_for(lock, rest);
    }
}

bool DeviceMemory::contains(const Piece& piece) const {
    return piece.address >= whole_.address && piece.len_bytes <= whole_.len_bytes &&
           piece.address - whole_.address <= whole_.len_bytes - piece.len_bytes;
}

Status DeviceMemory::copy(std::span<const Piece> pieces, uint64_t offset, Direction direction) {
    uint64_t len_bytes = 0;
    for (const Piece& piece : pieces) {
        if (!contains(piece))
            return {NIXL_ERR_INVALID_PARAM, text("CXL: ", piece.len_bytes, " bytes at ", hex(piece.address), " are not registered")};
        len_bytes += piece.len_bytes;
    }
    std::byte* at = nullptr;
    if (Status found = gpus_->pool()->range(offset, len_bytes, at); !found.ok())
        return found;
    std::vector<DevicePiece> list;
    for (const Piece& piece : pieces) {
        list.push_back({piece.address, at, piece.len_bytes});
        at += piece.len_bytes;
    }
    // Before any copy is under way: a late copy must be kept.
    late_.reserve(late_.size() + 1);
    std::unique_ptr<Copy> made;
    auto use = std::make_shared<DeviceUse>(registration_);
    Status started = Copy::start(device_, direction, list, Way::any, std::move(use), made);
    if (!started.ok())
        return started;
    std::shared_ptr<Copy> copy = std::move(made);
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms_);
    while (copy->poll() == NIXL_IN_PROG) {
        if (std::chrono::steady_clock::now() >= deadline) {
            if (!copy->cancel(0)) {
                late_.push_back(copy);
                // It gives its registration back when it has ended, also where no staged transfer asks any more.
                (void)gpus_->watch(copy, [] {});
            }
            return {NIXL_ERR_BACKEND,
                    text("CXL: GPU ", device_->ordinal(), " did not copy ", len_bytes, " bytes within ", timeout_ms_, " ms")};
        }
        std::this_thread::sleep_for(rest);
    }
    return copy->result();
}

bool DeviceMemory::may_still_write() {
    std::erase_if(late_, [](const std::shared_ptr<Copy>& copy) { return copy->poll() != NIXL_IN_PROG; });
    return !late_.empty();
}

Status DeviceMemory::to_pool(std::span<const Piece> pieces, uint64_t offset) {
    return copy(pieces, offset, Direction::to_host);
}

Status DeviceMemory::from_pool(std::span<const Piece> pieces, uint64_t offset) {
    return copy(pieces, offset, Direction::to_device);
}

} // namespace kvbm_cxl::cuda
