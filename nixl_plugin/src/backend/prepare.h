// SPDX-License-Identifier: Apache-2.0
//
// From lists of descriptors to parts: checks every descriptor against the registrations, joins neighbours, and sorts out which way each
// pair of stretches goes.
#pragma once

#include "request.h"
#include "transfer/direct.h"

namespace kvbm_cxl {

/// NIXL's handle of a local registration.
struct LocalMd : nixlBackendMD {
    std::shared_ptr<Registration> registration;

    explicit LocalMd(std::shared_ptr<Registration> is) : nixlBackendMD(true), registration(std::move(is)) {}
};

/// NIXL's handle of memory as the far end of transfers: of a peer, or of this engine itself.
struct RemoteMd : nixlBackendMD {
    std::shared_ptr<const RemoteRegion> region;

    explicit RemoteMd(std::shared_ptr<const RemoteRegion> is) : nixlBackendMD(false), region(std::move(is)) {}
};

/// Which module moves the bytes between two stretches.
enum class Route { memory, in, out, within, staged, device, object, file };
constexpr size_t route_count = 8;

/// The pairs of a transfer by their routes, with all that they name kept by the request.
struct Routed {
    Pairs by_route[route_count];

    Pairs& of(Route route) { return by_route[static_cast<size_t>(route)]; }
};

/// Checks the lists and fills `routed`. NIXL_ERR_INVALID_PARAM for lists that do not fit each other or stretches outside of their
/// registrations, NIXL_ERR_NOT_SUPPORTED for pairs that no module moves, NIXL_ERR_MISMATCH for memory of another pool or engine.
Status route_lists(nixl_xfer_op_t operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                   const std::shared_ptr<Peer>& peer, XferRequest& request, Routed& routed);

/// Adds the parts of pairs that this process copies by itself.
void add_direct_parts(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Routed& routed, XferRequest& request);

} // namespace kvbm_cxl
