// SPDX-License-Identifier: Apache-2.0
#include "file.h"
#include "support/log.h"
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

/// Bytes moved between two looks at whether to stop; below what one call of the system takes at most.
constexpr size_t step_bytes = 8u << 20;
/// Interruptions of one call by signals that are put up with.
constexpr int most_interruptions = 10'000;
constexpr nixl_status_t not_found = NIXL_ERR_NOT_FOUND;

nixl_status_t status_of_errno(int error) {
    switch (error) {
    case ENOENT:
        return not_found;
    case EACCES:
    case EPERM:
    case EROFS:
    case EBADF:
        return NIXL_ERR_NOT_ALLOWED;
    case EINVAL:
    case EFAULT:
        return NIXL_ERR_INVALID_PARAM;
    default:
        return NIXL_ERR_BACKEND;
    }
}

const char* advice_for(int error) {
    switch (error) {
    case EBADF:
        return " (is it open, and for that?)";
    case EINVAL:
        return " (with O_DIRECT, memory, offset and length have to be aligned)";
    case ENOSPC:
    case EDQUOT:
        return " (earlier bytes stay written)";
    default:
        return "";
    }
}

/// Runs a call of the system until no signal interrupts it.
template <class Call> auto uninterrupted(Call call) {
    auto result = call();
    for (int times = 0; result < 0 && errno == EINTR && times < most_interruptions; times++)
        result = call();
    return result;
}

/// Whether stores to a mapping of the file reach the memory without the page cache.
bool is_dax(int fd) {
#if defined(STATX_ATTR_DAX)
    struct statx facts{};
    return statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &facts) == 0 && (facts.stx_attributes & STATX_ATTR_DAX);
#else
    (void)fd;
    return false;
#endif
}

/// Pools begin at multiples of this.
constexpr uint64_t pool_unit_bytes = 2 << 20;

bool begins_like_a_pool(int fd, uint64_t offset = 0) {
    uint64_t first = 0;
    ssize_t got = uninterrupted([&] { return pread(fd, &first, sizeof first, static_cast<off_t>(offset)); });
    return got == sizeof first && first == CXL_SHM_MAGIC;
}

/// Whether the file is one that the pool lies on. Not seen where hosts are emulated, whose view of the pool is memory of their own.
bool is_of_pool(const Pool& pool, const struct stat& facts) {
    const std::vector<MapEntry>* entries = nullptr;
    uint64_t device = uint64_t{major(facts.st_dev)} << 32 | minor(facts.st_dev);
    return pool.own_entries(entries).ok() && std::any_of(entries->begin(), entries->end(), [&](const MapEntry& entry) {
               return entry.is_shared && entry.device == device && entry.inode == facts.st_ino;
           });
}

/// The path by which this process reaches what a descriptor is open on, also where it has no name any more.
std::string descriptor_path(int fd) {
    return text("/proc/self/fd/", fd);
}

