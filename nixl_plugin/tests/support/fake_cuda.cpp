// SPDX-License-Identifier: Apache-2.0
//
// The functions of the CUDA driver that the plugin uses, over ordinary memory. With FAKE_CUDA_WITHOUT_BATCH it is an old driver.
#include "fake_cuda.h"
#include <cstdint>
#include <cstring>
#include <deque>
#include <set>

#define DRIVER extern "C" __attribute__((visibility("default"))) int

namespace {

struct Copy {
    uint64_t destination, source;
    size_t len_bytes;
    uint64_t number;
};

struct Stream {
    std::deque<Copy> pending;
    uint64_t given = 0;
};

struct Event {
    Stream* stream = nullptr;
    uint64_t behind = 0; // copies of the stream
    int queries = 0;
};

constexpr int invalid_value = 1, out_of_memory = 2, invalid_context = 201, invalid_handle = 400, not_ready = 600, registered_already = 712,
              not_registered = 713;

FakeCuda control;
std::map<uint64_t, std::pair<size_t, int>> device_memory;
std::map<uint64_t, size_t> registered, pinned;
std::set<Stream*> streams;
std::set<Event*> events;
std::map<int, int> contexts; // device -> how often retained
thread_local std::vector<void*> current;

/// With the lock held.
void wrong(std::string what) {
    control.misuse.push_back(std::move(what));
}

int failure(const char* call) {
    auto found = control.failures.find(call);
    if (found == control.failures.end())
        return 0;
    if (found->second.first-- > 0)
        return 0;
    int error = found->second.second;
    control.failures.erase(found);
    return error;
}

bool has_context(const char* call) {
    if (current.empty() || !contexts[static_cast<int>(reinterpret_cast<uintptr_t>(current.back())) - 1]) {
        wrong(std::string(call) + " without a context");
        return false;
    }
    return true;
}

template <class Ranges>
bool lies_in(const Ranges& ranges, uint64_t address, size_t len_bytes, size_t (*len_of)(const typename Ranges::mapped_type&)) {
    auto behind = ranges.upper_bound(address);
    if (behind == ranges.begin())
        return false;
    --behind;
    return address - behind->first + len_bytes <= len_of(behind->second);
}

size_t device_len(const std::pair<size_t, int>& range) {
    return range.first;
}
size_t host_len(const size_t& range) {
    return range;
}
bool is_device(uint64_t address, size_t len) {
    return lies_in(device_memory, address, len, device_len);
}
bool is_host(uint64_t address, size_t len) {
    return lies_in(registered, address, len, host_len) || lies_in(pinned, address, len, host_len);
}

bool is_allowed(const Copy& copy) {
    bool to_host = is_device(copy.source, copy.len_bytes) && is_host(copy.destination, copy.len_bytes);
    return to_host || (is_host(copy.source, copy.len_bytes) && is_device(copy.destination, copy.len_bytes));
}

int give(const char* call, Stream* stream, uint64_t destination, uint64_t source, size_t len_bytes) {
    if (!streams.count(stream)) {
        wrong(std::string(call) + " on a stream that is none");
        return invalid_handle;
    }
    Copy copy{destination, source, len_bytes, ++stream->given};
    if (!is_allowed(copy))
        wrong(std::string(call) + " of memory that is not registered as one range");
    stream->pending.push_back(copy);
    return 0;
}

void perform(Stream* stream, uint64_t up_to) {
    while (!stream->pending.empty() && stream->pending.front().number <= up_to) {
        const Copy& copy = stream->pending.front();
        if (!is_allowed(copy))
            wrong("memory of a copy was given back before its end");
        else if (!control.copy_error)
            std::memcpy(reinterpret_cast<void*>(copy.destination), reinterpret_cast<void*>(copy.source), copy.len_bytes);
        stream->pending.pop_front();
    }
}

bool is_in_use(uint64_t address, size_t len_bytes) {
    for (Stream* stream : streams) {
        for (const Copy& copy : stream->pending) {
            for (uint64_t end : {copy.source, copy.destination}) {
                if (end < address + len_bytes && address < end + copy.len_bytes)
                    return true;
            }
        }
    }
    return false;
}

} // namespace

