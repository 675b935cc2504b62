// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver over the memory of the process, for the test suites of KVBM's crates on machines without a GPU. All has happened when
// a call returns, so a stream is nothing, and an event is always there. It offers what these crates and the NIXL plugin call, no more.
//
// FAKE_CUDA_CXL_SHM names libcxl_shm.so: then pinned memory of KVBM is a block of the pool that CXL_POOL names, and the suites' host memory
// (G2) lies in memory that hosts share. What the plugin itself pins stays ordinary memory.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER __attribute__((visibility("default")))

typedef int Result;
typedef unsigned long long DevicePointer;

enum { success = 0, invalid_value = 1, out_of_memory = 2, invalid_device = 101 };
enum { max_devices = 8, max_depth = 32, alignment = 4096 };
enum { memory_type = 2, device_ordinal = 9, type_is_device = 2 }; // of cuPointerGetAttribute

typedef enum { device_memory, in_pool, in_host } Kind;

typedef struct Block {
    struct Block* next;
    char* start;
    size_t len;
    Kind kind;
    int device;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block* blocks;
static unsigned long from_pool;
static int contexts[max_devices];
static __thread void* current;
static __thread void* below[max_depth];
static __thread int depth;

static int (*pool_alloc)(void*, size_t, uint32_t, void**);
static int (*pool_free)(void*);
static const char* (*pool_error)(void);
static pthread_once_t pool_once = PTHREAD_ONCE_INIT;

static void find_pool(void) {
    const char* name = getenv("FAKE_CUDA_CXL_SHM");
    if (!name)
        return;
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "fake CUDA: %s\n", dlerror());
        abort();
    }
    *(void**)&pool_alloc = dlsym(library, "cxl_shm_alloc");
    *(void**)&pool_free = dlsym(library, "cxl_shm_free");
    *(void**)&pool_error = dlsym(library, "cxl_shm_last_error");
}

static int is_of_plugin(void* caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libplugin_");
}

static int device_of_context(void) {
    for (int device = 0; device < max_devices; device++)
        if (current == &contexts[device])
            return device;
    return 0;
}

static Result keep(void* start, size_t len, Kind kind) {
    Block* block = malloc(sizeof *block);
    if (!block)
        return out_of_memory;
    *block = (Block){.start = start, .len = len, .kind = kind, .device = device_of_context()};
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return success;
}

static Result allocate(void** start, size_t len, Kind kind) {
    len = len ? len : 1;
    if (kind == in_pool) {
        // A scratch block: KVBM leaks some of them, and they go with the process.
        if (pool_alloc(NULL, len, 1, start)) {
            fprintf(stderr, "fake CUDA: no block of the pool: %s\n", pool_error());
            return out_of_memory;
        }
        memset(*start, 0, len);
        __atomic_fetch_add(&from_pool, 1, __ATOMIC_RELAXED);
    } else if (posix_memalign(start, alignment, len)) {
        return out_of_memory;
    }
    return keep(*start, len, kind);
}

static Result release(void* start) {
    pthread_mutex_lock(&lock);
    Block** place = &blocks;
    while (*place && (*place)->start != start)
        place = &(*place)->next;
    Block* block = *place;
    if (block)
        *place = block->next;
    pthread_mutex_unlock(&lock);
    if (!block)
        return invalid_value;
    if (block->kind == in_pool) {
        if (pool_free(start))
            fprintf(stderr, "fake CUDA: a block of the pool was not freed: %s\n", pool_error());
    } else {
        free(start);
    }
    free(block);
    return success;
}

static Result copy(DevicePointer to, DevicePointer from, size_t len) {
    memmove((void*)(uintptr_t)to, (const void*)(uintptr_t)from, len);
    return success;
}

static Result token(void** handle) {
    *handle = malloc(1);
    return *handle ? success : out_of_memory;
}

