// SPDX-License-Identifier: Apache-2.0
#include "cxl_backend.h"
#include "files/file.h"
#include "objects/object.h"
#include "support/log.h"
#include <algorithm>
#include <tuple>
#include <unistd.h>
#include <utility>

using namespace kvbm_cxl;

namespace {

/// Said once, without the locks that messages take as a rule: a thread of the parent may have held them at the fork.
nixl_status_t refused_in_child() noexcept {
    static std::atomic<bool> was_said{false};
    constexpr std::string_view message =
        "CXL: an agent is of use only to the process that made it, not to one that was forked from it: make "
        "another one there, best before any is made here\n";
    if (!was_said.exchange(true))
        (void)!write(STDERR_FILENO, message.data(), message.size());
    return NIXL_ERR_NOT_ALLOWED;
}

XferRequest& request_of(nixlBackendReqH* handle) {
    return *static_cast<RequestHandle*>(handle)->request;
}

} // namespace

template <class Work> nixl_status_t nixlCxlEngine::guarded(const char* call, Work&& work) const noexcept {
    if (core_ && core_->is_of_parent())
        return refused_in_child();
    try {
        return work();
    } catch (const std::exception& error) {
        return report(call, {NIXL_ERR_BACKEND, std::string("CXL: ") + call + ": " + error.what()});
    } catch (...) {
        return report(call, {NIXL_ERR_BACKEND, std::string("CXL: ") + call + ": unknown exception"});
    }
}

nixlCxlEngine::nixlCxlEngine(const nixlBackendInitParams* params) : nixlBackendEngine(params) {
    Status started = start(*params);
    if (!started.ok()) {
        log(LogLevel::error, started.reason());
        initErr = true;
    }
}

nixlCxlEngine::~nixlCxlEngine() {
    if (!core_)
        return;
    if (core_->is_of_parent()) {
        // Nothing can be ended here: it would wait for threads that this process does not have.
        (void)new std::tuple(std::move(core_), std::move(peering_), std::move(gpus_), std::move(held_));
        return;
    }
    core_->has_ended.store(true, std::memory_order_release);
    // Engines of this process and peers use this memory: not any more from here on.
    for (const auto& registration : core_->registry.all())
        registration->close();
    if (peering_) {
        // They would copy on until they find the links closed, whatever the memory is used for by then.
        peering_->take_back();
        peering_->shut_down();
    }
    for (const auto& registration : core_->registry.all()) {
        if (!registration->close_and_wait(core_->options.timeout_ms))
            log(LogLevel::warn, "CXL: an engine ends while its memory is in use by a transfer");
    }
    // A thread of theirs that is at the end of a transfer may hold it still, and with it all of this: it would end there, waiting for
    // itself.
    core_->workers.shut_down();
    if (gpus_)
        gpus_->shut_down();
    // Nothing is under way any more that could be counted.
    if (peering_)
        peering_->tell_last_counts();
}

Status nixlCxlEngine::start(const nixlBackendInitParams& params) {
    Options options;
    if (Status read = read_options(params.customParams ? *params.customParams : nixl_b_params_t{}, options); !read.ok())
        return read;
    auto core = std::make_shared<Core>(options);
    if (Status opened = Pool::open(options, core->pool); !opened.ok())
        return opened;
    core->agent = params.localAgent;
    core->id = random_id();
    core->has_thread = params.enableProgTh;
    auto self = std::make_shared<Peer>();
    self->agent = core->agent;
    self->info = conn_info(*core);
    self->local = core;
    self->is_local = self->is_same_pool = self->is_coherent = true;
    self_ = std::move(self);
    core_ = core;
    mems_ = {DRAM_SEG};
    if (cuda::is_offered(options.cuda_library)) {
        if (Status opened = cuda::Gpus::open(options.cuda_library, core->pool, gpus_); opened.ok())
            mems_.push_back(VRAM_SEG);
        else
            log(LogLevel::warn, opened.reason());
    }
    // The cache of a pool can be opened by one handle of a process: it is left to others of it until an object is registered.
    mems_.push_back(OBJ_SEG);
    mems_.push_back(FILE_SEG);
    if (Status begun = Peering::create(core, gpus_, peering_); !begun.ok())
        return begun;
    enter_engine(core);
    return {};
}