bool is_same_file(int fd, const std::string& path) {
    struct stat one{}, other{};
    return fstat(fd, &one) == 0 && stat(path.c_str(), &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

} // namespace

bool parse_file_access(std::string_view text, FileAccess& access) {
    if (text == "auto")
        access = FileAccess::automatic;
    else if (text == "mmap")
        access = FileAccess::mapped;
    else if (text == "pread")
        access = FileAccess::calls;
    else
        return false;
    return true;
}

Status parse_file_spec(std::string_view meta_info, FileSpec& spec, bool& is_there) {
    is_there = false;
    spec = {};
    if (meta_info.find('\0') != std::string_view::npos)
        return {};
    if (meta_info.substr(0, 1) == "/") {
        spec = {std::string(meta_info), O_RDWR, true};
        is_there = true;
        return {};
    }
    size_t colon = meta_info.find(':');
    std::string_view modes = meta_info.substr(0, colon), mode = modes.substr(0, modes.find(','));
    if (colon == std::string_view::npos || (mode != "ro" && mode != "rw"))
        return {};
    spec.path = meta_info.substr(colon + 1);
    spec.flags = mode == "ro" ? O_RDONLY : O_RDWR;
    for (modes.remove_prefix(mode.size()); !modes.empty(); modes.remove_prefix(mode.size())) {
        modes.remove_prefix(1);
        mode = modes.substr(0, modes.find(','));
        if (mode == "create")
            spec.flags |= O_CREAT;
        else if (mode == "direct")
            spec.flags |= O_DIRECT;
        else if (mode == "sync")
            spec.flags |= O_SYNC;
        else if (mode == "noatime")
            spec.flags |= O_NOATIME;
        else
            return {NIXL_ERR_INVALID_PARAM, text("CXL: \"", mode, "\" in \"", meta_info,
                                                 "\" is no way of opening a file: there are create, direct, sync and noatime")};
    }
    if (spec.path.empty())
        return {NIXL_ERR_INVALID_PARAM, text("CXL: \"", meta_info, "\" has no path")};
    is_there = true;
    return {};
}

Status File::os_failure(std::string_view what, uint64_t offset, size_t len_bytes) const {
    int error = errno;
    return {status_of_errno(error),
            text("CXL: ", what, " ", len_bytes, " bytes at offset ", offset, " of ", name_, ": ", std::strerror(error), advice_for(error))};
}

Status File::open_by_path(const FileSpec& spec) {
    // A pipe named by mistake must not make us wait for its other end.
    int flags = spec.flags | O_CLOEXEC | O_NONBLOCK;
    name_ = spec.path;
    fd_ = uninterrupted([&] { return ::open(spec.path.c_str(), flags, 0644); });
    if (fd_ < 0 && spec.may_be_read_only && (errno == EACCES || errno == EPERM || errno == EROFS))
        fd_ = uninterrupted([&] { return ::open(spec.path.c_str(), (flags & ~O_ACCMODE) | O_RDONLY); });
    if (fd_ >= 0)
        return {};
    int error = errno;
    return {status_of_errno(error), text("CXL: opening ", name_, ": ", std::strerror(error))};
}

Status File::open_by_descriptor(uint64_t descriptor) {
    name_ = text("descriptor ", descriptor);
    fd_ = descriptor > INT_MAX ? -1 : fcntl(static_cast<int>(descriptor), F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0)
        return {NIXL_ERR_INVALID_PARAM,
                text("CXL: devId ", descriptor,
                     " is no open descriptor of this process: give one, or a path in metaInfo, like rw:/dev/dax0.0")};
    char target[4096];
    ssize_t len = readlink(descriptor_path(fd_).c_str(), target, sizeof target);
    if (len > 0)
        name_.assign(target, static_cast<size_t>(len));
    return {};
}

Status File::choose_access(FileAccess access) {
    struct stat facts{};
    if (fstat(fd_, &facts) != 0)
        return os_failure("looking at", 0, 0);
    bool is_character = S_ISCHR(facts.st_mode), is_regular = S_ISREG(facts.st_mode);
    if (!is_character && !is_regular && !S_ISBLK(facts.st_mode))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", name_, " is neither a file nor a device")};
    int flags = fcntl(fd_, F_GETFL);
    bool read_only = (flags & O_ACCMODE) == O_RDONLY;
    if (!is_character) {
        look_fd_ = uninterrupted([&] { return ::open(descriptor_path(fd_).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
        if (look_fd_ < 0 && !read_only)
            return {NIXL_ERR_NOT_ALLOWED, text("CXL: ", name_, " can be written but not read (", std::strerror(errno),
                                               "), so that it cannot be seen whether a pool would be destroyed: allow reading it")};
    }
    bool is_mapped = is_character || (is_regular && (access == FileAccess::mapped || begins_like_a_pool(look_fd_)));
    is_mapped |= is_regular && access == FileAccess::automatic && is_dax(fd_);
    // A pool may begin anywhere on it.
    is_mapped |= is_regular && is_of_pool(*pool_, facts);
    // pwrite() would add to the end then, whatever the offset, and say that all is well.
    if (!is_mapped && !read_only && (flags & O_APPEND))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", name_,
                                             " is open for appending, so that nothing can be written at an offset: open it "
                                             "without O_APPEND")};
    if (!is_mapped)
        return {};
    uint32_t found = 0;
    int status = cxl_shm_device_open(pool_->handle(), descriptor_path(fd_).c_str(), read_only ? CXL_SHM_DEVICE_READ_ONLY : 0, &device_,
                                     nullptr, &found);
    if (status != CXL_SHM_OK)
        return pool_failure(status, text("mapping ", name_));
    is_in_pool_ = found & CXL_SHM_DEVICE_IN_POOL;
    return {};
}

Status File::open(std::shared_ptr<Pool> pool, uint64_t descriptor, const std::string& meta_info, FileAccess access,
                  std::unique_ptr<File>& file) {
    FileSpec spec;
    bool is_path = false;
    if (Status parsed = parse_file_spec(meta_info, spec, is_path); !parsed.ok())
        return parsed;
    // A bare path may only name the file that the descriptor has open. The descriptor then decides the access.
    bool is_described = is_path && spec.may_be_read_only && descriptor <= INT_MAX && is_same_file(static_cast<int>(descriptor), spec.path);
    std::unique_ptr<File> opened(new File(std::move(pool)));
    Status result = is_path && !is_described ? opened->open_by_path(spec) : opened->open_by_descriptor(descriptor);
    if (result.ok())
        result = opened->choose_access(access);
    if (!result.ok())
        return result;
    file = std::move(opened);
    return {};
}

File::~File() {
    if (is_mapped() && cxl_shm_device_close(device_) != CXL_SHM_OK)
        log(LogLevel::debug, text("CXL: closing ", name_, ": ", cxl_shm_last_error()));
    for (int fd : {fd_, look_fd_}) {
        if (fd >= 0)
            close(fd);
    }
}

/// A file that is or became a pool is never written without the pool.
Status File::refuse_pools(uint64_t offset, size_t len_bytes) const {
    bool is_pool = begins_like_a_pool(look_fd_);
    for (uint64_t at = offset - offset % pool_unit_bytes; !is_pool && at < offset + len_bytes; at += pool_unit_bytes)
        is_pool = begins_like_a_pool(look_fd_, at);
    if (!is_pool)
        return {};
    return {NIXL_ERR_NOT_ALLOWED, text("CXL: writing ", len_bytes, " bytes at offset ", offset, " of ", name_,
                                       ": it was formatted as a pool since it was registered: register it again to reach its blocks")};
}

Status File::step(bool is_write, uint64_t offset, std::byte* memory, size_t len_bytes, size_t& moved) const {
    moved = len_bytes;
    if (is_mapped()) {
        int status =
            is_write ? cxl_shm_device_write(device_, offset, memory, len_bytes) : cxl_shm_device_read(device_, offset, memory, len_bytes);
        return status == CXL_SHM_OK
                   ? Status()
                   : pool_failure(status, text(is_write ? "writing " : "reading ", len_bytes, " bytes at offset ", offset, " of ", name_));
    }
    auto at = static_cast<off_t>(offset);
    ssize_t result = uninterrupted([&] { return is_write ? pwrite(fd_, memory, len_bytes, at) : pread(fd_, memory, len_bytes, at); });
    if (result < 0)
        return os_failure(is_write ? "writing" : "reading", offset, len_bytes);
    moved = static_cast<size_t>(result);
    return {};
}

Status File::move(bool is_write, uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const {
    const char* what = is_write ? "writing " : "reading ";
    if (offset > INT64_MAX || piece.len_bytes > INT64_MAX - offset)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", what, piece.len_bytes, " bytes at offset ", offset, " of ", name_, ": too far")};
    if (Status ready = piece.refresh(); !ready.ok())
        return ready;
    if (is_write && !is_mapped()) {
        if (Status refused = refuse_pools(offset, piece.len_bytes); !refused.ok())
            return refused;
    }
    for (size_t done = 0; done < piece.len_bytes;) {
        if (stop.load(std::memory_order_relaxed))
            return cancelled();
        size_t left = std::min(piece.len_bytes - done, step_bytes), moved = 0;
        if (Status status = step(is_write, offset + done, piece.address + done, left, moved); !status.ok())
            return status;
        if (moved == 0 && is_write)
            return {NIXL_ERR_BACKEND, text("CXL: writing ", left, " bytes at offset ", offset + done, " of ", name_, ": nothing is taken")};
        if (moved == 0)
            return {NIXL_ERR_MISMATCH, text("CXL: reading ", piece.len_bytes, " bytes at offset ", offset, " of ", name_,
                                            ": it ends at offset ", offset + done)};
        done += moved;
    }
    return {};
}

Status File::read(uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const {
    Status done = move(false, offset, piece, stop);
    // Stored bytes must not stay in the cache, whatever the rest did.
    Status published = piece.publish();
    return done.ok() ? published : done;
}

Status File::write(uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const {
    return move(true, offset, piece, stop);
}

Status open_file(const Core& core, uint64_t descriptor, const std::string& meta_info, std::unique_ptr<RegistrationExtra>& file) {
    FileAccess access = FileAccess::automatic;
    if (!parse_file_access(core.options.file_access, access))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: files cannot be reached by \"", core.options.file_access, "\"")};
    std::unique_ptr<File> opened;
    Status result = File::open(core.pool, descriptor, meta_info, access, opened);
    if (result.ok())
        file = std::move(opened);
    return result;
}

Status query_files(const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers) {
    for (const nixlBlobDesc& desc : descs) {
        FileSpec spec;
        bool is_path = false;
        struct stat facts{};
        // NIXL's file backends take a bare relative path here as well.
        std::string path = desc.metaInfo;
        if (parse_file_spec(desc.metaInfo, spec, is_path).ok() && is_path)
            path = spec.path;
        if (path.empty() || path.find('\0') != std::string::npos || stat(path.c_str(), &facts) != 0) {
            answers.emplace_back(std::nullopt);
            continue;
        }
        const char* tier = S_ISCHR(facts.st_mode) ? "device" : S_ISBLK(facts.st_mode) ? "block" : "file";
        answers.emplace_back(nixl_b_params_t{{"size", std::to_string(facts.st_size)},
                                             {"mode", std::to_string(facts.st_mode)},
                                             {"mtime", std::to_string(facts.st_mtime)},
                                             {"tier", tier}});
    }
    return {};
}

} // namespace kvbm_cxl
