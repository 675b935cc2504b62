// SPDX-License-Identifier: Apache-2.0
//
// The fake CUDA driver of all tests as the suites of KVBM's crates need it: all has happened when a call returns, and there is what these
// crates call beyond the pool.
//
// FAKE_CUDA_CXL_SHM names libcxl_shm.so: then pinned memory of KVBM is a block of the pool that CXL_POOL names, and the suites' host memory
// (G2) lies in memory that hosts share. What the plugin itself pins stays ordinary memory.
#define _GNU_SOURCE
#define FAKE_FOREIGN
#include <dlfcn.h>
#include <stddef.h>
static void* host_allocate(size_t len, void* caller);
static void host_free(void* address);
#include "../../kvbm_cxl/pool/tests/cuda/fake.c"

static unsigned long from_pool;
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

static void* host_allocate(size_t len, void* caller) {
    pthread_once(&pool_once, find_pool);
    void* start = NULL;
    if (!pool_alloc || is_of_plugin(caller))
        return aligned_alloc(4096, (len + 4095) & ~(size_t)4095);
    // A scratch block: KVBM leaks some of them, and they go with the process.
    if (pool_alloc(NULL, len ? len : 1, 1, &start)) {
        fprintf(stderr, "fake CUDA: no block of the pool: %s\n", pool_error());
        return NULL;
    }
    memset(start, 0, len);
    from_pool++;
    return start;
}

static void host_free(void* address) {
    // What is no block of the pool, it refuses.
    if (!pool_free || pool_free(address))
        free(address);
}

typedef uint64_t Address;
#define ADDRESS(pointer) ((Address)(uintptr_t)(pointer))

// Devices and contexts.
DRIVER int cuDeviceGetPCIBusId(char* id, int len, int device) {
    return snprintf(id, (size_t)len, "0000:%02x:00.0", device), 0;
}
DRIVER int cuGetErrorString(int error, const char** text) {
    return (void)error, *text = "an error of the fake driver", 0;
}
DRIVER int cuCtxGetCurrent(void** context) {
    return *context = depth ? (void*)((uintptr_t)current[depth - 1] + 1) : NULL, 0;
}
DRIVER int cuCtxSetCurrent(void* context) {
    if (!context)
        return depth -= depth > 0, 0;
    depth += depth == 0;
    return current[depth - 1] = (int)((uintptr_t)context - 1), 0;
}
DRIVER int cuCtxSynchronize(void) {
    return 0;
}

// Streams and events: nothing is left to wait for.
DRIVER int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
    return (void)priority, cuStreamCreate(stream, flags);
}
DRIVER int cuStreamSynchronize(void* stream) {
    return (void)stream, 0;
}
DRIVER int cuEventSynchronize(void* event) {
    return (void)event, 0;
}
DRIVER int cuEventElapsedTime_v2(float* ms, void* from, void* to) {
    return (void)from, (void)to, *ms = 0, 0;
}

// Memory.
static int token(void** handle) {
    *handle = malloc(1);
    return *handle ? 0 : out_of_memory;
}
DRIVER int cuMemAllocAsync(Address* address, size_t len, void* stream) {
    return (void)stream, cuMemAlloc_v2(address, len);
}
DRIVER int cuMemAllocFromPoolAsync(Address* address, size_t len, void* pool, void* stream) {
    return (void)pool, (void)stream, cuMemAlloc_v2(address, len);
}
DRIVER int cuMemFreeAsync(Address address, void* stream) {
    return (void)stream, cuMemFree_v2(address);
}
DRIVER int cuMemPoolCreate(void** pool, const void* properties) {
    return (void)properties, token(pool);
}
DRIVER int cuMemPoolDestroy(void* pool) {
    return free(pool), 0;
}
DRIVER int cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    return (void)pool, (void)attribute, (void)value, 0;
}
DRIVER int cuMemHostGetDevicePointer_v2(Address* address, void* start, unsigned flags) {
    return (void)flags, *address = ADDRESS(start), 0;
}

// Copies, which need no registered memory.
static int copy(Address to, Address from, size_t len) {
    return memmove((void*)(uintptr_t)to, (const void*)(uintptr_t)from, len), 0;
}
DRIVER int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t len, void* stream) {
    return (void)stream, copy(to, ADDRESS(from), len);
}
DRIVER int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t len, void* stream) {
    return (void)stream, copy(ADDRESS(to), from, len);
}
DRIVER int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t len, void* stream) {
    return (void)stream, copy(to, from, len);
}
DRIVER int cuMemcpyDtoD_v2(Address to, Address from, size_t len) {
    return copy(to, from, len);
}
DRIVER int cuMemsetD8_v2(Address to, unsigned char value, size_t len) {
    return memset((void*)(uintptr_t)to, value, len), 0;
}
DRIVER int cuMemsetD8Async(Address to, unsigned char value, size_t len, void* stream) {
    return (void)stream, cuMemsetD8_v2(to, value, len);
}

// The part of the CUDA runtime that the tests themselves call; it is loaded under a name of its own.
DRIVER int cudaMemcpy(void* to, const void* from, size_t len, int kind) {
    return (void)kind, copy(ADDRESS(to), ADDRESS(from), len);
}
DRIVER int cudaMemcpyAsync(void* to, const void* from, size_t len, int kind, void* stream) {
    return (void)stream, cudaMemcpy(to, from, len, kind);
}
DRIVER int cudaDeviceSynchronize(void) {
    return 0;
}
DRIVER int cudaStreamSynchronize(void* stream) {
    return (void)stream, 0;
}
DRIVER int cudaGetDeviceCount(int* count) {
    return cuDeviceGetCount(count);
}

// Shows that the memory was where the test wanted it.
__attribute__((destructor)) static void report(void) {
    if (pool_alloc)
        fprintf(stderr, "fake CUDA: %lu pinned blocks were in the pool\n", from_pool);
}
