// SPDX-License-Identifier: Apache-2.0
//
// Mappings of this process: a query of a few mappings where the kernel answers that (PROCMAP_QUERY, Linux 6.11), else the whole
// of /proc/self/maps. Nothing that can change is remembered.
#pragma once

#include "status.h"
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

namespace kvbm_cxl {

/// A stretch of /proc/self/maps that shows a file or device.
struct MapEntry {
    uintptr_t start = 0;
    uintptr_t end = 0;
    uint64_t device = 0; // major and minor
    uint64_t inode = 0;
    uint64_t offset = 0; // in the file, of `start`
    bool is_shared = false;
};

/// The entries that belong to files, in the order of their addresses. Lines that are not understood are left out.
std::vector<MapEntry> parse_maps(std::string_view text);

/// The mappings of this process, which is the one that made this object.
class OwnMaps {
    std::mutex mutex_;
    int file_ = -1; // of /proc/self/maps, opened when it is first needed; after a fork it would show the parent's

    Status open_file(int& file);

  public:
    ~OwnMaps();
    OwnMaps() = default;
    OwnMaps(const OwnMaps&) = delete;
    OwnMaps& operator=(const OwnMaps&) = delete;

    /// The entries of files that overlap a range, in the order of their addresses. With the kernel's query the time depends on them alone;
    /// without, on all mappings of the process. NIXL_ERR_BACKEND if the kernel gives no answer.
    Status overlapping(uintptr_t address, size_t len_bytes, std::vector<MapEntry>& entries);
    /// The same from the text of the file, as where the kernel does not know the query.
    Status overlapping_by_text(uintptr_t address, size_t len_bytes, std::vector<MapEntry>& entries);
};

} // namespace kvbm_cxl
