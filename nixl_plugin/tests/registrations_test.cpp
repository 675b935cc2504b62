// SPDX-License-Identifier: Apache-2.0
//
// Registrations as NIXL's agent uses and misuses them, between two engines of one process: handles that are given back twice, memory that
// is registered again, and an engine that ends before the other one's transfer.
#include "support/agents.h"

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t length = 64 << 10;

void given_back_twice(const std::string& pool) {
    Agent agent("one", pool);
    for (bool is_pool : {false, true}) {
        Buffer buffer(agent, is_pool, length, 1);
        nixlBackendMD *second = nullptr, *far = nullptr;
        CHECK(agent->registerMem({reinterpret_cast<uintptr_t>(buffer.address), length, 0}, DRAM_SEG, second) == NIXL_SUCCESS);
        CHECK(second != buffer.md && agent->loadLocalMD(second, far) == NIXL_SUCCESS);
        nixlBackendMD* first = std::exchange(buffer.md, nullptr);
        CHECK(agent->deregisterMem(far) == NIXL_ERR_INVALID_PARAM && agent->unloadMD(first) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent->deregisterMem(first) == NIXL_SUCCESS);
        CHECK(agent->deregisterMem(first) == NIXL_ERR_INVALID_PARAM);
        CHECK(agent->unloadMD(far) == NIXL_SUCCESS);
        CHECK(agent->unloadMD(far) == NIXL_ERR_INVALID_PARAM);
        // The other registration of the same memory stays.
        std::string data;
        CHECK(agent->getPublicData(second, data) == NIXL_SUCCESS && !data.empty());
        CHECK(agent->deregisterMem(second) == NIXL_SUCCESS);
        CHECK(agent->deregisterMem(nullptr) == NIXL_ERR_INVALID_PARAM && agent->unloadMD(nullptr) == NIXL_ERR_INVALID_PARAM);
    }
}

void registered_again(const std::string& pool) {
    Agent near("near", pool), far("far", pool);
    CHECK(near->loadRemoteConnInfo("far", far.conn_info()) == NIXL_SUCCESS);
    for (bool is_pool : {false, true}) {
        Buffer mine(near, false, length, 1), theirs(far, is_pool, length, 2);
        std::string data = theirs.public_data();
        nixlBackendMD* md = load(near, "far", data);
        auto at = reinterpret_cast<uintptr_t>(theirs.address);
        {
            Transfer_ before(near, NIXL_READ, mine, at, md, "far", {{0, 0, length}});
            CHECK(before.run() == NIXL_SUCCESS && mine.content() == theirs.content());
            CHECK(far->deregisterMem(theirs.md) == NIXL_SUCCESS);
            CHECK(before.run() == NIXL_ERR_NOT_FOUND);
        }
        theirs.fill(3);
        CHECK(far->registerMem({at, length, 0}, DRAM_SEG, theirs.md) == NIXL_SUCCESS);
        // NIXL compares them, and takes the old ones for the new ones.
        CHECK(theirs.public_data() == data);
        Transfer_ after(near, NIXL_READ, mine, at, md, "far", {{0, 0, length / 2}, {length / 2, length / 2, length / 2}});
        CHECK(after.prepared == NIXL_SUCCESS && after.run() == NIXL_SUCCESS && mine.content() == theirs.content());
        CHECK(near->unloadMD(md) == NIXL_SUCCESS);
    }
}

/// An engine that has ended is disconnected, whatever keeps its name or its registrations.
void ended(const std::string& pool) {
    Agent near("near", pool);
    Buffer mine(near, false, length, 1);
    for (bool is_pool : {false, true}) {
        auto far = std::make_unique<Agent>("far", pool);
        std::string info = far->conn_info();
        CHECK(near->loadRemoteConnInfo("far", info) == NIXL_SUCCESS);
        auto theirs = std::make_unique<Buffer>(*far, is_pool, length, 2);
        nixlBackendMD* md = load(near, "far", theirs->public_data());
        auto at = reinterpret_cast<uintptr_t>(theirs->address);
        Transfer_ before(near, NIXL_READ, mine, at, md, "far", {{0, 0, length}});
        CHECK(before.run("note") == NIXL_SUCCESS && next_note(*far).second == "note");
        theirs.reset();
        CHECK(before.run() == NIXL_ERR_NOT_FOUND);
        far.reset();
        CHECK(before.run("note") == NIXL_ERR_REMOTE_DISCONNECT && before.run() == NIXL_ERR_REMOTE_DISCONNECT);
        CHECK(near->genNotif("far", "note") == NIXL_ERR_REMOTE_DISCONNECT);
        {
            Transfer_ after(near, NIXL_WRITE, mine, at, md, "far", {{0, 0, length}});
            CHECK(after.prepared == NIXL_SUCCESS && after.run() == NIXL_ERR_REMOTE_DISCONNECT);
        }
        CHECK(near->unloadMD(md) == NIXL_SUCCESS && near->disconnect("far") == NIXL_SUCCESS);
    }
}

} // namespace

int main() {
    testing::Folder folder;
    std::string pool = testing::new_pool(folder, "pool", "native").pool;
    given_back_twice(pool);
    registered_again(pool);
    ended(pool);
}
