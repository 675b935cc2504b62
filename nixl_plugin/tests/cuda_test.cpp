// SPDX-License-Identifier: Apache-2.0
//
// GPU memory against a fake driver: what is copied, when it can be seen, what is held until the device has finished, and what becomes of
// errors. The pool's file stands for the memory: what is in it is what other hosts see.
#include "cuda/gpus.h"
#include "staged/staging.h"
#include "support/fake_cuda.h"
#include "support/pools.h"
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

using namespace kvbm_cxl;
using namespace kvbm_cxl::cuda;
using testing::Folder;

namespace {

/// The fake driver.
struct Gpu {
    std::string library;
    FakeCuda fake;

    explicit Gpu(const char* path) : library(path), fake(path) {}
    void check_conduct() const {
        if (std::string wrong = fake.misuse(); !wrong.empty()) {
            std::fprintf(stderr, "misuse: %s\n", wrong.c_str());
            std::_Exit(1);
        }
    }
};

/// A pool, a block of it, memory of the device, and lists that scatter between them.
struct Scene {
    Gpu& gpu;
    std::string file;
    std::shared_ptr<Core> core;
    std::shared_ptr<Gpus> gpus;
    std::shared_ptr<Registration> vram = std::make_shared<Registration>();
    std::shared_ptr<Device> device;
    std::byte* block = nullptr;
    uint64_t offset = 0;
    uint64_t memory = 0;
    size_t len_bytes;

    Scene(const Folder& folder, Gpu& which, const char* name, const char* coherence, size_t len) : gpu(which), len_bytes(len) {
        Options options = testing::new_pool(folder, name, coherence);
        file = options.pool;
        options.timeout_ms = 2000;
        core = testing::new_core(options);
        CHECK_OK(Gpus::open(gpu.library, core->pool, gpus));
        void* found = nullptr;
        CHECK(cxl_shm_alloc(core->pool->handle(), len, 0, &found) == CXL_SHM_OK);
        block = static_cast<std::byte*>(found);
        offset = static_cast<uint64_t>(block - core->pool->base());
        memory = gpu.fake.allocate(len);
        vram->memory = VRAM_SEG;
        vram->kind = RegionKind::device;
        vram->base = memory;
        vram->len_bytes = len;
        CHECK_OK(gpus->register_memory(0, memory, len, vram->extra));
        device = dynamic_cast<DeviceRange&>(*vram->extra).device;
    }
    ~Scene() { gpu.fake.release(memory); }

    std::byte* in_device() const { return reinterpret_cast<std::byte*>(memory); }

    /// What other hosts see of the block, and what they write there.
    std::vector<std::byte> seen() const {
        std::vector<std::byte> bytes(len_bytes);
        int fd = open(file.c_str(), O_RDONLY);
        CHECK(fd >= 0 && pread(fd, bytes.data(), len_bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(len_bytes));
        close(fd);
        return bytes;
    }
    void written_elsewhere(const std::vector<std::byte>& bytes) const {
        int fd = open(file.c_str(), O_WRONLY);
        CHECK(fd >= 0 && pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes.size()));
        close(fd);
    }

