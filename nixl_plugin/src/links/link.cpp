// SPDX-License-Identifier: Apache-2.0
#include "link.h"
#include <utility>

namespace kvbm_cxl {

Link::Link(std::shared_ptr<Pool> pool, cxl_ring_t ring, uint64_t number, bool is_ours)
    : pool_(std::move(pool)), ring_(ring), number_(number), is_ours_(is_ours) {
    if (int status = cxl_shm_ring_max_message(pool_->handle(), ring_, &max_message_bytes_); status != CXL_SHM_OK)
        failure_ = pool_failure(status, "a new connection");
}

Link::~Link() {
    close(0);
}

bool Link::send_now(const std::vector<std::byte>& message) {
    int status = cxl_shm_ring_send(pool_->handle(), ring_, message.data(), message.size(), 0);
    if (status == CXL_SHM_E_TIMEOUT)
        return false;
    if (status != CXL_SHM_OK)
        failure_ = pool_failure(status, text("sending to agent ", agent_));
    return true;
}

void Link::send(std::vector<std::byte> message, bool wakes) {
    has_sent_ = has_sent_ || wakes;
    // Room is looked for in flush() once something waits: a ring that was full a moment ago still is.
    if (!failure_.ok() || (queue_.empty() && send_now(message)))
        return;
    queue_.push_back(std::move(message));
}

Status Link::flush(bool& did) {
    did = false;
    while (failure_.ok() && !queue_.empty() && send_now(queue_.front())) {
        queue_.pop_front();
        has_sent_ = did = true;
    }
    return failure_;
}

Status Link::receive(std::vector<std::byte>& room, Bytes& message) {
    message = {};
    if (!failure_.ok())
        return failure_;
    // Kept as large as it has become: what grows is filled with zeros.
    if (room.size() < max_message_bytes_)
        room.resize(max_message_bytes_);
    size_t len_bytes = 0;
    int status = cxl_shm_ring_recv(pool_->handle(), ring_, room.data(), room.size(), &len_bytes, 0);
    if (status == CXL_SHM_E_TOO_LARGE) {
        // The other end's ring is larger than this one's.
        room.resize(len_bytes);
        status = cxl_shm_ring_recv(pool_->handle(), ring_, room.data(), room.size(), &len_bytes, 0);
    }
    if (status == CXL_SHM_E_TIMEOUT)
        return {};
    was_closed_ = status == CXL_SHM_E_PEER_CLOSED;
    if (status != CXL_SHM_OK)
        return failure_ = pool_failure(status, text("receiving from agent ", agent_));
    if (len_bytes == 0)
        return failure_ = {NIXL_ERR_MISMATCH, text("CXL: agent ", agent_, " sent a message without content")};
    message = Bytes(room).first(len_bytes);
    return {};
}

void Link::close(uint64_t timeout_ms) {
    if (cxl_ring_t ring = std::exchange(ring_, CXL_SHM_RING_NONE); ring != CXL_SHM_RING_NONE)
        // Whatever it says, the connection is closed; the other end may not have received the last messages.
        cxl_shm_ring_close(pool_->handle(), ring, timeout_ms);
}

} // namespace kvbm_cxl