ConnInfo nixlCxlEngine::conn_info(const Core& core) {
    ConnInfo info;
    info.pool = core.pool->uuid();
    info.engine = core.id;
    (void)cxl_shm_machine_id(info.machine.data()); // only tells people where it is
    info.slot = core.pool->info().slot;
    info.process = own_process();
    info.agent = core.agent;
    info.ring = "nixl." + hex16(core.id);
    return info;
}

nixl_mem_list_t nixlCxlEngine::offered_mems() {
    nixl_mem_list_t mems = {DRAM_SEG, OBJ_SEG, FILE_SEG};
    Options options;
    if (read_options({}, options).ok() && cuda::is_offered(options.cuda_library))
        mems.push_back(VRAM_SEG);
    return mems;
}

std::shared_ptr<Peer> nixlCxlEngine::find_peer(const std::string& agent) const {
    std::shared_lock lock(peers_mutex_);
    auto found = peers_.find(agent);
    if (found != peers_.end())
        return found->second;
    return agent == core_->agent ? self_ : nullptr;
}

// ---- Memory ------------------------------------------------------------------------------------------------------------------------

Status nixlCxlEngine::make_registration(const nixlBlobDesc& mem, nixl_mem_t kind, Registration& registration) {
    if (std::find(mems_.begin(), mems_.end(), kind) == mems_.end())
        return {NIXL_ERR_NOT_SUPPORTED, text("CXL: memory of kind ", static_cast<int>(kind), " is not supported here")};
    switch (kind) {
    case DRAM_SEG:
        return resolve_dram(*core_->pool, registration);
    case VRAM_SEG:
        registration.kind = RegionKind::device;
        return gpus_->register_memory(mem.devId, mem.addr, mem.len, registration.extra);
    case OBJ_SEG:
        registration.kind = RegionKind::object;
        return open_object(*core_, mem.devId, mem.metaInfo, registration.extra);
    default:
        registration.kind = RegionKind::file;
        return open_file(*core_, mem.devId, mem.metaInfo, registration.extra);
    }
}

nixl_status_t nixlCxlEngine::registerMem(const nixlBlobDesc& mem, const nixl_mem_t& kind, nixlBackendMD*& out) {
    return guarded("registerMem", [&] {
        auto registration = std::make_shared<Registration>();
        registration->memory = kind;
        registration->base = mem.addr;
        registration->len_bytes = mem.len;
        registration->device = mem.devId;
        if (kind != DRAM_SEG && kind != VRAM_SEG)
            registration->label = mem.metaInfo;
        if (mem.addr > UINTPTR_MAX - mem.len)
            return report("register", {NIXL_ERR_INVALID_PARAM, text("CXL: registering ", mem.len, " bytes at ", hex(mem.addr),
                                                                    ": they end beyond the last address")});
        if (Status made = make_registration(mem, kind, *registration); !made.ok())
            return report(text("register:", kind, ":", made.code()), made);
        auto md = std::make_unique<LocalMd>(registration);
        core_->registry.add(registration);
        try {
            out = hold(std::move(md));
        } catch (...) {
            core_->registry.remove(*registration);
            throw;
        }
        return NIXL_SUCCESS;
    });
}

nixlBackendMD* nixlCxlEngine::hold(std::unique_ptr<nixlBackendMD> md) {
    std::lock_guard lock(held_mutex_);
    nixlBackendMD* handle = md.get();
    held_.emplace(handle, Held{std::move(md)});
    return handle;
}

