// SPDX-License-Identifier: Apache-2.0
#include "requester.h"
#include "support/log.h"
#include <algorithm>
#include <utility>

namespace kvbm_cxl {

namespace {
/// A transfer is cut into about so many parts, where they do not become too small, so that both sides copy at the same time.
constexpr uint64_t PARTS = 8;
/// Parts begin on pages, where the ranges do.
constexpr uint64_t PAGE_BYTES = 4'096;

uint64_t rounded_up(uint64_t bytes, uint64_t to) {
    return (bytes + to - 1) / to * to;
}

/// Walks `len_bytes` of a plan from `cursor` on, which moves; `each` gets a range's number, the bytes into it and how many. Stops when it
/// returns false.
template <class Each> void walk(const Plan& plan, Cursor& cursor, uint64_t len_bytes, const Each& each) {
    while (len_bytes > 0 && cursor.range < plan.ranges.size()) {
        const Range& range = plan.ranges[cursor.range];
        uint64_t bytes = std::min(range.len_bytes - cursor.in_range_bytes, len_bytes);
        if (!each(range, cursor.in_range_bytes, bytes))
            return;
        len_bytes -= bytes;
        cursor.in_range_bytes += bytes;
        if (cursor.in_range_bytes == range.len_bytes)
            cursor = {cursor.range + 1, 0};
    }
}

/// Copies a stretch of the local side of a plan to or from one place in the pool, each memory as far as it goes.
Status copy_local(const Plan& plan, Cursor begin, uint64_t len_bytes, Direction direction, uint64_t offset) {
    std::vector<Piece> pieces;
    uint32_t memory = 0;
    uint64_t run_bytes = 0;
    auto copy_run = [&] {
        Status status;
        if (!pieces.empty())
            status = direction == Direction::write ? plan.memories[memory]->to_pool(pieces, offset)
                                                   : plan.memories[memory]->from_pool(pieces, offset);
        offset += std::exchange(run_bytes, 0);
        pieces.clear();
        return status;
    };
    Status status;
    walk(plan, begin, len_bytes, [&](const Range& range, uint64_t in_range, uint64_t bytes) {
        if (range.memory != memory)
            status = copy_run();
        memory = range.memory;
        pieces.push_back({range.local_address + in_range, bytes});
        run_bytes += bytes;
        return status.ok();
    });
    return status.ok() ? copy_run() : status;
}

/// The lists of a request as they are composed.
struct Lists {
    std::vector<Piece> sources;
    std::vector<uint64_t> registrations;
    std::vector<RequestRange> ranges;

