// SPDX-License-Identifier: Apache-2.0
//
// Staged transfers between processes, of one host and of several, natively and under the emulator of memory that is not coherent: all bytes
// are checked, owners are killed and stopped at random points, and survivors have to go on.
//
//     staged_processes_test [NAME]          the tests whose name contains NAME; STORM_ROUNDS=200 for longer storms, STORM_SEED=7 to replay
//     staged_processes_test bench [MACHINE] medians of transfers with an owner on this host, or on the machine named
#include "staged/heap.h"
#include "staged/staged.h"
#include "support/world.h"
#include <algorithm>
#include <optional>

using namespace world;

namespace {

constexpr size_t SIZE = 8 << 20;
/// Registration of an owner's memory; nothing else is registered.
constexpr uint64_t REGISTRATION = 7;
const char* const EMULATED = "emulated:seed=3,noise=1";

struct OneHeap {
    std::vector<std::byte> bytes = std::vector<std::byte>(SIZE);
    std::shared_ptr<Memory> memory;
    uint64_t address() const { return reinterpret_cast<uint64_t>(bytes.data()); }
};

struct Engine {
    std::shared_ptr<Pool> pool;
    OneHeap heap;
    Identity self;
    std::unique_ptr<Links> links;
    std::unique_ptr<Staged> staged;

    Engine(const std::string& spec, const std::string& agent, StagedOptions options = {})
        : pool(open_pool(spec)), self{agent, random_engine_id()} {
        // The emulator is slow, and the machine may be busy: only a peer that is gone may end a transfer here.
        options.timeout_ms = PATIENCE_S * 1'000;
        heap.memory = std::make_shared<HeapMemory>(pool, Piece{heap.address(), SIZE});
        CHECK_OK(Links::create(pool, self, {}, links));
        staged = std::make_unique<Staged>(
            *links, [this](uint64_t registration) { return registration == REGISTRATION ? heap.memory : nullptr; }, options);
    }
    ~Engine() {
        staged.reset();
        links.reset();
    }
};

/// A process with memory, known by what it said when it was ready.
struct Owner {
    Child child;
    std::string agent, engine_id;
    uint64_t address = 0, number = 0;

