// SPDX-License-Identifier: Apache-2.0
//
// Two engines of two processes and GPU memory on either side, through NIXL's own calls and a fake driver.
//   vram_engines_test                  all of it
//   vram_engines_test far POOL FOLDER  as the other host
#include "backend/cxl_backend.h"
#include "support/fake_cuda.h"
#include <cstring>
#include <fstream>
#include <iterator>
#include <tuple>

using namespace kvbm_cxl;

namespace {

constexpr size_t len_bytes = 1'500'000, piece_bytes = 7'000;

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

/// Whole or not at all.
void write_file(const std::string& path, const std::string& text) {
    std::ofstream(path + ".part", std::ios::binary) << text;
    CHECK(std::rename((path + ".part").c_str(), path.c_str()) == 0);
}

/// An engine, memory of a GPU, ordinary memory and a block of the pool, all registered.
struct Side {
    std::string agent;
    nixl_b_params_t parameters;
    std::unique_ptr<nixlCxlEngine> engine;
    struct Memory {
        nixl_mem_t kind;
        std::byte* address;
        nixlBackendMD* md = nullptr;
    };
    std::map<std::string, Memory> memories;
    std::vector<std::byte> heap = std::vector<std::byte>(len_bytes);
    FakeCuda fake{FAKE_CUDA};
    int pins = 0; // buffers that were made before
    uint64_t vram = 0;
    uint32_t last_salt = 100;

    Side(const std::string& name, const std::string& pool) : agent(name) {
        vram = fake.allocate(len_bytes);
        pins = fake.pins;
        parameters = {{"pool", pool}, {"cuda_library", FAKE_CUDA}, {"inline_bytes", "64K"}};
        nixlBackendInitParams params;
        params.localAgent = agent;
        params.type = "CXL";
        params.customParams = &parameters;
        params.enableProgTh = true;
        engine = std::make_unique<nixlCxlEngine>(&params);
        CHECK(!engine->getInitErr());
        nixl_mem_list_t mems = engine->getSupportedMems();
        CHECK(std::count(mems.begin(), mems.end(), VRAM_SEG) == 1);
        std::shared_ptr<Pool> shared;
        Options options;
        CHECK_OK(read_options(parameters, options));
        CHECK_OK(Pool::open(options, shared));
        void* block = nullptr;
        CHECK(cxl_shm_alloc(shared->handle(), len_bytes, 0, &block) == CXL_SHM_OK);
        add("heap", DRAM_SEG, heap.data());
        add("pool", DRAM_SEG, static_cast<std::byte*>(block));
        add("vram", VRAM_SEG, reinterpret_cast<std::byte*>(vram));
    }
    ~Side() {
        for (auto& [name, memory] : memories)
            CHECK(engine->deregisterMem(memory.md) == NIXL_SUCCESS);
        fake.release(vram);
    }

    /// Whether the device has copied to and from the pool alone, and no byte went through a buffer of the host.
    bool has_no_bounce() const { return fake.pins == pins && fake.registered > 0 && fake.copies > 0; }

