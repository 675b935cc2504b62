/* SPDX-License-Identifier: Apache-2.0
 *
 * Closing and leaving beside calls that wait on other threads:  closing POOL
 *
 * A close of something in rings ends the calls that wait there, long before their deadlines. A leave that comes to nothing, because a lock
 * was got while it waited, leaves the handle as it was, with its upkeep. A number that is of former times, or of another handle, is
 * refused. */
#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>

/* Far beyond the patience of this test. */
#define LONG_MS (10 * PATIENCE_S * 1000)

static cxl_pool_t *pool, *other;
static cxl_ring_t ring;
static cxl_lock_t lock;
static atomic_int begun, may_release;

static void* accepts(void* unused) {
    cxl_ring_t accepted;
    (void)unused;
    CHECK_STATUS(cxl_shm_ring_accept(pool, ring, LONG_MS, &accepted), CXL_SHM_E_CLOSED);
    return NULL;
}

static void* receives(void* unused) {
    char byte;
    size_t len;
    (void)unused;
    CHECK_STATUS(cxl_shm_ring_recv(pool, ring, &byte, 1, &len, LONG_MS), CXL_SHM_E_CLOSED);
    return NULL;
}

static void* sends(void* unused) {
    (void)unused;
    CHECK_STATUS(cxl_shm_ring_send(pool, ring, "late", 4, LONG_MS), CXL_SHM_E_CLOSED);
    return NULL;
}

static int try_accept(void) {
    cxl_ring_t accepted;
    return cxl_shm_ring_accept(pool, ring, 1, &accepted);
}

static int try_receive(void) {
    char byte;
    size_t len;
    return cxl_shm_ring_recv(pool, ring, &byte, 1, &len, 0);
}

static int try_send(void) {
    return cxl_shm_ring_send(pool, ring, "more", 4, 1);
}

/* Closes `ring` at once while a call waits there on another thread, where calls of this one have their own deadlines. */
static void close_under(void* (*waits)(void*), int (*attempt)(void)) {
    pthread_t thread;
    time_t since = time(NULL);
    size_t most;
    CHECK(pthread_create(&thread, NULL, waits, NULL) == 0);
    do {
        check_rest(since, "the other thread's turn");
        CHECK_STATUS(attempt(), CXL_SHM_E_TIMEOUT);
    } while (strstr(cxl_shm_last_error(), "another call") == NULL);
    if (attempt != try_accept)
        CHECK_OK(cxl_shm_ring_max_message(pool, ring, &most));
    CHECK_OK(cxl_shm_ring_close(pool, ring, 0));
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(time(NULL) - since < PATIENCE_S);
}

static void* connects(void* connection) {
    CHECK_OK(cxl_shm_ring_connect(other, "here", PATIENCE_S * 1000, connection));
    return NULL;
}

/* Makes `ring` a connection to `other`. */
static void connect_to(cxl_ring_t listener) {
    pthread_t thread;
    static cxl_ring_t connected;
    CHECK(pthread_create(&thread, NULL, connects, &connected) == 0);
    CHECK_OK(cxl_shm_ring_accept(pool, listener, PATIENCE_S * 1000, &ring));
    CHECK(pthread_join(thread, NULL) == 0);
}

static void close_rings(void) {
    cxl_ring_t listener;
    CHECK_OK(cxl_shm_ring_listen(pool, "here", &listener));
    connect_to(listener);
    close_under(receives, try_receive);
    connect_to(listener);
    int status;
    while ((status = cxl_shm_ring_send(pool, ring, "full", 4, 0)) == CXL_SHM_OK)
        ;
    CHECK(status == CXL_SHM_E_TIMEOUT);
    close_under(sends, try_send);
    ring = listener;
    close_under(accepts, try_accept);
}

static uint64_t reserve_block(void) {
    cxl_shm_block_t block = {.struct_size = sizeof block};
    const cxl_shm_block_id_t id = {.key = "a block"};
    CHECK_OK(cxl_shm_cache_open(pool, NULL));
    CHECK_OK(cxl_shm_cache_reserve(pool, &id, NULL, 64, &block));
    return block.handle;
}

