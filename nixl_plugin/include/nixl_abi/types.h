// SPDX-License-Identifier: Apache-2.0
//
// The vocabulary of NIXL's plugin interface, version 1, as its releases 1.3.1 to 1.5.1 have it: our own declarations, for machines on which
// NIXL's headers are not installed. Names, values and layouts are NIXL's, because the binary interface demands them; layout.h asserts them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// Kinds of memory.
enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };

/// What a transfer does, seen from the side that posts it.
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };

/// Results; negative ones are errors.
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_UNKNOWN = -8,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_REMOTE_DISCONNECT = -10,
    NIXL_ERR_CANCELED = -11,
    NIXL_ERR_NO_TELEMETRY = -12
};

/// How an agent synchronises its threads.
enum class nixl_thread_sync_t : int { NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT, NIXL_THREAD_SYNC_RW, NIXL_THREAD_SYNC_DEFAULT = 0 };

/// What an estimate of a transfer's cost rests on.
enum class nixl_cost_t : int { ANALYTICAL_BACKEND = 0 };

using nixl_backend_t = std::string;
using nixl_blob_t = std::string; // bytes, zeros included
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
using notif_list_t = std::vector<std::pair<std::string, std::string>>; // agent, message
using nixlMemViewH = void*;

/// Only ever passed by pointer, and never looked into.
struct nixlAgentOptionalArgs;
using nixl_opt_args_t = nixlAgentOptionalArgs;
