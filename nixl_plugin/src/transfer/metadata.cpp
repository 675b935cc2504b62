// SPDX-License-Identifier: Apache-2.0
#include "metadata.h"
#include <atomic>
#include <concepts>
#include <cstring>
#include <limits>
#include <sys/random.h>
#include <unistd.h>

namespace kvbm_cxl {

namespace {

constexpr uint64_t region_magic = 0x4e4f494745524c43; // "CLREGION"
constexpr uint64_t conn_magic = 0x004e4e4f434c5843;   // "CXLCONN"
constexpr uint32_t version = 2;
constexpr size_t sum_bytes = 8;
constexpr size_t header_bytes = 16;
constexpr size_t most_text_bytes = 64 << 10;

uint64_t fnv1a(std::string_view bytes) {
    uint64_t sum = 0xcbf29ce484222325;
    for (unsigned char byte : bytes)
        sum = (sum ^ byte) * 0x100000001b3;
    return sum;
}

class MetadataWriter {
    std::string bytes_;

  public:
    template <class Number> void number(const Number& value) {
        for (size_t i = 0; i < sizeof value; i++)
            bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
    }
    void uuid(const std::array<uint8_t, 16>& uuid) { bytes_.append(reinterpret_cast<const char*>(uuid.data()), uuid.size()); }
    void string(const std::string& text) {
        number(static_cast<uint32_t>(text.size()));
        bytes_ += text;
    }

    explicit MetadataWriter(uint64_t magic) {
        number(magic);
        number(version);
        number(uint32_t{0}); // the length, once it is known
    }
    std::string finish() {
        uint32_t length = static_cast<uint32_t>(bytes_.size() + sum_bytes);
        for (size_t i = 0; i < sizeof length; i++)
            bytes_[12 + i] = static_cast<char>(length >> (8 * i));
        number(fnv1a(bytes_));
        return std::move(bytes_);
    }
};

/// Reads as long as there is something to read; what_is_wrong() afterwards says whether the fields were all there, and nothing else.
class MetadataReader {
    std::string_view rest_;
    size_t length_;
    std::string failure_;

    void fail(std::string why) {
        if (failure_.empty())
            failure_ = std::move(why);
    }
    std::string_view take(size_t count) {
        if (count > rest_.size()) {
            fail(text("a field of ", count, " bytes at byte ", length_ - rest_.size(), " of ", length_));
            return {};
        }
        std::string_view taken = rest_.substr(0, count);
        rest_.remove_prefix(count);
        return taken;
    }

  public:
    explicit MetadataReader(std::string_view bytes) : rest_(bytes), length_(bytes.size()) {}

