// SPDX-License-Identifier: Apache-2.0
//
// The class that a plugin derives its engine from, and what passes through its calls. See types.h.
#pragma once

#include "descriptors.h"
#include <mutex>

/// What a transfer can be posted with.
struct nixlBackendOptionalArgs {
    nixl_blob_t notifMsg;
    bool hasNotif = false;
    nixl_blob_t customParam;
};
using nixl_opt_b_args_t = nixlBackendOptionalArgs;

/// What an engine is made with.
class nixlBackendInitParams {
  public:
    std::string localAgent;
    nixl_backend_t type;
    nixl_b_params_t* customParams = nullptr;
    bool enableProgTh = false;
    uint64_t pthrDelay = 0; // microseconds
    nixl_thread_sync_t syncMode = nixl_thread_sync_t::NIXL_THREAD_SYNC_DEFAULT;
    bool enableTelemetry_ = false;
};

/// A plugin's data of a transfer.
class nixlBackendReqH {
  public:
    nixlBackendReqH() = default;
    virtual ~nixlBackendReqH() = default;
};

/// A plugin's data of a registration, local or remote.
class nixlBackendMD {
  protected:
    bool isPrivateMD;

  public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;
};

/// An event of the telemetry, which this project does not use: there for the layout of the engine.
class nixlTelemetryEvent {
    uint64_t what_[2];
};

/// An engine. NIXL calls the virtual functions by their place in the table, so that their order is part of the interface.
class nixlBackendEngine {
    nixl_backend_t backend_type_;
    nixl_b_params_t custom_params_;
    std::vector<nixlTelemetryEvent> telemetry_events_;
    std::mutex telemetry_events_mutex_;

  protected:
    bool initErr = false; // set by a constructor that failed: NIXL destroys the engine and answers NIXL_ERR_BACKEND
    const std::string localAgent;
    const bool enableTelemetry_;

    /// Publishes a value that applications read with the parameters of the backend. NIXL_ERR_NOT_ALLOWED if the key is there.
    [[nodiscard]] nixl_status_t setInitParam(const std::string& key, const std::string& value) {
        return custom_params_.emplace(key, value).second ? NIXL_SUCCESS : NIXL_ERR_NOT_ALLOWED;
    }

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams* params)
        : backend_type_(params->type), custom_params_(*params->customParams), localAgent(params->localAgent),
          enableTelemetry_(params->enableTelemetry_) {}
    nixlBackendEngine(const nixlBackendEngine&) = delete;
    nixlBackendEngine& operator=(const nixlBackendEngine&) = delete;
    virtual ~nixlBackendEngine() = default;

    bool getInitErr() const noexcept { return initErr; }
    const nixl_b_params_t& getCustomParams() const noexcept { return custom_params_; }

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;

    virtual nixl_status_t registerMem(const nixlBlobDesc& mem, const nixl_mem_t& kind, nixlBackendMD*& out) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD* meta) = 0;
    virtual nixl_status_t connect(const std::string& remote_agent) = 0;
    virtual nixl_status_t disconnect(const std::string& remote_agent) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD* input) = 0;

    virtual nixl_status_t prepXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                                   const std::string& remote_agent, nixlBackendReqH*& handle,
                                   const nixl_opt_b_args_t* opt_args = nullptr) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                                   const std::string& remote_agent, nixlBackendReqH*& handle,
                                   const nixl_opt_b_args_t* opt_args = nullptr) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH* handle) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH* handle) const = 0;

    virtual nixl_status_t prepMemView(const nixl_remote_meta_dlist_t&, nixlMemViewH&, const nixl_opt_b_args_t* = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t prepMemView(const nixl_meta_dlist_t&, nixlMemViewH&, const nixl_opt_b_args_t* = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}

    virtual nixl_status_t getPublicData(const nixlBackendMD*, std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string&, const std::string&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteMD(const nixlBlobDesc&, const nixl_mem_t&, const std::string&, nixlBackendMD*&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD*, nixlBackendMD*&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(notif_list_t&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string&, const std::string&) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t&, std::vector<nixl_query_resp_t>&) const { return NIXL_ERR_NOT_SUPPORTED; }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&, const std::string&,
                                           nixlBackendReqH* const&, std::chrono::microseconds&, std::chrono::microseconds&, nixl_cost_t&,
                                           const nixl_opt_args_t* = nullptr) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
};
