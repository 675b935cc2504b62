// SPDX-License-Identifier: Apache-2.0
#include "links.h"
#include "connector.h"
#include "doorbell.h"
#include "peers.h"
#include "support/log.h"
#include <algorithm>
#include <chrono>
#include <pthread.h>
#include <utility>

namespace kvbm_cxl {

namespace {
/// How often connections are looked for while no peer rings, in nanoseconds.
constexpr uint64_t ACCEPT_NS = 5'000'000;
/// How often an engine that lost its name tries to listen under it again.
constexpr uint64_t LISTEN_NS = 1'000'000'000;
/// How long a connection may stay without saying whose it is.
constexpr uint64_t HELLO_NS = 5'000'000'000;
/// How long a failure to connect is the answer to who wants to be connected; then it is tried again.
constexpr uint64_t RETRY_NS = 50'000'000;
/// A link that was silent for QUIET_NS is looked at every QUIET_POLL_NS only.
constexpr uint64_t QUIET_NS = 1'000'000, QUIET_POLL_NS = 5'000;
/// The first sleep after something happened; each further one is twice as long.
constexpr uint64_t FIRST_PAUSE_US = 40;
/// Longest sleep while something is under way.
constexpr uint64_t BUSY_PAUSE_US = 100;
/// How long an answer may take before the peer is woken.
constexpr uint64_t RING_NS = 30'000;
/// An application that calls twice within POLLING_NS polls, and keeps polling for DRIVEN_NS, as far as the progress thread is concerned.
constexpr uint64_t POLLING_NS = 20'000, DRIVEN_NS = 50'000;
/// Longest sleep while an application polls and something is under way: it may stop polling.
constexpr uint64_t DRIVEN_PAUSE_US = 500;
/// How often LinkHooks::tick is called.
constexpr uint64_t TICK_NS = 250'000'000;
/// Messages taken from a link in one round.
constexpr int TOGETHER = 32;
/// Rounds of one call, where others keep handing work in.
constexpr int ROUNDS = 4;
} // namespace

uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}

std::string ring_name(std::string_view engine_id) {
    return "nixl." + std::string(engine_id);
}

Links::Links(std::shared_ptr<Pool> pool, Identity self, const LinksOptions& options)
    : pool_(std::move(pool)), self_(std::move(self)), options_(options) {}

Status Links::create(std::shared_ptr<Pool> pool, Identity self, const LinksOptions& options, std::unique_ptr<Links>& links) {
    if (self.engine_id.size() != ENGINE_ID_CHARS || self.engine_id.find('\0') != std::string::npos)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: an engine id has ", ENGINE_ID_CHARS, " characters")};
    std::unique_ptr<Links> made(new Links(std::move(pool), std::move(self), options));
    std::string name = ring_name(made->self_.engine_id);
    if (int status = cxl_shm_ring_listen(made->pool_->handle(), name.c_str(), &made->listener_); status != CXL_SHM_OK)
        return pool_failure(status, text("listening for peers as ", name, " (each engine takes a name and some lines of the pool)"));
    Links* self_made = made.get();
    made->connector_ = std::make_unique<Connector>(made->pool_, options.connect_timeout_ms, [self_made] {
        self_made->has_connected_ = true;
        if (self_made->doorbell_)
            self_made->doorbell_->ring(self_made->self_.engine_id);
    });
    if (options.doorbell)
        made->doorbell_ = std::make_unique<Doorbell>(made->self_.engine_id);
    if (options.thread) {
        try {
            made->thread_ = std::thread([self_made] { self_made->run(); });
        } catch (const std::system_error& error) {
            return {NIXL_ERR_BACKEND, text("CXL: starting the progress thread: ", error.what())};
        }
    }
    links = std::move(made);
    return {};
}

Links::~Links() {
    shut_down();
}

// ---- The turn

