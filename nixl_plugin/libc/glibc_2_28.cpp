// SPDX-License-Identifier: Apache-2.0
//
// What GCC's libstdc++ of today takes from the C library and glibc 2.28 does not have. It is linked only where the C library is that old,
// which it is for the wheels for manylinux_2_28: on a newer system they take its own wait at run time.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <ctime>
#include <dlfcn.h>
#include <pthread.h>

namespace kvbm_cxl {

namespace {

constexpr int64_t second_ns = 1'000'000'000;

int64_t now_ns(clockid_t clock) noexcept {
    timespec now{};
    clock_gettime(clock, &now);
    return now.tv_sec * second_ns + now.tv_nsec;
}

} // namespace

/// pthread_cond_clockwait() by pthread_cond_timedwait(), for a condition variable of default attributes: it waits by CLOCK_REALTIME for
/// what is left until `until` by `clock`. A wait that ends before that time is told as a wake-up without a cause (0), which every caller
/// must expect. A system clock that is set back makes the wait longer by as much.
int wait_by_realtime(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept {
    if (clock == CLOCK_REALTIME)
        return pthread_cond_timedwait(condition, mutex, until);
    if (clock != CLOCK_MONOTONIC || until->tv_nsec < 0 || until->tv_nsec >= second_ns)
        return EINVAL;
    // A time that is too far away for 64 bits of nanoseconds may come earlier: a year is long for a wake-up without a cause.
    constexpr int64_t farthest_s = 365 * 86400;
    int64_t now = now_ns(CLOCK_MONOTONIC), now_s = now / second_ns;
    int64_t rest = std::clamp<int64_t>(until->tv_sec, 0, now_s + farthest_s) * second_ns + until->tv_nsec - now;
    int64_t end = now_ns(CLOCK_REALTIME) + std::max<int64_t>(rest, 0);
    timespec by_realtime{static_cast<time_t>(end / second_ns), static_cast<long>(end % second_ns)};
    int status = pthread_cond_timedwait(condition, mutex, &by_realtime);
    if (status != ETIMEDOUT)
        return status;
    now = now_ns(CLOCK_MONOTONIC);
    bool is_over = until->tv_sec < now / second_ns || (until->tv_sec == now / second_ns && until->tv_nsec <= now % second_ns);
    return is_over ? ETIMEDOUT : 0;
}

} // namespace kvbm_cxl

// The C library's header would say that others see these two.
extern "C" {

/// Never set: libstdc++ then counts references with atomic instructions, which is right with any number of threads.
[[gnu::visibility("hidden")]] extern char __libc_single_threaded;
char __libc_single_threaded = 0;

/// (glibc 2.30)
[[gnu::visibility("hidden")]] int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                                         const timespec* until) {
    using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
    static const Wait theirs = reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
    return theirs ? theirs(condition, mutex, clock, until) : kvbm_cxl::wait_by_realtime(condition, mutex, clock, until);
}
}
