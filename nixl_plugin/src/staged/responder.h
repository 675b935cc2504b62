// SPDX-License-Identifier: Apache-2.0
//
// The side of a staged transfer that owns the memory requested: serves the peer's requests, and checks everything in them, since they come
// from another process. Called under the turn of the links.
#pragma once

#include "options.h"
#include "session.h"

namespace kvbm_cxl {

class Responder {
  public:
    Responder(FindMemory find_memory, StagedCounts& counts, Staging& staging, Sessions& sessions)
        : find_memory_(std::move(find_memory)), counts_(counts), staging_(staging), sessions_(sessions) {}

    // Messages of the peer. A failure ends the link.
    Status on_request(Session& session, Direction direction, Reader& reader);
    Status on_taken(Session& session, Reader& reader);

    /// Serves the oldest write and the oldest read of a session; false if neither could be served.
    bool serve(Session& session, uint64_t now);
    /// Whether the next part of a peer's write is expected soon.
    bool expects_more(uint64_t now) const { return now < more_until_ns_; }

  private:
    bool serve_read(Session& session, PeerRequest& request);
    void serve_write(Session& session, PeerRequest& request);
    /// Makes the copy of a request; `memories` become those that it names.
    Status copy(const PeerRequest& request, std::vector<std::shared_ptr<Memory>>& memories);

    FindMemory find_memory_;
    StagedCounts& counts_;
    Staging& staging_;
    Sessions& sessions_;
    uint64_t more_until_ns_ = 0;
};

} // namespace kvbm_cxl