bool Links::turn() {
    bool did = false;
    for (int i = 0; i < ROUNDS; ++i) {
        if (waiting_.load(std::memory_order_relaxed) > 0 || !turn_.try_lock())
            return did;
        {
            std::lock_guard turn(turn_, std::adopt_lock);
            // Looked at under the turn, so that it never runs backwards there.
            did |= round(now_ns());
        }
        // A thread that handed work in while this one had the turn did not get it.
        if (!has_posted_.load())
            return did;
    }
    return did;
}

bool Links::progress() {
    uint64_t now = now_ns(), before = application_ns_.load(std::memory_order_relaxed);
    // Called again and again, not now and then: the progress thread would only be in the way, during a call that copies as well.
    bool is_polling = now < before + POLLING_NS;
    if (is_polling)
        driven_ns_.store(now, std::memory_order_relaxed);
    struct Call {
        std::atomic<int>& calls;
        explicit Call(std::atomic<int>& of) : calls(of) { calls.fetch_add(1, std::memory_order_relaxed); }
        ~Call() { calls.fetch_sub(1, std::memory_order_relaxed); }
    } call(calls_);
    bool did = turn();
    uint64_t end = did ? now_ns() : now;
    application_ns_.store(end, std::memory_order_relaxed);
    if (is_polling && did)
        driven_ns_.store(end, std::memory_order_relaxed);
    return did;
}

void Links::post(std::function<void()> work) {
    {
        std::lock_guard lock(posted_mutex_);
        posted_.push_back(std::move(work));
        has_posted_ = true;
    }
    progress();
}

void Links::within_turn(const std::function<void()>& work) {
    waiting_.fetch_add(1);
    std::lock_guard turn(turn_);
    waiting_.fetch_sub(1);
    run_posted();
    work();
}

bool Links::run_posted() {
    if (!has_posted_.load())
        return false;
    std::vector<std::function<void()>> posted;
    {
        std::lock_guard lock(posted_mutex_);
        posted.swap(posted_);
        has_posted_ = false;
    }
    for (auto& work : posted) {
        try {
            work();
        } catch (const std::exception& error) {
            // Neither later work nor this thread is to blame. The work itself notifies those that wait for its outcome.
            log_failure("posted", "CXL: something that was handed in for the links failed: ", error);
        }
    }
    return true;
}

bool Links::round(uint64_t now) {
    if (is_shut_)
        return run_posted();
    counts_.rounds.fetch_add(1, std::memory_order_relaxed);
    bool did = run_posted();
    if (has_connected_.load(std::memory_order_relaxed))
        did |= take_connected(now);
    if (now >= accept_ns_ || must_accept_.load(std::memory_order_relaxed))
        did |= accept(now);
    // A message may make a link, but only accept() and take_connected() do, so nothing is added here.
    for (auto& link : links_)
        did |= poll(*link, now);
    if (!revoking_.empty())
        answer_revocations();
    if (service_)
        did |= service_->work(now);
    if (!lost_.empty())
        bury_lost();
    if (now >= look_ns_)
        look_at_peers(now);
    wake_peers(now);
    if (hooks_.tick && now >= tick_ns_) {
        tick_ns_ = now + TICK_NS;
        hooks_.tick();
    }
    has_links_.store(!links_.empty(), std::memory_order_relaxed);
    are_rung_.store(std::all_of(links_.begin(), links_.end(), [](const auto& link) { return link->has_bell; }), std::memory_order_relaxed);
    is_busy_.store((service_ && service_->is_busy()) || !revocations_.empty() || !revoking_.empty() || !lost_.empty(),
                   std::memory_order_relaxed);
    return did;
}

