/* SPDX-License-Identifier: Apache-2.0
 *
 * What is refused, and how:  errors POOL [no-fork]   (no-fork leaves the child processes out) */
#include "check.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

static const cxl_shm_format_options_t small = {
    .struct_size = sizeof small, .slots = 4, .locks = 16, .objects = 16, .chunk_bytes = 64 << 10};

/* Pointers that are no pools. None of them may be followed. */
static void wrong_handles(void) {
    static int somewhere;
    cxl_pool_t* wrong[] = {(cxl_pool_t*)1, (cxl_pool_t*)0x100, (cxl_pool_t*)0x101, (cxl_pool_t*)(uintptr_t)-1,
                           (cxl_pool_t*)(void*)&somewhere};
    cxl_lock_t lock;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_STATUS(cxl_shm_join(wrong[i]), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_close(wrong[i]), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_allocate_lock_ex(wrong[i], 1, &lock), CXL_SHM_E_CLOSED);
    }
}

static void structures(const char* pool) {
    cxl_shm_options_t options = {.struct_size = 4};
    cxl_pool_t* opened = NULL;
    CHECK_STATUS(cxl_shm_open(pool, &options, &opened), CXL_SHM_E_INVALID);
    options.struct_size = sizeof options;
    options.flags = 1u << 31;
    CHECK_STATUS(cxl_shm_open(pool, &options, &opened), CXL_SHM_E_INVALID);
    options.flags = CXL_SHM_OPEN_SLOT;
    options.slot = 1u << 20;
    CHECK_STATUS(cxl_shm_open(pool, &options, &opened), CXL_SHM_E_INVALID);
    options = (cxl_shm_options_t){.struct_size = sizeof options, .heartbeat_ms = 100, .suspect_ms = 100};
    CHECK_STATUS(cxl_shm_open(pool, &options, &opened), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_open(pool, NULL, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_open("relative", NULL, &opened), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_open("/dev/shm/\xff\xfe", NULL, &opened), CXL_SHM_E_INVALID);
    static char endless[1 << 20];
    memset(endless, '/', sizeof endless - 1);
    CHECK_STATUS(cxl_shm_open(endless, NULL, &opened), CXL_SHM_E_INVALID);
    CHECK(opened == NULL);
    CHECK_STATUS(cxl_shm_get_info(NULL, NULL), CXL_SHM_E_INVALID);
    struct {
        cxl_shm_options_t known;
        uint64_t unknown;
    } newer = {{.struct_size = sizeof newer}, 1};
    CHECK_STATUS(cxl_shm_open(pool, &newer.known, &opened), CXL_SHM_E_INVALID);
    newer.unknown = 0;
    newer.known.flags = CXL_SHM_OPEN_NO_JOIN;
    CHECK_OK(cxl_shm_open(pool, &newer.known, &opened));
    CHECK_OK(cxl_shm_close(opened));
}

static void* elsewhere(void* lock) {
    CHECK(cxl_shm_last_status() == 0 && cxl_shm_last_error()[0] == 0);
    CHECK_STATUS(cxl_shm_release_lock(*(cxl_lock_t*)lock), CXL_SHM_E_NOT_HELD);
    CHECK_STATUS(cxl_shm_lock_repaired(NULL, *(cxl_lock_t*)lock), CXL_SHM_E_NOT_HELD);
    CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, *(cxl_lock_t*)lock, 20, NULL), CXL_SHM_E_TIMEOUT);
    return NULL;
}

static void locks(void) {
    cxl_lock_t lock, more[16];
    cxl_lock_info_t info = {.struct_size = sizeof info};
    CHECK_STATUS(cxl_shm_allocate_lock(NULL), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_allocate_lock(&lock));
    CHECK(lock != CXL_SHM_LOCK_NONE);
    CHECK_STATUS(cxl_shm_acquire_lock(CXL_SHM_LOCK_NONE), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_acquire_lock(7), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_acquire_lock(16), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_acquire_lock(UINT32_MAX), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_release_lock(lock), CXL_SHM_E_NOT_HELD);
    CHECK_OK(cxl_shm_acquire_lock(lock));
    CHECK_STATUS(cxl_shm_acquire_lock(lock), CXL_SHM_E_DEADLOCK);
    CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, lock, 0, &info), CXL_SHM_E_DEADLOCK);
    CHECK_STATUS(cxl_shm_free_lock(lock), CXL_SHM_E_BUSY);
    CHECK_STATUS(cxl_shm_leave(NULL), CXL_SHM_E_BUSY);
    CHECK_STATUS(cxl_shm_fini(), CXL_SHM_E_BUSY);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, elsewhere, &lock) == 0 && pthread_join(thread, NULL) == 0);
    CHECK_OK(cxl_shm_release_lock(lock));
    CHECK_OK(cxl_shm_acquire_lock_ex(NULL, lock, 0, &info));
    CHECK(info.recovered == 0 && info.grant != 0);
    CHECK_OK(cxl_shm_release_lock(lock));
    info.struct_size = 0;
    CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, lock, 1000, &info), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_release_lock(lock), CXL_SHM_E_NOT_HELD);
    CHECK_OK(cxl_shm_free_lock(lock));
    CHECK_STATUS(cxl_shm_free_lock(lock), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_free_lock(3), CXL_SHM_E_INVALID);
    int count = 0;
    int status;
    while ((status = cxl_shm_allocate_lock(&more[count])) == CXL_SHM_OK)
        count++;
    CHECK(status == CXL_SHM_E_FULL && count == 8);
    while (count-- > 0)
        CHECK_OK(cxl_shm_free_lock(more[count]));
}

