// SPDX-License-Identifier: Apache-2.0
//
// Memory in the pool that one engine lends to another, which copies to and from it by itself: borrowing it, and getting it back.
#include "peers.h"
#include "support/log.h"
#include <algorithm>
#include <chrono>
#include <utility>

namespace kvbm_cxl {

namespace {
/// Revocations of peers that may wait to be answered.
constexpr size_t REVOKING = 1 << 16;
/// How often links over which memory is used are looked at, so that copies need not, and those that ended in doubt.
constexpr uint64_t LOOK_NS = GOOD_NS / 4;

/// Takes those out that are meant, all or, where there is no memory for that, none.
template <class Waiting, class IsMeant> std::vector<Waiting> take_out(std::vector<Waiting>& from, const IsMeant& is_meant) {
    std::vector<Waiting> taken;
    taken.reserve(from.size());
    std::erase_if(from, [&](Waiting& waiting) {
        bool is = is_meant(waiting);
        if (is)
            taken.push_back(std::move(waiting));
        return is;
    });
    return taken;
}
} // namespace

// ---- Borrowing

std::shared_ptr<Access> Links::access_to(const std::string& engine_id) const {
    std::lock_guard lock(directory_mutex_);
    auto found = accesses_.find(engine_id);
    return found == accesses_.end() ? std::make_shared<Access>(pool_) : found->second;
}

void Links::borrow(const std::string& engine_id, std::vector<std::shared_ptr<Loan>> loans, uint64_t timeout_ms,
                   std::function<void(const Status&)> done) {
    Borrowing borrowing{std::move(loans), now_ns() + timeout_ms * 1'000'000, std::move(done)};
    post([this, engine_id, asked = std::make_shared<Borrowing>(std::move(borrowing))] {
        auto found = peers_.find(engine_id);
        if (found == peers_.end() || !found->second->access || is_shut_) {
            asked->done({NIXL_ERR_REMOTE_DISCONNECT, text("CXL: engine ", engine_id, " is no (longer a) peer of this one")});
            return;
        }
        try {
            found->second->borrowing.push_back(std::move(*asked));
        } catch (const std::exception&) {
            asked->done({NIXL_ERR_BACKEND, {}});
            throw;
        }
        serve_borrowing(*found->second);
    });
}

void Links::open_access(Peer& to) {
    if (!to.access || to.access->link() != 0)
        return;
    // Until the last one is closed, the engine cannot tell over which one of them the memory is used.
    auto is_open = [](const Link* link) { return !link->is_lost; };
    auto lingers = [](const Link* link) { return link->is_lost && link->is_borrowing; };
    auto link = std::find_if(to.links.begin(), to.links.end(), is_open);
    if (link == to.links.end() || std::any_of(to.links.begin(), to.links.end(), lingers))
        return serve_borrowing(to);
    (*link)->is_borrowing = true;
    to.access->open((*link)->number(), (*link)->ring());
    serve_borrowing(to);
}

void Links::serve_borrowing(Peer& to) {
    if (to.borrowing.empty())
        return;
    uint64_t number = to.access ? to.access->link() : 0;
    auto link = std::find_if(to.links.begin(), to.links.end(), [&](const Link* kept) { return kept->number() == number; });
    if (link == to.links.end()) {
        Status failure;
        if (!reach(to.engine_id, failure) && failure.code() != NIXL_IN_PROG)
            end_borrowing(to, failure);
        return;
    }
    auto is_lent = [number](const auto& loan) { return loan->over.load(std::memory_order_relaxed) == number; };
    for (const Borrowing& borrowing : to.borrowing) {
        for (const auto& loan : borrowing.loans) {
            if (is_lent(loan) || !(*link)->asked.insert(loan->registration).second)
                continue;
            try {
                (*link)->send(Writer(Kind::borrow).put(loan->registration).take());
            } catch (...) {
                // The peer was not asked, so that it has to be asked again.
                (*link)->asked.erase(loan->registration);
                throw;
            }
        }
    }
    auto is_served = [&](const Borrowing& borrowing) { return std::all_of(borrowing.loans.begin(), borrowing.loans.end(), is_lent); };
    for (const Borrowing& borrowing : take_out(to.borrowing, is_served))
        borrowing.done({});
}

void Links::end_borrowing(Peer& to, const Status& status) {
    for (const Borrowing& borrowing : std::exchange(to.borrowing, {}))
        borrowing.done(status);
}

Status Links::on_borrow_message(Link& link, Bytes message) {
    Reader reader(message);
    auto registration = reader.get<uint64_t>();
    if (!reader.done())
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " borrows what cannot be")};
    bool may = hooks_.may_lend && hooks_.may_lend(registration);
    link.is_used_by_peer = true;
    if (may)
        link.lent.insert(registration);
    link.send(Writer(Kind::lent).put(registration).put(static_cast<uint8_t>(may)).take());
    return {};
}

