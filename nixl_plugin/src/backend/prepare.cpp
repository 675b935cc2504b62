// SPDX-License-Identifier: Apache-2.0
#include "prepare.h"
#include <set>

namespace kvbm_cxl {

namespace {

Status refused(nixl_status_t code, size_t index, std::string reason) {
    return {code, text("CXL: descriptor ", index, " of the transfer: ", reason)};
}

/// The bytes of a stretch of remote memory of this process or pool.
std::byte* reachable_bytes(const Pair& pair) {
    const RemoteRegion& region = *pair.remote;
    if (region.pool_address)
        return pair.remote_pool_bytes();
    return reinterpret_cast<std::byte*>(pair.remote_address);
}

/// Between DRAM of this process or the pool and DRAM somewhere.
Status route_dram(nixl_xfer_op_t operation, const Pair& pair, size_t index, Route& route) {
    const RemoteRegion& region = *pair.remote;
    const Peer& peer = *region.peer;
    bool is_local_pool = pair.local->kind == RegionKind::pool;
    bool is_remote_pool = region.is.kind == RegionKind::pool;
    if (!region.is_in_process && !peer.is_same_pool)
        return refused(NIXL_ERR_MISMATCH, index,
                       text("agent ", peer.agent, " uses the pool ", uuid_text(peer.info.pool), ", this one another: give both the same"));
    if (region.is_in_process && is_remote_pool && is_local_pool && !peer.is_same_pool)
        return refused(NIXL_ERR_NOT_SUPPORTED, index, "copies from one pool to another are not supported");
    if (!region.is_in_process && !is_remote_pool)
        route = Route::staged;
    else if (is_local_pool && is_remote_pool)
        route = Route::within;
    else if (!is_local_pool && !is_remote_pool)
        route = Route::memory;
    else
        route = (operation == NIXL_WRITE) == is_remote_pool ? Route::in : Route::out;
    return {};
}

Status route_pair(nixl_xfer_op_t operation, const Pair& pair, size_t index, Route& route) {
    RegionKind near = pair.local->kind, far = pair.remote->is.kind;
    bool is_near_dram = near == RegionKind::heap || near == RegionKind::pool;
    bool is_far_dram = far == RegionKind::heap || far == RegionKind::pool;
    if (is_near_dram && is_far_dram)
        return route_dram(operation, pair, index, route);
    if (far == RegionKind::object || far == RegionKind::file) {
        if (!pair.remote->is_in_process)
            return refused(NIXL_ERR_NOT_SUPPORTED, index,
                           "objects and files are reached through this agent's own registration of them, not through another agent's");
        route = far == RegionKind::object ? Route::object : Route::file;
        return {};
    }
    if (near == RegionKind::device || far == RegionKind::device) {
        if (!pair.remote->is_in_process && !pair.remote->peer->is_same_pool)
            return refused(NIXL_ERR_MISMATCH, index, text("agent ", pair.remote->peer->agent, " uses another pool: give both the same"));
        route = pair.remote->is_in_process || far == RegionKind::pool ? Route::device : Route::staged;
        return {};
    }
    return refused(NIXL_ERR_NOT_SUPPORTED, index, "objects and files cannot be the local side of a transfer");
}

/// Memory of this process as it is registered now. NIXL does not load metadata again that are the same, as those of memory that was
/// deregistered and registered again.
std::shared_ptr<const RemoteRegion> current(const std::shared_ptr<const RemoteRegion>& region) {
    if (!region->is_in_process || !region->own || !region->own->is_closed())
        return region;
    auto core = region->peer->local.lock();
    auto again = core ? core->registry.find(region->is.registration) : nullptr;
    if (!again || public_region(*core, *again) != region->is)
        return region;
    auto renewed = std::make_shared<RemoteRegion>(*region);
    renewed->own = std::move(again);
    renewed->pool_address = renewed->own->pool_address;
    return renewed;
}

/// Appends a pair, or lengthens the last one where the pair continues it.
void append(Pairs& pairs, const Pair& pair) {
    if (!pairs.empty()) {
        Pair& last = pairs.back();
        if (last.local == pair.local && last.remote == pair.remote && last.local_address + last.len_bytes == pair.local_address &&
            last.remote_address + last.len_bytes == pair.remote_address) {
            last.len_bytes += pair.len_bytes;
            return;
        }
    }
    pairs.push_back(pair);
}

/// Keeps what the pairs name, each once; lists name few registrations many times, mostly the same one in a row.
class Keeper {
    XferRequest& request_;
    std::set<const void*> kept_;
    const void* last_local_ = nullptr;
    const void* last_remote_ = nullptr;

  public:
    explicit Keeper(XferRequest& request) : request_(request) {}

