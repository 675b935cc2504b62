// SPDX-License-Identifier: Apache-2.0
//
// The part of the fake driver that loads and launches kernels. What it launches are our own, compiled for the CPU (host.cpp); the image
// that it is given has to have them by name, and nothing else of it is used.
#ifndef LAUNCHES_H
#define LAUNCHES_H

#ifdef FAKE_KERNELS
typedef void* (*Reach)(uint64_t address, size_t len, int is_write, int* is_device);
const char* kernel_run(const char* name, const void* parameter, unsigned grid, unsigned block, uint64_t seed, Reach reach);
size_t kernel_parameter_bytes(void);

// What kernels are given for registered memory: no address of the host's.
static const uint64_t mapped_bit = UINT64_C(1) << 61;

// Loads may be of the aligned words around what is theirs.
static Range* range_around(Kind kind, uint64_t start, size_t len) {
    for (Range* range = ranges; range; range = range->next) {
        uint64_t first = range->start & ~UINT64_C(15), end = (range->start + range->len + 15) & ~UINT64_C(15);
        if (range->kind == kind && start >= first && start < end && len <= end - start)
            return range;
    }
    return NULL;
}

static void* reach(uint64_t address, size_t len, int is_write, int* is_device) {
    Range* (*find)(Kind, uint64_t, size_t) = is_write ? range_at : range_around;
    *is_device = (address & device_bit) != 0;
    uint64_t host = address & ~mapped_bit;
    if (*is_device ? !find(device_memory, address, len) : !find(address & mapped_bit ? registered : pinned, host, len))
        return NULL;
    return (void*)(uintptr_t)(address & ~(device_bit | mapped_bit));
}

// The parameter of a kernel begins with where its pieces are; each has its destination as the third of four numbers (table.rs).
static int launched_to_host(const Op* op) {
    const uint64_t* pieces = memory(*(const uint64_t*)op->bytes);
    return !(pieces[2] & device_bit);
}

static size_t launched_bytes(const Op* op) {
    return (size_t)((const uint32_t*)op->bytes)[12] * 1024;
}

static void run_launch(Op* op) {
    static uint64_t seed = 1;
    if (!copy_error && !is_launch_lost) {
        const char* done_wrong = kernel_run(op->name, op->bytes, op->grid, op->block, seed++, reach);
        if (done_wrong)
            wrong(done_wrong);
        if (hook)
            hook(0, 0, 0, op->start_us, op->end_us);
    }
    free(op->bytes);
}

DRIVER int cuMemHostGetDevicePointer_v2(uint64_t* pointer, void* address, unsigned flags) {
    BEGIN_IN_CONTEXT("cuMemHostGetDevicePointer_v2");
    uint64_t start = (uint64_t)(uintptr_t)address;
    if (flags || !range_at(registered, start, 1))
        END(invalid_value);
    *pointer = start | mapped_bit;
    END(0);
}

static const char* const kernel_names[] = {"cxl_move", "cxl_move_sum"};

DRIVER int cuModuleLoadData(void** module, const void* image) {
    BEGIN_IN_CONTEXT("cuModuleLoadData");
    if (!strstr(image, ".entry cxl_move(") || !strstr(image, ".entry cxl_move_sum("))
        END(invalid_image);
    modules++;
    *module = (void*)kernel_names;
    END(0);
}

DRIVER int cuModuleUnload(void* module) {
    BEGIN_IN_CONTEXT("cuModuleUnload");
    if (module != (void*)kernel_names || --modules < 0)
        wrong("a module unloaded that is none");
    END(0);
}

DRIVER int cuModuleGetFunction(void** function, void* module, const char* name) {
    BEGIN_IN_CONTEXT("cuModuleGetFunction");
    for (size_t index = 0; index < 2; index++) {
        if (module == (void*)kernel_names && !strcmp(kernel_names[index], name)) {
            *function = (void*)kernel_names[index];
            END(0);
        }
    }
    END(not_found);
}

DRIVER int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes, void* handle, void** parameters, void** extra) {
    BEGIN_IN_CONTEXT("cuLaunchKernel");
    Stream* stream = stream_of(handle);
    if (!stream)
        END(invalid_handle);
    if (!handle || !(stream->flags & 1))
        wrong("a kernel on a stream that others wait for");
    if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x % 32 || block_x > 256 || block_y != 1 || block_z != 1 || extra)
        END(invalid_value);
    if (shared_bytes || (function != (void*)kernel_names[0] && function != (void*)kernel_names[1]) || !modules)
        END(invalid_handle);
    // The parameter is read before the call returns.
    void* copy = malloc(kernel_parameter_bytes());
    memcpy(copy, parameters[0], kernel_parameter_bytes());
    launches++;
    append(stream, (Op){.kind = op_launch, .bytes = copy, .name = function, .grid = grid_x, .block = block_x});
    END(0);
}
#else
static int launched_to_host(const Op* op) {
    (void)op;
    return 0;
}
static size_t launched_bytes(const Op* op) {
    (void)op;
    return 0;
}
static void run_launch(Op* op) {
    (void)op;
}
#endif

#endif // LAUNCHES_H