    /// Pieces of odd sizes that swap places: piece k of the device is piece count-1-k of the host.
    std::vector<DevicePiece> pieces(size_t count, std::byte* host) const {
        size_t each = len_bytes / count, first = 64 * (each / 128) + 37;
        CHECK(first <= each);
        std::vector<DevicePiece> list;
        for (size_t k = 0; k < count; k++)
            list.push_back({memory + k * each, host + (count - 1 - k) * each, first});
        return list;
    }
    static bool agree(const std::vector<DevicePiece>& list, const std::byte* host, const std::byte* bytes) {
        for (const DevicePiece& piece : list) {
            if (std::memcmp(reinterpret_cast<void*>(piece.device), bytes + (static_cast<std::byte*>(piece.host) - host), piece.len_bytes) !=
                0)
                return false;
        }
        return true;
    }
    std::unique_ptr<Copy> start(Direction direction, const std::vector<DevicePiece>& list, Way way = Way::any,
                                std::shared_ptr<void> hold = nullptr) const {
        std::unique_ptr<Copy> copy;
        CHECK_OK(Copy::start(device, direction, list, way, std::move(hold), copy));
        return copy;
    }
    nixl_status_t finish(Copy& copy) const {
        testing::await("a copy", [&] { return copy.poll() != NIXL_IN_PROG; });
        return copy.poll();
    }
};

void no_driver() {
    std::shared_ptr<Gpus> gpus;
    CHECK_STATUS(Gpus::open("libno-such-driver.so.1", nullptr, gpus), NIXL_ERR_NOT_SUPPORTED);
    Status lacking = Gpus::open("libm.so.6", nullptr, gpus);
    CHECK(lacking.code() == NIXL_ERR_NOT_SUPPORTED && lacking.reason().find("cuMemHostRegister_v2") != std::string::npos);
    CHECK(!gpus && !is_offered("none") && !is_offered("") && !is_offered("libno-such-driver.so.1"));
}

void driver_that_does_not_start(Gpu& gpu) {
    std::shared_ptr<Gpus> gpus;
    gpu.fake.fail("cuInit", 0, 3);
    CHECK_STATUS(Gpus::open(gpu.library, nullptr, gpus), NIXL_ERR_NOT_SUPPORTED);
    gpu.fake.devices = 0;
    CHECK(!is_offered(gpu.library));
    gpu.fake.devices = 2;
    CHECK(is_offered(gpu.library));
}

void registration(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "registration", "native", 1 << 20);
    std::unique_ptr<RegistrationExtra> extra;
    CHECK_STATUS(scene.gpus->register_memory(2, scene.memory, 64, extra), NIXL_ERR_INVALID_PARAM);
    CHECK_STATUS(scene.gpus->register_memory(UINT64_MAX, scene.memory, 64, extra), NIXL_ERR_INVALID_PARAM);
    CHECK_STATUS(scene.gpus->register_memory(0, reinterpret_cast<uint64_t>(&scene), 64, extra), NIXL_ERR_INVALID_PARAM);
    CHECK_STATUS(scene.gpus->register_memory(0, scene.memory, (1 << 20) + 1, extra), NIXL_ERR_INVALID_PARAM);
    CHECK_STATUS(scene.gpus->register_memory(0, scene.memory, 0, extra), NIXL_ERR_INVALID_PARAM);
    CHECK_STATUS(scene.gpus->register_memory(0, scene.memory, SIZE_MAX, extra), NIXL_ERR_INVALID_PARAM);
    CHECK(!extra);
    gpu.fake.fail("cuDevicePrimaryCtxRetain", 0, 2);
    CHECK_STATUS(scene.gpus->register_memory(1, scene.memory, 64, extra), NIXL_ERR_BACKEND);
    // The device is there, and the memory is another's.
    CHECK_STATUS(scene.gpus->register_memory(1, scene.memory, 64, extra), NIXL_ERR_INVALID_PARAM);
    CHECK(!extra);
}

/// The first memory of a GPU that is registered has the pool registered with the driver; if that is refused, it is registered nevertheless.
void registered_at_start(const Folder& folder, Gpu& gpu) {
    unsetenv("CXL_CUDA_REGISTER_BYTES");
    {
        Scene scene(folder, gpu, "registered", "native", 1 << 20);
        CHECK(gpu.fake.registered > 0);
    }
    CHECK(gpu.fake.registered == 0);
    gpu.fake.fail("cuMemHostRegister_v2", 0, 2);
    {
        Scene scene(folder, gpu, "refused", "native", 1 << 20);
        CHECK(gpu.fake.registered == 0);
    }
    setenv("CXL_CUDA_REGISTER_BYTES", "0", 1);
}

