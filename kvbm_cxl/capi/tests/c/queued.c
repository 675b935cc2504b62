/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of the cache in the order of a GPU's streams, over a fake driver:  queued all|no-wait FILE DRIVER
 *
 * FILE becomes a pool, DRIVER is the fake. "no-wait" takes blocks for published before their end is told. */
#include "driver.h"

#define BLOCKS 6
#define PARTS 3
#define PART_BYTES 1501
#define BLOCK_BYTES (PARTS * PART_BYTES)
#define ALL_BYTES (BLOCKS * BLOCK_BYTES)
#define PATIENCE_MS (PATIENCE_S * 1000u)

static void (*fake_kernel)(void*, uint64_t, const void*, size_t);
static void (*fake_finish)(void);
static int (*make_stream)(void**, unsigned), (*destroy_stream)(void*);

static void load(const char* path) {
    load_driver(path);
    *(void**)&fake_kernel = symbol("fake_kernel");
    *(void**)&fake_finish = symbol("fake_finish");
    *(void**)&make_stream = symbol("cuStreamCreate");
    *(void**)&destroy_stream = symbol("cuStreamDestroy_v2");
}

static uint64_t memory;
static void* stream;
static cxl_shm_gpu_part_t parts[BLOCKS][PARTS];
static cxl_shm_gpu_block_t blocks[BLOCKS];

static uint8_t byte_of(uint32_t salt, uint32_t at) {
    return (uint8_t)(((at + 1) * 0x9e3779b9u ^ salt * 0x85ebca6bu) >> 21);
}

static void bytes_of(uint32_t salt, uint8_t* all) {
    for (uint32_t at = 0; at < ALL_BYTES; at++)
        all[at] = byte_of(salt, at);
}

/* Part p of block b is stretch p * BLOCKS + b of the memory, as in a paged cache. */
static void name_all(void) {
    for (uint32_t block = 0; block < BLOCKS; block++) {
        CHECK_OK(cxl_shm_cache_namespace("tiny/bf16", 9, blocks[block].name_space));
        blocks[block].parent = block == 0 ? NULL : blocks[block - 1].key;
        CHECK_OK(cxl_shm_cache_key(blocks[block].parent, &block, sizeof block, blocks[block].key));
        blocks[block].parts = parts[block];
        blocks[block].count = PARTS;
        for (uint32_t part = 0; part < PARTS; part++)
            parts[block][part] = (cxl_shm_gpu_part_t){memory + (part * BLOCKS + block) * PART_BYTES, PART_BYTES};
    }
}

static cxl_shm_block_id_t id_of(uint32_t block) {
    cxl_shm_block_id_t id;
    memcpy(id.name_space, blocks[block].name_space, CXL_SHM_ID_BYTES);
    memcpy(id.key, blocks[block].key, CXL_SHM_ID_BYTES);
    return id;
}

/* Whether the pool has a block with the bytes of `salt`. */
static int is_there(uint32_t block, uint32_t salt) {
    static uint8_t found[BLOCK_BYTES];
    cxl_shm_block_id_t id = id_of(block);
    cxl_shm_piece_t piece = {found, sizeof found};
    int status = cxl_shm_cache_pull(NULL, &id, &piece, 1, NULL);
    CHECK(status == CXL_SHM_OK || status == CXL_SHM_E_NOT_FOUND);
    for (uint32_t at = 0; status == CXL_SHM_OK && at < BLOCK_BYTES; at++)
        CHECK(found[at] == byte_of(salt, (at / PART_BYTES * BLOCKS + block) * PART_BYTES + at % PART_BYTES));
    return status == CXL_SHM_OK;
}

static uint64_t number(void* handle) {
    return (uint64_t)(uintptr_t)handle;
}

static cxl_gpu_queued_t publish(uint32_t first, size_t count) {
    cxl_gpu_queued_t queued = CXL_SHM_GPU_QUEUED_NONE;
    CHECK_OK(cxl_shm_gpu_queue_publish(NULL, 0, number(stream), blocks + first, count, 0, &queued));
    CHECK(queued != CXL_SHM_GPU_QUEUED_NONE);
    return queued;
}

/* Waits for the end of `count` blocks, all of which end with `outcome`, and lets go. */
static void end(cxl_gpu_queued_t queued, size_t count, int outcome) {
    int32_t outcomes[BLOCKS];
    CHECK_OK(cxl_shm_gpu_queued_wait(queued, PATIENCE_MS, outcomes, count));
    for (size_t at = 0; at < count; at++)
        CHECK(outcomes[at] == outcome);
    CHECK_OK(cxl_shm_gpu_queued_release(queued));
    CHECK_STATUS(cxl_shm_gpu_queued_release(queued), CXL_SHM_E_CLOSED);
}

