// SPDX-License-Identifier: Apache-2.0
#include "notes.h"
#include <algorithm>

namespace kvbm_cxl {

namespace {
/// Stretches that a notification names, at most.
constexpr size_t most_extents = 256;
} // namespace

Extents few_extents(Extents extents) {
    std::sort(extents.begin(), extents.end());
    for (uint64_t gap = 0;; gap = gap ? gap * 4 : 4096) {
        Extents joined;
        for (auto [offset, len] : extents) {
            if (!joined.empty() && offset <= joined.back().first + joined.back().second + gap)
                joined.back().second = std::max(joined.back().second, offset + len - joined.back().first);
            else
                joined.emplace_back(offset, len);
        }
        extents = std::move(joined);
        if (extents.size() <= most_extents)
            return extents;
    }
}

std::string wrap_note(const Extents& written, std::string_view message) {
    std::string note;
    auto put = [&note](uint64_t number, size_t bytes) {
        for (size_t i = 0; i < bytes; i++)
            note.push_back(static_cast<char>(number >> (8 * i)));
    };
    size_t count = std::min(written.size(), most_extents);
    put(count, 2);
    for (size_t i = 0; i < count; i++) {
        put(written[i].first, 8);
        put(written[i].second, 8);
    }
    return note.append(message);
}

bool unwrap_note(std::string_view note, Extents& written, std::string& message) {
    auto take = [&note](size_t bytes) {
        uint64_t number = 0;
        for (size_t i = 0; i < bytes; i++)
            number |= static_cast<uint64_t>(static_cast<unsigned char>(note[i])) << (8 * i);
        note.remove_prefix(bytes);
        return number;
    };
    if (note.size() < 2)
        return false;
    size_t count = take(2);
    if (count > most_extents || note.size() < count * 16)
        return false;
    written.clear();
    for (size_t i = 0; i < count; i++) {
        uint64_t offset = take(8);
        written.emplace_back(offset, take(8));
    }
    message = note;
    return true;
}

} // namespace kvbm_cxl
