// SPDX-License-Identifier: Apache-2.0
#include "pool.h"
#include "log.h"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace kvbm_cxl {

namespace {

constexpr uintptr_t page_bytes = 4096;
/// MADV_POPULATE_WRITE of Linux 5.14, which older headers do not have.
constexpr int populate_write = 23;
constexpr uint64_t least_join_timeout_ms = 10'000;

/// The pools that this process has open, by name and process: what a forked child finds here is its parent's and no use to it.
struct OpenPools {
    std::mutex mutex;
    std::map<std::pair<pid_t, std::string>, std::weak_ptr<Pool>> pools;
    /// Messages of the pool library go to this plugin's log.
    bool has_log = false;
};

void log_of_pool(void*, int level, const char* message) noexcept {
    try {
        log(level == 1 ? LogLevel::error : LogLevel::warn, text("CXL: ", message));
    } catch (const std::bad_alloc&) {
        log(LogLevel::error, "CXL: no memory for a message of the pool library");
    }
}

OpenPools& open_pools() {
    // Never destroyed: an engine may outlive the end of main.
    static auto& pools = *new OpenPools;
    return pools;
}

/// What a user can do about a pool that does not open, where the reason itself does not say so.
const char* advice_on(int cxl_status) {
    switch (cxl_status) {
    case CXL_SHM_E_SLOT_IN_USE:
    case CXL_SHM_E_FULL:
        return " (cxlctl hosts shows who uses it)";
    case CXL_SHM_E_CORRUPT:
        return " (cxlctl fsck tells more)";
    default:
        return "";
    }
}

} // namespace

nixl_status_t nixl_status_of(int cxl_status) {
    switch (cxl_status) {
    case CXL_SHM_OK:
        return NIXL_SUCCESS;
    case CXL_SHM_E_INVALID:
    case CXL_SHM_E_NOT_IN_POOL:
    case CXL_SHM_E_NOT_A_BLOCK:
    case CXL_SHM_E_TOO_LARGE:
        return NIXL_ERR_INVALID_PARAM;
    case CXL_SHM_E_NOT_FOUND:
        return NIXL_ERR_NOT_FOUND;
    case CXL_SHM_E_EXISTS:
    case CXL_SHM_E_BUSY:
    case CXL_SHM_E_NOT_HELD:
    case CXL_SHM_E_DEADLOCK:
        return NIXL_ERR_NOT_ALLOWED;
    case CXL_SHM_E_PEER_GONE:
    case CXL_SHM_E_PEER_CLOSED:
        return NIXL_ERR_REMOTE_DISCONNECT;
    case CXL_SHM_E_CANCELLED:
        return NIXL_ERR_CANCELED;
    default:
        return NIXL_ERR_BACKEND;
    }
}

Status pool_failure(int cxl_status, std::string_view what) {
    // Not every failing call is the thread's last one to have failed: take the words only if they are of this status.
    bool is_last = cxl_shm_last_status() == cxl_status;
    return {nixl_status_of(cxl_status), text("CXL: ", what, ": ", is_last ? cxl_shm_last_error() : cxl_shm_strerror(cxl_status))};
}

