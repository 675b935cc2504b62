/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that has a clflush, a shmalloc and an shfree of its own links the archive all the same. */
#define CXL_SHM_NO_SHORT_NAMES
#include "check.h"

int clflush(const char* mine);
int shmalloc(const char* mine);
int shfree(const char* mine);

int clflush(const char* mine) {
    return mine[0];
}
int shmalloc(const char* mine) {
    return mine[1];
}
int shfree(const char* mine) {
    return mine[2];
}

int main(int argc, char** argv) {
    CHECK(argc == 2);
    CHECK(clflush("abc") == 'a' && shmalloc("abc") == 'b' && shfree("abc") == 'c');
    CHECK_OK(cxl_shm_format(argv[1], NULL));
    CHECK_OK(cxl_shm_init(argv[1], NULL));
    void* block;
    CHECK_OK(cxl_shm_alloc(NULL, 64, 0, &block));
    CHECK_OK(cxl_shm_flush(block, 64));
    CHECK_OK(cxl_shm_free(block));
    CHECK_OK(cxl_shm_fini());
    return 0;
}
