// SPDX-License-Identifier: Apache-2.0
//
// One connection to a peer: a queue in front of the ring, and who is at the other end. Used by the thread that has the turn of the links.
#pragma once

#include "support/pool.h"
#include "wire.h"
#include <deque>
#include <set>
#include <utility>

namespace kvbm_cxl {

class Link {
  public:
    /// Takes a connection of the pool's rings over.
    Link(std::shared_ptr<Pool> pool, cxl_ring_t ring, uint64_t number, bool is_ours);
    /// Drops the connection, if close() did not.
    ~Link();
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    /// Never that of another link of the same engine.
    uint64_t number() const { return number_; }
    /// This end asked for the connection.
    bool is_ours() const { return is_ours_; }
    /// Longest message, in bytes.
    size_t max_message_bytes() const { return max_message_bytes_; }
    const std::string& engine_id() const { return engine_id_; }
    const std::string& agent() const { return agent_; }
    cxl_ring_t ring() const { return ring_; }
    bool is_known() const { return !engine_id_.empty(); }

    /// Sends a message after all earlier ones: now if the ring has room, else as soon as it has. A failure shows in flush() and receive().
    /// Unless it `wakes`, a peer that sleeps may read it when it wakes for something else.
    void send(std::vector<std::byte> message, bool wakes = true);
    /// Sends queued messages, as far as there is room; true if one was sent. Failure: the link is gone.
    Status flush(bool& did);
    /// Messages that wait for room.
    size_t queued() const { return queue_.size(); }
    /// The next message, in `room`; empty if none has arrived. Failure: the link is gone.
    Status receive(std::vector<std::byte>& room, Bytes& message);
    /// Ends the connection and notifies the other end, which may receive earlier messages until the time-out.
    void close(uint64_t timeout_ms);

    /// The other end has asked for something: it relies on this link too.
    bool is_used_by_peer = false;
    /// Notification that is being received, its number, and how many of its bytes are to come.
    std::string note;
    uint64_t note_number = 0, note_missing_bytes = 0;
    /// The last notification that was received whole, until it is acknowledged; else 0.
    uint64_t noted = 0;
    uint64_t since_ns = 0;
    /// When something was last received, looked for, sent, and when the peer was last woken.
    uint64_t heard_ns = 0, polled_ns = 0, sent_ns = 0, rung_ns = 0;
    /// The peer is within reach of a bell, and so are we for it.
    bool has_bell = false;
    /// Registrations of this engine that the other end may be using, and those of the other end that it was asked for.
    std::set<uint64_t> lent, asked;
    /// Memory of the other end was used over it, and may be: it is closed when that is over.
    bool is_borrowing = false;
    /// It is among those that are about to be closed.
    bool is_lost = false;
    /// ... because the other end did not answer a revocation for as long as one is waited for.
    bool is_silent = false;
    /// ... because this engine has nothing to do with the peer any more.
    bool is_forgotten = false;

    void set_peer(std::string engine_id, std::string agent) {
        engine_id_ = std::move(engine_id);
        agent_ = std::move(agent);
    }
    /// The other end has closed it in good order.
    bool was_closed() const { return was_closed_; }
    /// Something was sent since this was last asked.
    bool take_sent() { return std::exchange(has_sent_, false); }

  private:
    std::shared_ptr<Pool> pool_;
    cxl_ring_t ring_;
    uint64_t number_;
    bool is_ours_;
    bool has_sent_ = false, was_closed_ = false;
    size_t max_message_bytes_ = 0;
    std::string engine_id_, agent_;
    std::deque<std::vector<std::byte>> queue_;
    Status failure_;

    bool send_now(const std::vector<std::byte>& message);
};

} // namespace kvbm_cxl
