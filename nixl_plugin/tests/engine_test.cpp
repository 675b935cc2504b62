// SPDX-License-Identifier: Apache-2.0
//
// The engine through NIXL's interface: agents of one process and of two, every place that memory can have, and everything that can go
// wrong.
//   engine_test                  all of it
//   engine_test serve POOL NAME  as the other process: registers memory, tells its metadata by files, answers notifications
#include "support/agents.h"
#include <random>

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t buffer_bytes = 3 << 20;

const std::vector<std::vector<std::array<size_t, 3>>> shapes = {
    {{0, 0, 4096}},
    {{1, 3, buffer_bytes - 100}},
    {{0, 70'000, 100}, {5000, 64, 20480}, {30'000, 100'000, 1}, {200'000, 300'000, 700'000}},
};

void within_a_process(const std::string& pool) {
    Agent one("one", pool), other("other", pool);
    CHECK(!one->getInitErr() && one->supportsRemote() && one->supportsLocal() && one->supportsNotif());
    CHECK(one.conn_info().size() >= 100);
    CHECK(one->loadRemoteConnInfo("other", other.conn_info()) == NIXL_SUCCESS && one->connect("other") == NIXL_SUCCESS);
    CHECK(one->connect("unknown") == NIXL_ERR_NOT_FOUND && one->genNotif("unknown", "x") == NIXL_ERR_NOT_FOUND);
    uint32_t salt = 1;
    for (int places = 0; places < 4; places++) {
        Buffer near(one, places & 1, buffer_bytes, salt++), far(other, places & 2, buffer_bytes, salt++);
        nixlBackendMD* md = load(one, "other", far.public_data());
        for (const auto& pieces : shapes) {
            for (nixl_xfer_op_t operation : {NIXL_READ, NIXL_WRITE}) {
                near.fill(salt++);
                far.fill(salt++);
                std::vector<std::byte> here = near.content(), there = far.content();
                Transfer_ transfer(one, operation, near, reinterpret_cast<uintptr_t>(far.address), md, "other", pieces);
                CHECK(transfer.prepared == NIXL_SUCCESS);
                CHECK(transfer.run("done") == NIXL_SUCCESS && one->checkXfer(transfer.handle) == NIXL_SUCCESS);
                for (auto [at, where, len] : pieces) {
                    if (operation == NIXL_READ)
                        std::memcpy(here.data() + at, there.data() + where, len);
                    else
                        std::memcpy(there.data() + where, here.data() + at, len);
                }
                CHECK(near.content() == here && far.content() == there);
                CHECK(next_note(other) == std::make_pair(std::string("one"), std::string("done")));
            }
        }
        CHECK(one->unloadMD(md) == NIXL_SUCCESS);
    }
    // To itself, and a message of any bytes.
    Buffer near(one, false, 1000, 90), far(one, true, 1000, 91);
    nixlBackendMD* own = nullptr;
    CHECK(one->loadLocalMD(far.md, own) == NIXL_SUCCESS);
    {
        Transfer_ transfer(one, NIXL_WRITE, near, reinterpret_cast<uintptr_t>(far.address), own, "one", {{0, 0, 1000}});
        CHECK(transfer.run("") == NIXL_SUCCESS && far.content() == near.content());
        CHECK(next_note(one) == std::make_pair(std::string("one"), std::string()));
    }
    std::string bytes("a\0b", 3);
    CHECK(one->genNotif("one", bytes) == NIXL_SUCCESS && next_note(one).second == bytes);
    notif_list_t full = {{"a", "b"}};
    CHECK(one->getNotifs(full) == NIXL_ERR_INVALID_PARAM && full.size() == 1);
    CHECK(one->unloadMD(own) == NIXL_SUCCESS);
    CHECK(one->disconnect("other") == NIXL_SUCCESS && one->disconnect("other") == NIXL_ERR_NOT_FOUND);
}

