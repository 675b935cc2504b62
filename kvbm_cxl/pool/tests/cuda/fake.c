// SPDX-License-Identifier: Apache-2.0
//
// The one CUDA driver of all tests, over ordinary memory. What a stream is given happens late: when a caller asks how far it is. It notes
// what a real driver would not have put up with, and fails on demand. It knows time: with a rate (`bytes_per_us`) a copy or kernel starts
// when what it waits for has ended and its link is free, and takes its bytes by that rate; without one it takes no time.
//
// Variants: FAKE_WITHOUT_EVENTS lacks a symbol; FAKE_KERNELS launches kernels, which kernel/host.cpp has for the CPU; FAKE_PLAIN gives
// addresses of devices that a CPU can follow (else the CPU ends a process that does); FAKE_FOREIGN is for programs that are not the
// pool's (foreign.h): as FAKE_PLAIN, all has happened when a call returns, and nothing is held against the caller.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DRIVER __attribute__((visibility("default")))

enum {
    invalid_value = 1,
    out_of_memory = 2,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    registered_already = 712,
    not_registered = 713,
    not_supported = 801
};
enum { max_devices = 8, max_names = 16, max_depth = 32 };

#ifdef FAKE_FOREIGN
#define FAKE_PLAIN
enum { is_foreign = 1 };
#else
enum { is_foreign = 0 };
#endif
#ifdef FAKE_PLAIN
static const uint64_t device_bit = 0;
#else
// Non-canonical: the CPU ends a process that loads from it.
static const uint64_t device_bit = UINT64_C(1) << 62;
#endif

typedef enum { device_memory, registered, pinned } Kind;

typedef struct Range {
    struct Range* next;
    Kind kind;
    uint64_t start;
    size_t len;
    int device;
} Range;

typedef enum { op_copy, op_kernel, op_launch, op_wait, op_host } OpKind;
typedef enum { host_waits, host_runs, host_done } HostState;

typedef struct Event Event;
typedef struct Stream Stream;

typedef struct Op {
    struct Op* next;
    OpKind kind;
    uint64_t number; // in its stream, from 1 on
    uint64_t to, from;
    size_t len;
    void* bytes; // of a kernel of the caller's: what it writes; of a launch: its parameter
    const char* name;
    unsigned grid, block;
    Stream* awaited;
    uint64_t awaited_number;
    void (*function)(void*); // of the host, with `bytes` as its argument
    HostState host;
    uint64_t given_us, start_us, end_us; // the latter two once it has started
} Op;

struct Stream {
    Stream* next;
    int device;
    unsigned flags;
    Op *first, *last;
    uint64_t given, done;
    uint64_t free_us; // when the last of what is done ended
    int queries, is_held;
};

