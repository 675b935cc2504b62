// SPDX-License-Identifier: Apache-2.0
//
// What the entry point of a plugin hands over. See types.h.
#pragma once

#include "engine.h"

#define NIXL_PLUGIN_API_VERSION 1
#define NIXL_PLUGIN_EXPORT __attribute__((visibility("default")))

/// The functions of a plugin; lives as long as the plugin is loaded.
class nixlBackendPlugin {
  public:
    int api_version; // NIXL_PLUGIN_API_VERSION
    nixlBackendEngine* (*create_engine)(const nixlBackendInitParams* params);
    void (*destroy_engine)(nixlBackendEngine* engine);
    const char* (*get_plugin_name)();
    const char* (*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

extern "C" {
NIXL_PLUGIN_EXPORT nixlBackendPlugin* nixl_plugin_init();
NIXL_PLUGIN_EXPORT void nixl_plugin_fini();
}
