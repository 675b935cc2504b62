// SPDX-License-Identifier: Apache-2.0
//
// Links between engines of one process: each has its own listener, thread and connections, as in processes of one host.
#include "support/world.h"

using namespace world;

namespace {

struct Engine {
    Identity self;
    std::unique_ptr<Links> links;
    std::vector<Notification> got;

    explicit Engine(const std::string& agent, LinksOptions options = {}) : self{agent, random_engine_id()} {
        CHECK_OK(Links::create(pool, self, options, links));
    }
    void knows(const Engine& other) { CHECK_OK(links->add_peer(other.self.agent, other.self.engine_id)); }
    void take() {
        for (auto& note : links->take_notifications())
            got.push_back(std::move(note));
    }
    /// Waits for so many notifications.
    void await(size_t count, std::initializer_list<Engine*> others = {}) {
        bool ok = wait_until([&] { return got.size() >= count; },
                             [&] {
                                 take();
                                 for (Engine* other : others)
                                     other->links->progress();
                             });
        if (!ok)
            std::fprintf(stderr, "%s: %zu notifications of %zu\n", self.agent.c_str(), got.size(), count);
        CHECK(ok);
    }
    void await_state(const std::string& engine_id, PeerState state, Engine* other = nullptr) {
        CHECK(wait_until([&] { return links->state_of(engine_id) == state; },
                         [&] {
                             links->progress();
                             if (other)
                                 other->links->progress();
                         }));
    }
};

std::string note_of(uint64_t number, size_t len_bytes) {
    std::string text(len_bytes, 0);
    for (size_t i = 0; i < len_bytes; ++i)
        text[i] = static_cast<char>(byte_of(number, i));
    return text;
}

/// Lengths around everything that is special: none, one line, one message, several.
const size_t LENGTHS[] = {0, 1, 39, 40, 48, 100, 24'510, 24'511, 24'512, 24'528, 60'000, 300'000};

void notifications_of_every_length_arrive_in_order_both_ways() {
    for (bool with_thread : {true, false}) {
        LinksOptions options;
        options.thread = with_thread;
        Engine a("a", options), b("b", options);
        a.knows(b);
        b.knows(a);
        constexpr size_t ROUNDS = 3;
        uint64_t number = 0;
        for (size_t round = 0; round < ROUNDS; ++round)
            for (size_t len_bytes : LENGTHS) {
                CHECK_OK(a.links->notify("b", note_of(number, len_bytes)));
                CHECK_OK(b.links->notify("a", note_of(number + 1'000, len_bytes)));
                number += 1;
            }
        a.await(number, {&b});
        b.await(number, {&a});
        for (uint64_t i = 0; i < number; ++i) {
            size_t len_bytes = LENGTHS[i % std::size(LENGTHS)];
            CHECK(b.got[i].agent == "a" && b.got[i].text == note_of(i, len_bytes));
            CHECK(a.got[i].agent == "b" && a.got[i].text == note_of(i + 1'000, len_bytes));
        }
    }
}

void one_connection_carries_both_directions() {
    Engine a("a"), b("b");
    a.knows(b);
    CHECK_OK(a.links->notify("b", "to"));
    b.await(1, {&a});
    b.knows(a);
    CHECK_OK(b.links->notify("a", "fro"));
    a.await(1, {&b});
    CHECK(a.links->counts().connected == 1 && a.links->counts().accepted == 0);
    CHECK(b.links->counts().connected == 0 && b.links->counts().accepted == 1);
}

void a_notification_to_oneself_arrives() {
    Engine a("a");
    CHECK_OK(a.links->notify("a", "memo"));
    CHECK_OK(a.links->notify("a", ""));
    a.await(2);
    CHECK(a.got[0].agent == "a" && a.got[0].text == "memo" && a.got[1].text.empty());
}

void what_cannot_be_is_refused() {
    LinksOptions options;
    options.note_bytes = 1'000;
    Engine a("a", options), b("b", options);
    CHECK(a.links->notify("unknown", "?").code() == NIXL_ERR_NOT_FOUND);
    CHECK(a.links->connect("unknown").code() == NIXL_ERR_NOT_FOUND);
    CHECK(a.links->remove_peer("unknown").code() == NIXL_ERR_NOT_FOUND);
    CHECK(a.links->add_peer("b", "short").code() == NIXL_ERR_INVALID_PARAM);
    a.knows(b);
    CHECK(a.links->notify("b", std::string(1'001, 'x')).code() == NIXL_ERR_INVALID_PARAM);
    std::unique_ptr<Links> links;
    CHECK(Links::create(pool, {"c", "short"}, options, links).code() == NIXL_ERR_INVALID_PARAM);
    // An engine that never was.
    std::string stranger = random_engine_id();
    CHECK_OK(a.links->add_peer("stranger", stranger));
    CHECK_OK(a.links->notify("stranger", "?"));
    a.await_state(stranger, PeerState::gone);
    CHECK(a.links->notify("stranger", "?").code() == NIXL_ERR_REMOTE_DISCONNECT);
    // The others do not mind.
    CHECK_OK(a.links->notify("b", "still here"));
    b.await(1, {&a});
}

void two_that_connect_at_the_same_moment_both_get_through() {
    for (int round = 0; round < 10; ++round) {
        Engine a("a"), b("b");
        a.knows(b);
        b.knows(a);
        CHECK_OK(a.links->connect("b"));
        CHECK_OK(b.links->connect("a"));
        for (int i = 0; i < 20; ++i) {
            CHECK_OK(a.links->notify("b", note_of(i, 100)));
            CHECK_OK(b.links->notify("a", note_of(100 + i, 100)));
        }
        a.await(20, {&b});
        b.await(20, {&a});
        for (int i = 0; i < 20; ++i)
            CHECK(b.got[i].text == note_of(i, 100) && a.got[i].text == note_of(100 + i, 100));
    }
}

void an_agent_restarted_under_its_name_replaces_the_old_one() {
    Engine a("a");
    std::string last;
    for (int round = 0; round < 5; ++round) {
        Engine b("b");
        a.knows(b);
        CHECK(a.links->engine_of("b") == b.self.engine_id && a.links->state_of(last) == PeerState::unknown);
        last = b.self.engine_id;
        std::string text = note_of(round, 50);
        CHECK_OK(a.links->notify("b", text));
        b.await(1, {&a});
        CHECK(b.got[0].text == text);
        b.knows(a);
        CHECK_OK(b.links->notify("a", text));
        a.await(round + 1);
        CHECK(a.got.back().agent == "b" && a.got.back().text == text);
        if (round % 2 == 0)
            CHECK_OK(a.links->remove_peer("b"));
    }
}

/// A peer that forgets this engine and comes back closes a link on which things were just sent: they are sent again, each arrives once.
void nothing_is_lost_or_doubled_by_a_link_that_the_other_end_gave_up() {
    LinksOptions options;
    options.thread = false;
    Engine a("a", options), b("b", options);
    a.knows(b);
    b.knows(a);
    CHECK_OK(b.links->notify("a", "b is there"));
    a.await(1, {&b});
    for (int round = 0; round < 20; ++round) {
        // The link is b's, and a has asked for nothing over it, so b closes it; a has not looked yet when it sends.
        CHECK_OK(b.links->remove_peer("a"));
        std::vector<std::string> sent;
        for (int i = 0; i <= round; ++i)
            CHECK_OK(a.links->notify("b", sent.emplace_back(note_of(100 * round + i, 1 + 3'000 * i))));
        b.knows(a);
        b.await(sent.size(), {&a});
        for (size_t i = 0; i < sent.size(); ++i)
            CHECK(b.got[i].agent == "a" && b.got[i].text == sent[i]);
        b.got.clear();
        a.got.clear();
        CHECK_OK(b.links->notify("a", "again"));
        a.await(1, {&b});
        for (int i = 0; i < 100; ++i) {
            a.take();
            b.take();
        }
        CHECK(a.got.size() == 1 && b.got.empty());
    }
}

/// Breaks off the link that anything but a notification arrives on.
struct Refuser : Service {
    void on_linked(Link&) override {}
    Status on_message(Link&, Bytes) override { return {NIXL_ERR_MISMATCH, "CXL: refused by the test"}; }
    void on_gone(Link&, const Status&) override {}
    void on_forgotten(const std::string&, const Status&) override {}
    bool work(uint64_t) override { return false; }
    bool is_busy() const override { return false; }
};

/// Returns when `from` has read everything that `peer` has sent it, of which the answer to who wants to borrow is the last.
void settle(Engine& from, Engine& peer) {
    bool is_answered = false;
    auto loan = std::make_shared<Loan>(from.links->access_to(peer.self.engine_id), 1);
    from.links->borrow(peer.self.engine_id, {loan}, PATIENCE_S * 1'000, [&](const Status& status) {
        CHECK(status.code() == NIXL_ERR_NOT_FOUND);
        is_answered = true;
    });
    CHECK(wait_until([&] { return is_answered; },
                     [&] {
                         peer.links->progress();
                         from.links->progress();
                     }));
}

/// Sends something that `peer` refuses, and has it end the link for that.
void end_link(Engine& from, Engine& peer) {
    uint64_t gone = peer.links->counts().gone;
    from.links->within_turn([&] {
        Status failure;
        Link* link = from.links->reach(peer.self.engine_id, failure);
        CHECK(link);
        link->send(Writer(Kind::first_service).take());
    });
    CHECK(wait_until([&] { return peer.links->counts().gone > gone; }, [&] { peer.links->progress(); }));
}

/// A receiver that has notifications and loses the link before it could say so gets them once more over the next link, and leaves them out:
/// if the sender is a peer of its application, and if all that it knew of the sender went with the link.
void what_comes_again_over_the_next_link_is_left_out() {
    LinksOptions options;
    options.thread = false;
    for (bool is_mutual : {true, false}) {
        Refuser refuser;
        Engine a("a", options), b("b", options);
        a.knows(b);
        if (is_mutual)
            b.knows(a);
        b.links->set_service(&refuser);
        CHECK_OK(a.links->notify("b", "hello"));
        b.await(1, {&a});
        for (uint64_t round = 0; round < 3; ++round) {
            settle(a, b);
            b.got.clear();
            uint64_t resent = a.links->counts().notes_resent;
            std::vector<std::string> sent;
            for (uint64_t i = 0; i < 3; ++i)
                CHECK_OK(a.links->notify("b", sent.emplace_back(note_of(10 * round + i, 1 + 13'000 * i))));
            // All of it in one round of b, so that what ends the link is there before b says what it has.
            end_link(a, b);
            b.take();
            CHECK(b.got.size() == sent.size());
            CHECK(wait_until([&] { return a.links->counts().notes_resent > resent; }, [&] { a.links->progress(); }));
            CHECK(a.links->counts().notes_resent == resent + sent.size());
            if (round == 1) {
                // That it has them was said as well, although they were left out: they are not sent a third time.
                a.await_state(b.self.engine_id, PeerState::linked, &b);
                settle(a, b);
                uint64_t gone = a.links->counts().gone;
                end_link(a, b);
                CHECK(wait_until([&] { return a.links->counts().gone > gone; }, [&] { a.links->progress(); }));
                CHECK(a.links->counts().notes_resent == resent + sent.size());
                CHECK_OK(a.links->connect("b"));
                a.await_state(b.self.engine_id, PeerState::linked, &b);
            }
            // Behind the repeated ones, which would have been delivered by then.
            CHECK_OK(a.links->notify("b", sent.emplace_back(note_of(10 * round + 9, 40))));
            b.await(sent.size(), {&a});
            CHECK(b.got.size() == sent.size());
            for (size_t i = 0; i < sent.size(); ++i)
                CHECK(b.got[i].agent == "a" && b.got[i].text == sent[i]);
        }
    }
}

void what_was_sent_last_is_received_though_the_sender_ends() {
    Engine b("b");
    {
        Engine a("a");
        a.knows(b);
        CHECK_OK(a.links->notify("b", "early"));
        b.await(1, {&a});
        for (int i = 0; i < 30; ++i)
            CHECK_OK(a.links->notify("b", note_of(i, 20'000)));
    }
    b.await(31);
    for (int i = 0; i < 30; ++i)
        CHECK(b.got[i + 1].text == note_of(i, 20'000));
}

void a_peer_that_ends_is_noticed_and_the_others_go_on() {
    Engine a("a"), c("c");
    a.knows(c);
    std::string gone;
    {
        Engine b("b");
        a.knows(b);
        gone = b.self.engine_id;
        CHECK_OK(a.links->notify("b", "hello"));
        b.await(1, {&a});
    }
    a.await_state(gone, PeerState::gone);
    // Its thread says how the peer stands before it counts the link that ended.
    CHECK(wait_until([&] { return a.links->counts().gone > 0; }, [&] { a.links->progress(); }));
    CHECK(a.links->counts().gone == 1);
    CHECK(a.links->notify("b", "?").code() == NIXL_ERR_REMOTE_DISCONNECT);
    CHECK_OK(a.links->notify("c", "hello"));
    c.await(1, {&a});
}

void calls_of_many_threads_are_served() {
    Engine a("a"), b("b");
    a.knows(b);
    constexpr int THREADS = 4, NOTES = 200;
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; ++t)
        threads.emplace_back([&, t] {
            for (int i = 0; i < NOTES; ++i) {
                CHECK_OK(a.links->notify("b", std::to_string(t) + ":" + std::to_string(i)));
                if (i % 16 == 0)
                    a.links->within_turn([] {});
            }
        });
    b.await(THREADS * NOTES, {&a});
    for (auto& thread : threads)
        thread.join();
    int next[THREADS] = {};
    for (auto& note : b.got) {
        int t = note.text[0] - '0';
        CHECK(note.text == std::to_string(t) + ":" + std::to_string(next[t]++));
    }
}

void no_thread_polls_for_ever() {
    constexpr double SECONDS = 1.5;
    auto idle_cores = [] {
        usleep(100'000);
        double since = cpu_s();
        usleep(static_cast<useconds_t>(SECONDS * 1e6));
        return (cpu_s() - since) / SECONDS;
    };
    double without = idle_cores();
    Engine a("a");
    double alone = idle_cores();
    Engine b("b");
    a.knows(b);
    CHECK_OK(a.links->notify("b", "hello"));
    b.await(1, {&a});
    double linked = idle_cores();
    std::printf("    cores used: pool alone %.4f, one engine %.4f, two linked engines %.4f\n", without, alone, linked);
    // Sanitizers make everything slower several times.
    CHECK(alone - without < 0.02 && linked - without < 0.10);
}

void a_sleeping_peer_is_woken() {
    Engine a("a"), b("b");
    a.knows(b);
    CHECK_OK(a.links->notify("b", "hello"));
    b.await(1, {&a});
    std::vector<uint64_t> took;
    for (int i = 0; i < 50; ++i) {
        usleep(20'000);
        uint64_t before = b.links->counts().notes_received, since = now_ns();
        CHECK_OK(a.links->notify("b", "wake"));
        CHECK(wait_until([&] { return b.links->counts().notes_received > before; }, [] {}));
        took.push_back(now_ns() - since);
    }
    std::sort(took.begin(), took.end());
    std::printf("    to a sleeping peer: median %.0f us, worst %.0f us\n", static_cast<double>(took[25]) / 1e3,
                static_cast<double>(took.back()) / 1e3);
    CHECK(took[25] < 5'000'000);
}

const Test TESTS[] = {
    {"notifications_of_every_length_arrive_in_order_both_ways", notifications_of_every_length_arrive_in_order_both_ways},
    {"one_connection_carries_both_directions", one_connection_carries_both_directions},
    {"a_notification_to_oneself_arrives", a_notification_to_oneself_arrives},
    {"what_cannot_be_is_refused", what_cannot_be_is_refused},
    {"two_that_connect_at_the_same_moment_both_get_through", two_that_connect_at_the_same_moment_both_get_through},
    {"an_agent_restarted_under_its_name_replaces_the_old_one", an_agent_restarted_under_its_name_replaces_the_old_one},
    {"nothing_is_lost_or_doubled_by_a_link_that_the_other_end_gave_up", nothing_is_lost_or_doubled_by_a_link_that_the_other_end_gave_up},
    {"what_comes_again_over_the_next_link_is_left_out", what_comes_again_over_the_next_link_is_left_out},
    {"what_was_sent_last_is_received_though_the_sender_ends", what_was_sent_last_is_received_though_the_sender_ends},
    {"a_peer_that_ends_is_noticed_and_the_others_go_on", a_peer_that_ends_is_noticed_and_the_others_go_on},
    {"calls_of_many_threads_are_served", calls_of_many_threads_are_served},
    {"no_thread_polls_for_ever", no_thread_polls_for_ever},
    {"a_sleeping_peer_is_woken", a_sleeping_peer_is_woken},
};

} // namespace

int main(int argc, char** argv) {
    return run_on_a_pool(TESTS, argc, argv);
}
