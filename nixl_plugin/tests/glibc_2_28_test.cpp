// SPDX-License-Identifier: Apache-2.0
//
// What stands in for the C library's part where that is older than GCC's libstdc++ expects (libc/glibc_2_28.cpp). The program is linked
// with it on every system, so that its condition variables and reference counts go by it too.
#include "support/world.h"
#include <atomic>
#include <condition_variable>
#include <pthread.h>
#include <thread>
#include <vector>

namespace kvbm_cxl {
int wait_by_realtime(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept;
}
extern "C" char __libc_single_threaded;
// The linker gives these names to the C library's function and to what is called in its place (--wrap).
extern "C" int __real_pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until);
extern "C" int __wrap_pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until);

using namespace kvbm_cxl;

namespace {

/// As if the system's clock had been set to the day after.
std::atomic<bool> realtime_has_jumped{false};

constexpr int64_t ms_ns = 1'000'000;

int64_t now_by(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return now.tv_sec * 1000 * ms_ns + now.tv_nsec;
}

timespec at(int64_t ns) {
    return {static_cast<time_t>(ns / (1000 * ms_ns)), static_cast<long>(ns % (1000 * ms_ns))};
}

struct Waiter {
    pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

    /// Waits until `until` by `clock`; the mutex is its own again afterwards, as before.
    int wait(clockid_t clock, timespec until) {
        pthread_mutex_lock(&mutex);
        int status = wait_by_realtime(&condition, &mutex, clock, &until);
        std::thread([this] { CHECK(pthread_mutex_trylock(&mutex) == EBUSY); }).join();
        pthread_mutex_unlock(&mutex);
        return status;
    }

    /// The same again after each wake-up without a cause.
    int wait_it_out(clockid_t clock, timespec until) {
        int status = 0;
        while (status == 0)
            status = wait(clock, until);
        return status;
    }
};

void a_wait_ends_at_its_time_and_not_before() {
    for (clockid_t clock : {CLOCK_MONOTONIC, CLOCK_REALTIME}) {
        for (int64_t wait_ms : {1, 40, 1100}) {
            Waiter waiter;
            int64_t begin = now_by(clock), end = begin + wait_ms * ms_ns;
            CHECK(waiter.wait_it_out(clock, at(end)) == ETIMEDOUT);
            int64_t late_ns = now_by(clock) - end;
            CHECK(late_ns >= 0 && late_ns < 20'000 * ms_ns * SLOWER);
        }
    }
}

void a_time_that_is_over_is_no_wait() {
    Waiter waiter;
    for (int64_t ago_ms : {0, 1, 5000})
        CHECK(waiter.wait(CLOCK_MONOTONIC, at(std::max<int64_t>(now_by(CLOCK_MONOTONIC) - ago_ms * ms_ns, 0))) == ETIMEDOUT);
    CHECK(waiter.wait(CLOCK_MONOTONIC, {0, 0}) == ETIMEDOUT);
}

void what_is_no_time_or_clock_is_refused() {
    Waiter waiter;
    CHECK(waiter.wait(CLOCK_MONOTONIC, {1, 1000 * ms_ns}) == EINVAL);
    CHECK(waiter.wait(CLOCK_MONOTONIC, {1, -1}) == EINVAL);
    CHECK(waiter.wait(CLOCK_REALTIME, {1, 1000 * ms_ns}) == EINVAL);
    CHECK(waiter.wait(CLOCK_BOOTTIME, at(now_by(CLOCK_BOOTTIME))) == EINVAL);
}

/// It does not take the system's clock for the one that was asked about.
void a_clock_that_is_set_is_no_end() {
    Waiter waiter;
    realtime_has_jumped = true;
    CHECK(waiter.wait(CLOCK_MONOTONIC, at(now_by(CLOCK_MONOTONIC) + 3'600'000 * ms_ns)) == 0);
    CHECK(waiter.wait(CLOCK_REALTIME, at(now_by(CLOCK_REALTIME) + 3'600'000 * ms_ns)) == ETIMEDOUT);
    realtime_has_jumped = false;
}

/// Whatever the time, the farthest among them: it waits, and a notification ends the wait.
void a_notification_ends_a_wait() {
    for (timespec until : {at(now_by(CLOCK_MONOTONIC) + 3'600'000 * ms_ns), timespec{std::numeric_limits<time_t>::max(), 999'999'999}}) {
        Waiter waiter;
        std::atomic<bool> is_set{false}, has_ended{false};
        std::atomic<int> wake_ups{0};
        std::thread thread([&] {
            pthread_mutex_lock(&waiter.mutex);
            while (!is_set) {
                CHECK(wait_by_realtime(&waiter.condition, &waiter.mutex, CLOCK_MONOTONIC, &until) == 0);
                wake_ups++;
            }
            pthread_mutex_unlock(&waiter.mutex);
            has_ended = true;
        });
        usleep(50'000);
        CHECK(!has_ended && wake_ups < 5); // it sleeps, rather than turn round
        pthread_mutex_lock(&waiter.mutex);
        is_set = true;
        pthread_cond_signal(&waiter.condition);
        pthread_mutex_unlock(&waiter.mutex);
        thread.join();
    }
}

/// libstdc++ is linked with ours: its waits, and its reference counts with threads beside them.
void libstdcxx_goes_by_it() {
    CHECK(__libc_single_threaded == 0);
    std::mutex mutex;
    std::condition_variable changed;
    std::unique_lock lock(mutex);
    auto begin = std::chrono::steady_clock::now();
    CHECK(!changed.wait_for(lock, std::chrono::milliseconds(30), [] { return false; }));
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(30));
    auto shared = std::make_shared<int>(17);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++)
        threads.emplace_back([shared] {
            for (int turn = 0; turn < 20'000; turn++)
                CHECK(std::vector<std::shared_ptr<int>>(3, shared).size() == 3);
        });
    for (std::thread& thread : threads)
        thread.join();
    threads.clear();
    CHECK(shared.use_count() == 1);
}

} // namespace

int __wrap_pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
    return realtime_has_jumped ? ETIMEDOUT : __real_pthread_cond_timedwait(condition, mutex, until);
}

int main() {
    a_wait_ends_at_its_time_and_not_before();
    a_time_that_is_over_is_no_wait();
    what_is_no_time_or_clock_is_refused();
    a_clock_that_is_set_is_no_end();
    a_notification_ends_a_wait();
    libstdcxx_goes_by_it();
}
