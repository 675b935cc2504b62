// SPDX-License-Identifier: Apache-2.0
//
// Files and devices: by descriptor and by path, by calls and by mapping, and what must never be written to.
#include "files/file.h"
#include "support/pools.h"
#include "transfer/memory.h"
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace kvbm_cxl;

namespace {

constexpr size_t file_bytes = 3 << 20;
const std::atomic<bool> go_on{false};

std::string make_file(const testing::Folder& folder, const std::string& name, const std::vector<std::byte>& bytes) {
    std::string path = folder.path(name);
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    close(fd);
    return path;
}

std::vector<std::byte> content(const std::string& path) {
    std::vector<std::byte> bytes(std::filesystem::file_size(path));
    int fd = open(path.c_str(), O_RDONLY);
    CHECK(fd >= 0 && read(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    close(fd);
    return bytes;
}

std::unique_ptr<File> open_file(const Core& core, uint64_t descriptor, const std::string& meta_info,
                                FileAccess access = FileAccess::automatic) {
    std::unique_ptr<File> file;
    CHECK_OK(File::open(core.pool, descriptor, meta_info, access, file));
    return file;
}

nixl_status_t refused(const Core& core, uint64_t descriptor, const std::string& meta_info, FileAccess access = FileAccess::automatic) {
    std::unique_ptr<File> file;
    Status result = File::open(core.pool, descriptor, meta_info, access, file);
    CHECK(!result.ok() && !result.reason().empty() && !file);
    return result.code();
}

LocalPiece heap(std::vector<std::byte>& bytes) {
    return {bytes.data(), bytes.size(), false};
}

void specs() {
    FileSpec spec;
    bool is_there = false;
    CHECK_OK(parse_file_spec("/a/b", spec, is_there));
    CHECK(is_there && spec.path == "/a/b" && spec.flags == O_RDWR && spec.may_be_read_only);
    CHECK_OK(parse_file_spec("rw,create,sync,noatime,direct:dir/a:b", spec, is_there));
    CHECK(is_there && spec.path == "dir/a:b" && spec.flags == (O_RDWR | O_CREAT | O_SYNC | O_NOATIME | O_DIRECT) && !spec.may_be_read_only);
    CHECK_OK(parse_file_spec("ro:x", spec, is_there));
    CHECK(is_there && spec.flags == O_RDONLY);
    for (const std::string& none :
         {std::string(), std::string("name"), std::string("row:x"), std::string("wo:x"), std::string("rw"), std::string("/a\0b", 4)}) {
        CHECK_OK(parse_file_spec(none, spec, is_there));
        CHECK(!is_there);
    }
    for (const char* wrong : {"rw,append:x", "rw,:x", "ro:", "rw,create,:"})
        CHECK_STATUS(parse_file_spec(wrong, spec, is_there), NIXL_ERR_INVALID_PARAM);
    FileAccess access;
    CHECK(parse_file_access("mmap", access) && access == FileAccess::mapped && !parse_file_access("MMAP", access));
}

/// What is written at an offset is read there, and is in the file; for calls and for mappings.
void reads_and_writes(const testing::Folder& folder, const Core& core, FileAccess access) {
    std::vector<std::byte> before = testing::unique_bytes(file_bytes, 1), expected = before;
    std::string path = make_file(folder, "data", before);
    auto file = open_file(core, 0, "rw:" + path, access);
    CHECK(file->is_mapped() == (access == FileAccess::mapped) && !file->is_in_pool());
    uint32_t salt = 10;
    for (auto [offset, len] : {std::pair<uint64_t, size_t>{0, 1}, {1, 63}, {64, 64}, {12'345, 1'000'001}, {file_bytes - 1, 1}, {77, 0}}) {
        std::vector<std::byte> bytes = testing::unique_bytes(len, ++salt);
        CHECK_OK(file->write(offset, heap(bytes), go_on));
        std::copy(bytes.begin(), bytes.end(), expected.begin() + static_cast<ptrdiff_t>(offset));
        std::vector<std::byte> seen(len);
        CHECK_OK(file->read(offset, heap(seen), go_on));
        CHECK(seen == bytes);
    }
    CHECK(content(path) == expected);
    // Memory of the pool on the other side, and what others write to the file.
    void* block = nullptr;
    CHECK(cxl_shm_alloc(core.pool->handle(), 100'000, 0, &block) == CXL_SHM_OK);
    LocalPiece piece{static_cast<std::byte*>(block), 99'999, true};
    std::vector<std::byte> bytes = testing::unique_bytes(99'999, 50), seen(99'999);
    CHECK(cxl_shm_copy_in(block, bytes.data(), bytes.size()) == CXL_SHM_OK);
    CHECK_OK(file->write(500'001, piece, go_on));
    std::vector<std::byte> all = content(path);
    CHECK(std::equal(bytes.begin(), bytes.end(), all.begin() + 500'001));
    bytes = testing::unique_bytes(99'999, 51);
    int fd = open(path.c_str(), O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), 500'001) == 99'999);
    close(fd);
    CHECK_OK(file->read(500'001, piece, go_on));
    CHECK(cxl_shm_copy_out(seen.data(), block, seen.size()) == CXL_SHM_OK && seen == bytes);
    CHECK(cxl_shm_free(block) == CXL_SHM_OK);
    // Stopped, and ranges that there are not.
    const std::atomic<bool> stop{true};
    CHECK_STATUS(file->read(0, heap(seen), stop), NIXL_ERR_CANCELED);
    CHECK_STATUS(file->write(0, heap(seen), stop), NIXL_ERR_CANCELED);
    for (uint64_t offset : {uint64_t{file_bytes - 10}, uint64_t{file_bytes}, uint64_t{1} << 40, UINT64_MAX, uint64_t{INT64_MAX} - 5}) {
        Status failed = file->read(offset, heap(seen), go_on);
        CHECK(failed.code() == NIXL_ERR_MISMATCH || failed.code() == NIXL_ERR_INVALID_PARAM);
    }
    if (access == FileAccess::mapped)
        CHECK_STATUS(file->write(file_bytes - 10, heap(seen), go_on), NIXL_ERR_INVALID_PARAM);
}

void descriptors(const testing::Folder& folder, const Core& core) {
    std::vector<std::byte> bytes = testing::unique_bytes(5000, 2), seen(5000);
    std::string path = make_file(folder, "one", bytes), other = make_file(folder, "other", testing::unique_bytes(5000, 3));
    int fd = open(path.c_str(), O_RDONLY);
    auto file = open_file(core, static_cast<uint64_t>(fd), "");
    CHECK(file->name() == path);
    // The application closes it, and its number becomes another file's.
    close(fd);
    CHECK(open(other.c_str(), O_RDWR) == fd);
    CHECK_OK(file->read(0, heap(seen), go_on));
    CHECK(seen == bytes);
    CHECK_STATUS(file->write(0, heap(seen), go_on), NIXL_ERR_NOT_ALLOWED);
    // A bare path that describes the descriptor, and one that does not.
    CHECK(open_file(core, static_cast<uint64_t>(fd), other)->name() == other);
    auto by_path = open_file(core, static_cast<uint64_t>(fd), path);
    CHECK_OK(by_path->read(0, heap(seen), go_on));
    CHECK(seen == bytes);
    // A name that NIXL's descriptor mode does not look at.
    CHECK(open_file(core, static_cast<uint64_t>(fd), "whatever")->name() == other);
    // Without a name by now.
    CHECK(unlink(other.c_str()) == 0);
    auto nameless = open_file(core, static_cast<uint64_t>(fd), "");
    CHECK_OK(nameless->write(100, heap(seen), go_on));
    auto mapped = open_file(core, static_cast<uint64_t>(fd), "", FileAccess::mapped);
    std::vector<std::byte> part(1000);
    CHECK_OK(mapped->read(100, heap(part), go_on));
    CHECK(std::equal(part.begin(), part.end(), bytes.begin()));
    close(fd);
    CHECK(refused(core, static_cast<uint64_t>(fd), "") == NIXL_ERR_INVALID_PARAM &&
          refused(core, UINT64_MAX, "") == NIXL_ERR_INVALID_PARAM);
    CHECK(refused(core, 0, "ro:" + folder.path("absent")) == NIXL_ERR_NOT_FOUND);
    CHECK(refused(core, 0, "rw,append:" + path) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused(core, 0, folder.path("")) != NIXL_SUCCESS);
    CHECK(refused(core, 0, "rw:/dev/null") == NIXL_ERR_BACKEND);
    std::string pipe = folder.path("pipe");
    CHECK(mkfifo(pipe.c_str(), 0600) == 0 && refused(core, 0, "ro:" + pipe) == NIXL_ERR_INVALID_PARAM);
    CHECK(unlink(pipe.c_str()) == 0);
    // For appending, where offsets count for nothing: to be read from only.
    for (int mode : {O_RDWR, O_WRONLY}) {
        int appending = open(path.c_str(), mode | O_APPEND);
        CHECK(appending >= 0 && refused(core, static_cast<uint64_t>(appending), "") == NIXL_ERR_INVALID_PARAM);
        CHECK(refused(core, static_cast<uint64_t>(appending), path) == NIXL_ERR_INVALID_PARAM);
        close(appending);
    }
    int reading = open(path.c_str(), O_RDONLY | O_APPEND), both = open(path.c_str(), O_RDWR | O_APPEND);
    CHECK_OK(open_file(core, static_cast<uint64_t>(reading), "")->read(0, heap(seen), go_on));
    CHECK_OK(open_file(core, static_cast<uint64_t>(both), "", FileAccess::mapped)->read(0, heap(part), go_on));
    close(reading);
    close(both);
    auto made = open_file(core, 0, "rw,create:" + folder.path("new"));
    CHECK_OK(made->write(10, heap(bytes), go_on));
    CHECK(std::filesystem::file_size(folder.path("new")) == 5010);
}

/// The pool's metadata is not to be had; of another pool, nothing is.
void pools(const testing::Folder& folder, const Core& core, const std::string& own, const std::string& other) {
    std::vector<std::byte> bytes = testing::unique_bytes(8192, 4), seen(8192);
    for (FileAccess access : {FileAccess::automatic, FileAccess::mapped, FileAccess::calls}) {
        CHECK(refused(core, 0, "rw:" + other, access) == NIXL_ERR_NOT_ALLOWED);
        CHECK(refused(core, 0, "ro:" + other, access) == NIXL_ERR_NOT_ALLOWED);
        std::vector<std::byte> before = content(own);
        for (int flags : {O_RDWR, O_WRONLY, O_RDWR | O_DIRECT}) {
            int fd = open(own.c_str(), flags);
            if (fd < 0)
                continue; // not every file system has O_DIRECT
            auto file = open_file(core, static_cast<uint64_t>(fd), "", access);
            close(fd);
            CHECK(file->is_in_pool());
            uint64_t data = core.pool->info().data_offset;
            for (uint64_t offset : {uint64_t{0}, uint64_t{4096}, data - 8192, data - 1, data + core.pool->info().data_bytes - 1}) {
                CHECK_STATUS(file->write(offset, heap(bytes), go_on), NIXL_ERR_INVALID_PARAM);
                CHECK_STATUS(file->read(offset, heap(seen), go_on), NIXL_ERR_INVALID_PARAM);
            }
        }
        CHECK(cxl_shm_check(core.pool->handle()) == CXL_SHM_OK);
        std::vector<std::byte> after = content(own);
        CHECK(std::equal(before.begin(), before.begin() + 4096, after.begin()));
    }
    // Its blocks are: what is written by place is what the pool's own calls see.
    void* block = nullptr;
    CHECK(cxl_shm_alloc(core.pool->handle(), 8192, 0, &block) == CXL_SHM_OK);
    auto offset = static_cast<uint64_t>(static_cast<std::byte*>(block) - core.pool->base());
    auto file = open_file(core, 0, own);
    CHECK_OK(file->write(offset, heap(bytes), go_on));
    CHECK(cxl_shm_copy_out(seen.data(), block, 8192) == CXL_SHM_OK && seen == bytes);
    bytes = testing::unique_bytes(8192, 5);
    CHECK(cxl_shm_copy_in(block, bytes.data(), 8192) == CXL_SHM_OK);
    CHECK_OK(file->read(offset, heap(seen), go_on));
    CHECK(seen == bytes && cxl_shm_free(block) == CXL_SHM_OK);

    // A file that is formatted as a pool after it was registered.
    std::string path = make_file(folder, "later", testing::unique_bytes(file_bytes, 6));
    for (FileAccess access : {FileAccess::calls, FileAccess::mapped}) {
        auto later = open_file(core, 0, "rw:" + path, access);
        CHECK_OK(later->write(100, heap(bytes), go_on));
        uint64_t magic = CXL_SHM_MAGIC;
        std::vector<std::byte> head(8), tail = testing::unique_bytes(8, 7);
        std::memcpy(head.data(), &magic, 8);
        CHECK_OK(later->write(0, heap(head), go_on));
        CHECK_STATUS(later->write(100, heap(bytes), go_on), NIXL_ERR_NOT_ALLOWED);
        CHECK_OK(later->read(100, heap(seen), go_on));
        int fd = open(path.c_str(), O_WRONLY);
        CHECK(pwrite(fd, tail.data(), 8, 0) == 8);
        close(fd);
    }
}

/// A pool that begins behind an offset of a file: its blocks are had by their place on the file, and nothing else of the file is.
void pool_at_an_offset(const testing::Folder& folder) {
    constexpr uint64_t begins = 16 << 20;
    std::string path = folder.path("shelf");
    CHECK(std::ofstream(path).good());
    std::filesystem::resize_file(path, begins + (48 << 20));
    Options options = testing::new_pool(folder, "shelf,offset=16M", "native");
    auto core = testing::new_core(options);
    std::vector<std::byte> bytes = testing::unique_bytes(8192, 8), seen(8192);
    void* block = nullptr;
    CHECK(cxl_shm_alloc(core->pool->handle(), 8192, 0, &block) == CXL_SHM_OK);
    auto offset = static_cast<uint64_t>(static_cast<std::byte*>(block) - core->pool->base());
    for (FileAccess access : {FileAccess::automatic, FileAccess::mapped, FileAccess::calls}) {
        auto file = open_file(*core, 0, "rw:" + path, access);
        CHECK(file->is_in_pool());
        CHECK_OK(file->write(begins + offset, heap(bytes), go_on));
        CHECK(cxl_shm_copy_out(seen.data(), block, 8192) == CXL_SHM_OK && seen == bytes);
        for (uint64_t outside : {uint64_t{0}, offset, begins, begins - 8192})
            CHECK_STATUS(file->write(outside, heap(bytes), go_on), NIXL_ERR_INVALID_PARAM);
    }
    CHECK(cxl_shm_check(core->pool->handle()) == CXL_SHM_OK);

    // Memory of a mapping of the whole file is found in the pool where it lies there, and only there.
    int fd = open(path.c_str(), O_RDWR);
    auto* whole = static_cast<std::byte*>(mmap(nullptr, begins + (48 << 20), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    CHECK(whole != MAP_FAILED);
    for (uint64_t at : {begins + offset, offset}) {
        Registration registration;
        registration.base = reinterpret_cast<uintptr_t>(whole + at);
        registration.len_bytes = 8192;
        CHECK_OK(locate_dram(*core->pool, registration));
        CHECK((registration.kind == RegionKind::pool) == (at > begins) && (at < begins || registration.pool_offset == offset));
    }
    CHECK(munmap(whole, begins + (48 << 20)) == 0);

    // Another process's pool there: its header is not written over.
    std::string other = make_file(folder, "later_shelf", testing::unique_bytes(3 * file_bytes, 9));
    auto later = open_file(*core, 0, "rw:" + other, FileAccess::calls);
    uint64_t magic = CXL_SHM_MAGIC;
    int raw = open(other.c_str(), O_WRONLY);
    CHECK(pwrite(raw, &magic, 8, 4 << 20) == 8);
    close(raw);
    CHECK_STATUS(later->write((4 << 20) + 100, heap(bytes), go_on), NIXL_ERR_NOT_ALLOWED);
    CHECK_STATUS(later->write((4 << 20) - 100, heap(bytes), go_on), NIXL_ERR_NOT_ALLOWED);
    CHECK_OK(later->write((4 << 20) - 8192, heap(bytes), go_on));
}

/// A full disk, an end that moves, and memory that is not there.
void failures(const testing::Folder& folder, const Core& core) {
    std::vector<std::byte> bytes = testing::unique_bytes(1 << 20, 8);
    std::string path = make_file(folder, "limited", {});
    auto file = open_file(core, 0, "rw:" + path);
    signal(SIGXFSZ, SIG_IGN);
    rlimit was{}, small{500'000, RLIM_INFINITY};
    CHECK(getrlimit(RLIMIT_FSIZE, &was) == 0);
    small.rlim_max = was.rlim_max;
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    Status full = file->write(0, heap(bytes), go_on);
    CHECK(setrlimit(RLIMIT_FSIZE, &was) == 0);
    // The short count first, the error behind it.
    CHECK(full.code() == NIXL_ERR_BACKEND && full.reason().find("500000") != std::string::npos);
    if (access("/dev/full", W_OK) == 0)
        CHECK(refused(core, 0, "rw:/dev/full") == NIXL_ERR_BACKEND);

    CHECK_STATUS(file->write(0, {nullptr, 100, false}, go_on), NIXL_ERR_INVALID_PARAM);
    std::vector<std::byte> seen(500'001);
    Status short_file = file->read(0, heap(seen), go_on);
    CHECK(short_file.code() == NIXL_ERR_MISMATCH && short_file.reason().find("ends at offset 500000") != std::string::npos);

    // Cut under a mapping: an error and no crash, and other files are as before.
    path = make_file(folder, "cut", testing::unique_bytes(file_bytes, 9));
    auto mapped = open_file(core, 0, "rw:" + path, FileAccess::mapped);
    CHECK_OK(mapped->read(2 << 20, heap(seen), go_on));
    CHECK(truncate(path.c_str(), 4096) == 0);
    Status lost = mapped->read(2 << 20, heap(seen), go_on);
    CHECK(lost.code() == NIXL_ERR_BACKEND && !lost.reason().empty());
    CHECK_STATUS(mapped->write(2 << 20, heap(seen), go_on), NIXL_ERR_BACKEND);
    std::vector<std::byte> few(1000);
    CHECK_OK(file->read(0, heap(few), go_on));
    CHECK(cxl_shm_check(core.pool->handle()) == CXL_SHM_OK);
}

std::shared_ptr<Registration> register_file(const Core& core, const std::string& meta_info) {
    auto registration = std::make_shared<Registration>();
    registration->memory = FILE_SEG;
    registration->kind = RegionKind::file;
    registration->len_bytes = file_bytes;
    CHECK_OK(kvbm_cxl::open_file(core, 0, meta_info, registration->extra));
    return registration;
}

void parts(const testing::Folder& folder, const Options& how) {
    for (uint64_t inline_bytes : {uint64_t{0}, uint64_t{1} << 30}) {
        Options options = how;
        options.inline_bytes = inline_bytes;
        auto core = testing::new_core(options);
        std::vector<std::byte> bytes = testing::unique_bytes(file_bytes, 20), seen(file_bytes);
        auto from = testing::register_dram(*core, bytes.data(), bytes.size()), to = testing::register_dram(*core, seen.data(), seen.size());
        std::string paths[2] = {make_file(folder, "a", std::vector<std::byte>(file_bytes)),
                                make_file(folder, "b", std::vector<std::byte>(file_bytes))};
        std::shared_ptr<Registration> files[2] = {register_file(*core, paths[0]), register_file(*core, "rw:" + paths[1])};
        RemoteRegion regions[2] = {testing::own_region(files[0]), testing::own_region(files[1])};
        // Pages to alternate files, in turned order; every second one follows the one before on both sides.
        Pairs pairs;
        constexpr size_t page = 5000;
        for (size_t index = 0; (index + 1) * page <= file_bytes; index++)
            pairs.push_back({from.get(), &regions[index / 2 % 2], from->base + index * page, index * page, page});
        // Neighbours here that are none there.
        for (size_t index = 0; index + 6 < pairs.size(); index += 8)
            std::swap(pairs[index + 4].remote_address, pairs[index + 5].remote_address);
        std::vector<std::byte> expected[2] = {std::vector<std::byte>(file_bytes), std::vector<std::byte>(file_bytes)};
        for (const Pair& pair : pairs)
            std::memcpy(&expected[pair.remote == &regions[1]][pair.remote_address], pair.local_bytes(), page);
        std::unique_ptr<Part> part;
        CHECK_OK(make_file_part(core, NIXL_WRITE, pairs, part));
        CHECK(testing::run(*part) == NIXL_SUCCESS && testing::run(*part) == NIXL_SUCCESS && part->estimate_us() > 0);
        CHECK(content(paths[0]) == expected[0] && content(paths[1]) == expected[1]);
        for (Pair& pair : pairs) {
            pair.local = to.get();
            pair.local_address = to->base + (pair.local_address - from->base);
        }
        CHECK_OK(make_file_part(core, NIXL_READ, pairs, part));
        CHECK(testing::run(*part) == NIXL_SUCCESS);
        CHECK(std::equal(seen.begin(), seen.begin() + page * pairs.size(), bytes.begin()));
        CHECK(truncate(paths[1].c_str(), 100'000) == 0 && testing::run(*part) == NIXL_ERR_MISMATCH && !to->is_used());
        files[0]->close();
        CHECK(testing::run(*part) == NIXL_ERR_NOT_FOUND && !to->is_used() && !files[1]->is_used());
        RemoteRegion of_a_peer;
        CHECK_STATUS(make_file_part(core, NIXL_READ, {{to.get(), &of_a_peer, to->base, 0, 1}}, part), NIXL_ERR_NOT_SUPPORTED);
    }
    nixl_reg_dlist_t descs(FILE_SEG);
    for (const std::string& info :
         {folder.path("a"), "ro:" + folder.path("absent"), std::string(), std::string("rw,create:") + folder.path("b")})
        descs.addDesc(nixlBlobDesc(0, 0, 0, info));
    std::vector<nixl_query_resp_t> answers;
    CHECK_OK(query_files(descs, answers));
    CHECK(answers.size() == 4 && answers[0]->at("size") == std::to_string(file_bytes) && !answers[1] && !answers[2] && answers[3]);
}

} // namespace

int main() {
    testing::Folder folder;
    specs();
    std::string other = testing::new_pool(folder, "foreign", "native").pool;
    pool_at_an_offset(folder);
    int number = 0;
    for (const char* coherence : {"native", "emulated:seed=21,noise=4"}) {
        Options options = testing::new_pool(folder, "pool" + std::to_string(number++), coherence);
        auto core = testing::new_core(options);
        reads_and_writes(folder, *core, FileAccess::calls);
        reads_and_writes(folder, *core, FileAccess::mapped);
        descriptors(folder, *core);
        pools(folder, *core, options.pool, other);
        failures(folder, *core);
        parts(folder, options);
    }
    return 0;
}
