// SPDX-License-Identifier: Apache-2.0
//
// Metadata comes from any process: what was encoded is read again, and nothing else is taken for it.
#include "support/pools.h"
#include "transfer/metadata.h"
#include <random>

using namespace kvbm_cxl;

namespace {

PublicRegion region() {
    PublicRegion made;
    for (size_t i = 0; i < made.pool.size(); i++)
        made.pool[i] = static_cast<uint8_t>(i * 17 + 3);
    made.engine = 0x0123456789abcdef;
    made.registration = 42;
    made.kind = RegionKind::pool;
    made.base = 0x7f0012345000;
    made.offset = 0x400000;
    made.len_bytes = 123'457;
    made.device = 5;
    return made;
}

ConnInfo info() {
    ConnInfo made;
    made.pool = region().pool;
    made.engine = 0xfedcba9876543210;
    made.slot = 3;
    made.process = {11, 12, 13, 4711};
    made.agent = std::string("decode\0 3", 9);
    made.ring = "nixl.fedcba9876543210";
    return made;
}

bool same(const PublicRegion& one, const PublicRegion& other) {
    return encode(one) == encode(other);
}

/// The sum at the end as it has to be, so that a test reaches what lies behind it.
std::string summed(std::string bytes) {
    uint64_t sum = 0xcbf29ce484222325;
    for (size_t i = 0; i + 8 < bytes.size(); i++)
        sum = (sum ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3;
    for (size_t i = 0; i < 8; i++)
        bytes[bytes.size() - 8 + i] = static_cast<char>(sum >> (8 * i));
    return bytes;
}

void round_trips() {
    PublicRegion read_region;
    CHECK_OK(decode(encode(region()), read_region));
    CHECK(same(read_region, region()) && read_region.len_bytes == 123'457 && read_region.kind == RegionKind::pool);
    ConnInfo read_info;
    CHECK_OK(decode(encode(info()), read_info));
    CHECK(read_info.pool == info().pool && read_info.engine == info().engine && read_info.slot == 3 && read_info.process == info().process);
    CHECK(read_info.agent == info().agent && read_info.ring == info().ring);
    // NIXL's tests want as much.
    CHECK(encode(ConnInfo()).size() + 21 >= 100);
    CHECK(decode(encode(region()), read_info).code() == NIXL_ERR_INVALID_PARAM);
    CHECK(decode(encode(info()), read_region).code() == NIXL_ERR_INVALID_PARAM);
}

template <class Made> void damaged(const Made& made) {
    const std::string bytes = encode(made);
    for (size_t length = 0; length < bytes.size(); length++) {
        Made read;
        CHECK(!decode(std::string_view(bytes).substr(0, length), read).ok());
    }
    for (size_t bit = 0; bit < bytes.size() * 8; bit++) {
        std::string flipped = bytes;
        flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
        Made read;
        CHECK(!decode(flipped, read).ok());
    }
    Made read;
    CHECK(!decode(bytes + '\0', read).ok());
    std::string newer = bytes;
    newer[8]++;
    CHECK(decode(summed(newer), read).code() == NIXL_ERR_MISMATCH);
}

/// A refusal says which field is wrong, its value, and what to do.
template <class Made> void refused(const std::string& bytes, const std::string& wanted) {
    Made read;
    Status status = decode(summed(bytes), read);
    bool is_as_wanted = status.code() == NIXL_ERR_INVALID_PARAM && status.reason().find(wanted) != std::string::npos &&
                        status.reason().find("Load the agent's metadata again") != std::string::npos;
    if (!is_as_wanted)
        std::fprintf(stderr, "\"%s\", wanted \"%s\"\n", status.reason().c_str(), wanted.c_str());
    CHECK(is_as_wanted);
}

/// `bytes` with its length as it has to be after `change` of the fields.
template <class Change> std::string changed(std::string bytes, const Change& change) {
    change(bytes);
    for (size_t i = 0; i < 4; i++)
        bytes[12 + i] = static_cast<char>(bytes.size() >> (8 * i));
    return bytes;
}

void refusals_name_the_field_and_its_value() {
    PublicRegion kind = region(), base = region(), offset = region();
    kind.kind = static_cast<RegionKind>(77);
    base.base = 0xfffffffffffffff0;
    offset.offset = 0xffffffffffff0000;
    refused<PublicRegion>(encode(kind), "a region of unknown kind 77");
    refused<PublicRegion>(encode(base), "123457 bytes from address 0xfffffffffffffff0");
    refused<PublicRegion>(encode(offset), "123457 bytes from pool offset 0xffffffffffff0000");
    auto longer = [](std::string& bytes) { bytes.insert(bytes.size() - 8, "abc"); };
    auto shorter = [](std::string& bytes) { bytes.erase(bytes.size() - 12, 4); };
    refused<PublicRegion>(changed(encode(region()), longer), "3 bytes after the last field");
    refused<PublicRegion>(changed(encode(region()), shorter), "a field of 8 bytes at byte 60 of 64");
    ConnInfo zero = info(), name = info(), agent = info();
    zero.ring = std::string("nixl\0x", 6);
    name.ring = std::string(CXL_SHM_MAX_KEY_BYTES + 1, 'n');
    agent.agent = std::string((64 << 10) + 1, 'a');
    refused<ConnInfo>(encode(zero), "a zero byte at 4");
    refused<ConnInfo>(encode(name), text("has ", CXL_SHM_MAX_KEY_BYTES + 1, " bytes, ", CXL_SHM_MAX_KEY_BYTES, " at most"));
    refused<ConnInfo>(encode(agent), "a text of 65537 bytes, 65536 at most");
}

void hostile() {
    std::mt19937_64 random(20);
    for (int turn = 0; turn < 50'000; turn++) {
        bool is_region = turn % 2;
        std::string bytes = is_region ? encode(region()) : encode(info());
        for (int count = static_cast<int>(random() % 6) + 1; count > 0; count--)
            bytes[16 + random() % (bytes.size() - 24)] = static_cast<char>(random());
        bytes = summed(bytes);
        PublicRegion read_region;
        ConnInfo read_info;
        // With a right sum it may be right; then it is of a kind that there is, and within its bounds.
        if (is_region && decode(bytes, read_region).ok()) {
            CHECK(read_region.kind >= RegionKind::heap && read_region.kind <= RegionKind::file);
            CHECK(read_region.base + read_region.len_bytes >= read_region.base);
            CHECK(read_region.offset + read_region.len_bytes >= read_region.offset);
        }
        if (!is_region && decode(bytes, read_info).ok())
            CHECK(read_info.ring.size() <= CXL_SHM_MAX_KEY_BYTES && read_info.agent.size() <= bytes.size());
        std::string noise(random() % 200, '\0');
        for (char& byte : noise)
            byte = static_cast<char>(random());
        CHECK(!decode(noise, read_region).ok() && !decode(noise, read_info).ok());
    }
}

void words() {
    CHECK(hex16(0) == "0000000000000000" && hex16(0xfedcba9876543210) == "fedcba9876543210");
    CHECK(uuid_text(region().pool) == "03142536-4758-697a-8b9c-adbecfe0f102");
    CHECK(random_id() != random_id());
}

} // namespace

int main() {
    round_trips();
    damaged(region());
    damaged(info());
    refusals_name_the_field_and_its_value();
    hostile();
    words();
}
