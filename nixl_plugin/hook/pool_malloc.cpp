// SPDX-License-Identifier: Apache-2.0
//
// libcxl_malloc.so: large aligned buffers of a program that knows nothing of the pool, in the pool.
//
//     LD_PRELOAD=libcxl_malloc.so CXL_POOL=/dev/dax0.0 nixlbench ...
//
// posix_memalign() of at least CXL_MALLOC_MIN_BYTES (1 MiB) takes a scratch block of the pool, and free() gives it back. Everything else
// is the C library's. The plugin of the same process knows such a buffer for memory of the pool, and moves it without staging.
//
// An owner flushes what it stored by itself before peers read it. A program that takes its buffers for ordinary memory does not, so
// memset() of a buffer, which is how nixlbench fills it, flushes it here. Other stores are not seen: a program that fills its buffers
// otherwise needs one host, or hardware that keeps hosts coherent.
//
// A pool that cannot be opened, or is full, is told on standard error, and posix_memalign() fails with ENOMEM: a figure of ordinary memory
// would pass for one of the pool otherwise.

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cxl_shm.h>
#include <mutex>
#include <thread>

// The C library's own, by the names under which a program that replaces them finds them.
extern "C" void __libc_free(void* memory);
extern "C" void* __libc_memalign(std::size_t alignment, std::size_t len_bytes);
extern "C" void* __memset_chk(void* memory, int value, std::size_t len_bytes, std::size_t room_bytes);

namespace {

constexpr std::size_t DEFAULT_MIN_BYTES = std::size_t{1} << 20;
constexpr std::size_t MOST_BUFFERS = 4096;
constexpr auto FULL_WAIT = std::chrono::seconds(2);
constexpr auto FULL_RETRY = std::chrono::milliseconds(5);

struct Buffer {
    std::uintptr_t at = 0;    // what the program has
    std::uintptr_t block = 0; // where the block of the pool begins
    std::size_t len_bytes = 0;
};

// Set while this library itself allocates, so that the pool's own memory is the C library's.
thread_local bool is_inside = false;

std::mutex lock;
cxl_pool_t* pool = nullptr;
std::array<Buffer, MOST_BUFFERS> buffers;
// Addresses below and from which there is no buffer: free() and memset() of all other memory look no further.
std::atomic<std::uintptr_t> lowest{UINTPTR_MAX};
std::atomic<std::uintptr_t> end{0};

class Inside {
  public:
    Inside() { is_inside = true; }
    ~Inside() { is_inside = false; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
};

bool may_be_ours(const void* memory) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    return at >= lowest.load(std::memory_order_acquire) && at < end.load(std::memory_order_acquire);
}

std::size_t min_bytes() {
    const char* said = std::getenv("CXL_MALLOC_MIN_BYTES");
    const unsigned long long bytes = said ? std::strtoull(said, nullptr, 10) : 0;
    return bytes ? static_cast<std::size_t>(bytes) : DEFAULT_MIN_BYTES;
}

// Under `lock`. Tells what failed.
bool open_pool() {
    if (!pool && cxl_shm_open(nullptr, nullptr, &pool) != CXL_SHM_OK) {
        pool = nullptr;
        std::fprintf(stderr, "libcxl_malloc: the pool of CXL_POOL cannot be opened: %s\n", cxl_shm_last_error());
        return false;
    }
    return true;
}

// The buffer in which an address lies, or null. Under `lock`.
Buffer* buffer_of(const void* memory) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    for (Buffer& buffer : buffers)
        if (buffer.at && at >= buffer.at && at - buffer.at < buffer.len_bytes)
            return &buffer;
    return nullptr;
}

// Flushes what was stored to a buffer.
void flush(const void* memory, std::size_t len_bytes) {
    if (len_bytes && cxl_shm_flush(memory, len_bytes) != CXL_SHM_OK)
        std::fprintf(stderr, "libcxl_malloc: stores to a buffer were not flushed: %s\n", cxl_shm_last_error());
}

