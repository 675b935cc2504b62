/* SPDX-License-Identifier: Apache-2.0
 *
 * The prefix cache:  cache publish|pull POOL [MISTAKE]
 *
 * The first host formats the pool and publishes a chain of blocks in each of the ways there are; the second one pulls, pins and uses them
 * in place, and every word is compared. Then it says that it is done, through a block of its own. MISTAKE no-fill leaves blocks as
 * the memory was, so that the harness can see that it would be noticed. */
#include "check.h"

#define BLOCKS 24
#define WORDS 5003 /* of 4 bytes: whole lines they are not */
#define BYTES (WORDS * sizeof(uint32_t))

static cxl_shm_block_id_t ids[BLOCKS + 2]; /* the last two are never published, and published by the second host */
static const char* mistake = "";

static uint32_t word_of(uint32_t block, uint32_t index) {
    return (block + 1) * 0x9e3779b9u ^ index * 0x85ebca6bu;
}

static void name_all(void) {
    uint8_t name_space[CXL_SHM_ID_BYTES];
    CHECK_OK(cxl_shm_cache_namespace("tiny/bf16", 9, name_space));
    for (uint32_t block = 0; block < BLOCKS + 2; block++) {
        memcpy(ids[block].name_space, name_space, sizeof name_space);
        CHECK_OK(cxl_shm_cache_key(block == 0 ? NULL : ids[block - 1].key, &block, sizeof block, ids[block].key));
        CHECK(block == 0 || memcmp(ids[block].key, ids[block - 1].key, CXL_SHM_ID_BYTES) != 0);
    }
}

static void words_of(uint32_t block, uint32_t* words) {
    for (uint32_t index = 0; index < WORDS; index++)
        words[index] = word_of(block, index);
}

static void check_words(uint32_t block, const uint32_t* words) {
    for (uint32_t index = 0; index < WORDS; index++)
        CHECK(words[index] == word_of(block, index));
}

/* Three pieces, one of them empty, cut at odd places. */
static void cut(uint32_t* words, cxl_shm_piece_t pieces[4]) {
    char* bytes = (char*)words;
    pieces[0] = (cxl_shm_piece_t){bytes, 777};
    pieces[1] = (cxl_shm_piece_t){NULL, 0};
    pieces[2] = (cxl_shm_piece_t){bytes + 777, 4001};
    pieces[3] = (cxl_shm_piece_t){bytes + 4778, BYTES - 4778};
}

static void publish_block(uint32_t block) {
    static uint32_t words[WORDS];
    cxl_shm_piece_t pieces[4];
    cxl_shm_block_t reserved = {.struct_size = sizeof reserved};
    const uint8_t* parent = block == 0 ? NULL : ids[block - 1].key;
    words_of(block, words);
    cut(words, pieces);
    switch (block % 3) {
    case 0:
        CHECK_OK(cxl_shm_cache_publish(NULL, &ids[block], parent, pieces, 4));
        return;
    case 1:
        CHECK_OK(cxl_shm_cache_reserve(NULL, &ids[block], parent, BYTES, &reserved));
        if (strcmp(mistake, "no-fill") != 0)
            CHECK_OK(cxl_shm_cache_fill(NULL, reserved.handle, pieces, 4));
        break;
    default:
        CHECK_OK(cxl_shm_cache_reserve(NULL, &ids[block], parent, BYTES, &reserved));
        CHECK(reserved.ptr != NULL && reserved.len_bytes == BYTES && cxl_shm_get_offset(reserved.ptr) == reserved.offset);
        memcpy(reserved.ptr, words, BYTES);
    }
    CHECK_OK(cxl_shm_cache_commit(NULL, reserved.handle));
    CHECK_STATUS(cxl_shm_cache_commit(NULL, reserved.handle), CXL_SHM_E_CLOSED);
}

static void publish_all(const char* spec) {
    cxl_shm_format_options_t format = {.struct_size = sizeof format,
                                       .slots = 4,
                                       .locks = 64,
                                       .objects = 16,
                                       .chunk_bytes = 64 << 10,
                                       .cell_bytes = 32 << 10,
                                       .cells_percent = 50};
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    CHECK_STATUS(cxl_shm_cache_lookup(NULL, &ids[0], NULL), CXL_SHM_E_CLOSED);
    cxl_shm_cache_options_t options = {.struct_size = sizeof options, .flags = CXL_SHM_CACHE_CHECKSUMS, .policy = CXL_SHM_CACHE_LEAF_LRU};
    CHECK_OK(cxl_shm_cache_open(NULL, &options));
    CHECK_STATUS(cxl_shm_cache_open(NULL, &options), CXL_SHM_E_EXISTS);
    for (uint32_t block = 0; block < BLOCKS; block++)
        publish_block(block);

    uint32_t again[4] = {0};
    cxl_shm_piece_t piece = {again, sizeof again};
    CHECK_STATUS(cxl_shm_cache_publish(NULL, &ids[3], NULL, &piece, 1), CXL_SHM_E_EXISTS);
    CHECK_STATUS(cxl_shm_cache_publish(NULL, &ids[BLOCKS], NULL, &piece, 0), CXL_SHM_E_INVALID);
    cxl_shm_block_t reserved = {.struct_size = sizeof reserved};
    CHECK_STATUS(cxl_shm_cache_reserve(NULL, &ids[BLOCKS], NULL, 1 << 20, &reserved), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_cache_reserve(NULL, &ids[BLOCKS], NULL, sizeof again, &reserved));
    CHECK_STATUS(cxl_shm_cache_lookup(NULL, &ids[BLOCKS], NULL), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_cache_unpin(NULL, reserved.handle), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_cache_abort(NULL, reserved.handle));
    CHECK_STATUS(cxl_shm_cache_abort(NULL, reserved.handle), CXL_SHM_E_CLOSED);

    printf("published\n");
    fflush(stdout);
    time_t since = time(NULL);
    while (cxl_shm_cache_lookup(NULL, &ids[BLOCKS + 1], NULL) != CXL_SHM_OK)
        check_rest(since, "the other host");
    /* What it pinned and gave back can be evicted, here and now, because the cells are this process's. */
    CHECK_OK(cxl_shm_cache_evict(NULL, &ids[2]));
    CHECK_STATUS(cxl_shm_cache_lookup(NULL, &ids[2], NULL), CXL_SHM_E_NOT_FOUND);
    size_t cached = 99, needed = 0;
    CHECK_OK(cxl_shm_cache_lookup_chain(NULL, ids[0].name_space, ids[0].key, 1, &cached));
    CHECK(cached == 1);
    static char text[1 << 17];
    CHECK_STATUS(cxl_shm_cache_metrics(NULL, text, 8, &needed), CXL_SHM_E_FULL);
    CHECK(needed > 8 && needed <= sizeof text);
    CHECK_OK(cxl_shm_cache_metrics(NULL, text, sizeof text, &needed));
    CHECK(strlen(text) + 1 == needed && strstr(text, "cxl_cache_publish_total 24\n") != NULL);
    CHECK_OK(cxl_shm_cache_close(NULL));
    CHECK_OK(cxl_shm_fini());
}