nixl_status_t nixlCxlEngine::deregisterMem(nixlBackendMD* meta) {
    return guarded("deregisterMem", [&] {
        std::shared_ptr<Registration> registration;
        {
            std::lock_guard lock(held_mutex_);
            auto found = held_.find(meta);
            auto* md = found == held_.end() ? nullptr : dynamic_cast<LocalMd*>(found->second.md.get());
            if (!md)
                return report("deregister", {NIXL_ERR_INVALID_PARAM, "CXL: deregistering what this backend has not registered, or what "
                                                                     "was deregistered before"});
            if (std::exchange(found->second.is_ending, true))
                return report("deregister", {NIXL_ERR_NOT_ALLOWED, "CXL: deregistering memory that another thread deregisters"});
            registration = md->registration;
        }
        auto ended = [&](bool is_free) {
            std::lock_guard lock(held_mutex_);
            // A caller that gets an error may call again; NIXL's agent does not, so that the engine has it until it ends.
            if (is_free)
                held_.erase(meta);
            else
                held_.at(meta).is_ending = false;
        };
        Status released;
        try {
            core_->registry.remove(*registration);
            released = peering_->release(*registration);
        } catch (...) {
            ended(false);
            throw;
        }
        ended(released.ok());
        return released.ok() ? NIXL_SUCCESS : report("deregister", released);
    });
}