/// Both directions: the bytes arrive, not before the device is done, and past this host's caches.
void both_directions(const Scene& scene, size_t count, Way way) {
    const Gpu& gpu = scene.gpu;
    std::vector<DevicePiece> list = scene.pieces(count, scene.block);
    for (uint32_t round = 1; round <= 2; round++) {
        gpu.fake.queries_until_done = 3;
        std::vector<std::byte> bytes = testing::unique_bytes(scene.len_bytes, round);
        scene.written_elsewhere(bytes);
        auto copy = scene.start(Direction::to_device, list, way);
        CHECK(copy->poll() == NIXL_IN_PROG);
        CHECK(scene.finish(*copy) == NIXL_SUCCESS && copy->result().ok());
        CHECK(Scene::agree(list, scene.block, bytes.data()));

        bytes = testing::unique_bytes(scene.len_bytes, round + 10);
        std::memcpy(scene.in_device(), bytes.data(), scene.len_bytes);
        copy = scene.start(Direction::to_host, list, way);
        CHECK(copy->poll() == NIXL_IN_PROG && !Scene::agree(list, scene.block, scene.seen().data()));
        CHECK(scene.finish(*copy) == NIXL_SUCCESS);
        CHECK(Scene::agree(list, scene.block, scene.seen().data()));
    }
    gpu.fake.queries_until_done = 0;
}

void lists(const Folder& folder, Gpu& gpu, const char* name, const char* coherence) {
    Scene scene(folder, gpu, name, coherence, 3 << 20);
    CHECK(gpu.fake.registered == 0);
    both_directions(scene, 1, Way::any);
    both_directions(scene, 300, Way::any);
    CHECK(gpu.fake.registered > 0 && gpu.fake.pinned == 0);
    both_directions(scene, 3, Way::buffers);
    CHECK(gpu.fake.pinned > 0);
    // The block as one piece on both sides, given in small ones, is one copy for each of the call's four steps.
    int copies = gpu.fake.copies;
    std::vector<DevicePiece> neighbours;
    for (size_t at = 0; at < scene.len_bytes; at += 4096)
        neighbours.push_back({scene.memory + at, scene.block + at, 4096});
    CHECK(scene.finish(*scene.start(Direction::to_device, neighbours)) == NIXL_SUCCESS);
    CHECK(gpu.fake.copies == copies + 4);
    // Memory of the process, which was not registered.
    std::vector<std::byte> heap = testing::unique_bytes(scene.len_bytes, 5);
    std::vector<DevicePiece> list = scene.pieces(5, heap.data());
    CHECK(scene.finish(*scene.start(Direction::to_device, list)) == NIXL_SUCCESS && Scene::agree(list, heap.data(), heap.data()));
    CHECK(scene.finish(*scene.start(Direction::to_host, list)) == NIXL_SUCCESS && Scene::agree(list, heap.data(), heap.data()));
    // Nothing at all.
    CHECK(scene.finish(*scene.start(Direction::to_host, {})) == NIXL_SUCCESS);
    std::unique_ptr<Copy> copy;
    CHECK_STATUS(Copy::start(scene.device, Direction::to_host, {{scene.memory, nullptr, 1}}, Way::any, nullptr, copy),
                 NIXL_ERR_INVALID_PARAM);
}

void memory_that_cannot_be_pinned(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "unpinned", "emulated:seed=3", 3 << 20);
    gpu.fake.fail("cuMemHostRegister_v2", 0, 2);
    both_directions(scene, 2, Way::any);
    both_directions(scene, 200, Way::any);
    CHECK(gpu.fake.pinned > 0);
}