    size_t len_bytes() const {
        return REQUEST_HEAD + sources.size() * SOURCE_BYTES + registrations.size() * REGISTRATION_BYTES + ranges.size() * RANGE_BYTES;
    }
    /// Index of a registration in the list, which it is added to; none if the list is full.
    std::optional<uint32_t> index_of(uint64_t registration) {
        // Lists often go round several registrations: the one used last, or the next one.
        auto found = std::find(registrations.rbegin(), registrations.rend(), registration);
        if (found != registrations.rend())
            return static_cast<uint32_t>(registrations.rend() - found - 1);
        if (registrations.size() == REGISTRATIONS)
            return std::nullopt;
        registrations.push_back(registration);
        return static_cast<uint32_t>(registrations.size() - 1);
    }
};

std::vector<std::byte> compose(Kind what, uint64_t part, const Lists& lists) {
    Writer message(what, lists.len_bytes());
    message.put(part).put(static_cast<uint16_t>(lists.sources.size())).put(static_cast<uint16_t>(lists.registrations.size()));
    message.put(static_cast<uint32_t>(lists.ranges.size()));
    for (const Piece& source : lists.sources)
        message.put(source.address).put(source.len_bytes);
    for (uint64_t registration : lists.registrations)
        message.put(registration);
    for (const RequestRange& range : lists.ranges)
        message.put(range.piece.address).put(static_cast<uint32_t>(range.piece.len_bytes)).put(range.registration);
    return message.take();
}
} // namespace

Status Requester::start(std::shared_ptr<const Plan> plan, Direction direction, std::shared_ptr<Transfer>& transfer) {
    if (!plan)
        return {NIXL_ERR_INVALID_PARAM, "CXL: a transfer without a plan"};
    std::shared_ptr<Transfer> begun(new Transfer(std::move(plan), direction));
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

void Requester::cancel(Transfer& transfer) noexcept {
    if (!transfer.is_ended())
        links_.within_turn([&] { end(transfer, {NIXL_ERR_CANCELED, "CXL: canceled"}); });
}

void Requester::begin(const std::shared_ptr<Transfer>& transfer) {
    try {
        unplaced_.push_back(transfer);
    } catch (const std::exception& error) {
        // The thread that handed it in may be gone, and no other knows of it.
        fail(*transfer, error);
        return;
    }
    place();
}

void Requester::place() {
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

bool Requester::place(const std::shared_ptr<Transfer>& transfer) {
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
        sessions_.of(*link).active.push_back(transfer);
    return true;
}

void Requester::end(Transfer& transfer, const Status& status) noexcept {
    if (transfer.is_ended())
        return;
    if (!status.ok())
        counts_.failed.fetch_add(1, std::memory_order_relaxed);
    transfer.end(status);
}

void Requester::fail(Transfer& transfer, const std::exception& error) noexcept {
    try {
        end(transfer, {NIXL_ERR_BACKEND, text("CXL: a transfer over a link: ", error.what())});
    } catch (const std::exception&) {
        end(transfer, {NIXL_ERR_BACKEND, {}});
    }
}

template <class Each> void Requester::each_transfer(Session& session, const Each& call) {
    for (auto& transfer : session.active)
        call(*transfer);
    for (auto& [number, part] : session.parts)
        call(*part.transfer);
}

void Requester::end_all(const Status& reason) {
    for (auto& transfer : unplaced_)
        end(*transfer, reason);
    sessions_.each([&](Session& session) { end_all(session, reason); });
}

void Requester::end_all(Session& session, const Status& reason) {
    each_transfer(session, [&](Transfer& transfer) { end(transfer, reason); });
}

void Requester::end_with(const std::string& engine_id, const Status& reason) {
    for (auto& transfer : unplaced_)
        if (!transfer->is_ended() && transfer->plan_->engine_id == engine_id)
            end(*transfer, reason);
    sessions_.each([&](Session& session) {
        if (session.link.engine_id() == engine_id)
            end_all(session, reason);
    });
}

void Requester::expire(uint64_t now) {
    uint64_t patience_ns = options_.timeout_ms * 1'000'000;
    auto look = [&](Transfer& transfer) {
        if (!transfer.is_ended() && now > transfer.moved_ns_ && now - transfer.moved_ns_ > patience_ns)
            end(transfer, {NIXL_ERR_BACKEND, text("CXL: a transfer with engine ", transfer.plan_->engine_id, " did not come on for ",
                                                  options_.timeout_ms, " ms")});
    };
    for (auto& transfer : unplaced_)
        look(*transfer);
    sessions_.each([&](Session& session) { each_transfer(session, look); });
}

bool Requester::issue(Session& at, uint64_t now) {
    bool did = false;
    // What waits for room in the ring already would only be followed by more.
    while (!at.active.empty() && at.parts.size() < options_.parts_per_link && at.link.queued() == 0) {
        std::shared_ptr<Transfer> transfer = at.active.front();
        if (transfer->is_ended()) {
            at.active.pop_front();
            continue;
        }
        bool copies = transfer->direction_ == Direction::write;
        try {
            bool waits = false;
            Status status = request(at, transfer, waits);
            if (waits)
                break;
            did = true;
            transfer->moved_ns_ = now;
            if (!status.ok())
                end(*transfer, status);
            else if (transfer->cursor_.range < transfer->plan_->ranges.size())
                at.active.push_back(transfer);
        } catch (const std::exception& error) {
            // Some of it may be under way, and would wait for the rest for ever.
            fail(*transfer, error);
        }
        at.active.pop_front();
        // A copy is enough for one round; asking for data costs next to nothing.
        if (copies)
            break;
    }
    return did;
}

Status Requester::request(Session& at, const std::shared_ptr<Transfer>& transfer, bool& waits) {
    const Plan& plan = *transfer->plan_;
    bool is_write = transfer->direction_ == Direction::write;
    auto place_of = [&](const Range& range, uint64_t in_range, uint64_t bytes) {
        return is_write ? plan.memories[range.memory]->pool_offset({range.local_address + in_range, bytes}) : std::nullopt;
    };
    const Range& first = plan.ranges[transfer->cursor_.range];
    bool in_place = place_of(first, transfer->cursor_.in_range_bytes, 1).has_value();

    RequestedPart part{transfer, transfer->cursor_, 0, {}, false};
    if (is_write && !in_place) {
        if (!sessions_.may_stage(at, staging_)) {
            waits = true;
            return {};
        }
        Status status = staging_.acquire(part.block);
        waits = status.code() == NIXL_IN_PROG;
        if (!status.ok())
            return waits ? Status() : status;
    }

    Lists lists;
    uint64_t most_bytes = std::min(transfer->part_bytes_, is_write ? staging_.block_bytes() : at.peer_block_bytes);
    size_t room = at.link.max_message_bytes() - SOURCE_BYTES - REGISTRATION_BYTES - RANGE_BYTES;
    Status status;
    Cursor cursor = part.begin;
    walk(plan, cursor, most_bytes, [&](const Range& range, uint64_t in_range, uint64_t bytes) {
        if (lists.len_bytes() > room || lists.ranges.size() >= UINT16_MAX)
            return false;
        auto place = place_of(range, in_range, bytes);
        if (place.has_value() != in_place)
            return false;
        auto registration = lists.index_of(range.registration);
        if (!registration)
            return false;
        if (place) {
            status = plan.memories[range.memory]->publish({range.local_address + in_range, bytes});
            if (!status.ok())
                return false;
            if (!lists.sources.empty() && lists.sources.back().address + lists.sources.back().len_bytes == *place)
                lists.sources.back().len_bytes += bytes;
            else
                lists.sources.push_back({*place, bytes});
        }
        lists.ranges.push_back({{range.remote_address + in_range, bytes}, *registration});
        part.len_bytes += bytes;
        return true;
    });
    if (status.ok() && part.block) {
        status = copy_local(plan, part.begin, part.len_bytes, Direction::write, part.block.offset());
        lists.sources.push_back({part.block.offset(), part.len_bytes});
    }
    if (!status.ok()) {
        // A device that has it may write to it although the copy has failed.
        part.block.release_after(plan.memories);
        return status;
    }
    auto asked = at.parts.emplace(at.next_part, std::move(part)).first;
    try {
        at.link.send(compose(is_write ? kind::write : kind::read, at.next_part, lists));
    } catch (...) {
        // It is not on its way, so that no answer would give its block back.
        at.parts.erase(asked);
        throw;
    }
    at.next_part += 1;
    at.blocks += asked->second.block ? 1 : 0;
    transfer->cursor_ = cursor;
    transfer->parts_under_way_ += 1;
    counts_.parts_asked.fetch_add(1, std::memory_order_relaxed);
    if (in_place)
        counts_.in_place.fetch_add(1, std::memory_order_relaxed);
    return {};
}

Status Requester::on_data(Session& at, Reader& reader) {
    auto number = reader.get<uint64_t>();
    auto code = reader.get<int32_t>();
    auto offset = reader.get<uint64_t>();
    auto found = at.parts.find(number);
    if (!reader.done() || found == at.parts.end() || found->second.is_copied || found->second.transfer->direction_ != Direction::read)
        return {NIXL_ERR_MISMATCH, "it sent data that were not asked for"};
    RequestedPart& part = found->second;
    std::shared_ptr<Transfer> transfer = part.transfer;
    uint64_t len_bytes = part.len_bytes;
    if (code != NIXL_SUCCESS) {
        Status status{code < 0 ? static_cast<nixl_status_t>(code) : NIXL_ERR_BACKEND,
                      text("CXL: agent ", at.link.agent(), " could not give the data: its status is ", code)};
        at.parts.erase(found);
        part_done(*transfer, len_bytes, status);
        return {};
    }
    Status copied;
    bool is_wanted = !transfer->is_ended();
    if (is_wanted)
        copied = copy_local(*transfer->plan_, part.begin, len_bytes, Direction::read, offset);
    // The peer's word for the last part is its word for all of them: it came to the others before.
    bool is_last = transfer->parts_under_way_ == 1 && transfer->cursor_.range >= (is_wanted ? transfer->plan_->ranges.size() : 0);
    bool awaits = is_wanted && copied.ok() && is_last;
    at.link.send(Writer(kind::taken).put(number).put(static_cast<uint8_t>(awaits)).take());
    if (awaits) {
        part.is_copied = true;
        return {};
    }
    at.parts.erase(found);
    part_done(*transfer, len_bytes, copied);
    // Before the next data are copied, which may be there already: the peer would run out of work meanwhile, and sleep.
    issue(at, now_ns());
    return {};
}

Status Requester::on_safe(Session& at, Reader& reader) {
    auto found = at.parts.find(reader.get<uint64_t>());
    if (!reader.done() || found == at.parts.end() || !found->second.is_copied)
        return {NIXL_ERR_MISMATCH, "it vouched for data that were not taken"};
    std::shared_ptr<Transfer> transfer = std::move(found->second.transfer);
    uint64_t len_bytes = found->second.len_bytes;
    at.parts.erase(found);
    part_done(*transfer, len_bytes, {});
    return {};
}

Status Requester::on_written(Session& at, Reader& reader) {
    auto found = at.parts.find(reader.get<uint64_t>());
    auto code = reader.get<int32_t>();
    if (!reader.done() || found == at.parts.end() || found->second.transfer->direction_ != Direction::write)
        return {NIXL_ERR_MISMATCH, "it wrote what it was not asked to"};
    Status status;
    if (code != NIXL_SUCCESS)
        status = {code < 0 ? static_cast<nixl_status_t>(code) : NIXL_ERR_BACKEND,
                  text("CXL: agent ", at.link.agent(), " could not take the data: its status is ", code)};
    std::shared_ptr<Transfer> transfer = std::move(found->second.transfer);
    uint64_t len_bytes = found->second.len_bytes;
    at.blocks -= found->second.block ? 1 : 0;
    at.parts.erase(found);
    part_done(*transfer, len_bytes, status);
    return {};
}

void Requester::part_done(Transfer& transfer, uint64_t len_bytes, const Status& status) {
    if (transfer.parts_under_way_ > 0)
        transfer.parts_under_way_ -= 1;
    if (transfer.is_ended())
        return;
    if (!status.ok()) {
        end(transfer, status);
        return;
    }
    transfer.moved_ns_ = now_ns();
    transfer.done_bytes_.fetch_add(len_bytes, std::memory_order_relaxed);
    auto& bytes = transfer.direction_ == Direction::read ? counts_.bytes_read : counts_.bytes_written;
    bytes.fetch_add(len_bytes, std::memory_order_relaxed);
    if (transfer.parts_under_way_ == 0 && transfer.cursor_.range >= transfer.plan_->ranges.size())
        end(transfer, {});
}

} // namespace kvbm_cxl
