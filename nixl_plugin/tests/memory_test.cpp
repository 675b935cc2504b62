// SPDX-License-Identifier: Apache-2.0
//
// Memory of the pool is recognised through any mapping of it, and nothing else is taken for it.
#include "support/pools.h"
#include "transfer/memory.h"
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <set>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

using namespace kvbm_cxl;

namespace {

void lines() {
    auto entries = parse_maps("7f0000000000-7f0000200000 rw-s 00400000 00:1c 77 /dev/shm/a b\n"
                              "7f0000200000-7f0000300000 rw-p 00000000 00:00 0 \n"
                              "nonsense\n"
                              "7f00-7e00 rw-s 0 0:1 5 x\n"
                              "7f0000400000-7f0000500000 r--p 00001000 fe:01 12\n"
                              "ffffffffffffffffff-0 rw-s 0 0:1 5 x\n"
                              "7f0000600000-7f0000700000 rw-s 00000000 00:1c 7");
    CHECK(entries.size() == 3);
    CHECK(entries[0].start == 0x7f0000000000 && entries[0].end == 0x7f0000200000 && entries[0].offset == 0x400000);
    CHECK(entries[0].inode == 77 && entries[0].device == 0x1c && entries[0].is_shared);
    CHECK(entries[1].inode == 12 && entries[1].device == (uint64_t{0xfe} << 32 | 1) && !entries[1].is_shared && entries[2].inode == 7);
    for (size_t length = 0; length < 60; length++)
        parse_maps(std::string_view("7f0000000000-7f0000200000 rw-s 00400000 00:1c 77 /dev/shm/pool").substr(0, length));
}

/// A pool of two devices in stripes of 0x1000 at 0x100000, and an application that maps parts of them elsewhere.
void stripes() {
    std::vector<MapEntry> entries = {
        {0x100000, 0x101000, 1, 10, 0x0000, true},  {0x101000, 0x102000, 1, 20, 0x0000, true}, {0x102000, 0x103000, 1, 10, 0x1000, true},
        {0x103000, 0x104000, 1, 20, 0x1000, true},  {0x200000, 0x202000, 1, 10, 0x0000, true}, // the first device alone
        {0x300000, 0x301000, 1, 20, 0x0000, true},  {0x301000, 0x302000, 1, 10, 0x1000, true}, // as in the pool from 0x1000 on
        {0x400000, 0x402000, 1, 10, 0x0000, false},                                            // a private copy
        {0x500000, 0x501000, 1, 30, 0x0000, true},
    };
    auto find = [&](uintptr_t address, size_t len, uint64_t& offset) {
        offset = 77;
        return find_in_pool(entries, entries, 0x100000, 0x4000, address, len, offset);
    };
    uint64_t offset = 0;
    CHECK(find(0x100800, 0x3000, offset) == Lies::inside && offset == 0x800);
    CHECK(find(0x200010, 0xff0, offset) == Lies::inside && offset == 0x10);
    CHECK(find(0x201000, 0x1000, offset) == Lies::inside && offset == 0x2000);
    CHECK(find(0x200800, 0x1000, offset) == Lies::across);
    CHECK(find(0x300800, 0x1000, offset) == Lies::inside && offset == 0x1800);
    CHECK(find(0x301800, 0x1000, offset) == Lies::across);
    CHECK(find(0x2ff800, 0x1000, offset) == Lies::across);
    CHECK(find(0x400000, 0x1000, offset) == Lies::outside);
    CHECK(find(0x500000, 0x1000, offset) == Lies::outside);
    CHECK(find(0x900000, 0x1000, offset) == Lies::outside);
    CHECK(find(UINTPTR_MAX - 10, 100, offset) == Lies::outside);
}

void mappings(const testing::Folder& folder) {
    Options options = testing::new_pool(folder, "pool", "native");
    auto core = testing::new_core(options);
    const Pool& pool = *core->pool;
    void* block = nullptr;
    CHECK(cxl_shm_alloc(pool.handle(), 3 << 20, CXL_SHM_ALLOC_SCRATCH, &block) == CXL_SHM_OK);
    uint64_t offset = cxl_shm_get_offset(block);

    auto own = testing::register_dram(*core, block, 3 << 20);
    CHECK(own->kind == RegionKind::pool && own->pool_offset == offset && own->pool_address == block);

    int file = open(options.pool.c_str(), O_RDWR);
    CHECK(file >= 0);
    size_t whole = 48 << 20;
    auto* mapped = static_cast<std::byte*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    auto* copied = static_cast<std::byte*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0));
    CHECK(mapped != MAP_FAILED && copied != MAP_FAILED);
    auto other = testing::register_dram(*core, mapped + offset + 100, 5000);
    CHECK(other->kind == RegionKind::pool && other->pool_offset == offset + 100 && other->pool_address == pool.base() + offset + 100);
    CHECK(testing::register_dram(*core, copied + offset, 5000)->kind == RegionKind::heap);

    std::vector<std::byte> heap(5000);
    CHECK(testing::register_dram(*core, heap.data(), heap.size())->kind == RegionKind::heap);
    CHECK(testing::register_dram(*core, nullptr, 0)->kind == RegionKind::heap);

    // The pool's metadata is no application's buffer, and neither is what begins or ends outside of the mapping.
    Registration wrong;
    wrong.base = reinterpret_cast<uintptr_t>(mapped);
    wrong.len_bytes = 4096;
    CHECK_STATUS(resolve_dram(pool, wrong), NIXL_ERR_INVALID_PARAM);
    wrong.len_bytes = whole;
    CHECK_STATUS(resolve_dram(pool, wrong), NIXL_ERR_INVALID_PARAM);
    CHECK(munmap(mapped + (32 << 20), 16 << 20) == 0);
    void* behind = mmap(mapped + (32 << 20), 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    CHECK(behind != MAP_FAILED);
    wrong.base = reinterpret_cast<uintptr_t>(mapped + (31 << 20));
    wrong.len_bytes = (1 << 20) + 4096;
    CHECK_STATUS(resolve_dram(pool, wrong), NIXL_ERR_INVALID_PARAM);
    close(file);
}

