// SPDX-License-Identifier: Apache-2.0
//
// Who the peers are, and notifications.
#include "peers.h"
#include "connector.h"
#include "support/log.h"
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

namespace kvbm_cxl {

namespace {
/// Bytes of a notification's messages that are not its text.
constexpr size_t NOTE_HEAD = 17;
/// Former peers whose last received message is known.
constexpr size_t FORMER = 1 << 16;
/// How many times the time of an attempt to connect a notification is kept for a peer that cannot be reached.
constexpr uint64_t NOTE_TIMEOUTS = 3;
} // namespace

Links::Peer& Links::peer(const std::string& engine_id, const std::string& agent) {
    if (auto found = peers_.find(engine_id); found != peers_.end())
        return *found->second;
    auto made = std::make_unique<Peer>();
    made->engine_id = engine_id;
    made->agent = agent;
    Peer& added = *peers_.emplace(engine_id, std::move(made)).first->second;
    if (auto former = heard_.find(engine_id); former != heard_.end()) {
        added.heard = former->second;
        heard_.erase(former);
    }
    return added;
}

void Links::erase_peer(const std::string& engine_id) {
    auto found = peers_.find(engine_id);
    if (found == peers_.end())
        return;
    if (heard_.size() >= FORMER)
        heard_.clear();
    if (found->second->heard > 0)
        heard_.emplace(engine_id, found->second->heard);
    peers_.erase(found);
}

void Links::set_state(const std::string& engine_id, PeerState state) {
    std::lock_guard lock(directory_mutex_);
    if (auto found = states_.find(engine_id); found != states_.end())
        found->second = state;
}

bool Links::has_ended(const std::string& engine_id) const {
    // An engine listens for as long as it lives, and its name is its own alone.
    if (cxl_shm_ring_presence(pool_->handle(), ring_name(engine_id).c_str()) == CXL_SHM_E_PEER_GONE)
        return true;
    auto found = peers_.find(engine_id);
    return found != peers_.end() && has_process_ended(found->second->process);
}

/// True if it has certainly ended.
bool Links::set_missed(Peer& of) {
    bool is_gone = has_ended(of.engine_id);
    set_state(of.engine_id, is_gone ? PeerState::gone : PeerState::silent);
    // Once, however often it is looked for afterwards.
    if (of.is_ours && !std::exchange(of.is_missed, true))
        counts_.peers_gone.fetch_add(1, std::memory_order_relaxed);
    return is_gone;
}

void Links::drop_old_notes(Peer& of, uint64_t now) {
    uint64_t patience_ns = NOTE_TIMEOUTS * options_.connect_timeout_ms * 1'000'000;
    auto is_old = [&](const Note& note) { return now > note.since_ns && now - note.since_ns > patience_ns; };
    if (size_t dropped = of.notes.remove_if(is_old) + of.unread.remove_if(is_old); dropped > 0)
        log_once(LogLevel::warn, "notes:" + of.engine_id,
                 text("CXL: ", dropped, " notifications to agent ", of.agent, " are dropped: it could not be reached for ",
                      NOTE_TIMEOUTS * options_.connect_timeout_ms, " ms"));
}

Status Links::add_peer(const std::string& agent, const std::string& engine_id, const ProcessMark& process) {
    if (engine_id.size() != ENGINE_ID_CHARS || engine_id.find('\0') != std::string::npos)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: the engine id of agent ", agent, " has not ", ENGINE_ID_CHARS, " characters")};
    std::string replaced;
    std::shared_ptr<Access> access;
    {
        std::lock_guard lock(directory_mutex_);
        std::string& known = engines_[agent];
        if (known == engine_id)
            return {};
        replaced = std::exchange(known, engine_id);
        states_.erase(replaced);
        accesses_.erase(replaced);
        states_.emplace(engine_id, PeerState::idle);
        access = accesses_.emplace(engine_id, std::make_shared<Access>(pool_)).first->second;
    }
    post([this, agent, engine_id, replaced, access, process] {
        if (!replaced.empty())
            forget(replaced, "another engine has taken the agent's name: it was restarted");
        Peer& added = peer(engine_id, agent);
        added.agent = agent;
        added.is_ours = true;
        added.access = access;
        added.process = process;
        // One that is about to be closed is no link to the peer: it has lost it as it was known before.
        if (std::any_of(added.links.begin(), added.links.end(), [](const Link* link) { return !link->is_lost; }))
            set_state(engine_id, PeerState::linked);
        open_access(added);
    });
    return {};
}

Status Links::remove_peer(const std::string& agent) {
    std::string engine_id;
    {
        std::lock_guard lock(directory_mutex_);
        auto found = engines_.find(agent);
        if (found == engines_.end())
            return {NIXL_ERR_NOT_FOUND, text("CXL: agent ", agent, " is not known")};
        engine_id = found->second;
        engines_.erase(found);
        states_.erase(engine_id);
        accesses_.erase(engine_id);
    }
    post([this, engine_id] { forget(engine_id, "this agent has disconnected from it"); });
    return {};
}

void Links::forget(const std::string& engine_id, const char* reason) {
    auto found = peers_.find(engine_id);
    if (found == peers_.end())
        return;
    Status why{NIXL_ERR_REMOTE_DISCONNECT, text("CXL: agent ", found->second->agent, ": ", reason)};
    found->second->is_ours = false;
    found->second->notes.clear();
    found->second->unread.clear();
    end_borrowing(*found->second, why);
    if (auto access = std::exchange(found->second->access, nullptr))
        access->close();
    if (service_)
        service_->on_forgotten(engine_id, why);
    // Links that the peer uses by itself still serve it; they end with it.
    bool is_used = false;
    for (Link* link : found->second->links) {
        if (link->is_used_by_peer) {
            is_used = true;
            continue;
        }
        link->is_forgotten = true;
        lose(*link, why);
    }
    if (!is_used && found->second->links.empty())
        erase_peer(engine_id);
}

std::string Links::engine_of(const std::string& agent) const {
    std::lock_guard lock(directory_mutex_);
    auto found = engines_.find(agent);
    return found == engines_.end() ? std::string() : found->second;
}

PeerState Links::state_of(const std::string& engine_id) const {
    std::lock_guard lock(directory_mutex_);
    auto found = states_.find(engine_id);
    return found == states_.end() ? PeerState::unknown : found->second;
}

Status Links::connect(const std::string& agent) {
    if (agent == self_.agent)
        return {};
    std::string engine_id = engine_of(agent);
    if (engine_id.empty())
        return {NIXL_ERR_NOT_FOUND, text("CXL: agent ", agent, " is not known: load its metadata")};
    post([this, engine_id] {
        Status failure;
        reach(engine_id, failure);
    });
    return {};
}

void Links::set_service(Service* service) {
    within_turn([&] { service_ = service; });
}

void Links::set_hooks(LinkHooks hooks) {
    within_turn([&] { hooks_ = std::move(hooks); });
}

// ---- Notifications

Status Links::notify(const std::string& agent, std::string text_of) {
    std::string engine_id = agent == self_.agent ? self_.engine_id : engine_of(agent);
    if (engine_id.empty())
        return {NIXL_ERR_NOT_FOUND, text("CXL: agent ", agent, " is not known: load its metadata")};
    return notify_engine(engine_id, agent, std::move(text_of));
}

Status Links::notify_engine(const std::string& engine_id, const std::string& agent, std::string text_of) {
    if (text_of.size() > options_.note_bytes)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: a notification of ", text_of.size(), " bytes: ", options_.note_bytes, " at most")};
    if (engine_id == self_.engine_id) {
        deliver(agent, std::move(text_of));
        return {};
    }
    PeerState state = state_of(engine_id);
    if (state == PeerState::unknown)
        return {NIXL_ERR_REMOTE_DISCONNECT,
                text("CXL: agent ", agent, " was restarted or disconnected from: nothing is sent to the agent that has its name now")};
    if (state == PeerState::gone)
        return {NIXL_ERR_REMOTE_DISCONNECT, text("CXL: agent ", agent, " has ended")};
    if (state == PeerState::silent) {
        // For the next one.
        post([this, engine_id] {
            Status failure;
            reach(engine_id, failure);
        });
        return {NIXL_ERR_BACKEND,
                text("CXL: agent ", agent, " cannot be reached just now, though nothing proves that it has ended: try again")};
    }
    // Made here, so that an announced message is not lost for want of memory.
    auto made = std::make_shared<std::list<Note>>();
    made->push_back({0, std::move(text_of)});
    post([this, engine_id, made] { queue_note(engine_id, *made); });
    return {};
}

void Links::queue_note(const std::string& engine_id, std::list<Note>& made) {
    auto found = peers_.find(engine_id);
    if (found == peers_.end())
        return;
    made.front().number = next_note_++;
    made.front().since_ns = now_ns();
    found->second->notes.splice(found->second->notes.end(), made);
    send_notes(*found->second);
}

void Links::send_notes(Peer& to) {
    Status failure;
    Link* link = to.notes.empty() ? nullptr : reach(to.engine_id, failure);
    // They wait for a link; drop_old_notes() ends that.
    if (!link)
        return;
    size_t room = link->max_message_bytes() - NOTE_HEAD;
    while (!to.notes.empty()) {
        to.unread.splice(to.unread.end(), to.notes, to.notes.begin());
        ++to.unread.back().sends;
        std::string_view rest = to.unread.back().text;
        try {
            Writer first(Kind::note_first, std::min(rest.size(), room) + NOTE_HEAD);
            link->send(first.put(to.unread.back().number).put(static_cast<uint64_t>(rest.size())).put(rest.substr(0, room)).take());
            while (rest.size() > room) {
                rest.remove_prefix(room);
                link->send(Writer(Kind::note_more, std::min(rest.size(), room) + NOTE_HEAD).put(rest.substr(0, room)).take());
            }
        } catch (const std::exception&) {
            // Some of it may be on its way, and the rest is unavailable: all of it goes over the next link.
            lose(*link, {NIXL_ERR_BACKEND, "CXL: no memory"});
            throw;
        }
        counts_.notes_sent.fetch_add(1, std::memory_order_relaxed);
    }
}

Status Links::on_note(Link& link, Kind kind, Bytes message) {
    Reader reader(message);
    if ((kind == Kind::note_first) != (link.note_missing_bytes == 0))
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " sent parts of notifications that do not belong together")};
    if (kind == Kind::note_first) {
        link.note_number = reader.get<uint64_t>();
        link.note_missing_bytes = reader.get<uint64_t>();
        link.note.clear();
    }
    Bytes piece = reader.rest();
    if (!reader.ok() || link.note_missing_bytes > options_.note_bytes || piece.size() > link.note_missing_bytes ||
        (piece.empty() && link.note_missing_bytes > 0)) {
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " sent a notification of ", link.note_missing_bytes, " bytes with ",
                                        piece.size(), " in a message")};
    }
    // Grows with the received bytes, not with the announced ones.
    link.note.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    link.note_missing_bytes -= piece.size();
    link.is_used_by_peer = true;
    if (link.note_missing_bytes > 0)
        return {};
    uint64_t& heard = peer(link.engine_id(), link.agent()).heard;
    link.noted = std::max(heard, link.note_number);
    // Messages of an abandoned link arrive once more over the next one.
    if (link.note_number <= heard)
        return {};
    heard = link.note_number;
    counts_.notes_received.fetch_add(1, std::memory_order_relaxed);
    deliver(link.agent(), std::exchange(link.note, {}));
    return {};
}

Status Links::on_noted(Link& link, Bytes message) {
    Reader reader(message);
    auto number = reader.get<uint64_t>();
    if (!reader.done() || number >= next_note_)
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " has a notification ", number, " that was never sent")};
    auto found = peers_.find(link.engine_id());
    if (found == peers_.end())
        return {};
    auto& unread = found->second->unread;
    while (!unread.empty() && unread.front().number <= number)
        unread.pop_front();
    return {};
}

void Links::deliver(const std::string& agent, std::string text_of) {
    std::lock_guard lock(notes_mutex_);
    notes_.push_back({agent, std::move(text_of)});
    has_notes_ = true;
}

std::vector<Notification> Links::take_notifications() {
    progress();
    if (!has_notes_.load())
        return {};
    std::lock_guard lock(notes_mutex_);
    has_notes_ = false;
    return std::exchange(notes_, {});
}

} // namespace kvbm_cxl
