// SPDX-License-Identifier: Apache-2.0
//
// How links end: one that fails or is given up, and all of them with the engine.
#include "connector.h"
#include "doorbell.h"
#include "peers.h"
#include "support/log.h"
#include <algorithm>
#include <utility>

namespace kvbm_cxl {

namespace {
/// A notification that ended so many links is given up.
constexpr int SENDS = 5;

/// Links that are open until the process ends.
void keep_open(std::unique_ptr<Link> link) {
    static auto& mutex = *new std::mutex;
    static auto& links = *new std::vector<std::unique_ptr<Link>>;
    std::lock_guard lock(mutex);
    links.push_back(std::move(link));
}
} // namespace

void Links::lose(Link& link, const Status& reason) {
    if (link.is_lost)
        return;
    // First, because what throws in the middle would leave a link that is neither used nor buried.
    lost_.emplace_back(&link, reason);
    link.is_lost = true;
    // No copy begins to use the peer's memory over it any more.
    if (auto found = peers_.find(link.engine_id()); found != peers_.end())
        if (const auto& access = found->second->access; access && access->link() == link.number())
            access->close();
}

void Links::bury_lost() {
    // The call of the service may end further links.
    for (size_t i = 0; i < lost_.size();) {
        // That it is closed says to the peer that nothing of its memory is used over it any more.
        if (Link& link = *lost_[i].first; link.is_borrowing && hooks_.is_used && hooks_.is_used(link.engine_id())) {
            ++i;
            continue;
        }
        // Once more in the next round, if anything is thrown there.
        Link* link = lost_[i].first;
        bury(*link, Status(lost_[i].second));
        lost_.erase(lost_.begin() + static_cast<std::ptrdiff_t>(i));
        std::string engine_id = link->engine_id();
        std::erase_if(links_, [&](const auto& kept) { return kept.get() == link; });
        if (auto found = peers_.find(engine_id); found != peers_.end())
            open_access(*found->second);
    }
}

void Links::bury(Link& link, const Status& reason) {
    doubt(link);
    bool is_gone = false; // for certain
    // Closed first, so that the other end can see it before anything that it was lent is used for something else.
    link.close(0);
    if (auto found = peers_.find(link.engine_id()); found != peers_.end()) {
        Peer& of = *found->second;
        std::erase(of.links, &link);
        Status failure;
        if (of.links.empty() && of.is_connecting) {
            set_state(of.engine_id, PeerState::connecting);
        } else if (of.links.empty() && link.is_forgotten) {
            set_state(of.engine_id, PeerState::idle);
        } else if (of.links.empty() && link.was_closed() && !has_ended(of.engine_id)) {
            // One end may have nothing to do with the other any more, while the other has.
            set_state(of.engine_id, PeerState::idle);
            if (of.is_ours)
                reach(of.engine_id, failure);
        } else if (of.links.empty()) {
            is_gone = set_missed(of);
        }
        if (!of.is_ours) {
            if (of.links.empty())
                erase_peer(of.engine_id);
        } else if (!of.unread.empty()) {
            // The peer may have closed the link without having read them. It knows the ones that it has by their numbers.
            if (of.unread.remove_if([](const Note& note) { return note.sends >= SENDS; }) > 0)
                log_once(LogLevel::warn, "note:" + of.engine_id, text("CXL: agent ", of.agent, " does not take a notification"));
            counts_.notes_resent.fetch_add(of.unread.size(), std::memory_order_relaxed);
            of.notes.splice(of.notes.begin(), of.unread);
            send_notes(of);
        }
    }
    bool is_expected = link.was_closed() || link.is_forgotten;
    log(is_expected ? LogLevel::debug : LogLevel::warn, text("CXL: the link to agent ", link.agent(), " ends: ", reason.reason()));
    std::erase_if(revoking_, [&](const Revoking& revoking) { return revoking.link == link.number(); });
    if (service_)
        service_->on_gone(link, {is_gone ? NIXL_ERR_REMOTE_DISCONNECT : NIXL_ERR_BACKEND, reason.reason()});
    counts_.gone.fetch_add(1, std::memory_order_relaxed);
    if (!link.was_closed() && !link.is_forgotten)
        counts_.lost.fetch_add(1, std::memory_order_relaxed);
}

void Links::shut_down() {
    stop_ = true;
    if (doorbell_)
        doorbell_->ring(self_.engine_id);
    if (thread_.joinable())
        thread_.join();
    // Taken out under the turn, where others make progress. Its thread may be waiting for a peer that is stopped: it ends with its slice of
    // time.
    std::unique_ptr<Connector> connector;
    within_turn([&] { connector = std::move(connector_); });
    connector.reset();
    uint64_t end = now_ns() + options_.close_timeout_ms * 1'000'000;
    within_turn([&] {
        if (std::exchange(is_shut_, true))
            return;
        // First, so that a peer that reconnects because its link was closed finds no listener.
        if (listener_ != CXL_SHM_RING_NONE)
            cxl_shm_ring_close(pool_->handle(), listener_, 0);
        Status ends{NIXL_ERR_REMOTE_DISCONNECT, "CXL: this engine ends"};
        for (auto& [engine_id, peer] : peers_) {
            if (peer->access)
                peer->access->close();
            end_borrowing(*peer, ends);
        }
        for (auto& link : links_) {
            // What waits for room in the ring gets its chance as well, and so does who uses memory of the peer.
            for (bool did = true; link->is_known() && link->queued() && now_ns() < end && link->flush(did).ok();)
                std::this_thread::yield();
            bool is_used = false;
            while ((is_used = link->is_borrowing && hooks_.is_used && hooks_.is_used(link->engine_id())) && now_ns() < end)
                std::this_thread::yield();
            uint64_t now = now_ns();
            if (!is_used)
                link->close(link->is_known() && !link->is_lost && now < end ? (end - now) / 1'000'000 : 0);
            if (service_)
                service_->on_gone(*link, ends);
            if (is_used) {
                log(LogLevel::error, text("CXL: an engine ends while it uses memory of agent ", link->agent(),
                                          ", which cannot have it back before this process ends"));
                // That it is closed would say the opposite.
                keep_open(std::move(link));
            }
        }
        lost_.clear();
        links_.clear();
        peers_.clear();
        for (auto& [number, doubt] : doubts_)
            cxl_shm_ring_close(pool_->handle(), doubt.trace, 0);
        doubts_.clear();
    });
}

} // namespace kvbm_cxl
