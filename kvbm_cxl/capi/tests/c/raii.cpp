// SPDX-License-Identifier: Apache-2.0
//
// The same interface from C++20, with owners that clean up:  raii publish|consume POOL
#include "check.h"

#include <concepts>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

static_assert(std::same_as<decltype(&shmalloc), void* (*)(size_t)>);
static_assert(std::same_as<decltype(&clflush), void (*)(void*, size_t)>);
static_assert(std::is_standard_layout_v<cxl_shm_options_t> && std::is_trivially_copyable_v<cxl_shm_info_t>);

namespace {

struct Failure : std::runtime_error {
    explicit Failure(int status)
        : std::runtime_error(std::string(cxl_shm_strerror(status)) + ": " + cxl_shm_last_error()), status(status) {}
    int status;
};

void check(int status) {
    if (status != CXL_SHM_OK)
        throw Failure(status);
}

// An open pool.
class Pool {
  public:
    explicit Pool(const std::string& spec) {
        cxl_shm_options_t options{};
        options.struct_size = sizeof options;
        options.timeout_ms = PATIENCE_S * 1000;
        options.join_timeout_ms = 30000;
        cxl_pool_t* opened = nullptr;
        const std::time_t since = std::time(nullptr);
        int status;
        while ((status = cxl_shm_open(spec.c_str(), &options, &opened)) == CXL_SHM_E_NOT_A_POOL || status == CXL_SHM_E_OS)
            check_rest(since, "the pool");
        check(status);
        pool_.reset(opened);
    }

    cxl_pool_t* get() const { return pool_.get(); }

    // A kept block of so many elements, freed with its owner unless that lets it go.
    struct Free {
        void operator()(const void* block) const { cxl_shm_free(const_cast<void*>(block)); }
    };
    template <class T> using Block = std::unique_ptr<T, Free>;
    template <class T> Block<T[]> allocate(size_t count) const {
        static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= CXL_SHM_LINE_BYTES);
        void* block = nullptr;
        check(cxl_shm_alloc(get(), count * sizeof(T), 0, &block));
        return Block<T[]>(static_cast<T*>(block));
    }

    template <class T> void put(const char* key, std::span<const T> span) const {
        check(cxl_shm_flush(span.data(), span.size_bytes()));
        check(cxl_shm_put_ex(get(), key, const_cast<T*>(span.data()), span.size_bytes(), 0, CXL_SHM_TIMEOUT_DEFAULT));
    }

    template <class T> std::span<const T> await(const char* key) const {
        void* found = nullptr;
        uint64_t len_bytes = 0;
        const std::time_t since = std::time(nullptr);
        int status;
        while ((status = cxl_shm_get_ex(get(), key, &found, &len_bytes, CXL_SHM_TIMEOUT_DEFAULT)) == CXL_SHM_E_NOT_FOUND)
            check_rest(since, key);
        check(status);
        check(cxl_shm_invalidate(found, len_bytes));
        return {static_cast<const T*>(found), len_bytes / sizeof(T)};
    }

  private:
    struct Close {
        void operator()(cxl_pool_t* pool) const { CHECK(cxl_shm_close(pool) == CXL_SHM_OK); }
    };
    std::unique_ptr<cxl_pool_t, Close> pool_;
};

// A lock of the pool as a standard mutex.
class Mutex {
  public:
    Mutex(const Pool& pool, cxl_lock_t lock) : pool_(pool.get()), lock_(lock) {}
    void lock() { check(cxl_shm_acquire_lock_ex(pool_, lock_, CXL_SHM_TIMEOUT_DEFAULT, nullptr)); }
    void unlock() { check(cxl_shm_release_lock_ex(pool_, lock_)); }
    bool try_lock() { return cxl_shm_acquire_lock_ex(pool_, lock_, 0, nullptr) == CXL_SHM_OK; }

  private:
    cxl_pool_t* pool_;
    cxl_lock_t lock_;
};

struct Shared {
    cxl_lock_t lock;
    shm_ptr_t sum;
};

