// SPDX-License-Identifier: Apache-2.0
//
// What agents tell each other, as bytes: the public metadata of a registration and the connection information of an engine. Both come from
// other processes through channels that any process may write to: parsing is bounded, and whatever does not verify is refused.
//
// Layout, all numbers little-endian: magic (8), version (4), length of the whole (4), the fields in the order of the structure, and an
// FNV-1a sum (8) over everything before it. Texts are a length (4) and their bytes.
#pragma once

#include "support/pool.h"
#include "support/process.h"

namespace kvbm_cxl {

/// Identity under which a machine joins pools.
using MachineId = std::array<uint8_t, 16>;

/// The memory of a registration.
enum class RegionKind : uint32_t {
    heap = 1,   // ordinary memory of a process
    pool = 2,   // memory of the pool
    device = 3, // memory of a GPU
    object = 4, // a key of the prefix cache
    file = 5    // a file or device
};

/// The public metadata of a registration.
struct PublicRegion {
    PoolUuid pool{};
    uint64_t engine = 0;       // of the engine that has it
    uint64_t registration = 0; // that engine never uses it for other memory
    RegionKind kind = RegionKind::heap;
    uint64_t base = 0;   // address in the process that registered it
    uint64_t offset = 0; // RegionKind::pool: of the first byte in the pool; else 0
    uint64_t len_bytes = 0;
    uint64_t device = 0; // devId of the registration

    bool operator==(const PublicRegion&) const = default;
};

/// The connection information of an engine.
struct ConnInfo {
    PoolUuid pool{};
    uint64_t engine = 0; // random: another one after a restart
    MachineId machine{};
    uint32_t slot = 0; // of its host
    ProcessMark process;
    std::string agent;
    std::string ring; // name that it listens under
};

std::string encode(const PublicRegion& region);
std::string encode(const ConnInfo& info);

/// NIXL_ERR_MISMATCH for another version, NIXL_ERR_INVALID_PARAM for anything else that is no such thing.
Status decode(std::string_view bytes, PublicRegion& region);
Status decode(std::string_view bytes, ConnInfo& info);

/// 16 hexadecimal digits.
std::string hex16(uint64_t id);
std::string uuid_text(const PoolUuid& uuid);

/// A random number that no other engine has.
uint64_t random_id();

} // namespace kvbm_cxl
