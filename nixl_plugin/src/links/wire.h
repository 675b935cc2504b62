// SPDX-License-Identifier: Apache-2.0
//
// Messages between engines as bytes: little-endian, packed, first a byte that says which. docs/STAGED.md has the layouts.
// A reader never reads beyond its bytes: missing bytes read as zero, and ok() says so afterwards.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvbm_cxl {

static_assert(std::endian::native == std::endian::little, "messages are composed as they lie in memory");

/// What a message is. From `first_service` on they belong to the service above the links.
enum class Kind : uint8_t {
    hello = 1,
    note_first = 2,
    note_more = 3,
    revoke = 4,
    revoked = 5,
    noted = 6,
    borrow = 7,
    lent = 8,
    first_service = 16
};

/// First bytes of a hello, and the version of all later messages.
constexpr uint32_t HELLO_MAGIC = 0x314c584b;
constexpr uint16_t WIRE_VERSION = 2;

/// Digits of an engine id.
constexpr size_t ENGINE_ID_CHARS = 16;

using Bytes = std::span<const std::byte>;

/// Composes a message.
class Writer {
    std::vector<std::byte> bytes_;

  public:
    explicit Writer(Kind kind, size_t expected_bytes = 64) {
        bytes_.reserve(expected_bytes);
        put(static_cast<uint8_t>(kind));
    }

    template <std::integral Number> Writer& put(Number number) {
        return put(Bytes(reinterpret_cast<const std::byte*>(&number), sizeof number));
    }
    Writer& put(Bytes bytes) {
        bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
        return *this;
    }
    Writer& put(std::string_view text) { return put(std::as_bytes(std::span(text))); }

    /// The message; the writer is empty afterwards.
    std::vector<std::byte> take() { return std::move(bytes_); }
};

/// Reads a message after its first byte.
class Reader {
    Bytes rest_;
    bool ok_ = true;

  public:
    explicit Reader(Bytes message) : rest_(message.empty() ? message : message.subspan(1)) {}

    template <std::integral Number> Number get() {
        Number number = 0;
        if (Bytes bytes = get(sizeof number); !bytes.empty())
            std::memcpy(&number, bytes.data(), sizeof number);
        return number;
    }
    /// `count` bytes; none of them if there are fewer.
    Bytes get(size_t count) {
        if (count > rest_.size()) {
            ok_ = false;
            rest_ = {};
            return {};
        }
        Bytes bytes = rest_.first(count);
        rest_ = rest_.subspan(count);
        return bytes;
    }
    std::string get_text(size_t count) {
        Bytes bytes = get(count);
        return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }
    Bytes rest() const { return rest_; }

    /// Everything that was asked for was there.
    bool ok() const { return ok_; }
    /// ... and nothing was left.
    bool done() const { return ok_ && rest_.empty(); }
};

} // namespace kvbm_cxl
