// SPDX-License-Identifier: Apache-2.0
//
// Memory in the pool that other processes copy to and from by themselves is given back, or its engine ends: while they copy, are stopped,
// are killed, and have never been linked.
#include "support/agents.h"
#include <optional>
#include <sys/ptrace.h>

using namespace kvbm_cxl;
using namespace testing;

namespace {

constexpr size_t big = 24 << 20, small = 4096;
/// Times that a long transfer reads all of it.
constexpr size_t turns = 200;
constexpr uint32_t salt_before = 5, salt_after = 99;

/// What the two processes tell each other by.
struct Talk {
    std::string folder;
    explicit Talk(std::string of) : folder(std::move(of)) {}
    static Talk make(const testing::Folder& in) {
        Talk talk(in.path("talk-" + std::to_string(random_id())));
        std::filesystem::create_directory(talk.folder);
        return talk;
    }
    void say(const std::string& what, const std::string& bytes = "x") const { tell(folder + "/" + what, bytes); }
    std::string hear(const std::string& what) const { return testing::hear(folder + "/" + what); }
    bool heard(const std::string& what) const { return std::filesystem::exists(folder + "/" + what); }
    /// Memory, as a peer has to know it.
    void offer(const std::string& name, const Buffer& buffer) const {
        say(name, buffer.public_data());
        say(name + ".at", number(reinterpret_cast<uintptr_t>(buffer.address)));
    }
};

/// Memory of the peer "owner".
struct Far {
    Agent& agent;
    nixlBackendMD* md;
    uintptr_t at;
    Far(Agent& of, const Talk& talk, const std::string& name)
        : agent(of), md(load(of, "owner", talk.hear(name))), at(std::stoull(talk.hear(name + ".at"))) {}
    ~Far() { CHECK(agent->unloadMD(md) == NIXL_SUCCESS); }
    Far(const Far&) = delete;
};

/// Reads the owner's memory over and over in long transfers, from "posted" on, until one of them fails: what those got that did not is
/// right.
void read_on(const std::string& pool, const Talk& talk) {
    Agent agent("reader", pool, {{"inline_bytes", "0"}, {"worker_threads", "1"}});
    CHECK(agent->loadRemoteConnInfo("owner", talk.hear("owner")) == NIXL_SUCCESS);
    Far far(agent, talk, "big");
    Buffer near(agent, false, big, 1);
    {
        Transfer_ whole(agent, NIXL_READ, near, far.at, far.md, "owner", {{0, 0, big}});
        CHECK(whole.run() == NIXL_SUCCESS && near.content() == unique_bytes(big, salt_before));
    }
    talk.say("pid", number(static_cast<uintptr_t>(getpid())));
    talk.hear("go");
    Transfer_ again(agent, NIXL_READ, near, far.at, far.md, "owner", std::vector<std::array<size_t, 3>>(turns, {0, 0, big}));
    nixl_status_t status = NIXL_SUCCESS;
    bool has_posted = false;
    while (status == NIXL_SUCCESS) {
        near.fill(1);
        status = again.post();
        if (!has_posted)
            talk.say("posted");
        has_posted = true;
        if (status == NIXL_IN_PROG)
            status = again.wait();
        if (status == NIXL_SUCCESS && near.content() != unique_bytes(big, salt_before)) {
            std::fprintf(stderr, "a transfer that succeeded has wrong bytes\n");
            std::_Exit(1);
        }
    }
    CHECK(status == NIXL_ERR_BACKEND || status == NIXL_ERR_NOT_FOUND);
    talk.say("ended", std::to_string(status));
}

/// Reads a little of the owner's memory over and over, as fast as it can, until it fails: what was got until then is right.
void read_little_on(const std::string& pool, const Talk& talk) {
    Agent agent("reader", pool);
    CHECK(agent->loadRemoteConnInfo("owner", talk.hear("owner")) == NIXL_SUCCESS);
    Far far(agent, talk, "small");
    Buffer near(agent, false, small, 1);
    Transfer_ read(agent, NIXL_READ, near, far.at, far.md, "owner", {{0, 0, small}});
    const std::vector<std::byte> right = unique_bytes(small, salt_before);
    CHECK(read.run() == NIXL_SUCCESS);
    talk.say("reads", number(static_cast<uintptr_t>(getpid())));
    nixl_status_t status = NIXL_SUCCESS;
    while ((status = read.run()) == NIXL_SUCCESS) {
        if (near.content() != right) {
            std::fprintf(stderr, "a small transfer that succeeded has wrong bytes\n");
            std::_Exit(1);
        }
    }
    CHECK(status == NIXL_ERR_REMOTE_DISCONNECT || status == NIXL_ERR_NOT_FOUND || status == NIXL_ERR_BACKEND);
    talk.say("ended", std::to_string(status));
}

/// Has read something of the owner, and does nothing more.
void rest(const std::string& pool, const Talk& talk) {
    Agent agent("rester", pool);
    CHECK(agent->loadRemoteConnInfo("owner", talk.hear("owner")) == NIXL_SUCCESS);
    Far far(agent, talk, "small");
    Buffer near(agent, false, small, 1);
    Transfer_ read(agent, NIXL_READ, near, far.at, far.md, "owner", {{0, 0, small}});
    CHECK(read.run() == NIXL_SUCCESS && near.content() == unique_bytes(small, salt_before));
    talk.say("rests", number(static_cast<uintptr_t>(getpid())));
    talk.hear("never");
}

nixl_status_t deregister(Agent& agent, Buffer& buffer) {
    nixl_status_t status = agent->deregisterMem(buffer.md);
    CHECK(status == NIXL_SUCCESS || status == NIXL_ERR_NOT_ALLOWED);
    if (status == NIXL_SUCCESS)
        buffer.md = nullptr;
    return status;
}

/// Stops a process; when this returns, none of its threads runs any more.
void stop(pid_t pid) {
    CHECK(kill(pid, SIGSTOP) == 0);
    await("a process to stop", [&] {
        for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
            std::string line;
            std::getline(std::ifstream(task.path() / "stat"), line);
            if (size_t name_end = line.rfind(')'); name_end == std::string::npos || line.substr(name_end, 3) != ") T")
                return false;
        }
        return true;
    });
}

