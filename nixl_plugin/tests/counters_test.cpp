// SPDX-License-Identifier: Apache-2.0
//
// What engines count, and what of it the pool tells all hosts.
//   counters_test                     all of it
//   counters_test serve POOL FOLDER   as the other process: registers memory, tells its metadata by files, and stays
#include "support/agents.h"

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t buffer_bytes = 2 << 20;

using Expected = std::map<cxl_shm_counter, uint64_t>;

/// A value that is different for every counter.
uint64_t value_of(size_t index) {
    return 7919 * (index + 1);
}

void many_threads() {
    Counters counters;
    std::vector<std::thread> threads;
    constexpr size_t count = 19, times = 5000; // more threads than shares
    for (size_t i = 0; i < count; i++) {
        threads.emplace_back([&counters] {
            for (size_t turn = 0; turn < times; turn++)
                counters.add(Counters::at(turn % Counters::count), 1 + turn % Counters::count);
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    Counters::Values values = counters.all();
    for (size_t index = 0; index < Counters::count; index++) {
        uint64_t turns = (times - index + Counters::count - 1) / Counters::count;
        CHECK(values[index] == count * turns * (index + 1) && counters.get(Counters::at(index)) == values[index]);
    }
}

/// What a host has published of a counter; nothing before it has published any.
uint64_t published(const Pool& pool, uint32_t slot, cxl_shm_counter counter) {
    uint64_t value = 0;
    int status = cxl_shm_host_count(pool.handle(), slot, counter, &value);
    CHECK(status == CXL_SHM_OK || status == CXL_SHM_E_NOT_FOUND);
    return value;
}

void await_published(const Pool& pool, uint32_t slot, const Expected& expected) {
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(world::PATIENCE_S);
    while (true) {
        std::string wrong;
        for (auto [counter, value] : expected) {
            if (uint64_t found = published(pool, slot, counter); found != value)
                wrong += text(" counter ", static_cast<int>(counter), " is ", found, ", not ", value, ";");
        }
        if (wrong.empty())
            return;
        if (std::chrono::steady_clock::now() > deadline) {
            std::fprintf(stderr, "slot %u:%s\n", slot, wrong.c_str());
            std::_Exit(1);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

Expected as_expected(const Counters::Values& values) {
    Expected expected;
    for (size_t index = 0; index < Counters::count; index++)
        expected[Counters::at(index)] = values[index];
    return expected;
}

void reports(const Options& options) {
    auto core = new_core(options);
    cxl_pool_t* pool = core->pool->handle();
    uint32_t slot = core->pool->info().slot;
    CountReport report, other;
    Counters::Values values{}, held{};
    for (size_t index = 0; index < Counters::count; index++)
        values[index] = value_of(index);
    report.tell(pool, values);
    report.tell(pool, values); // says nothing more
    await_published(*core->pool, slot, as_expected(values));
    // Two engines of a process add up, and take back what they hold.
    held[Counters::place(CXL_SHM_COUNT_NIXL_LINKS)] = 5;
    other.tell(pool, held);
    values[Counters::place(CXL_SHM_COUNT_NIXL_READS)] += 3;
    values[Counters::place(CXL_SHM_COUNT_NIXL_LINKS)] = 1;
    report.tell(pool, values);
    Counters::Values both = values;
    both[Counters::place(CXL_SHM_COUNT_NIXL_LINKS)] += 5;
    await_published(*core->pool, slot, as_expected(both));
    other.tell(pool, Counters::Values{});
    await_published(*core->pool, slot, as_expected(values));
    // What cannot be told is not lost.
    CHECK(cxl_shm_leave(pool) == CXL_SHM_OK);
    values[Counters::place(CXL_SHM_COUNT_NIXL_WRITES)] += 11;
    report.tell(pool, values);
    CHECK(cxl_shm_join(pool) == CXL_SHM_OK);
    report.tell(pool, values);
    await_published(*core->pool, slot, {{CXL_SHM_COUNT_NIXL_WRITES, values[Counters::place(CXL_SHM_COUNT_NIXL_WRITES)]}});
}

/// Buffers that others transfer to and from, until it is killed; gives the block back when it is told to.
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
    CHECK(next_note(agent).second == "drop");
    CHECK(agent->deregisterMem(std::exchange(heap.md, nullptr)) == NIXL_SUCCESS);
    CHECK(agent->genNotif("client", "dropped") == NIXL_SUCCESS);
    while (true)
        next_note(agent);
}

void engines(const Folder& folder, const Options& options) {
    std::string place = folder.path("talk");
    std::filesystem::create_directory(place);
    auto client = std::make_unique<Agent>("client", options.pool);
    std::shared_ptr<Pool> pool;
    CHECK_OK(Pool::open(options, pool));
    uint32_t slot = pool->info().slot;
    tell(place + "/client", client->conn_info());
    auto child = std::make_unique<Child>(folder, "two", std::vector<std::string>{"serve", options.pool, place});
    std::string conn_info = hear(place + "/server");
    ConnInfo server;
    CHECK_OK(decode(conn_info, server));
    CHECK((*client)->loadRemoteConnInfo("server", conn_info) == NIXL_SUCCESS);
    nixlBackendMD *heap = load(*client, "server", hear(place + "/heap")), *block = load(*client, "server", hear(place + "/block"));
    uintptr_t heap_at = std::stoull(hear(place + "/heap.at")), block_at = std::stoull(hear(place + "/block.at"));
    {
        Buffer near(*client, false, buffer_bytes, 10), own(*client, false, buffer_bytes, 11);
        nixlBackendMD* own_md = nullptr;
        CHECK((*client)->loadLocalMD(own.md, own_md) == NIXL_SUCCESS);
        auto run = [&](nixl_xfer_op_t operation, uintptr_t at, nixlBackendMD* md, const char* peer, size_t len_bytes, const char* note) {
            Transfer_ transfer(*client, operation, near, at, md, peer, {{0, 0, len_bytes}});
            CHECK(transfer.prepared == NIXL_SUCCESS);
            return transfer.run(note);
        };
        CHECK(run(NIXL_READ, heap_at, heap, "server", 1'500'000, nullptr) == NIXL_SUCCESS);
        // The pool hears of counts twice a second, and gets staging memory back that was not used for two seconds: once may be too seldom.
        uint64_t staged_writes = 0;
        await("staging memory", [&] {
            staged_writes++;
            CHECK(run(NIXL_WRITE, heap_at, heap, "server", 300'001, nullptr) == NIXL_SUCCESS);
            return published(*pool, slot, CXL_SHM_COUNT_NIXL_STAGING_BYTES) > 0;
        });
        CHECK(run(NIXL_WRITE, block_at, block, "server", 4096, nullptr) == NIXL_SUCCESS);
        CHECK(run(NIXL_WRITE, block_at, block, "server", 1 << 20, nullptr) == NIXL_SUCCESS);
        CHECK(run(NIXL_READ, block_at, block, "server", 8192, nullptr) == NIXL_SUCCESS);
        CHECK(run(NIXL_READ, reinterpret_cast<uintptr_t>(own.address), own_md, "client", 70'000, "to itself") == NIXL_SUCCESS);
        CHECK(next_note(*client).second == "to itself");
        // Memory that its owner has given back: a transfer that was prepared before fails, and the owner has refused it.
        Transfer_ late(*client, NIXL_READ, near, heap_at, heap, "server", {{0, 0, 5000}});
        CHECK((*client)->genNotif("server", "drop") == NIXL_SUCCESS && next_note(*client).second == "dropped");
        CHECK(late.run() == NIXL_ERR_NOT_FOUND);
        Expected here = {{CXL_SHM_COUNT_NIXL_POSTED, 6 + staged_writes},
                         {CXL_SHM_COUNT_NIXL_READS, 3},
                         {CXL_SHM_COUNT_NIXL_WRITES, 2 + staged_writes},
                         {CXL_SHM_COUNT_NIXL_FAILED, 1},
                         {CXL_SHM_COUNT_NIXL_CANCELLED, 0},
                         {CXL_SHM_COUNT_NIXL_DISCONNECTED, 0},
                         {CXL_SHM_COUNT_NIXL_STAGED_READ_BYTES, 1'500'000},
                         {CXL_SHM_COUNT_NIXL_STAGED_WRITTEN_BYTES, staged_writes * 300'001},
                         {CXL_SHM_COUNT_NIXL_POOL_WRITTEN_BYTES, 4096 + (1 << 20)},
                         {CXL_SHM_COUNT_NIXL_POOL_READ_BYTES, 8192},
                         {CXL_SHM_COUNT_NIXL_LOCAL_BYTES, 70'000},
                         {CXL_SHM_COUNT_NIXL_SERVED_READ_BYTES, 0},
                         {CXL_SHM_COUNT_NIXL_NOTIFS_SENT, 2},
                         {CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED, 2},
                         {CXL_SHM_COUNT_NIXL_LINKS_LOST, 0},
                         {CXL_SHM_COUNT_NIXL_PEERS_GONE, 0},
                         {CXL_SHM_COUNT_NIXL_REFUSED, 0},
                         {CXL_SHM_COUNT_NIXL_STAGING_USED_BYTES, 0},
                         {CXL_SHM_COUNT_NIXL_ENGINES, 1}};
        await_published(*pool, slot, here);
        Expected there = {{CXL_SHM_COUNT_NIXL_POSTED, 0},
                          {CXL_SHM_COUNT_NIXL_SERVED_READ_BYTES, 1'500'000},
                          {CXL_SHM_COUNT_NIXL_SERVED_WRITTEN_BYTES, staged_writes * 300'001},
                          {CXL_SHM_COUNT_NIXL_STAGED_READ_BYTES, 0},
                          {CXL_SHM_COUNT_NIXL_NOTIFS_SENT, 1},
                          {CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED, 1},
                          {CXL_SHM_COUNT_NIXL_REFUSED, 1},
                          {CXL_SHM_COUNT_NIXL_ENGINES, 1}};
        await_published(*pool, server.slot, there);
        // Two counts, which are published one after the other.
        uint64_t links = 0;
        await("links", [&] {
            links = published(*pool, slot, CXL_SHM_COUNT_NIXL_LINKS);
            return links >= 1 && published(*pool, slot, CXL_SHM_COUNT_NIXL_LINKS_MADE) == links;
        });

        // It is killed: what it counted stays as it was last published, and the survivor has lost its links and a peer.
        child.reset();
        await("the end of the peer", [&] { return (*client)->genNotif("server", "x") == NIXL_ERR_REMOTE_DISCONNECT; });
        CHECK(late.run() == NIXL_ERR_REMOTE_DISCONNECT);
        here[CXL_SHM_COUNT_NIXL_POSTED]++;
        here[CXL_SHM_COUNT_NIXL_FAILED] = 2;
        here[CXL_SHM_COUNT_NIXL_DISCONNECTED] = 1;
        here[CXL_SHM_COUNT_NIXL_LINKS_LOST] = here[CXL_SHM_COUNT_NIXL_LINKS_MADE] = links;
        here[CXL_SHM_COUNT_NIXL_LINKS] = 0;
        here[CXL_SHM_COUNT_NIXL_PEERS_GONE] = 1;
        here.erase(CXL_SHM_COUNT_NIXL_NOTIFS_SENT); // those to the peer that were on their way when it ended count as sent
        await_published(*pool, slot, here);
        await_published(*pool, server.slot, there);
        CHECK((*client)->unloadMD(own_md) == NIXL_SUCCESS);
    }
    CHECK((*client)->unloadMD(heap) == NIXL_SUCCESS && (*client)->unloadMD(block) == NIXL_SUCCESS);
    uint64_t posted = published(*pool, slot, CXL_SHM_COUNT_NIXL_POSTED);
    client.reset();
    // The engine has ended: it holds nothing, and what it counted stays.
    await_published(*pool, slot,
                    {{CXL_SHM_COUNT_NIXL_ENGINES, 0}, {CXL_SHM_COUNT_NIXL_STAGING_BYTES, 0}, {CXL_SHM_COUNT_NIXL_POSTED, posted}});
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4 && std::string(argv[1]) == "serve") {
        serve(argv[2], argv[3]);
        return 0;
    }
    many_threads();
    Folder folder;
    reports(new_pool(folder, "reports", "native"));
    engines(folder, new_pool(folder, "engines", "native"));
}