/// Without a map of the process nothing is known of memory outside of the pool's own mapping.
void no_map(const testing::Folder& folder) {
    Options options = testing::new_pool(folder, "unseen", "native");
    auto core = testing::new_core(options);
    void* block = nullptr;
    CHECK(cxl_shm_alloc(core->pool->handle(), 1 << 20, CXL_SHM_ALLOC_SCRATCH, &block) == CXL_SHM_OK);
    int file = open(options.pool.c_str(), O_RDWR);
    void* mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(cxl_shm_get_offset(block)));
    CHECK(file >= 0 && mapped != MAP_FAILED);
    std::vector<std::byte> heap(4096);
    rlimit before{}, none{};
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    none = {static_cast<rlim_t>(dup(file)), before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    for (void* address : {mapped, static_cast<void*>(heap.data())}) {
        Registration registration;
        registration.base = reinterpret_cast<uintptr_t>(address);
        registration.len_bytes = 4096;
        CHECK_STATUS(resolve_dram(*core->pool, registration), NIXL_ERR_BACKEND);
    }
    CHECK(testing::register_dram(*core, block, 4096)->kind == RegionKind::pool);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK(testing::register_dram(*core, mapped, 4096)->kind == RegionKind::pool);
    close(static_cast<int>(none.rlim_cur));
    close(file);
}