/// What is written on stderr meanwhile.
template <class Work> std::string what_is_said(const Work& work) {
    char name[] = "/dev/shm/kvbm-cxl-said-XXXXXX";
    int file = mkstemp(name), was = dup(STDERR_FILENO);
    CHECK(file >= 0 && was >= 0 && unlink(name) == 0 && dup2(file, STDERR_FILENO) >= 0);
    work();
    CHECK(dup2(was, STDERR_FILENO) >= 0);
    std::string said(static_cast<size_t>(lseek(file, 0, SEEK_CUR)), '\0');
    CHECK(pread(file, said.data(), said.size(), 0) == static_cast<ssize_t>(said.size()));
    close(file);
    close(was);
    std::fputs(said.c_str(), stderr);
    return said;
}

/// Stops all threads of a child but its first one, as a machine does that is too busy, until the object goes.
class HeldThreads {
    std::vector<pid_t> ids_;

  public:
    explicit HeldThreads(pid_t pid) {
        for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
            auto id = static_cast<pid_t>(std::stoi(task.path().filename()));
            if (id == pid)
                continue;
            CHECK(ptrace(PTRACE_SEIZE, id, 0, 0) == 0 && ptrace(PTRACE_INTERRUPT, id, 0, 0) == 0);
            CHECK(waitpid(id, nullptr, __WALL) == id);
            ids_.push_back(id);
        }
    }
    ~HeldThreads() {
        for (pid_t id : ids_)
            CHECK(ptrace(PTRACE_DETACH, id, 0, 0) == 0);
    }
    HeldThreads(const HeldThreads&) = delete;
};