// A block of the pool, or null; what failed has been told. Under `lock`. What was just freed can be in the hands of the pool's upkeep for
// a moment: a full pool is tried again.
void* block_of(std::size_t len_bytes) {
    void* block = nullptr;
    const auto deadline = std::chrono::steady_clock::now() + FULL_WAIT;
    int status = cxl_shm_alloc(pool, len_bytes, CXL_SHM_ALLOC_SCRATCH, &block);
    while (status == CXL_SHM_E_FULL && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(FULL_RETRY);
        status = cxl_shm_alloc(pool, len_bytes, CXL_SHM_ALLOC_SCRATCH, &block);
    }
    if (status == CXL_SHM_OK)
        return block;
    std::fprintf(stderr, "libcxl_malloc: no %zu bytes of the pool: %s\n", len_bytes, cxl_shm_last_error());
    return nullptr;
}

void give_block(std::uintptr_t block) {
    if (cxl_shm_free(reinterpret_cast<void*>(block)) != CXL_SHM_OK)
        std::fprintf(stderr, "libcxl_malloc: a block was not given back: %s\n", cxl_shm_last_error());
}

// A buffer of the pool, or null; what failed has been told.
void* take(std::size_t alignment, std::size_t len_bytes) {
    const std::lock_guard<std::mutex> held(lock);
    if (!open_pool())
        return nullptr;
    const auto place = std::find_if(buffers.begin(), buffers.end(), [](const Buffer& buffer) { return !buffer.at; });
    if (place == buffers.end() || len_bytes > SIZE_MAX - alignment) {
        std::fprintf(stderr, "libcxl_malloc: a buffer of %zu bytes is one too many or too large\n", len_bytes);
        return nullptr;
    }
    // Blocks mostly begin where they are asked to; to make sure of it takes a chunk more of a large one.
    auto start = reinterpret_cast<std::uintptr_t>(block_of(len_bytes));
    if (start % alignment) {
        give_block(start);
        start = reinterpret_cast<std::uintptr_t>(block_of(len_bytes + alignment));
    }
    if (!start)
        return nullptr;
    const std::uintptr_t at = (start + alignment - 1) / alignment * alignment;
    *place = {at, start, len_bytes};
    if (at < lowest.load(std::memory_order_relaxed))
        lowest.store(at, std::memory_order_release);
    if (at + len_bytes > end.load(std::memory_order_relaxed))
        end.store(at + len_bytes, std::memory_order_release);
    return reinterpret_cast<void*>(at);
}

// Gives a buffer back; false if it is none of the pool.
bool give(void* memory) {
    const std::lock_guard<std::mutex> held(lock);
    Buffer* buffer = buffer_of(memory);
    if (!buffer)
        return false;
    // What the caches still hold would fall on the block's next owner.
    flush(memory, buffer->len_bytes);
    give_block(buffer->block);
    *buffer = {};
    return true;
}

} // namespace

extern "C" {

// posix_memalign(3), with large buffers in the pool.
__attribute__((visibility("default"))) int posix_memalign(void** memory, std::size_t alignment, std::size_t len_bytes) {
    if (alignment < sizeof(void*) || (alignment & (alignment - 1)))
        return EINVAL;
    void* taken = nullptr;
    if (!is_inside && len_bytes >= min_bytes()) {
        const Inside inside;
        taken = take(alignment, len_bytes);
    } else {
        taken = __libc_memalign(alignment, len_bytes);
    }
    if (!taken)
        return ENOMEM;
    *memory = taken;
    return 0;
}

// free(3), of buffers of the pool too.
__attribute__((visibility("default"))) void free(void* memory) {
    if (memory && !is_inside && may_be_ours(memory)) {
        const int before = errno;
        const Inside inside;
        const bool was_ours = give(memory);
        errno = before;
        if (was_ours)
            return;
    }
    __libc_free(memory);
}

// memset(3); what it stores to a buffer of the pool is flushed.
__attribute__((visibility("default"))) void* memset(void* memory, int value, std::size_t len_bytes) {
    __memset_chk(memory, value, len_bytes, SIZE_MAX);
    if (!is_inside && may_be_ours(memory)) {
        const Inside inside;
        const std::lock_guard<std::mutex> held(lock);
        if (buffer_of(memory))
            flush(memory, len_bytes);
    }
    return memory;
}

} // extern "C"