#define CALL(name)                                                                                                                         \
    std::lock_guard lock(control.mutex);                                                                                                   \
    if (int error = failure(name))                                                                                                         \
    return error

extern "C" __attribute__((visibility("default"))) FakeCuda* fake_cuda() {
    return &control;
}

DRIVER cuInit(unsigned) {
    CALL("cuInit");
    return 0;
}

DRIVER cuDeviceGetCount(int* count) {
    *count = control.devices;
    return 0;
}

DRIVER cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal < control.devices ? 0 : 101;
}

DRIVER cuDevicePrimaryCtxRetain(void** context, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    contexts[device]++;
    *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device) + 1);
    return 0;
}

DRIVER cuDevicePrimaryCtxRelease_v2(int device) {
    CALL("cuDevicePrimaryCtxRelease_v2");
    if (contexts[device]-- <= 0)
        wrong("a context released too often");
    return 0;
}

DRIVER cuCtxPushCurrent_v2(void* context) {
    CALL("cuCtxPushCurrent_v2");
    current.push_back(context);
    return 0;
}

DRIVER cuCtxPopCurrent_v2(void** context) {
    CALL("cuCtxPopCurrent_v2");
    if (current.empty())
        return invalid_context;
    *context = current.back();
    current.pop_back();
    return 0;
}

DRIVER cuStreamCreate(Stream** stream, unsigned) {
    CALL("cuStreamCreate");
    if (!has_context("cuStreamCreate"))
        return invalid_context;
    streams.insert(*stream = new Stream);
    return 0;
}

DRIVER cuStreamDestroy_v2(Stream* stream) {
    CALL("cuStreamDestroy_v2");
    if (!streams.count(stream)) {
        wrong("a stream destroyed twice");
        return invalid_handle;
    }
    if (!stream->pending.empty())
        wrong("a stream destroyed with copies in it");
    streams.erase(stream);
    delete stream;
    return 0;
}

DRIVER cuStreamQuery(Stream* stream) {
    CALL("cuStreamQuery");
    if (!streams.count(stream)) {
        wrong("a stream asked that is destroyed");
        return invalid_handle;
    }
    if (control.is_stuck)
        return not_ready;
    perform(stream, UINT64_MAX);
    return control.copy_error;
}

// Nothing of a transfer comes after other work on the GPU.
DRIVER cuStreamWaitEvent(Stream*, Event*, unsigned) {
    CALL("cuStreamWaitEvent");
    wrong("a stream that is to wait");
    return invalid_value;
}

DRIVER cuEventCreate(Event** event, unsigned) {
    CALL("cuEventCreate");
    if (!has_context("cuEventCreate"))
        return invalid_context;
    events.insert(*event = new Event);
    return 0;
}

DRIVER cuEventDestroy_v2(Event* event) {
    CALL("cuEventDestroy_v2");
    if (!events.erase(event)) {
        wrong("an event destroyed twice");
        return invalid_handle;
    }
    delete event;
    return 0;
}

DRIVER cuEventRecord(Event* event, Stream* stream) {
    CALL("cuEventRecord");
    if (!events.count(event) || !streams.count(stream)) {
        wrong("an event recorded that is destroyed");
        return invalid_handle;
    }
    *event = {stream, stream->given, 0};
    return 0;
}

DRIVER cuEventQuery(Event* event) {
    CALL("cuEventQuery");
    if (!events.count(event)) {
        wrong("an event asked that is destroyed");
        return invalid_handle;
    }
    if (control.is_stuck || event->queries++ < control.queries_until_done)
        return not_ready;
    if (event->stream)
        perform(event->stream, event->behind);
    return control.copy_error;
}

DRIVER cuMemHostRegister_v2(void* address, size_t len_bytes, unsigned) {
    CALL("cuMemHostRegister_v2");
    if (!has_context("cuMemHostRegister"))
        return invalid_context;
    auto at = reinterpret_cast<uint64_t>(address);
    for (const auto& [start, len] : registered) {
        if (start < at + len_bytes && at < start + len)
            return registered_already;
    }
    registered[at] = len_bytes;
    control.registered++;
    return 0;
}

