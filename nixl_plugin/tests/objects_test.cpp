// SPDX-License-Identifier: Apache-2.0
//
// Objects by key: what is published is got by another host, whole or in parts, and what is refused.
//   objects_test                      all of it
//   objects_test reads|races POOL     as the other host
#include "objects/object.h"
#include "support/pools.h"
#include <cstring>

using namespace kvbm_cxl;

namespace {

constexpr size_t object_bytes = 200'003, cell_bytes = 256 << 10;
constexpr int raced = 40;

struct Scene {
    std::shared_ptr<Core> core;
    std::map<std::string, std::shared_ptr<Registration>> objects;

    explicit Scene(Options options, uint64_t inline_bytes = 1 << 20) {
        options.inline_bytes = inline_bytes;
        core = testing::new_core(options);
    }

    RemoteRegion object(const std::string& key, uint64_t device = 0) {
        auto& registration = objects[key];
        if (!registration) {
            registration = std::make_shared<Registration>();
            registration->memory = OBJ_SEG;
            registration->kind = RegionKind::object;
            registration->len_bytes = 1 << 30;
            CHECK_OK(open_object(*core, device, key, registration->extra));
        }
        return testing::own_region(registration);
    }
};

/// Pairs of an object with a buffer: `ranges` of offset and length, one behind the other in the buffer.
Pairs pairs_of(Registration* local, const RemoteRegion& object, const std::vector<std::pair<uint64_t, size_t>>& ranges) {
    Pairs pairs;
    uintptr_t at = local->base;
    for (auto [offset, len] : ranges) {
        pairs.push_back({local, &object, at, offset, len});
        at += len;
    }
    return pairs;
}

nixl_status_t transfer(Scene& scene, nixl_xfer_op_t operation, const Pairs& pairs) {
    std::unique_ptr<Part> part;
    if (Status made = make_object_part(scene.core, operation, pairs, part); !made.ok()) {
        CHECK(!made.reason().empty());
        return made.code();
    }
    return testing::run(*part);
}

void names() {
    ObjectName one, other;
    const std::string key(32, 'A'), whole = std::string(32, '1') + std::string(32, 'b');
    CHECK_OK(name_object("nixl", 7, key, one));
    CHECK(one.id.key[0] == 0xaa && one.id.key[15] == 0xaa);
    CHECK_OK(name_object("nixl", 7, whole, other));
    CHECK(other.id.name_space[3] == 0x11 && other.id.key[3] == 0xbb && other.text == std::string(32, '1') + "/" + std::string(32, 'b'));
    CHECK_OK(name_object(std::string(32, '2'), 7, "any", other));
    CHECK(other.id.name_space[9] == 0x22);
    uint8_t name_space[CXL_SHM_ID_BYTES], hashed[CXL_SHM_ID_BYTES];
    const std::string bytes("a\0b\xff", 4);
    CHECK(cxl_shm_cache_namespace("model/7", 7, name_space) == 0 && cxl_shm_cache_key(nullptr, bytes.data(), 4, hashed) == 0);
    CHECK_OK(name_object("model/7", 7, bytes, one));
    CHECK(std::memcmp(one.id.name_space, name_space, 16) == 0 && std::memcmp(one.id.key, hashed, 16) == 0);
    CHECK_OK(name_object("nixl", 42, "", one));
    CHECK_OK(name_object("nixl", 7, "42", other));
    CHECK(std::memcmp(&one.id, &other.id, sizeof one.id) == 0);
    // One digit too few, and no digit, are text.
    for (const std::string& text : {std::string(31, 'a'), std::string(31, 'a') + "g", std::string(63, 'a')}) {
        CHECK_OK(name_object("nixl", 7, text, other));
        CHECK(other.id.key[0] != 0xaa || other.id.key[1] != 0xaa);
    }
}

void pool_without_cells(const testing::Folder& folder) {
    Scene scene(testing::new_pool(folder, "plain", "native"));
    std::unique_ptr<RegistrationExtra> none;
    Status refused = open_object(*scene.core, 0, "key", none);
    CHECK(refused.code() == NIXL_ERR_NOT_SUPPORTED && !none && refused.reason().find("cxlctl format") != std::string::npos);
    std::vector<nixl_query_resp_t> answers;
    CHECK_STATUS(query_objects(*scene.core, nixl_reg_dlist_t(OBJ_SEG), answers), NIXL_ERR_NOT_SUPPORTED);
}

std::string key_of(int index) {
    return "block " + std::to_string(index);
}

/// What the one host publishes: from ordinary memory in pieces out of order, from pool memory, and two objects at once.
void publish(Scene& scene) {
    for (int index = 0; index < 6; index++) {
        std::vector<std::byte> bytes = testing::unique_bytes(object_bytes, static_cast<uint32_t>(index));
        RemoteRegion object = scene.object(key_of(index));
        void* block = nullptr;
        std::shared_ptr<Registration> local;
        if (index % 2) {
            CHECK(cxl_shm_alloc(scene.core->pool->handle(), object_bytes, 0, &block) == CXL_SHM_OK);
            CHECK(cxl_shm_copy_in(block, bytes.data(), object_bytes) == CXL_SHM_OK);
            local = testing::register_dram(*scene.core, block, object_bytes);
        } else {
            local = testing::register_dram(*scene.core, bytes.data(), object_bytes);
        }
        Pairs pairs = pairs_of(local.get(), object, {{0, 777}, {777, 100'000}, {100'777, 0}, {100'777, object_bytes - 100'777}});
        std::swap(pairs[0], pairs[3]);
        std::swap(pairs[1], pairs[2]);
        CHECK(transfer(scene, NIXL_WRITE, pairs) == NIXL_SUCCESS);
        CHECK(scene.core->counters.get(CXL_SHM_COUNT_NIXL_OBJECTS_WRITTEN) == static_cast<uint64_t>(index) + 1);
        CHECK(!local->is_used());
        // Once more: it is there, and stays what it is.
        if (index == 2) {
            bytes = testing::unique_bytes(object_bytes, 99);
            CHECK(transfer(scene, NIXL_WRITE, pairs) == NIXL_SUCCESS && scene.core->counters.get(CXL_SHM_COUNT_NIXL_OBJECTS_EXISTED) == 1);
            pairs = pairs_of(local.get(), object, {{0, 10}});
            CHECK(transfer(scene, NIXL_WRITE, pairs) == NIXL_ERR_NOT_ALLOWED);
        }
        if (block)
            CHECK(cxl_shm_free(block) == CXL_SHM_OK);
    }
    std::vector<std::byte> bytes = testing::unique_bytes(100, 50);
    auto local = testing::register_dram(*scene.core, bytes.data(), 100);
    RemoteRegion first = scene.object("pair/1"), second = scene.object("pair/2");
    CHECK(transfer(scene, NIXL_WRITE,
                   {{local.get(), &second, local->base + 70, 20, 10},
                    {local.get(), &first, local->base, 0, 50},
                    {local.get(), &second, local->base + 50, 0, 20},
                    {local.get(), &second, local->base + 80, 30, 20}}) == NIXL_SUCCESS);
}

void read_back(Scene& scene) {
    std::vector<std::byte> bytes(object_bytes + 64);
    for (int index = 0; index < 6; index++) {
        std::vector<std::byte> wanted = testing::unique_bytes(object_bytes, static_cast<uint32_t>(index));
        RemoteRegion object = scene.object(key_of(index));
        void* block = nullptr;
        CHECK(cxl_shm_alloc(scene.core->pool->handle(), object_bytes + 64, 0, &block) == CXL_SHM_OK);
        auto heap = testing::register_dram(*scene.core, bytes.data(), bytes.size());
        auto pool = testing::register_dram(*scene.core, block, bytes.size());
        // Whole, in two pieces that are out of order; then parts of it.
        Pairs whole = {{nullptr, &object, 150'001, 150'001, object_bytes - 150'001}, {nullptr, &object, 0, 0, 150'001}};
        Pairs ranges = {
            {nullptr, &object, 5, 100'000, 70'001}, {nullptr, &object, 80'000, 3, 9}, {nullptr, &object, 90'000, object_bytes - 1, 1}};
        for (Registration* local : {heap.get(), pool.get()}) {
            for (const Pairs& given : {whole, ranges}) {
                Pairs pairs = given;
                std::memset(bytes.data(), 0, bytes.size());
                CHECK(cxl_shm_copy_in(block, bytes.data(), bytes.size()) == CXL_SHM_OK);
                for (Pair& pair : pairs) {
                    pair.local = local;
                    pair.local_address += local->base;
                }
                CHECK(transfer(scene, NIXL_READ, pairs) == NIXL_SUCCESS);
                if (local == pool.get())
                    CHECK(cxl_shm_copy_out(bytes.data(), block, bytes.size()) == CXL_SHM_OK);
                for (const Pair& pair : given)
                    CHECK(std::memcmp(&bytes[pair.local_address], &wanted[pair.remote_address], pair.len_bytes) == 0);
                CHECK(bytes[object_bytes + 1] == std::byte{0});
            }
        }
        CHECK(transfer(scene, NIXL_READ, pairs_of(heap.get(), object, {{0, object_bytes + 1}})) == NIXL_ERR_MISMATCH);
        CHECK(transfer(scene, NIXL_READ, pairs_of(heap.get(), object, {{object_bytes + 1, 0}})) == NIXL_ERR_MISMATCH);
        CHECK(transfer(scene, NIXL_READ, pairs_of(heap.get(), object, {{UINT64_MAX, 2}})) == NIXL_ERR_MISMATCH);
        CHECK(cxl_shm_free(block) == CXL_SHM_OK);
    }
    auto heap = testing::register_dram(*scene.core, bytes.data(), bytes.size());
    RemoteRegion first = scene.object("pair/1"), second = scene.object("pair/2"), absent = scene.object("absent");
    CHECK(transfer(scene, NIXL_READ, {{heap.get(), &second, heap->base + 50, 0, 50}, {heap.get(), &first, heap->base, 0, 50}}) ==
          NIXL_SUCCESS);
    CHECK(std::memcmp(bytes.data(), testing::unique_bytes(100, 50).data(), 100) == 0);
    uint64_t missed = scene.core->counters.get(CXL_SHM_COUNT_NIXL_OBJECTS_MISSED);
    CHECK(transfer(scene, NIXL_READ, pairs_of(heap.get(), absent, {{0, 10}})) == NIXL_ERR_NOT_FOUND);
    CHECK(transfer(scene, NIXL_READ, {{heap.get(), &first, heap->base, 0, 50}, {heap.get(), &absent, heap->base + 50, 0, 50}}) ==
          NIXL_ERR_NOT_FOUND);
    CHECK(scene.core->counters.get(CXL_SHM_COUNT_NIXL_OBJECTS_MISSED) == missed + 2);

    nixl_reg_dlist_t descs(OBJ_SEG);
    for (const char* key : {"block 1", "absent", "pair/1"})
        descs.addDesc(nixlBlobDesc(0, 0, 0, key));
    std::vector<nixl_query_resp_t> answers;
    CHECK_OK(query_objects(*scene.core, descs, answers));
    CHECK(answers.size() == 3 && !answers[1] && answers[0]->at("size") == std::to_string(object_bytes) && answers[0]->at("tier") == "cxl");
    CHECK(answers[2]->at("size") == "50" && answers[2]->at("key").size() == 32);
}

void refusals(Scene& scene) {
    std::vector<std::byte> bytes = testing::unique_bytes(cell_bytes + 1, 60);
    auto local = testing::register_dram(*scene.core, bytes.data(), bytes.size());
    RemoteRegion object = scene.object("refused");
    for (const std::vector<std::pair<uint64_t, size_t>>& ranges :
         {std::vector<std::pair<uint64_t, size_t>>{{1, 10}}, {{0, 10}, {11, 10}}, {{0, 10}, {9, 10}}, {{0, 10}, {0, 10}}, {{0, 0}}, {}})
        CHECK(ranges.empty() || transfer(scene, NIXL_WRITE, pairs_of(local.get(), object, ranges)) == NIXL_ERR_INVALID_PARAM);
    CHECK(transfer(scene, NIXL_WRITE, pairs_of(local.get(), object, {{0, cell_bytes + 1}})) == NIXL_ERR_INVALID_PARAM);
    RemoteRegion of_a_peer;
    of_a_peer.memory = OBJ_SEG;
    CHECK(transfer(scene, NIXL_WRITE, pairs_of(local.get(), of_a_peer, {{0, 10}})) == NIXL_ERR_NOT_SUPPORTED);
    Registration vram;
    vram.memory = VRAM_SEG;
    CHECK(transfer(scene, NIXL_WRITE, pairs_of(&vram, object, {{0, 10}})) == NIXL_ERR_NOT_SUPPORTED);
    std::vector<nixl_query_resp_t> answers;
    nixl_reg_dlist_t descs(OBJ_SEG);
    descs.addDesc(nixlBlobDesc(0, 0, 0, "refused"));
    CHECK_OK(query_objects(*scene.core, descs, answers));
    CHECK(!answers[0]);
    scene.objects["refused"]->close();
    CHECK(transfer(scene, NIXL_WRITE, pairs_of(local.get(), object, {{0, 10}})) == NIXL_ERR_NOT_FOUND && !local->is_used());
}

/// An object that another writer has begun is not there: a WRITE of it ends when that does, and is what it says.
void written_by_another(const Options& options) {
    std::vector<std::byte> bytes = testing::unique_bytes(object_bytes, 70), seen(object_bytes);
    std::vector<std::byte> others = testing::unique_bytes(object_bytes, 71);
    enum class Other { stays, aborts, commits, commits_another_length };
    for (Other other : {Other::stays, Other::aborts, Other::commits, Other::commits_another_length}) {
        // Inside of the post, and by a worker.
        for (uint64_t inline_bytes : {1 << 20, 0}) {
            if (other != Other::stays && inline_bytes != 0)
                continue;
            Options how = options;
            how.timeout_ms = other == Other::stays ? 100 : 600'000;
            Scene scene(how, inline_bytes);
            std::string key = text("of another ", static_cast<int>(other), "/", inline_bytes);
            RemoteRegion object = scene.object(key);
            ObjectName name;
            CHECK_OK(name_object(how.name_space, 0, key, name));
            cxl_pool_t* pool = scene.core->pool->handle();
            cxl_shm_block_t block{};
            block.struct_size = sizeof block;
            size_t len_bytes = other == Other::commits_another_length ? object_bytes - 1 : object_bytes;
            CHECK(cxl_shm_cache_reserve(pool, &name.id, nullptr, len_bytes, &block) == CXL_SHM_OK);
            CHECK(cxl_shm_copy_in(block.ptr, others.data(), len_bytes) == CXL_SHM_OK);
            auto from = testing::register_dram(*scene.core, bytes.data(), object_bytes);
            auto to = testing::register_dram(*scene.core, seen.data(), object_bytes);
            Pairs write = pairs_of(from.get(), object, {{0, object_bytes}}), read = pairs_of(to.get(), object, {{0, object_bytes}});
            if (other == Other::stays) {
                CHECK(transfer(scene, NIXL_WRITE, write) == NIXL_ERR_NOT_ALLOWED);
                CHECK(transfer(scene, NIXL_READ, read) == NIXL_ERR_NOT_FOUND);
                CHECK(cxl_shm_cache_abort(pool, block.handle) == CXL_SHM_OK);
                continue;
            }
            std::unique_ptr<Part> part;
            CHECK_OK(make_object_part(scene.core, NIXL_WRITE, write, part));
            auto ended = std::make_shared<testing::Ended>();
            CHECK(part->post(ended) == NIXL_IN_PROG);
            testing::await("a worker", [&] { return from->is_used(); });
            if (other == Other::aborts)
                CHECK(cxl_shm_cache_abort(pool, block.handle) == CXL_SHM_OK);
            else
                CHECK(cxl_shm_cache_commit(pool, block.handle) == CXL_SHM_OK);
            testing::await("the end of the write", [&] { return ended->times != 0; });
            if (other == Other::commits_another_length) {
                CHECK(ended->status == NIXL_ERR_NOT_ALLOWED);
                continue;
            }
            CHECK(ended->status == NIXL_SUCCESS && transfer(scene, NIXL_READ, read) == NIXL_SUCCESS);
            CHECK(seen == (other == Other::aborts ? bytes : others));
        }
    }
}

/// Objects on workers, posted again and cancelled.
void on_workers(const Options& options) {
    Scene scene(options, 0);
    std::vector<std::byte> bytes = testing::unique_bytes(object_bytes, 1);
    auto local = testing::register_dram(*scene.core, bytes.data(), bytes.size());
    RemoteRegion object = scene.object(key_of(1));
    std::unique_ptr<Part> part;
    CHECK_OK(make_object_part(scene.core, NIXL_READ, pairs_of(local.get(), object, {{0, object_bytes}}), part));
    for (int round = 0; round < 50; round++) {
        std::memset(bytes.data(), 0, bytes.size());
        auto ended = std::make_shared<testing::Ended>();
        CHECK(part->post(ended) == NIXL_IN_PROG);
        if (round % 3 == 0) {
            part->cancel();
            CHECK(ended->times == 1 && (ended->status == NIXL_SUCCESS || ended->status == NIXL_ERR_CANCELED));
        } else {
            testing::await("a worker", [&] { return ended->times != 0; });
            CHECK(ended->status == NIXL_SUCCESS &&
                  std::memcmp(bytes.data(), testing::unique_bytes(object_bytes, 1).data(), object_bytes) == 0);
        }
        CHECK(ended->times == 1 && !local->is_used());
    }
    // Dropped while it runs.
    auto ended = std::make_shared<testing::Ended>();
    CHECK(part->post(ended) == NIXL_IN_PROG);
    part.reset();
    CHECK(ended->times == 1 && !local->is_used());
}

/// Both hosts publish the same names with bytes of their own: each block is one host's, whole.
void race(Scene& scene, uint32_t own) {
    std::vector<std::byte> bytes = testing::unique_bytes(object_bytes, own), other = testing::unique_bytes(object_bytes, 3 - own);
    std::vector<std::byte> seen(object_bytes);
    auto from = testing::register_dram(*scene.core, bytes.data(), object_bytes),
         to = testing::register_dram(*scene.core, seen.data(), object_bytes);
    for (int index = 0; index < raced; index++) {
        RemoteRegion object = scene.object("race " + std::to_string(index));
        CHECK(transfer(scene, NIXL_WRITE, pairs_of(from.get(), object, {{0, object_bytes}})) == NIXL_SUCCESS);
        testing::await("the winner",
                       [&] { return transfer(scene, NIXL_READ, pairs_of(to.get(), object, {{0, object_bytes}})) == NIXL_SUCCESS; });
        CHECK(std::memcmp(seen.data(), bytes.data(), object_bytes) == 0 || std::memcmp(seen.data(), other.data(), object_bytes) == 0);
    }
}

Options options_of(const std::string& pool) {
    Options options;
    CHECK_OK(read_options({{"pool", pool}}, options));
    return options;
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 3) {
        Scene scene(options_of(argv[2]));
        if (std::string(argv[1]) == "reads")
            read_back(scene);
        else
            race(scene, 2);
        return 0;
    }
    testing::Folder folder;
    names();
    pool_without_cells(folder);
    int number = 0;
    for (const char* coherence : {"native", "emulated:seed=11,noise=4"}) {
        Options options = testing::new_pool(folder, "pool" + std::to_string(number++), coherence, cell_bytes);
        Scene scene(options);
        publish(scene);
        refusals(scene);
        read_back(scene);
        testing::Child(folder, "two", {"reads", options.pool}).succeed();
        on_workers(options);
        written_by_another(options);
        testing::Child other(folder, "two", {"races", options.pool});
        race(scene, 1);
        other.succeed();
    }
    return 0;
}
