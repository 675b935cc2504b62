// SPDX-License-Identifier: Apache-2.0
#include "object.h"
#include <algorithm>
#include <chrono>
#include <cstring>

namespace kvbm_cxl {

namespace {

constexpr size_t id_digits = 2 * CXL_SHM_ID_BYTES;
/// Between two attempts to publish while an eviction of the name is under way, or another writer has it.
constexpr auto pause = std::chrono::microseconds(100);

int digit(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/// Reads `digits`, all of them hexadecimal and two for each byte of `bytes`.
bool parse_hex(std::string_view digits, uint8_t* bytes) {
    if (!std::all_of(digits.begin(), digits.end(), [](char c) { return digit(c) >= 0; }))
        return false;
    for (size_t i = 0; i + 1 < digits.size(); i += 2)
        bytes[i / 2] = static_cast<uint8_t>(digit(digits[i]) << 4 | digit(digits[i + 1]));
    return true;
}

std::string hex_of(const uint8_t* bytes) {
    std::string digits;
    for (size_t i = 0; i < CXL_SHM_ID_BYTES; i++) {
        digits.push_back("0123456789abcdef"[bytes[i] >> 4]);
        digits.push_back("0123456789abcdef"[bytes[i] & 15]);
    }
    return digits;
}

/// Gives a pin back.
class Pin {
    cxl_pool_t* pool_;

  public:
    cxl_shm_block_t block{};
    explicit Pin(cxl_pool_t* pool) : pool_(pool) { block.struct_size = sizeof block; }
    ~Pin() {
        // Fails only once the cache is closed, which gave the pin back.
        if (block.handle)
            cxl_shm_cache_unpin(pool_, block.handle);
    }
    Pin(const Pin&) = delete;
    Pin& operator=(const Pin&) = delete;
};

uint64_t end_of(const ObjectPiece& piece) {
    return piece.offset + piece.local.len_bytes;
}

/// Whether the pieces, in the order of their offsets, are just the first `len_bytes` of an object.
bool is_whole(const std::vector<ObjectPiece>& pieces, uint64_t len_bytes) {
    uint64_t end = 0;
    for (const ObjectPiece& piece : pieces) {
        if (piece.offset != end)
            return false;
        end = end_of(piece);
    }
    return end == len_bytes;
}

std::vector<cxl_shm_piece_t> pieces_of(const std::vector<ObjectPiece>& pieces) {
    std::vector<cxl_shm_piece_t> list;
    list.reserve(pieces.size());
    for (const ObjectPiece& piece : pieces)
        list.push_back({piece.local.address, piece.local.len_bytes});
    return list;
}

} // namespace

Status name_object(const std::string& name_space, uint64_t device, std::string_view meta_info, ObjectName& name) {
    std::string digits = std::to_string(device);
    std::string_view key = meta_info.empty() ? std::string_view(digits) : meta_info;
    int status = CXL_SHM_OK;
    if (key.size() == 2 * id_digits && parse_hex(key, name.id.name_space)) {
        parse_hex(key.substr(id_digits), name.id.key);
    } else {
        if (name_space.size() != id_digits || !parse_hex(name_space, name.id.name_space))
            status = cxl_shm_cache_namespace(name_space.data(), name_space.size(), name.id.name_space);
        if (status == CXL_SHM_OK && (key.size() != id_digits || !parse_hex(key, name.id.key)))
            status = cxl_shm_cache_key(nullptr, key.data(), key.size(), name.id.key);
    }
    if (status != CXL_SHM_OK)
        return pool_failure(status, "naming an object");
    name.text = hex_of(name.id.name_space) + "/" + hex_of(name.id.key);
    return {};
}

Status open_objects(const Pool& pool, const Options& options) {
    cxl_shm_cache_options_t how{};
    how.struct_size = sizeof how;
    how.flags = options.object_checksums ? CXL_SHM_CACHE_CHECKSUMS : 0;
    switch (int status = cxl_shm_cache_open(pool.handle(), &how)) {
    case CXL_SHM_OK:
    case CXL_SHM_E_EXISTS: // by another engine of this process
        return {};
    case CXL_SHM_E_INVALID:
        return {NIXL_ERR_NOT_SUPPORTED, text("CXL: the pool holds no objects: ", cxl_shm_last_error(),
                                             ": format it with cells as large as the objects (cxlctl format --cells)")};
    default:
        return pool_failure(status, "opening the cache of the pool");
    }
}

Status open_object(const Core& core, uint64_t device, const std::string& meta_info, std::unique_ptr<RegistrationExtra>& object) {
    if (Status opened = open_objects(*core.pool, core.options); !opened.ok())
        return opened;
    auto made = std::make_unique<Object>();
    Status named = name_object(core.options.name_space, device, meta_info, made->name);
    if (named.ok())
        object = std::move(made);
    return named;
}

Status check_whole(const ObjectName& name, std::vector<ObjectPiece>& pieces) {
    std::erase_if(pieces, [](const ObjectPiece& piece) { return piece.local.len_bytes == 0; });
    std::sort(pieces.begin(), pieces.end(), [](const ObjectPiece& one, const ObjectPiece& other) { return one.offset < other.offset; });
    uint64_t end = 0;
    for (const ObjectPiece& piece : pieces) {
        if (piece.offset != end || piece.local.len_bytes > UINT64_MAX - end)
            return {NIXL_ERR_INVALID_PARAM, text("CXL: a WRITE to object ", name.text, " has to cover it whole, from offset 0 on: ",
                                                 piece.offset < end ? "bytes are given twice at offset " : "nothing is given at offset ",
                                                 std::min(end, piece.offset))};
        end = end_of(piece);
    }
    if (end == 0)
        return {NIXL_ERR_INVALID_PARAM, text("CXL: a WRITE to object ", name.text, " has no bytes")};
    return {};
}

Status publish_object(Core& core, const ObjectName& name, const std::vector<ObjectPiece>& pieces, const std::atomic<bool>& stop) {
    for (const ObjectPiece& piece : pieces) {
        if (Status ready = piece.local.refresh(); !ready.ok())
            return ready;
    }
    cxl_pool_t* pool = core.pool->handle();
    std::vector<cxl_shm_piece_t> list = pieces_of(pieces);
    uint64_t len_bytes = end_of(pieces.back());
    auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(core.options.timeout_ms);
    while (true) {
        if (stop.load(std::memory_order_relaxed))
            return cancelled();
        int status = cxl_shm_cache_publish(pool, &name.id, nullptr, list.data(), list.size());
        if (status == CXL_SHM_OK) {
            core.counters.add(CXL_SHM_COUNT_NIXL_OBJECTS_WRITTEN);
            core.counters.add(CXL_SHM_COUNT_NIXL_OBJECT_WRITTEN_BYTES, len_bytes);
            return {};
        }
        bool is_late = std::chrono::steady_clock::now() >= deadline;
        if (status == CXL_SHM_E_EXISTS) {
            uint64_t there_bytes = 0;
            int found = cxl_shm_cache_lookup(pool, &name.id, &there_bytes);
            if (found != CXL_SHM_OK && found != CXL_SHM_E_NOT_FOUND)
                return pool_failure(found, text("looking for object ", name.text));
            if (found == CXL_SHM_OK && there_bytes != len_bytes)
                return {NIXL_ERR_NOT_ALLOWED, text("CXL: object ", name.text, " is there with ", there_bytes,
                                                   " bytes and cannot change to ", len_bytes, ": evict it, or write to another key")};
            if (found == CXL_SHM_OK) {
                core.counters.add(CXL_SHM_COUNT_NIXL_OBJECTS_EXISTED);
                return {};
            }
            // It just went, or another writer has begun it, which may give up.
            if (is_late)
                return {NIXL_ERR_NOT_ALLOWED,
                        text("CXL: object ", name.text, " is being written by another process or agent, which did not end within ",
                             core.options.timeout_ms, " ms")};
        } else if (status != CXL_SHM_E_BUSY || is_late) {
            return pool_failure(status, text("publishing object ", name.text, " of ", len_bytes, " bytes"));
        }
        std::this_thread::sleep_for(pause);
    }
}

Status read_object(Core& core, const ObjectName& name, const std::vector<ObjectPiece>& pieces, const std::atomic<bool>& stop) {
    cxl_pool_t* pool = core.pool->handle();
    auto failed = [&](int status) {
        if (status == CXL_SHM_E_NOT_FOUND)
            core.counters.add(CXL_SHM_COUNT_NIXL_OBJECTS_MISSED);
        return pool_failure(status, text("reading object ", name.text));
    };
    Pin pin(pool);
    if (int status = cxl_shm_cache_pin(pool, &name.id, &pin.block); status != CXL_SHM_OK) {
        pin.block.handle = 0;
        return failed(status);
    }
    for (const ObjectPiece& piece : pieces) {
        if (piece.offset > pin.block.len_bytes || piece.local.len_bytes > pin.block.len_bytes - piece.offset)
            return {NIXL_ERR_MISMATCH, text("CXL: object ", name.text, " has ", pin.block.len_bytes, " bytes, not ", piece.local.len_bytes,
                                            " at offset ", piece.offset)};
        if (Status ready = piece.local.refresh(); !ready.ok())
            return ready;
    }
    int status = CXL_SHM_OK;
    if (is_whole(pieces, pin.block.len_bytes)) {
        std::vector<cxl_shm_piece_t> list = pieces_of(pieces);
        status = cxl_shm_cache_read(pool, pin.block.handle, list.data(), list.size());
    } else {
        for (const ObjectPiece& piece : pieces) {
            if (stop.load(std::memory_order_relaxed))
                return cancelled();
            const void* from = static_cast<const std::byte*>(pin.block.ptr) + piece.offset;
            if (status == CXL_SHM_OK && piece.local.len_bytes != 0)
                status = cxl_shm_copy_out(piece.local.address, from, piece.local.len_bytes);
        }
        // Only this shows that the copied bytes were the object.
        if (status == CXL_SHM_OK)
            status = cxl_shm_cache_check(pool, pin.block.handle);
    }
    // Stored bytes must not stay in the cache, whatever the outcome.
    Status published;
    for (const ObjectPiece& piece : pieces) {
        if (Status done = piece.local.publish(); !done.ok())
            published = done;
    }
    if (status != CXL_SHM_OK)
        return failed(status);
    if (!published.ok())
        return published;
    core.counters.add(CXL_SHM_COUNT_NIXL_OBJECTS_READ);
    for (const ObjectPiece& piece : pieces)
        core.counters.add(CXL_SHM_COUNT_NIXL_OBJECT_READ_BYTES, piece.local.len_bytes);
    return {};
}

Status query_objects(const Core& core, const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers) {
    if (Status opened = open_objects(*core.pool, core.options); !opened.ok())
        return opened;
    for (const nixlBlobDesc& desc : descs) {
        ObjectName name;
        if (Status named = name_object(core.options.name_space, desc.devId, desc.metaInfo, name); !named.ok())
            return named;
        uint64_t len_bytes = 0;
        int status = cxl_shm_cache_lookup(core.pool->handle(), &name.id, &len_bytes);
        if (status == CXL_SHM_E_NOT_FOUND)
            answers.emplace_back(std::nullopt);
        else if (status != CXL_SHM_OK)
            return pool_failure(status, text("looking for object ", name.text));
        else
            answers.emplace_back(nixl_b_params_t{{"size", std::to_string(len_bytes)},
                                                 {"tier", "cxl"},
                                                 {"namespace", hex_of(name.id.name_space)},
                                                 {"key", hex_of(name.id.key)}});
    }
    return {};
}

} // namespace kvbm_cxl
