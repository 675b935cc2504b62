// SPDX-License-Identifier: Apache-2.0
#include "storage.h"
#include "support/log.h"
#include <utility>

namespace kvbm_cxl {

namespace {

/// Bytes that storage is taken to move in a microsecond, and what a call is taken to cost, for estimates.
constexpr uint64_t bytes_per_us = 2000;
constexpr uint64_t least_us = 5;

} // namespace

Status LocalPiece::refresh() const {
    if (!is_pool || len_bytes == 0)
        return {};
    int status = cxl_shm_invalidate(address, len_bytes);
    return status == CXL_SHM_OK ? Status() : pool_failure(status, text("invalidating ", len_bytes, " bytes of the pool"));
}

Status LocalPiece::publish() const {
    if (!is_pool || len_bytes == 0)
        return {};
    int status = cxl_shm_flush(address, len_bytes);
    return status == CXL_SHM_OK ? Status() : pool_failure(status, text("flushing ", len_bytes, " bytes of the pool"));
}

LocalPiece local_piece(const Pair& pair) {
    return {pair.local_bytes(), pair.len_bytes, pair.local->kind == RegionKind::pool};
}

/// One post. Shared with the worker, which may still be at its end when the part goes.
struct StoragePart::Run : Job {
    StoragePart* part = nullptr;
    std::shared_ptr<Completion> whom;
    std::atomic<bool> stop{false};
    std::atomic<bool> is_taken{false}; // by a worker, or by who cancels it before one has
    std::atomic<std::thread::id> worker{};
    std::mutex mutex;
    std::condition_variable ended;
    bool has_ended = false;

    nixl_status_t work() noexcept {
        Status result;
        try {
            result = part->transfer(stop);
        } catch (const std::exception& error) {
            result = {NIXL_ERR_BACKEND, text("CXL: ", error.what())};
        }
        part->uses_.end();
        return result.ok()                          ? NIXL_SUCCESS
               : result.code() == NIXL_ERR_CANCELED ? NIXL_ERR_CANCELED
                                                    : report(text(part->what_, ":", result.code()), result);
    }

    void run() noexcept override {
        if (is_taken.exchange(true))
            return;
        worker.store(std::this_thread::get_id());
        nixl_status_t result = work();
        whom->done(result);
        whom.reset();
        // The part may be gone as soon as this is seen.
        std::lock_guard lock(mutex);
        has_ended = true;
        ended.notify_all();
    }
};

Status StoragePart::prepare(std::shared_ptr<Core> core, const Pairs& pairs, std::string what) {
    core_ = std::move(core);
    what_ = "CXL: " + std::move(what);
    for (const Pair& pair : pairs) {
        if (pair.local->memory != DRAM_SEG)
            return {NIXL_ERR_NOT_SUPPORTED, text(what_, ": only DRAM can be on the local side; copy GPU memory to DRAM, or to the pool")};
        uses_.add(pair.local);
        uses_.add(pair.remote->own.get());
        len_bytes_ += pair.len_bytes;
    }
    ends_inside_post_ = len_bytes_ <= core_->options.inline_bytes;
    return {};
}

StoragePart::~StoragePart() {
    cancel();
}

nixl_status_t StoragePart::post(const std::shared_ptr<Completion>& whom) noexcept {
    try {
        cancel(); // the worker's last steps of the post before
        auto run = std::make_shared<Run>();
        run->part = this;
        if (!uses_.begin())
            return report("gone", {NIXL_ERR_NOT_FOUND, what_ + ": what it names was deregistered"});
        if (ends_inside_post_)
            return run->work();
        run->whom = whom;
        run_ = run;
        if (core_->workers.submit(run, 1))
            return NIXL_IN_PROG;
        run_.reset();
        return run->work();
    } catch (const std::exception& error) {
        return report("post", {NIXL_ERR_BACKEND, text(what_, ": ", error.what())});
    }
}

void StoragePart::cancel() noexcept {
    if (!run_)
        return;
    std::shared_ptr<Run> run = std::move(run_);
    run->stop.store(true, std::memory_order_relaxed);
    // The notified request may release the part at once: nothing remains to wait for.
    if (run->worker.load() == std::this_thread::get_id())
        return;
    // While it waits in the queue no worker has touched the memory: the work before it may take any time.
    if (!run->is_taken.exchange(true)) {
        uses_.end();
        std::exchange(run->whom, nullptr)->done(NIXL_ERR_CANCELED);
        return;
    }
    std::unique_lock lock(run->mutex);
    run->ended.wait(lock, [&] { return run->has_ended; });
}

uint64_t StoragePart::estimate_us() const noexcept {
    return least_us + len_bytes_ / bytes_per_us;
}

} // namespace kvbm_cxl
