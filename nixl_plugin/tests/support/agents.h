// SPDX-License-Identifier: Apache-2.0
//
// Engines as NIXL uses them: their memory, their transfers, their notifications, and what two processes tell each other by files.
#pragma once

#include "backend/cxl_backend.h"
#include "pools.h"
#include <cstring>
#include <fstream>

namespace testing {

using namespace kvbm_cxl;

/// An engine, made and destroyed as NIXL does.
struct Agent {
    nixl_b_params_t params;
    std::unique_ptr<nixlCxlEngine> engine;
    std::string name;

    Agent(const std::string& agent, const std::string& pool, nixl_b_params_t more = {}) : params(std::move(more)), name(agent) {
        params["pool"] = pool;
        nixlBackendInitParams init;
        init.localAgent = agent;
        init.type = "CXL";
        init.customParams = &params;
        init.enableProgTh = true;
        engine = std::make_unique<nixlCxlEngine>(&init);
    }
    nixlCxlEngine* operator->() const { return engine.get(); }

    std::string conn_info() const {
        std::string data;
        CHECK(engine->getConnInfo(data) == NIXL_SUCCESS);
        return data;
    }
};

/// Registered memory, ordinary or of the pool.
struct Buffer {
    Agent& agent;
    std::vector<std::byte> heap;
    std::byte* address = nullptr;
    size_t len = 0;
    nixlBackendMD* md = nullptr;

    Buffer(Agent& of, bool is_pool, size_t len_bytes, uint32_t salt) : agent(of), len(len_bytes) {
        if (is_pool) {
            void* block = nullptr;
            std::shared_ptr<Pool> pool;
            Options options;
            CHECK_OK(read_options(agent.params, options));
            CHECK_OK(Pool::open(options, pool));
            CHECK(cxl_shm_alloc(pool->handle(), len, CXL_SHM_ALLOC_SCRATCH, &block) == CXL_SHM_OK);
            address = static_cast<std::byte*>(block);
        } else {
            heap.resize(len);
            address = heap.data();
        }
        fill(salt);
        CHECK(agent->registerMem({reinterpret_cast<uintptr_t>(address), len, 0}, DRAM_SEG, md) == NIXL_SUCCESS);
    }
    ~Buffer() {
        if (md)
            agent->deregisterMem(md);
        if (heap.empty())
            cxl_shm_free(address);
    }
    Buffer(const Buffer&) = delete;

    void fill(uint32_t salt) {
        std::vector<std::byte> bytes = unique_bytes(len, salt);
        if (heap.empty())
            CHECK(cxl_shm_copy_in(address, bytes.data(), len) == CXL_SHM_OK);
        else
            std::memcpy(address, bytes.data(), len);
    }
    std::vector<std::byte> content() const {
        std::vector<std::byte> bytes(len);
        if (heap.empty())
            CHECK(cxl_shm_copy_out(bytes.data(), address, len) == CXL_SHM_OK);
        else
            std::memcpy(bytes.data(), address, len);
        return bytes;
    }
    std::string public_data() const {
        std::string data;
        CHECK(agent->getPublicData(md, data) == NIXL_SUCCESS);
        return data;
    }
};

inline nixlBackendMD* load(Agent& agent, const std::string& of, const std::string& data, nixl_status_t wanted = NIXL_SUCCESS) {
    nixlBackendMD* md = nullptr;
    nixl_status_t status = agent->loadRemoteMD({0, 0, 0, data}, DRAM_SEG, of, md);
    if (status != wanted) {
        std::fprintf(stderr, "loadRemoteMD: %d, not %d\n", status, wanted);
        std::_Exit(1);
    }
    return md;
}

/// One transfer between `near` and memory at `far_address`, with a handle that lives as long as this.
struct Transfer_ {
    Agent& agent;
    nixl_xfer_op_t operation;
    nixl_meta_dlist_t local{DRAM_SEG}, remote{DRAM_SEG};
    std::string peer;
    nixlBackendReqH* handle = nullptr;
    nixl_status_t prepared;

    Transfer_(Agent& of, nixl_xfer_op_t what, const Buffer& near, uintptr_t far_address, nixlBackendMD* far, std::string with,
              const std::vector<std::array<size_t, 3>>& pieces)
        : agent(of), operation(what), peer(std::move(with)) {
        for (auto [here, there, len] : pieces) {
            local.addDesc({reinterpret_cast<uintptr_t>(near.address) + here, len, 0, near.md});
            remote.addDesc({far_address + there, len, 0, far});
        }
        prepared = agent->prepXfer(operation, local, remote, peer, handle);
    }
    ~Transfer_() {
        if (handle)
            CHECK(agent->releaseReqH(handle) == NIXL_SUCCESS);
    }
    Transfer_(const Transfer_&) = delete;

    nixl_status_t post(const char* note = nullptr) {
        nixl_opt_b_args_t how;
        how.hasNotif = note != nullptr;
        how.notifMsg = note ? note : "";
        return agent->postXfer(operation, local, remote, peer, handle, &how);
    }
    nixl_status_t wait() {
        nixl_status_t status = NIXL_IN_PROG;
        await("a transfer", [&] { return (status = agent->checkXfer(handle)) != NIXL_IN_PROG; });
        return status;
    }
    nixl_status_t run(const char* note = nullptr) {
        nixl_status_t status = post(note);
        return status == NIXL_IN_PROG ? wait() : status;
    }
};

inline std::pair<std::string, std::string> next_note(Agent& agent) {
    notif_list_t notes;
    await("a notification", [&] {
        CHECK(agent->getNotifs(notes) == NIXL_SUCCESS);
        return !notes.empty();
    });
    CHECK(notes.size() == 1);
    return notes[0];
}

inline void tell(const std::string& path, const std::string& bytes) {
    std::ofstream(path + ".new", std::ios::binary) << bytes;
    std::filesystem::rename(path + ".new", path);
}

inline std::string hear(const std::string& path) {
    await(path.c_str(), [&] { return std::filesystem::exists(path); });
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

inline std::string number(uintptr_t value) {
    return std::to_string(value);
}

} // namespace testing