double seconds_since(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

/// Memory that a peer copies is not given back before it has ended, whatever became of another peer before.
void peers_that_copy_are_waited_for(const testing::Folder& folder, const std::string& pool, const char* machine) {
    Talk talk = Talk::make(folder);
    Agent owner("owner", pool, {{"timeout_ms", std::to_string(2'500 * SLOWER)}});
    Buffer block(owner, true, big, salt_before);
    auto little = std::make_unique<Buffer>(owner, true, small, salt_before);
    talk.offer("big", block);
    talk.offer("small", *little);
    talk.say("owner", owner.conn_info());
    Child reader(folder, machine, {"read_on", pool, talk.folder});
    {
        Child rester(folder, "one", {"rest", pool, talk.folder});
        auto pid = static_cast<pid_t>(std::stoi(talk.hear("rests")));
        stop(pid);
        auto since = std::chrono::steady_clock::now();
        CHECK(deregister(owner, *little) == NIXL_ERR_NOT_ALLOWED && seconds_since(since) >= 2.4);
        // No peer is waited for twice.
        since = std::chrono::steady_clock::now();
        CHECK(deregister(owner, *little) == NIXL_ERR_NOT_ALLOWED && seconds_since(since) < 1.5 * SLOWER);
    }
    // Now it is dead, which is certain, and the other one has noticed nothing.
    await("the death of a peer", [&] { return deregister(owner, *little) == NIXL_SUCCESS; });
    talk.hear("pid");
    talk.say("go");
    talk.hear("posted");
    while (deregister(owner, block) != NIXL_SUCCESS) {
    }
    block.fill(salt_after);
    talk.hear("ended");
    reader.succeed();
}

/// A peer is stopped in the middle of a copy for longer than it takes to give it up. NIXL's agent does not tell the application that the
/// memory may be in use: it uses it for something else, and the peer must not take that for the data.
void a_peer_that_was_stopped_gets_no_wrong_bytes(const testing::Folder& folder, const std::string& pool, const char* machine) {
    Talk talk = Talk::make(folder);
    Agent owner("owner", pool, {{"timeout_ms", "1000"}});
    Buffer block(owner, true, big, salt_before);
    talk.offer("big", block);
    talk.say("owner", owner.conn_info());
    Child reader(folder, machine, {"read_on", pool, talk.folder});
    auto pid = static_cast<pid_t>(std::stoi(talk.hear("pid")));
    talk.say("go");
    talk.hear("posted");
    stop(pid);
    CHECK(deregister(owner, block) == NIXL_ERR_NOT_ALLOWED);
    block.fill(salt_after);
    CHECK(kill(pid, SIGCONT) == 0);
    talk.hear("ended");
    // It lives, and has let go: now that is certain.
    await("a word of the peer", [&] { return deregister(owner, block) == NIXL_SUCCESS; });
    reader.succeed();
}

/// An engine ends that has not given back what it lent, and its application uses the memory for something else as soon as that returns: who
/// reads there has let go by then, or is one that may not take what it reads for the data, which the engine has said.
void an_engine_that_ends_takes_back_what_it_lent(const testing::Folder& folder, const std::string& pool, const char* machine,
                                                 bool is_held_up) {
    Talk talk = Talk::make(folder);
    Options options;
    CHECK_OK(read_options({{"pool", pool}}, options));
    std::shared_ptr<Pool> stays_open;
    CHECK_OK(Pool::open(options, stays_open));
    Agent owner("owner", pool, {{"timeout_ms", "1000"}});
    Buffer block(owner, true, small, salt_before);
    talk.offer("small", block);
    talk.say("owner", owner.conn_info());
    Child reader(folder, machine, {"read_little_on", pool, talk.folder});
    auto pid = static_cast<pid_t>(std::stoi(talk.hear("reads")));
    std::optional<HeldThreads> held;
    if (is_held_up)
        held.emplace(pid);
    auto since = std::chrono::steady_clock::now();
    std::string said = what_is_said([&] { owner.engine.reset(); });
    block.fill(salt_after);
    double took_s = seconds_since(since);
    talk.hear("ended");
    held.reset();
    reader.succeed();
    CHECK(is_held_up ? took_s >= 1 && took_s < 3 * SLOWER : took_s < 0.9 * SLOWER);
    CHECK((said.find("no word came from reader") != std::string::npos) == is_held_up);
    block.md = nullptr; // it has gone with the engine
}

/// Owns memory, and does with it as it is told.
void own(const std::string& pool, const Talk& talk) {
    Agent agent("owner", pool);
    CHECK(agent->loadRemoteConnInfo("user", talk.hear("user")) == NIXL_SUCCESS);
    Buffer early(agent, true, small, salt_before), later(agent, true, small, salt_before);
    talk.offer("early", early);
    talk.offer("later", later);
    talk.say("owner", agent.conn_info());
    // No peer is linked.
    talk.hear("drop");
    CHECK(deregister(agent, early) == NIXL_SUCCESS);
    early.fill(salt_after);
    talk.say("dropped");
    talk.hear("forget");
    CHECK(agent->disconnect("user") == NIXL_SUCCESS);
    talk.say("forgotten");
    talk.hear("end");
    CHECK(early.content() == unique_bytes(small, salt_after));
    CHECK(deregister(agent, later) == NIXL_SUCCESS);
}

/// What was given back before a link was there is not copied to; the first post waits for the link, others do not; and an owner that has
/// nothing to do with this agent any more is as good as before.
void nothing_begins_without_a_link(const testing::Folder& folder, const std::string& pool, const char* machine) {
    Talk talk = Talk::make(folder);
    Agent user("user", pool);
    talk.say("user", user.conn_info());
    Child owner(folder, machine, {"own", pool, talk.folder});
    CHECK(user->loadRemoteConnInfo("owner", talk.hear("owner")) == NIXL_SUCCESS);
    Buffer near(user, false, small, 77);
    {
        Far early(user, talk, "early"), later(user, talk, "later");
        talk.say("drop");
        talk.hear("dropped");
        Transfer_ lost(user, NIXL_WRITE, near, early.at, early.md, "owner", {{0, 0, small}});
        CHECK(lost.run() == NIXL_ERR_NOT_FOUND && lost.run() == NIXL_ERR_NOT_FOUND);
        Transfer_ write(user, NIXL_WRITE, near, later.at, later.md, "owner", {{0, 0, small}});
        CHECK(write.run() == NIXL_SUCCESS);
        for (int turn = 0; turn < 1'000; turn++)
            CHECK(write.post() == NIXL_SUCCESS);
        // As by a thread that found it gone before it was linked again, and was held up before it said so.
        static_cast<RemoteMd*>(later.md)->region->peer->is_gone = true;
        CHECK(write.post() == NIXL_SUCCESS);
        talk.say("forget");
        talk.hear("forgotten");
        for (auto since = std::chrono::steady_clock::now(); seconds_since(since) < 0.5;)
            CHECK(write.run() == NIXL_SUCCESS);
    }
    talk.say("end");
    owner.succeed();
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4) {
        Talk talk(argv[3]);
        std::string role = argv[1];
        if (role == "read_on")
            read_on(argv[2], talk);
        else if (role == "read_little_on")
            read_little_on(argv[2], talk);
        else if (role == "rest")
            rest(argv[2], talk);
        else
            own(argv[2], talk);
        return 0;
    }
    testing::Folder folder;
    std::string pool = testing::new_pool(folder, "pool", "native").pool;
    for (const char* machine : {"one", "two"}) {
        nothing_begins_without_a_link(folder, pool, machine);
        a_peer_that_was_stopped_gets_no_wrong_bytes(folder, pool, machine);
        peers_that_copy_are_waited_for(folder, pool, machine);
        for (bool is_held_up : {false, true})
            an_engine_that_ends_takes_back_what_it_lent(folder, pool, machine, is_held_up);
    }
    std::string emulated = testing::new_pool(folder, "emulated", "emulated:seed=3").pool;
    nothing_begins_without_a_link(folder, emulated, "two");
}
