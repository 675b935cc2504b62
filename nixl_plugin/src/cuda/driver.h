// SPDX-License-Identifier: Apache-2.0
//
// The CUDA driver, found at run time: our own declarations of the few functions that are used, so that neither building nor loading the
// plugin needs CUDA. Names, values and signatures are the driver's.
#ifndef KVBM_CXL_NIXL_CUDA_DRIVER_H
#define KVBM_CXL_NIXL_CUDA_DRIVER_H

#include "../status.h"
#include <memory>

namespace kvbm_cxl::cuda {

using Result = int;
using DeviceId = int;
using DeviceAddress = uint64_t;
using Context = struct ContextOfTheDriver*;
using Stream = struct StreamOfTheDriver*;
using Event = struct EventOfTheDriver*;

constexpr Result success = 0;
constexpr Result error_deinitialized = 4;
constexpr Result error_not_ready = 600;
constexpr Result error_already_registered = 712;

constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_disable_timing = 2;
constexpr unsigned host_portable = 1; // pinned for every context
constexpr int attribute_memory_type = 2;
constexpr int attribute_device_ordinal = 9;
constexpr unsigned memory_type_device = 2;
constexpr int source_in_stream_order = 1;

/// Attributes of the copies of a batch (CUmemcpyAttributes).
struct BatchAttributes {
    int source_access_order = source_in_stream_order;
    int source_location[2] = {};
    int destination_location[2] = {};
    unsigned flags = 0;
};
static_assert(sizeof(BatchAttributes) == 24);

/// The driver's functions. Those of the table's optional part may be null.
struct Functions {
    Result (*init)(unsigned flags);
    Result (*device_count)(int* count);
    Result (*device_get)(DeviceId* device, int ordinal);
    Result (*context_retain)(Context* context, DeviceId device);
    Result (*context_release)(DeviceId device);
    Result (*context_push)(Context context);
    Result (*context_pop)(Context* context);
    Result (*stream_create)(Stream* stream, unsigned flags);
    Result (*stream_destroy)(Stream stream);
    Result (*stream_synchronize)(Stream stream);
    Result (*event_create)(Event* event, unsigned flags);
    Result (*event_destroy)(Event event);
    Result (*event_record)(Event event, Stream stream);
    Result (*event_query)(Event event);
    Result (*host_register)(void* address, size_t len_bytes, unsigned flags);
    Result (*host_unregister)(void* address);
    Result (*host_allocate)(void** address, size_t len_bytes, unsigned flags);
    Result (*host_free)(void* address);
    Result (*pointer_attribute)(void* value, int attribute, DeviceAddress address);
    Result (*copy)(DeviceAddress destination, DeviceAddress source, size_t len_bytes, Stream stream);
    Result (*error_name)(Result error, const char** name);
    // Optional: since CUDA 12.8.
    Result (*copy_batch)(DeviceAddress* destinations, DeviceAddress* sources, size_t* lens_bytes, size_t count, BatchAttributes* attributes,
                         size_t* attribute_starts, size_t attribute_count, size_t* failed, Stream stream);
};

/// The driver, loaded and initialised. It stays loaded until the process ends.
class Driver {
    Functions functions_{};
    int devices_ = 0;

    Driver() = default;

  public:
    /// Loads it. NIXL_ERR_NOT_SUPPORTED, with the reason, where there is no driver, none that has what is needed, or no device.
    static Status load(const std::string& library, std::shared_ptr<const Driver>& driver);

    const Functions& operator*() const { return functions_; }
    const Functions* operator->() const { return &functions_; }
    int devices() const { return devices_; }

    /// What a failed call means, in words: "what: CUDA_ERROR_...". NIXL_ERR_BACKEND.
    Status failure(Result error, std::string_view what) const;
};

/// Makes a context current for as long as this object lives.
class Current {
    const Driver& driver_;
    Result result_;

  public:
    Current(const Driver& driver, Context context) : driver_(driver), result_(driver->context_push(context)) {}
    ~Current() {
        Context popped = nullptr;
        if (result_ == success)
            driver_->context_pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    Result result() const { return result_; }
};

} // namespace kvbm_cxl::cuda

#endif
