// SPDX-License-Identifier: Apache-2.0
//
// Messages on stderr, where NIXL's own appear and at the level that NIXL_LOG_LEVEL asks of it (TRACE, DEBUG, INFO, WARN, ERROR, FATAL; WARN
// without it). NIXL's logger is not used: its symbols differ between releases.
#pragma once

#include "status.h"

namespace kvbm_cxl {

enum class LogLevel { trace, debug, info, warn, error };

/// Whether messages of a level are shown: ask before composing a costly one.
bool log_shown(LogLevel level);

/// Writes one line. Never throws.
void log(LogLevel level, std::string_view message) noexcept;

/// Writes a message the first time that `cause` is given in this process. Causes are few and short, like "option:spin_us"; after some
/// thousand of them, all further ones are shown at INFO only.
void log_once(LogLevel level, std::string_view cause, std::string_view message) noexcept;

/// Logs an exception as an error, once per cause.
void log_failure(std::string_view cause, std::string_view what, const std::exception& error) noexcept;

/// A failure at the level of errors, once per cause, and its NIXL status for the caller to return.
nixl_status_t report(std::string_view cause, const Status& failure) noexcept;

} // namespace kvbm_cxl
