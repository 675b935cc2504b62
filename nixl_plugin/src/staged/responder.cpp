// SPDX-License-Identifier: Apache-2.0
#include "responder.h"
#include <algorithm>
#include <utility>

namespace kvbm_cxl {

namespace {
/// After a part of a write of this size another one most likely arrives within this time: too soon to sleep.
constexpr uint64_t LARGE_BYTES = 64 << 10, MORE_NS = 200'000;
} // namespace

Status Responder::on_request(Session& at, Direction direction, Reader& reader) {
    PeerRequest request;
    request.direction = direction;
    request.part = reader.get<uint64_t>();
    size_t sources = reader.get<uint16_t>(), registrations = reader.get<uint16_t>(), ranges = reader.get<uint32_t>();
    // Room is made for what the message holds, not for what it announces.
    if (sources * SOURCE_BYTES + registrations * REGISTRATION_BYTES + ranges * RANGE_BYTES != reader.rest().size() || !reader.ok())
        return {NIXL_ERR_MISMATCH, "it asked with lists of another length than announced"};
    uint64_t source_bytes = 0;
    for (size_t i = 0; i < sources; ++i) {
        auto offset = reader.get<uint64_t>(), len_bytes = reader.get<uint64_t>();
        request.sources.push_back({offset, len_bytes});
        if (len_bytes > UINT32_MAX)
            return {NIXL_ERR_MISMATCH, "it asked with a source that is too long"};
        source_bytes += len_bytes;
    }
    for (size_t i = 0; i < registrations; ++i)
        request.registrations.push_back(reader.get<uint64_t>());
    request.ranges.reserve(ranges);
    for (size_t i = 0; i < ranges; ++i) {
        auto address = reader.get<uint64_t>();
        auto len_bytes = reader.get<uint32_t>(), registration = reader.get<uint32_t>();
        if (registration >= registrations)
            return {NIXL_ERR_MISMATCH, "it asked for a registration that it does not name"};
        request.ranges.push_back({{address, len_bytes}, registration});
        request.len_bytes += len_bytes;
    }
    bool is_write = direction == Direction::write;
    bool fits = is_write ? source_bytes == request.len_bytes : sources == 0 && request.len_bytes <= staging_.block_bytes();
    if (!fits || at.reads.size() + at.writes.size() >= REQUESTS || (!is_write && at.lent.contains(request.part)))
        return {NIXL_ERR_MISMATCH, "it asked for more than there may be under way"};
    at.link.is_used_by_peer = true;
    (is_write ? at.writes : at.reads).push_back(std::move(request));
    return {};
}

Status Responder::on_taken(Session& at, Reader& reader) {
    auto number = reader.get<uint64_t>();
    auto wants_word = reader.get<uint8_t>();
    auto found = at.lent.find(number);
    if (!reader.done() || found == at.lent.end())
        return {NIXL_ERR_MISMATCH, "it took data that it was not given"};
    // It was this engine's all the time until here: that is what the word says.
    if (wants_word)
        at.link.send(Writer(kind::safe).put(number).take());
    at.lent.erase(found);
    at.blocks -= 1;
    return {};
}

bool Responder::serve(Session& at, uint64_t now) {
    bool did = false;
    if (!at.writes.empty()) {
        if (at.writes.front().len_bytes >= LARGE_BYTES)
            more_until_ns_ = now + MORE_NS;
        serve_write(at, at.writes.front());
        at.writes.pop_front();
        counts_.parts_served.fetch_add(1, std::memory_order_relaxed);
        did = true;
    }
    if (!at.reads.empty() && serve_read(at, at.reads.front())) {
        at.reads.pop_front();
        counts_.parts_served.fetch_add(1, std::memory_order_relaxed);
        did = true;
    }
    return did;
}

bool Responder::serve_read(Session& at, PeerRequest& request) {
    if (!sessions_.may_stage(at, staging_))
        return false;
    StagingBlock block;
    Status status = staging_.acquire(block);
    if (status.code() == NIXL_IN_PROG)
        return false;
    uint64_t offset = 0;
    if (status.ok()) {
        offset = block.offset();
        request.sources = {{offset, request.len_bytes}};
        std::vector<std::shared_ptr<Memory>> memories;
        status = copy(request, memories);
        if (!status.ok())
            block.release_after(std::move(memories));
    }
    // A block without data in it is never lent.
    if (status.ok())
        at.lent.emplace(request.part, std::move(block));
    try {
        at.link.send(Writer(kind::data).put(request.part).put(static_cast<int32_t>(status.code())).put(offset).take());
    } catch (...) {
        // Not on its way: it is served once more.
        at.lent.erase(request.part);
        throw;
    }
    if (status.ok()) {
        counts_.served_read_bytes.fetch_add(request.len_bytes, std::memory_order_relaxed);
        at.blocks += 1;
    }
    return true;
}

void Responder::serve_write(Session& at, PeerRequest& request) {
    std::vector<std::shared_ptr<Memory>> memories;
    Status status = copy(request, memories);
    if (status.ok())
        counts_.served_written_bytes.fetch_add(request.len_bytes, std::memory_order_relaxed);
    at.link.send(Writer(kind::written).put(request.part).put(static_cast<int32_t>(status.code())).take());
}

Status Responder::copy(const PeerRequest& request, std::vector<std::shared_ptr<Memory>>& memories) {
    for (uint64_t registration : request.registrations)
        memories.push_back(find_memory_(registration));
    for (const RequestRange& range : request.ranges) {
        if (memories[range.registration] && memories[range.registration]->contains(range.piece))
            continue;
        counts_.refused.fetch_add(1, std::memory_order_relaxed);
        return {NIXL_ERR_NOT_FOUND, "a range of no registration"};
    }
    // Runs of one source and one memory.
    std::vector<Piece> pieces;
    pieces.reserve(request.ranges.size());
    size_t source = 0;
    uint64_t in_source = 0, run_bytes = 0;
    uint32_t memory = 0;
    auto copy_run = [&]() -> Status {
        if (pieces.empty())
            return {};
        uint64_t offset = request.sources[source].address + in_source;
        Status status =
            request.direction == Direction::read ? memories[memory]->to_pool(pieces, offset) : memories[memory]->from_pool(pieces, offset);
        in_source += std::exchange(run_bytes, 0);
        pieces.clear();
        return status;
    };
    for (const RequestRange& range : request.ranges) {
        if (range.registration != memory)
            if (Status status = copy_run(); !status.ok())
                return status;
        memory = range.registration;
        Piece rest = range.piece;
        while (rest.len_bytes > 0) {
            uint64_t left = request.sources[source].len_bytes - in_source - run_bytes;
            if (left == 0) {
                if (Status status = copy_run(); !status.ok())
                    return status;
                // The sources hold as many bytes as the ranges, so there is a next one.
                source += 1;
                in_source = 0;
                continue;
            }
            uint64_t bytes = std::min(rest.len_bytes, left);
            pieces.push_back({rest.address, bytes});
            run_bytes += bytes;
            rest = {rest.address + bytes, rest.len_bytes - bytes};
        }
    }
    return copy_run();
}

} // namespace kvbm_cxl
