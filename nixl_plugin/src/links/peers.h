// SPDX-License-Identifier: Apache-2.0
//
// What Links knows of a peer, of memory that is lent, and of a revocation, under the turn. For the files of Links.
#pragma once

#include "links.h"
#include <list>

namespace kvbm_cxl {

/// A notification on its way. Numbers rise with every notification of an engine, to whichever peer.
struct Links::Note {
    uint64_t number;
    std::string text;
    int sends = 0;         // so often was it sent
    uint64_t since_ns = 0; // when it was handed in
};

struct Links::Peer {
    std::string engine_id, agent;
    /// Our application named it; else it only connected to us.
    bool is_ours = false;
    bool is_connecting = false;
    /// It ended, or could not be reached, and was not linked since.
    bool is_missed = false;
    /// Its process, as its metadata say; all zero for one that only connected to us.
    ProcessMark process;
    /// The connections, the one that we send over first. Two after both ends connected at the same moment.
    std::vector<Link*> links;
    /// Why it could not be connected to last, and when.
    Status failure;
    uint64_t failed_ns = 0;
    /// Notifications that wait for a connection, and those that were sent and that the peer has not said to have. In order.
    std::list<Note> notes, unread;
    /// The last one that was received from it.
    uint64_t heard = 0;
    /// The way to its memory, if our application named it, and who waits for some of it.
    std::shared_ptr<Access> access;
    std::vector<Borrowing> borrowing;
};

/// A transfer that waits until memory of a peer is lent.
struct Links::Borrowing {
    std::vector<std::shared_ptr<Loan>> loans;
    uint64_t deadline_ns;
    std::function<void(const Status&)> done;
};

/// Memory lent over a link that ended before the other end confirmed that it had released it.
struct Links::Doubt {
    std::string agent;
    std::set<uint64_t> lent;
    uint64_t closed_ns;
    cxl_ring_t trace; // of the other end
    bool is_silent;   // it was waited for before
};

/// Asked of every link over which something was lent that is to be given back.
struct Links::Revocation {
    struct Asked {
        uint64_t link, registration;
    };
    struct Silent {
        std::string agent;
        size_t answers = 0; // that it owes; none if the link has ended
    };
    std::map<uint64_t, Asked> asked;   // by ticket, until it is answered
    std::map<uint64_t, Silent> silent; // by number of the link
    std::atomic<size_t> left{0};

    /// The other end of a link has let go of all of it.
    void answered(uint64_t link) {
        silent.erase(link);
        left.store(silent.size(), std::memory_order_release);
    }
};

} // namespace kvbm_cxl