/// A call that fails fails the copy, and what was under way has ended by then.
void errors(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "errors", "native", 4 << 20);
    gpu.fake.queries_until_done = 2;
    struct Case {
        const char* call;
        int after;
        size_t count;
        Way way;
    };
    for (const Case& bad :
         {Case{"cuMemcpyAsync", 0, 1, Way::any}, Case{"cuMemcpyAsync", 40, 50, Way::any}, Case{"cuMemcpyAsync", 0, 1, Way::buffers},
          Case{"cuEventRecord", 0, 20, Way::any}, Case{"cuEventRecord", 0, 9, Way::buffers}, Case{"cuEventQuery", 1, 20, Way::any},
          Case{"cuEventQuery", 1, 9, Way::buffers}}) {
        for (Direction direction : {Direction::to_device, Direction::to_host}) {
            gpu.fake.fail(bad.call, bad.after, 719);
            auto hold = std::make_shared<int>(0);
            auto copy = scene.start(direction, scene.pieces(bad.count, scene.block), bad.way, hold);
            CHECK(scene.finish(*copy) == NIXL_ERR_BACKEND);
            CHECK(copy->result().reason().find("CUDA_ERROR_LAUNCH_FAILED") != std::string::npos);
            CHECK(hold.use_count() == 1 && copy->cancel(0));
            CHECK(gpu.fake.failures == 0);
            // An error of a query may have left copies in the stream: the next one comes behind them.
            CHECK(scene.finish(*scene.start(direction, scene.pieces(7, scene.block))) == NIXL_SUCCESS);
        }
    }
    for (const char* call : {"cuCtxPushCurrent_v2", "cuEventCreate", "cuMemHostAlloc"}) {
        Scene fresh(folder, gpu, (std::string("fresh-") + call).c_str(), "native", 1 << 20);
        gpu.fake.fail(call, 0, 2);
        auto hold = std::make_shared<int>(0);
        std::unique_ptr<Copy> copy;
        CHECK_STATUS(Copy::start(fresh.device, Direction::to_host, fresh.pieces(2, fresh.block), Way::buffers, hold, copy),
                     NIXL_ERR_BACKEND);
        CHECK(!copy && hold.use_count() == 1);
        CHECK(fresh.finish(*fresh.start(Direction::to_host, fresh.pieces(2, fresh.block), Way::buffers)) == NIXL_SUCCESS);
    }
    gpu.fake.copy_error = 719;
    auto copy = scene.start(Direction::to_host, scene.pieces(10, scene.block));
    CHECK(scene.finish(*copy) == NIXL_ERR_BACKEND);
    gpu.fake.copy_error = 0;
    gpu.fake.queries_until_done = 0;
}

/// Fault 14: a device that is slow keeps its memory, cancelled or not.
void nothing_is_reused_before_the_end(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "slow", "emulated:seed=9", 2 << 20);
    std::vector<DevicePiece> list = scene.pieces(40, scene.block);
    std::vector<std::byte> bytes = testing::unique_bytes(scene.len_bytes, 77);
    for (Way way : {Way::any, Way::buffers}) {
        std::memcpy(scene.in_device(), bytes.data(), scene.len_bytes);
        gpu.fake.is_stuck = true;
        auto hold = std::make_shared<int>(0);
        auto copy = scene.start(Direction::to_host, list, way, hold);
        CHECK(copy->poll() == NIXL_IN_PROG && !copy->cancel(30));
        CHECK(copy->poll() == NIXL_IN_PROG && hold.use_count() == 2);
        gpu.fake.is_stuck = false;
        CHECK(copy->cancel(10'000) && hold.use_count() == 1);
        // The device had it all in one go, so it was done after all; through buffers nothing is written once it is cancelled.
        CHECK(copy->poll() == (way == Way::any ? NIXL_SUCCESS : NIXL_ERR_CANCELED));
        CHECK(Scene::agree(list, scene.block, scene.seen().data()) == (way == Way::any));
        scene.written_elsewhere(testing::unique_bytes(scene.len_bytes, 1));
    }
    // Dropping a copy waits for the device.
    gpu.fake.is_stuck = true;
    auto hold = std::make_shared<int>(0);
    auto copy = scene.start(Direction::to_device, list, Way::any, hold);
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CHECK(hold.use_count() == 2);
        gpu.fake.is_stuck = false;
    });
    copy.reset();
    CHECK(hold.use_count() == 1);
    later.join();
}

