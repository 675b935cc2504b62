// SPDX-License-Identifier: Apache-2.0
//
// A file or device that transfers read and write at offsets (FILE_SEG).
//
// Registered by its descriptor, devId, as NIXL's other file backends do, or by metaInfo: "ro:PATH" or "rw:PATH", with "create", "direct",
// "sync" and "noatime" after a comma as in "rw,create:PATH", or a bare absolute path, which means "rw:", or "ro:" where nothing else is
// allowed. Descriptors are duplicated, so that one that is closed, and its number used again, does not redirect a transfer; one that is
// open for appending is refused.
//
// A devdax device, a file on a DAX file system, and whatever is part of a pool, is reached through the pool's library: by mapping, with
// the flushes that hosts without coherence need, and, of a pool, only the blocks. All else is read and written by pread and pwrite.
#pragma once

#include "transfer/storage.h"

namespace kvbm_cxl {

/// How a file is reached: as described above, or always in one way.
enum class FileAccess { automatic, mapped, calls };

/// Reads "auto", "mmap" or "pread".
bool parse_file_access(std::string_view text, FileAccess& access);

/// How metaInfo wants a file to be opened.
struct FileSpec {
    std::string path;
    int flags = 0;                 // of open(2)
    bool may_be_read_only = false; // if opening for writing is not allowed
};

/// The spec in metaInfo; false if it holds none, and the descriptor counts. An unknown mode is an error.
Status parse_file_spec(std::string_view meta_info, FileSpec& spec, bool& is_there);

class File : public RegistrationExtra {
    std::shared_ptr<Pool> pool_;
    std::string name_;
    int fd_ = -1;
    int look_fd_ = -1; // for reading, without O_DIRECT, to see whether a pool begins there
    cxl_device_t device_ = CXL_SHM_DEVICE_NONE;
    bool is_in_pool_ = false;

    explicit File(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
    Status open_by_path(const FileSpec& spec);
    Status open_by_descriptor(uint64_t descriptor);
    Status choose_access(FileAccess access);
    Status os_failure(std::string_view what, uint64_t offset, size_t len_bytes) const;
    Status refuse_pools(uint64_t offset, size_t len_bytes) const;
    /// Moves some bytes, up to `len_bytes`; `moved` is how many.
    Status step(bool is_write, uint64_t offset, std::byte* memory, size_t len_bytes, size_t& moved) const;
    Status move(bool is_write, uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const;

  public:
    /// The file that a registration names.
    static Status open(std::shared_ptr<Pool> pool, uint64_t descriptor, const std::string& meta_info, FileAccess access,
                       std::unique_ptr<File>& file);
    ~File() override;
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    const std::string& name() const { return name_; }
    bool is_mapped() const { return device_ != CXL_SHM_DEVICE_NONE; }
    /// Part of the pool.
    bool is_in_pool() const { return is_in_pool_; }

    /// Reads all of `piece` from `offset`: an end of the file before that is an error.
    Status read(uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const;
    /// Writes all of `piece` to `offset`. A failure may leave a part of it written.
    Status write(uint64_t offset, const LocalPiece& piece, const std::atomic<bool>& stop) const;
};

/// Registers a file as the options say.
Status open_file(const Core& core, uint64_t descriptor, const std::string& meta_info, std::unique_ptr<RegistrationExtra>& file);

/// Size and kind of the files in metaInfo; nothing for one that is not there.
Status query_files(const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers);

/// The part of a transfer whose remote side is files.
Status make_file_part(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Pairs pairs, std::unique_ptr<Part>& part);

} // namespace kvbm_cxl
