// SPDX-License-Identifier: Apache-2.0
//
// Descriptors and lists of them. NIXL's library makes them; a plugin reads them. See types.h.
#pragma once

#include "types.h"

/// A stretch of memory or storage.
class nixlBasicDesc {
  public:
    uintptr_t addr = 0; // first byte, or offset in a file or object
    size_t len = 0;     // bytes
    uint64_t devId = 0; // of a device, a file or an object

    nixlBasicDesc() = default;
    nixlBasicDesc(uintptr_t address, size_t len_bytes, uint64_t device) : addr(address), len(len_bytes), devId(device) {}
};

/// With bytes that describe it: what registration gets.
class nixlBlobDesc : public nixlBasicDesc {
  public:
    nixl_blob_t metaInfo;

    nixlBlobDesc() = default;
    nixlBlobDesc(uintptr_t address, size_t len_bytes, uint64_t device, nixl_blob_t info = {})
        : nixlBasicDesc(address, len_bytes, device), metaInfo(std::move(info)) {}
};

class nixlBackendMD;

/// With the plugin's own data of the registration that it lies in: what transfers get.
class nixlMetaDesc : public nixlBasicDesc {
  public:
    nixlBackendMD* metadataP = nullptr;

    nixlMetaDesc() = default;
    nixlMetaDesc(uintptr_t address, size_t len_bytes, uint64_t device, nixlBackendMD* metadata)
        : nixlBasicDesc(address, len_bytes, device), metadataP(metadata) {}
};

/// With the agent that it is of.
struct nixlRemoteMetaDesc : public nixlMetaDesc {
    std::string remoteAgent;
};

/// A list of descriptors of one kind of memory. Lists from NIXL bring NIXL's table of virtual functions along, so that none of those here
/// may be called on them; their bodies are for lists that tests make.
template <class T> class nixlDescList {
  protected:
    nixl_mem_t type;
    std::vector<T> descs;

  public:
    explicit nixlDescList(nixl_mem_t kind) : type(kind) {}
    nixlDescList(const nixlDescList&) = default;
    nixlDescList& operator=(const nixlDescList&) = default;
    virtual ~nixlDescList() = default;
    virtual void resize(const size_t& count) { descs.resize(count); }
    virtual void addDesc(const T& desc) { descs.push_back(desc); }
    virtual int getIndex(const nixlBasicDesc&) const { return NIXL_ERR_NOT_FOUND; }

    nixl_mem_t getType() const { return type; }
    int descCount() const { return static_cast<int>(descs.size()); }
    bool isEmpty() const noexcept { return descs.empty(); }
    const T& operator[](size_t index) const { return descs[index]; }
    T& operator[](size_t index) { return descs[index]; }
    auto begin() const { return descs.begin(); }
    auto end() const { return descs.end(); }
};

using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;
