/* SPDX-License-Identifier: Apache-2.0
 *
 * What outlives a process:  kept leaves|crashes|finds POOL
 *
 * The first formats, allocates a kept and a scratch block and notes where they are; it leaves, or is killed. The next process of the
 * machine takes all there is of the pool: never the kept block, but the room of the scratch one. */
#include "check.h"

#include <unistd.h>

#define BLOCK (64 << 10)
#define WORDS (BLOCK / sizeof(uint32_t))

static uint32_t word_of(size_t index) {
    return (uint32_t)index * 2654435761u + 77;
}

static void leave_behind(const char* spec, int crashes) {
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 16, .objects = 16, .chunk_bytes = BLOCK};
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    uint32_t* kept = shmalloc(BLOCK);
    void* scratch = cxl_shm_alloc_scratch(BLOCK);
    CHECK(kept != NULL && scratch != NULL);
    for (size_t i = 0; i < WORDS; i++)
        kept[i] = word_of(i);
    CHECK_OK(cxl_shm_flush(kept, BLOCK));
    CHECK_OK(cxl_shm_put("kept", kept));
    CHECK_OK(cxl_shm_put("scratch", scratch));
    printf("ready\n");
    fflush(stdout);
    while (crashes)
        pause();
    CHECK_OK(cxl_shm_fini());
}

static void find(const char* spec) {
    void *place, *scratch, *block;
    int status, again = 0;
    CHECK_OK(cxl_shm_init(spec, NULL));
    CHECK_OK(cxl_shm_get("kept", &place));
    CHECK_OK(cxl_shm_get("scratch", &scratch));
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    uint64_t count = 0;
    while ((status = cxl_shm_alloc(NULL, BLOCK, 0, &block)) == CXL_SHM_OK) {
        CHECK(block != place);
        again += block == scratch;
        memset(block, 0xee, BLOCK);
        CHECK_OK(cxl_shm_flush(block, BLOCK));
        count++;
    }
    CHECK(status == CXL_SHM_E_FULL && again == 1);
    CHECK(count == info.data_bytes / BLOCK - 1);
    const uint32_t* kept = place;
    CHECK_OK(cxl_shm_invalidate(kept, BLOCK));
    for (size_t i = 0; i < WORDS; i++)
        CHECK(kept[i] == word_of(i));
    CHECK_OK(cxl_shm_free(place));
    CHECK_OK(cxl_shm_alloc(NULL, BLOCK, 0, &block));
    CHECK(block == place);
    CHECK_OK(cxl_shm_fini());
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    if (strcmp(argv[1], "finds") == 0)
        find(argv[2]);
    else
        leave_behind(argv[2], strcmp(argv[1], "crashes") == 0);
    return 0;
}