bool Links::poll(Link& link, uint64_t now) {
    if (link.is_lost)
        return false;
    if (now - link.heard_ns > QUIET_NS && now - link.polled_ns < QUIET_POLL_NS && !link.queued())
        return false;
    link.polled_ns = now;
    bool did = false;
    Bytes message;
    Status status = link.queued() ? link.flush(did) : Status();
    for (int i = 0; i < TOGETHER && status.ok(); ++i) {
        status = link.receive(room_, message);
        if (message.empty())
            break;
        did = true;
        link.heard_ns = now;
        try {
            status = on_message(link, message);
        } catch (const std::exception& error) {
            // It does not come again: a transfer that waits for what it would have done learns of the end of the link.
            status = {NIXL_ERR_BACKEND, text("CXL: a message of agent ", link.agent(), " could not be taken: ", error.what())};
        }
    }
    // No transfer waits for it: the peer only keeps what it might have to send once more.
    if (uint64_t noted = std::exchange(link.noted, 0); noted > 0 && status.ok())
        link.send(Writer(Kind::noted).put(noted).take(), false);
    if (status.ok() && !link.is_known() && now - link.since_ns > HELLO_NS)
        status = {NIXL_ERR_REMOTE_DISCONNECT, "CXL: a connection that does not say whose it is"};
    if (!status.ok())
        lose(link, status);
    return did;
}

Status Links::on_message(Link& link, Bytes message) {
    Kind kind = static_cast<Kind>(message[0]);
    if (kind == Kind::hello)
        return on_hello(link, message);
    if (!link.is_known())
        return {NIXL_ERR_MISMATCH, "CXL: a connection that does not say whose it is first"};
    switch (kind) {
    case Kind::note_first:
    case Kind::note_more:
        return on_note(link, kind, message);
    case Kind::noted:
        return on_noted(link, message);
    case Kind::revoke:
    case Kind::revoked:
        return on_revoke_message(link, kind, message);
    case Kind::borrow:
        return on_borrow_message(link, message);
    case Kind::lent:
        return on_lent_message(link, message);
    default:
        if (kind < Kind::first_service || !service_)
            return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " sent a message of unknown kind ", int(kind))};
        return service_->on_message(link, message);
    }
}

// ---- Connections

Link& Links::adopt(cxl_ring_t ring, bool is_ours, uint64_t now) {
    try {
        links_.push_back(std::make_unique<Link>(pool_, ring, next_link_++, is_ours));
    } catch (...) {
        // The other end would wait for an engine that does not know of it.
        cxl_shm_ring_close(pool_->handle(), ring, 0);
        throw;
    }
    Link& link = *links_.back();
    link.since_ns = link.heard_ns = now;
    return link;
}

