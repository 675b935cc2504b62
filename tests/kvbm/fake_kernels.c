// SPDX-License-Identifier: Apache-2.0
//
// The copies of KVBM's kernel library on the CPU. The transformations between layouts are not here: no test that runs needs them.
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KERNEL __attribute__((visibility("default")))

static int missing(const char* name) {
    fprintf(stderr, "fake kernels: %s is not here\n", name);
    abort();
}

KERNEL int kvbm_kernels_launch_universal_from_block(void) {
    return missing("universal_from_block");
}
KERNEL int kvbm_kernels_launch_block_from_universal(void) {
    return missing("block_from_universal");
}

KERNEL int kvbm_kernels_launch_vectorized_copy(void** from, void** to, size_t len, int count, void* stream) {
    (void)stream;
    for (int each = 0; each < count; each++)
        memmove(to[each], from[each], len);
    return 0;
}

KERNEL int kvbm_kernels_memcpy_batch(const void* const* from, void* const* to, size_t len, size_t count, int mode, void* stream) {
    (void)mode, (void)stream;
    for (size_t each = 0; each < count; each++)
        memmove(to[each], from[each], len);
    return 0;
}

KERNEL bool kvbm_kernels_has_memcpy_batch_async(void) {
    return false;
}
KERNEL bool kvbm_kernels_is_stub_build(void) {
    return false;
}
