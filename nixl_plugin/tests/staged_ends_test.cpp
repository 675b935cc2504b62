// SPDX-License-Identifier: Apache-2.0
//
// Staged transfers between engines of one process that are cancelled, held up or cut off, and peers that send anything.
#include "support/staged_engines.h"

using namespace staged_engines;

namespace {

void a_canceled_transfer_touches_nothing_afterwards() {
    Pair pair;
    constexpr size_t SIZE = 8'000'000;
    Heap there(SIZE);
    uint64_t registration = pair.b.book.add(there);
    std::mt19937_64 random(3);
    int canceled = 0;
    for (int round = 0; round < 40; ++round) {
        Direction direction = round % 2 ? Direction::read : Direction::write;
        auto here = std::make_unique<Heap>(SIZE);
        auto transfer = pair.a.start(pair.b, direction, {here->memory}, {{here->address(), there.address(), SIZE, registration, 0}});
        uint64_t until = now_ns() + random() % 2'000'000;
        while (now_ns() < until)
            pair.a.links->progress();
        pair.a.staged->cancel(*transfer);
        CHECK(transfer->status() == NIXL_ERR_CANCELED || transfer->status() == NIXL_SUCCESS);
        canceled += transfer->status() == NIXL_ERR_CANCELED;
        // Freed at once: the address sanitizer sees who still writes here.
        here.reset();
    }
    CHECK(canceled > 0);
    pair.a.await_unused();
    pair.b.await_unused();
    Heap here(SIZE);
    fill(there.bytes.data(), SIZE, 9);
    auto transfer = pair.a.start(pair.b, Direction::read, {here.memory}, {{here.address(), there.address(), SIZE, registration, 0}});
    pair.a.await_ok(*transfer);
    CHECK(is_filled(here.bytes.data(), SIZE, 9));
}

/// What fails in a round is not always the work that was just handed in: a caller that is told that nothing was begun can rely on it.
void a_start_that_throws_has_begun_nothing() {
    LinksOptions links;
    links.thread = false;
    Pair pair({}, links);
    constexpr size_t SIZE = 1'000'000;
    Heap here(SIZE), there(SIZE);
    uint64_t registration = pair.b.book.add(there);
    std::shared_ptr<const Plan> plan;
    CHECK_OK(Plan::make(pair.b.self.engine_id, {here.memory}, std::vector<Range>{{here.address(), there.address(), SIZE, registration, 0}},
                        plan));
    bool has_thrown = false;
    pair.a.links->set_hooks({.tick = [] { throw std::bad_alloc(); }});
    CHECK(wait_until([&] { return has_thrown; },
                     [&] {
                         std::shared_ptr<Transfer> transfer;
                         try {
                             (void)pair.a.staged->start(plan, Direction::write, transfer);
                         } catch (const std::bad_alloc&) {
                             has_thrown = true;
                             CHECK(transfer->status() != NIXL_IN_PROG);
                         }
                         pair.a.staged->cancel(*transfer);
                         pair.b.links->progress();
                     }));
    pair.a.links->set_hooks({});
    // The peer goes on with what it was asked for, and no transfer is told of it.
    CHECK(wait_until([&] { return pair.a.staged->staging_used() + pair.b.staged->staging_used() == 0; },
                     [&] {
                         pair.a.links->progress();
                         pair.b.links->progress();
                     }));
}

/// Memory of a device that does not end a copy in time, and may write what it was given for as long as `is_writing`.
struct LateMemory : HeapMemory {
    std::atomic<bool> is_writing{true};
    explicit LateMemory(const Heap& heap) : HeapMemory(pool, {heap.address(), heap.bytes.size()}) {}
    Status to_pool(std::span<const Piece>, uint64_t) override { return {NIXL_ERR_BACKEND, "it did not copy in time"}; }
    bool may_still_write() override { return is_writing; }
};

/// On the side that asks and on the one that is asked: no other transfer gets the block as long as the device may write to it.
void a_block_that_a_device_may_still_write_to_stays_in_use() {
    Pair pair;
    constexpr size_t SIZE = 5'000; // in one part
    Heap here(SIZE), there(SIZE);
    auto late = std::make_shared<LateMemory>(here), late_there = std::make_shared<LateMemory>(there);
    uint64_t registration = pair.b.book.add(there), late_registration = registration + 1;
    {
        std::lock_guard lock(pair.b.book.mutex);
        pair.b.book.memories.emplace(late_registration, late_there);
        pair.b.book.next++;
    }
    auto fails = [&](Direction direction, std::shared_ptr<Memory> memory, uint64_t of) {
        auto transfer = pair.a.start(pair.b, direction, {std::move(memory)}, {{here.address(), there.address(), SIZE, of, 0}});
        CHECK(pair.a.await(*transfer) == NIXL_ERR_BACKEND);
    };
    auto stay_used = [&](size_t asking, size_t asked) {
        for (int round = 0; round < 20; ++round) {
            nap();
            pair.a.links->progress();
            pair.b.links->progress();
            CHECK(pair.a.staged->staging_used() == asking && pair.b.staged->staging_used() == asked);
        }
    };
    fails(Direction::write, late, registration);
    stay_used(1, 0);
    fails(Direction::read, here.memory, late_registration);
    stay_used(1, 1);
    // Others go on meanwhile, in other blocks.
    fill(here.bytes.data(), SIZE, 4);
    auto transfer = pair.a.start(pair.b, Direction::write, {here.memory}, {{here.address(), there.address(), SIZE, registration, 0}});
    pair.a.await_ok(*transfer);
    CHECK(is_filled(there.bytes.data(), SIZE, 4));
    late->is_writing = late_there->is_writing = false;
    pair.a.await_unused();
    pair.b.await_unused();
}

void memory_that_is_deregistered_is_not_touched_afterwards() {
    Pair pair;
    constexpr size_t SIZE = 8'000'000;
    int refused = 0;
    for (int round = 0; round < 30; ++round) {
        Direction direction = round % 2 ? Direction::read : Direction::write;
        Heap here(SIZE);
        auto there = std::make_unique<Heap>(SIZE);
        uint64_t registration = pair.b.book.add(*there);
        auto transfer = pair.a.start(pair.b, direction, {here.memory}, {{here.address(), there->address(), SIZE, registration, 0}});
        usleep(static_cast<useconds_t>(round * 60));
        pair.b.book.remove(registration);
        there.reset();
        nixl_status_t status = pair.a.await(*transfer);
        CHECK(status == NIXL_SUCCESS || status == NIXL_ERR_NOT_FOUND);
        refused += status == NIXL_ERR_NOT_FOUND;
    }
    CHECK(refused > 0);
    pair.a.await_unused();
    pair.b.await_unused();
}

void a_large_list_does_not_starve_small_ones() {
    Engine owner("owner"), greedy("greedy"), modest("modest");
    constexpr size_t LARGE = 24'000'000, SMALL = 4'096;
    Heap large(LARGE), large_here(LARGE), small(SMALL), small_here(SMALL);
    uint64_t large_id = owner.book.add(large), small_id = owner.book.add(small);
    greedy.knows(owner);
    modest.knows(owner);
    fill(small.bytes.data(), SMALL, 5);
    auto one = [&] {
        auto transfer =
            modest.start(owner, Direction::read, {small_here.memory}, {{small_here.address(), small.address(), SMALL, small_id, 0}});
        modest.await_ok(*transfer);
    };
    one();
    std::vector<std::shared_ptr<Transfer>> under_way(4);
    uint64_t ended_bytes = 0;
    auto keep_large_ones_going = [&] {
        for (auto& transfer : under_way) {
            if (transfer && transfer->status() == NIXL_IN_PROG)
                continue;
            if (transfer) {
                greedy.await_ok(*transfer);
                ended_bytes += LARGE;
            }
            transfer =
                greedy.start(owner, Direction::read, {large_here.memory}, {{large_here.address(), large.address(), LARGE, large_id, 0}});
        }
    };
    auto arrived_bytes = [&] {
        uint64_t sum = ended_bytes;
        for (auto& transfer : under_way)
            sum += transfer->done_bytes();
        return sum;
    };
    keep_large_ones_going();
    std::vector<uint64_t> meanwhile_bytes;
    for (int i = 0; i < 31; ++i) {
        uint64_t before = arrived_bytes();
        // The owner has been asked for large parts when the small one comes.
        CHECK(wait_until([&] { return arrived_bytes() > before; }, keep_large_ones_going));
        before = arrived_bytes();
        one();
        meanwhile_bytes.push_back(arrived_bytes() - before);
    }
    for (auto& transfer : under_way)
        greedy.await_ok(*transfer);
    // Those that no other process of this machine held up.
    auto quartile = meanwhile_bytes.begin() + static_cast<ptrdiff_t>(meanwhile_bytes.size() / 4);
    std::nth_element(meanwhile_bytes.begin(), quartile, meanwhile_bytes.end());
    std::printf("    %lu bytes of 4 large reads arrive while a small one is under way\n", *quartile);
    // Were they served in the order of asking, it would be the four of them.
    CHECK(*quartile < LARGE);
}

void a_transfer_that_does_not_come_on_fails() {
    StagedOptions options;
    options.timeout_ms = 300;
    LinksOptions still;
    still.thread = false;
    Engine a("a", options), b("b", options, still);
    a.knows(b);
    constexpr size_t SIZE = 100'000;
    Heap here(SIZE), there(SIZE);
    uint64_t registration = b.book.add(there);
    std::vector<Range> ranges{{here.address(), there.address(), SIZE, registration, 0}};
    CHECK_OK(a.links->connect("b"));
    CHECK(wait_until([&] { return a.links->state_of(b.self.engine_id) == PeerState::linked; }, [&] { b.links->progress(); }));
    // Its process lives, and does nothing.
    auto transfer = a.start(b, Direction::write, {here.memory}, ranges);
    uint64_t since = now_ns();
    CHECK(a.await(*transfer) == NIXL_ERR_BACKEND && now_ns() - since > 250'000'000);
    // What was staged for it stays until the peer says that it has read it.
    CHECK(a.staged->staging_used() > 0);
    CHECK(wait_until([&] { return a.staged->staging_used() == 0; },
                     [&] {
                         b.links->progress();
                         a.links->progress();
                     }));
    transfer = a.start(b, Direction::write, {here.memory}, ranges);
    CHECK(wait_until([&] { return transfer->status() != NIXL_IN_PROG; },
                     [&] {
                         b.links->progress();
                         a.links->progress();
                     }));
    CHECK(transfer->status() == NIXL_SUCCESS);
}

/// How many of two transfers had not ended when one of the engines did.
int failed_with_an_engine(bool owner_ends) {
    constexpr size_t SIZE = 30'000'000;
    auto a = std::make_unique<Engine>("a"), b = std::make_unique<Engine>("b");
    Heap here(SIZE), there(SIZE);
    uint64_t registration = b->book.add(there);
    a->knows(*b);
    std::shared_ptr<Transfer> transfers[2];
    for (Direction direction : {Direction::read, Direction::write})
        transfers[static_cast<int>(direction)] =
            a->start(*b, direction, {here.memory}, {{here.address(), there.address(), SIZE, registration, 0}});
    CHECK(wait_until([&] { return transfers[0]->done_bytes() > 0; }, [&] { a->links->progress(); }));
    (owner_ends ? b : a).reset();
    int failed = 0;
    for (auto& transfer : transfers) {
        nixl_status_t status = owner_ends ? a->await(*transfer) : transfer->status();
        CHECK(status == (owner_ends ? NIXL_ERR_REMOTE_DISCONNECT : NIXL_ERR_CANCELED) || status == NIXL_SUCCESS);
        failed += status != NIXL_SUCCESS;
    }
    (owner_ends ? a : b)->await_unused();
    return failed;
}

void engines_that_end_under_way_fail_what_was() {
    for (bool owner_ends : {true, false})
        CHECK(wait_until([&] { return failed_with_an_engine(owner_ends) == 2; }, [] {}));
}

void whatever_a_peer_sends_harms_its_own_link_only() {
    Pair pair;
    constexpr size_t SIZE = 300'000;
    Heap here(SIZE), there(SIZE);
    fill(there.bytes.data(), SIZE, 4);
    uint64_t registration = pair.b.book.add(there);
    std::mt19937_64 random(11);
    std::string name = ring_name(pair.b.self.engine_id);
    uint64_t broken = 0;
    for (int round = 0; round < 60; ++round) {
        cxl_ring_t ring = CXL_SHM_RING_NONE;
        CHECK(cxl_shm_ring_connect(pool->handle(), name.c_str(), PATIENCE_S * 1'000, &ring) == CXL_SHM_OK);
        auto send = [&](std::vector<std::byte> message) {
            return cxl_shm_ring_send(pool->handle(), ring, message.data(), message.size(), 1'000) == CXL_SHM_OK;
        };
        if (round % 6 != 0) {
            Writer hello(Kind::hello);
            hello.put(HELLO_MAGIC).put(WIRE_VERSION).put(std::as_bytes(std::span(pool->info().uuid))).put(random_engine_id());
            send(hello.put(static_cast<uint16_t>(1)).put(std::string_view("x")).take());
        }
        for (int i = 0; i < 20; ++i) {
            // A kind that there is, most of the time, with anything behind it; or a request that is nearly right.
            Writer message(static_cast<Kind>(i % 7 == 0 ? random() : 1 + random() % 22));
            if (random() % 2) {
                size_t len_bytes = random() % 120;
                for (size_t k = 0; k < len_bytes; ++k)
                    message.put(static_cast<uint8_t>(random() % 3 ? random() % 4 : random()));
            } else {
                bool is_write = random() % 2;
                message = Writer(is_write ? kind::write : kind::read);
                message.put(random() % 5).put(static_cast<uint16_t>(is_write)).put(static_cast<uint16_t>(1)).put(uint32_t{1});
                if (is_write)
                    message.put(random() % 2 ? random() : uint64_t{64}).put(uint64_t{100});
                message.put(registration).put(there.address() + SIZE - random() % 99).put(uint32_t{100}).put(uint32_t(random() % 2));
            }
            if (!send(message.take()))
                break;
        }
        // It is told that it did something that cannot be, or nothing of what it sent was.
        std::vector<std::byte> answer(64 << 10);
        size_t len_bytes = 0;
        int status;
        while ((status = cxl_shm_ring_recv(pool->handle(), ring, answer.data(), answer.size(), &len_bytes, 50)) == CXL_SHM_OK) {
        }
        broken += status != CXL_SHM_E_TIMEOUT;
        cxl_shm_ring_close(pool->handle(), ring, 0);
        auto transfer = pair.a.start(pair.b, Direction::read, {here.memory}, {{here.address(), there.address(), SIZE, registration, 0}});
        pair.a.await_ok(*transfer);
        CHECK(is_filled(here.bytes.data(), SIZE, 4) && is_filled(there.bytes.data(), SIZE, 4));
    }
    std::printf("    %lu of 60 broken off\n", broken);
    CHECK(broken > 30 && pair.a.links->counts().gone == 0);
    pair.b.await_unused();
}

/// Limits of another length than this release's, as another release might send them: the refusal says which, and what to do.
void limits_of_another_length_are_refused_with_what_to_do() {
    Pair pair;
    CHECK_OK(pair.a.links->connect("b"));
    CHECK(
        wait_until([&] { return pair.a.links->state_of(pair.b.self.engine_id) == PeerState::linked; }, [&] { pair.a.links->progress(); }));
    pair.a.links->within_turn([&] {
        Status failure;
        Link* link = pair.a.links->reach(pair.b.self.engine_id, failure);
        CHECK(link);
        for (size_t missing : {0, 1, 8}) {
            std::vector<std::byte> message = Writer(kind::limits).put(uint64_t{1} << 20).take();
            message.resize(message.size() - missing);
            Status status = pair.a.staged->on_message(*link, message);
            CHECK(status.ok() == (missing == 0));
            std::string wanted = text("agent b sent its staging limits in a message of ", 9 - missing, " bytes, not 9: use one release");
            CHECK(status.ok() || (status.code() == NIXL_ERR_MISMATCH && status.reason().find(wanted) != std::string::npos));
        }
    });
}

const Test TESTS[] = {
    {"a_canceled_transfer_touches_nothing_afterwards", a_canceled_transfer_touches_nothing_afterwards},
    {"a_start_that_throws_has_begun_nothing", a_start_that_throws_has_begun_nothing},
    {"a_block_that_a_device_may_still_write_to_stays_in_use", a_block_that_a_device_may_still_write_to_stays_in_use},
    {"memory_that_is_deregistered_is_not_touched_afterwards", memory_that_is_deregistered_is_not_touched_afterwards},
    {"a_large_list_does_not_starve_small_ones", a_large_list_does_not_starve_small_ones},
    {"a_transfer_that_does_not_come_on_fails", a_transfer_that_does_not_come_on_fails},
    {"whatever_a_peer_sends_harms_its_own_link_only", whatever_a_peer_sends_harms_its_own_link_only},
    {"limits_of_another_length_are_refused_with_what_to_do", limits_of_another_length_are_refused_with_what_to_do},
    {"engines_that_end_under_way_fail_what_was", engines_that_end_under_way_fail_what_was},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
