// SPDX-License-Identifier: Apache-2.0
//
// An agent that was killed and is back under its name: nothing that was meant for the engine before reaches the one of now.
//   restarts_test                         all of it
//   restarts_test serve POOL FOLDER TURN  as the agent in one of its lives
#include "support/agents.h"

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t buffer_bytes = 1 << 20;

/// Registers ordinary memory and a block of the pool, tells of them, and repeats each notification; ends by itself after "end".
void serve(const std::string& pool, const std::string& folder, const std::string& turn) {
    Agent agent("server", pool);
    auto salt = static_cast<uint32_t>(std::stoul(turn));
    Buffer heap(agent, false, buffer_bytes, salt), block(agent, true, buffer_bytes, salt);
    CHECK(agent->loadRemoteConnInfo("client", hear(folder + "/client")) == NIXL_SUCCESS);
    tell(folder + "/heap" + turn, heap.public_data());
    tell(folder + "/block" + turn, block.public_data());
    tell(folder + "/block-at" + turn, number(reinterpret_cast<uintptr_t>(block.address)));
    tell(folder + "/server" + turn, agent.conn_info());
    for (std::string words; words != "end";) {
        words = next_note(agent).second;
        CHECK(agent->genNotif("client", "got " + words) == NIXL_SUCCESS);
    }
    // The last one has to arrive.
    hear(folder + "/end" + turn);
}

/// The client, and the lives of the server.
struct Lives {
    const testing::Folder& place;
    std::string pool, folder;
    Agent client;
    std::unique_ptr<testing::Child> child;

    Lives(const testing::Folder& in, std::string of) : place(in), pool(std::move(of)), folder(place.path("talk")), client("client", pool) {
        folder += std::to_string(random_id());
        std::filesystem::create_directory(folder);
        tell(folder + "/client", client.conn_info());
    }
    std::string told(const std::string& what, int turn) const { return hear(folder + "/" + what + std::to_string(turn)); }
    void begin(int turn) {
        child = std::make_unique<testing::Child>(place, "one", std::vector<std::string>{"serve", pool, folder, std::to_string(turn)});
    }
    void kill() { child.reset(); }
    void end(int turn) {
        CHECK(client->genNotif("server", "end") == NIXL_SUCCESS);
        CHECK(next_note(client).second == "got end");
        tell(folder + "/end" + std::to_string(turn), "");
        child->succeed();
    }
};

/// A handle that was prepared for the first life is posted in the second one, with a notification.
void an_old_handle(const testing::Folder& folder, const std::string& pool) {
    Lives lives(folder, pool);
    Agent& client = lives.client;
    Buffer near(client, false, buffer_bytes, 77);
    lives.begin(1);
    CHECK(client->loadRemoteConnInfo("server", lives.told("server", 1)) == NIXL_SUCCESS);
    nixlBackendMD* md = load(client, "server", lives.told("block", 1));
    {
        Transfer_ write(client, NIXL_WRITE, near, std::stoull(lives.told("block-at", 1)), md, "server", {{0, 0, buffer_bytes}});
        CHECK(write.run("first") == NIXL_SUCCESS && next_note(client).second == "got first");
        lives.kill();
        lives.begin(2);
        // As the agent does when its metadata is dropped and loaded anew.
        CHECK(client->disconnect("server") == NIXL_SUCCESS);
        CHECK(client->loadRemoteConnInfo("server", lives.told("server", 2)) == NIXL_SUCCESS);
        CHECK(write.run("block 7 is there") == NIXL_ERR_REMOTE_DISCONNECT);
        // What is meant for the second life arrives, and nothing before it.
        CHECK(client->genNotif("server", "second") == NIXL_SUCCESS && next_note(client).second == "got second");
        lives.end(2);
    }
    CHECK(client->unloadMD(md) == NIXL_SUCCESS);
}