void Links::greet(Link& link) {
    Writer hello(Kind::hello);
    const auto& uuid = pool_->info().uuid;
    // A name longer than a message is cut: it is for messages and notifications to say who sent them.
    std::string_view agent = std::string_view(self_.agent).substr(0, 4'096);
    hello.put(HELLO_MAGIC).put(WIRE_VERSION).put(std::as_bytes(std::span(uuid))).put(self_.engine_id);
    link.send(hello.put(static_cast<uint16_t>(agent.size())).put(agent).take());
}

bool Links::accept(uint64_t now) {
    must_accept_ = false;
    accept_ns_ = now + ACCEPT_NS;
    cxl_ring_t ring = CXL_SHM_RING_NONE;
    int status = cxl_shm_ring_accept(pool_->handle(), listener_, 0, &ring);
    if (status != CXL_SHM_OK) {
        if (status == CXL_SHM_E_NOT_FOUND)
            listen_again(now);
        else if (status != CXL_SHM_E_TIMEOUT)
            log_once(LogLevel::warn, text("accept", status), pool_failure(status, "accepting connections of peers").reason());
        return false;
    }
    // Another may wait after it.
    must_accept_ = true;
    counts_.accepted.fetch_add(1, std::memory_order_relaxed);
    greet(adopt(ring, false, now));
    return true;
}

void Links::listen_again(uint64_t now) {
    // The name goes where the names of the pool were full while this host was taken for dead.
    if (now < listen_ns_)
        return;
    listen_ns_ = now + LISTEN_NS;
    cxl_shm_ring_close(pool_->handle(), std::exchange(listener_, CXL_SHM_RING_NONE), 0);
    std::string name = ring_name(self_.engine_id);
    if (int status = cxl_shm_ring_listen(pool_->handle(), name.c_str(), &listener_); status != CXL_SHM_OK)
        log_once(LogLevel::error, "listen-again",
                 pool_failure(status, text("listening for peers as ", name, " again, which another host has unbound")).reason());
}

Status Links::on_hello(Link& link, Bytes message) {
    Reader reader(message);
    auto magic = reader.get<uint32_t>();
    auto version = reader.get<uint16_t>();
    if (magic != HELLO_MAGIC || version != WIRE_VERSION)
        return {NIXL_ERR_MISMATCH, text("CXL: a peer speaks version ", version, " of the messages of links, this engine version ",
                                        WIRE_VERSION, ": use one release on all hosts")};
    Bytes uuid = reader.get(sizeof pool_->info().uuid);
    std::string engine_id = reader.get_text(ENGINE_ID_CHARS);
    std::string agent = reader.get_text(reader.get<uint16_t>());
    if (!reader.done() || std::memcmp(uuid.data(), pool_->info().uuid, uuid.size()) != 0)
        return {NIXL_ERR_MISMATCH, "CXL: a peer's first message is damaged"};
    if (link.is_ours()) {
        if (engine_id != link.engine_id())
            return {NIXL_ERR_MISMATCH, text("CXL: another engine than ", link.engine_id(), " listens under its name")};
        return {};
    }
    if (link.is_known())
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " says twice who it is")};
    Peer& from = peer(engine_id, agent);
    link.set_peer(engine_id, agent);
    from.links.push_back(&link);
    link.has_bell = doorbell_ && doorbell_->ring(engine_id);
    from.is_missed = false;
    set_state(engine_id, PeerState::linked);
    if (service_)
        service_->on_linked(link);
    send_notes(from);
    open_access(from);
    return {};
}

bool Links::take_connected(uint64_t now) {
    has_connected_ = false;
    // This engine ends.
    if (!connector_)
        return false;
    auto outcomes = connector_->take();
    for (auto& outcome : outcomes) {
        auto found = peers_.find(outcome.engine_id);
        if (found == peers_.end()) {
            // Forgotten since.
            if (outcome.ring != CXL_SHM_RING_NONE)
                cxl_shm_ring_close(pool_->handle(), outcome.ring, 0);
            continue;
        }
        Peer& to = *found->second;
        to.is_connecting = false;
        if (outcome.status.ok()) {
            try {
                take_link(to, outcome.ring, now);
                continue;
            } catch (const std::exception& error) {
                // The others have nothing to do with it.
                outcome.status = {NIXL_ERR_BACKEND, text("CXL: taking a new link: ", error.what())};
            }
        }
        to.failure = outcome.status;
        to.failed_ns = now;
        if (to.links.empty()) {
            if (set_missed(to)) {
                to.failure = {NIXL_ERR_REMOTE_DISCONNECT, outcome.status.reason()};
                to.notes.clear();
                to.unread.clear();
            }
            end_borrowing(to, to.failure);
            log(LogLevel::info, text("CXL: agent ", to.agent, ": ", outcome.status.reason()));
        }
    }
    return !outcomes.empty();
}

void Links::take_link(Peer& to, cxl_ring_t ring, uint64_t now) {
    Link& link = adopt(ring, true, now);
    counts_.connected.fetch_add(1, std::memory_order_relaxed);
    try {
        link.set_peer(to.engine_id, to.agent);
        to.links.push_back(&link);
        link.has_bell = doorbell_ && doorbell_->ring(to.engine_id);
        greet(link);
        to.is_missed = false;
        set_state(to.engine_id, PeerState::linked);
        if (service_)
            service_->on_linked(link);
        send_notes(to);
        open_access(to);
    } catch (const std::exception&) {
        lose(link, {NIXL_ERR_BACKEND, "CXL: no memory"});
        throw;
    }
}

