/* SPDX-License-Identifier: Apache-2.0 */
/* A named block of pool memory that every host finds, changed under a lock that excludes other hosts.
 *
 *     make build && scripts/install-capi PREFIX
 *     cc examples/c/greeting.c -Itarget/install/include -Ltarget/install/lib -lcxl_shm -o greeting
 *     CXL_POOL=/dev/shm/kv LD_LIBRARY_PATH=target/install/lib ./greeting
 */
#include <cxl_shm.h>
#include <stdio.h>

static int failed(void) {
    fprintf(stderr, "%s\n", cxl_shm_last_error());
    return 1;
}

int main(void) {
    char copy[6];
    void* found;
    cxl_lock_t lock;
    char* text = shmalloc(4096); /* in the pool that CXL_POOL names; lives until it is freed */
    if (text == NULL || cxl_shm_copy_in(text, "hello", 6) || cxl_shm_put("greeting", text))
        return failed();
    if (cxl_shm_allocate_lock(&lock) || cxl_shm_acquire_lock(lock))
        return failed();
    if (cxl_shm_get("greeting", &found) || cxl_shm_copy_out(copy, found, sizeof copy))
        return failed();
    puts(copy); /* the same on every host */
    cxl_shm_release_lock(lock);
    return cxl_shm_fini() ? failed() : 0;
}
