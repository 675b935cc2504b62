// SPDX-License-Identifier: Apache-2.0
#include "staged.h"
#include "session.h"
#include "support/log.h"
#include <algorithm>

namespace kvbm_cxl {

namespace {
/// How often transfers are looked at that do not come on.
constexpr uint64_t EXPIRE_NS = 10'000'000;
/// A transfer is cut into about so many parts, where they do not become too small, so that both sides copy at the same time.
constexpr uint64_t PARTS = 8;
/// Parts begin on pages, where the ranges do.
constexpr uint64_t PAGE_BYTES = 4'096;

uint64_t rounded_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}
} // namespace

Status Plan::make(std::string engine_id, std::vector<std::shared_ptr<Memory>> memories, std::span<const Range> ranges,
                  std::shared_ptr<const Plan>& plan) {
    auto made = std::make_shared<Plan>();
    made->ranges.reserve(ranges.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
        const Range& range = ranges[i];
        if (range.memory >= memories.size() || !memories[range.memory] ||
            !memories[range.memory]->contains({range.local_address, range.len_bytes}))
            return {NIXL_ERR_INVALID_PARAM, text("CXL: descriptor ", i, ": ", range.len_bytes, " bytes at ", hex(range.local_address),
                                                 " do not lie in one registration")};
        if (range.remote_address + range.len_bytes < range.remote_address || made->len_bytes + range.len_bytes < made->len_bytes)
            return {NIXL_ERR_INVALID_PARAM, text("CXL: descriptor ", i, ": ", range.len_bytes, " bytes at ", hex(range.remote_address),
                                                 " of the peer end beyond all addresses")};
        if (range.len_bytes == 0)
            continue;
        made->len_bytes += range.len_bytes;
        if (!made->ranges.empty()) {
            Range& last = made->ranges.back();
            if (last.memory == range.memory && last.registration == range.registration &&
                last.local_address + last.len_bytes == range.local_address &&
                last.remote_address + last.len_bytes == range.remote_address) {
                last.len_bytes += range.len_bytes;
                continue;
            }
        }
        made->ranges.push_back(range);
    }
    made->engine_id = std::move(engine_id);
    made->memories = std::move(memories);
    plan = std::move(made);
    return {};
}

Staged::Staged(Links& links, Registrations& registrations, const StagedOptions& options)
    : links_(links), registrations_(registrations), options_(options),
      staging_(links.pool(), options.staging_bytes, std::clamp(options.block_bytes, LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES)) {
    links_.set_service(this);
}

Staged::~Staged() {
    shut_down();
}

void Staged::shut_down() {
    links_.within_turn([this] {
        Status ends{NIXL_ERR_CANCELED, "CXL: this engine ends"};
        for (auto& transfer : unplaced_)
            end(*transfer, ends);
        for (auto& [number, session] : sessions_) {
            for (auto& transfer : session->active)
                end(*transfer, ends);
            for (auto& [part, under_way] : session->parts)
                end(*under_way.transfer, ends);
        }
    });
    // Peers that were lent blocks must see the links closed before these are used for something else.
    links_.shut_down();
    links_.set_service(nullptr);
}

Status Staged::start(std::shared_ptr<const Plan> plan, Direction direction, std::optional<std::string> note,
                     std::shared_ptr<Transfer>& transfer) {
    if (!plan)
        return {NIXL_ERR_INVALID_PARAM, "CXL: a transfer without a plan"};
    std::shared_ptr<Transfer> begun(new Transfer(std::move(plan), direction));
    begun->has_note_ = note.has_value();
    if (note)
        begun->note_ = std::move(*note);
    begun->moved_ns_ = now_ns();
    uint64_t least = rounded_up(begun->plan_->len_bytes / PARTS, PAGE_BYTES);
    begun->part_bytes_ = std::clamp(least, std::min(options_.part_bytes, staging_.block_bytes()), staging_.block_bytes());
    transfer = begun;
    try {
        links_.post([this, begun] { begin(begun); });
    } catch (...) {
        // It may be under way by now: a call that hands work in makes a round for all others, too.
        cancel(*begun);
        throw;
    }
    return transfer->status() < 0 ? Status(transfer->status(), transfer->reason()) : Status();
}

void Staged::cancel(Transfer& transfer) noexcept {
    if (!transfer.is_ended())
        links_.within_turn([&] { end(transfer, {NIXL_ERR_CANCELED, "CXL: canceled"}); });
}

void Staged::begin(const std::shared_ptr<Transfer>& transfer) {
    try {
        unplaced_.push_back(transfer);
    } catch (const std::exception& error) {
        // The thread that handed it in may be gone, and no other knows of it.
        fail(*transfer, error);
        return;
    }
    place();
}

void Staged::place() {
    // Nothing may be thrown in the middle, which would leave holes among those that are kept.
    std::erase_if(unplaced_, [this](const std::shared_ptr<Transfer>& transfer) {
        try {
            return place(transfer);
        } catch (const std::exception& error) {
            fail(*transfer, error);
            return true;
        }
    });
}

bool Staged::place(const std::shared_ptr<Transfer>& transfer) {
    if (transfer->is_ended())
        return true;
    Status failure;
    Link* link = links_.reach(transfer->plan_->engine_id, failure);
    if (!link) {
        if (failure.code() == NIXL_IN_PROG)
            return false;
        end(*transfer, failure);
        return true;
    }
    transfer->moved_ns_ = now_ns();
    if (transfer->plan_->len_bytes == 0)
        part_done(*transfer, 0, {});
    else
        session(*link).active.push_back(transfer);
    return true;
}