/// The thread that follows copies ends, and has none of them any more, although one is under way: the one that started it polls on.
void the_end_of_the_thread(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "end", "native", 1 << 20);
    auto list = scene.pieces(4, scene.block);
    gpu.fake.is_stuck = true;
    std::shared_ptr<Copy> copy = scene.start(Direction::to_host, list);
    auto token = std::make_shared<int>(0);
    std::atomic<bool> has_ended{false};
    CHECK(scene.gpus->watch(copy, [token, &has_ended] { has_ended = true; }));
    scene.gpus->shut_down();
    CHECK(token.use_count() == 1 && copy.use_count() == 1);
    CHECK(!scene.gpus->watch(copy, [token] {}));
    CHECK(token.use_count() == 1);
    gpu.fake.is_stuck = false;
    CHECK(scene.finish(*copy) == NIXL_SUCCESS && !has_ended);
    scene.gpus->shut_down();
    gpu.check_conduct();
}

void parts(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "parts", "native", 1 << 20);
    auto pool = testing::register_dram(*scene.core, scene.block, scene.len_bytes);
    CHECK(pool->kind == RegionKind::pool);
    RemoteRegion remote = testing::own_region(pool), vram = testing::own_region(scene.vram);
    Pairs pairs, turned;
    for (size_t at = 0; at + 1000 <= scene.len_bytes; at += 5000) {
        pairs.push_back({scene.vram.get(), &remote, scene.memory + at, pool->base + (scene.len_bytes - 1000 - at), 1000});
        turned.push_back({pool.get(), &vram, pool->base + (scene.len_bytes - 1000 - at), scene.memory + at, 1000});
    }
    auto agree = [&] {
        std::vector<std::byte> seen = scene.seen();
        for (const Pair& pair : pairs) {
            if (std::memcmp(reinterpret_cast<void*>(pair.local_address), &seen[pair.remote_address - pool->base], 1000) != 0)
                return false;
        }
        return true;
    };
    struct {
        nixl_xfer_op_t operation;
        bool is_to_pool;
        const Pairs& of;
    } cases[] = {{NIXL_WRITE, true, pairs}, {NIXL_READ, false, pairs}, {NIXL_READ, true, turned}, {NIXL_WRITE, false, turned}};
    uint32_t salt = 100;
    gpu.fake.queries_until_done = 2;
    for (auto& one : cases) {
        std::unique_ptr<Part> part;
        CHECK_OK(make_device_part(scene.core, scene.gpus, one.operation, one.of, part));
        for (int post = 0; post < 3; post++) {
            std::vector<std::byte> bytes = testing::unique_bytes(scene.len_bytes, ++salt);
            if (one.is_to_pool)
                std::memcpy(scene.in_device(), bytes.data(), scene.len_bytes);
            else
                scene.written_elsewhere(bytes);
            CHECK(!agree());
            auto ended = std::make_shared<testing::Ended>();
            CHECK(part->post(ended) == NIXL_IN_PROG);
            // The application does not poll: the thread does.
            testing::await("the thread", [&] { return ended->times != 0; });
            CHECK(ended->status == NIXL_SUCCESS && agree() && !pool->is_used() && !scene.vram->is_used());
        }
        CHECK(part->estimate_us() > 0);
    }
    std::unique_ptr<Part> part, none;
    CHECK_OK(make_device_part(scene.core, scene.gpus, NIXL_WRITE, pairs, part));
    gpu.fake.is_stuck = true;
    auto ended = std::make_shared<testing::Ended>();
    CHECK(part->post(ended) == NIXL_IN_PROG && pool->is_used() && scene.vram->is_used() && ended->times == 0);
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        CHECK(pool->is_used() && ended->times == 0);
        gpu.fake.is_stuck = false;
    });
    part->cancel();
    later.join();
    CHECK(ended->times == 1 && !pool->is_used() && testing::run(*part) == NIXL_SUCCESS);
    // Given up, and with it what named the memory: that is in use nevertheless.
    auto peers = testing::register_dram(*scene.core, scene.block, scene.len_bytes);
    std::weak_ptr<Registration> kept = peers;
    RemoteRegion of_peer = testing::own_region(peers);
    std::unique_ptr<Part> given_up;
    CHECK_OK(
        make_device_part(scene.core, scene.gpus, NIXL_WRITE, {{scene.vram.get(), &of_peer, scene.memory, peers->base, 1000}}, given_up));
    gpu.fake.is_stuck = true;
    ended = std::make_shared<testing::Ended>();
    CHECK(given_up->post(ended) == NIXL_IN_PROG);
    given_up.reset();
    of_peer.own.reset();
    peers.reset();
    CHECK(ended->times == 1 && ended->status == NIXL_ERR_CANCELED);
    CHECK(kept.use_count() > 0 && scene.vram->is_used());
    gpu.fake.is_stuck = false;
    testing::await("the device", [&] { return kept.expired(); });
    CHECK(!scene.vram->is_used());

    scene.vram->close();
    CHECK(testing::run(*part) == NIXL_ERR_NOT_FOUND && !pool->is_used());

    CHECK_STATUS(make_device_part(scene.core, scene.gpus, NIXL_READ, {{scene.vram.get(), &vram, scene.memory, scene.memory, 1}}, none),
                 NIXL_ERR_NOT_SUPPORTED);
    RemoteRegion heap_of_a_peer;
    CHECK_STATUS(make_device_part(scene.core, scene.gpus, NIXL_READ, {{scene.vram.get(), &heap_of_a_peer, scene.memory, 0, 1}}, none),
                 NIXL_ERR_NOT_SUPPORTED);
    gpu.fake.queries_until_done = 0;
}

