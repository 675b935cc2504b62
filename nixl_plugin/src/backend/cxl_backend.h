// SPDX-License-Identifier: Apache-2.0
//
// The engine as NIXL sees it: checks what it is given, and leaves the work to the modules. No call lets an exception out.
#pragma once

#include "prepare.h"
#include <shared_mutex>
#include <unordered_map>

class nixlCxlEngine : public nixlBackendEngine {
    std::shared_ptr<kvbm_cxl::Core> core_;
    std::shared_ptr<kvbm_cxl::Peering> peering_;
    mutable std::shared_mutex peers_mutex_;
    std::map<std::string, std::shared_ptr<kvbm_cxl::Peer>> peers_;

    std::shared_ptr<kvbm_cxl::Peer> self_;
    std::shared_ptr<kvbm_cxl::cuda::Gpus> gpus_; // none where there are no GPUs
    nixl_mem_list_t mems_;
    /// The handles that NIXL has. It gives one back twice where memory that was registered twice is deregistered in one list: such a
    /// handle is found by its address alone, and not looked at.
    struct Held {
        std::unique_ptr<nixlBackendMD> md;
        bool is_ending = false; // a call deregisters it just now
    };
    mutable std::mutex held_mutex_;
    std::unordered_map<const nixlBackendMD*, Held> held_;

    /// Runs a call of NIXL's; whatever is thrown inside ends here. Refused in a child of fork.
    template <class Work> nixl_status_t guarded(const char* call, Work&& work) const noexcept;
    kvbm_cxl::Status start(const nixlBackendInitParams& params);
    static kvbm_cxl::ConnInfo conn_info(const kvbm_cxl::Core& core);
    kvbm_cxl::Status make_registration(const nixlBlobDesc& mem, nixl_mem_t kind, kvbm_cxl::Registration& registration);
    kvbm_cxl::Status make_parts(nixl_xfer_op_t operation, kvbm_cxl::Routed& routed, kvbm_cxl::XferRequest& request) const;
    /// Keeps a handle for NIXL.
    nixlBackendMD* hold(std::unique_ptr<nixlBackendMD> md);
    std::shared_ptr<kvbm_cxl::Peer> find_peer(const std::string& agent) const;

  public:
    explicit nixlCxlEngine(const nixlBackendInitParams* params);
    ~nixlCxlEngine() override;

    /// The kinds of memory that there are on this machine, before anything is known of the pool.
    static nixl_mem_list_t offered_mems();

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override { return mems_; }

    nixl_status_t registerMem(const nixlBlobDesc& mem, const nixl_mem_t& kind, nixlBackendMD*& out) override;
    nixl_status_t deregisterMem(nixlBackendMD* meta) override;
    nixl_status_t connect(const std::string& remote_agent) override;
    nixl_status_t disconnect(const std::string& remote_agent) override;
    nixl_status_t unloadMD(nixlBackendMD* input) override;

    nixl_status_t prepXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                           const std::string& remote_agent, nixlBackendReqH*& handle,
                           const nixl_opt_b_args_t* opt_args = nullptr) const override;
    nixl_status_t postXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                           const std::string& remote_agent, nixlBackendReqH*& handle,
                           const nixl_opt_b_args_t* opt_args = nullptr) const override;
    nixl_status_t checkXfer(nixlBackendReqH* handle) const override;
    nixl_status_t releaseReqH(nixlBackendReqH* handle) const override;

    nixl_status_t getPublicData(const nixlBackendMD* meta, std::string& data) const override;
    nixl_status_t getConnInfo(std::string& data) const override;
    nixl_status_t loadRemoteConnInfo(const std::string& remote_agent, const std::string& data) override;
    nixl_status_t loadRemoteMD(const nixlBlobDesc& input, const nixl_mem_t& kind, const std::string& remote_agent,
                               nixlBackendMD*& output) override;
    nixl_status_t loadLocalMD(nixlBackendMD* input, nixlBackendMD*& output) override;
    nixl_status_t getNotifs(notif_list_t& notifs) override;
    nixl_status_t genNotif(const std::string& remote_agent, const std::string& message) const override;
    nixl_status_t queryMem(const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers) const override;
    nixl_status_t estimateXferCost(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                                   const std::string& remote_agent, nixlBackendReqH* const& handle, std::chrono::microseconds& duration,
                                   std::chrono::microseconds& margin, nixl_cost_t& method,
                                   const nixl_opt_args_t* extra = nullptr) const override;
};