static void blocks(void) {
    static char ordinary[CXL_SHM_LINE_BYTES];
    char line[CXL_SHM_LINE_BYTES] = "what a line can hold";
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    cxl_shm_clear_error();
    CHECK(shmalloc(0) == NULL && cxl_shm_last_status() == CXL_SHM_E_INVALID);
    CHECK(shmalloc(SIZE_MAX) == NULL && cxl_shm_last_status() == CXL_SHM_E_INVALID);
    char* all = shmalloc(info.data_bytes);
    CHECK(all != NULL && cxl_shm_get_offset(all) == info.data_offset);
    CHECK(shmalloc(1) == NULL && cxl_shm_last_status() == CXL_SHM_E_FULL);
    CHECK_STATUS(cxl_shm_free(all + info.chunk_bytes), CXL_SHM_E_NOT_A_BLOCK);
    CHECK_OK(cxl_shm_free(all));
    char* block = shmalloc(1000);
    char* scratch = cxl_shm_alloc_scratch(1000);
    CHECK(block != NULL && scratch != NULL && block != scratch);
    CHECK(cxl_shm_get_offset(block) >= info.data_offset && (char*)info.base + cxl_shm_get_offset(block) == block);

    CHECK_OK(cxl_shm_free(NULL));
    CHECK_STATUS(cxl_shm_free(ordinary), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_free(info.base), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_free((char*)info.base + info.len_bytes), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_free(block + 1), CXL_SHM_E_NOT_A_BLOCK);
    CHECK_STATUS(cxl_shm_free(block + CXL_SHM_LINE_BYTES), CXL_SHM_E_NOT_A_BLOCK);
    CHECK_OK(cxl_shm_free(block));
    CHECK_STATUS(cxl_shm_free(block), CXL_SHM_E_NOT_A_BLOCK);
    cxl_shm_clear_error();
    shfree(block);
    CHECK(cxl_shm_last_status() == CXL_SHM_E_NOT_A_BLOCK);
    CHECK_STATUS(cxl_shm_keep(block), CXL_SHM_E_NOT_A_BLOCK);
    CHECK_OK(cxl_shm_keep(scratch));
    CHECK_OK(cxl_shm_keep(scratch));
    void* never = NULL;
    CHECK_STATUS(cxl_shm_alloc(NULL, 64, 2, &never), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_alloc(NULL, 64, 0, NULL), CXL_SHM_E_INVALID);

    CHECK(cxl_shm_get_offset(NULL) == CXL_SHM_NULL_OFFSET && cxl_shm_get_ptr(CXL_SHM_NULL_OFFSET) == NULL);
    cxl_shm_clear_error();
    CHECK(cxl_shm_get_offset(ordinary) == CXL_SHM_NULL_OFFSET && cxl_shm_last_status() == CXL_SHM_E_NOT_IN_POOL);
    cxl_shm_clear_error();
    CHECK(cxl_shm_get_ptr(64) == NULL && cxl_shm_last_status() == CXL_SHM_E_NOT_IN_POOL);
    CHECK(cxl_shm_get_ptr(UINT64_MAX) == NULL);
    shm_ptr_t end = info.data_offset + info.data_bytes;
    CHECK_OK(cxl_shm_get_range(NULL, end - 64, 64, &never));
    CHECK_STATUS(cxl_shm_get_range(NULL, end - 64, 65, &never), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_get_range(NULL, end - 64, SIZE_MAX, &never), CXL_SHM_E_NOT_IN_POOL);

    CHECK_STATUS(cxl_shm_flush(ordinary, 1), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_flush(scratch, SIZE_MAX), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_flush(scratch, 0));
    cxl_shm_clear_error();
    clflush(ordinary, sizeof ordinary);
    CHECK(cxl_shm_last_status() == CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_publish_line(scratch + 8, line), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_publish_line(scratch, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_publish_line(NULL, line), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_fetch_line(info.base, line), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_publish_line(scratch, line));
    memset(ordinary, 1, sizeof ordinary);
    CHECK_OK(cxl_shm_fetch_line(scratch, ordinary));
    CHECK(memcmp(ordinary, line, sizeof line) == 0);
    CHECK_STATUS(cxl_shm_copy_in(scratch, NULL, 8), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_copy_in(ordinary, line, 8), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_copy_out(ordinary, line, 8), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_copy_in(scratch + 3, "unaligned", 9));
    CHECK_OK(cxl_shm_copy_out(ordinary, scratch, 20));
    CHECK(memcmp(ordinary, "whaunalignedcan hold", 20) == 0);
    CHECK_OK(cxl_shm_free(scratch));
}

static void objects(void) {
    char *block = shmalloc(64), ordinary;
    void* found = &ordinary;
    uint64_t len_bytes;
    CHECK(block != NULL);
    CHECK_STATUS(cxl_shm_put(NULL, block), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_put("", block), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_put("a name of 25 bytes is long", block), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_put("here", &ordinary), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_put("here", NULL), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_get("here", &found), CXL_SHM_E_NOT_FOUND);
    CHECK(found == &ordinary);
    CHECK_STATUS(cxl_shm_get("here", NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_destroy("here"), CXL_SHM_E_NOT_FOUND);
    CHECK_OK(cxl_shm_put("a name of just 24 bytes.", block));
    CHECK_OK(cxl_shm_get("a name of just 24 bytes.", &found));
    CHECK(found == block);
    CHECK_STATUS(cxl_shm_put("a name of just 24 bytes.", block), CXL_SHM_E_EXISTS);
    CHECK_STATUS(cxl_shm_put_ex(NULL, "here", block, 64, 2, 1000), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_put_ex(NULL, "here", block, UINT64_MAX, 0, 1000), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_put_ex(NULL, "a name of just 24 bytes.", block, 64, CXL_SHM_PUT_REPLACE, 1000));
    CHECK_OK(cxl_shm_get_ex(NULL, "a name of just 24 bytes.", &found, &len_bytes, 1000));
    CHECK(found == block && len_bytes == 64);
    CHECK_OK(cxl_shm_destroy("a name of just 24 bytes."));
    CHECK_OK(cxl_shm_free(block));
}

/* A pool opened twice, read-only and without joining, and after it was closed. */
static void memberships(const char* pool) {
    cxl_shm_options_t options = {.struct_size = sizeof options, .flags = CXL_SHM_OPEN_READ_ONLY};
    cxl_shm_info_t info = {.struct_size = sizeof info};
    cxl_pool_t* other = NULL;
    void* block;
    cxl_lock_t lock;
    CHECK_STATUS(cxl_shm_init(pool, NULL), CXL_SHM_E_EXISTS);
    CHECK_OK(cxl_shm_open(pool, &options, &other));
    CHECK_OK(cxl_shm_get_info(other, &info));
    CHECK((info.flags & ~(uint32_t)CXL_SHM_INFO_WHOLE_LINES) == CXL_SHM_INFO_READ_ONLY && info.slot == CXL_SHM_NO_SLOT);
    CHECK_STATUS(cxl_shm_join(other), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_alloc(other, 64, 0, &block), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_get_range(other, info.data_offset, 64, &block));
    char line[CXL_SHM_LINE_BYTES] = {0};
    CHECK_STATUS(cxl_shm_publish_line(block, line), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_copy_in(block, line, 1), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_fetch_line(block, line));
    CHECK_OK(cxl_shm_close(other));
    CHECK_STATUS(cxl_shm_close(other), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_get_info(other, &info), CXL_SHM_E_CLOSED);

    cxl_pool_t* many[CXL_SHM_MAX_POOLS];
    int count = 0;
    int status;
    options.flags = CXL_SHM_OPEN_NO_JOIN;
    while ((status = cxl_shm_open(pool, &options, &many[count])) == CXL_SHM_OK)
        count++;
    CHECK(status == CXL_SHM_E_FULL && count == CXL_SHM_MAX_POOLS - 1);
    CHECK_STATUS(cxl_shm_allocate_lock_ex(many[0], 1000, &lock), CXL_SHM_E_CLOSED);
    while (count-- > 0)
        CHECK_OK(cxl_shm_close(many[count]));
    CHECK_OK(cxl_shm_leave(NULL));
    CHECK_OK(cxl_shm_leave(NULL));
    CHECK_STATUS(cxl_shm_allocate_lock(&lock), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_join(NULL));
    CHECK_STATUS(cxl_shm_join(NULL), CXL_SHM_E_EXISTS);
    CHECK_OK(cxl_shm_allocate_lock(&lock));
    CHECK_OK(cxl_shm_free_lock(lock));
    CHECK_OK(cxl_shm_check(NULL));
}

/* A child must not release its parent's locks or pass for its parent. It can open the pool for itself, then it is the same host. */
static void forks(const char* pool) {
    cxl_lock_t lock;
    cxl_shm_info_t info = {.struct_size = sizeof info};
    cxl_pool_t* parents = NULL;
    CHECK_OK(cxl_shm_allocate_lock(&lock));
    CHECK_OK(cxl_shm_acquire_lock(lock));
    CHECK_OK(cxl_shm_open(pool, NULL, &parents));
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    uint32_t slot = info.slot, process = info.process;
    void* block = shmalloc(64);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_STATUS(cxl_shm_get_info(parents, &info), CXL_SHM_E_FORKED);
        CHECK_STATUS(cxl_shm_close(parents), CXL_SHM_E_FORKED);
        CHECK_STATUS(cxl_shm_free(block), CXL_SHM_E_FORKED);
        CHECK_OK(cxl_shm_fini());
        CHECK_OK(cxl_shm_init(pool, NULL));
        CHECK_OK(cxl_shm_get_info(NULL, &info));
        CHECK(info.slot == slot && info.process != process);
        CHECK_STATUS(cxl_shm_release_lock(lock), CXL_SHM_E_NOT_HELD);
        CHECK_STATUS(cxl_shm_acquire_lock_ex(NULL, lock, 20, NULL), CXL_SHM_E_TIMEOUT);
        CHECK_OK(cxl_shm_fini());
        _exit(7);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    CHECK_OK(cxl_shm_release_lock(lock));
    CHECK_OK(cxl_shm_free_lock(lock));
    CHECK_OK(cxl_shm_free(block));
    CHECK_OK(cxl_shm_close(parents));
}

int main(int argc, char** argv) {
    CHECK(argc >= 2);
    CHECK(cxl_shm_version() == (CXL_SHM_VERSION_MAJOR << 16 | CXL_SHM_VERSION_MINOR << 8 | CXL_SHM_VERSION_PATCH));
    CHECK(strcmp(cxl_shm_strerror(CXL_SHM_OK), "success") == 0 && strcmp(cxl_shm_strerror(-1000), "unknown status") == 0);
    CHECK(unsetenv("CXL_POOL") == 0);
    cxl_lock_t lock;
    CHECK_STATUS(cxl_shm_allocate_lock(&lock), CXL_SHM_E_INVALID);
    CHECK(strstr(cxl_shm_last_error(), "CXL_POOL") != NULL);
    CHECK_OK(cxl_shm_fini());
    CHECK_OK(cxl_shm_format(argv[1], &small));
    CHECK_STATUS(cxl_shm_format(argv[1], &small), CXL_SHM_E_NOT_A_POOL);
    cxl_shm_format_options_t wrong = small;
    wrong.flags = CXL_SHM_FORMAT_FORCE;
    wrong.chunk_bytes = 5000;
    CHECK_STATUS(cxl_shm_format(argv[1], &wrong), CXL_SHM_E_INVALID);
    wrong.chunk_bytes = 0;
    wrong.reserved = 1;
    CHECK_STATUS(cxl_shm_format(argv[1], &wrong), CXL_SHM_E_INVALID);
    wrong_handles();
    structures(argv[1]);
    /* The default pool opens itself. */
    CHECK(setenv("CXL_POOL", argv[1], 1) == 0);
    CHECK_OK(cxl_shm_allocate_lock(&lock));
    CHECK_OK(cxl_shm_free_lock(lock));
    locks();
    blocks();
    objects();
    memberships(argv[1]);
    if (argc < 3)
        forks(argv[1]);
    CHECK_OK(cxl_shm_bind_thread(0));
    CHECK(cxl_shm_bind_thread(1u << 30) == CXL_SHM_E_NOT_FOUND);
    uint8_t id[16] = {0}, none[16] = {0};
    CHECK_OK(cxl_shm_machine_id(id));
    CHECK(memcmp(id, none, sizeof id) != 0);
    /* The pool is formatted anew under a handle. Its host has left, or the format would notice what that goes on writing. */
    wrong.reserved = 0;
    CHECK_OK(cxl_shm_leave(NULL));
    CHECK_OK(cxl_shm_format(argv[1], &wrong));
    CHECK_STATUS(cxl_shm_check(NULL), CXL_SHM_E_REPLACED);
    printf("ok\n");
    return 0;
}