Status Pool::open(const Options& options, std::shared_ptr<Pool>& pool) {
    const char* ambient = std::getenv("CXL_POOL");
    std::string spec = !options.pool.empty() ? options.pool : ambient ? ambient : "";
    if (spec.empty())
        return {NIXL_ERR_INVALID_PARAM, "CXL: no pool is named: set the parameter pool, or CXL_POOL, to its devices, like /dev/dax0.0"};
    if (uint32_t version = cxl_shm_version(); version >> 16 != CXL_SHM_VERSION_MAJOR)
        return {NIXL_ERR_MISMATCH, text("CXL: the pool library has version ", version >> 16, " of its interface, this plugin ",
                                        CXL_SHM_VERSION_MAJOR, ": build both from one source")};

    OpenPools& known = open_pools();
    std::lock_guard lock(known.mutex);
    if (!known.has_log)
        cxl_shm_set_log(log_of_pool, nullptr);
    known.has_log = true;
    auto& place = known.pools[{getpid(), spec}];
    if ((pool = place.lock()))
        return {};
    std::shared_ptr<Pool> opened(new Pool);
    cxl_shm_options_t how{};
    how.struct_size = sizeof how;
    how.timeout_ms = options.timeout_ms;
    // The manager's answer may take as long as a peer's; a wait that was made short for peers does not shorten it.
    how.join_timeout_ms = options.timeout_ms > least_join_timeout_ms ? options.timeout_ms : 0;
    if (int status = cxl_shm_open(spec.c_str(), &how, &opened->handle_); status != CXL_SHM_OK) {
        Status failure = pool_failure(status, text("the pool ", spec, " cannot be opened"));
        return {failure.code(), failure.reason() + advice_on(status)};
    }
    opened->info_.struct_size = sizeof opened->info_;
    if (int status = cxl_shm_get_info(opened->handle_, &opened->info_); status != CXL_SHM_OK)
        return pool_failure(status, text("reading what the pool ", spec, " is like"));
    place = pool = std::move(opened);
    return {};
}

Pool::~Pool() {
    if (!handle_)
        return;
    int status = cxl_shm_close(handle_);
    // A child of fork only lets go of what its parent opened.
    if (status != CXL_SHM_OK && status != CXL_SHM_E_FORKED)
        log(LogLevel::warn, pool_failure(status, "closing the pool").reason());
}

PoolUuid Pool::uuid() const {
    PoolUuid uuid;
    std::memcpy(uuid.data(), info_.uuid, uuid.size());
    return uuid;
}

void Pool::map_ahead(std::byte* address, size_t len_bytes) const {
    // Seconds, for larger ones of small pages.
    constexpr size_t most_bytes = size_t{4} << 30;
    auto start = reinterpret_cast<uintptr_t>(address) & ~(page_bytes - 1);
    auto end = reinterpret_cast<uintptr_t>(address) + len_bytes;
    if (len_bytes > 0 && len_bytes <= most_bytes)
        (void)madvise(reinterpret_cast<void*>(start), end - start, populate_write);
}

Status Pool::own_entries(const std::vector<MapEntry>*& entries) const {
    std::lock_guard lock(entries_mutex_);
    if (entries_.empty()) {
        if (Status read = maps_.overlapping(reinterpret_cast<uintptr_t>(info_.base), info_.len_bytes, entries_); !read.ok())
            return read;
    }
    entries = &entries_;
    return {};
}

Status Pool::range(uint64_t offset, size_t len_bytes, std::byte*& address) const {
    void* found = nullptr;
    if (int status = cxl_shm_get_range(handle_, offset, len_bytes, &found); status != CXL_SHM_OK)
        return pool_failure(status, text("pool memory at offset ", hex(offset), " (+", len_bytes, " bytes)"));
    address = static_cast<std::byte*>(found);
    return {};
}

PoolBlock& PoolBlock::operator=(PoolBlock&& other) noexcept {
    if (this != &other) {
        free();
        pool_ = std::move(other.pool_);
        address_ = std::exchange(other.address_, nullptr);
        len_bytes_ = std::exchange(other.len_bytes_, 0);
    }
    return *this;
}

Status PoolBlock::allocate(std::shared_ptr<Pool> pool, size_t len_bytes, PoolBlock& block) {
    void* address = nullptr;
    if (int status = cxl_shm_alloc(pool->handle(), len_bytes, CXL_SHM_ALLOC_SCRATCH, &address); status != CXL_SHM_OK)
        return pool_failure(status, text("allocating ", len_bytes, " bytes of the pool"));
    block.free();
    block.pool_ = std::move(pool);
    block.address_ = static_cast<std::byte*>(address);
    block.len_bytes_ = len_bytes;
    return {};
}

void PoolBlock::free() {
    if (address_ && cxl_shm_free(address_) != CXL_SHM_OK)
        log_once(LogLevel::warn, "free", text("CXL: freeing ", len_bytes_, " bytes of the pool: ", cxl_shm_last_error()));
    address_ = nullptr;
    len_bytes_ = 0;
    pool_.reset();
}

} // namespace kvbm_cxl
