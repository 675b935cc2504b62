// SPDX-License-Identifier: Apache-2.0
#include "maps.h"
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <sys/ioctl.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

constexpr const char* maps_path = "/proc/self/maps";

/// The kernel's struct procmap_query, which older headers do not have.
struct Query {
    uint64_t size, flags, address, start, end, vma_flags, page_bytes, offset, inode;
    uint32_t device_major, device_minor, name_bytes, build_id_bytes;
    uint64_t name, build_id;
};
static_assert(sizeof(Query) == 104);
constexpr unsigned long query_request = _IOWR('f', 17, Query);
constexpr uint64_t this_or_next = 0x10, is_shared_flag = 0x08;

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
    rest.push_back(' '); // after the inode the line may end
    line = rest;
    if (!take_number(line, 16, ' ', entry.offset) || !take_number(line, 16, ':', major) || !take_number(line, 16, ' ', minor) ||
        !take_number(line, 10, ' ', entry.inode))
        return false;
    entry.start = start;
    entry.end = end;
    entry.device = major << 32 | minor;
    return start < end;
}

Status cannot_read() {
    return {NIXL_ERR_BACKEND, text("CXL: reading ", maps_path, ", which shows whether memory lies in the pool: ", std::strerror(errno),
                                   errno == EMFILE ? " (raise the limit of open files, or close some)" : "")};
}

/// Asks for the mappings of a range one by one. False if the kernel does not answer, with errno.
bool ask(int file, uintptr_t address, size_t len_bytes, std::vector<MapEntry>& entries) {
    uintptr_t end = address + len_bytes;
    while (address < end) {
        Query query{};
        query.size = sizeof query;
        query.flags = this_or_next;
        query.address = address;
        if (ioctl(file, query_request, &query) != 0)
            return errno == ENOENT; // no mapping there, nor after it
        if (query.start >= end)
            return true;
        uint64_t device = uint64_t{query.device_major} << 32 | query.device_minor;
        if (query.inode != 0)
            entries.push_back({query.start, query.end, device, query.inode, query.offset, (query.vma_flags & is_shared_flag) != 0});
        address = query.end;
    }
    return true;
}

} // namespace

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

OwnMaps::~OwnMaps() {
    if (file_ >= 0)
        close(file_);
}

Status OwnMaps::open_file(int& file) {
    std::lock_guard lock(mutex_);
    if (file_ < 0)
        file_ = open(maps_path, O_RDONLY | O_CLOEXEC);
    file = file_;
    return file_ >= 0 ? Status() : cannot_read();
}

Status OwnMaps::overlapping(uintptr_t address, size_t len_bytes, std::vector<MapEntry>& entries) {
    entries.clear();
    if (len_bytes == 0 || address > UINTPTR_MAX - len_bytes)
        return {};
    int file = -1;
    if (Status opened = open_file(file); !opened.ok())
        return opened;
    if (ask(file, address, len_bytes, entries))
        return {};
    return overlapping_by_text(address, len_bytes, entries);
}

Status OwnMaps::overlapping_by_text(uintptr_t address, size_t len_bytes, std::vector<MapEntry>& entries) {
    errno = 0;
    std::ifstream file(maps_path);
    std::ostringstream content;
    if (!file || !(content << file.rdbuf()) || file.bad())
        return cannot_read();
    entries = parse_maps(content.str());
    std::erase_if(entries, [&](const MapEntry& entry) {
        return entry.end <= address || (entry.start > address && entry.start - address >= len_bytes);
    });
    return {};
}

} // namespace kvbm_cxl
