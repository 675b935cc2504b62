// SPDX-License-Identifier: Apache-2.0
#include "memory.h"
#include "support/log.h"
#include <algorithm>
#include <thread>

namespace kvbm_cxl {

namespace {

/// The place in the pool of an offset in one of its devices, and how far the pool is contiguous from there.
bool pool_place(const std::vector<MapEntry>& of_pool, uintptr_t pool_base, uint64_t pool_bytes, const MapEntry& wanted, uint64_t offset,
                uint64_t& pool_offset, uint64_t& run_bytes) {
    for (const MapEntry& own : of_pool) {
        uintptr_t start = std::max(own.start, pool_base), end = std::min<uint64_t>(own.end, pool_base + pool_bytes);
        if (start >= end || !own.is_shared || own.device != wanted.device || own.inode != wanted.inode)
            continue;
        uint64_t first = own.offset + (start - own.start);
        if (offset >= first && offset - first < end - start) {
            pool_offset = start - pool_base + (offset - first);
            run_bytes = end - start - (offset - first);
            return true;
        }
    }
    return false;
}

} // namespace

void Registry::add(const std::shared_ptr<Registration>& registration) {
    std::lock_guard lock(mutex_);
    auto [number, is_new] = numbers_.emplace(key_of(*registration), Number{next_id_});
    next_id_ += is_new;
    registration->id = number->second.is;
    live_.emplace(registration->id, registration);
}

Registry::Key Registry::key_of(const Registration& registration) {
    return {registration.kind,   registration.base,        registration.len_bytes,
            registration.device, registration.pool_offset, registration.label};
}

void Registry::remove(const Registration& registration) {
    std::lock_guard lock(mutex_);
    auto [first, last] = live_.equal_range(registration.id);
    auto found = std::find_if(first, last, [&](const auto& entry) { return entry.second.get() == &registration; });
    if (found == last)
        return;
    live_.erase(found);
    Key key = key_of(registration);
    ++numbers_[key].times_former;
    former_.push_back(std::move(key));
    while (former_.size() > most_former) {
        auto number = numbers_.find(former_.front());
        former_.pop_front();
        // One that is registered now, or was given back again since, is remembered by a later entry.
        if (number != numbers_.end() && --number->second.times_former == 0 && !live_.contains(number->second.is))
            numbers_.erase(number);
    }
}

std::shared_ptr<Registration> Registry::find(uint64_t id) const {
    std::lock_guard lock(mutex_);
    auto [first, last] = live_.equal_range(id);
    auto found = std::find_if(first, last, [](const auto& entry) { return !entry.second->is_closed(); });
    return found == last ? nullptr : found->second;
}

std::vector<std::shared_ptr<Registration>> Registry::all() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Registration>> found;
    for (const auto& [id, registration] : live_)
        found.push_back(registration);
    return found;
}

bool Registration::close_and_wait(uint64_t timeout_ms) {
    close();
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    std::chrono::microseconds pause(20);
    while (is_used()) {
        if (std::chrono::steady_clock::now() >= deadline)
            return false;
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, std::chrono::microseconds(1000));
    }
    return true;
}

Lies find_in_pool(const std::vector<MapEntry>& entries, const std::vector<MapEntry>& of_pool, uintptr_t pool_base, uint64_t pool_bytes,
                  uintptr_t address, size_t len_bytes, uint64_t& pool_offset) {
    if (address > UINTPTR_MAX - len_bytes)
        return Lies::outside;
    uint64_t found_bytes = 0;
    bool is_straight = true;
    for (const MapEntry& entry : entries) {
        uintptr_t at = std::max(entry.start, address), end = std::min(entry.end, address + len_bytes);
        while (at < end && entry.is_shared) {
            uint64_t place = 0, run_bytes = 0;
            if (!pool_place(of_pool, pool_base, pool_bytes, entry, entry.offset + (at - entry.start), place, run_bytes))
                break;
            if (at == address)
                pool_offset = place;
            is_straight = is_straight && found_bytes == at - address && place == pool_offset + found_bytes;
            run_bytes = std::min<uint64_t>(run_bytes, end - at);
            found_bytes += run_bytes;
            at += run_bytes;
        }
    }
    if (found_bytes == 0)
        return Lies::outside;
    return found_bytes == len_bytes && is_straight ? Lies::inside : Lies::across;
}

Status locate_dram(const Pool& pool, Registration& registration) {
    const cxl_shm_info_t& info = pool.info();
    auto base = reinterpret_cast<uintptr_t>(info.base);
    uint64_t offset = 0;
    registration.kind = RegionKind::heap;
    if (registration.len_bytes == 0)
        return {};
    if (registration.base >= base && registration.base - base < info.len_bytes) {
        // The pool's own mapping, which under the emulator is not the file's.
        offset = registration.base - base;
    } else {
        std::vector<MapEntry> entries;
        const std::vector<MapEntry>* of_pool = nullptr;
        Status looked = pool.maps().overlapping(registration.base, registration.len_bytes, entries);
        // What maps no file with others is no mapping of the pool, and few registrations are of that kind.
        if (looked.ok() && std::none_of(entries.begin(), entries.end(), [](const MapEntry& entry) { return entry.is_shared; }))
            return {};
        if (looked.ok())
            looked = pool.own_entries(of_pool);
        if (!looked.ok())
            return looked.within(text("registering ", registration.len_bytes, " bytes at ", hex(registration.base)));
        switch (find_in_pool(entries, *of_pool, base, info.len_bytes, registration.base, registration.len_bytes, offset)) {
        case Lies::outside:
            return {};
        case Lies::inside:
            break;
        case Lies::across:
            return {NIXL_ERR_INVALID_PARAM, text("CXL: registering ", registration.len_bytes, " bytes at ", hex(registration.base),
                                                 ": only a part of them is memory of the pool: register the parts by themselves")};
        }
    }
    if (Status found = pool.range(offset, registration.len_bytes, registration.pool_address); !found.ok())
        return found.within(text("registering ", registration.len_bytes, " bytes at ", hex(registration.base)));
    registration.kind = RegionKind::pool;
    registration.pool_offset = offset;
    return {};
}

Status resolve_dram(const Pool& pool, Registration& registration) {
    Status found = locate_dram(pool, registration);
    if (!found.ok() || registration.kind != RegionKind::pool)
        return found;
    pool.map_ahead(registration.pool_address, registration.len_bytes);
    // Peers write to it whether this process lives or not. Another process's: it is up to its owner how long it lives.
    if (int status = cxl_shm_keep(registration.pool_address); status != CXL_SHM_OK && status != CXL_SHM_E_NOT_A_BLOCK)
        log(LogLevel::debug, pool_failure(status, text("keeping the block at offset ", hex(registration.pool_offset))).reason());
    return {};
}

} // namespace kvbm_cxl