    /// Fills memory and registers it, in this order: the sanitizer does not see what other processes order.
    void add(const std::string& name, nixl_mem_t kind, std::byte* address) {
        memories[name] = {kind, address};
        fill(name, ++last_salt);
        Memory memory{kind, address};
        nixlBlobDesc desc(reinterpret_cast<uintptr_t>(address), len_bytes, 0);
        CHECK(engine->registerMem(desc, kind, memory.md) == NIXL_SUCCESS);
        memories[name] = memory;
    }
    void fill(const std::string& name, uint32_t salt) {
        std::vector<std::byte> bytes = testing::unique_bytes(len_bytes, salt);
        if (name == "pool")
            CHECK(cxl_shm_copy_in(memories[name].address, bytes.data(), len_bytes) == CXL_SHM_OK);
        else
            std::memcpy(memories[name].address, bytes.data(), len_bytes);
    }
    bool holds(const std::string& name, uint32_t salt) {
        std::vector<std::byte> bytes(len_bytes);
        if (name == "pool")
            CHECK(cxl_shm_copy_out(bytes.data(), memories[name].address, len_bytes) == CXL_SHM_OK);
        else
            std::memcpy(bytes.data(), memories[name].address, len_bytes);
        return bytes == testing::unique_bytes(len_bytes, salt);
    }
};

constexpr const char* names[] = {"heap", "pool", "vram"};

/// What the other host does: tells where its memory is, and looks at what came.
void far(const std::string& pool, const std::string& folder) {
    Side side("far", pool);
    for (const char* name : names) {
        std::string data;
        CHECK(side.engine->getPublicData(side.memories[name].md, data) == NIXL_SUCCESS);
        write_file(folder + "/" + name, data);
        write_file(folder + "/" + name + ".at", std::to_string(reinterpret_cast<uintptr_t>(side.memories[name].address)));
    }
    std::string info;
    CHECK(side.engine->getConnInfo(info) == NIXL_SUCCESS);
    write_file(folder + "/info", info);
    // Told by a notification, so that the sanitizer sees it too.
    notif_list_t written;
    testing::await("the transfers", [&] { return side.engine->getNotifs(written) == NIXL_SUCCESS && !written.empty(); });
    CHECK(written.size() == 1 && written[0].second == "written");
    uint32_t salt = 200;
    for (const char* name : names)
        CHECK(side.holds(name, ++salt));
    CHECK(side.has_no_bounce());
    // With a notification, plain loads see what was written in spite of what they had cached.
    std::vector<std::byte> cached(side.memories["pool"].address, side.memories["pool"].address + len_bytes);
    CHECK(cached == testing::unique_bytes(len_bytes, 202));
    write_file(folder + "/cached", "");
    notif_list_t notifs;
    testing::await("a notification", [&] {
        notif_list_t some;
        CHECK(side.engine->getNotifs(some) == NIXL_SUCCESS);
        notifs.insert(notifs.end(), some.begin(), some.end());
        return !notifs.empty();
    });
    CHECK(notifs.size() == 1 && notifs[0].first == "near" && notifs[0].second == "pool");
    std::memcpy(cached.data(), side.memories["pool"].address, len_bytes);
    CHECK(cached == testing::unique_bytes(len_bytes, 300));
    write_file(folder + "/told", "");
    testing::await("the end", [&] { return std::filesystem::exists(folder + "/done"); });
}

/// A list of pieces that change places: piece k here is piece count-1-k there, to and fro of one range.
nixl_status_t transfer(Side& side, nixl_xfer_op_t operation, const std::string& local, nixlBackendMD* remote, nixl_mem_t kind,
                       uintptr_t remote_address, const std::string& agent, const std::string& note = {}) {
    nixl_meta_dlist_t near(side.memories[local].kind), far(kind);
    auto base = reinterpret_cast<uintptr_t>(side.memories[local].address);
    for (size_t at = 0; at < len_bytes; at += piece_bytes) {
        size_t turned = (at / piece_bytes ^ 1) * piece_bytes; // neighbours change their order in the list
        if (turned >= len_bytes)
            turned = at;
        size_t len = std::min(piece_bytes, len_bytes - turned);
        near.addDesc(nixlMetaDesc(base + turned, len, 0, side.memories[local].md));
        far.addDesc(nixlMetaDesc(remote_address + turned, len, 0, remote));
    }
    nixlBackendReqH* handle = nullptr;
    if (nixl_status_t prepared = side.engine->prepXfer(operation, near, far, agent, handle); prepared != NIXL_SUCCESS)
        return prepared;
    nixl_opt_b_args_t arguments;
    arguments.hasNotif = !note.empty();
    arguments.notifMsg = note;
    nixl_status_t state = side.engine->postXfer(operation, near, far, agent, handle, &arguments);
    testing::await("a transfer", [&] {
        if (state == NIXL_IN_PROG)
            state = side.engine->checkXfer(handle);
        return state != NIXL_IN_PROG;
    });
    CHECK(side.engine->releaseReqH(handle) == NIXL_SUCCESS);
    return state;
}

void near(const testing::Folder& folder, const std::string& name, const char* coherence) {
    Options options = testing::new_pool(folder, name, coherence);
    std::string meeting = folder.path(name + ".d");
    CHECK(std::filesystem::create_directory(meeting));
    Side side("near", options.pool);
    testing::Child other(folder, "two", {"far", options.pool, meeting});
    testing::await("the other engine", [&] { return std::filesystem::exists(meeting + "/info"); });
    CHECK(side.engine->loadRemoteConnInfo("far", read_file(meeting + "/info")) == NIXL_SUCCESS);
    uint32_t salt = 100;
    nixlBackendMD* pool = nullptr;
    uintptr_t pool_at = 0;
    for (const char* there : names) {
        nixl_mem_t kind = side.memories[there].kind;
        nixlBackendMD* remote = nullptr;
        uintptr_t at = std::stoull(read_file(meeting + "/" + there + ".at"));
        CHECK(side.engine->loadRemoteMD(nixlBlobDesc(at, len_bytes, 0, read_file(meeting + "/" + there)), kind, "far", remote) ==
              NIXL_SUCCESS);
        salt++;
        side.fill("vram", 1);
        CHECK(transfer(side, NIXL_READ, "vram", remote, kind, at, "far") == NIXL_SUCCESS && side.holds("vram", salt));
        // From the GPU there to ordinary memory here.
        if (kind == VRAM_SEG)
            CHECK(transfer(side, NIXL_READ, "heap", remote, kind, at, "far") == NIXL_SUCCESS && side.holds("heap", salt));
        side.fill("vram", salt + 100);
        CHECK(transfer(side, NIXL_WRITE, "vram", remote, kind, at, "far") == NIXL_SUCCESS);
        if (std::string(there) == "pool")
            std::tie(pool, pool_at) = std::tie(remote, at);
        else
            CHECK(side.engine->unloadMD(remote) == NIXL_SUCCESS);
    }
    CHECK(side.engine->genNotif("far", "written") == NIXL_SUCCESS);
    testing::await("the other side's look", [&] { return std::filesystem::exists(meeting + "/cached"); });
    side.fill("vram", 300);
    CHECK(transfer(side, NIXL_WRITE, "vram", pool, DRAM_SEG, pool_at, "far", "pool") == NIXL_SUCCESS);
    CHECK(side.engine->unloadMD(pool) == NIXL_SUCCESS);
    testing::await("the other side's look", [&] { return std::filesystem::exists(meeting + "/told"); });
    write_file(meeting + "/done", "");
    other.succeed();
    CHECK(side.has_no_bounce());

    // Within one process.
    for (const char* there : {"heap", "pool"}) {
        nixlBackendMD* remote = nullptr;
        CHECK(side.engine->loadLocalMD(side.memories[there].md, remote) == NIXL_SUCCESS);
        side.fill("vram", ++salt);
        auto at = reinterpret_cast<uintptr_t>(side.memories[there].address);
        CHECK(transfer(side, NIXL_WRITE, "vram", remote, DRAM_SEG, at, "near") == NIXL_SUCCESS && side.holds(there, salt));
        side.fill(there, ++salt);
        CHECK(transfer(side, NIXL_READ, "vram", remote, DRAM_SEG, at, "near") == NIXL_SUCCESS && side.holds("vram", salt));
        CHECK(side.engine->unloadMD(remote) == NIXL_SUCCESS);
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4) {
        far(argv[2], argv[3]);
        return 0;
    }
    testing::Folder folder;
    near(folder, "plain", "native");
    near(folder, "emulated", "emulated:seed=41,noise=4");
    return 0;
}
