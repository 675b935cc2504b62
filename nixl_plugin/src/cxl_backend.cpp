// SPDX-License-Identifier: Apache-2.0
#include "cxl_backend.h"
#include "log.h"

using namespace kvbm_cxl;

namespace {

/// NIXL's handle of a local registration.
struct LocalMd : nixlBackendMD {
    std::shared_ptr<Registration> registration;
    std::string meta_info;

    LocalMd() : nixlBackendMD(true) {}
};

/// NIXL's handle of memory as the target of transfers: of a peer, or of this engine itself.
struct RemoteMd : nixlBackendMD {
    std::shared_ptr<const RemoteRegion> region;

    RemoteMd() : nixlBackendMD(false) {}
};

/// Runs a call of NIXL's; whatever is thrown inside ends here.
template <class Work> nixl_status_t guarded(const char* call, Work&& work) noexcept {
    try {
        return work();
    } catch (const std::exception& error) {
        return report(call, {NIXL_ERR_BACKEND, std::string("CXL: ") + call + ": " + error.what()});
    } catch (...) {
        return report(call, {NIXL_ERR_BACKEND, std::string("CXL: ") + call + ": unknown exception"});
    }
}

} // namespace

nixlCxlEngine::nixlCxlEngine(const nixlBackendInitParams* params) : nixlBackendEngine(params) {
    Status started = start(*params);
    if (!started.ok()) {
        log(LogLevel::error, started.reason());
        initErr = true;
    }
}

nixlCxlEngine::~nixlCxlEngine() = default;

Status nixlCxlEngine::start(const nixlBackendInitParams& params) {
    Options options;
    if (Status read = read_options(params.customParams ? *params.customParams : nixl_b_params_t{}, options); !read.ok())
        return read;
    auto core = std::make_shared<Core>(options);
    if (Status opened = Pool::open(options, core->pool); !opened.ok())
        return opened;
    core->agent = params.localAgent;
    core->id = random_id();
    enter_engine(core);
    core_ = std::move(core);
    return {};
}

nixl_mem_list_t nixlCxlEngine::supported_mems() {
    return {DRAM_SEG};
}