struct Event {
    Event* next;
    Stream* stream;
    uint64_t number;
    int queries;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Range* ranges;
static Stream* streams;
static Event* events;
static Stream default_streams[max_devices];
static int contexts[max_devices];
static __thread int current[max_depth];
static __thread int depth;
static char misuse[4096];
static struct {
    char name[40];
    int after, times, error;
} failures[max_names];
static int device_count = is_foreign ? max_devices : 1, queries_until_done, is_stuck, copy_error, io_only, is_launch_lost;
static int copies, pins, io_registered, registrations, launches, modules;
static int register_us, registering, most_registering;
static uint64_t bytes_per_us, link_free_us[2]; // to the host, and from it
static void (*hook)(uint64_t to, uint64_t from, size_t len, uint64_t start_us, uint64_t end_us);

static void wrong(const char* what) {
    size_t used = strlen(misuse);
    snprintf(misuse + used, sizeof misuse - used, "%s; ", what);
}

static int failure(const char* call) {
    for (int index = 0; index < max_names; index++) {
        if (strcmp(failures[index].name, call) || !failures[index].times)
            continue;
        if (failures[index].after-- > 0)
            return 0;
        failures[index].after = 0;
        failures[index].times--;
        return failures[index].error;
    }
    return 0;
}

static int device_of_thread(void) {
    return depth > 0 ? current[depth - 1] : 0;
}

static int has_context(const char* call) {
    char text[100];
    if (is_foreign || (depth > 0 && contexts[current[depth - 1]] > 0))
        return 1;
    snprintf(text, sizeof text, "%s without a context", call);
    wrong(text);
    return 0;
}

#define BEGIN(name)                                                                                                                        \
    int error;                                                                                                                             \
    pthread_mutex_lock(&mutex);                                                                                                            \
    if ((error = failure(name)))                                                                                                           \
    return pthread_mutex_unlock(&mutex), error
#define BEGIN_IN_CONTEXT(name)                                                                                                             \
    BEGIN(name);                                                                                                                           \
    if (!has_context(name))                                                                                                                \
    return pthread_mutex_unlock(&mutex), invalid_context
// What is returned is found out before the lock goes.
#define END(code)                                                                                                                          \
    do {                                                                                                                                   \
        int ended = (code);                                                                                                                \
        pthread_mutex_unlock(&mutex);                                                                                                      \
        return ended;                                                                                                                      \
    } while (0)

static Range* range_at(Kind kind, uint64_t start, size_t len) {
    for (Range* range = ranges; range; range = range->next) {
        if (range->kind == kind && start >= range->start && len <= range->len && start - range->start <= range->len - len)
            return range;
    }
    return NULL;
}

static void add_range(Kind kind, uint64_t start, size_t len) {
    Range* range = calloc(1, sizeof *range);
    *range = (Range){ranges, kind, start, len, device_of_thread()};
    ranges = range;
}

static int is_host(uint64_t start, size_t len) {
    return range_at(registered, start, len) || range_at(pinned, start, len);
}

static int is_allowed(uint64_t to, uint64_t from, size_t len) {
    return is_foreign || (range_at(device_memory, to, len) && is_host(from, len)) ||
           (range_at(device_memory, from, len) && is_host(to, len));
}

static void* memory(uint64_t address) {
    return (void*)(uintptr_t)(address & ~device_bit);
}

static int touches(uint64_t start, size_t len, uint64_t other, size_t other_len) {
    return other < start + len && start < other + other_len;
}

static int is_in_use(uint64_t start, size_t len) {
    for (Stream* stream = streams; stream; stream = stream->next) {
        for (Op* op = stream->first; op; op = op->next) {
            if (op->kind == op_copy && (touches(start, len, op->to, op->len) || touches(start, len, op->from, op->len)))
                return 1;
        }
    }
    return 0;
}

static Stream* stream_of(void* handle) {
    if (!handle)
        return depth > 0 || is_foreign ? &default_streams[device_of_thread()] : NULL;
    for (Stream* stream = streams; stream; stream = stream->next) {
        if (stream == handle)
            return stream;
    }
    wrong("a stream that is none");
    return NULL;
}

static Event* event_of(void* handle) {
    for (Event* event = events; event; event = event->next) {
        if (event == handle)
            return event;
    }
    wrong("an event that is none");
    return NULL;
}

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static int advance(Stream* stream, uint64_t up_to);

static void append(Stream* stream, Op op) {
    Op* made = malloc(sizeof op);
    op.number = ++stream->given;
    op.given_us = now_us();
    *made = op;
    if (stream->last)
        stream->last->next = made;
    else
        stream->first = made;
    stream->last = made;
    stream->queries = 0;
    if (is_foreign)
        advance(stream, stream->given);
}

#include "kernel/launches.h"

// Whether an operation has ended. It starts when the one before it in its stream and what it waits for have ended, and its link is free.
static int has_ended(const Stream* stream, Op* op) {
    if (!bytes_per_us || op->end_us)
        return now_us() >= op->end_us;
    int is_to_host = op->kind == op_launch ? launched_to_host(op) : !range_at(device_memory, op->to, op->len);
    uint64_t takes_us = (op->kind == op_launch ? launched_bytes(op) : op->kind == op_copy ? op->len : 0) / bytes_per_us;
    uint64_t* link = &link_free_us[!is_to_host];
    uint64_t before[] = {op->given_us, stream->free_us, op->awaited ? op->awaited->free_us : 0, takes_us ? *link : 0};
    for (size_t index = 0; index < sizeof before / sizeof *before; index++)
        op->start_us = before[index] > op->start_us ? before[index] : op->start_us;
    op->end_us = op->start_us + takes_us;
    if (takes_us)
        *link = op->end_us;
    return now_us() >= op->end_us;
}

// On a thread of the driver's, as the real one calls functions of the host.
static void* call_host(void* given) {
    Stream* stream = given;
    pthread_mutex_lock(&mutex);
    Op* op = stream->first; // stays the first until it is done
    pthread_mutex_unlock(&mutex);
    op->function(op->bytes);
    pthread_mutex_lock(&mutex);
    op->host = host_done;
    op->end_us = now_us();
    advance(stream, stream->given);
    pthread_mutex_unlock(&mutex);
    return NULL;
}

// Whether a function of the host has returned. Without a clock it is called by who asks.
static int host_has_ended(Stream* stream, Op* op) {
    if (op->host == host_waits && !bytes_per_us) {
        op->function(op->bytes);
        op->host = host_done;
    } else if (op->host == host_waits) {
        pthread_t thread;
        op->host = host_runs;
        if (pthread_create(&thread, NULL, call_host, stream) || pthread_detach(thread))
            abort();
    }
    return op->host == host_done;
}

// Does what a stream was given up to a number; false if something in it cannot be done yet.
static int advance(Stream* stream, uint64_t up_to) {
    while (stream->done < up_to) {
        Op* op = stream->first;
        if (stream->is_held || (op->kind == op_wait && op->awaited && !advance(op->awaited, op->awaited_number)))
            return 0;
        if (op->kind == op_host ? !host_has_ended(stream, op) : !has_ended(stream, op))
            return 0;
        if (op->kind == op_copy) {
            if (!is_allowed(op->to, op->from, op->len)) {
                wrong("memory of a copy was given back before its end");
            } else if (!copy_error) {
                memcpy(memory(op->to), memory(op->from), op->len);
                if (hook)
                    hook(op->to, op->from, op->len, op->start_us, op->end_us);
            }
        } else if (op->kind == op_kernel) {
            memcpy(memory(op->to), op->bytes, op->len);
            free(op->bytes);
        } else if (op->kind == op_launch) {
            run_launch(op);
        }
        stream->done = op->number;
        stream->free_us = op->end_us;
        stream->first = op->next;
        if (!stream->first)
            stream->last = NULL;
        free(op);
    }
    return 1;
}

static int give(void* handle, uint64_t to, uint64_t from, size_t len) {
    Stream* stream = stream_of(handle);
    if (!stream)
        return invalid_handle;
    if (!is_foreign && (!handle || !(stream->flags & 1)))
        wrong("a copy on a stream that others wait for");
    if (!is_foreign && !range_at(device_memory, to, len) && !range_at(device_memory, from, len))
        return invalid_value;
    if (!is_allowed(to, from, len))
        wrong("a copy of memory that is not registered as one range");
    append(stream, (Op){.kind = op_copy, .to = to, .from = from, .len = len});
    return 0;
}

#include "fake_control.h"

// The driver.

DRIVER int cuInit(unsigned flags) {
    BEGIN("cuInit");
    END(flags ? invalid_value : 0);
}

#include "fake_devices.h"

DRIVER int cuCtxPushCurrent_v2(void* context) {
    BEGIN("cuCtxPushCurrent_v2");
    if (depth == max_depth)
        abort();
    current[depth++] = (int)((uintptr_t)context - 1);
    END(0);
}

DRIVER int cuCtxPopCurrent_v2(void** context) {
    BEGIN("cuCtxPopCurrent_v2");
    if (depth == 0) {
        wrong("a context popped that is none");
        END(invalid_context);
    }
    *context = (void*)((uintptr_t)current[--depth] + 1);
    END(0);
}

DRIVER int cuStreamCreate(void** handle, unsigned flags) {
    BEGIN_IN_CONTEXT("cuStreamCreate");
    Stream* stream = calloc(1, sizeof *stream);
    stream->next = streams;
    stream->flags = flags;
    stream->device = device_of_thread();
    *handle = streams = stream;
    END(0);
}

DRIVER int cuStreamDestroy_v2(void* handle) {
    BEGIN_IN_CONTEXT("cuStreamDestroy_v2");
    Stream* stream = stream_of(handle);
    if (!stream)
        END(invalid_handle);
    if (stream->first)
        wrong("a stream destroyed with work in it");
    for (Stream** link = &streams; *link; link = &(*link)->next) {
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    }
    for (Event* event = events; event; event = event->next) {
        if (event->stream == stream)
            event->stream = NULL;
    }
    // It has done what others wait for.
    for (Stream* other = streams; other; other = other->next) {
        for (Op* op = other->first; op; op = op->next)
            op->awaited = op->awaited == stream ? NULL : op->awaited;
    }
    free(stream);
    END(0);
}

static int progress(Stream* stream, uint64_t number, int* queries) {
    if (is_stuck || (*queries)++ < queries_until_done || !advance(stream, number))
        return not_ready;
    return copy_error;
}

DRIVER int cuStreamQuery(void* handle) {
    BEGIN_IN_CONTEXT("cuStreamQuery");
    Stream* stream = stream_of(handle);
    END(stream ? progress(stream, stream->given, &stream->queries) : invalid_handle);
}

DRIVER int cuStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
    BEGIN_IN_CONTEXT("cuStreamWaitEvent");
    Stream* stream = stream_of(handle);
    Event* event = event_of(event_handle);
    if (!stream || !event || flags)
        END(invalid_handle);
    if (event->stream)
        append(stream, (Op){.kind = op_wait, .awaited = event->stream, .awaited_number = event->number});
    END(0);
}