// The driver and its devices.
DRIVER Result cuInit(unsigned flags) {
    return (void)flags, success;
}
DRIVER Result cuDriverGetVersion(int* version) {
    return *version = 13000, success;
}
DRIVER Result cuDeviceGetCount(int* count) {
    return *count = max_devices, success;
}
DRIVER Result cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= max_devices)
        return invalid_device;
    *device = ordinal;
    return success;
}
DRIVER Result cuDeviceGetName(char* name, int len, int device) {
    return (void)device, snprintf(name, (size_t)len, "fake"), success;
}
DRIVER Result cuDeviceGetAttribute(int* value, int attribute, int device) {
    return (void)attribute, (void)device, *value = 1, success;
}
DRIVER Result cuDeviceGetPCIBusId(char* id, int len, int device) {
    return snprintf(id, (size_t)len, "0000:%02x:00.0", device), success;
}
DRIVER Result cuGetErrorName(Result error, const char** name) {
    return (void)error, *name = "FAKE_CUDA_ERROR", success;
}
DRIVER Result cuGetErrorString(Result error, const char** text) {
    return (void)error, *text = "an error of the fake driver", success;
}

// Contexts.
DRIVER Result cuDevicePrimaryCtxRetain(void** context, int device) {
    return *context = &contexts[device], success;
}
DRIVER Result cuDevicePrimaryCtxRelease_v2(int device) {
    return (void)device, success;
}
DRIVER Result cuCtxGetCurrent(void** context) {
    return *context = current, success;
}
DRIVER Result cuCtxSetCurrent(void* context) {
    return current = context, success;
}
DRIVER Result cuCtxSynchronize(void) {
    return success;
}
DRIVER Result cuCtxPushCurrent_v2(void* context) {
    if (depth == max_depth)
        return invalid_value;
    below[depth++] = current;
    current = context;
    return success;
}
DRIVER Result cuCtxPopCurrent_v2(void** context) {
    if (context)
        *context = current;
    if (!depth)
        return invalid_value;
    current = below[--depth];
    return success;
}

// Streams and events.
DRIVER Result cuStreamCreate(void** stream, unsigned flags) {
    return (void)flags, token(stream);
}
DRIVER Result cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    return (void)flags, (void)priority, token(stream);
}
DRIVER Result cuStreamDestroy_v2(void* stream) {
    return free(stream), success;
}
DRIVER Result cuStreamSynchronize(void* stream) {
    return (void)stream, success;
}
DRIVER Result cuStreamQuery(void* stream) {
    return (void)stream, success;
}
DRIVER Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    return (void)stream, (void)event, (void)flags, success;
}
DRIVER Result cuEventCreate(void** event, unsigned flags) {
    return (void)flags, token(event);
}
DRIVER Result cuEventDestroy_v2(void* event) {
    return free(event), success;
}
DRIVER Result cuEventRecord(void* event, void* stream) {
    return (void)event, (void)stream, success;
}
DRIVER Result cuEventQuery(void* event) {
    return (void)event, success;
}
DRIVER Result cuEventSynchronize(void* event) {
    return (void)event, success;
}
DRIVER Result cuEventElapsedTime_v2(float* ms, void* from, void* to) {
    return (void)from, (void)to, *ms = 0, success;
}

