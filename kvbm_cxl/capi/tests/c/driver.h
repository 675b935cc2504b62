// SPDX-License-Identifier: Apache-2.0
// The fake driver of the tests, as far as all programs need it.
#ifndef DRIVER_H
#define DRIVER_H

#include "check.h"
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

static void (*fake_set)(const char*, int);
static long (*fake_get)(const char*);
static const char* (*fake_misuse)(void);
static int (*retain)(void**, int), (*release)(int), (*push)(void*), (*pop)(void**);
static int (*allocate)(uint64_t*, size_t), (*release_memory)(uint64_t);
static int (*write_memory)(uint64_t, const void*, size_t), (*read_memory)(void*, uint64_t, size_t);

static void* library;

static void* symbol(const char* name) {
    void* found = dlsym(library, name);
    CHECK(found != NULL);
    return found;
}

static void load_driver(const char* path) {
    CHECK((library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) != NULL);
    *(void**)&fake_set = symbol("fake_set");
    *(void**)&fake_get = symbol("fake_get");
    *(void**)&fake_misuse = symbol("fake_misuse");
    *(void**)&retain = symbol("cuDevicePrimaryCtxRetain");
    *(void**)&release = symbol("cuDevicePrimaryCtxRelease_v2");
    *(void**)&push = symbol("cuCtxPushCurrent_v2");
    *(void**)&pop = symbol("cuCtxPopCurrent_v2");
    *(void**)&allocate = symbol("cuMemAlloc_v2");
    *(void**)&release_memory = symbol("cuMemFree_v2");
    *(void**)&write_memory = symbol("cuMemcpyHtoD_v2");
    *(void**)&read_memory = symbol("cuMemcpyDtoH_v2");
}

#endif