Status Links::on_lent_message(Link& link, Bytes message) {
    Reader reader(message);
    auto registration = reader.get<uint64_t>();
    bool is_lent = reader.get<uint8_t>() != 0;
    if (!reader.done() || link.asked.erase(registration) == 0)
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " lends what it was not asked for")};
    auto found = peers_.find(link.engine_id());
    if (found == peers_.end())
        return {};
    Peer& of = *found->second;
    auto is_meant = [registration](const auto& loan) { return loan->registration == registration; };
    if (is_lent) {
        for (const Borrowing& borrowing : of.borrowing)
            for (const auto& loan : borrowing.loans)
                if (is_meant(loan))
                    loan->over.store(link.number(), std::memory_order_release);
    } else {
        Status why{NIXL_ERR_NOT_FOUND, text("CXL: agent ", of.agent, " has deregistered memory of a transfer: load its metadata again")};
        auto names_it = [&](const Borrowing& borrowing) { return std::any_of(borrowing.loans.begin(), borrowing.loans.end(), is_meant); };
        for (const Borrowing& borrowing : take_out(of.borrowing, names_it))
            borrowing.done(why);
    }
    serve_borrowing(of);
    return {};
}

void Links::look_at_peers(uint64_t now) {
    look_ns_ = now + LOOK_NS;
    for (auto& [engine_id, peer] : peers_) {
        if (peer->access)
            peer->access->refresh();
        // There was no memory to ask for the link that they wait for, or the peer could not be reached.
        if (!peer->notes.empty() && !peer->is_connecting) {
            drop_old_notes(*peer, now);
            send_notes(*peer);
        }
        if (peer->borrowing.empty())
            continue;
        Status why{NIXL_ERR_BACKEND, text("CXL: agent ", peer->agent, " did not lend memory in time")};
        for (const Borrowing& borrowing : take_out(peer->borrowing, [now](const Borrowing& of) { return now >= of.deadline_ns; }))
            borrowing.done(why);
        serve_borrowing(*peer);
    }
    std::erase_if(doubts_, [&](const auto& entry) {
        const Doubt& doubt = entry.second;
        uint32_t has_let_go = 0;
        if (now < doubt.closed_ns + LAST_COPIES_NS || cxl_shm_ring_has_let_go(pool_->handle(), doubt.trace, &has_let_go) != CXL_SHM_OK ||
            !has_let_go)
            return false;
        cxl_shm_ring_close(pool_->handle(), doubt.trace, 0);
        answered(entry.first);
        return true;
    });
}

// ---- Getting it back

void Links::doubt(Link& link) {
    if (doubts_.contains(link.number()))
        return;
    // Who has closed a link uses nothing over it any more.
    if (link.lent.empty() || link.was_closed()) {
        answered(link.number());
        return;
    }
    Doubt& doubt = doubts_.emplace(link.number(), Doubt{link.agent(), {}, now_ns(), CXL_SHM_RING_NONE, link.is_silent}).first->second;
    doubt.lent = std::move(link.lent);
    if (int status = cxl_shm_ring_trace(pool_->handle(), link.ring(), &doubt.trace); status != CXL_SHM_OK)
        log(LogLevel::error, pool_failure(status, text("keeping an eye on agent ", link.agent())).reason());
}

void Links::answered(uint64_t link) {
    for (const auto& revocation : revocations_)
        revocation->answered(link);
}

