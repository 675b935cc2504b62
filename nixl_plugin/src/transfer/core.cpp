// SPDX-License-Identifier: Apache-2.0
#include "core.h"
#include "support/log.h"
#include <iterator>
#include <pthread.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

struct Engines {
    std::mutex mutex;
    /// By number and process: a forked child has none of its parent's.
    std::map<std::pair<pid_t, uint64_t>, std::weak_ptr<Core>> known;
};

Engines& engines() {
    // Never destroyed: an engine may outlive the end of main.
    static auto& all = *new Engines;
    return all;
}

} // namespace

void Core::bind_worker() const noexcept {
    // The CPUs were tried when the pool was joined; elsewhere the thread copies the same bytes.
    if (int status = cxl_shm_bind_worker(pool->handle()); status != CXL_SHM_OK)
        log_once(LogLevel::warn, "cpus", pool_failure(status, "binding a worker thread to its CPUs").reason());
}

void Inbox::put(std::string agent, std::string message) {
    std::lock_guard lock(mutex_);
    waiting_.emplace_back(std::move(agent), std::move(message));
    has_any_.store(true, std::memory_order_release);
}

void Inbox::take(notif_list_t& notifs) {
    if (!has_any_.load(std::memory_order_acquire))
        return;
    std::lock_guard lock(mutex_);
    std::move(waiting_.begin(), waiting_.end(), std::back_inserter(notifs));
    waiting_.clear();
    has_any_.store(false, std::memory_order_release);
}

uint32_t watch_forks() {
    static const int watched = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    (void)watched;
    return forks.load(std::memory_order_relaxed);
}

/// What a registration tells the peers.
PublicRegion public_region(const Core& core, const Registration& registration) {
    PublicRegion region;
    region.pool = core.pool->uuid();
    region.engine = core.id;
    region.registration = registration.id;
    region.kind = registration.kind;
    region.base = registration.base;
    region.offset = registration.pool_offset;
    region.len_bytes = registration.len_bytes;
    region.device = registration.device;
    return region;
}

void enter_engine(const std::shared_ptr<Core>& core) {
    Engines& all = engines();
    std::lock_guard lock(all.mutex);
    std::erase_if(all.known, [](const auto& entry) { return entry.second.expired(); });
    all.known[{getpid(), core->id}] = core;
}

std::shared_ptr<Core> find_engine(uint64_t id) {
    Engines& all = engines();
    std::lock_guard lock(all.mutex);
    auto found = all.known.find({getpid(), id});
    auto core = found == all.known.end() ? nullptr : found->second.lock();
    return core && !core->has_ended.load(std::memory_order_acquire) ? core : nullptr;
}

} // namespace kvbm_cxl
