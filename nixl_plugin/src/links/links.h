// SPDX-License-Identifier: Apache-2.0
//
// Connections of an engine to its peers over the pool's rings, the notifications that they carry, and the progress of all of it.
//
//     std::unique_ptr<Links> links;
//     Status status = Links::create(pool, {agent, engine_id}, options, links);      // listens; starts the progress thread
//     links->add_peer("decode-3", engine_id_of_decode_3);                           // no I/O: connected when it is first needed
//     links->notify("decode-3", "block 7 is there");                                // sent in the background, in order
//     for (auto& note : links->take_notifications()) use(note.agent, note.text);
//     links->progress();                                                            // from every call that polls
//
// Everything is done by the thread that has the *turn*: an application's, in progress(), or the engine's own, one at a time. A round of it
// never waits; it copies at most a staging block per peer. So no call here blocks for longer than a round, except where it says so.
//
// A peer is known by its engine id, which is made at random with every engine: an agent that was restarted is another peer, and its
// predecessor's connections die with it. docs/STAGED.md says what the messages are and why they are right.
#pragma once

#include "access.h"
#include "link.h"
#include "support/process.h"
#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace kvbm_cxl {

class Connector;
class Doorbell;

/// Who an engine is.
struct Identity {
    std::string agent;
    std::string engine_id; // ENGINE_ID_CHARS hexadecimal digits, random
};

struct LinksOptions {
    uint64_t spin_us = 200;            // how long the progress thread polls after the last activity before it sleeps
    uint64_t pause_us = 1'000;         // longest sleep while there are links to peers that cannot ring this engine's bell
    uint64_t rung_pause_us = 5'000;    // ... while all peers can
    uint64_t accept_pause_us = 20'000; // longest sleep while there are none
    uint64_t connect_timeout_ms = 5'000;
    uint64_t close_timeout_ms = 500;  // for the last messages to be received when the engine ends
    uint64_t note_bytes = 1ull << 30; // longest notification
    bool thread = true;               // without it only progress() makes progress
    bool doorbell = true;             // wake peers of this machine that sleep; without it they notice at the end of their pause
};

struct Notification {
    std::string agent;
    std::string text;
};

/// What links carry besides notifications. All its functions are called by the thread that has the turn.
class Service {
  public:
    virtual ~Service() = default;
    /// A link is there; the first thing sent over it arrives first.
    virtual void on_linked(Link& link) = 0;
    /// A message of a kind from Kind::first_service on. A failure breaks the link off.
    virtual Status on_message(Link& link, Bytes message) = 0;
    /// The link is closed: nothing arrives any more, and memory lent to the other end is free. Last call for this link.
    virtual void on_gone(Link& link, const Status& reason) = 0;
    /// This engine has nothing to do with a peer any more: what it has under way there fails.
    virtual void on_forgotten(const std::string& engine_id, const Status& reason) = 0;
    /// Does the due work; true if there was any.
    virtual bool work(uint64_t now_ns) = 0;
    /// Something is under way, so that the progress thread should not sleep for long.
    virtual bool is_busy() const = 0;
};

/// What links ask of the engine and notify it of, under the turn.
struct LinkHooks {
    /// Whether a registration of this engine may be lent. Nothing is lent without it.
    std::function<bool(uint64_t registration)> may_lend = {};
    /// Whether memory of an engine is in use: asked before a link is closed over which it was borrowed, until it is not.
    std::function<bool(const std::string& engine_id)> is_used = {};
    /// A peer revokes memory. Called until it returns true: nothing is under way there any more.
    std::function<bool(const std::string& engine_id, uint64_t registration)> revoke = {};
    /// Called about four times a second until the links end.
    std::function<void()> tick = {};
};

/// How things stand with a peer. `silent` = it could not be reached, or its link failed, and nothing proves that it has ended: it is tried
/// again whenever it is needed. `gone` = it has certainly ended.
enum class PeerState { unknown, idle, connecting, linked, silent, gone };

/// "nixl." and the engine id: the name under which an engine listens.
std::string ring_name(std::string_view engine_id);

/// Monotonic nanoseconds.
uint64_t now_ns();

class Links {
  public:
    /// Begins to listen. Fails if the pool has no room for the listener or its name.
    static Status create(std::shared_ptr<Pool> pool, Identity self, const LinksOptions& options, std::unique_ptr<Links>& links);
    /// shut_down()
    ~Links();
    Links(const Links&) = delete;
    Links& operator=(const Links&) = delete;

