// SPDX-License-Identifier: Apache-2.0
#include "memory.h"
#include "log.h"
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

namespace kvbm_cxl {

namespace {

/// Takes a number up to `end_mark` off the front of `line`.
bool take_number(std::string_view& line, int radix, char end_mark, uint64_t& value) {
    auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value, radix);
    if (error != std::errc() || end == line.data() + line.size() || *end != end_mark)
        return false;
    line.remove_prefix(static_cast<size_t>(end - line.data()) + 1);
    return true;
}

/// "start-end perms offset major:minor inode path", hexadecimal but for the inode.
bool parse_line(std::string_view line, MapEntry& entry) {
    uint64_t start = 0, end = 0, major = 0, minor = 0;
    if (!take_number(line, 16, '-', start) || !take_number(line, 16, ' ', end) || line.size() < 5 || line[4] != ' ')
        return false;
    entry.is_shared = line[3] == 's';
    line.remove_prefix(5);
    std::string rest(line);
    rest.push_back(' '); // behind the inode there may be nothing
    line = rest;
    if (!take_number(line, 16, ' ', entry.offset) || !take_number(line, 16, ':', major) || !take_number(line, 16, ' ', minor) ||
        !take_number(line, 10, ' ', entry.inode))
        return false;
    entry.start = start;
    entry.end = end;
    entry.device = major << 32 | minor;
    return start < end;
}

/// The place in the pool of an offset in one of its devices, and how far the pool goes on like this from there.
bool pool_place(const std::vector<MapEntry>& entries, uintptr_t pool_base, uint64_t pool_bytes, const MapEntry& wanted, uint64_t offset,
                uint64_t& pool_offset, uint64_t& run_bytes) {
    for (const MapEntry& own : entries) {
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
    registration->id = next_id_++;
    live_.emplace(registration->id, registration);
}

void Registry::remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    live_.erase(id);
}

std::shared_ptr<Registration> Registry::find(uint64_t id) const {
    std::lock_guard lock(mutex_);
    auto found = live_.find(id);
    return found == live_.end() ? nullptr : found->second;
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

std::vector<MapEntry> parse_maps(std::string_view text) {
    std::vector<MapEntry> entries;
    while (!text.empty()) {
        size_t length = std::min(text.find('\n'), text.size());
        MapEntry entry;
        if (parse_line(text.substr(0, length), entry) && entry.inode != 0)
            entries.push_back(entry);
        text.remove_prefix(std::min(length + 1, text.size()));
    }
    return entries;
}

Lies find_in_pool(const std::vector<MapEntry>& entries, uintptr_t pool_base, uint64_t pool_bytes, uintptr_t address, size_t len_bytes,
                  uint64_t& pool_offset) {
    if (address > UINTPTR_MAX - len_bytes)
        return Lies::outside;
    uint64_t found_bytes = 0;
    bool is_straight = true;
    for (const MapEntry& entry : entries) {
        uintptr_t at = std::max(entry.start, address), end = std::min(entry.end, address + len_bytes);
        while (at < end && entry.is_shared) {
            uint64_t place = 0, run_bytes = 0;
            if (!pool_place(entries, pool_base, pool_bytes, entry, entry.offset + (at - entry.start), place, run_bytes))
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

/// The map of this process. Without it, pool memory seen through another mapping would pass for memory of the process.
static Status own_map(std::vector<MapEntry>& entries) {
    constexpr const char* path = "/proc/self/maps";
    errno = 0;
    std::ifstream file(path);
    std::ostringstream content;
    if (!file || !(content << file.rdbuf()) || file.bad())
        return {NIXL_ERR_BACKEND, text("CXL: reading ", path, ", which shows whether memory lies in the pool: ", std::strerror(errno),
                                       errno == EMFILE ? " (raise the limit of open files, or close some)" : "")};
    entries = parse_maps(content.str());
    return {};
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
        if (Status read = own_map(entries); !read.ok())
            return read.within(text("registering ", registration.len_bytes, " bytes at ", hex(registration.base)));
        switch (find_in_pool(entries, base, info.len_bytes, registration.base, registration.len_bytes, offset)) {
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
    // Not the start of a block, or another process's: then it is somebody else's business how long it lives.
    if (int status = cxl_shm_keep(registration.pool_address); status != CXL_SHM_OK && status != CXL_SHM_E_NOT_A_BLOCK)
        log(LogLevel::debug, pool_failure(status, text("keeping the block at offset ", hex(registration.pool_offset))).reason());
    return {};
}

} // namespace kvbm_cxl
