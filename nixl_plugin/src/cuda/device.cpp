// SPDX-License-Identifier: Apache-2.0
#include "device.h"
#include "../log.h"
#include <algorithm>
#include <map>

namespace kvbm_cxl::cuda {

namespace {

constexpr size_t most_streams = 4;
/// Buffers that are kept for later, of each device.
constexpr size_t most_idle_buffers = 8;

} // namespace

PinnedPool::PinnedPool(std::shared_ptr<const Driver> driver, std::shared_ptr<Pool> pool, uint64_t granule_bytes)
    : driver_(std::move(driver)), pool_(std::move(pool)), granule_bytes_(granule_bytes),
      granules_((pool_->info().len_bytes + granule_bytes - 1) / granule_bytes, State::unknown) {}

std::shared_ptr<PinnedPool> PinnedPool::of(const std::shared_ptr<const Driver>& driver, const std::shared_ptr<Pool>& pool,
                                           uint64_t granule_bytes) {
    static auto& mutex = *new std::mutex;
    static auto& known = *new std::map<const Pool*, std::weak_ptr<PinnedPool>>;
    std::lock_guard lock(mutex);
    auto& place = known[pool.get()];
    std::shared_ptr<PinnedPool> found = place.lock();
    if (!found)
        place = found = std::shared_ptr<PinnedPool>(new PinnedPool(driver, pool, granule_bytes));
    return found;
}

PinnedPool::~PinnedPool() {
    for (size_t index = 0; index < granules_.size(); index++) {
        if (granules_[index] != State::pinned)
            continue;
        Result error = (*driver_)->host_unregister(pool_->base() + index * granule_bytes_);
        // While the process ends, the driver may have gone first.
        if (error != success && error != error_deinitialized)
            log(LogLevel::debug, driver_->failure(error, "unpinning the pool").reason());
    }
}

bool PinnedPool::contains(const std::byte* address) const {
    auto at = reinterpret_cast<uintptr_t>(address), base = reinterpret_cast<uintptr_t>(pool_->base());
    return at >= base && at - base < pool_->info().len_bytes;
}

size_t PinnedPool::until_border(const std::byte* address) const {
    return granule_bytes_ - static_cast<uint64_t>(address - pool_->base()) % granule_bytes_;
}

bool PinnedPool::pin(const std::byte* address, size_t len_bytes) {
    uint64_t first = static_cast<uint64_t>(address - pool_->base()), pool_bytes = pool_->info().len_bytes;
    std::lock_guard lock(mutex_);
    for (uint64_t index = first / granule_bytes_; index * granule_bytes_ < first + len_bytes && index < granules_.size(); index++) {
        State& state = granules_[index];
        if (state == State::unknown) {
            uint64_t start = index * granule_bytes_, bytes = std::min(granule_bytes_, pool_bytes - start);
            Result error = (*driver_)->host_register(pool_->base() + start, bytes, host_portable);
            // Pinned by somebody else, it could be unpinned under a copy: not relied upon.
            state = error == success ? State::pinned : State::refused;
            if (error != success) {
                Status failed = driver_->failure(error, text("pinning ", bytes, " bytes of the pool at offset ", hex(start)));
                log_once(LogLevel::info, "pin",
                         failed.reason() + ": copies between it and GPUs go through a pinned buffer, which is slower");
            }
        }
        if (state == State::refused)
            return false;
    }
    return true;
}

Status Device::open(std::shared_ptr<const Driver> driver, uint64_t ordinal, std::shared_ptr<Device>& device) {
    if (ordinal >= static_cast<uint64_t>(driver->devices()))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: there is no GPU ", ordinal, ": this process sees ", driver->devices())};
    std::shared_ptr<Device> opened(new Device(driver, static_cast<int>(ordinal)));
    if (Result error = (*driver)->device_get(&opened->id_, opened->ordinal_); error != success)
        return opened->failure(error, "finding the device");
    Context context = nullptr;
    if (Result error = (*driver)->context_retain(&context, opened->id_); error != success)
        return opened->failure(error, "retaining the primary context");
    opened->context_ = context;
    device = std::move(opened);
    return {};
}

Device::~Device() {
    if (!context_)
        return;
    {
        Current current(*driver_, context_);
        if (current.result() == success) {
            for (Event event : events_)
                (*driver_)->event_destroy(event);
            for (Stream stream : streams_)
                (*driver_)->stream_destroy(stream);
            for (void* buffer : buffers_)
                (*driver_)->host_free(buffer);
        }
    }
    (*driver_)->context_release(id_);
}

Status Device::check_memory(DeviceAddress address, size_t len_bytes) {
    Current current(*driver_, context_);
    if (current.result() != success)
        return failure(current.result(), "making its context current");
    if (len_bytes == 0 || address > UINT64_MAX - len_bytes)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", len_bytes, " bytes at ", hex(address), " are no range of GPU memory")};
    for (DeviceAddress at : {address, address + len_bytes - 1}) {
        unsigned type = 0;
        int where = -1;
        if ((*driver_)->pointer_attribute(&type, attribute_memory_type, at) != success || type != memory_type_device ||
            (*driver_)->pointer_attribute(&where, attribute_device_ordinal, at) != success || where != ordinal_)
            return {NIXL_ERR_INVALID_PARAM, text("CXL: ", len_bytes, " bytes at ", hex(address), " are not memory of GPU ", ordinal_)};
    }
    return {};
}

Status Device::stream(Stream& stream) {
    std::lock_guard lock(mutex_);
    if (streams_.size() < most_streams) {
        Stream made = nullptr;
        if (Result error = (*driver_)->stream_create(&made, stream_non_blocking); error == success)
            streams_.push_back(made);
        else if (streams_.empty())
            return failure(error, "making a stream");
    }
    stream = streams_[next_stream_++ % streams_.size()];
    return {};
}

Status Device::take_event(Event& event) {
    std::lock_guard lock(mutex_);
    if (!events_.empty()) {
        event = events_.back();
        events_.pop_back();
        return {};
    }
    Result error = (*driver_)->event_create(&event, event_disable_timing);
    return error == success ? Status() : failure(error, "making an event");
}

Status Device::take_buffer(void*& buffer) {
    std::lock_guard lock(mutex_);
    if (!buffers_.empty()) {
        buffer = buffers_.back();
        buffers_.pop_back();
        return {};
    }
    Result error = (*driver_)->host_allocate(&buffer, bounce_bytes, host_portable);
    return error == success ? Status() : failure(error, text("allocating ", bounce_bytes, " bytes of pinned memory"));
}

void Device::give_back(Event event, void* buffer) {
    std::lock_guard lock(mutex_);
    if (event)
        events_.push_back(event);
    if (buffer && buffers_.size() < most_idle_buffers)
        buffers_.push_back(buffer);
    else if (buffer)
        (*driver_)->host_free(buffer);
}

Status Device::failure(Result error, std::string_view what) const {
    return driver_->failure(error, text("GPU ", ordinal_, ": ", what));
}

} // namespace kvbm_cxl::cuda