    const Identity& self() const { return self_; }
    const LinksOptions& options() const { return options_; }
    const std::shared_ptr<Pool>& pool() const { return pool_; }

    /// Makes a peer known, without I/O. Another engine id under a name that is known replaces the old one. `process` is looked for when
    /// the peer is silent.
    Status add_peer(const std::string& agent, const std::string& engine_id, const ProcessMark& process = {});
    /// Forgets a peer; what this engine has under way with it fails. Its own requests are still served.
    Status remove_peer(const std::string& agent);
    /// Engine id of an agent; empty if it is not known.
    std::string engine_of(const std::string& agent) const;
    /// Begins to connect to a peer, if it is not linked.
    Status connect(const std::string& agent);
    /// How things stand with the engine. `gone` and `silent` last until it is linked again.
    PeerState state_of(const std::string& engine_id) const;

    /// Sends a notification, in the order of calls. To oneself too. NIXL_ERR_NOT_FOUND for an agent that is not known,
    /// NIXL_ERR_REMOTE_DISCONNECT for one that is gone, NIXL_ERR_BACKEND for one that is silent. Success says that it is on its way.
    Status notify(const std::string& agent, std::string text);
    /// The same to that engine, never to one that has its agent's name since: NIXL_ERR_REMOTE_DISCONNECT then.
    Status notify_engine(const std::string& engine_id, const std::string& agent, std::string text);
    /// The notifications that have arrived, in the order of each peer.
    std::vector<Notification> take_notifications();

    /// The way to the memory of an engine that was added, for Loan; never linked if it was not.
    std::shared_ptr<Access> access_to(const std::string& engine_id) const;
    /// Borrows memory of an engine over the link to it, which is made if there is none. `done` is called once, under the turn: with success
    /// when all of it is lent, NIXL_ERR_NOT_FOUND if some of it is no registration there any more, NIXL_ERR_REMOTE_DISCONNECT if the engine
    /// has ended, NIXL_ERR_BACKEND if it cannot be reached, also after `timeout_ms`. It must not throw.
    void borrow(const std::string& engine_id, std::vector<std::shared_ptr<Loan>> loans, uint64_t timeout_ms,
                std::function<void(const Status&)> done);

    /// Asks every peer that a registration of this engine was lent to to let go of it, and waits for that, at most `timeout_ms`. Links to
    /// those that do not are closed then. It is also waited for those whose link has ended before, until they have closed it too or are
    /// known to be gone, but not for longer than `timeout_ms` from its end on. The agents that may still use it are added to `silent`.
    /// NIXL_IN_PROG if there are any; it may be called again for them.
    Status revoke(uint64_t registration, uint64_t timeout_ms, std::vector<std::string>& silent) {
        return revoke(registration, registration, timeout_ms, silent);
    }
    /// The same for all that was lent, in the same time.
    Status revoke_all(uint64_t timeout_ms, std::vector<std::string>& silent) { return revoke(0, UINT64_MAX, timeout_ms, silent); }

    /// Makes progress if no other thread does just now; true if something was done.
    bool progress();

    /// Runs `work` under the turn, after everything handed in before: at once, or by the thread that has the turn now. What it throws only
    /// the log learns of. An exception here is not one of the work, which may be done nevertheless.
    void post(std::function<void()> work);
    /// Runs `work` under the turn and returns when it ran: waits for the end of a round.
    void within_turn(const std::function<void()>& work);

    void set_hooks(LinkHooks hooks);
    /// For the service above. Set before anything is linked; it outlives the links that call it, or is reset within the turn.
    void set_service(Service* service);
    /// Within the turn: the link to an engine, or nullptr; then `failure` is NIXL_IN_PROG while it is being connected, else why it cannot
    /// be.
    Link* reach(const std::string& engine_id, Status& failure);
    /// Ends all links as the destructor does, and stops listening: no work continues afterwards. Waits for the last messages to be
    /// received, at most `close_timeout_ms`.
    void shut_down();
    /// Within the turn: the links there are.
    size_t link_count() const { return links_.size(); }

    /// Counters, for tests and statistics.
    struct Counts {
        std::atomic<uint64_t> rounds{0}, connected{0}, accepted{0}, gone{0}, notes_sent{0}, notes_received{0}, sleeps{0};
        /// Of the links that are gone, those that neither end closed in good order; peers that ended or could not be reached.
        std::atomic<uint64_t> lost{0}, peers_gone{0}, notes_resent{0};
    };
    const Counts& counts() const { return counts_; }