DRIVER int cuLaunchHostFunc(void* handle, void (*function)(void*), void* argument) {
    BEGIN_IN_CONTEXT("cuLaunchHostFunc");
    Stream* stream = stream_of(handle);
    if (!stream)
        END(invalid_handle);
    append(stream, (Op){.kind = op_host, .function = function, .bytes = argument});
    if (bytes_per_us)
        advance(stream, stream->given);
    END(0);
}

DRIVER int cuEventCreate(void** handle, unsigned flags) {
    BEGIN_IN_CONTEXT("cuEventCreate");
    if (!is_foreign && !(flags & 2))
        wrong("an event that takes times");
    Event* event = calloc(1, sizeof *event);
    event->next = events;
    *handle = events = event;
    END(0);
}

DRIVER int cuEventDestroy_v2(void* handle) {
    BEGIN_IN_CONTEXT("cuEventDestroy_v2");
    Event* event = event_of(handle);
    if (!event)
        END(invalid_handle);
    for (Event** link = &events; *link; link = &(*link)->next) {
        if (*link == event) {
            *link = event->next;
            break;
        }
    }
    free(event);
    END(0);
}

DRIVER int cuEventRecord(void* handle, void* stream_handle) {
    BEGIN_IN_CONTEXT("cuEventRecord");
    Event* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    if (!event || !stream)
        END(invalid_handle);
    event->stream = stream;
    event->number = stream->given;
    event->queries = 0;
    END(0);
}

