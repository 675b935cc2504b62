// SPDX-License-Identifier: Apache-2.0
//
// NIXL's plugin interface: from its own headers where the build found them, else from our declarations. Everything else includes this.
#pragma once

#ifdef KVBM_CXL_OFFICIAL_NIXL_HEADERS
#include "backend/backend_plugin.h"
#else
#include "nixl_abi/plugin.h"
#endif

#include "nixl_abi/layout.h"

static_assert(NIXL_PLUGIN_API_VERSION == 1 && sizeof(nixlBackendPlugin) == 56, "another version of NIXL's plugin interface");