    template <class Number> void number(Number& into) {
        uint64_t value = 0;
        std::string_view bytes = take(sizeof(Number));
        for (size_t i = 0; i < bytes.size(); i++)
            value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
        into = static_cast<Number>(value);
    }
    template <class Number> Number next() {
        Number value{};
        number(value);
        return value;
    }
    void uuid(PoolUuid& into) {
        std::string_view bytes = take(into.size());
        std::memcpy(into.data(), bytes.data(), bytes.size());
    }
    void string(std::string& into) {
        auto length = next<uint32_t>();
        if (length > most_text_bytes)
            fail(text("a text of ", length, " bytes, ", most_text_bytes, " at most"));
        else
            into = take(length);
    }
    /// Empty if all fields were there.
    std::string what_is_wrong() const {
        return failure_.empty() && !rest_.empty() ? text(rest_.size(), " bytes after the last field") : failure_;
    }
};

/// Checks what both kinds have in common; the fields are the rest of `bytes`.
Status open_envelope(std::string_view& bytes, uint64_t magic, std::string_view what) {
    MetadataReader reader(bytes);
    if (bytes.size() < header_bytes + sum_bytes || reader.next<uint64_t>() != magic)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", bytes.size(), " bytes are no ", what, " of this backend")};
    if (auto found = reader.next<uint32_t>(); found != version)
        return {NIXL_ERR_MISMATCH,
                text("CXL: ", what, " of version ", found, ", this plugin knows ", version, ": use the same everywhere")};
    std::string_view summed = bytes.substr(0, bytes.size() - sum_bytes);
    if (reader.next<uint32_t>() != bytes.size() || MetadataReader(bytes.substr(summed.size())).next<uint64_t>() != fnv1a(summed))
        return {NIXL_ERR_INVALID_PARAM, text("CXL: ", what, " is damaged: its length or sum is wrong")};
    bytes = summed.substr(header_bytes);
    return {};
}

Status malformed(std::string_view what, std::string_view wrong) {
    return {NIXL_ERR_INVALID_PARAM, text("CXL: ", what, " is invalid: ", wrong,
                                         ". Load the agent's metadata again, made by the release of the plugin that runs here")};
}

bool is_kind(RegionKind kind) {
    return kind >= RegionKind::heap && kind <= RegionKind::file;
}

/// The fields in order, for a writer and for a reader.
template <class Bytes, class Region>
    requires std::same_as<std::remove_const_t<Region>, PublicRegion>
void fields(Bytes& bytes, Region& region) {
    bytes.uuid(region.pool);
    bytes.number(region.engine);
    bytes.number(region.registration);
    bytes.number(region.kind);
    bytes.number(region.base);
    bytes.number(region.offset);
    bytes.number(region.len_bytes);
    bytes.number(region.device);
}

template <class Bytes, class Info>
    requires std::same_as<std::remove_const_t<Info>, ConnInfo>
void fields(Bytes& bytes, Info& info) {
    bytes.uuid(info.pool);
    bytes.number(info.engine);
    bytes.uuid(info.machine);
    bytes.number(info.slot);
    bytes.number(info.process.boot);
    bytes.number(info.process.namespace_id);
    bytes.number(info.process.start_ticks);
    bytes.number(info.process.pid);
    bytes.string(info.agent);
    bytes.string(info.ring);
}

template <class Made> std::string write(uint64_t magic, const Made& made) {
    MetadataWriter out(magic);
    fields(out, made);
    return out.finish();
}

template <class Made> Status read(std::string_view bytes, uint64_t magic, std::string_view what, Made& made) {
    if (Status opened = open_envelope(bytes, magic, what); !opened.ok())
        return opened;
    MetadataReader in(bytes);
    fields(in, made);
    std::string wrong = in.what_is_wrong();
    return wrong.empty() ? Status() : malformed(what, wrong);
}

} // namespace

std::string encode(const PublicRegion& region) {
    return write(region_magic, region);
}

Status decode(std::string_view bytes, PublicRegion& region) {
    constexpr std::string_view what = "metadata of a registration";
    PublicRegion found;
    if (Status status = read(bytes, region_magic, what, found); !status.ok())
        return status;
    if (!is_kind(found.kind))
        return malformed(what, text("a region of unknown kind ", static_cast<uint32_t>(found.kind)));
    constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
    for (auto [start, name] : {std::pair(found.base, "address"), std::pair(found.offset, "pool offset")})
        if (found.len_bytes > most - start)
            return malformed(what, text(found.len_bytes, " bytes from ", name, " ", hex(start), " on end beyond all addresses"));
    region = found;
    return {};
}

std::string encode(const ConnInfo& info) {
    return write(conn_magic, info);
}

Status decode(std::string_view bytes, ConnInfo& info) {
    constexpr std::string_view what = "connection information";
    ConnInfo found;
    if (Status status = read(bytes, conn_magic, what, found); !status.ok())
        return status;
    if (found.ring.size() > CXL_SHM_MAX_KEY_BYTES)
        return malformed(
            what, text("the name that the engine listens under has ", found.ring.size(), " bytes, ", CXL_SHM_MAX_KEY_BYTES, " at most"));
    if (size_t zero = found.ring.find('\0'); zero != std::string::npos)
        return malformed(what, text("the name that the engine listens under has a zero byte at ", zero));
    info = std::move(found);
    return {};
}

std::string hex16(uint64_t id) {
    std::string digits(16, '0');
    for (size_t i = 16; i-- > 0; id >>= 4)
        digits[i] = "0123456789abcdef"[id & 15];
    return digits;
}

std::string uuid_text(const PoolUuid& uuid) {
    std::string digits;
    for (size_t i = 0; i < uuid.size(); i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            digits.push_back('-');
        digits.push_back("0123456789abcdef"[uuid[i] >> 4]);
        digits.push_back("0123456789abcdef"[uuid[i] & 15]);
    }
    return digits;
}

uint64_t random_id() {
    uint64_t id = 0;
    if (getrandom(&id, sizeof id, 0) == static_cast<ssize_t>(sizeof id) && id != 0)
        return id;
    // Kernels without it are older than any that has CXL; still, two engines must never have one number.
    static std::atomic<uint64_t> calls{0};
    auto now = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    return (now << 20) ^ (static_cast<uint64_t>(getpid()) << 8) ^ (calls.fetch_add(1) + 1);
}

} // namespace kvbm_cxl