/// The kernel's query and the text of the map say the same, and the former does not take longer for what is mapped elsewhere.
void many_mappings(const testing::Folder& folder) {
    int file = open(folder.path("mapped").c_str(), O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && ftruncate(file, 8 << 20) == 0);
    constexpr size_t page = 4096, count = 10'000;
    auto* many = static_cast<std::byte*>(mmap(nullptr, 2 * count * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(many != MAP_FAILED);
    // Each other page is a mapping of its own.
    for (size_t i = 0; i < count; i++)
        CHECK(mprotect(many + 2 * i * page, page, PROT_READ | PROT_WRITE) == 0);
    CHECK(mmap(many + 10 * page, 3 * page, PROT_READ, MAP_SHARED | MAP_FIXED, file, 4 * page) != MAP_FAILED);
    CHECK(mmap(many + 20 * page, 2 * page, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) != MAP_FAILED);
    CHECK(munmap(many + 16 * page, page) == 0);
    OwnMaps maps;
    auto same = [](const MapEntry& one, const MapEntry& other) {
        return one.start == other.start && one.end == other.end && one.device == other.device && one.inode == other.inode &&
               one.offset == other.offset && one.is_shared == other.is_shared;
    };
    auto at = reinterpret_cast<uintptr_t>(many);
    for (auto [first, pages, wanted] :
         {std::array<size_t, 3>{0, 8, 0}, {0, 11, 1}, {12, 1, 1}, {13, 2, 0}, {9, 13, 2}, {9, 2 * count - 9, 2}}) {
        std::vector<MapEntry> asked, read;
        CHECK_OK(maps.overlapping(at + first * page + 100, pages * page - 100, asked));
        CHECK_OK(maps.overlapping_by_text(at + first * page + 100, pages * page - 100, read));
        CHECK(asked.size() == wanted && std::equal(asked.begin(), asked.end(), read.begin(), read.end(), same));
    }
    std::vector<MapEntry> entries;
    CHECK_OK(maps.overlapping(UINTPTR_MAX - 10, 100, entries));
    CHECK(entries.empty());
    CHECK_OK(maps.overlapping(at + 10 * page, 0, entries));
    CHECK(entries.empty());
    auto cpu_ns = [&](auto look) {
        timespec before{}, after{};
        CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before) == 0);
        for (size_t i = 0; i < 20; i++)
            CHECK_OK((maps.*look)(at + 10 * page, page, entries));
        CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after) == 0);
        return (after.tv_sec - before.tv_sec) * 1'000'000'000 + after.tv_nsec - before.tv_nsec;
    };
    long asked_ns = cpu_ns(&OwnMaps::overlapping), read_ns = cpu_ns(&OwnMaps::overlapping_by_text);
    utsname kernel{};
    int major = 0, minor = 0;
    CHECK(uname(&kernel) == 0 && std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2);
    if (major > 6 || (major == 6 && minor >= 11))
        CHECK(asked_ns * 20 < read_ns);
    CHECK(munmap(many, 2 * count * page) == 0);
    close(file);
}

/// Memory that is registered again has its number again, no other has it, and what was given back long ago is forgotten.
void numbers() {
    Registry registry;
    auto registration = [](uintptr_t base, size_t len, RegionKind kind = RegionKind::heap) {
        auto made = std::make_shared<Registration>();
        made->base = base;
        made->len_bytes = len;
        made->kind = kind;
        return made;
    };
    auto first = registration(4096, 10), again = registration(4096, 10);
    registry.add(first);
    registry.add(again);
    CHECK(first->id == again->id && registry.all().size() == 2);
    std::set<uint64_t> seen = {first->id};
    for (const auto& other : {registration(4096, 11), registration(4097, 10), registration(4096, 10, RegionKind::pool)}) {
        registry.add(other);
        CHECK(seen.insert(other->id).second && registry.find(other->id) == other);
    }
    first->close();
    CHECK(registry.find(first->id) == again);
    registry.remove(*first);
    registry.remove(*first);
    CHECK(registry.find(first->id) == again);
    registry.remove(*again);
    CHECK(!registry.find(first->id));
    uint64_t number = first->id;
    auto renewed = registration(4096, 10);
    registry.add(renewed);
    CHECK(renewed->id == number);
    for (size_t i = 0; i <= Registry::most_former; i++) {
        auto other = registration(1'000'000 + i, 1);
        registry.add(other);
        CHECK(other->id != number);
        registry.remove(*other);
    }
    // Registered all the time, it is remembered; given back before all these, it would not be.
    auto beside = registration(4096, 10);
    registry.add(beside);
    CHECK(beside->id == number);
    registry.remove(*beside);
    registry.remove(*renewed);
    for (size_t i = 0; i <= Registry::most_former; i++) {
        auto other = registration(9'000'000 + i, 1);
        registry.add(other);
        registry.remove(*other);
    }
    auto late = registration(4096, 10);
    registry.add(late);
    CHECK(late->id != number);
}

void users() {
    Registration registration;
    CHECK(registration.begin_use() && registration.is_used());
    CHECK(!registration.close_and_wait(5) && registration.is_closed());
    CHECK(!registration.begin_use() && registration.is_used());
    std::thread user([&] { registration.end_use(); });
    CHECK(registration.close_and_wait(10'000) && !registration.is_used());
    user.join();
    registration.base = 1000;
    registration.len_bytes = 10;
    CHECK(registration.covers(1000, 10) && registration.covers(1010, 0) && !registration.covers(1001, 10));
    CHECK(!registration.covers(999, 1) && !registration.covers(1005, SIZE_MAX));
}

} // namespace

int main() {
    lines();
    stripes();
    testing::Folder folder;
    mappings(folder);
    no_map(folder);
    many_mappings(folder);
    numbers();
    users();
}