static void refuse_stale_numbers(void) {
    cxl_ring_t stale, fresh, others;
    CHECK_OK(cxl_shm_ring_listen(pool, "before", &stale));
    CHECK_OK(cxl_shm_ring_listen(other, "others", &others));
    uint64_t stale_block = reserve_block();
    CHECK_OK(cxl_shm_cache_close(pool));
    uint64_t fresh_block = reserve_block();
    CHECK_STATUS(cxl_shm_cache_abort(pool, stale_block), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_cache_abort(pool, fresh_block));
    CHECK_OK(cxl_shm_leave(pool));
    CHECK_OK(cxl_shm_join(pool));
    CHECK_OK(cxl_shm_ring_listen(pool, "after", &fresh));
    CHECK_STATUS(cxl_shm_ring_close(pool, stale, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_close(pool, others, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_close(other, fresh, 0), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_ring_close(pool, fresh, 0));
    CHECK_OK(cxl_shm_ring_close(other, others, 0));
}

/* Whether `pool` is joined as others see it; it is not while a leave waits for calls to end. */
static int is_joined(void) {
    void* found;
    int status = cxl_shm_get_ex(pool, "nothing", &found, NULL, 0);
    CHECK(status == CXL_SHM_E_NOT_FOUND || status == CXL_SHM_E_CLOSED);
    return status == CXL_SHM_E_NOT_FOUND;
}

static void* acquires(void* status) {
    atomic_store(&begun, 1);
    *(int*)status = cxl_shm_acquire_lock_ex(pool, lock, LONG_MS, NULL);
    if (*(int*)status != CXL_SHM_OK)
        return NULL;
    time_t since = time(NULL);
    while (!atomic_load(&may_release))
        check_rest(since, "the end of the leave");
    CHECK_OK(cxl_shm_release_lock_ex(pool, lock));
    return NULL;
}

static void* leaves(void* status) {
    *(int*)status = cxl_shm_leave(pool);
    atomic_store(&begun, 2);
    return NULL;
}

/* How many threads do the upkeep of handles; the sum of their numbers tells whether they are the same ones. */
static int upkeep_threads(long* sum) {
    int found = 0;
    *sum = 0;
    char path[300], name[32];
    DIR* tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent* task; (task = readdir(tasks)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE* file = fopen(path, "r");
        if (file == NULL)
            continue;
        if (fgets(name, sizeof name, file) != NULL && strcmp(name, "cxl-upkeep\n") == 0) {
            found++;
            *sum += atol(task->d_name);
        }
        fclose(file);
    }
    closedir(tasks);
    return found;
}

/* A lock is got through `pool` while it is being left. False if the leave came before the wait for the lock. */
static int leave_in_vain(void) {
    pthread_t acquiring, leaving;
    int acquired = 1, left = 1;
    long before, after;
    time_t since = time(NULL);
    /* A thread has its name once it runs. */
    while (upkeep_threads(&before) != 2)
        check_rest(since, "the upkeep of both handles");
    atomic_store(&begun, 0);
    atomic_store(&may_release, 0);
    CHECK_OK(cxl_shm_acquire_lock_ex(other, lock, PATIENCE_S * 1000, NULL));
    CHECK(pthread_create(&acquiring, NULL, acquires, &acquired) == 0);
    while (!atomic_load(&begun))
        check_rest(since, "the thread that waits for the lock");
    CHECK(pthread_create(&leaving, NULL, leaves, &left) == 0);
    while (is_joined() && atomic_load(&begun) != 2)
        check_rest(since, "the leave");
    CHECK_OK(cxl_shm_release_lock_ex(other, lock));
    CHECK(pthread_join(leaving, NULL) == 0);
    int in_vain = left == CXL_SHM_E_BUSY;
    CHECK(in_vain || left == CXL_SHM_OK);
    if (in_vain) {
        CHECK(is_joined());
        /* The thread of what was left ends, sooner or later; another one has begun. */
        while (upkeep_threads(&after) != 2 || after == before)
            check_rest(since, "the upkeep of both handles");
    }
    atomic_store(&may_release, 1);
    CHECK(pthread_join(acquiring, NULL) == 0);
    CHECK(acquired == (in_vain ? CXL_SHM_OK : CXL_SHM_E_CLOSED));
    return in_vain;
}

int main(int argc, char** argv) {
    CHECK(argc == 2);
    cxl_shm_options_t options = {
        .struct_size = sizeof options, .timeout_ms = PATIENCE_S * 1000, .join_timeout_ms = PATIENCE_S * 1000, .heartbeat_ms = 20};
    cxl_shm_format_options_t format = {.struct_size = sizeof format,
                                       .slots = 4,
                                       .locks = 32,
                                       .objects = 32,
                                       .chunk_bytes = 256 << 10,
                                       .cell_bytes = 64 << 10,
                                       .cells_percent = 25};
    CHECK_OK(cxl_shm_format(argv[1], &format));
    CHECK_OK(cxl_shm_open(argv[1], &options, &pool));
    CHECK_OK(cxl_shm_open(argv[1], &options, &other));
    refuse_stale_numbers();
    close_rings();
    CHECK_OK(cxl_shm_allocate_lock_ex(other, PATIENCE_S * 1000, &lock));
    time_t since = time(NULL);
    while (!leave_in_vain()) {
        check_rest(since, "a leave beside a wait for a lock");
        CHECK_OK(cxl_shm_join(pool));
    }
    CHECK_OK(cxl_shm_close(pool));
    CHECK_OK(cxl_shm_close(other));
    return 0;
}
