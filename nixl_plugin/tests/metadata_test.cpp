// SPDX-License-Identifier: Apache-2.0
//
// Metadata comes from anybody: what was encoded is read again, and nothing else is taken for it.
#include "metadata.h"
#include "support/pools.h"
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
    made.pid = 4711;
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
    CHECK(read_info.pool == info().pool && read_info.engine == info().engine && read_info.slot == 3 && read_info.pid == 4711);
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
    hostile();
    words();
}
