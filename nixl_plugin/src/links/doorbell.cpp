// SPDX-License-Identifier: Apache-2.0
#include "doorbell.h"
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {
/// The abstract address of an engine's bell, and its length.
socklen_t address_of(const std::string& engine_id, sockaddr_un& address) {
    std::string name = "kvbm-cxl.nixl." + engine_id;
    address = {};
    address.sun_family = AF_UNIX;
    size_t length = std::min(name.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, name.data(), length);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}
} // namespace

Doorbell::Doorbell(const std::string& engine_id) {
    sockaddr_un address;
    socklen_t length = address_of(engine_id, address);
    socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ >= 0 && bind(socket_, reinterpret_cast<sockaddr*>(&address), length) != 0) {
        close(socket_);
        socket_ = -1;
    }
}

Doorbell::~Doorbell() {
    if (socket_ >= 0)
        close(socket_);
}

bool Doorbell::rest(uint64_t pause_us) {
    timespec pause{static_cast<time_t>(pause_us / 1'000'000), static_cast<long>(pause_us % 1'000'000 * 1'000)};
    if (socket_ < 0) {
        nanosleep(&pause, nullptr);
        return false;
    }
    pollfd wanted{socket_, POLLIN, 0};
    if (ppoll(&wanted, 1, &pause, nullptr) <= 0)
        return false;
    // All rings so far are one; more than a few at once are not waited for.
    char byte;
    for (int i = 0; i < 16 && recv(socket_, &byte, 1, 0) >= 0; ++i) {
    }
    return true;
}

bool Doorbell::ring(const std::string& engine_id) {
    if (socket_ < 0)
        return false;
    sockaddr_un address;
    socklen_t length = address_of(engine_id, address);
    // A bell that is full has rung; one that is not there is on another host, or of an engine that is gone.
    ssize_t sent = sendto(socket_, "", 0, MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address), length);
    return sent >= 0 || errno == EAGAIN || errno == EWOULDBLOCK;
}

} // namespace kvbm_cxl
