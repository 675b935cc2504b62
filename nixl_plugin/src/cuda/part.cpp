// SPDX-License-Identifier: Apache-2.0
#include "gpus.h"
#include "support/log.h"
#include <set>

namespace kvbm_cxl::cuda {

namespace {

/// Copies between one GPU and memory of this process.
class DevicePart : public Part {
    using Registrations = std::set<std::shared_ptr<Registration>>;

    /// The registrations, in use until the device has finished, although the request that named them may have let go of them before.
    struct Hold {
        Registrations registrations;
        std::shared_ptr<Uses> uses;
        explicit Hold(Registrations of) : registrations(std::move(of)) {}
        ~Hold() {
            if (uses)
                uses->end();
        }
    };
    /// One post.
    struct Run {
        std::shared_ptr<Core> core;
        std::shared_ptr<Copy> copy;
        std::shared_ptr<Completion> whom;
        Uses uses; // as they were begun; the device's hold ends them
        uint64_t len_bytes = 0;
        std::recursive_mutex telling; // the notified request may cancel

        /// Says how it ended, unless that was said; a copy that is under way in spite of having been cancelled counts as cancelled.
        void tell(bool has_ended) noexcept {
            std::lock_guard lock(telling);
            std::shared_ptr<Completion> told = std::move(whom);
            if (!told)
                return;
            Status result = has_ended ? copy->result() : Status(NIXL_ERR_CANCELED, {});
            if (result.ok() && !uses.were_lent())
                result = {NIXL_ERR_BACKEND, "CXL: the link to a peer ended while its memory was being copied"};
            if (result.ok())
                core->counters.add(CXL_SHM_COUNT_NIXL_VRAM_BYTES, len_bytes);
            nixl_status_t code = result.ok() || result.code() == NIXL_ERR_CANCELED ? result.code() : report("gpu-copy", result);
            told->done(code);
        }
    };

    std::shared_ptr<Core> core_;
    std::shared_ptr<Gpus> gpus_;
    std::shared_ptr<Device> device_;
    Direction direction_ = Direction::to_device;
    std::vector<DevicePiece> pieces_;
    std::shared_ptr<Uses> uses_ = std::make_shared<Uses>();
    Registrations registrations_; // of them
    uint64_t len_bytes_ = 0;
    std::mutex mutex_;
    std::shared_ptr<Run> run_; // of the last post

    Status take(nixl_xfer_op_t operation, const Pair& pair);

  public:
    DevicePart(std::shared_ptr<Core> core, std::shared_ptr<Gpus> gpus) : core_(std::move(core)), gpus_(std::move(gpus)) {}
    ~DevicePart() override { cancel(); }

    Status take(nixl_xfer_op_t operation, const Pairs& pairs);
    nixl_status_t post(const std::shared_ptr<Completion>& whom) noexcept override;
    void poll() noexcept override;
    void cancel() noexcept override;
    uint64_t estimate_us() const noexcept override { return 20 + len_bytes_ / 10'000; }
};

std::shared_ptr<Device> device_of(const Registration* registration) {
    auto* range = registration ? dynamic_cast<const DeviceRange*>(registration->extra.get()) : nullptr;
    return range ? range->device : nullptr;
}

Status DevicePart::take(nixl_xfer_op_t operation, const Pair& pair) {
    Registration* own = pair.remote->own.get();
    std::shared_ptr<Device> local = device_of(pair.local), remote = device_of(own);
    std::byte* host = nullptr;
    if (local && remote)
        return {NIXL_ERR_NOT_SUPPORTED,
                "CXL: between two registrations of GPU memory in one process nothing is copied: use the CUDA backend"};
    if (remote)
        host = pair.local_bytes();
    else if (pair.remote->is.kind == RegionKind::pool)
        host = pair.remote_pool_bytes();
    else if (own)
        host = reinterpret_cast<std::byte*>(pair.remote_address);
    std::shared_ptr<Device> device = local ? local : remote;
    if (!device || !host)
        return {NIXL_ERR_NOT_SUPPORTED, "CXL: GPU memory is copied to and from the pool and memory of this process"};
    if (device_ && device_ != device)
        return {NIXL_ERR_NOT_SUPPORTED, "CXL: the descriptors of a transfer are all of one GPU: use one transfer for each"};
    device_ = std::move(device);
    direction_ = (operation == NIXL_READ) == !!local ? Direction::to_device : Direction::to_host;
    pieces_.push_back({local ? pair.local_address : pair.remote_address, host, pair.len_bytes});
    for (Registration* used : {pair.local, own}) {
        uses_->add(used);
        if (used)
            registrations_.insert(used->shared_from_this());
    }
    len_bytes_ += pair.len_bytes;
    return {};
}

Status DevicePart::take(nixl_xfer_op_t operation, const Pairs& pairs) {
    for (const Pair& pair : pairs) {
        if (Status taken = take(operation, pair); !taken.ok())
            return taken;
    }
    return {};
}

nixl_status_t DevicePart::post(const std::shared_ptr<Completion>& whom) noexcept {
    try {
        auto hold = std::make_shared<Hold>(registrations_);
        if (!uses_->begin())
            return report("gone", uses_->refusal());
        hold->uses = uses_;
        std::unique_ptr<Copy> copy;
        Status started = Copy::start(device_, direction_, pieces_, Way::any, std::move(hold), copy);
        if (!started.ok())
            return report("gpu-start", started);
        auto run = std::make_shared<Run>();
        run->core = core_;
        run->copy = std::move(copy);
        run->whom = whom;
        run->uses = *uses_;
        run->len_bytes = len_bytes_;
        {
            std::lock_guard lock(mutex_);
            run_ = run;
        }
        // An application that polls comes first as a rule; the thread is for those that do not.
        gpus_->watch(run->copy, [run] { run->tell(true); });
        return NIXL_IN_PROG;
    } catch (const std::exception& error) {
        return report("gpu-post", {NIXL_ERR_BACKEND, text("CXL: ", error.what())});
    }
}

void DevicePart::poll() noexcept {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Run> run = run_;
    lock.unlock();
    if (run && run->copy->poll() != NIXL_IN_PROG)
        run->tell(true);
}

void DevicePart::cancel() noexcept {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Run> run = std::move(run_);
    lock.unlock();
    if (run) {
        bool has_ended = run->copy->cancel(patience_ms);
        if (!has_ended)
            log(LogLevel::error,
                text("CXL: GPU ", device_->ordinal(), " did not end a copy within ", patience_ms, " ms: its memory stays registered"));
        run->tell(has_ended);
    }
}

} // namespace

Status make_device_part(const std::shared_ptr<Core>& core, const std::shared_ptr<Gpus>& gpus, nixl_xfer_op_t operation, const Pairs& pairs,
                        std::unique_ptr<Part>& part) {
    auto made = std::make_unique<DevicePart>(core, gpus);
    if (Status taken = made->take(operation, pairs); !taken.ok())
        return taken;
    part = std::move(made);
    return {};
}

} // namespace kvbm_cxl::cuda
