// SPDX-License-Identifier: Apache-2.0
//
// Memory runs out in the middle of what goes on over links: every transfer ends all the same, and nothing of it is left behind.
#include "support/no_memory.h"
#include "support/staged_engines.h"
#include <array>

using namespace staged_engines;

namespace {

constexpr size_t buffer_bytes = 600'000;
/// Further than the allocations of one transfer go.
constexpr long most_allocations = 600;

/// Everything that the engine does, this thread does, so that every allocation of it may be the one that fails.
LinksOptions without_thread() {
    LinksOptions options;
    options.thread = false;
    return options;
}

StagedOptions in_many_parts() {
    StagedOptions options;
    options.timeout_ms = PATIENCE_S * 2'000;
    return options;
}

/// Makes progress, whatever is thrown; true if nothing was.
bool makes_progress(Engine& engine) {
    try {
        engine.links->progress();
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

/// Transfers, at each of which another allocation fails of the one who asks, or of the one who answers.
void every_transfer_ends(Direction direction, bool fails_at_owner) {
    Engine user("user", in_many_parts(), without_thread()), owner("owner", in_many_parts(), without_thread());
    user.knows(owner);
    Heap near(buffer_bytes), far(buffer_bytes);
    uint64_t registration = owner.book.add(far);
    Heap& from = direction == Direction::read ? far : near;
    Heap& to = direction == Direction::read ? near : far;
    long failures = 0, unharmed = 0;
    for (long count = 0; count < most_allocations && unharmed < 20; ++count) {
        fill(from.bytes.data(), buffer_bytes, static_cast<uint64_t>(count));
        auto transfer = user.start(owner, direction, {near.memory}, {{near.address(), far.address(), buffer_bytes, registration}});
        long left = count;
        auto goes_on = [&] {
            CHECK(makes_progress(fails_at_owner ? user : owner));
            allocations_left = left;
            (void)makes_progress(fails_at_owner ? owner : user);
            left = std::exchange(allocations_left, -1);
        };
        CHECK(wait_until([&] { return transfer->status() != NIXL_IN_PROG; }, goes_on, 20 * SLOWER));
        bool is_harmed = left < 0;
        failures += transfer->status() != NIXL_SUCCESS;
        unharmed = is_harmed ? 0 : unharmed + 1;
        CHECK(is_harmed || transfer->status() == NIXL_SUCCESS);
        CHECK(transfer->status() != NIXL_SUCCESS || is_filled(to.bytes.data(), buffer_bytes, static_cast<uint64_t>(count)));
        CHECK(wait_until([&] { return user.staged->staging_used() + owner.staged->staging_used() == 0; },
                         [&] { CHECK(makes_progress(user) && makes_progress(owner)); }, 20 * SLOWER));
        // They are as good as before.
        auto next = user.start(owner, direction, {near.memory}, {{near.address(), far.address(), 1, registration}});
        auto is_well = [&] {
            if (next->status() < 0)
                next = user.start(owner, direction, {near.memory}, {{near.address(), far.address(), 1, registration}});
            return next->status() == NIXL_SUCCESS;
        };
        CHECK(wait_until(is_well, [&] { CHECK(makes_progress(user) && makes_progress(owner)); }, 20 * SLOWER));
    }
    std::printf("    %ld transfers failed\n", failures);
    CHECK(failures > 5 && unharmed == 20);
}

void reads_end_though_there_is_no_memory_to_ask() {
    every_transfer_ends(Direction::read, false);
}
void writes_end_though_there_is_no_memory_to_ask() {
    every_transfer_ends(Direction::write, false);
}
void reads_end_though_there_is_no_memory_to_answer() {
    every_transfer_ends(Direction::read, true);
}
void writes_end_though_there_is_no_memory_to_answer() {
    every_transfer_ends(Direction::write, true);
}

/// Transfers that wait for a link to be made, when memory runs out: none of them is forgotten.
void those_that_wait_for_a_link_end() {
    for (long count = 0; count < 60; ++count) {
        Engine owner("owner"), user("user", in_many_parts(), without_thread());
        user.knows(owner);
        Heap near(1'000), far(1'000);
        uint64_t registration = owner.book.add(far);
        std::vector<std::shared_ptr<Transfer>> transfers;
        for (int i = 0; i < 5; ++i)
            transfers.push_back(user.start(owner, Direction::write, {near.memory}, {{near.address(), far.address(), 1'000, registration}}));
        allocations_left = count;
        for (auto& transfer : transfers)
            CHECK(wait_until([&] { return transfer->status() != NIXL_IN_PROG; }, [&] { (void)makes_progress(user); }, 20 * SLOWER));
        allocations_left = -1;
    }
}

/// What was said to be on its way arrives whole, once and in order.
void notifications_arrive_whole() {
    Engine owner("owner"), user("user", {}, without_thread());
    user.knows(owner);
    std::vector<std::string> sent, got;
    auto gets = [&] {
        for (Notification& note : owner.links->take_notifications())
            got.push_back(std::move(note.text));
    };
    for (long count = 0; count < 60; ++count) {
        std::string text = std::to_string(count) + std::string(static_cast<size_t>(count % 3) * 60'000, 'x');
        sent.push_back(text);
        allocations_left = count % 30;
        try {
            if (!user.links->notify("owner", std::move(text)).ok())
                sent.pop_back();
        } catch (const std::bad_alloc&) {
            // It may have been handed in, or not.
            allocations_left = -1;
            CHECK(wait_until([&] { return !got.empty() && got.back() == sent.back(); }, [&] { (void)makes_progress(user), gets(); }, 0.2) ||
                  (sent.pop_back(), true));
        }
        for (int i = 0; i < 3; ++i)
            (void)makes_progress(user);
        allocations_left = -1;
        CHECK(wait_until([&] { return got.size() >= sent.size(); }, [&] { (void)makes_progress(user), gets(); }, 20 * SLOWER));
        CHECK(got == sent);
    }
}

/// Somebody who waits to borrow is told, and is told once.
void who_waits_to_borrow_is_told() {
    Engine owner("owner"), user("user", {}, without_thread());
    user.knows(owner);
    owner.links->on_borrow([](uint64_t) { return true; });
    for (long count = 0; count < 60; ++count) {
        std::vector<std::shared_ptr<Loan>> loans;
        for (uint64_t i = 0; i < 3; ++i)
            loans.push_back(std::make_shared<Loan>(user.links->access_to(owner.self.engine_id), static_cast<uint64_t>(count) * 3 + i + 1));
        auto told = std::make_shared<std::array<int, 4>>();
        size_t handed_in = 0;
        allocations_left = count;
        for (size_t i = 0; i < told->size(); ++i) {
            try {
                user.links->borrow(owner.self.engine_id, loans, PATIENCE_S * 2'000, [told, i](const Status&) { ++(*told)[i]; });
            } catch (const std::bad_alloc&) {
                // It may have been handed in, or not.
                continue;
            }
            ++handed_in;
            CHECK(wait_until([&] { return (*told)[i] > 0; }, [&] { (void)makes_progress(user); }, 20 * SLOWER));
        }
        allocations_left = -1;
        for (int i = 0; i < 10; ++i)
            CHECK(makes_progress(user));
        CHECK(handed_in >= told->size() - 1 && std::all_of(told->begin(), told->end(), [](int times) { return times <= 1; }));
    }
}

/// One of those who handed in work while somebody had the turn fails.
void what_is_handed_in_behind_a_failure_is_done() {
    Engine engine("engine", {}, without_thread());
    std::vector<int> done;
    engine.links->within_turn([&] {
        std::thread others([&] {
            for (int i = 0; i < 4; ++i) {
                engine.links->post([&done, i] {
                    if (i == 1)
                        throw std::bad_alloc();
                    done.push_back(i);
                });
            }
        });
        others.join();
    });
    bool was_run = false;
    engine.links->within_turn([&] { was_run = true; });
    CHECK(was_run && (done == std::vector<int>{0, 2, 3}));
}

const Test TESTS[] = {
    {"reads_end_though_there_is_no_memory_to_ask", reads_end_though_there_is_no_memory_to_ask},
    {"writes_end_though_there_is_no_memory_to_ask", writes_end_though_there_is_no_memory_to_ask},
    {"reads_end_though_there_is_no_memory_to_answer", reads_end_though_there_is_no_memory_to_answer},
    {"writes_end_though_there_is_no_memory_to_answer", writes_end_though_there_is_no_memory_to_answer},
    {"those_that_wait_for_a_link_end", those_that_wait_for_a_link_end},
    {"notifications_arrive_whole", notifications_arrive_whole},
    {"who_waits_to_borrow_is_told", who_waits_to_borrow_is_told},
    {"what_is_handed_in_behind_a_failure_is_done", what_is_handed_in_behind_a_failure_is_done},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