  private:
    struct Note;
    struct Peer;
    struct Borrowing;
    struct Doubt;
    struct Revocation;

    Links(std::shared_ptr<Pool> pool, Identity self, const LinksOptions& options);

    // Within the turn.
    bool turn();
    bool round(uint64_t now);
    bool run_posted();
    bool accept(uint64_t now);
    bool take_connected(uint64_t now);
    void take_link(Peer& to, cxl_ring_t ring, uint64_t now);
    bool poll(Link& link, uint64_t now);
    Status on_message(Link& link, Bytes message);
    Status on_hello(Link& link, Bytes message);
    Status on_note(Link& link, Kind kind, Bytes message);
    Status on_noted(Link& link, Bytes message);
    Status on_revoke_message(Link& link, Kind kind, Bytes message);
    void answer_revocations();
    Status revoke(uint64_t first, uint64_t last, uint64_t timeout_ms, std::vector<std::string>& silent);
    Status on_borrow_message(Link& link, Bytes message);
    Status on_lent_message(Link& link, Bytes message);
    void open_access(Peer& to);
    void serve_borrowing(Peer& to);
    void end_borrowing(Peer& to, const Status& status);
    void look_at_peers(uint64_t now);
    void doubt(Link& link);
    void answered(uint64_t link);
    Peer& peer(const std::string& engine_id, const std::string& agent);
    Link& adopt(cxl_ring_t ring, bool is_ours, uint64_t now);
    void greet(Link& link);
    void lose(Link& link, const Status& reason);
    void bury_lost();
    void bury(Link& link, const Status& reason);
    void wake_peers(uint64_t now);
    void erase_peer(const std::string& engine_id);
    void queue_note(const std::string& engine_id, std::list<Note>& made);
    void send_notes(Peer& peer);
    void deliver(const std::string& agent, std::string text);
    void forget(const std::string& engine_id, const char* reason);
    void set_state(const std::string& engine_id, PeerState state);
    bool has_ended(const std::string& engine_id) const;
    bool set_missed(Peer& of);
    void listen_again(uint64_t now);
    void drop_old_notes(Peer& of, uint64_t now);

    // The progress thread.
    void run();
    void run_until_stopped();

    std::shared_ptr<Pool> pool_;
    Identity self_;
    LinksOptions options_;
    Counts counts_;
    Service* service_ = nullptr;
    LinkHooks hooks_;
    cxl_ring_t listener_ = CXL_SHM_RING_NONE;
    std::unique_ptr<Connector> connector_;
    std::unique_ptr<Doorbell> doorbell_;

    /// Held by the thread that has the turn. `waiting_` are those who must get it next.
    std::mutex turn_;
    std::atomic<int> waiting_{0};
    std::atomic<uint64_t> application_ns_{0}, driven_ns_{0};
    std::atomic<int> calls_{0}; // of progress(), now
    std::atomic<bool> has_links_{false}, are_rung_{false}, is_busy_{false}, must_accept_{true};

    std::mutex posted_mutex_;
    std::vector<std::function<void()>> posted_;
    std::atomic<bool> has_posted_{false}, has_connected_{false};

    // Under the turn.
    std::vector<std::unique_ptr<Link>> links_;
    std::unordered_map<std::string, std::unique_ptr<Peer>> peers_;
    /// Of engines that are no peers just now: the last notification that was received.
    std::unordered_map<std::string, uint64_t> heard_;
    std::vector<std::pair<Link*, Status>> lost_;
    std::set<std::shared_ptr<Revocation>> revocations_; // asked of peers
    struct Revoking {
        uint64_t link, ticket, registration;
    };
    std::deque<Revoking> revoking_;    // asked of us
    std::map<uint64_t, Doubt> doubts_; // by number of the link
    uint64_t next_link_ = 1, next_ticket_ = 1, next_note_ = 1, accept_ns_ = 0, listen_ns_ = 0, tick_ns_ = 0, look_ns_ = 0;
    std::vector<std::byte> room_; // for the message that is being received

    mutable std::mutex directory_mutex_;
    std::map<std::string, std::string> engines_;                        // agent -> engine id
    std::unordered_map<std::string, PeerState> states_;                 // engine id -> how it stands
    std::unordered_map<std::string, std::shared_ptr<Access>> accesses_; // engine id -> the way to its memory

    std::mutex notes_mutex_;
    std::vector<Notification> notes_;
    std::atomic<bool> has_notes_{false};

    std::atomic<bool> stop_{false};
    bool is_shut_ = false;
    std::thread thread_;
};

} // namespace kvbm_cxl
