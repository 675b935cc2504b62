// SPDX-License-Identifier: Apache-2.0
//
// Staged transfers between engines of one process: lists of every shape, refusals, little staging.
#include "support/staged_engines.h"

using namespace staged_engines;

namespace {

/// Cuts `len_bytes` of two memories into ranges in different orders; those of sizes near `most_bytes`.
std::vector<Range> cut(std::mt19937_64& random, const Heap& local, const Heap& remote, uint64_t registration, size_t most_bytes) {
    std::vector<Range> ranges;
    size_t at = 0, size = local.bytes.size();
    while (at < size) {
        uint64_t bytes = std::min<uint64_t>(random() % most_bytes + 1, size - at);
        ranges.push_back({local.address() + at, 0, bytes, registration, 0});
        at += bytes;
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    at = 0;
    for (Range& range : ranges) {
        range.remote_address = remote.address() + at;
        at += range.len_bytes;
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    return ranges;
}

void lists_of_every_shape_arrive() {
    Pair pair;
    std::mt19937_64 random(7);
    uint64_t number = 1;
    for (size_t most_bytes : {40, 300, 5'000, 70'000, 3'000'000})
        for (Direction direction : {Direction::read, Direction::write}) {
            size_t size = std::min<size_t>(most_bytes * 200, 5'000'001);
            Heap here(size), there(size);
            uint64_t registration = pair.b.book.add(there);
            auto ranges = cut(random, here, there, registration, most_bytes);
            Heap& from = direction == Direction::read ? there : here;
            for (int again = 0; again < 2; ++again) {
                fill(from.bytes.data(), size, ++number);
                auto transfer = pair.a.start(pair.b, direction, {here.memory}, ranges);
                pair.a.await_ok(*transfer);
                CHECK(transfer->done_bytes() == size);
                for (const Range& range : ranges) {
                    uint64_t at_here = range.local_address - here.address(), at_there = range.remote_address - there.address();
                    CHECK(std::memcmp(&here.bytes[at_here], &there.bytes[at_there], range.len_bytes) == 0);
                }
                CHECK(is_filled(from.bytes.data(), size, number));
            }
            pair.b.book.remove(registration);
        }
    pair.a.await_unused();
    pair.b.await_unused();
}

void a_hundred_thousand_small_ranges_are_one_transfer() {
    Pair pair;
    constexpr size_t COUNT = 100'000, BYTES = 64;
    Heap here(COUNT * BYTES), there(COUNT * BYTES);
    // Two registrations, in turn, and backwards there: nothing can be joined.
    uint64_t registrations[] = {pair.b.book.add(there), pair.b.book.add(there)};
    std::vector<Range> ranges;
    for (size_t i = 0; i < COUNT; ++i)
        ranges.push_back({here.address() + i * BYTES, there.address() + (COUNT - 1 - i) * BYTES, BYTES, registrations[i % 2], 0});
    for (Direction direction : {Direction::read, Direction::write}) {
        Heap& from = direction == Direction::read ? there : here;
        fill(from.bytes.data(), from.bytes.size(), 50 + static_cast<int>(direction));
        uint64_t since = now_ns();
        auto transfer = pair.a.start(pair.b, direction, {here.memory}, ranges);
        pair.a.await_ok(*transfer);
        std::printf("    %s of 100 000 x 64 B: %.1f ms\n", direction == Direction::read ? "read" : "write",
                    static_cast<double>(now_ns() - since) / 1e6);
        for (size_t i = 0; i < COUNT; ++i)
            CHECK(std::memcmp(&here.bytes[i * BYTES], &there.bytes[(COUNT - 1 - i) * BYTES], BYTES) == 0);
        CHECK(is_filled(from.bytes.data(), from.bytes.size(), 50 + static_cast<int>(direction)));
    }
}

void memory_in_the_pool_is_written_from_in_place() {
    Pair pair;
    constexpr size_t SIZE = 3'000'000;
    auto source = std::make_shared<PoolMemory>(SIZE);
    Heap heap(SIZE), there(2 * SIZE);
    fill(source->block.address(), SIZE, 3);
    fill(heap.bytes.data(), SIZE, 4);
    uint64_t registration = pair.b.book.add(there);
    // Pieces of both memories in turn.
    std::vector<Range> ranges;
    constexpr size_t PIECE = 50'000;
    for (size_t at = 0; at < SIZE; at += PIECE) {
        ranges.push_back({source->address() + at, there.address() + at, PIECE, registration, 0});
        ranges.push_back({heap.address() + at, there.address() + SIZE + at, PIECE, registration, 1});
    }
    auto transfer = pair.a.start(pair.b, Direction::write, {source, heap.memory}, ranges);
    pair.a.await_ok(*transfer);
    CHECK(is_filled(there.bytes.data(), SIZE, 3) && is_filled(there.bytes.data() + SIZE, SIZE, 4));
    CHECK(pair.a.staged->counts().in_place == SIZE / PIECE);
    // Back again, elsewhere.
    for (Range& range : ranges)
        range.remote_address += range.memory == 0 ? SIZE : -SIZE;
    transfer = pair.a.start(pair.b, Direction::read, {source, heap.memory}, ranges);
    pair.a.await_ok(*transfer);
    CHECK(is_filled(source->block.address(), SIZE, 4) && is_filled(heap.bytes.data(), SIZE, 3));
}

void ranges_that_are_not_registered_are_refused() {
    Pair pair;
    constexpr size_t SIZE = 10'000;
    Heap here(SIZE), there(SIZE);
    fill(there.bytes.data(), SIZE, 1);
    uint64_t registration = pair.b.book.add(there);
    struct Wrong {
        uint64_t address, len_bytes, registration;
    };
    for (Wrong wrong :
         {Wrong{there.address() - 1, 10, registration}, Wrong{there.address() + SIZE - 5, 6, registration},
          Wrong{there.address(), SIZE, registration + 1}, Wrong{0, 1, registration}, Wrong{UINT64_MAX - SIZE, SIZE, registration}})
        for (Direction direction : {Direction::read, Direction::write}) {
            auto transfer =
                pair.a.start(pair.b, direction, {here.memory}, {{here.address(), wrong.address, wrong.len_bytes, wrong.registration, 0}});
            CHECK(pair.a.await(*transfer) == NIXL_ERR_NOT_FOUND);
        }
    CHECK(is_filled(there.bytes.data(), SIZE, 1));
    CHECK(pair.b.staged->counts().refused == 10);
    std::shared_ptr<const Plan> plan;
    Range outside{here.address() + 1, there.address(), SIZE, registration, 0};
    CHECK(Plan::make(pair.b.self.engine_id, {here.memory}, {&outside, 1}, plan).code() == NIXL_ERR_INVALID_PARAM);
    Range endless{here.address(), UINT64_MAX - 3, 8, registration, 0};
    CHECK(Plan::make(pair.b.self.engine_id, {here.memory}, {&endless, 1}, plan).code() == NIXL_ERR_INVALID_PARAM);
    Range nowhere{here.address(), there.address(), 8, registration, 1};
    CHECK(Plan::make(pair.b.self.engine_id, {here.memory}, {&nowhere, 1}, plan).code() == NIXL_ERR_INVALID_PARAM);
    // An engine that was never added as a peer, and one that is gone.
    CHECK_OK(Plan::make(random_engine_id(), {here.memory}, {}, plan));
    std::shared_ptr<Transfer> transfer;
    (void)pair.a.staged->start(plan, Direction::read, transfer);
    CHECK(pair.a.await(*transfer) == NIXL_ERR_NOT_FOUND);
    // The link has survived all of that.
    auto good = pair.a.start(pair.b, Direction::read, {here.memory}, {{here.address(), there.address(), SIZE, registration, 0}});
    pair.a.await_ok(*good);
    CHECK(is_filled(here.bytes.data(), SIZE, 1) && pair.a.links->counts().gone == 0);
}

void little_staging_is_enough_for_both_directions_at_once() {
    StagedOptions options;
    options.staging_bytes = options.block_bytes = 64 << 10;
    Pair pair(options);
    constexpr size_t SIZE = 4'000'000;
    struct Half {
        Engine &from, &to;
        Heap here{SIZE}, there{SIZE}, read_here{SIZE}, read_there{SIZE};
        std::vector<std::shared_ptr<Transfer>> transfers;
        uint64_t write = 0, read = 0;
        Half(Engine& one, Engine& other) : from(one), to(other) {}
    };
    Half halves[] = {Half(pair.a, pair.b), Half(pair.b, pair.a)};
    for (int round = 0; round < 3; ++round) {
        for (Half& half : halves) {
            uint64_t number = 10 * round + (&half - halves) * 100;
            fill(half.here.bytes.data(), SIZE, number + 1);
            fill(half.read_there.bytes.data(), SIZE, number + 2);
            half.write = half.to.book.add(half.there);
            half.read = half.to.book.add(half.read_there);
        }
        // Both begin at once, each with more writes than there are blocks, and reads right behind them.
        auto begin = [](Half& half) {
            constexpr size_t PIECE = SIZE / 8;
            for (size_t at = 0; at < SIZE; at += PIECE) {
                half.transfers.push_back(half.from.start(half.to, Direction::write, {half.here.memory},
                                                         {{half.here.address() + at, half.there.address() + at, PIECE, half.write, 0}}));
                half.transfers.push_back(
                    half.from.start(half.to, Direction::read, {half.read_here.memory},
                                    {{half.read_here.address() + at, half.read_there.address() + at, PIECE, half.read, 0}}));
            }
        };
        std::thread other([&] { begin(halves[1]); });
        begin(halves[0]);
        other.join();
        for (Half& half : halves)
            for (auto& transfer : std::exchange(half.transfers, {}))
                half.from.await_ok(*transfer);
        for (Half& half : halves) {
            uint64_t number = 10 * round + (&half - halves) * 100;
            CHECK(is_filled(half.there.bytes.data(), SIZE, number + 1) && is_filled(half.read_here.bytes.data(), SIZE, number + 2));
        }
    }
    for (Engine* engine : {&pair.a, &pair.b}) {
        engine->await_unused();
        CHECK(engine->staged->staging_held() <= 2);
    }
}

const Test TESTS[] = {
    {"lists_of_every_shape_arrive", lists_of_every_shape_arrive},
    {"a_hundred_thousand_small_ranges_are_one_transfer", a_hundred_thousand_small_ranges_are_one_transfer},
    {"memory_in_the_pool_is_written_from_in_place", memory_in_the_pool_is_written_from_in_place},
    {"ranges_that_are_not_registered_are_refused", ranges_that_are_not_registered_are_refused},
    {"little_staging_is_enough_for_both_directions_at_once", little_staging_is_enough_for_both_directions_at_once},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