Link* Links::reach(const std::string& engine_id, Status& failure) {
    auto found = peers_.find(engine_id);
    if (found == peers_.end()) {
        failure = {NIXL_ERR_NOT_FOUND, text("CXL: engine ", engine_id, " is no (longer a) peer of this one: load its metadata")};
        return nullptr;
    }
    Peer& to = *found->second;
    // Work begun over a link continues there: the first link that exists.
    for (Link* link : to.links)
        if (!link->is_lost)
            return link;
    uint64_t now = now_ns();
    if (!to.is_connecting && !to.failure.ok() && now - to.failed_ns < RETRY_NS) {
        failure = to.failure;
        return nullptr;
    }
    if (!to.is_connecting && connector_) {
        connector_->ask(engine_id);
        to.is_connecting = true;
        if (to.failure.ok())
            set_state(engine_id, PeerState::connecting);
        to.failure = {};
        if (doorbell_)
            doorbell_->ring(engine_id);
    }
    failure = {NIXL_IN_PROG, text("CXL: connecting to agent ", to.agent)};
    return nullptr;
}

void Links::wake_peers(uint64_t now) {
    for (auto& link : links_) {
        bool has_sent = link->take_sent();
        if (has_sent)
            link->sent_ns = now;
        if (!link->has_bell || !link->is_known())
            continue;
        // A peer heard just now is awake, most likely: it may have slept since it said that. So one that is silent is rung once, too.
        bool may_sleep = has_sent && now - link->heard_ns > options_.spin_us * 1'000 && now - link->rung_ns > RING_NS;
        bool is_silent = link->sent_ns >= link->heard_ns && now - link->sent_ns > RING_NS && link->rung_ns < link->sent_ns;
        if (!may_sleep && !is_silent)
            continue;
        link->rung_ns = now;
        link->has_bell = doorbell_->ring(link->engine_id());
    }
}

// ---- The progress thread

void Links::run() {
    pthread_setname_np(pthread_self(), "nixl-cxl-links");
    while (!stop_.load(std::memory_order_relaxed)) {
        try {
            run_until_stopped();
        } catch (const std::exception& error) {
            // Memory for a message, most likely. The next round meets the same state; a peer that waits for more than there was gives up.
            log_failure("progress", "CXL: the progress thread: ", error);
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
    }
}

void Links::run_until_stopped() {
    uint64_t active_ns = now_ns(), pause_us = FIRST_PAUSE_US;
    while (!stop_.load(std::memory_order_relaxed)) {
        uint64_t now = now_ns();
        // While the application polls by itself, this thread keeps out of its way.
        bool is_driven = calls_.load(std::memory_order_relaxed) > 0 || now < driven_ns_.load(std::memory_order_relaxed) + DRIVEN_NS;
        if (!is_driven && turn()) {
            active_ns = now;
            pause_us = FIRST_PAUSE_US;
            continue;
        }
        // Without giving the core away: where others want it, it would be gone for much longer than a sleep that a peer's bell ends.
        if (!is_driven && now - active_ns < options_.spin_us * 1'000)
            continue;
        counts_.sleeps.fetch_add(1, std::memory_order_relaxed);
        bool rang = false;
        uint64_t most_us = !has_links_.load(std::memory_order_relaxed) ? options_.accept_pause_us
                           : are_rung_.load(std::memory_order_relaxed) ? options_.rung_pause_us
                                                                       : options_.pause_us;
        if (is_busy_.load(std::memory_order_relaxed))
            most_us = std::min(most_us, is_driven ? DRIVEN_PAUSE_US : BUSY_PAUSE_US);
        pause_us = std::min(pause_us, most_us);
        if (doorbell_)
            rang = doorbell_->rest(pause_us);
        else
            std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
        pause_us *= 2;
        if (rang) {
            must_accept_ = true;
            active_ns = now_ns();
            pause_us = FIRST_PAUSE_US;
        }
    }
}

} // namespace kvbm_cxl