void staged_side(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "staged", "emulated:seed=5", 3 << 20);
    auto memory = std::make_shared<DeviceMemory>(scene.gpus, scene.device, scene.vram, 200);
    std::vector<Piece> list = {{scene.memory + 100, 1'500'001}, {scene.memory + 2'000'000, 77}, {scene.memory, 13}};
    std::vector<std::byte> bytes = testing::unique_bytes(scene.len_bytes, 31);
    std::memcpy(scene.in_device(), bytes.data(), scene.len_bytes);
    int pins = gpu.fake.pins;
    CHECK_OK(memory->to_pool(list, scene.offset));
    std::vector<std::byte> seen = scene.seen();
    CHECK(std::memcmp(&seen[0], &bytes[100], 1'500'001) == 0 && std::memcmp(&seen[1'500'001], &bytes[2'000'000], 77) == 0 &&
          std::memcmp(&seen[1'500'078], &bytes[0], 13) == 0);
    bytes = testing::unique_bytes(scene.len_bytes, 32);
    scene.written_elsewhere(bytes);
    CHECK_OK(memory->from_pool(list, scene.offset));
    CHECK(std::memcmp(scene.in_device() + 100, &bytes[0], 1'500'001) == 0 && std::memcmp(scene.in_device(), &bytes[1'500'078], 13) == 0);
    // The device was in the pool itself.
    CHECK(gpu.fake.pins == pins && gpu.fake.registered > 0);
    for (Piece wrong :
         {Piece{scene.memory - 1, 1}, Piece{scene.memory + scene.len_bytes, 1}, Piece{scene.memory, UINT64_MAX}, Piece{UINT64_MAX, 2}}) {
        CHECK(!memory->contains(wrong));
        CHECK_STATUS(memory->to_pool(std::span(&wrong, 1), scene.offset), NIXL_ERR_INVALID_PARAM);
    }
    CHECK(!memory->may_still_write());
}

