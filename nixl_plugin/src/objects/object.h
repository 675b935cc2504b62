// SPDX-License-Identifier: Apache-2.0
//
// Objects by key (OBJ_SEG): the blocks of the pool's prefix cache. A WRITE publishes one, a READ gets it on any host, and queryMem tells
// whether it is there.
//
// An object is immutable. A WRITE has to cover it whole: the pieces of one transfer that name it begin at offset 0 and follow one another
// without gap or overlap, in any order in the list. Publishing a name that is there with the same length succeeds and changes nothing: the
// first writer wins. A READ may be of any ranges.
#pragma once

#include "transfer/storage.h"
#include <array>

namespace kvbm_cxl {

/// What a block is called, and how messages name it.
struct ObjectName {
    cxl_shm_block_id_t id{};
    std::string text;
};

/// The name that a registration gives: metaInfo of 32 hexadecimal digits is the key, of 64 the namespace and the key; any other bytes are
/// hashed to a key, as cxl_shm_cache_key() does without a parent. Without metaInfo, the digits of devId are. The namespace is that of the
/// options, hashed likewise unless it is 32 hexadecimal digits.
Status name_object(const std::string& name_space, uint64_t device, std::string_view meta_info, ObjectName& name);

/// An object that is registered.
class Object : public RegistrationExtra {
  public:
    ObjectName name;
};

/// Opens the pool's cache, unless this process has. NIXL_ERR_NOT_SUPPORTED if the pool was formatted without one.
Status open_objects(const Pool& pool, const Options& options);

/// Registers an object.
Status open_object(const Core& core, uint64_t device, const std::string& meta_info, std::unique_ptr<RegistrationExtra>& object);

/// A local piece, and where in its object it belongs.
struct ObjectPiece {
    LocalPiece local;
    uint64_t offset = 0;
};

/// Sorts the pieces of one object by offset. An error unless they are the whole of it, from 0 on, without gap or overlap.
Status check_whole(const ObjectName& name, std::vector<ObjectPiece>& pieces);

/// Publishes an object from pieces that check_whole() passed. While another writer has it, waits: NIXL_ERR_NOT_ALLOWED if that has not
/// ended after `timeout_ms`.
Status publish_object(Core& core, const ObjectName& name, const std::vector<ObjectPiece>& pieces, const std::atomic<bool>& stop);

/// Copies ranges of an object, verified: NIXL_ERR_NOT_FOUND if it is not there, NIXL_ERR_MISMATCH for ranges that it does not have. After a
/// failure the pieces may hold anything.
Status read_object(Core& core, const ObjectName& name, const std::vector<ObjectPiece>& pieces, const std::atomic<bool>& stop);

/// For each name: size, tier, namespace and key, or nothing.
Status query_objects(const Core& core, const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers);

/// The part of a transfer whose remote side is objects.
Status make_object_part(const std::shared_ptr<Core>& core, nixl_xfer_op_t operation, Pairs pairs, std::unique_ptr<Part>& part);

} // namespace kvbm_cxl