    Owner(const Field& field, const std::string& machine, const std::string& name, uint64_t content)
        : child(field, machine, {"owner", field.spec(), name, std::to_string(content)}), agent(name), number(content) {
        std::istringstream words(child.await_text("ready "));
        words >> engine_id >> address;
    }
};

/// Owns memory filled with the data of its number until it is told to end; answers every notification "sum" with a sum of its memory.
int own(const std::string& spec, const std::string& agent, uint64_t number) {
    Engine engine(spec, agent);
    fill(engine.heap.bytes.data(), SIZE, number);
    std::printf("ready %s %lu\n", engine.self.engine_id.c_str(), engine.heap.address());
    std::fflush(stdout);
    while (true) {
        for (auto& note : engine.links->take_notifications()) {
            if (note.text == "end")
                return 0;
            // "filled NUMBER FIRST LENGTH ASKER": whether its memory has the data of that number there.
            std::istringstream words(note.text);
            std::string what, asker;
            uint64_t of = 0, first = 0, len_bytes = 0;
            words >> what >> of >> first >> len_bytes >> asker;
            CHECK(what == "filled" && first + len_bytes <= SIZE);
            bool is_there = is_filled(engine.heap.bytes.data() + first, len_bytes, of, first);
            CHECK_OK(engine.links->add_peer(note.agent, asker));
            CHECK_OK(engine.links->notify(note.agent, is_there ? "yes" : "no"));
        }
        nap(1'000);
    }
}

std::shared_ptr<Transfer> start(Engine& engine, const Owner& owner, Direction direction, const std::vector<Range>& ranges) {
    std::shared_ptr<const Plan> plan;
    CHECK_OK(Plan::make(owner.engine_id, {engine.heap.memory}, ranges, plan));
    std::shared_ptr<Transfer> transfer;
    (void)engine.staged->start(plan, direction, transfer);
    return transfer;
}

nixl_status_t await(Engine& engine, Transfer& transfer) {
    CHECK(wait_until([&] { return transfer.status() != NIXL_IN_PROG; }, [&] { engine.links->progress(); }));
    return transfer.status();
}

/// Pieces of the first `len_bytes` bytes, in any order, at the same places on both sides.
std::vector<Range> pieces(std::mt19937_64& random, const Engine& engine, const Owner& owner, uint64_t len_bytes, uint64_t most_bytes) {
    std::vector<Range> ranges;
    for (uint64_t at = 0; at < len_bytes;) {
        uint64_t bytes = std::min(random() % most_bytes + 1, len_bytes - at);
        ranges.push_back({engine.heap.address() + at, owner.address + at, bytes, REGISTRATION, 0});
        at += bytes;
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    return ranges;
}

/// Whether what an owner has is the data of a number, by its own word.
bool owner_has(Engine& engine, const Owner& owner, uint64_t number, uint64_t len_bytes) {
    CHECK_OK(engine.links->notify(owner.agent,
                                  "filled " + std::to_string(number) + " 0 " + std::to_string(len_bytes) + " " + engine.self.engine_id));
    std::vector<Notification> got;
    CHECK(wait_until([&] { return !(got = engine.links->take_notifications()).empty(); }, [] {}));
    CHECK(got.size() == 1 && got[0].agent == owner.agent);
    return got[0].text == "yes";
}

void transfers_between(const char* coherence, const std::string& machine) {
    if (coherence)
        setenv("CXL_COHERENCE", coherence, 1);
    Field field;
    {
        Engine engine(field.spec(), "asker");
        Owner owner(field, machine, "owner", 77);
        CHECK_OK(engine.links->add_peer("owner", owner.engine_id));
        std::mt19937_64 random(5);
        // Reads before writes: the owner's data are whole then.
        for (auto [len_bytes, most_bytes] :
             {std::pair<uint64_t, uint64_t>{100, 100}, {4'096, 4'096}, {300'000, 700}, {SIZE, SIZE}, {SIZE, 90'000}}) {
            std::fill(engine.heap.bytes.begin(), engine.heap.bytes.end(), std::byte{});
            auto transfer = start(engine, owner, Direction::read, pieces(random, engine, owner, len_bytes, most_bytes));
            nixl_status_t status = await(engine, *transfer);
            if (status != NIXL_SUCCESS)
                std::fprintf(stderr, "%d %s\n%s\n", status, transfer->reason().c_str(), owner.child.text().c_str());
            CHECK(status == NIXL_SUCCESS && is_filled(engine.heap.bytes.data(), len_bytes, 77));
        }
        uint64_t number = 200;
        for (auto [len_bytes, most_bytes] :
             {std::pair<uint64_t, uint64_t>{100, 100}, {4'096, 4'096}, {300'000, 700}, {SIZE, SIZE}, {SIZE, 90'000}}) {
            fill(engine.heap.bytes.data(), SIZE, ++number);
            auto transfer = start(engine, owner, Direction::write, pieces(random, engine, owner, len_bytes, most_bytes));
            CHECK(await(engine, *transfer) == NIXL_SUCCESS && owner_has(engine, owner, number, len_bytes));
        }
        CHECK(wait_until([&] { return engine.staged->staging_used() == 0; }, [&] { engine.links->progress(); }));
        CHECK_OK(engine.links->notify("owner", "end"));
        owner.child.succeed();
    }
    unsetenv("CXL_COHERENCE");
}

void between_processes_of_one_host() {
    transfers_between(nullptr, "one");
}
void between_hosts() {
    transfers_between(nullptr, "two");
}
void between_hosts_that_are_not_coherent() {
    transfers_between(EMULATED, "two");
}

uint64_t from_environment(const char* name, uint64_t fallback) {
    const char* value = std::getenv(name);
    return value ? std::strtoull(value, nullptr, 10) : fallback;
}

/// Owners are killed, or stopped for long enough to count as gone, at random points of transfers; another owner goes on all the time.
void storm(const char* coherence, const std::string& machine, uint64_t rounds) {
    if (coherence)
        setenv("CXL_COHERENCE", coherence, 1);
    rounds = from_environment("STORM_ROUNDS", rounds);
    uint64_t seed = from_environment("STORM_SEED", std::random_device{}());
    std::printf("    STORM_SEED=%lu\n", seed);
    std::fflush(stdout);
    std::mt19937_64 random(seed);
    Field field("96M");
    {
        Engine engine(field.spec(), "asker");
        Owner steady(field, "three", "steady", 1'000);
        // A lock that a process had when it was killed is passed on once its death is proven, which takes another process of its host.
        // Under the emulator a host has one only, and the next victim is that.
        std::optional<Owner> sibling;
        if (!coherence && machine != "one")
            sibling.emplace(field, machine, "sibling", 1'500);
        CHECK_OK(engine.links->add_peer("steady", steady.engine_id));
        uint64_t number = 2'000, succeeded = 0, failed = 0, lost = 0, slowest_ns = 0;
        for (uint64_t round = 0; round < rounds; ++round) {
            // The same name every time: an agent that is restarted.
            Owner victim(field, machine, "victim", ++number);
            CHECK_OK(engine.links->add_peer("victim", victim.engine_id));
            bool stops = random() % 3 == 0, is_over = false;
            // After the first transfer that went well, and within the next few: how long they take depends on the memory.
            uint64_t strike_ns = UINT64_MAX, begun_ns = now_ns();
            // What is asked of it must end, one way or the other, soon after it was struck.
            uint64_t len_bytes = 1 + random() % SIZE, most_bytes = random() % 2 ? 3'000 : SIZE;
            auto ranges = pieces(random, engine, victim, len_bytes, most_bytes);
            while (!is_over) {
                Direction direction = random() % 4 == 0 ? Direction::write : Direction::read;
                if (direction == Direction::write)
                    fill(engine.heap.bytes.data(), len_bytes, victim.number);
                else
                    std::fill_n(engine.heap.bytes.begin(), len_bytes, std::byte{});
                auto transfer = start(engine, victim, direction, ranges);
                bool is_struck = false;
                CHECK(wait_until([&] { return transfer->status() != NIXL_IN_PROG; },
                                 [&] {
                                     if (!is_struck && now_ns() >= strike_ns) {
                                         victim.child.signal(stops ? SIGSTOP : SIGKILL);
                                         is_struck = true;
                                     }
                                     engine.links->progress();
                                 }));
                is_over = is_struck || now_ns() >= strike_ns;
                if (transfer->status() == NIXL_SUCCESS) {
                    succeeded += 1;
                    // Never a wrong byte: a write puts there what was there.
                    CHECK(is_filled(engine.heap.bytes.data(), len_bytes, victim.number));
                    if (strike_ns == UINT64_MAX)
                        strike_ns = now_ns() + random() % (3 * std::min<uint64_t>(now_ns() - begun_ns, 20'000'000));
                } else {
                    // One that is stopped lives, and that one of another host was killed is not proven.
                    nixl_status_t status = transfer->status();
                    CHECK(is_over && (status == NIXL_ERR_BACKEND || (status == NIXL_ERR_REMOTE_DISCONNECT && !stops)));
                    failed += 1;
                    slowest_ns = std::max(slowest_ns, now_ns() - strike_ns);
                }
            }
            if (stops) {
                // It goes on with what it was doing, whatever has been given up meanwhile.
                victim.child.signal(SIGCONT);
                if (random() % 2) {
                    auto transfer = start(engine, victim, Direction::read, ranges);
                    nixl_status_t status = await(engine, *transfer);
                    CHECK(status == NIXL_SUCCESS || status == NIXL_ERR_BACKEND);
                    CHECK(status != NIXL_SUCCESS || is_filled(engine.heap.bytes.data(), len_bytes, victim.number));
                    lost += status != NIXL_SUCCESS;
                }
            }
            // The others are unharmed. One that was stopped in the middle of what the processes of its host share may have had that host
            // taken for dead, which joins again.
            auto ranges_of_steady = pieces(random, engine, steady, 500'000, 60'000);
            auto reads_steady = [&] {
                auto transfer = start(engine, steady, Direction::read, ranges_of_steady);
                nixl_status_t status = await(engine, *transfer);
                CHECK(status != NIXL_SUCCESS || is_filled(engine.heap.bytes.data(), 500'000, 1'000));
                return status == NIXL_SUCCESS;
            };
            CHECK(reads_steady() || (stops && wait_until(reads_steady, [&] { engine.links->progress(); })));
            victim.child.end(SIGKILL);
            if (round % 2)
                CHECK_OK(engine.links->remove_peer("victim"));
        }
        CHECK(wait_until([&] { return engine.staged->staging_used() == 0; }, [&] { engine.links->progress(); }));
        std::printf("    %lu rounds: %lu transfers succeeded, %lu failed, the last %.2f s after the stroke; %lu of the resumed\n", rounds,
                    succeeded, failed, static_cast<double>(slowest_ns) / 1e9, lost);
        CHECK_OK(engine.links->notify("steady", "end"));
        steady.child.succeed();
    }
    unsetenv("CXL_COHERENCE");
}

void owners_of_one_host_are_killed_and_stopped() {
    storm(nullptr, "one", 20);
}
void owners_of_another_host_are_killed_and_stopped() {
    storm(nullptr, "two", 8);
}
void owners_are_killed_and_stopped_where_nothing_is_coherent() {
    storm(EMULATED, "two", 4);
}

/// An asker: reads and writes until it is ended; says what went wrong.
int ask(const std::string& spec, const std::string& owner_agent, const std::string& owner_id, uint64_t address, uint64_t number) {
    Engine engine(spec, "asker-" + std::to_string(getpid()));
    CHECK_OK(engine.links->add_peer(owner_agent, owner_id));
    std::vector<Range> ranges{{engine.heap.address(), address, SIZE, REGISTRATION, 0}};
    std::puts("ready ");
    std::fflush(stdout);
    for (uint64_t round = 0;; ++round) {
        std::shared_ptr<const Plan> plan;
        CHECK_OK(Plan::make(owner_id, {engine.heap.memory}, ranges, plan));
        std::shared_ptr<Transfer> transfer;
        (void)engine.staged->start(plan, round % 2 ? Direction::write : Direction::read, transfer);
        if (await(engine, *transfer) != NIXL_SUCCESS) {
            // The owner was stopped for too long, or this process was.
            CHECK(transfer->status() == NIXL_ERR_BACKEND || transfer->status() == NIXL_ERR_REMOTE_DISCONNECT);
            nap(10'000);
            round |= 1;
            continue;
        }
        CHECK(is_filled(engine.heap.bytes.data(), SIZE, number));
    }
}

/// The reverse: those that ask are killed and stopped, and the owner gets its staging back.
void askers_are_killed_and_stopped() {
    uint64_t rounds = from_environment("STORM_ROUNDS", 12), seed = from_environment("STORM_SEED", std::random_device{}());
    std::printf("    STORM_SEED=%lu\n", seed);
    std::fflush(stdout);
    std::mt19937_64 random(seed);
    Field field("96M");
    StagedOptions options;
    options.staging_bytes = 4 << 20;
    Engine owner(field.spec(), "owner", options);
    fill(owner.heap.bytes.data(), SIZE, 5);
    auto asker = [&](const char* machine) {
        Child child(field, machine, {"asker", field.spec(), "owner", owner.self.engine_id, std::to_string(owner.heap.address()), "5"});
        child.await_text("ready ");
        return child;
    };
    Child steady = asker("one");
    // A lock that a process had when it was killed is passed on once its death is proven, which takes another process of its host.
    Child sibling = asker("two");
    for (uint64_t round = 0; round < rounds; ++round) {
        Child victim = asker(random() % 2 ? "one" : "two");
        nap(3'000 + random() % 60'000);
        CHECK(victim.runs());
        bool stops = random() % 3 == 0;
        victim.signal(stops ? SIGSTOP : SIGKILL);
        if (stops) {
            nap(random() % 2 ? 50'000 : 2'500'000);
            victim.signal(SIGCONT);
            nap(random() % 100'000);
            if (!victim.runs())
                std::fprintf(stderr, "%s\n", victim.text().c_str());
            CHECK(victim.runs());
        }
        victim.end(SIGKILL);
        uint64_t served = owner.staged->counts().parts_served;
        CHECK(wait_until([&] { return owner.staged->counts().parts_served > served + 20; }, [] { nap(); }));
        if (!steady.runs())
            std::fprintf(stderr, "%s\n", steady.text().c_str());
        CHECK(steady.runs());
    }
    steady.end(SIGKILL);
    sibling.end(SIGKILL);
    CHECK(wait_until([&] { return owner.staged->staging_used() == 0; }, [] { nap(); }));
    // No process could write anything there but what was there.
    CHECK(is_filled(owner.heap.bytes.data(), SIZE, 5));
}

/// Medians and 99th percentiles, whatever machine this is.
int bench(const std::string& machine) {
    Field field("256M");
    Engine engine(field.spec(), "asker");
    Owner owner(field, machine, "owner", 1);
    CHECK_OK(engine.links->add_peer("owner", owner.engine_id));
    auto one = [&](const std::shared_ptr<const Plan>& plan, Direction direction) {
        std::shared_ptr<Transfer> transfer;
        uint64_t since = now_ns();
        (void)engine.staged->start(plan, direction, transfer);
        CHECK(await(engine, *transfer) == NIXL_SUCCESS);
        return static_cast<double>(now_ns() - since) / 1e3;
    };
    {
        CHECK_OK(engine.links->connect("owner"));
        CHECK(wait_until([&] { return engine.links->state_of(owner.engine_id) == PeerState::linked; }, [&] { engine.links->progress(); }));
        nap(100'000);
        // The least of many: what it takes when no other process disturbs.
        double least = 1e9;
        for (int i = 0; i < 2'000; ++i) {
            constexpr int TOGETHER = 20;
            uint64_t since = now_ns();
            for (int k = 0; k < TOGETHER; ++k)
                engine.links->progress();
            least = std::min(least, static_cast<double>(now_ns() - since) / TOGETHER);
        }
        PoolBlock block;
        CHECK_OK(PoolBlock::allocate(engine.pool, SIZE, block));
        for (uint64_t len_bytes : {64ul, 4'096ul, 65'536ul, 1ul << 20, 8ul << 20}) {
            double in = 1e12, out = 1e12;
            Piece piece{engine.heap.address(), len_bytes};
            for (int i = 0; i < 40; ++i) {
                uint64_t since = now_ns();
                CHECK_OK(heap_to_pool(*engine.pool, {&piece, 1}, block.offset()));
                uint64_t half = now_ns();
                CHECK_OK(pool_to_heap(*engine.pool, {&piece, 1}, block.offset()));
                in = std::min(in, static_cast<double>(half - since) / 1e3);
                out = std::min(out, static_cast<double>(now_ns() - half) / 1e3);
            }
            std::printf("copies of %8lu B by themselves: in %8.1f us, out %8.1f us\n", len_bytes, in, out);
        }
        std::printf("a round with nothing to do: %.0f ns at least\n", least);
    }
    for (uint64_t count : {1, 128, 2'048})
        for (uint64_t len_bytes : {64ul, 4'096ul, 20'480ul, 65'536ul, 1ul << 20, 8ul << 20}) {
            if (len_bytes * count > SIZE)
                continue;
            for (Direction direction : {Direction::read, Direction::write}) {
                std::vector<Range> ranges;
                // In an order in which none continues another.
                for (uint64_t i = 0; i < count; ++i) {
                    uint64_t at = i * 2 % count + (count % 2 == 0 && i >= count / 2);
                    ranges.push_back({engine.heap.address() + at * len_bytes, owner.address + at * len_bytes, len_bytes, REGISTRATION, 0});
                }
                std::shared_ptr<const Plan> plan;
                CHECK_OK(Plan::make(owner.engine_id, {engine.heap.memory}, ranges, plan));
                std::vector<double> took;
                uint64_t end = now_ns() + 700'000'000;
                while (now_ns() < end || took.size() < 20)
                    took.push_back(one(plan, direction));
                std::sort(took.begin(), took.end());
                std::printf("%5s %5lu x %8lu B: least %8.1f us  median %9.1f us  p99 %9.1f us  (%zu)\n",
                            direction == Direction::read ? "read" : "write", count, len_bytes, took[0], took[took.size() / 2],
                            took[took.size() * 99 / 100], took.size());
                std::fflush(stdout);
            }
        }
    CHECK_OK(engine.links->notify("owner", "end"));
    owner.child.succeed();
    return 0;
}

const Test TESTS[] = {
    {"between_processes_of_one_host", between_processes_of_one_host},
    {"between_hosts", between_hosts},
    {"between_hosts_that_are_not_coherent", between_hosts_that_are_not_coherent},
    {"owners_of_one_host_are_killed_and_stopped", owners_of_one_host_are_killed_and_stopped},
    {"owners_of_another_host_are_killed_and_stopped", owners_of_another_host_are_killed_and_stopped},
    {"owners_are_killed_and_stopped_where_nothing_is_coherent", owners_are_killed_and_stopped_where_nothing_is_coherent},
    {"askers_are_killed_and_stopped", askers_are_killed_and_stopped},
};

} // namespace

int main(int argc, char** argv) {
    std::vector<std::string> words(argv, argv + argc);
    if (words[0] == "child" && words.size() > 4 && words[1] == "owner")
        return own(words[2], words[3], std::stoull(words[4]));
    if (words[0] == "child" && words.size() > 6 && words[1] == "asker")
        return ask(words[2], words[3], words[4], std::stoull(words[5]), std::stoull(words[6]));
    if (words.size() > 1 && words[1] == "bench")
        return bench(words.size() > 2 ? words[2] : "one");
    return run_tests(TESTS, argc, argv);
}