// Memory.
DRIVER Result cuMemAlloc_v2(DevicePointer* pointer, size_t len) {
    void* start;
    Result result = allocate(&start, len, device_memory);
    if (result == success)
        *pointer = (DevicePointer)(uintptr_t)start;
    return result;
}
DRIVER Result cuMemAllocAsync(DevicePointer* pointer, size_t len, void* stream) {
    return (void)stream, cuMemAlloc_v2(pointer, len);
}
DRIVER Result cuMemAllocFromPoolAsync(DevicePointer* pointer, size_t len, void* pool, void* stream) {
    return (void)pool, (void)stream, cuMemAlloc_v2(pointer, len);
}
DRIVER Result cuMemFree_v2(DevicePointer pointer) {
    return release((void*)(uintptr_t)pointer);
}
DRIVER Result cuMemFreeAsync(DevicePointer pointer, void* stream) {
    return (void)stream, cuMemFree_v2(pointer);
}
DRIVER Result cuMemPoolCreate(void** pool, const void* properties) {
    return (void)properties, token(pool);
}
DRIVER Result cuMemPoolDestroy(void* pool) {
    return free(pool), success;
}
DRIVER Result cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    return (void)pool, (void)attribute, (void)value, success;
}
DRIVER Result cuMemHostAlloc(void** start, size_t len, unsigned flags) {
    (void)flags;
    pthread_once(&pool_once, find_pool);
    return allocate(start, len, pool_alloc && !is_of_plugin(__builtin_return_address(0)) ? in_pool : in_host);
}
DRIVER Result cuMemFreeHost(void* start) {
    return release(start);
}
DRIVER Result cuMemHostRegister_v2(void* start, size_t len, unsigned flags) {
    return (void)start, (void)len, (void)flags, success;
}
DRIVER Result cuMemHostUnregister(void* start) {
    return (void)start, success;
}
DRIVER Result cuMemHostGetDevicePointer_v2(DevicePointer* pointer, void* start, unsigned flags) {
    return (void)flags, *pointer = (DevicePointer)(uintptr_t)start, success;
}
DRIVER Result cuPointerGetAttribute(void* value, int attribute, DevicePointer pointer) {
    char* at = (char*)(uintptr_t)pointer;
    int device = -1;
    pthread_mutex_lock(&lock);
    for (Block* block = blocks; block; block = block->next)
        if (block->kind == device_memory && at >= block->start && at < block->start + block->len)
            device = block->device;
    pthread_mutex_unlock(&lock);
    if (device < 0)
        return invalid_value;
    if (attribute == memory_type)
        *(unsigned*)value = type_is_device;
    else if (attribute == device_ordinal)
        *(int*)value = device;
    else
        return invalid_value;
    return success;
}

// Copies.
#define ADDRESS(pointer) ((DevicePointer)(uintptr_t)(pointer))
DRIVER Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void* from, size_t len, void* s) {
    return (void)s, copy(to, ADDRESS(from), len);
}
DRIVER Result cuMemcpyDtoHAsync_v2(void* to, DevicePointer from, size_t len, void* s) {
    return (void)s, copy(ADDRESS(to), from, len);
}
DRIVER Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t len, void* s) {
    return (void)s, copy(to, from, len);
}
DRIVER Result cuMemcpyHtoD_v2(DevicePointer to, const void* from, size_t len) {
    return copy(to, ADDRESS(from), len);
}
DRIVER Result cuMemcpyDtoH_v2(void* to, DevicePointer from, size_t len) {
    return copy(ADDRESS(to), from, len);
}
DRIVER Result cuMemcpyDtoD_v2(DevicePointer to, DevicePointer from, size_t len) {
    return copy(to, from, len);
}
DRIVER Result cuMemcpyAsync(DevicePointer to, DevicePointer from, size_t len, void* s) {
    return (void)s, copy(to, from, len);
}
DRIVER Result cuMemsetD8_v2(DevicePointer to, unsigned char value, size_t len) {
    return memset((void*)(uintptr_t)to, value, len), success;
}
DRIVER Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t len, void* s) {
    return (void)s, cuMemsetD8_v2(to, value, len);
}

// The part of the CUDA runtime that the tests themselves call; it is loaded under a name of its own.
DRIVER int cudaMemcpy(void* to, const void* from, size_t len, int kind) {
    return (void)kind, copy(ADDRESS(to), ADDRESS(from), len);
}
DRIVER int cudaMemcpyAsync(void* to, const void* from, size_t len, int kind, void* stream) {
    return (void)stream, cudaMemcpy(to, from, len, kind);
}
DRIVER int cudaDeviceSynchronize(void) {
    return success;
}
DRIVER int cudaStreamSynchronize(void* stream) {
    return (void)stream, success;
}
DRIVER int cudaGetDeviceCount(int* count) {
    return *count = max_devices, success;
}

// Shows that the memory was where the test wanted it.
__attribute__((destructor)) static void report(void) {
    if (pool_alloc)
        fprintf(stderr, "fake CUDA: %lu pinned blocks were in the pool\n", from_pool);
}
