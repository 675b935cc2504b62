// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "nixl_api.h"
#include <sstream>
#include <string>
#include <string_view>

namespace kvbm_cxl {

/// What became of something: a NIXL status and, for failures, the reason in words (what failed, where, what to do).
class [[nodiscard]] Status {
    nixl_status_t code_ = NIXL_SUCCESS;
    std::string reason_;

  public:
    Status() = default;
    Status(nixl_status_t code, std::string reason) : code_(code), reason_(std::move(reason)) {}

    bool ok() const { return code_ == NIXL_SUCCESS; }
    nixl_status_t code() const { return code_; }
    const std::string& reason() const { return reason_; }

    /// The same failure, with the operation in front of the reason.
    Status within(std::string_view what) const { return ok() ? *this : Status(code_, std::string(what) + ": " + reason_); }
};

/// The parts in text, one after the other. For messages: not for hot paths.
template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

/// "0x..." of an address or offset.
std::string hex(uint64_t value);

/// What an operation ends with that was cancelled.
Status cancelled();

} // namespace kvbm_cxl