#ifndef FAKE_WITHOUT_EVENTS
DRIVER int cuEventQuery(void* handle) {
    BEGIN_IN_CONTEXT("cuEventQuery");
    Event* event = event_of(handle);
    END(event ? (event->stream ? progress(event->stream, event->number, &event->queries) : 0) : invalid_handle);
}
#endif

DRIVER int cuMemHostRegister_v2(void* address, size_t len, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostRegister_v2");
    uint64_t start = (uint64_t)(uintptr_t)address;
    if (!(flags & 1))
        wrong("memory registered for one context alone");
    if (io_only && !(flags & 4))
        END(invalid_value);
    if (is_foreign)
        END(0);
    // It takes its time, and other threads may call meanwhile.
    if (register_us > 0) {
        most_registering = ++registering > most_registering ? registering : most_registering;
        pthread_mutex_unlock(&mutex);
        usleep((unsigned)register_us);
        pthread_mutex_lock(&mutex);
        registering--;
    }
    for (Range* range = ranges; range; range = range->next) {
        if (range->kind == registered && touches(start, len, range->start, range->len))
            END(registered_already);
    }
    add_range(registered, start, len);
    registrations++;
    io_registered += (flags & 4) != 0;
    END(0);
}

static int remove_range(Kind kind, uint64_t start, const char* in_use) {
    for (Range** link = &ranges; *link; link = &(*link)->next) {
        Range* range = *link;
        if (range->kind == kind && range->start == start) {
            if (is_in_use(start, range->len))
                wrong(in_use);
            *link = range->next;
            free(range);
            return 1;
        }
    }
    return 0;
}