/// Metadata of the first life's memory, loaded with the connection information of the second one: its numbers and addresses may be those of
/// other memory now.
void stale_metadata(const testing::Folder& folder, const std::string& pool) {
    Lives lives(folder, pool);
    Agent& client = lives.client;
    Buffer near(client, false, buffer_bytes, 77);
    lives.begin(1);
    std::map<std::string, std::string> stale;
    for (const char* memory : {"heap", "block"})
        stale[memory] = lives.told(memory, 1);
    lives.kill();
    lives.begin(2);
    CHECK(client->loadRemoteConnInfo("server", lives.told("server", 2)) == NIXL_SUCCESS);
    for (const char* memory : {"heap", "block"}) {
        PublicRegion before, now;
        CHECK_OK(decode(stale[memory], before));
        CHECK_OK(decode(lives.told(memory, 2), now));
        CHECK(before.registration == now.registration && before.engine != now.engine);
        // As if it had come to lie at the same place.
        before.base = now.base;
        before.offset = now.offset;
        PublicRegion of_another_pool = now;
        of_another_pool.pool[0] ^= 1;
        for (const PublicRegion& wrong : {before, of_another_pool}) {
            // Loaded, so that one such does not keep the rest of the metadata out.
            nixlBackendMD* md = load(client, "server", encode(wrong));
            for (nixl_xfer_op_t operation : {NIXL_READ, NIXL_WRITE}) {
                Transfer_ transfer(client, operation, near, now.base, md, "server", {{0, 0, buffer_bytes}});
                CHECK(transfer.prepared == NIXL_ERR_MISMATCH);
            }
            CHECK(client->unloadMD(md) == NIXL_SUCCESS);
        }
        nixlBackendMD* md = load(client, "server", encode(now));
        {
            Transfer_ read(client, NIXL_READ, near, now.base, md, "server", {{0, 0, buffer_bytes}});
            CHECK(read.run() == NIXL_SUCCESS && near.content() == testing::unique_bytes(buffer_bytes, 2));
        }
        CHECK(client->unloadMD(md) == NIXL_SUCCESS);
    }
    lives.end(2);
}

/// A part that ends when the test says so, like a large copy.
struct Held : Part {
    std::shared_ptr<Completion>& whom;
    explicit Held(std::shared_ptr<Completion>& kept) : whom(kept) {}
    nixl_status_t post(const std::shared_ptr<Completion>& told) noexcept override {
        whom = told;
        return NIXL_IN_PROG;
    }
    void cancel() noexcept override {}
};

/// A copy was begun for the first life, and ends in the second one.
void a_copy_across(const Options& options) {
    auto make = [&](const char* agent, uint64_t id, std::shared_ptr<Core>& core) {
        core = new_core(options);
        core->agent = agent;
        core->id = id;
        core->has_thread = true;
        std::shared_ptr<Peering> peering;
        CHECK_OK(Peering::create(core, nullptr, peering));
        return peering;
    };
    std::shared_ptr<Core> cores[3];
    auto client = make("client", 10, cores[0]), before = make("server", 11, cores[1]), now = make("server", 12, cores[2]);
    auto peer_of = [&](uint64_t id) {
        auto peer = std::make_shared<Peer>();
        peer->agent = "server";
        peer->info.engine = id;
        peer->is_same_pool = true;
        CHECK_OK(client->add(*peer));
        return peer;
    };
    auto first = peer_of(11);
    std::shared_ptr<Completion> whom;
    auto request = std::make_shared<XferRequest>(cores[0], first, client, NIXL_WRITE);
    request->add(std::make_unique<Held>(whom));
    nixl_opt_b_args_t how;
    how.hasNotif = true;
    how.notifMsg = "block 7 is there";
    CHECK(request->post(&how) == NIXL_IN_PROG && request->check() == NIXL_IN_PROG);
    before->shut_down();
    auto second = peer_of(12);
    std::exchange(whom, nullptr)->done(NIXL_SUCCESS);
    CHECK(request->check() == NIXL_ERR_REMOTE_DISCONNECT);
    CHECK_OK(client->deliver(*second, "second", {}));
    notif_list_t notes;
    testing::await("the notification of now", [&] {
        now->take(notes);
        return !notes.empty();
    });
    CHECK(notes.size() == 1 && notes[0].second == "second");
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 5) {
        serve(argv[2], argv[3], argv[4]);
        return 0;
    }
    testing::Folder folder;
    Options options = testing::new_pool(folder, "pool", "native");
    an_old_handle(folder, options.pool);
    a_copy_across(options);
    stale_metadata(folder, options.pool);
}