    void keep(const std::shared_ptr<Registration>& local, const std::shared_ptr<const RemoteRegion>& remote) {
        if (local.get() != last_local_ && kept_.insert(local.get()).second)
            request_.keep(local);
        if (remote.get() != last_remote_ && kept_.insert(remote.get()).second)
            request_.keep(remote);
        last_local_ = local.get();
        last_remote_ = remote.get();
    }
};

} // namespace

Status route_lists(nixl_xfer_op_t operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                   const std::shared_ptr<Peer>& peer, XferRequest& request, Routed& routed) {
    size_t count = static_cast<size_t>(std::distance(local.begin(), local.end()));
    if (count != static_cast<size_t>(std::distance(remote.begin(), remote.end())))
        return {NIXL_ERR_INVALID_PARAM, "CXL: the lists of a transfer have different lengths"};
    Keeper keeper(request);
    LocalMd* local_md = nullptr;
    RemoteMd* remote_md = nullptr;
    const RemoteMd* region_of = nullptr;
    std::shared_ptr<const RemoteRegion> region;
    std::map<const RemoteMd*, std::shared_ptr<const RemoteRegion>> regions;
    for (size_t i = 0; i < count; i++) {
        const nixlMetaDesc &near = local[i], &far = remote[i];
        if (!local_md || local_md != near.metadataP)
            local_md = dynamic_cast<LocalMd*>(near.metadataP);
        if (!remote_md || remote_md != far.metadataP)
            remote_md = dynamic_cast<RemoteMd*>(far.metadataP);
        if (!local_md || !remote_md)
            return refused(NIXL_ERR_INVALID_PARAM, i, "its memory is not registered with this backend");
        if (near.len != far.len)
            return refused(NIXL_ERR_INVALID_PARAM, i, text("its sides have ", near.len, " and ", far.len, " bytes"));
        const auto& registration = local_md->registration;
        if (region_of != remote_md) {
            // Each is looked at once, so that all that is in one place stays one stretch.
            auto [place, is_new] = regions.emplace(remote_md, nullptr);
            if (is_new)
                place->second = current(remote_md->region);
            region = place->second;
            region_of = remote_md;
        }
        if (region->peer != peer && region->peer->info.engine != peer->info.engine)
            return refused(NIXL_ERR_MISMATCH, i,
                           text("its memory is of agent ", region->peer->agent, " as it was before: load its metadata again"));
        // Metadata that arrived without the connection information may be older: numbers of registrations and addresses repeat.
        if (region->is.engine != region->peer->info.engine || region->is.pool != region->peer->info.pool)
            return refused(NIXL_ERR_MISMATCH, i,
                           text("the metadata of its memory is not of the engine of agent ", peer->agent,
                                " whose connection information was loaded: it was restarted, load its metadata again"));
        if (registration->is_closed())
            return refused(NIXL_ERR_NOT_FOUND, i, "its local memory is deregistered");
        if (!registration->covers(near.addr, near.len))
            return refused(NIXL_ERR_INVALID_PARAM, i,
                           text("local ", hex(near.addr), " (+", near.len, " bytes) is not inside of its registration"));
        if (!region->covers(far.addr, far.len))
            return refused(NIXL_ERR_INVALID_PARAM, i,
                           text("remote ", hex(far.addr), " (+", far.len, " bytes) is not inside of its registration"));
        if (near.len == 0)
            continue;
        Pair pair{registration.get(), region.get(), near.addr, far.addr, near.len};
        Route route = Route::memory;
        if (Status found = route_pair(operation, pair, i, route); !found.ok())
            return found;
        keeper.keep(registration, region);
        append(routed.of(route), pair);
    }
    return {};
}

void add_direct_parts(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Routed& routed, XferRequest& request) {
    constexpr std::pair<Route, Way> ways[] = {
        {Route::memory, Way::memory}, {Route::in, Way::in}, {Route::out, Way::out}, {Route::within, Way::within}};
    Extents written;
    for (auto [route, way] : ways) {
        const Pairs& pairs = routed.of(route);
        if (pairs.empty())
            continue;
        std::vector<Copy> copies;
        copies.reserve(pairs.size());
        Uses uses;
        bool writes_to_peer = operation == NIXL_WRITE && (route == Route::in || route == Route::within);
        for (const Pair& pair : pairs) {
            std::byte *near = pair.local_bytes(), *far = reachable_bytes(pair);
            bool is_near_first; // the end that a copy calls `pool`
            switch (way) {
            case Way::in:
            case Way::out:
                is_near_first = pair.local->kind == RegionKind::pool;
                break;
            default:
                is_near_first = operation == NIXL_READ;
            }
            copies.push_back({is_near_first ? near : far, is_near_first ? far : near, pair.len_bytes});
            uses.add(pair.local);
            uses.add(pair.remote->own.get());
            if (writes_to_peer)
                written.emplace_back(pair.remote->is.offset + (pair.remote_address - pair.remote->is.base), pair.len_bytes);
        }
        if (way == Way::out)
            request.set_first(copies.front().pool, copies.front().memory);
        request.add(make_direct_part(core, CopyPlan(way, std::move(copies), core->options.inline_bytes), std::move(uses)));
    }
    if (operation == NIXL_WRITE) {
        for (const Pair& pair : routed.of(Route::device)) {
            if (pair.remote->is.kind == RegionKind::pool)
                written.emplace_back(pair.remote->is.offset + (pair.remote_address - pair.remote->is.base), pair.len_bytes);
        }
    }
    // Who is coherent with this process has nothing to drop.
    if (!request.peer().is_coherent)
        request.set_written(std::move(written));
}

} // namespace kvbm_cxl