DRIVER int cuMemHostUnregister(void* address) {
    BEGIN_IN_CONTEXT("cuMemHostUnregister");
    END(is_foreign || remove_range(registered, (uint64_t)(uintptr_t)address, "memory unregistered under a copy") ? 0 : not_registered);
}

#ifndef FAKE_FOREIGN
static void* host_allocate(size_t len, void* caller) {
    (void)caller;
    return malloc(len);
}

static void host_free(void* address) {
    free(address);
}
#endif

DRIVER int cuMemHostAlloc(void** address, size_t len, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostAlloc");
    if (!(flags & 1))
        wrong("memory pinned for one context alone");
    *address = host_allocate(len, __builtin_return_address(0));
    if (!*address)
        END(out_of_memory);
    pins++;
    add_range(pinned, (uint64_t)(uintptr_t)*address, len);
    END(0);
}

DRIVER int cuMemFreeHost(void* address) {
    BEGIN_IN_CONTEXT("cuMemFreeHost");
    if (!remove_range(pinned, (uint64_t)(uintptr_t)address, "a pinned buffer freed under a copy")) {
        wrong("a pinned buffer freed twice");
        END(invalid_value);
    }
    host_free(address);
    END(0);
}

DRIVER int cuMemAlloc_v2(uint64_t* address, size_t len) {
    BEGIN_IN_CONTEXT("cuMemAlloc_v2");
    *address = (uint64_t)(uintptr_t)aligned_alloc(4096, (len + 4095) & ~(size_t)4095) | device_bit;
    add_range(device_memory, *address, len);
    END(0);
}

DRIVER int cuMemFree_v2(uint64_t address) {
    BEGIN_IN_CONTEXT("cuMemFree_v2");
    if (!remove_range(device_memory, address, "memory of the device freed under a copy"))
        END(invalid_value);
    free(memory(address));
    END(0);
}

DRIVER int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
    BEGIN_IN_CONTEXT("cuPointerGetAttribute");
    Range* range = range_at(device_memory, address, 1);
    if (!range || (attribute != 2 && attribute != 9))
        END(invalid_value);
    // What kind of memory it is (2: a device's), and of which device.
    *(int*)value = attribute == 2 ? 2 : range->device;
    END(0);
}

DRIVER int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t len) {
    BEGIN_IN_CONTEXT("cuMemcpyHtoD_v2");
    if (!range_at(device_memory, to, len))
        END(invalid_value);
    memcpy(memory(to), from, len);
    END(0);
}

DRIVER int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t len) {
    BEGIN_IN_CONTEXT("cuMemcpyDtoH_v2");
    if (!range_at(device_memory, from, len))
        END(invalid_value);
    memcpy(to, memory(from), len);
    END(0);
}

DRIVER int cuMemsetD32Async(uint64_t to, unsigned word, size_t count, void* handle) {
    BEGIN_IN_CONTEXT("cuMemsetD32Async");
    Stream* stream = stream_of(handle);
    if (!stream || !range_at(device_memory, to, 4 * count))
        END(invalid_value);
    unsigned* words = malloc(4 * count);
    for (size_t index = 0; index < count; index++)
        words[index] = word;
    append(stream, (Op){.kind = op_kernel, .to = to, .len = 4 * count, .bytes = words});
    END(0);
}

DRIVER int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void* stream) {
    BEGIN_IN_CONTEXT("cuMemcpyAsync");
    copies++;
    END(give(stream, to, from, len));
}

DRIVER int cuGetErrorName(int error, const char** name) {
    switch (error) {
    case 0:
        *name = "CUDA_SUCCESS";
        break;
    case invalid_value:
        *name = "CUDA_ERROR_INVALID_VALUE";
        break;
    case out_of_memory:
        *name = "CUDA_ERROR_OUT_OF_MEMORY";
        break;
    case 719:
        *name = "CUDA_ERROR_LAUNCH_FAILED";
        break;
    default:
        return invalid_value;
    }
    return 0;
}
