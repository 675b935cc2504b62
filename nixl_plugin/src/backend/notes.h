// SPDX-License-Identifier: Apache-2.0
//
// Notifications as they travel between engines.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvbm_cxl {

/// Stretches of the pool: offset and length.
using Extents = std::vector<std::pair<uint64_t, uint64_t>>;

/// Joins stretches until they are few. A joined stretch covers the gap as well.
Extents few_extents(Extents extents);

/// A notification as it travels: the stretches of the pool that the transfer before it wrote, which the receiver drops from its caches
/// before the application learns of it, and the application's text.
std::string wrap_note(const Extents& written, std::string_view message);
/// False if it was not made by wrap_note().
bool unwrap_note(std::string_view note, Extents& written, std::string& message);

} // namespace kvbm_cxl
