// SPDX-License-Identifier: Apache-2.0
//
// The layouts that releases 1.3.1 to 1.5.1 of NIXL agree on. Included after NIXL's own headers or ours: whichever it was, a difference
// stops the build here.
#pragma once

#include <cstddef>

static_assert(__cplusplus >= 202002L && _GLIBCXX_USE_CXX11_ABI == 1, "NIXL is C++20 with libstdc++'s new strings");
static_assert(sizeof(void*) == 8 && sizeof(std::string) == 32 && sizeof(nixl_b_params_t) == 56);
// NIXL's engine has one, and the C library says how large it is.
#ifdef __aarch64__
inline constexpr std::size_t nixl_mutex_bytes = 48;
#else
inline constexpr std::size_t nixl_mutex_bytes = 40;
#endif
static_assert(sizeof(std::mutex) == nixl_mutex_bytes);

static_assert(DRAM_SEG == 0 && VRAM_SEG == 1 && BLK_SEG == 2 && OBJ_SEG == 3 && FILE_SEG == 4 && sizeof(nixl_mem_t) == 4);
static_assert(NIXL_READ == 0 && NIXL_WRITE == 1 && sizeof(nixl_xfer_op_t) == 4 && sizeof(nixl_status_t) == 4);
static_assert(NIXL_IN_PROG == 1 && NIXL_SUCCESS == 0 && NIXL_ERR_NO_TELEMETRY == -12);

static_assert(sizeof(nixlBasicDesc) == 24 && sizeof(nixlBlobDesc) == 56 && sizeof(nixlMetaDesc) == 32);
static_assert(sizeof(nixlRemoteMetaDesc) == 64 && sizeof(nixl_meta_dlist_t) == 40 && sizeof(nixl_reg_dlist_t) == 40);
static_assert(sizeof(nixlTelemetryEvent) == 16 && sizeof(nixlBackendReqH) == 8 && sizeof(nixlBackendMD) == 16);
static_assert(sizeof(nixlBackendInitParams) == 96 && sizeof(nixlBackendOptionalArgs) == 72);
static_assert(sizeof(nixlBackendEngine) == 168 + nixl_mutex_bytes);

// GCC knows the offsets in these classes, and says that the language does not promise them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
static_assert(offsetof(nixlBasicDesc, addr) == 0 && offsetof(nixlBasicDesc, len) == 8 && offsetof(nixlBasicDesc, devId) == 16);
static_assert(offsetof(nixlBlobDesc, metaInfo) == 24 && offsetof(nixlMetaDesc, metadataP) == 24);
static_assert(offsetof(nixlRemoteMetaDesc, remoteAgent) == 32);
static_assert(offsetof(nixlBackendInitParams, localAgent) == 0 && offsetof(nixlBackendInitParams, type) == 32);
static_assert(offsetof(nixlBackendInitParams, customParams) == 64 && offsetof(nixlBackendInitParams, enableProgTh) == 72);
static_assert(offsetof(nixlBackendInitParams, pthrDelay) == 80 && offsetof(nixlBackendInitParams, syncMode) == 88);
static_assert(offsetof(nixlBackendInitParams, enableTelemetry_) == 92);
static_assert(offsetof(nixlBackendOptionalArgs, notifMsg) == 0 && offsetof(nixlBackendOptionalArgs, hasNotif) == 32);
static_assert(offsetof(nixlBackendOptionalArgs, customParam) == 40);
#pragma GCC diagnostic pop
