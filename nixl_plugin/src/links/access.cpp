// SPDX-License-Identifier: Apache-2.0
#include "access.h"
#include <ctime>

namespace kvbm_cxl {

namespace {
uint64_t boot_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_BOOTTIME, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
} // namespace

bool Access::is_good(uint64_t link) noexcept {
    if (link == 0 || this->link() != link)
        return false;
    // The copy has ended with a fence, so that the clock is not read before.
    if (boot_ns() - seen_ns_.load(std::memory_order_relaxed) <= GOOD_NS)
        return true;
    return look(link);
}

bool Access::look(uint64_t link) noexcept {
    if (link == 0)
        return false;
    uint64_t since = boot_ns();
    // Numbers of rings are never used again, so this is the link's or refused.
    if (cxl_shm_ring_check(pool_->handle(), ring_.load(std::memory_order_relaxed), nullptr) != CXL_SHM_OK)
        return false;
    seen_ns_.store(since, std::memory_order_relaxed);
    return this->link() == link;
}

void Access::open(uint64_t link, cxl_ring_t ring) {
    ring_.store(ring, std::memory_order_relaxed);
    seen_ns_.store(0, std::memory_order_relaxed);
    link_.store(link, std::memory_order_seq_cst);
    refresh();
}

} // namespace kvbm_cxl
