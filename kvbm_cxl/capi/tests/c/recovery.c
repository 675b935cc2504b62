/* SPDX-License-Identifier: Apache-2.0
 *
 * A holder dies in its section:  recovery heir|dies|returns POOL
 *
 * `heir` formats, allocates a lock and names it. `dies` acquires it, writes half of a pair and is killed. The heir, on the same host or on
 * another one, is told to repair, until it says that it has. Where the dead one was alone on its host, `returns` joins for it, which proves
 * that it is gone. */
#include "check.h"

#include <unistd.h>

struct pair {
    cxl_lock_t lock;
    uint32_t left;
    uint32_t right;
};

static void format_and_wait(const char* spec) {
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 32, .objects = 32, .chunk_bytes = 1 << 20};
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    struct pair* pair = shmalloc(sizeof *pair);
    CHECK(pair != NULL);
    CHECK_OK(cxl_shm_allocate_lock(&pair->lock));
    pair->left = pair->right = 1;
    clflush(pair, sizeof *pair);
    CHECK_OK(cxl_shm_put("pair", pair));
    cxl_lock_t lock = pair->lock;

    check_await("half");
    cxl_lock_info_t info = {.struct_size = sizeof info};
    CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, lock, 1, &info), CXL_SHM_E_TIMEOUT);
    /* The harness kills the holder now. */
    printf("waiting\n");
    fflush(stdout);
    CHECK_OK(cxl_shm_acquire_lock_ex(NULL, lock, PATIENCE_S * 1000, &info));
    CHECK(info.recovered == 1);
    CHECK_OK(cxl_shm_release_lock(lock));
    CHECK_STATUS(cxl_shm_acquire_lock(lock), CXL_SHM_E_RECOVERED);
    CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, lock, PATIENCE_S * 1000, NULL), CXL_SHM_E_RECOVERED);
    CHECK_STATUS(cxl_shm_release_lock(lock), CXL_SHM_E_NOT_HELD);
    CHECK_OK(cxl_shm_acquire_lock_ex(NULL, lock, PATIENCE_S * 1000, &info));
    CHECK(info.recovered == 1);
    CHECK_OK(cxl_shm_invalidate(pair, sizeof *pair));
    CHECK(pair->left == 2 && pair->right == 1);
    pair->right = 2;
    clflush(pair, sizeof *pair);
    CHECK_OK(cxl_shm_lock_repaired(NULL, lock));
    CHECK_OK(cxl_shm_release_lock(lock));
    CHECK_OK(cxl_shm_acquire_lock(lock));
    CHECK_OK(cxl_shm_lock_damaged(NULL, lock));
    CHECK_OK(cxl_shm_release_lock(lock));
    CHECK_STATUS(cxl_shm_acquire_lock(lock), CXL_SHM_E_RECOVERED);
    printf("repaired\n");
    fflush(stdout);
    /* This host is the manager: it stays for as long as the harness has work for one. */
    while (getchar() != EOF)
        ;
    CHECK_OK(cxl_shm_fini());
}

static void die(const char* spec) {
    check_open(spec, NULL);
    struct pair* pair = check_await("pair");
    CHECK_OK(cxl_shm_invalidate(pair, sizeof *pair));
    CHECK_OK(cxl_shm_acquire_lock(pair->lock));
    CHECK_STATUS(cxl_shm_fini(), CXL_SHM_E_BUSY);
    pair->left++;
    clflush(pair, sizeof *pair);
    CHECK_OK(cxl_shm_put("half", pair));
    /* Until the harness kills it. */
    for (;;)
        pause();
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    if (strcmp(argv[1], "heir") == 0)
        format_and_wait(argv[2]);
    else if (strcmp(argv[1], "dies") == 0)
        die(argv[2]);
    else {
        CHECK_OK(cxl_shm_init(argv[2], NULL));
        CHECK_OK(cxl_shm_fini());
    }
    return 0;
}