constexpr int THREADS = 4;
constexpr uint64_t ADDS = 100;

void add_up(const Pool& pool, const Shared& shared, uint64_t amount) {
    void* place = nullptr;
    check(cxl_shm_get_range(pool.get(), shared.sum, sizeof(uint64_t), &place));
    auto* sum = static_cast<volatile uint64_t*>(place);
    std::vector<std::jthread> threads;
    for (int i = 0; i < THREADS; i++)
        threads.emplace_back([&] {
            Mutex mutex(pool, shared.lock);
            for (uint64_t n = 0; n < ADDS; n++) {
                std::scoped_lock guard(mutex);
                check(cxl_shm_invalidate(place, sizeof *sum));
                *sum = *sum + amount;
                check(cxl_shm_flush(place, sizeof *sum));
            }
        });
}

uint64_t sum_of(const Pool& pool, const Shared& shared) {
    void* place = nullptr;
    uint64_t sum = 0;
    Mutex mutex(pool, shared.lock);
    std::unique_lock guard(mutex);
    check(cxl_shm_get_range(pool.get(), shared.sum, sizeof sum, &place));
    check(cxl_shm_copy_out(&sum, place, sizeof sum));
    return sum;
}

std::string_view text_of(std::span<const char> span) {
    return {span.data(), span.size()};
}

void publish(const std::string& spec) {
    cxl_shm_format_options_t format{};
    format.struct_size = sizeof format;
    format.slots = 4;
    format.chunk_bytes = 1 << 20;
    check(cxl_shm_format(spec.c_str(), &format));
    Pool pool(spec);
    auto shared = pool.allocate<Shared>(1);
    auto sum = pool.allocate<uint64_t>(1);
    const uint64_t zero = 0;
    check(cxl_shm_copy_in(sum.get(), &zero, sizeof zero));
    shared[0].sum = cxl_shm_get_offset(sum.get());
    check(cxl_shm_allocate_lock_ex(pool.get(), CXL_SHM_TIMEOUT_DEFAULT, &shared[0].lock));
    const std::string_view words = "what one host writes, another one reads";
    auto text = pool.allocate<char>(words.size());
    std::copy(words.begin(), words.end(), text.get());
    pool.put<char>("text", {text.get(), words.size()});
    pool.put<Shared>("shared", {shared.get(), 1});
    const Shared copy = shared[0];
    add_up(pool, copy, 1);
    pool.put<char>("published", {text.get(), 1});
    pool.await<char>("consumed");
    CHECK(sum_of(pool, copy) == THREADS * ADDS * 1001);
    try {
        pool.put<char>("text", {text.get(), 1});
        CHECK(!"a bound name was bound again");
    } catch (const Failure& failure) {
        CHECK(failure.status == CXL_SHM_E_EXISTS);
    }
    // The other host frees it.
    void* given = text.release();
    check(cxl_shm_put_ex(pool.get(), "given", given, words.size(), 0, CXL_SHM_TIMEOUT_DEFAULT));
    pool.await<char>("done");
}

void consume(const std::string& spec) {
    Pool pool(spec);
    CHECK(text_of(pool.await<char>("text")) == "what one host writes, another one reads");
    const Shared shared = pool.await<Shared>("shared")[0];
    add_up(pool, shared, 1000);
    pool.await<char>("published");
    CHECK(sum_of(pool, shared) == THREADS * ADDS * 1001);
    auto mark = pool.allocate<char>(1);
    pool.put<char>("consumed", {mark.get(), 1});
    Pool::Block<const char[]> mine(pool.await<char>("given").data(), {});
    check(cxl_shm_destroy_ex(pool.get(), "given", CXL_SHM_TIMEOUT_DEFAULT));
    pool.put<char>("done", {mark.get(), 1});
}

} // namespace

int main(int argc, char** argv) {
    CHECK(argc == 3);
    try {
        if (std::string_view(argv[1]) == "publish")
            publish(argv[2]);
        else
            consume(argv[2]);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
        return 1;
    }
    std::printf("%s: ok\n", argv[1]);
    return 0;
}
