// SPDX-License-Identifier: Apache-2.0
#include "log.h"
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <set>
#include <sys/syscall.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

constexpr size_t most_causes = 4096;

LogLevel wanted_level() {
    const char* text = std::getenv("NIXL_LOG_LEVEL");
    std::string name = text ? text : "WARN";
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    if (name == "TRACE")
        return LogLevel::trace;
    if (name == "DEBUG")
        return LogLevel::debug;
    if (name == "INFO")
        return LogLevel::info;
    if (name == "ERROR" || name == "FATAL")
        return LogLevel::error;
    return LogLevel::warn;
}

bool is_new(std::string_view cause) {
    // Never destroyed: threads may still log while the process ends.
    static auto& mutex = *new std::mutex;
    static auto& seen = *new std::set<std::string, std::less<>>;
    std::lock_guard lock(mutex);
    if (seen.find(cause) != seen.end() || seen.size() >= most_causes)
        return false;
    seen.emplace(cause);
    return true;
}

} // namespace

bool log_shown(LogLevel level) {
    static const LogLevel wanted = wanted_level();
    return level >= wanted;
}

void log(LogLevel level, std::string_view message) noexcept {
    try {
        if (!log_shown(level))
            return;
        timespec now{};
        clock_gettime(CLOCK_REALTIME, &now);
        tm parts{};
        localtime_r(&now.tv_sec, &parts);
        char head[64];
        std::snprintf(head, sizeof head, "%c%02d%02d %02d:%02d:%02d.%06ld %7ld nixl_cxl] ", "IIIWE"[static_cast<int>(level)],
                      parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, now.tv_nsec / 1000,
                      static_cast<long>(syscall(SYS_gettid)));
        std::string line = head;
        line.append(message).push_back('\n');
        // In one piece, so that lines of several threads and processes do not mix.
        (void)!write(STDERR_FILENO, line.data(), line.size());
    } catch (...) {
        // There is nowhere to say it.
    }
}

void log_once(LogLevel level, std::string_view cause, std::string_view message) noexcept {
    try {
        log(is_new(cause) ? level : std::min(level, LogLevel::info), message);
    } catch (...) {
        log(level, message);
    }
}

void log_failure(std::string_view cause, std::string_view what, const std::exception& error) noexcept {
    try {
        log_once(LogLevel::error, cause, text(what, error.what()));
    } catch (...) {
        log_once(LogLevel::error, cause, what);
    }
}

nixl_status_t report(std::string_view cause, const Status& failure) noexcept {
    log_once(LogLevel::error, cause, failure.reason());
    return failure.code();
}

} // namespace kvbm_cxl