static void in_order(void) {
    static uint8_t bytes[ALL_BYTES], found[ALL_BYTES];
    int32_t outcomes[BLOCKS];
    /* The stream has not begun with what computes the blocks, nor with what writes their memory anew. */
    bytes_of(1, bytes);
    fake_kernel(stream, memory, bytes, sizeof bytes);
    fake_set("is_stuck", 1);
    cxl_gpu_queued_t queued = publish(0, 4);
    CHECK_OK(cxl_shm_gpu_queued_hold(queued, number(stream)));
    bytes_of(2, bytes);
    fake_kernel(stream, memory, bytes, sizeof bytes);
    CHECK_STATUS(cxl_shm_gpu_queued_wait(queued, 10, outcomes, 4), CXL_SHM_E_TIMEOUT);
    CHECK_STATUS(cxl_shm_gpu_queued_release(queued), CXL_SHM_E_BUSY);
    CHECK(!is_there(0, 1));
    fake_set("is_stuck", 0);
    fake_finish();
    CHECK_OK(cxl_shm_gpu_queued_wait(queued, PATIENCE_MS, outcomes, 4));
    CHECK_STATUS(cxl_shm_gpu_queued_wait(queued, 0, outcomes, 3), CXL_SHM_E_INVALID);
    end(queued, 4, CXL_SHM_OK);
    for (uint32_t block = 0; block < 4; block++)
        CHECK(is_there(block, 1));
    end(publish(0, 4), 4, CXL_SHM_E_EXISTS);

    /* What the stream is given at once comes behind the blocks. */
    CHECK_OK(cxl_shm_gpu_queue_pull(NULL, 0, number(stream), blocks, BLOCKS, 0, &queued));
    fake_kernel(stream, memory, "behind", 6);
    fake_finish();
    CHECK_OK(cxl_shm_gpu_queued_wait(queued, PATIENCE_MS, outcomes, BLOCKS));
    for (uint32_t block = 0; block < BLOCKS; block++)
        CHECK(outcomes[block] == (block < 4 ? CXL_SHM_OK : CXL_SHM_E_NOT_FOUND));
    CHECK_OK(cxl_shm_gpu_queued_release(queued));
    CHECK(read_memory(found, memory, sizeof found) == 0);
    for (uint32_t at = 0; at < ALL_BYTES; at++) {
        uint8_t wanted = byte_of(at / PART_BYTES % BLOCKS < 4 ? 1 : 2, at);
        CHECK(found[at] == (at < 6 ? (uint8_t)"behind"[at] : wanted));
    }
}

static void refusals(void) {
    cxl_gpu_queued_t queued = CXL_SHM_GPU_QUEUED_NONE;
    int32_t outcomes[BLOCKS];
    cxl_shm_gpu_block_t wrong = blocks[4];
    CHECK_STATUS(cxl_shm_gpu_queue_publish(NULL, 0, 0, NULL, 1, 0, &queued), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_queue_publish(NULL, 0, 0, blocks, 1, 0, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_queue_publish(NULL, 7, 0, blocks + 4, 1, 0, &queued), CXL_SHM_E_NOT_FOUND);
    wrong.parts = NULL;
    CHECK_STATUS(cxl_shm_gpu_queue_publish(NULL, 0, 0, &wrong, 1, 0, &queued), CXL_SHM_E_INVALID);
    cxl_shm_gpu_block_t two[2] = {blocks[0], blocks[1]};
    two[1].name_space[0] ^= 1;
    CHECK_STATUS(cxl_shm_gpu_queue_pull(NULL, 0, 0, two, 2, 0, &queued), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_queued_wait(12345, 0, outcomes, 1), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_gpu_queued_hold(12345, 0), CXL_SHM_E_CLOSED);
    CHECK(queued == CXL_SHM_GPU_QUEUED_NONE);
    fake_set("copy_error", 719);
    end(publish(4, 1), 1, CXL_SHM_E_GPU);
    fake_set("copy_error", 0);
    CHECK(!is_there(4, 1));
    fake_finish();
}

/* What is under way while the cache is closed is not committed. */
static void closed(void) {
    fake_set("is_stuck", 1);
    cxl_gpu_queued_t queued = publish(4, 2);
    fake_set("is_stuck", 0);
    /* The thread of the library may have been faster. */
    CHECK_OK(cxl_shm_cache_close(NULL));
    int32_t outcomes[2];
    CHECK_OK(cxl_shm_gpu_queued_wait(queued, PATIENCE_MS, outcomes, 2));
    CHECK(outcomes[0] == outcomes[1] && (outcomes[0] == CXL_SHM_OK || outcomes[0] == CXL_SHM_E_CLOSED));
    CHECK_OK(cxl_shm_gpu_queued_release(queued));
    CHECK_STATUS(cxl_shm_gpu_queue_publish(NULL, 0, 0, blocks, 1, 0, &queued), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_cache_open(NULL, NULL));
    cxl_shm_block_id_t id = id_of(4);
    CHECK(cxl_shm_cache_lookup(NULL, &id, NULL) == (outcomes[0] == CXL_SHM_OK ? CXL_SHM_OK : CXL_SHM_E_NOT_FOUND));
    fake_finish();
}

int main(int argc, char** argv) {
    CHECK(argc == 4);
    char spec[4200];
    snprintf(spec, sizeof spec, "%s,size=48M", argv[2]);
    CHECK(setenv("CXL_CUDA_LIBRARY", argv[3], 1) == 0);
    load(argv[3]);
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 64, .objects = 16, .cell_bytes = 64 << 10};
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    CHECK_OK(cxl_shm_cache_open(NULL, NULL));
    void *context = NULL, *popped = NULL;
    CHECK(retain(&context, 0) == 0 && push(context) == 0 && allocate(&memory, ALL_BYTES) == 0 && make_stream(&stream, 1) == 0);
    name_all();

    if (strcmp(argv[1], "no-wait") == 0) {
        static uint8_t bytes[ALL_BYTES];
        bytes_of(1, bytes);
        CHECK(write_memory(memory, bytes, sizeof bytes) == 0);
        fake_set("is_stuck", 1);
        publish(0, 1);
        CHECK(is_there(0, 1));
        return 0;
    }
    in_order();
    refusals();
    closed();
    CHECK_OK(cxl_shm_fini());
    CHECK(destroy_stream(stream) == 0 && release_memory(memory) == 0 && pop(&popped) == 0 && release(0) == 0);
    CHECK(fake_get("registered") + fake_get("pinned") + fake_get("streams") + fake_get("events") + fake_get("contexts") == 0);
    CHECK(strcmp(fake_misuse(), "") == 0);
    return 0;
}