Status Links::revoke(uint64_t first, uint64_t last, uint64_t timeout_ms, std::vector<std::string>& silent) {
    auto revocation = std::make_shared<Revocation>();
    uint64_t timeout_ns = timeout_ms * 1'000'000, end = now_ns();
    within_turn([&] {
        uint64_t now = now_ns();
        for (auto& link : links_) {
            for (auto lent = link->lent.lower_bound(first); lent != link->lent.end() && *lent <= last; ++lent) {
                Revocation::Silent& of = revocation->silent[link->number()];
                of.agent = link->agent();
                ++of.answers;
                revocation->asked.emplace(next_ticket_, Revocation::Asked{link->number(), *lent});
                link->send(Writer(Kind::revoke).put(next_ticket_++).put(*lent).take());
                end = now + timeout_ns;
            }
        }
        for (auto& [number, doubt] : doubts_) {
            if (auto lent = doubt.lent.lower_bound(first); lent == doubt.lent.end() || *lent > last)
                continue;
            revocation->silent.emplace(number, Revocation::Silent{doubt.agent});
            end = std::max(end, doubt.closed_ns + (doubt.is_silent ? 0 : timeout_ns));
        }
        revocation->left = revocation->silent.size();
        if (revocation->left == 0)
            return;
        revocations_.insert(revocation);
        look_at_peers(now);
    });
    auto wait = [&] {
        while (revocation->left.load(std::memory_order_acquire) > 0 && now_ns() < end)
            if (!progress())
                std::this_thread::sleep_for(std::chrono::microseconds(20));
    };
    wait();
    // A peer that does not answer loses the link: a copy that it makes nevertheless fails there, if it ends before that is waited for.
    within_turn([&] {
        for (auto& link : links_) {
            if (!revocation->silent.contains(link->number()) || link->is_lost)
                continue;
            link->is_silent = true;
            lose(*link, {NIXL_ERR_REMOTE_DISCONNECT, text("it did not let go of memory within ", timeout_ms, " ms")});
        }
        bury_lost();
        for (auto& [number, doubt] : doubts_)
            if (revocation->silent.contains(number))
                end = std::max(end, doubt.closed_ns + LAST_COPIES_NS + LOOK_NS);
    });
    wait();
    size_t left = 0;
    within_turn([&] {
        revocations_.erase(revocation);
        left = revocation->silent.size();
        for (auto& [link, of] : revocation->silent)
            silent.push_back(of.agent);
    });
    if (left == 0)
        return {};
    return {NIXL_IN_PROG, text("CXL: ", left, " of the peers that memory was lent to may still use it after ", timeout_ms, " ms")};
}

Status Links::on_revoke_message(Link& link, Kind kind, Bytes message) {
    Reader reader(message);
    auto ticket = reader.get<uint64_t>();
    auto registration = kind == Kind::revoke ? reader.get<uint64_t>() : 0;
    if (!reader.done() || (kind == Kind::revoke && revoking_.size() >= REVOKING))
        return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " sent a revocation that cannot be")};
    if (kind == Kind::revoke) {
        revoking_.push_back({link.number(), ticket, registration});
        return {};
    }
    for (const auto& revocation : revocations_) {
        auto found = revocation->asked.find(ticket);
        if (found == revocation->asked.end() || found->second.link != link.number())
            continue;
        link.lent.erase(found->second.registration);
        revocation->asked.erase(found);
        if (auto of = revocation->silent.find(link.number()); of != revocation->silent.end() && --of->second.answers == 0)
            revocation->answered(link.number());
    }
    return {};
}

void Links::answer_revocations() {
    // Once round: those that have to wait go to the end.
    for (size_t left = revoking_.size(); left > 0; --left) {
        Revoking revoking = revoking_.front();
        revoking_.pop_front();
        auto of = std::find_if(links_.begin(), links_.end(), [&](const auto& link) { return link->number() == revoking.link; });
        if (of == links_.end() || (*of)->is_lost)
            continue;
        if (hooks_.revoke && !hooks_.revoke((*of)->engine_id(), revoking.registration))
            revoking_.push_back(revoking);
        else
            (*of)->send(Writer(Kind::revoked).put(revoking.ticket).take());
    }
}

} // namespace kvbm_cxl
