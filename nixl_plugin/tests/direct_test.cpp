// SPDX-License-Identifier: Apache-2.0
//
// Direct copies: random lists against a model, in every way, short and long; cancelled and deregistered at any moment.
#include "support/pools.h"
#include "transfer/direct.h"
#include <cstring>
#include <random>

using namespace kvbm_cxl;

namespace {

constexpr size_t area_bytes = 6 << 20;

struct Scene {
    std::shared_ptr<Core> core;
    std::byte* pool[2] = {};
    std::vector<std::byte> heap[2];

    explicit Scene(const Options& options) : core(testing::new_core(options)) {
        for (int i = 0; i < 2; i++) {
            void* block = nullptr;
            CHECK(cxl_shm_alloc(core->pool->handle(), area_bytes, 0, &block) == CXL_SHM_OK);
            pool[i] = static_cast<std::byte*>(block);
            heap[i] = testing::unique_bytes(area_bytes, static_cast<uint32_t>(i + 1));
            fill(i, static_cast<uint32_t>(i + 3));
        }
    }

    void fill(int area, uint32_t salt) {
        CHECK(cxl_shm_copy_in(pool[area], testing::unique_bytes(area_bytes, salt).data(), area_bytes) == CXL_SHM_OK);
    }
    std::vector<std::byte> content(const std::byte* pool_area) const {
        std::vector<std::byte> bytes(area_bytes);
        CHECK(cxl_shm_copy_out(bytes.data(), pool_area, area_bytes) == CXL_SHM_OK);
        return bytes;
    }
};

/// Copies as (to, from, length) within their areas: not overlapping, some adjoining, shuffled.
struct Move {
    size_t to, from, len;
};

std::vector<Move> random_moves(std::mt19937_64& random, size_t count, size_t most_bytes) {
    std::vector<Move> moves;
    size_t to = random() % 100, from = random() % 100;
    while (moves.size() < count) {
        size_t len = random() % 5 ? 1 + random() % most_bytes : 64 * (1 + random() % 8);
        if (std::max(to, from) + len > area_bytes)
            break;
        moves.push_back({to, from, len});
        to += len + (random() % 3 ? 0 : random() % 200);
        from += len + (random() % 3 ? 0 : random() % 200);
    }
    std::shuffle(moves.begin(), moves.end(), random);
    return moves;
}

void expect(const std::vector<std::byte>& found, const std::vector<std::byte>& wanted, const char* what) {
    if (std::memcmp(found.data(), wanted.data(), area_bytes) == 0)
        return;
    auto [one, other] = std::mismatch(found.begin(), found.end(), wanted.begin());
    std::fprintf(stderr, "%s: byte %zd is %d, not %d\n", what, one - found.begin(), static_cast<int>(*one), static_cast<int>(*other));
    std::_Exit(1);
}

void check(Scene& scene, Way way, const std::vector<Move>& moves, uint64_t inline_bytes) {
    bool is_to_pool = way == Way::in || way == Way::within, is_from_pool = way == Way::out || way == Way::within;
    std::byte* to = is_to_pool ? scene.pool[0] : scene.heap[0].data();
    std::byte* from = is_from_pool ? scene.pool[1] : scene.heap[1].data();
    std::vector<std::byte> wanted = is_to_pool ? scene.content(to) : scene.heap[0];
    std::vector<std::byte> source = is_from_pool ? scene.content(from) : scene.heap[1];
    std::vector<Copy> copies;
    for (auto [at, where, len] : moves) {
        copies.push_back(way == Way::out ? Copy{from + where, to + at, len} : Copy{to + at, from + where, len});
        std::memcpy(wanted.data() + at, source.data() + where, len);
    }
    auto registration = std::make_shared<Registration>();
    Uses uses;
    uses.add(registration.get());
    uses.add(registration.get());
    CopyPlan plan(way, std::move(copies), inline_bytes);
    size_t next = 0;
    for (const CopyPlan::Slice& slice : plan.slices()) {
        CHECK(slice.first == next);
        next += slice.count;
    }
    CHECK(next == plan.copies().size());
    auto part = make_direct_part(scene.core, std::move(plan), uses);
    for (int turn = 0; turn < 2; turn++) {
        CHECK(testing::run(*part) == NIXL_SUCCESS);
        expect(is_to_pool ? scene.content(to) : scene.heap[0], wanted, is_to_pool ? "in the pool" : "in the heap");
    }
    CHECK(!registration->is_used());
}

void random_lists(Scene& scene, int turns) {
    std::mt19937_64 random(5);
    for (int turn = 0; turn < turns; turn++) {
        for (Way way : {Way::in, Way::out, Way::within, Way::memory}) {
            check(scene, way, random_moves(random, 1 + random() % 400, 3000), turn % 2 ? 1 << 20 : 0);
            check(scene, way, random_moves(random, 1 + random() % 4, 1 << 20), turn % 2 ? 100 << 20 : 64 << 10);
        }
    }
    // 100,000 pieces, and one that is cut into many slices.
    std::vector<Move> many;
    for (size_t i = 0; i < 100'000; i++)
        many.push_back({i * 60, (99'999 - i) * 60, 50});
    for (Way way : {Way::in, Way::out, Way::within, Way::memory}) {
        check(scene, way, many, 256 << 10);
        check(scene, way, {{1, 3, area_bytes - 7}}, 256 << 10);
    }
}

void overlapping(Scene& scene) {
    // The later one wins, as when they are made one after the other.
    for (Way way : {Way::in, Way::out, Way::within, Way::memory}) {
        check(scene, way, {{1000, 0, 500}, {900, 2000, 300}, {1400, 5000, 200}}, 1 << 20);
        check(scene, way, {{1000, 0, 500'000}, {900, 2000, 300'000}, {1400, 5000, 200}}, 0);
    }
    // What one copy writes the next one reads.
    std::vector<std::byte>& heap = scene.heap[0];
    std::vector<std::byte> wanted = heap;
    std::memcpy(wanted.data() + 5000, wanted.data() + 1000, 1000);
    std::memcpy(wanted.data() + 300, wanted.data() + 5000, 1000);
    std::byte* base = heap.data();
    CopyPlan plan(Way::memory, {{base + 5000, base + 1000, 1000}, {base + 300, base + 5000, 1000}}, 1 << 20);
    CHECK(plan.make_all() == NIXL_SUCCESS);
    expect(heap, wanted, "one after the other");
}

/// Moved by less than its length, to either side.
void onto_itself(Scene& scene) {
    constexpr size_t len = 700'001;
    scene.fill(0, 5);
    scene.heap[0] = testing::unique_bytes(area_bytes, 6);
    for (Way way : {Way::within, Way::memory}) {
        std::byte* base = way == Way::within ? scene.pool[0] : scene.heap[0].data();
        auto content = [&] { return way == Way::within ? scene.content(base) : scene.heap[0]; };
        for (size_t distance : {size_t{1}, size_t{64}, size_t{4096}, size_t{300'000}, len - 1}) {
            for (bool is_up : {true, false}) {
                for (uint64_t inline_bytes : {uint64_t{0}, uint64_t{1} << 30}) {
                    size_t from = is_up ? 77 : 77 + distance, to = is_up ? 77 + distance : 77;
                    std::vector<std::byte> wanted = content();
                    std::memmove(wanted.data() + to, wanted.data() + from, len);
                    auto part = make_direct_part(scene.core, CopyPlan(way, {{base + to, base + from, len}}, inline_bytes), {});
                    CHECK(testing::run(*part) == NIXL_SUCCESS);
                    expect(content(), wanted, way == Way::within ? "moved within the pool" : "moved in the heap");
                }
            }
        }
    }
}

void cancelled(Scene& scene) {
    std::mt19937_64 random(6);
    auto registration = std::make_shared<Registration>();
    Uses uses;
    uses.add(registration.get());
    int cancelled = 0;
    for (int turn = 0; turn < 200; turn++) {
        auto part = make_direct_part(scene.core,
                                     CopyPlan(turn % 2 ? Way::in : Way::out, {{scene.pool[0], scene.heap[0].data(), area_bytes}}, 0), uses);
        auto ended = std::make_shared<testing::Ended>();
        CHECK(part->post(ended) == NIXL_IN_PROG);
        for (uint64_t polls = random() % 20; polls > 0; polls--)
            part->poll();
        part->cancel();
        CHECK(ended->times == 1 && !registration->is_used());
        CHECK(ended->status == NIXL_ERR_CANCELED || ended->status == NIXL_SUCCESS);
        cancelled += ended->status == NIXL_ERR_CANCELED;
        if (turn % 3 == 0) // may be posted again
            CHECK(testing::run(*part) == NIXL_SUCCESS);
    }
    CHECK(cancelled > 20);
}

void deregistered(Scene& scene) {
    for (int turn = 0; turn < 50; turn++) {
        auto registration = std::make_shared<Registration>();
        Uses uses;
        uses.add(registration.get());
        auto part = make_direct_part(scene.core, CopyPlan(Way::in, {{scene.pool[0], scene.heap[0].data(), area_bytes}}, 0), uses);
        auto ended = std::make_shared<testing::Ended>();
        CHECK(part->post(ended) == NIXL_IN_PROG);
        CHECK(registration->close_and_wait(60'000));
        // The owner that gave the memory back may free it now: no thread touches it any more.
        testing::await("the end", [&] { return ended->times == 1; });
        CHECK(ended->status == NIXL_SUCCESS);
        CHECK(part->post(ended) == NIXL_ERR_NOT_FOUND && ended->times == 1);
    }
}

void failing(Scene& scene) {
    // Beyond the blocks of the pool: nothing of it is copied, and that is said.
    std::vector<std::byte> before = scene.heap[0];
    std::byte* outside = scene.core->pool->base();
    for (uint64_t inline_bytes : {uint64_t{0}, uint64_t{1} << 30}) {
        auto part = make_direct_part(scene.core, CopyPlan(Way::out, {{outside, scene.heap[0].data(), 600'000}}, inline_bytes), {});
        CHECK(testing::run(*part) == NIXL_ERR_INVALID_PARAM);
        expect(scene.heap[0], before, "after a failure");
    }
}

} // namespace

int main() {
    testing::Folder folder;
    for (std::string coherence : {"native", "emulated:seed=11"}) {
        Scene scene(testing::new_pool(folder, coherence.substr(0, 4), coherence.c_str()));
        random_lists(scene, coherence == "native" ? 24 : 2);
        overlapping(scene);
        onto_itself(scene);
        cancelled(scene);
        deregistered(scene);
        failing(scene);
    }
}