void Staged::end(Transfer& transfer, const Status& status) noexcept {
    if (transfer.is_ended())
        return;
    if (status.ok() && transfer.has_note_) {
        try {
            links_.note(transfer.plan_->engine_id, std::move(transfer.note_));
        } catch (const std::exception& error) {
            fail(transfer, error);
            return;
        }
    }
    if (!status.ok())
        counts_.failed.fetch_add(1, std::memory_order_relaxed);
    transfer.end(status);
}

void Staged::fail(Transfer& transfer, const std::exception& error) noexcept {
    try {
        end(transfer, {NIXL_ERR_BACKEND, text("CXL: a transfer over a link: ", error.what())});
    } catch (const std::exception&) {
        end(transfer, {NIXL_ERR_BACKEND, {}});
    }
}

Session& Staged::session(Link& link) {
    auto found = sessions_.find(link.number());
    if (found == sessions_.end())
        found = sessions_.emplace(link.number(), std::make_unique<Session>(link)).first;
    return *found->second;
}

bool Staged::may_stage(const Session& session) const {
    // A peer that is stopped keeps what it has until it counts as gone; the others must not wait for that.
    size_t most = sessions_.size() > 1 ? std::max<size_t>(1, staging_.limit() / 2) : staging_.limit();
    return session.blocks < most;
}

void Staged::on_linked(Link& link) {
    session(link);
    link.send(Writer(kind::limits).put(staging_.block_bytes()).take());
}

Status Staged::on_message(Link& link, Bytes message) {
    Session& at = session(link);
    Reader reader(message);
    Kind what = static_cast<Kind>(message[0]);
    if (what == kind::limits) {
        auto block_bytes = reader.get<uint64_t>();
        if (!reader.done())
            return {NIXL_ERR_MISMATCH, text("CXL: agent ", link.agent(), " sent its staging limits in a message of ", message.size(),
                                            " bytes, not ", LIMITS_BYTES, ": use one release of the plugin on all hosts")};
        at.peer_block_bytes = std::max(block_bytes, LEAST_BLOCK_BYTES);
        return {};
    }
    Status status = what == kind::read      ? on_request(at, Direction::read, reader)
                    : what == kind::write   ? on_request(at, Direction::write, reader)
                    : what == kind::data    ? on_data(at, reader)
                    : what == kind::taken   ? on_taken(at, reader)
                    : what == kind::safe    ? on_safe(at, reader)
                    : what == kind::written ? on_written(at, reader)
                                            : Status(NIXL_ERR_MISMATCH, text("CXL: a message of unknown kind ", int(what)));
    return status.ok() ? status : status.within(text("CXL: agent ", link.agent()));
}

void Staged::on_gone(Link& link, const Status& reason) {
    auto found = sessions_.find(link.number());
    if (found == sessions_.end())
        return;
    std::unique_ptr<Session> gone = std::move(found->second);
    sessions_.erase(found);
    for (auto& [number, part] : gone->parts)
        end(*part.transfer, reason);
    for (auto& transfer : gone->active)
        end(*transfer, reason);
    // With it go its blocks: the link is closed, and who still reads them finds that out.
}

void Staged::on_forgotten(const std::string& engine_id, const Status& reason) {
    for (auto& transfer : unplaced_)
        if (!transfer->is_ended() && transfer->plan_->engine_id == engine_id)
            end(*transfer, reason);
    for (auto& [number, session] : sessions_) {
        if (session->link.engine_id() != engine_id)
            continue;
        for (auto& transfer : session->active)
            end(*transfer, reason);
        for (auto& [part, under_way] : session->parts)
            end(*under_way.transfer, reason);
    }
}

void Staged::expire(uint64_t now) {
    uint64_t patience_ns = options_.timeout_ms * 1'000'000;
    auto look = [&](Transfer& transfer) {
        if (!transfer.is_ended() && now > transfer.moved_ns_ && now - transfer.moved_ns_ > patience_ns)
            end(transfer, {NIXL_ERR_BACKEND, text("CXL: a transfer with engine ", transfer.plan_->engine_id, " did not come on for ",
                                                  options_.timeout_ms, " ms")});
    };
    for (auto& transfer : unplaced_)
        look(*transfer);
    for (auto& [number, session] : sessions_) {
        for (auto& transfer : session->active)
            look(*transfer);
        for (auto& [part, under_way] : session->parts)
            look(*under_way.transfer);
    }
}

bool Staged::work(uint64_t now) {
    bool did = false;
    if (!unplaced_.empty())
        place();
    if (now >= expire_ns_) {
        expire_ns_ = now + EXPIRE_NS;
        expire(now);
        staging_.trim(now);
    }
    // Every session in turn, beginning with another one every time, one part each.
    bool is_busy = !unplaced_.empty() || now < more_until_ns_;
    auto next = sessions_.upper_bound(first_session_);
    for (size_t i = 0; i < sessions_.size(); ++i, ++next) {
        if (next == sessions_.end())
            next = sessions_.begin();
        Session& at = *next->second;
        if (i == 0)
            first_session_ = next->first;
        if (!at.link.is_lost) {
            did |= serve(at, now);
            did |= issue(at, now);
        }
        is_busy |= !at.parts.empty() || !at.active.empty() || !at.reads.empty() || !at.writes.empty() || !at.lent.empty();
    }
    is_busy_.store(is_busy, std::memory_order_relaxed);
    return did;
}

} // namespace kvbm_cxl
