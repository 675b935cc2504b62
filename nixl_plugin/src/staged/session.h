// SPDX-License-Identifier: Apache-2.0
//
// The links of an engine, with the parts that are under way over each in both directions, and how they share the staging blocks.
#pragma once

#include "links/links.h"
#include "messages.h"
#include "staging.h"
#include "transfer.h"
#include <deque>
#include <map>
#include <unordered_map>

namespace kvbm_cxl {

/// A part of a transfer of this engine, under way.
struct RequestedPart {
    std::shared_ptr<Transfer> transfer;
    Cursor begin;
    uint64_t len_bytes = 0;
    StagingBlock block;     // of a write that is not in place
    bool is_copied = false; // of a read: only the peer's word is missing that the data were its own
};

/// A request of a peer that is not served.
struct PeerRequest {
    Direction direction = Direction::read;
    uint64_t part = 0;
    uint64_t len_bytes = 0;
    std::vector<Piece> sources; // in the pool, by offset. Of a write the copy's source; of a read, once it is served, its destination
    std::vector<uint64_t> registrations;
    std::vector<RequestRange> ranges;
};

/// One link. Everything here is used under the turn of the links.
struct Session {
    explicit Session(Link& of) : link(of) {}

    bool is_busy() const { return !active.empty() || !parts.empty() || !reads.empty() || !writes.empty() || !lent.empty(); }

    Link& link;
    /// Staging blocks of this engine that are in use here.
    size_t blocks = 0;

    // The requester's.
    uint64_t peer_block_bytes = LEAST_BLOCK_BYTES; // the longest part that the peer's staging takes
    uint64_t next_part = 1;
    std::deque<std::shared_ptr<Transfer>> active; // with parts that are not requested yet
    std::unordered_map<uint64_t, RequestedPart> parts;

    // The responder's. Two queues: a read may wait for a staging block that returns only when a write was served.
    std::deque<PeerRequest> reads, writes;
    std::unordered_map<uint64_t, StagingBlock> lent; // by the peer's part, until the peer has taken the data
};

/// All links, by their numbers.
class Sessions {
  public:
    /// The session of a link; a new one for a new link.
    Session& of(Link& link) {
        auto found = by_link_.find(link.number());
        if (found == by_link_.end())
            found = by_link_.emplace(link.number(), std::make_unique<Session>(link)).first;
        return *found->second;
    }
    /// Removes and returns the session of a link that has ended; nullptr if there is none.
    std::unique_ptr<Session> remove(const Link& link) {
        auto removed = by_link_.extract(link.number());
        return removed.empty() ? nullptr : std::move(removed.mapped());
    }
    /// Whether a session may use one more staging block.
    bool may_stage(const Session& session, const Staging& staging) const {
        // A peer that is stopped keeps its blocks until its link ends. The others must not wait for that.
        size_t most = by_link_.size() > 1 ? std::max<size_t>(1, staging.limit() / 2) : staging.limit();
        return session.blocks < most;
    }
    template <class Each> void each(const Each& call) {
        for (auto& [number, session] : by_link_)
            call(*session);
    }
    /// As each(), from another session on every time.
    template <class Each> void each_in_turn(const Each& call) {
        auto next = by_link_.upper_bound(first_);
        for (size_t i = 0; i < by_link_.size(); ++i, ++next) {
            if (next == by_link_.end())
                next = by_link_.begin();
            if (i == 0)
                first_ = next->first;
            call(*next->second);
        }
    }

  private:
    std::map<uint64_t, std::unique_ptr<Session>> by_link_;
    uint64_t first_ = 0; // where each_in_turn() began last
};

} // namespace kvbm_cxl