nixl_status_t nixlCxlEngine::getPublicData(const nixlBackendMD* meta, std::string& data) const {
    return guarded("getPublicData", [&] {
        auto* md = dynamic_cast<const LocalMd*>(meta);
        if (!md)
            return NIXL_ERR_INVALID_PARAM;
        data = encode(public_region(*core_, *md->registration));
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::loadLocalMD(nixlBackendMD* input, nixlBackendMD*& output) {
    return guarded("loadLocalMD", [&] {
        auto* md = dynamic_cast<LocalMd*>(input);
        if (!md)
            return NIXL_ERR_INVALID_PARAM;
        auto region = std::make_shared<RemoteRegion>();
        region->peer = self_;
        region->is = public_region(*core_, *md->registration);
        region->memory = md->registration->memory;
        region->own = md->registration;
        region->is_in_process = true;
        region->pool_address = md->registration->pool_address;
        output = hold(std::make_unique<RemoteMd>(std::move(region)));
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::loadRemoteMD(const nixlBlobDesc& input, const nixl_mem_t& kind, const std::string& remote_agent,
                                          nixlBackendMD*& output) {
    return guarded("loadRemoteMD", [&] {
        auto peer = find_peer(remote_agent);
        if (!peer)
            return report("load:" + remote_agent, {NIXL_ERR_NOT_FOUND, text("CXL: no connection information of agent ", remote_agent,
                                                                            " was loaded: load its metadata as a whole first")});
        auto region = std::make_shared<RemoteRegion>();
        region->peer = peer;
        region->memory = kind;
        if (Status read = decode(input.metaInfo, region->is); !read.ok())
            return report(text("load:", remote_agent, ":", read.code()),
                          read.within(text("CXL: loading metadata of agent ", remote_agent)));
        if (peer->is_local) {
            region->is_in_process = true;
            // Of an engine before it: no transfer is prepared with that.
            if (region->is.engine == peer->info.engine) {
                auto core = peer->local.lock();
                region->own = core ? core->registry.find(region->is.registration) : nullptr;
                if (!region->own)
                    return report("load",
                                  {NIXL_ERR_NOT_FOUND, text("CXL: agent ", remote_agent, " has deregistered what its metadata names")});
                // Any process may have made it, and here its addresses are used as they are.
                if (region->is != public_region(*core, *region->own))
                    return report("load:" + remote_agent,
                                  {NIXL_ERR_INVALID_PARAM, text("CXL: metadata of agent ", remote_agent,
                                                                " is not what its engine of this process has registered")});
                region->pool_address = region->own->pool_address;
            }
        } else if (region->is.kind == RegionKind::pool && region->is.pool == core_->pool->uuid() && region->is.len_bytes > 0) {
            if (Status found = core_->pool->range(region->is.offset, region->is.len_bytes, region->pool_address); !found.ok())
                return report(text("load:", remote_agent, ":pool"), found.within(text("CXL: loading metadata of agent ", remote_agent)));
            core_->pool->map_ahead(region->pool_address, region->is.len_bytes);
            region->own = std::make_shared<Registration>();
            peering_->lend(*region);
        }
        output = hold(std::make_unique<RemoteMd>(std::move(region)));
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::unloadMD(nixlBackendMD* input) {
    return guarded("unloadMD", [&] {
        Held unloaded; // ends after the lock is released
        std::lock_guard lock(held_mutex_);
        auto found = held_.find(input);
        if (found == held_.end() || !dynamic_cast<RemoteMd*>(found->second.md.get()))
            return NIXL_ERR_INVALID_PARAM;
        unloaded = std::move(found->second);
        held_.erase(found);
        return NIXL_SUCCESS;
    });
}

static Status query_dram(const Pool& pool, const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers) {
    for (const nixlBlobDesc& desc : descs) {
        Registration registration;
        registration.base = desc.addr;
        registration.len_bytes = desc.len;
        nixl_b_params_t answer = {{"tier", "heap"}, {"size", std::to_string(desc.len)}};
        Status located = locate_dram(pool, registration);
        if (located.code() == NIXL_ERR_BACKEND)
            return located;
        if (located.ok() && registration.kind == RegionKind::pool)
            answer = {{"tier", "pool"},
                      {"size", std::to_string(desc.len)},
                      {"pool", uuid_text(pool.uuid())},
                      {"offset", std::to_string(registration.pool_offset)}};
        answers.emplace_back(std::move(answer));
    }
    return {};
}

nixl_status_t nixlCxlEngine::queryMem(const nixl_reg_dlist_t& descs, std::vector<nixl_query_resp_t>& answers) const {
    return guarded("queryMem", [&] {
        answers.clear();
        Status asked;
        switch (descs.getType()) {
        case DRAM_SEG:
            asked = query_dram(*core_->pool, descs, answers);
            break;
        case OBJ_SEG:
            asked = query_objects(*core_, descs, answers);
            break;
        case FILE_SEG:
            asked = query_files(descs, answers);
            break;
        default:
            return NIXL_ERR_NOT_SUPPORTED;
        }
        return asked.ok() ? NIXL_SUCCESS : report("query", asked);
    });
}

// ---- Peers -------------------------------------------------------------------------------------------------------------------------

nixl_status_t nixlCxlEngine::getConnInfo(std::string& data) const {
    return guarded("getConnInfo", [&] {
        data = encode(self_->info);
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::loadRemoteConnInfo(const std::string& remote_agent, const std::string& data) {
    return guarded("loadRemoteConnInfo", [&] {
        auto peer = std::make_shared<Peer>();
        peer->agent = remote_agent;
        if (Status read = decode(data, peer->info); !read.ok())
            return report("conn:" + remote_agent, read.within(text("CXL: agent ", remote_agent)));
        peer->is_same_pool = peer->info.pool == core_->pool->uuid();
        if (auto core = find_engine(peer->info.engine)) {
            peer->local = core;
            peer->is_local = true;
        }
        // Under the emulator every process is a host of its own.
        bool is_same_host = peer->info.machine == self_->info.machine && std::string_view(core_->pool->info().memory).starts_with("native");
        peer->is_coherent = peer->is_local || core_->pool->is_coherent() || is_same_host;
        if (Status added = peering_->add(*peer); !added.ok())
            return report("conn:" + remote_agent, added);
        std::unique_lock lock(peers_mutex_);
        auto& known = peers_[remote_agent];
        // The same engine once more, as when metadata is loaded again, stays as it is.
        if (!known || known->info.engine != peer->info.engine)
            known = std::move(peer);
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::connect(const std::string& remote_agent) {
    return guarded("connect", [&] {
        auto peer = find_peer(remote_agent);
        if (!peer)
            return NIXL_ERR_NOT_FOUND;
        peering_->reach(*peer);
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::disconnect(const std::string& remote_agent) {
    return guarded("disconnect", [&] {
        std::shared_ptr<Peer> peer;
        {
            std::unique_lock lock(peers_mutex_);
            auto found = peers_.find(remote_agent);
            if (found == peers_.end())
                return remote_agent == core_->agent ? NIXL_SUCCESS : NIXL_ERR_NOT_FOUND;
            peer = std::move(found->second);
            peers_.erase(found);
        }
        peering_->remove(*peer);
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::getNotifs(notif_list_t& notifs) {
    return guarded("getNotifs", [&] {
        if (!notifs.empty())
            return report("notifs", {NIXL_ERR_INVALID_PARAM, "CXL: the list for notifications has to be empty"});
        peering_->take(notifs);
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::genNotif(const std::string& remote_agent, const std::string& message) const {
    return guarded("genNotif", [&] {
        auto peer = find_peer(remote_agent);
        if (!peer)
            return report("notify:" + remote_agent,
                          {NIXL_ERR_NOT_FOUND, text("CXL: notifying agent ", remote_agent, ": its metadata was not loaded")});
        Status told = peering_->deliver(*peer, message, {});
        return told.ok() ? NIXL_SUCCESS : report("notify:" + remote_agent, told);
    });
}

// ---- Transfers ---------------------------------------------------------------------------------------------------------------------

Status nixlCxlEngine::make_parts(nixl_xfer_op_t operation, Routed& routed, XferRequest& request) const {
    add_direct_parts(core_, operation, routed, request);
    for (Route route : {Route::staged, Route::device, Route::object, Route::file}) {
        Pairs& pairs = routed.of(route);
        if (pairs.empty())
            continue;
        std::unique_ptr<Part> part;
        Status made;
        switch (route) {
        case Route::staged:
            made = peering_->make_staged_part(operation, request.peer(), pairs, part);
            break;
        case Route::device:
            made = cuda::make_device_part(core_, gpus_, operation, pairs, part);
            break;
        case Route::object:
            made = make_object_part(core_, operation, std::move(pairs), part);
            break;
        default:
            made = make_file_part(core_, operation, std::move(pairs), part);
        }
        if (!made.ok())
            return made;
        request.add(std::move(part));
    }
    return {};
}

nixl_status_t nixlCxlEngine::prepXfer(const nixl_xfer_op_t& operation, const nixl_meta_dlist_t& local, const nixl_meta_dlist_t& remote,
                                      const std::string& remote_agent, nixlBackendReqH*& handle, const nixl_opt_b_args_t*) const {
    return guarded("prepXfer", [&] {
        auto peer = find_peer(remote_agent);
        if (!peer)
            return report("prep:" + remote_agent,
                          {NIXL_ERR_NOT_FOUND, text("CXL: transfer with agent ", remote_agent, ": its metadata was not loaded")});
        auto made = std::make_unique<RequestHandle>();
        made->request = std::make_shared<XferRequest>(core_, peer, peering_, operation);
        Routed routed;
        if (Status known = route_lists(operation, local, remote, peer, *made->request, routed); !known.ok())
            return report(text("prep:", remote_agent, ":", known.code()), known);
        if (Status parted = make_parts(operation, routed, *made->request); !parted.ok())
            return report(text("prep:", remote_agent, ":", parted.code()), parted);
        made->request->is_complete();
        // So that the end of the peer is noticed, whichever way the bytes go.
        peering_->reach(*peer);
        handle = made.release();
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::postXfer(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&, const std::string&,
                                      nixlBackendReqH*& handle, const nixl_opt_b_args_t* opt_args) const {
    if (!handle)
        return NIXL_ERR_INVALID_PARAM;
    if (core_->is_of_parent()) [[unlikely]]
        return refused_in_child();
    return request_of(handle).post(opt_args);
}

nixl_status_t nixlCxlEngine::checkXfer(nixlBackendReqH* handle) const {
    if (!handle)
        return NIXL_ERR_INVALID_PARAM;
    if (core_->is_of_parent()) [[unlikely]]
        return refused_in_child();
    return request_of(handle).check();
}

nixl_status_t nixlCxlEngine::releaseReqH(nixlBackendReqH* handle) const {
    return guarded("releaseReqH", [&] {
        if (!handle)
            return NIXL_ERR_INVALID_PARAM;
        request_of(handle).cancel();
        delete handle;
        return NIXL_SUCCESS;
    });
}

nixl_status_t nixlCxlEngine::estimateXferCost(const nixl_xfer_op_t&, const nixl_meta_dlist_t&, const nixl_meta_dlist_t&, const std::string&,
                                              nixlBackendReqH* const& handle, std::chrono::microseconds& duration,
                                              std::chrono::microseconds& margin, nixl_cost_t& method, const nixl_opt_args_t*) const {
    if (!handle)
        return NIXL_ERR_INVALID_PARAM;
    duration = std::chrono::microseconds(request_of(handle).estimate_us());
    margin = duration / 2;
    method = nixl_cost_t::ANALYTICAL_BACKEND;
    return NIXL_SUCCESS;
}