static void pull_all(const char* spec) {
    static uint32_t words[WORDS + 100];
    check_open(spec, NULL);
    CHECK_OK(cxl_shm_cache_open(NULL, NULL));
    static uint8_t keys[BLOCKS + 2][CXL_SHM_ID_BYTES];
    for (uint32_t block = 0; block < BLOCKS + 2; block++)
        memcpy(keys[block], ids[block].key, CXL_SHM_ID_BYTES);
    size_t cached = 0;
    time_t since = time(NULL);
    for (; cached != BLOCKS; check_rest(since, "the blocks"))
        CHECK_OK(cxl_shm_cache_lookup_chain(NULL, ids[0].name_space, keys[0], BLOCKS + 1, &cached));

    cxl_shm_piece_t pieces[4], large = {words, sizeof words}, small = {words, BYTES - 1};
    for (uint32_t block = 0; block < BLOCKS; block++) {
        uint64_t len_bytes = 0;
        memset(words, 0, sizeof words);
        cut(words, pieces);
        CHECK_OK(cxl_shm_cache_pull(NULL, &ids[block], pieces, 4, &len_bytes));
        CHECK(len_bytes == BYTES);
        check_words(block, words);
        memset(words, 0, sizeof words);
        CHECK_OK(cxl_shm_cache_pull(NULL, &ids[block], &large, 1, NULL));
        check_words(block, words);
        CHECK_STATUS(cxl_shm_cache_pull(NULL, &ids[block], &small, 1, NULL), CXL_SHM_E_INVALID);
    }
    cxl_shm_block_id_t foreign = ids[0];
    CHECK_OK(cxl_shm_cache_namespace("tiny/fp16", 9, foreign.name_space));
    CHECK_STATUS(cxl_shm_cache_pull(NULL, &foreign, &large, 1, NULL), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_cache_pull(NULL, &ids[BLOCKS], &large, 1, NULL), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_cache_pull(NULL, NULL, &large, 1, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_cache_pull(NULL, &ids[0], NULL, 1, NULL), CXL_SHM_E_INVALID);

    uint64_t handles[BLOCKS + 2];
    size_t pinned = 0;
    CHECK_OK(cxl_shm_cache_pin_chain(NULL, ids[0].name_space, keys[0], BLOCKS + 2, handles, &pinned));
    CHECK(pinned == BLOCKS);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        memset(words, 0, sizeof words);
        CHECK_OK(cxl_shm_cache_read(NULL, handles[block], &large, 1));
        check_words(block, words);
        CHECK_OK(cxl_shm_cache_unpin(NULL, handles[block]));
        CHECK_STATUS(cxl_shm_cache_unpin(NULL, handles[block]), CXL_SHM_E_CLOSED);
    }
    for (uint32_t block = 0; block < BLOCKS; block++) {
        cxl_shm_block_t seen = {.struct_size = sizeof seen};
        CHECK_OK(cxl_shm_cache_pin(NULL, &ids[block], &seen));
        CHECK(seen.len_bytes == BYTES && seen.ptr != NULL);
        CHECK_OK(cxl_shm_cache_invalidate(NULL, seen.handle));
        memcpy(words, seen.ptr, BYTES);
        CHECK_OK(cxl_shm_cache_check(NULL, seen.handle));
        check_words(block, words);
        CHECK_OK(cxl_shm_cache_unpin(NULL, seen.handle));
    }
    cxl_shm_piece_t done = {words, 100};
    CHECK_OK(cxl_shm_cache_publish(NULL, &ids[BLOCKS + 1], NULL, &done, 1));
    CHECK_OK(cxl_shm_fini());
}

int main(int argc, char** argv) {
    CHECK(argc == 3 || argc == 4);
    mistake = argc == 4 ? argv[3] : "";
    name_all();
    if (strcmp(argv[1], "publish") == 0)
        publish_all(argv[2]);
    else
        pull_all(argv[2]);
    return 0;
}
