// SPDX-License-Identifier: Apache-2.0
//
// The two functions that NIXL looks for, and what they hand over.
#include "cxl_backend.h"
#include "support/log.h"

namespace {

constexpr const char* plugin_version = KVBM_CXL_VERSION;

nixlBackendEngine* create_engine(const nixlBackendInitParams* params) {
    try {
        return new nixlCxlEngine(params);
    } catch (const std::exception& error) {
        kvbm_cxl::log(kvbm_cxl::LogLevel::error, kvbm_cxl::text("CXL: the backend cannot be created: ", error.what()));
    } catch (...) {
        kvbm_cxl::log(kvbm_cxl::LogLevel::error, "CXL: the backend cannot be created");
    }
    return nullptr;
}

void destroy_engine(nixlBackendEngine* engine) {
    delete engine;
}

nixl_b_params_t backend_options() {
    try {
        return kvbm_cxl::default_options();
    } catch (...) {
        return {};
    }
}

nixl_mem_list_t backend_mems() {
    try {
        return nixlCxlEngine::offered_mems();
    } catch (...) {
        return {};
    }
}

} // namespace

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin* nixl_plugin_init() {
    static nixlBackendPlugin plugin = {NIXL_PLUGIN_API_VERSION,       create_engine,   destroy_engine, [] { return "CXL"; },
                                       [] { return plugin_version; }, backend_options, backend_mems};
    return &plugin;
}

// Engines clean up after themselves, and the image stays loaded: there is nothing to do.
extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}
