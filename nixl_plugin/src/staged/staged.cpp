// SPDX-License-Identifier: Apache-2.0
#include "staged.h"
#include "support/log.h"
#include <algorithm>

namespace kvbm_cxl {

namespace {
/// How often transfers are looked at that do not move.
constexpr uint64_t EXPIRE_NS = 10'000'000;
} // namespace

Staged::Staged(Links& links, FindMemory find_memory, const StagedOptions& options)
    : links_(links), options_(options),
      staging_(links.pool(), options.staging_bytes, std::clamp(options.block_bytes, LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES)),
      requester_(links, options_, counts_, staging_, sessions_), responder_(std::move(find_memory), counts_, staging_, sessions_) {
    links_.set_service(this);
}

Staged::~Staged() {
    shut_down();
}

void Staged::shut_down() {
    links_.within_turn([this] { requester_.end_all({NIXL_ERR_CANCELED, "CXL: this engine ends"}); });
    // Peers that were lent blocks must see the links closed before these are used for something else.
    links_.shut_down();
    links_.set_service(nullptr);
}

void Staged::on_linked(Link& link) {
    sessions_.of(link);
    link.send(Writer(kind::limits).put(staging_.block_bytes()).take());
}

Status Staged::on_message(Link& link, Bytes message) {
    Session& at = sessions_.of(link);
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
    Status status = what == kind::read      ? responder_.on_request(at, Direction::read, reader)
                    : what == kind::write   ? responder_.on_request(at, Direction::write, reader)
                    : what == kind::data    ? requester_.on_data(at, reader)
                    : what == kind::taken   ? responder_.on_taken(at, reader)
                    : what == kind::safe    ? requester_.on_safe(at, reader)
                    : what == kind::written ? requester_.on_written(at, reader)
                                            : Status(NIXL_ERR_MISMATCH, text("CXL: a message of unknown kind ", int(what)));
    return status.ok() ? status : status.within(text("CXL: agent ", link.agent()));
}

void Staged::on_gone(Link& link, const Status& reason) {
    // With the session go its blocks: the link is closed, and a peer that still reads them finds that out.
    if (std::unique_ptr<Session> gone = sessions_.remove(link))
        requester_.end_all(*gone, reason);
}

void Staged::on_forgotten(const std::string& engine_id, const Status& reason) {
    requester_.end_with(engine_id, reason);
}

bool Staged::work(uint64_t now) {
    bool did = false;
    if (requester_.waits())
        requester_.place();
    if (now >= expire_ns_) {
        expire_ns_ = now + EXPIRE_NS;
        requester_.expire(now);
        staging_.trim(now);
    }
    bool is_busy = requester_.waits() || responder_.expects_more(now);
    // One part of each session.
    sessions_.each_in_turn([&](Session& at) {
        if (!at.link.is_lost) {
            did |= responder_.serve(at, now);
            did |= requester_.issue(at, now);
        }
        is_busy |= at.is_busy();
    });
    is_busy_.store(is_busy, std::memory_order_relaxed);
    return did;
}

} // namespace kvbm_cxl
