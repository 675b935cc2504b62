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
            // More often, so that several parts are on their way.
            for (int i = 0; i < 3; ++i) {
                allocations_left = left;
                (void)makes_progress(fails_at_owner ? owner : user);
                left = std::exchange(allocations_left, -1);
            }
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

/// Many transfers that wait for links to two peers, when memory runs out as they are handed in or as the links come: none is forgotten.
void those_that_wait_for_links_end(bool fails_early) {
    for (long count = 0; count < 80; ++count) {
        // Before the engines: one may still serve a write whose transfer has failed.
        Heap near(100), at_one(100), at_other(100);
        Engine one("one"), other("other"), user("user", in_many_parts(), without_thread());
        std::vector<std::shared_ptr<const Plan>> plans;
        for (auto [owner, far] : {std::pair(&one, &at_one), std::pair(&other, &at_other)}) {
            user.knows(*owner);
            std::vector<Range> ranges = {{near.address(), far->address(), 100, owner->book.add(*far)}};
            CHECK_OK(Plan::make(owner->self.engine_id, {near.memory}, ranges, plans.emplace_back()));
        }
        std::vector<std::shared_ptr<Transfer>> begun(200);
        allocations_left = fails_early ? count : -1;
        for (size_t i = 0; i < begun.size(); ++i) {
            try {
                (void)user.staged->start(plans[i % 2], Direction::write, begun[i]);
            } catch (const std::bad_alloc&) {
                CHECK(!begun[i] || begun[i]->status() != NIXL_IN_PROG);
            }
        }
        // Long enough for both, as a rule, so that they are taken together.
        nap(2'000);
        allocations_left = fails_early ? -1 : count;
        for (const auto& transfer : begun)
            CHECK(!transfer ||
                  wait_until([&] { return transfer->status() != NIXL_IN_PROG; }, [&] { (void)makes_progress(user); }, 20 * SLOWER));
        allocations_left = -1;
        // No link is left over that no engine uses.
        auto has_few = [&] {
            size_t links = 0;
            user.links->within_turn([&] { links = user.links->link_count(); });
            return links <= 2;
        };
        CHECK(wait_until(has_few, [&] { CHECK(makes_progress(user)); }, 2));
    }
}

void those_that_wait_for_links_end_though_they_are_handed_in_without_memory() {
    those_that_wait_for_links_end(true);
}
void those_that_wait_for_links_end_though_these_come_without_memory() {
    those_that_wait_for_links_end(false);
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

/// A transfer that waits to borrow is told, and is told once.
void who_waits_to_borrow_is_told() {
    for (long count = 0; count < 100; ++count) {
        Engine owner("owner"), user("user", {}, without_thread());
        user.knows(owner);
        owner.links->set_hooks({.may_lend = [](uint64_t) { return true; }});
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

/// Work fails that was handed in while another thread had the turn.
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
    {"those_that_wait_for_links_end_though_they_are_handed_in_without_memory",
     those_that_wait_for_links_end_though_they_are_handed_in_without_memory},
    {"those_that_wait_for_links_end_though_these_come_without_memory", those_that_wait_for_links_end_though_these_come_without_memory},
    {"notifications_arrive_whole", notifications_arrive_whole},
    {"who_waits_to_borrow_is_told", who_waits_to_borrow_is_told},
    {"what_is_handed_in_behind_a_failure_is_done", what_is_handed_in_behind_a_failure_is_done},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
