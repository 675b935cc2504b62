// SPDX-License-Identifier: Apache-2.0
//
// The kernels that GPUs run, compiled for the CPU: what the fake driver launches.
#include "simt.h"

#include KERNELS // the source, or a test's altered copy of it

static void move(const void* tables) {
    cxl_move(*static_cast<const Tables*>(tables));
}

static void move_sum(const void* tables) {
    cxl_move_sum(*static_cast<const Tables*>(tables));
}

static void fold(const void* tables) {
    cxl_fold(*static_cast<const Tables*>(tables));
}

// Runs a kernel by its name with its only parameter; what it did wrong, or null.
extern "C" const char* kernel_run(const char* name, const void* tables, unsigned grid, unsigned block, uint64_t seed, simt::Reach reach) {
    auto* kernel = !strcmp(name, "cxl_move") ? move : !strcmp(name, "cxl_move_sum") ? move_sum : !strcmp(name, "cxl_fold") ? fold : nullptr;
    return kernel ? simt::launch(kernel, tables, grid, block, seed, reach) : "no such kernel";
}

extern "C" size_t kernel_parameter_bytes() {
    return sizeof(Tables);
}
