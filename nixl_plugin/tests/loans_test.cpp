// SPDX-License-Identifier: Apache-2.0
//
// Memory that one engine lends to another, and how links end: engines of one process, each with its own listener, thread and connections.
#include "support/world.h"
#include <dlfcn.h>

namespace {
std::atomic<bool> refuses_threads{false};
} // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/// The system's, unless threads are refused.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
    static auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    return refuses_threads ? EAGAIN : real(thread, how, run, with);
}
constexpr bool can_refuse_threads = true;
#else
constexpr bool can_refuse_threads = false;
#endif

using namespace world;

namespace {

struct Engine {
    Identity self;
    std::unique_ptr<Links> links;
    std::atomic<bool> is_used{false}, lends{true};

    explicit Engine(const std::string& agent, LinksOptions options = {}) : self{agent, random_engine_id()} {
        CHECK_OK(Links::create(pool, self, options, links));
        links->set_hooks({.may_lend = [this](uint64_t registration) { return lends && registration < 100; },
                          .is_used = [this](const std::string&) { return is_used.load(); },
                          .revoke = [this](const std::string&, uint64_t) { return !is_used; }});
    }
    void knows(const Engine& other) { CHECK_OK(links->add_peer(other.self.agent, other.self.engine_id)); }
    PeerState state_of(const Engine& other) const { return links->state_of(other.self.engine_id); }
    std::shared_ptr<Loan> loan_of(const Engine& owner, uint64_t registration) const {
        return std::make_shared<Loan>(links->access_to(owner.self.engine_id), registration);
    }
    /// Borrows, whatever comes of it.
    nixl_status_t borrow(const Engine& owner, const std::vector<std::shared_ptr<Loan>>& loans, uint64_t timeout_ms = PATIENCE_S * 1'000) {
        std::atomic<int> outcome{NIXL_IN_PROG};
        links->borrow(owner.self.engine_id, loans, timeout_ms, [&](const Status& status) { outcome = status.code(); });
        CHECK(wait_until([&] { return outcome != NIXL_IN_PROG; }, [&] { links->progress(); }));
        return static_cast<nixl_status_t>(outcome.load());
    }
    nixl_status_t revoke(uint64_t registration, uint64_t timeout_ms, const std::vector<std::string>& wanted) {
        std::vector<std::string> silent;
        Status status = links->revoke(registration, timeout_ms, silent);
        CHECK(silent == wanted && status.ok() == silent.empty());
        return status.code();
    }
    void await_note(const std::string& wanted) {
        std::vector<Notification> got;
        CHECK(wait_until([&] { return !(got = links->take_notifications()).empty(); }, [] { nap(); }));
        CHECK(got.size() == 1 && got[0].text == wanted);
    }
};

void memory_is_lent_over_the_link_that_there_is() {
    Engine owner("owner"), user("user");
    user.knows(owner);
    auto first = user.loan_of(owner, 1), second = user.loan_of(owner, 2), none = user.loan_of(owner, 100);
    CHECK(first->begin() == 0 && first->access == second->access);
    CHECK(user.borrow(owner, {first, second}) == NIXL_SUCCESS);
    uint64_t link = first->begin();
    CHECK(link != 0 && second->begin() == link && first->access->is_good(link) && !first->access->is_good(link + 1));
    CHECK(user.borrow(owner, {first, none}) == NIXL_ERR_NOT_FOUND && none->begin() == 0);
    CHECK(owner.revoke(1, PATIENCE_S * 1'000, {}) == NIXL_SUCCESS);
    // An engine that is not there, and one that this one has no longer to do with.
    Engine stranger("stranger");
    CHECK(user.borrow(stranger, {first}) == NIXL_ERR_REMOTE_DISCONNECT);
    std::string unused = random_engine_id();
    CHECK_OK(user.links->add_peer("unused", unused));
    stranger.self.engine_id = unused;
    CHECK(user.borrow(stranger, {first}) == NIXL_ERR_REMOTE_DISCONNECT);
    CHECK_OK(user.links->remove_peer("owner"));
    CHECK(wait_until([&] { return first->begin() == 0; }, [] { nap(); }) && !first->access->is_good(link));
    // Over the next link it has to be borrowed anew.
    user.knows(owner);
    auto again = user.loan_of(owner, 2);
    CHECK(again->begin() == 0 && user.borrow(owner, {again, second}) == NIXL_SUCCESS && again->begin() != 0 && second->begin() == 0);
}

/// Links to those who do not let go are closed; who lives closes its end too, when it uses nothing any more.
void a_revocation_waits_for_those_who_borrowed() {
    Engine owner("owner"), slow("slow"), quick("quick");
    for (Engine* user : {&slow, &quick}) {
        user->knows(owner);
        CHECK(user->borrow(owner, {user->loan_of(owner, 1)}) == NIXL_SUCCESS);
        CHECK(user->borrow(owner, {user->loan_of(owner, user == &slow ? 2 : 3)}) == NIXL_SUCCESS);
    }
    slow.is_used = true;
    CHECK(owner.revoke(1, 100, {"slow"}) == NIXL_IN_PROG);
    CHECK(owner.revoke(1, 100, {"slow"}) == NIXL_IN_PROG);
    // What it did not borrow is not its business.
    CHECK(owner.revoke(3, 100, {}) == NIXL_SUCCESS && owner.revoke(4, 100, {}) == NIXL_SUCCESS);
    // It was given up longer ago than that: the owner does not wait for it again.
    usleep(600'000);
    uint64_t since = now_ns();
    CHECK(owner.revoke(2, 100, {"slow"}) == NIXL_IN_PROG && now_ns() - since < 100'000'000 * SLOWER);
    slow.is_used = false;
    CHECK(wait_until([&] { return owner.links->counts().gone == 1 && slow.links->counts().gone == 1; }, [] { nap(); }));
    CHECK(wait_until(
        [&] {
            std::vector<std::string> silent;
            return owner.links->revoke(1, 100, silent).ok();
        },
        [] { nap(); }));
    CHECK(owner.revoke(2, 100, {}) == NIXL_SUCCESS);
    // The other one has noticed nothing.
    auto loan = quick.loan_of(owner, 5);
    CHECK(quick.borrow(owner, {loan}) == NIXL_SUCCESS && quick.links->counts().gone == 0);
}

/// All that was lent is asked for at once, and waited for together.
void everything_is_given_back_in_the_time_of_one() {
    Engine owner("owner"), slow("slow"), quick("quick");
    for (Engine* user : {&slow, &quick}) {
        user->knows(owner);
        std::vector<std::shared_ptr<Loan>> loans;
        for (uint64_t registration = 1; registration < 60; ++registration)
            loans.push_back(user->loan_of(owner, registration));
        CHECK(user->borrow(owner, loans) == NIXL_SUCCESS);
    }
    owner.lends = false;
    slow.is_used = true;
    std::vector<std::string> silent;
    uint64_t since = now_ns();
    CHECK(owner.links->revoke_all(100, silent).code() == NIXL_IN_PROG && silent == std::vector<std::string>{"slow"});
    CHECK(now_ns() - since < 1'500'000'000ull * SLOWER);
    CHECK(owner.revoke(1, 100, {"slow"}) == NIXL_IN_PROG && owner.revoke(59, 100, {"slow"}) == NIXL_IN_PROG);
    slow.is_used = false;
    CHECK(wait_until([&] { return owner.links->revoke_all(100, silent).ok(); }, [] { nap(); }));
    CHECK(owner.revoke(1, 100, {}) == NIXL_SUCCESS && quick.links->counts().gone == 0);
}

/// A copy that does not end, as one by a device: the end of its engine is no word that it has.
void an_engine_that_ends_in_the_middle_of_a_copy_has_not_let_go() {
    Engine owner("owner"), user("user");
    user.knows(owner);
    CHECK(user.borrow(owner, {user.loan_of(owner, 1)}) == NIXL_SUCCESS);
    user.is_used = true;
    user.links->shut_down();
    CHECK(owner.revoke(1, 100, {"user"}) == NIXL_IN_PROG && owner.revoke(1, 100, {"user"}) == NIXL_IN_PROG);
}

/// Who has nothing to do with a peer any more, but copies there still, keeps the link: the peer may ask for its memory.
void a_link_stays_as_long_as_memory_is_used_over_it() {
    Engine owner("owner"), user("user");
    user.knows(owner);
    auto loan = user.loan_of(owner, 1);
    CHECK(user.borrow(owner, {loan}) == NIXL_SUCCESS);
    user.is_used = true;
    CHECK_OK(user.links->remove_peer("owner"));
    user.links->within_turn([] {});
    CHECK(loan->begin() == 0);
    std::atomic<bool> is_back{false};
    std::thread revokes([&] {
        std::vector<std::string> silent;
        CHECK_OK(owner.links->revoke(1, PATIENCE_S * 1'000, silent));
        is_back = true;
    });
    usleep(100'000);
    CHECK(!is_back && user.links->counts().gone == 0);
    user.is_used = false;
    revokes.join();
    CHECK(owner.links->counts().lost == 0);
}

/// One end has nothing to do with the other any more, the other has.
void a_close_in_good_order_is_not_the_end_of_a_peer() {
    Engine a("a"), b("b");
    a.knows(b);
    b.knows(a);
    CHECK_OK(a.links->connect("b"));
    CHECK(wait_until([&] { return a.state_of(b) == PeerState::linked && b.state_of(a) == PeerState::linked; }, [] { nap(); }));
    CHECK_OK(b.links->remove_peer("a"));
    CHECK(wait_until([&] { return a.links->counts().gone == 1; }, [] { nap(); }));
    CHECK(wait_until([&] { return a.state_of(b) == PeerState::linked && a.links->counts().connected == 2; },
                     [&] { CHECK(a.state_of(b) != PeerState::gone); }));
    CHECK(a.links->counts().peers_gone == 0);
    // Who uses a link keeps it.
    CHECK(a.borrow(b, {a.loan_of(b, 1)}) == NIXL_SUCCESS);
    b.knows(a);
    CHECK_OK(b.links->remove_peer("a"));
    b.links->within_turn([] {});
    CHECK_OK(a.links->notify("b", "still here"));
    b.await_note("still here");
    CHECK(a.links->counts().gone == 1);
}

/// A peer is forgotten and known again before a round of the links.
void a_peer_that_is_loaded_again_is_not_gone() {
    Engine a("a"), b("b");
    a.knows(b);
    for (int round = 0; round < 5; ++round) {
        CHECK_OK(a.links->notify("b", "before"));
        b.await_note("before");
        std::atomic<bool> is_held{false}, is_done{false};
        std::thread holds([&] {
            a.links->within_turn([&] {
                is_held = true;
                CHECK(wait_until([&] { return is_done.load(); }, [] { nap(); }));
            });
        });
        CHECK(wait_until([&] { return is_held.load(); }, [] { nap(); }));
        CHECK_OK(a.links->remove_peer("b"));
        a.knows(b);
        is_done = true;
        holds.join();
        // Both ends have closed it.
        CHECK(wait_until([&] { return a.links->counts().gone == round + 1ull; }, [] { nap(); }));
        CHECK(a.state_of(b) != PeerState::gone && a.links->counts().peers_gone == 0);
    }
}

void an_engine_may_end_while_it_connects_and_others_make_progress() {
    for (int round = 0; round < 24; ++round) {
        Engine b("b");
        auto a = std::make_unique<Engine>("a");
        a->knows(b);
        std::atomic<bool> stop{false};
        std::thread polls([&, links = a->links.get()] {
            while (!stop)
                links->progress();
        });
        CHECK_OK(a->links->notify("b", "on its way"));
        usleep(static_cast<useconds_t>(round % 8 * 150));
        a->links->shut_down();
        stop = true;
        polls.join();
    }
}

void a_connection_that_no_thread_could_be_started_for_is_made_later() {
    if (!can_refuse_threads)
        return;
    Engine a("a"), b("b");
    a.knows(b);
    refuses_threads = true;
    CHECK_OK(a.links->notify("b", "kept"));
    CHECK(wait_until([&] { return a.state_of(b) == PeerState::silent; }, [&] { a.links->progress(); }));
    CHECK(a.links->notify("b", "refused").code() == NIXL_ERR_BACKEND);
    refuses_threads = false;
    b.await_note("kept");
    CHECK(wait_until([&] { return a.links->notify("b", "there").ok(); }, [] { nap(60'000); }));
    b.await_note("there");
}

const Test TESTS[] = {
    {"memory_is_lent_over_the_link_that_there_is", memory_is_lent_over_the_link_that_there_is},
    {"a_revocation_waits_for_those_who_borrowed", a_revocation_waits_for_those_who_borrowed},
    {"everything_is_given_back_in_the_time_of_one", everything_is_given_back_in_the_time_of_one},
    {"an_engine_that_ends_in_the_middle_of_a_copy_has_not_let_go", an_engine_that_ends_in_the_middle_of_a_copy_has_not_let_go},
    {"a_link_stays_as_long_as_memory_is_used_over_it", a_link_stays_as_long_as_memory_is_used_over_it},
    {"a_close_in_good_order_is_not_the_end_of_a_peer", a_close_in_good_order_is_not_the_end_of_a_peer},
    {"a_peer_that_is_loaded_again_is_not_gone", a_peer_that_is_loaded_again_is_not_gone},
    {"an_engine_may_end_while_it_connects_and_others_make_progress", an_engine_may_end_while_it_connects_and_others_make_progress},
    {"a_connection_that_no_thread_could_be_started_for_is_made_later", a_connection_that_no_thread_could_be_started_for_is_made_later},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