/// A staging block that a device may still write to is no other transfer's.
void staging_under_a_device(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "staging", "native", 1 << 20);
    auto memory = std::make_shared<DeviceMemory>(scene.gpus, scene.device, scene.vram, 200);
    std::vector<std::byte> bytes = testing::unique_bytes(scene.len_bytes, 41);
    std::memcpy(scene.in_device(), bytes.data(), scene.len_bytes);
    std::vector<Piece> list = {{scene.memory, 64 << 10}};
    Staging staging(scene.core->pool, 2 * (64 << 10), 64 << 10);
    StagingBlock first, second, third;
    CHECK_OK(staging.acquire(first));
    uint64_t offset = first.offset();
    gpu.fake.is_stuck = true;
    CHECK_STATUS(memory->to_pool(list, offset), NIXL_ERR_BACKEND);
    CHECK(memory->may_still_write() && scene.vram->is_used());
    first.release_after({nullptr, memory});
    CHECK_OK(staging.acquire(second));
    CHECK(second.offset() != offset && staging.acquire(third).code() == NIXL_IN_PROG && staging.used() == 2);
    // An owner that wants the memory of the GPU back has to wait for the device, too.
    CHECK(!scene.vram->close_and_wait(0));
    gpu.fake.is_stuck = false;
    testing::await("the end of the device", [&] { return staging.acquire(third).ok(); });
    CHECK(third.offset() == offset && !memory->may_still_write());
    testing::await("the registration", [&] { return !scene.vram->is_used(); });
    // One of a copy that failed and has ended is free at once.
    gpu.fake.copy_error = 719;
    CHECK_STATUS(memory->to_pool(list, third.offset()), NIXL_ERR_BACKEND);
    gpu.fake.copy_error = 0;
    third.release_after({memory});
    CHECK(staging.used() == 1);
}

void many_threads(const Folder& folder, Gpu& gpu) {
    Scene scene(folder, gpu, "threads", "native", 4 << 20);
    gpu.fake.queries_until_done = 1;
    std::vector<std::thread> threads;
    for (size_t index = 0; index < 4; index++) {
        threads.emplace_back([&, index] {
            size_t part = scene.len_bytes / 4, base = index * part;
            for (uint32_t round = 0; round < 30; round++) {
                std::vector<std::byte> bytes = testing::unique_bytes(part, round * 4 + static_cast<uint32_t>(index));
                std::memcpy(scene.in_device() + base, bytes.data(), part);
                std::vector<DevicePiece> list;
                for (size_t at = 0; at + 3000 <= part; at += 7000)
                    list.push_back({scene.memory + base + at, scene.block + base + at, 3000});
                Way way = round % 3 ? Way::any : Way::buffers;
                CHECK(scene.finish(*scene.start(Direction::to_host, list, way)) == NIXL_SUCCESS);
                std::memset(scene.in_device() + base, 0, part);
                CHECK(scene.finish(*scene.start(Direction::to_device, list, way)) == NIXL_SUCCESS);
                CHECK(std::all_of(list.begin(), list.end(), [&](const DevicePiece& piece) {
                    return std::memcmp(reinterpret_cast<void*>(piece.device), &bytes[piece.device - scene.memory - base], 3000) == 0;
                }));
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    gpu.fake.queries_until_done = 0;
}

} // namespace

int main() {
    // Only where a test says so.
    setenv("CXL_CUDA_REGISTER_BYTES", "0", 1);
    Folder folder;
    no_driver();
    Gpu gpu(FAKE_CUDA);
    driver_that_does_not_start(gpu);
    registration(folder, gpu);
    registered_at_start(folder, gpu);
    lists(folder, gpu, "lists", "native");
    lists(folder, gpu, "lists-emulated", "emulated:seed=1");
    memory_that_cannot_be_pinned(folder, gpu);
    errors(folder, gpu);
    nothing_is_reused_before_the_end(folder, gpu);
    the_end_of_the_thread(folder, gpu);
    parts(folder, gpu);
    staged_side(folder, gpu);
    staging_under_a_device(folder, gpu);
    many_threads(folder, gpu);
    gpu.check_conduct();
    // Everything was given back.
    CHECK(gpu.fake.registered == 0 && gpu.fake.pinned == 0);
    return 0;
}