void refusals(const std::string& pool, const std::string& foreign_pool) {
    Agent one("one", pool), foreign("foreign", foreign_pool);
    Buffer near(one, false, 10'000, 1), far(foreign, false, 10'000, 2), far_pool(foreign, true, 10'000, 3);
    load(one, "foreign", far.public_data(), NIXL_ERR_NOT_FOUND);
    // An engine of this process on another pool: its heap and its pool are reached, but not from the pool of this one.
    CHECK(one->loadRemoteConnInfo("foreign", foreign.conn_info()) == NIXL_SUCCESS);
    Buffer near_pool(one, true, 10'000, 4);
    for (const Buffer* from : {&near, &near_pool}) {
        for (const Buffer* to : {&far, &far_pool}) {
            nixlBackendMD* md = load(one, "foreign", to->public_data());
            Transfer_ transfer(one, NIXL_WRITE, *from, reinterpret_cast<uintptr_t>(to->address), md, "foreign", {{0, 0, 10'000}});
            if (from == &near_pool && to == &far_pool)
                CHECK(transfer.prepared == NIXL_ERR_NOT_SUPPORTED && !transfer.handle);
            else
                CHECK(transfer.run() == NIXL_SUCCESS && to->content() == from->content());
            CHECK(one->unloadMD(md) == NIXL_SUCCESS);
        }
    }
    // As if it were of another process: its number is not known here.
    ConnInfo info;
    CHECK_OK(decode(foreign.conn_info(), info));
    info.engine ^= 1;
    CHECK(one->loadRemoteConnInfo("foreign", encode(info)) == NIXL_SUCCESS);
    for (const Buffer* buffer : {&far, &far_pool}) {
        nixlBackendMD* md = load(one, "foreign", buffer->public_data());
        Transfer_ transfer(one, NIXL_READ, near, reinterpret_cast<uintptr_t>(buffer->address), md, "foreign", {{0, 0, 100}});
        CHECK(transfer.prepared == NIXL_ERR_MISMATCH && !transfer.handle);
        CHECK(one->unloadMD(md) == NIXL_SUCCESS);
    }
    CHECK(one->genNotif("foreign", "x") == NIXL_ERR_MISMATCH);
    load(one, "foreign", "garbage", NIXL_ERR_INVALID_PARAM);
    CHECK(one->loadRemoteConnInfo("x", "garbage") == NIXL_ERR_INVALID_PARAM);

    nixlBackendMD* own = nullptr;
    CHECK(one->loadLocalMD(near.md, own) == NIXL_SUCCESS);
    auto refused = [&](const std::vector<std::array<size_t, 3>>& pieces) {
        Transfer_ transfer(one, NIXL_READ, near, reinterpret_cast<uintptr_t>(near.address), own, "one", pieces);
        return transfer.prepared;
    };
    CHECK(refused({{0, 5000, 5000}}) == NIXL_SUCCESS && refused({}) == NIXL_SUCCESS && refused({{0, 0, 0}}) == NIXL_SUCCESS);
    CHECK(refused({{5001, 0, 5000}}) == NIXL_ERR_INVALID_PARAM && refused({{0, 5001, 5000}}) == NIXL_ERR_INVALID_PARAM);
    CHECK(refused({{0, 0, SIZE_MAX}}) == NIXL_ERR_INVALID_PARAM && refused({{SIZE_MAX, 0, 1}}) == NIXL_ERR_INVALID_PARAM);
    Transfer_ empty(one, NIXL_WRITE, near, 0, own, "one", {});
    CHECK(empty.run("nothing") == NIXL_SUCCESS && next_note(one).second == "nothing");
    CHECK(one->checkXfer(nullptr) == NIXL_ERR_INVALID_PARAM && one->releaseReqH(nullptr) == NIXL_ERR_INVALID_PARAM);
    nixlBackendMD* out = nullptr;
    CHECK(one->registerMem({UINTPTR_MAX - 5, 10, 0}, DRAM_SEG, out) == NIXL_ERR_INVALID_PARAM && !out);
    CHECK(one->registerMem({0, 10, 0}, BLK_SEG, out) == NIXL_ERR_NOT_SUPPORTED && !out);
    CHECK(one->unloadMD(own) == NIXL_SUCCESS);

    for (const char* wrong : {"/dev/shm/kvbm-cxl-there-is-no-such-pool", "/dev/null", "/proc/version"})
        CHECK(Agent("x", wrong)->getInitErr());
    CHECK(Agent("x", pool, {{"inline_bytes", "many"}})->getInitErr());
}

/// Metadata that names an engine of this process and not what that has registered: its addresses are not used.
void forged(const std::string& pool) {
    Agent one("one", pool);
    Buffer heap(one, false, 4096, 1), block(one, true, 4096, 2);
    std::vector<std::byte> unregistered(4096);
    ConnInfo info;
    CHECK_OK(decode(one.conn_info(), info));
    info.agent = "evil";
    CHECK(one->loadRemoteConnInfo("evil", encode(info)) == NIXL_SUCCESS);
    for (const Buffer* buffer : {&heap, &block}) {
        PublicRegion is;
        CHECK_OK(decode(buffer->public_data(), is));
        std::vector<PublicRegion> wrong(6, is);
        wrong[0].base = reinterpret_cast<uintptr_t>(unregistered.data());
        wrong[1].len_bytes++;
        wrong[2].kind = is.kind == RegionKind::heap ? RegionKind::pool : RegionKind::heap;
        wrong[3].offset += 4096;
        wrong[4].device++;
        wrong[5].pool[0] ^= 1;
        for (const PublicRegion& forged : wrong)
            load(one, "evil", encode(forged), NIXL_ERR_INVALID_PARAM);
        nixlBackendMD* md = load(one, "evil", encode(is));
        CHECK(one->unloadMD(md) == NIXL_SUCCESS);
        // Of an engine that is not there any more, as after a restart: loaded, and refused when it is used.
        is.engine ^= 1;
        md = load(one, "evil", encode(is));
        CHECK(Transfer_(one, NIXL_WRITE, heap, is.base, md, "evil", {{0, 0, 4096}}).prepared == NIXL_ERR_MISMATCH);
        CHECK(one->unloadMD(md) == NIXL_SUCCESS);
    }
}

void lifetimes(const std::string& pool) {
    Agent one("one", pool, {{"inline_bytes", "0"}});
    auto other = std::make_unique<Agent>("other", pool);
    CHECK(one->loadRemoteConnInfo("other", other->conn_info()) == NIXL_SUCCESS);
    Buffer near(one, false, buffer_bytes, 1);
    auto far = std::make_unique<Buffer>(*other, false, buffer_bytes, 2);
    nixlBackendMD* md = load(one, "other", far->public_data());
    auto address = reinterpret_cast<uintptr_t>(far->address);
    std::mt19937 random(9);
    for (int turn = 0; turn < 100; turn++) {
        Transfer_ transfer(one, NIXL_WRITE, near, address, md, "other", {{0, 0, buffer_bytes}});
        nixl_status_t posted = transfer.post();
        CHECK(posted == NIXL_IN_PROG || posted == NIXL_SUCCESS);
        for (unsigned polls = random() % 8; polls > 0; polls--)
            one->checkXfer(transfer.handle);
        // Released at any moment.
    }
    // Given back with a transfer under way: it ends first. Posted again, it is refused.
    Transfer_ transfer(one, NIXL_READ, near, address, md, "other", {{0, 0, buffer_bytes}});
    nixl_status_t posted = transfer.post();
    CHECK(posted == NIXL_IN_PROG || posted == NIXL_SUCCESS);
    CHECK((*other)->deregisterMem(std::exchange(far->md, nullptr)) == NIXL_SUCCESS);
    CHECK(transfer.wait() == NIXL_SUCCESS && near.content() == far->content());
    CHECK(transfer.post() == NIXL_ERR_NOT_FOUND);
    // The same address once more is another registration.
    CHECK((*other)->registerMem({address, buffer_bytes, 0}, DRAM_SEG, far->md) == NIXL_SUCCESS);
    CHECK(transfer.post() == NIXL_ERR_NOT_FOUND);
    nixlBackendMD* again = load(one, "other", far->public_data());
    {
        Transfer_ anew(one, NIXL_READ, near, address, again, "other", {{0, 0, 4096}});
        CHECK(anew.run() == NIXL_SUCCESS);
    }
    // The other agent ends, and comes back under its name.
    std::string stale = far->public_data();
    far.reset();
    other.reset();
    CHECK(one->genNotif("other", "x") == NIXL_ERR_REMOTE_DISCONNECT);
    other = std::make_unique<Agent>("other", pool);
    Buffer back(*other, true, buffer_bytes, 7);
    CHECK(one->loadRemoteConnInfo("other", other->conn_info()) == NIXL_SUCCESS);
    nixlBackendMD* fresh = load(one, "other", back.public_data());
    {
        Transfer_ before(one, NIXL_READ, near, address, again, "other", {{0, 0, 4096}});
        CHECK(before.prepared == NIXL_ERR_MISMATCH);
        Transfer_ anew(one, NIXL_READ, near, reinterpret_cast<uintptr_t>(back.address), fresh, "other", {{0, 0, buffer_bytes}});
        CHECK(anew.run() == NIXL_SUCCESS && near.content() == back.content());
    }
    for (nixlBackendMD* loaded : {md, again, fresh})
        CHECK(one->unloadMD(loaded) == NIXL_SUCCESS);
}

/// Threads of this process that copy large transfers.
size_t copying_threads() {
    size_t found = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        found += name == "nixl-cxl-copy";
    }
    return found;
}

/// An engine's threads end with the engine, although the application has a transfer of it still: a thread that was the last one to have it
/// would end the engine's parts, and wait for itself.
void threads_end_with_the_engine(const std::string& pool) {
    std::shared_ptr<XferRequest> kept;
    size_t before = copying_threads();
    {
        Agent one("one", pool, {{"inline_bytes", "0"}});
        Buffer near(one, false, buffer_bytes, 1), far(one, false, buffer_bytes, 2);
        nixlBackendMD* own = nullptr;
        CHECK(one->loadLocalMD(far.md, own) == NIXL_SUCCESS);
        {
            Transfer_ transfer(one, NIXL_WRITE, near, reinterpret_cast<uintptr_t>(far.address), own, "one", {{0, 0, buffer_bytes}});
            CHECK(transfer.run() == NIXL_SUCCESS);
            testing::await("a thread that copies", [&] { return copying_threads() > before; });
            kept = static_cast<RequestHandle*>(transfer.handle)->request;
        }
        CHECK(far.content() == near.content() && one->unloadMD(own) == NIXL_SUCCESS);
    }
    // They have ended; that they are gone from the list may take a moment more.
    testing::await("the end of the threads that copy", [&] { return copying_threads() == before; });
}

void threads(const std::string& pool) {
    Agent one("one", pool), other("other", pool, {{"inline_bytes", "0"}});
    CHECK(one->loadRemoteConnInfo("other", other.conn_info()) == NIXL_SUCCESS);
    CHECK(other->loadRemoteConnInfo("one", one.conn_info()) == NIXL_SUCCESS);
    constexpr size_t each = 512 << 10, count = 4;
    Buffer near(one, false, each * count, 1), far(other, true, each * count, 2);
    nixlBackendMD *there = load(one, "other", far.public_data()), *here = load(other, "one", near.public_data());
    std::vector<std::thread> running;
    for (size_t i = 0; i < count; i++) {
        running.emplace_back([&, i] {
            for (int turn = 0; turn < 20; turn++) {
                Transfer_ write(one, NIXL_WRITE, near, reinterpret_cast<uintptr_t>(far.address), there, "other",
                                {{i * each, i * each, each}});
                CHECK(write.run("w") == NIXL_SUCCESS);
                Transfer_ read(other, NIXL_WRITE, far, reinterpret_cast<uintptr_t>(near.address), here, "one",
                               {{i * each, i * each, each}});
                CHECK(read.run("r") == NIXL_SUCCESS);
            }
        });
    }
    size_t notes = 0;
    testing::await("all notifications", [&] {
        notif_list_t some;
        CHECK(one->getNotifs(some) == NIXL_SUCCESS);
        notes += some.size();
        some.clear();
        CHECK(other->getNotifs(some) == NIXL_SUCCESS);
        notes += some.size();
        return notes == count * 20 * 2;
    });
    for (std::thread& thread : running)
        thread.join();
    CHECK(near.content() == far.content() && near.content() == testing::unique_bytes(each * count, 1));
    CHECK(one->unloadMD(there) == NIXL_SUCCESS && other->unloadMD(here) == NIXL_SUCCESS);
}

// ---- Two processes -----------------------------------------------------------------------------------------------------------------

/// Answers "salt  N" by filling both buffers, "checkX N" by whether buffer X is as that salt fills it, "drop" by giving the block back,
/// until "end".
void serve(const std::string& pool, const std::string& folder) {
    Agent agent("server", pool);
    CHECK(!agent->getInitErr());
    Buffer heap(agent, false, buffer_bytes, 1), block(agent, true, buffer_bytes, 2);
    CHECK(agent->loadRemoteConnInfo("client", hear(folder + "/client")) == NIXL_SUCCESS);
    tell(folder + "/heap", heap.public_data());
    tell(folder + "/block", block.public_data());
    tell(folder + "/heap.at", number(reinterpret_cast<uintptr_t>(heap.address)));
    tell(folder + "/block.at", number(reinterpret_cast<uintptr_t>(block.address)));
    tell(folder + "/server", agent.conn_info());
    while (true) {
        auto [from, words] = next_note(agent);
        CHECK(from == "client");
        if (words == "end")
            return;
        if (words == "drop") {
            CHECK(agent->deregisterMem(std::exchange(block.md, nullptr)) == NIXL_SUCCESS);
            CHECK(agent->genNotif("client", "dropped") == NIXL_SUCCESS);
            continue;
        }
        auto salt = static_cast<uint32_t>(std::stoul(words.substr(6)));
        if (words.starts_with("salt  ")) {
            heap.fill(salt);
            block.fill(salt);
            CHECK(agent->genNotif("client", "filled") == NIXL_SUCCESS);
        } else {
            Buffer& asked = words[5] == 'h' ? heap : block;
            bool is_right = asked.content() == testing::unique_bytes(buffer_bytes, salt);
            CHECK(agent->genNotif("client", is_right ? "right" : "wrong") == NIXL_SUCCESS);
        }
    }
}

void between_processes(const testing::Folder& folder, const std::string& pool, const char* machine) {
    std::string place = folder.path("talk-" + std::to_string(random_id()));
    std::filesystem::create_directory(place);
    Agent client("client", pool);
    tell(place + "/client", client.conn_info());
    testing::Child child(folder, machine, {"serve", pool, place});
    CHECK(client->loadRemoteConnInfo("server", hear(place + "/server")) == NIXL_SUCCESS);
    uint32_t salt = 100;
    for (bool is_far_pool : {false, true}) {
        std::string name = is_far_pool ? "block" : "heap";
        nixlBackendMD* md = load(client, "server", hear(place + "/" + name));
        uintptr_t at = std::stoull(hear(place + "/" + name + ".at"));
        for (bool is_near_pool : {false, true}) {
            Buffer near(client, is_near_pool, buffer_bytes, salt++);
            std::vector<std::array<size_t, 3>> pieces;
            for (size_t i = 0; i < 512; i++) // 512 pieces, every second one first, and so none joined
                pieces.push_back({i * 2 % 512 * 6144 + (i >= 256) * 6144, i * 2 % 512 * 6144 + (i >= 256) * 6144, 6144});
            Transfer_ read(client, NIXL_READ, near, at, md, "server", pieces), write(client, NIXL_WRITE, near, at, md, "server", pieces);
            CHECK(read.prepared == NIXL_SUCCESS && write.prepared == NIXL_SUCCESS);
            for (int turn = 0; turn < 3; turn++) {
                CHECK(client->genNotif("server", "salt  " + std::to_string(++salt)) == NIXL_SUCCESS);
                CHECK(next_note(client).second == "filled");
                CHECK(read.run() == NIXL_SUCCESS && near.content() == testing::unique_bytes(buffer_bytes, salt));
                near.fill(++salt);
                CHECK(write.run(("check" + name.substr(0, 1) + std::to_string(salt)).c_str()) == NIXL_SUCCESS);
                CHECK(next_note(client).second == "right");
            }
        }
        if (is_far_pool) {
            // The owner gives it back: what is under way ends first, and nothing begins any more although no byte goes through the owner.
            Buffer near(client, false, buffer_bytes, salt++);
            Transfer_ read(client, NIXL_READ, near, at, md, "server", {{0, 0, buffer_bytes}});
            CHECK(read.run() == NIXL_SUCCESS);
            CHECK(client->genNotif("server", "drop") == NIXL_SUCCESS);
            nixl_status_t last = NIXL_SUCCESS;
            testing::await("the revocation", [&] { return (last = read.run()) != NIXL_SUCCESS; });
            CHECK(last == NIXL_ERR_NOT_FOUND && next_note(client).second == "dropped");
        }
        CHECK(client->unloadMD(md) == NIXL_SUCCESS);
    }
    CHECK(client->genNotif("server", "end") == NIXL_SUCCESS);
    child.succeed();
    // It is gone: that is noticed, and said.
    testing::await("the end of the peer", [&] { return client->genNotif("server", "x") == NIXL_ERR_REMOTE_DISCONNECT; });
}

} // namespace

int main(int argc, char** argv) {
    static_assert(512 * 6144 == buffer_bytes);
    if (argc == 4 && std::string(argv[1]) == "serve") {
        serve(argv[2], argv[3]);
        return 0;
    }
    testing::Folder folder;
    std::string pool = testing::new_pool(folder, "pool", "native").pool;
    within_a_process(pool);
    refusals(pool, testing::new_pool(folder, "foreign", "native").pool);
    forged(pool);
    lifetimes(pool);
    threads_end_with_the_engine(pool);
    threads(pool);
    between_processes(folder, pool, "one");
    between_processes(folder, pool, "two");
    std::string emulated = testing::new_pool(folder, "emulated", "emulated:seed=3").pool;
    between_processes(folder, emulated, "two");
}