DRIVER cuMemHostUnregister(void* address) {
    CALL("cuMemHostUnregister");
    auto found = registered.find(reinterpret_cast<uint64_t>(address));
    if (found == registered.end())
        return not_registered;
    if (is_in_use(found->first, found->second))
        wrong("memory unregistered under a copy");
    registered.erase(found);
    control.registered--;
    return 0;
}

DRIVER cuMemHostAlloc(void** address, size_t len_bytes, unsigned) {
    CALL("cuMemHostAlloc");
    if (!has_context("cuMemHostAlloc"))
        return invalid_context;
    *address = operator new(len_bytes);
    pinned[reinterpret_cast<uint64_t>(*address)] = len_bytes;
    control.pinned++;
    control.pins++;
    return 0;
}

DRIVER cuMemFreeHost(void* address) {
    CALL("cuMemFreeHost");
    auto found = pinned.find(reinterpret_cast<uint64_t>(address));
    if (found == pinned.end()) {
        wrong("a pinned buffer freed twice");
        return invalid_value;
    }
    if (is_in_use(found->first, found->second))
        wrong("a pinned buffer freed under a copy");
    pinned.erase(found);
    control.pinned--;
    operator delete(address);
    return 0;
}

DRIVER cuMemAlloc_v2(uint64_t* address, size_t len_bytes) {
    CALL("cuMemAlloc_v2");
    *address = reinterpret_cast<uint64_t>(operator new(len_bytes));
    device_memory[*address] = {len_bytes, current.empty() ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(current.back())) - 1};
    return 0;
}

DRIVER cuMemFree_v2(uint64_t address) {
    CALL("cuMemFree_v2");
    auto found = device_memory.find(address);
    if (found == device_memory.end())
        return invalid_value;
    if (is_in_use(address, found->second.first))
        wrong("memory of the device freed under a copy");
    device_memory.erase(found);
    operator delete(reinterpret_cast<void*>(address));
    return 0;
}

DRIVER cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    CALL("cuPointerGetAttribute");
    if (!is_device(address, 1))
        return invalid_value;
    int answer = attribute == 2 ? 2 : std::prev(device_memory.upper_bound(address))->second.second;
    std::memcpy(value, &answer, sizeof answer);
    return 0;
}

DRIVER cuMemcpyAsync(uint64_t destination, uint64_t source, size_t len_bytes, Stream* stream) {
    CALL("cuMemcpyAsync");
    if (!has_context("cuMemcpyAsync"))
        return invalid_context;
    control.single_calls++;
    return give("cuMemcpyAsync", stream, destination, source, len_bytes);
}

#ifndef FAKE_CUDA_WITHOUT_BATCH
DRIVER cuMemcpyBatchAsync(uint64_t* destinations, uint64_t* sources, size_t* lens_bytes, size_t count, const int* attributes,
                          size_t* starts, size_t attribute_count, size_t* failed, Stream* stream) {
    CALL("cuMemcpyBatchAsync");
    if (!has_context("cuMemcpyBatchAsync"))
        return invalid_context;
    if (attribute_count != 1 || starts[0] != 0 || attributes[0] < 1 || attributes[0] > 3) {
        wrong("a batch without valid attributes");
        return invalid_value;
    }
    control.batch_calls++;
    for (size_t index = 0; index < count; index++) {
        if (int error = give("cuMemcpyBatchAsync", stream, destinations[index], sources[index], lens_bytes[index])) {
            *failed = index;
            return error;
        }
    }
    return 0;
}
#endif

DRIVER cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names = {{invalid_value, "CUDA_ERROR_INVALID_VALUE"},
                                                     {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                     {719, "CUDA_ERROR_LAUNCH_FAILED"},
                                                     {801, "CUDA_ERROR_NOT_SUPPORTED"}};
    auto found = names.find(error);
    *name = found == names.end() ? "CUDA_ERROR_SOMETHING" : found->second;
    return 0;
}
