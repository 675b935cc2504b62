// SPDX-License-Identifier: Apache-2.0
#include "driver.h"
#include <dlfcn.h>

namespace kvbm_cxl::cuda {

namespace {

Status unavailable(std::string reason) {
    return {NIXL_ERR_NOT_SUPPORTED, "CXL: GPU memory is not offered: " + std::move(reason)};
}

} // namespace

Status Driver::load(const std::string& library, std::shared_ptr<const Driver>& driver) {
    // Never unloaded: its threads and exit handlers stay.
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle) {
        const char* why = dlerror();
        return unavailable(text("the CUDA driver cannot be loaded (", why ? why : library.c_str(), ")"));
    }
    std::shared_ptr<Driver> loaded(new Driver);
    Functions& table = loaded->functions_;
    std::string missing;
    auto find = [&](auto& function, const char* name, bool is_needed = true) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
        if (!function && is_needed)
            missing += text(missing.empty() ? "" : ", ", name);
    };
    find(table.init, "cuInit");
    find(table.device_count, "cuDeviceGetCount");
    find(table.device_get, "cuDeviceGet");
    find(table.context_retain, "cuDevicePrimaryCtxRetain");
    find(table.context_release, "cuDevicePrimaryCtxRelease_v2");
    find(table.context_push, "cuCtxPushCurrent_v2");
    find(table.context_pop, "cuCtxPopCurrent_v2");
    find(table.stream_create, "cuStreamCreate");
    find(table.stream_destroy, "cuStreamDestroy_v2");
    find(table.stream_synchronize, "cuStreamSynchronize");
    find(table.event_create, "cuEventCreate");
    find(table.event_destroy, "cuEventDestroy_v2");
    find(table.event_record, "cuEventRecord");
    find(table.event_query, "cuEventQuery");
    find(table.host_register, "cuMemHostRegister_v2");
    find(table.host_unregister, "cuMemHostUnregister");
    find(table.host_allocate, "cuMemHostAlloc");
    find(table.host_free, "cuMemFreeHost");
    find(table.pointer_attribute, "cuPointerGetAttribute");
    find(table.copy, "cuMemcpyAsync");
    find(table.error_name, "cuGetErrorName");
    find(table.copy_batch, "cuMemcpyBatchAsync", false);
    if (!missing.empty())
        return unavailable(text(library, " lacks ", missing, ": use a driver of CUDA 11 or later"));
    if (Result error = table.init(0); error != success)
        return unavailable(loaded->failure(error, "the driver does not start").reason());
    if (Result error = table.device_count(&loaded->devices_); error != success || loaded->devices_ <= 0)
        return unavailable("there is no device");
    driver = std::move(loaded);
    return {};
}

Status Driver::failure(Result error, std::string_view what) const {
    const char* name = nullptr;
    if (functions_.error_name(error, &name) != success || !name)
        name = "unknown error";
    return {NIXL_ERR_BACKEND, text("CXL: ", what, ": ", name, " (", error, ")")};
}

} // namespace kvbm_cxl::cuda
