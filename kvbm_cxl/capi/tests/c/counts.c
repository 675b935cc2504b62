/* SPDX-License-Identifier: Apache-2.0
 *
 * Counters:  counts refused POOL
 *            counts stays|leaves POOL SHARE
 *            counts sees POOL SUM HELD
 *
 * A process of the host in slot 0 counts SHARE times what is different for each counter, in several calls; then it stays until it is
 * killed, or leaves. Another host waits until it sees SUM times as much and, of what is "now", HELD times. */
#include "check.h"

#include <unistd.h>

#define FIRST CXL_SHM_COUNT_NIXL_POSTED
#define LAST CXL_SHM_COUNT_NIXL_ENGINES

static int is_held(uint32_t counter) {
    return counter >= CXL_SHM_COUNT_NIXL_LINKS;
}

static uint64_t unit(uint32_t counter) {
    return 1000003ull * counter;
}

/* True once the host in slot 0 has published all counters, each with its own value. */
static int is_published(uint64_t sum, uint64_t held) {
    for (uint32_t counter = FIRST; counter <= LAST; counter++) {
        uint64_t value = 0;
        int status = cxl_shm_host_count(NULL, 0, counter, &value);
        if (status == CXL_SHM_E_NOT_FOUND)
            return 0;
        CHECK(status == CXL_SHM_OK);
        if (value != unit(counter) * (is_held(counter) ? held : sum))
            return 0;
    }
    return 1;
}

static void count(uint64_t share) {
    cxl_shm_count_t counts[LAST - FIRST + 1];
    for (uint64_t round = 0; round < share; round++) {
        for (uint32_t counter = FIRST; counter <= LAST; counter++)
            counts[counter - FIRST] = (cxl_shm_count_t){counter, 0, (int64_t)unit(counter)};
        CHECK_OK(cxl_shm_count(NULL, counts, LAST - FIRST + 1));
        for (uint32_t counter = FIRST; counter <= LAST; counter++)
            counts[counter - FIRST].change = is_held(counter) ? -7 : 0;
        CHECK_OK(cxl_shm_count(NULL, counts, LAST - FIRST + 1));
        for (uint32_t counter = FIRST; counter <= LAST; counter++)
            counts[counter - FIRST].change = is_held(counter) ? 7 : 0;
        CHECK_OK(cxl_shm_count(NULL, counts, LAST - FIRST + 1));
    }
}

static void refused(const char* pool) {
    uint64_t value = 77;
    cxl_shm_count_t counts[2] = {{FIRST, 0, 5}, {LAST + 1, 0, 5}};
    cxl_shm_format_options_t how = {.struct_size = sizeof how};
    CHECK_OK(cxl_shm_format(pool, &how));
    cxl_shm_options_t mapped = {.struct_size = sizeof mapped, .flags = CXL_SHM_OPEN_NO_JOIN};
    CHECK_OK(cxl_shm_init(pool, &mapped));
    CHECK_STATUS(cxl_shm_count(NULL, counts, 1), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_host_count(NULL, 0, FIRST, &value), CXL_SHM_E_NOT_FOUND);
    CHECK_OK(cxl_shm_join(NULL));
    CHECK_STATUS(cxl_shm_count(NULL, counts, 2), CXL_SHM_E_INVALID);
    counts[1] = (cxl_shm_count_t){FIRST + 1, 1, 5};
    CHECK_STATUS(cxl_shm_count(NULL, counts, 2), CXL_SHM_E_INVALID);
    counts[1] = (cxl_shm_count_t){0, 0, 5}; /* blocks published: the library's own */
    CHECK_STATUS(cxl_shm_count(NULL, counts, 2), CXL_SHM_E_INVALID);
    counts[1] = (cxl_shm_count_t){FIRST + 1, 0, -5};
    CHECK_STATUS(cxl_shm_count(NULL, counts, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_count(NULL, NULL, 2), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_count(NULL, NULL, 0));
    CHECK_STATUS(cxl_shm_host_count(NULL, 0, LAST + 1, &value), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_host_count(NULL, 99, FIRST, &value), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_host_count(NULL, 1 << 16, FIRST, &value), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_host_count(NULL, 0, FIRST, NULL), CXL_SHM_E_INVALID);
    CHECK(value == 77);
    /* Nothing of what was refused is counted; what was counted before a leave is counted once. */
    count(1);
    CHECK_OK(cxl_shm_leave(NULL));
    CHECK(is_published(1, 0));
    CHECK_OK(cxl_shm_join(NULL));
    count(2);
    CHECK_OK(cxl_shm_fini());
    CHECK_OK(cxl_shm_init(pool, &mapped));
    CHECK(is_published(3, 0));
}

int main(int argc, char** argv) {
    CHECK(argc >= 3);
    if (strcmp(argv[1], "refused") == 0) {
        refused(argv[2]);
        CHECK_OK(cxl_shm_fini());
        return 0;
    }
    CHECK(argc >= 4);
    uint64_t times = strtoull(argv[3], NULL, 10);
    cxl_shm_options_t slot = {.struct_size = sizeof slot, .flags = CXL_SHM_OPEN_SLOT, .slot = 0};
    if (strcmp(argv[1], "sees") == 0) {
        CHECK(argc == 5);
        check_open(argv[2], NULL);
        time_t since = time(NULL);
        while (!is_published(times, strtoull(argv[4], NULL, 10)))
            check_rest(since, "what the other host counted");
        CHECK_OK(cxl_shm_fini());
        return 0;
    }
    check_open(argv[2], &slot);
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    CHECK(info.slot == 0);
    count(times);
    while (strcmp(argv[1], "stays") == 0)
        pause();
    CHECK_OK(cxl_shm_fini());
    return 0;
}
