/* SPDX-License-Identifier: Apache-2.0
 *
 * What the test programs share: checks that say where they failed and what the library said, and waits that end. */
#ifndef CHECK_H
#define CHECK_H

#include "cxl_shm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(condition)                                                                                                                   \
    do {                                                                                                                                   \
        if (!(condition)) {                                                                                                                \
            fprintf(stderr, "%s:%d: %s\n  last error: %d %s\n", __FILE__, __LINE__, #condition, cxl_shm_last_status(),                     \
                    cxl_shm_last_error());                                                                                                 \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

/* The status is the one wanted, and where it is an error, there is a text and the thread remembers both. */
#define CHECK_STATUS(call, wanted)                                                                                                         \
    do {                                                                                                                                   \
        cxl_shm_clear_error();                                                                                                             \
        int check_found = (call);                                                                                                          \
        if (check_found != (wanted) || cxl_shm_last_status() != (wanted) || (cxl_shm_last_error()[0] != 0) != ((wanted) != 0)) {           \
            fprintf(stderr, "%s:%d: %s: %d (%s), wanted %d (%s)\n  last error: %d %s\n", __FILE__, __LINE__, #call, check_found,           \
                    cxl_shm_strerror(check_found), (wanted), cxl_shm_strerror(wanted), cxl_shm_last_status(), cxl_shm_last_error());       \
            exit(1);                                                                                                                       \
        }                                                                                                                                  \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(call, CXL_SHM_OK)

/* Seconds after which a wait counts as failed. */
#define PATIENCE_S 120

/* Rests for a moment; fails once `since` is too long ago. */
static inline void check_rest(time_t since, const char* what) {
    struct timespec moment = {0, 200000};
    nanosleep(&moment, NULL);
    if (time(NULL) - since > PATIENCE_S) {
        fprintf(stderr, "waited in vain for %s\n  last error: %d %s\n", what, cxl_shm_last_status(), cxl_shm_last_error());
        exit(1);
    }
}

/* Opens the default pool, as soon as it is formatted. */
static inline void check_open(const char* spec, const cxl_shm_options_t* options) {
    time_t since = time(NULL);
    int status;
    while ((status = cxl_shm_init(spec, options)) == CXL_SHM_E_NOT_A_POOL || status == CXL_SHM_E_OS)
        check_rest(since, "the pool");
    CHECK(status == CXL_SHM_OK);
}

/* Waits until a name is bound. */
static inline void* check_await(const char* key) {
    void* found = NULL;
    time_t since = time(NULL);
    int status;
    while ((status = cxl_shm_get(key, &found)) == CXL_SHM_E_NOT_FOUND)
        check_rest(since, key);
    CHECK(status == CXL_SHM_OK);
    CHECK(found != NULL);
    return found;
}

#endif
