/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of copies, and large copies:  copies first|second POOL
 *
 * The first host copies pieces of all sizes, many of them not whole lines, to places in shuffled order, says so, and the second fetches
 * them with lists, verifies every byte, and copies them within the pool, where the first finds them again. Then the first changes all
 * that it wrote, and the second, which has it in its caches, fetches stretches of several lengths at once. */
#include "check.h"

#define PIECES 3000
#define AREA (4 << 20)
#define MAGIC 0x4c495354u

struct root {
    uint32_t magic;
    shm_ptr_t area;  /* of the first host */
    shm_ptr_t again; /* of the second host */
};

static size_t place_of[PIECES], len_of[PIECES], total;
static cxl_shm_copy_t pieces[PIECES];

/* A byte that is right at one place only. */
static uint8_t byte_at(size_t place) {
    return (uint8_t)((place * 0x9e3779b97f4a7c15ull) >> 53);
}

/* Sizes from 1 to some thousand bytes; some pieces adjoin, between others there is a gap. */
static void lay_out(void) {
    uint64_t random = 7;
    for (int i = 0; i < PIECES; i++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        len_of[i] = 1 + (size_t)(random >> 33) % (i % 7 ? 300 : 5000);
        place_of[i] = total;
        total += len_of[i] + (i % 3 ? 0 : (size_t)(random >> 50) % 200);
    }
    CHECK(total < AREA);
}

/* Pieces in an order that is not that of the memory. */
static int order(int i) {
    return (int)((i * 1103L) % PIECES);
}

static void list(char* area, char* memory) {
    for (int i = 0; i < PIECES; i++) {
        int piece = order(i);
        pieces[i] = (cxl_shm_copy_t){area + place_of[piece], memory + place_of[piece], len_of[piece]};
    }
}

static void verify(const uint8_t* bytes, const char* what) {
    for (int i = 0; i < PIECES; i++) {
        for (size_t at = place_of[i]; at < place_of[i] + len_of[i]; at++) {
            if (bytes[at] != byte_at(at)) {
                fprintf(stderr, "%s: piece %d, byte %zu is %d, not %d\n", what, i, at, bytes[at], byte_at(at));
                exit(1);
            }
        }
    }
}

static void refusals(char* area, char* memory) {
    cxl_shm_copy_t wrong[2] = {{area, memory, 100}, {area + 50, memory + 200, 100}};
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_IN, wrong, 2), CXL_SHM_E_INVALID);
    wrong[1] = (cxl_shm_copy_t){area + 200, memory + 50, 100};
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_OUT, wrong, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_copy_list(3, wrong, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_IN, NULL, 2), CXL_SHM_E_INVALID);
    wrong[1].memory = NULL;
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_IN, wrong, 2), CXL_SHM_E_INVALID);
    wrong[1] = (cxl_shm_copy_t){memory, memory + 500, 100};
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_IN, wrong, 2), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_WITHIN, wrong, 2), CXL_SHM_E_NOT_IN_POOL);
    wrong[1] = (cxl_shm_copy_t){area, memory, SIZE_MAX};
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_OUT, wrong, 2), CXL_SHM_E_NOT_IN_POOL);
    /* The same destination twice, far from one another in the list. */
    const size_t large = 256 << 10;
    char bytes[16];
    memset(bytes, 1, sizeof bytes);
    CHECK_OK(cxl_shm_copy_in(area, bytes, sizeof bytes));
    memset(bytes, 2, sizeof bytes);
    CHECK_OK(cxl_shm_copy_in(area + large, bytes, sizeof bytes));
    cxl_shm_copy_t twice[3] = {{area, area + large, large}, {area + 3 * large, area + 2 * large, large}, {area, area + 2 * large, large}};
    CHECK_STATUS(cxl_shm_copy_list(CXL_SHM_COPY_WITHIN, twice, 3), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_copy_out(bytes, area, sizeof bytes));
    CHECK(bytes[0] == 1 && bytes[15] == 1);
    wrong[0].len_bytes = wrong[1].len_bytes = 0;
    wrong[1].memory = NULL;
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_IN, wrong, 2));
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_IN, NULL, 0));
}

static void first(void) {
    uint8_t* memory = malloc(AREA);
    char *area = shmalloc(AREA), *root_at = shmalloc(sizeof(struct root));
    CHECK(memory && area && root_at);
    for (size_t i = 0; i < AREA; i++)
        memory[i] = byte_at(i);
    refusals(area, (char*)memory);
    list(area, (char*)memory);
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_IN, pieces, PIECES));
    struct root root = {MAGIC, cxl_shm_get_offset(area), 0};
    CHECK_OK(cxl_shm_copy_in(root_at, &root, sizeof root));
    CHECK_OK(cxl_shm_put("copies", root_at));

    void* again = check_await("again");
    memset(memory, 0, AREA);
    list(again, (char*)memory);
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_OUT, pieces, PIECES));
    verify(memory, "copied within the pool");
    /* A byte less than the pool holds was not copied by accident: what no piece names is still zero. */
    for (int i = 0; i + 1 < PIECES; i++) {
        for (size_t at = place_of[i] + len_of[i]; at < place_of[i + 1]; at++)
            CHECK(memory[at] == 0);
    }
    for (size_t i = 0; i < AREA; i++)
        memory[i] = byte_at(i + 1);
    CHECK_OK(cxl_shm_copy_in(area, memory, AREA));
    CHECK_OK(cxl_shm_put("changed", area));
    free(memory);
}

static void second(void) {
    struct root root;
    void* root_at = check_await("copies");
    CHECK_OK(cxl_shm_copy_out(&root, root_at, sizeof root));
    CHECK(root.magic == MAGIC);
    uint8_t* memory = calloc(1, AREA);
    char *area = cxl_shm_get_ptr(root.area), *again = shmalloc(AREA);
    CHECK(memory && area && again);
    list(area, (char*)memory);
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_OUT, pieces, PIECES));
    verify(memory, "copied out");
    for (int i = 0; i < PIECES; i++)
        pieces[i] = (cxl_shm_copy_t){again + place_of[order(i)], area + place_of[order(i)], len_of[order(i)]};
    CHECK_OK(cxl_shm_copy_list(CXL_SHM_COPY_WITHIN, pieces, PIECES));
    CHECK_OK(cxl_shm_put("again", again));

    CHECK(check_await("changed") == area);
    const size_t lengths[] = {1, 1000, (32 << 10) - 1, 32 << 10, (64 << 10) + 777, 2 << 20};
    for (size_t i = 0, at = 77; i < sizeof lengths / sizeof *lengths; at += lengths[i] + 1, i++) {
        memory[lengths[i]] = 42;
        CHECK_OK(cxl_shm_copy_out(memory, area + at, lengths[i]));
        for (size_t k = 0; k < lengths[i]; k++) {
            if (memory[k] != byte_at(at + k + 1)) {
                fprintf(stderr, "%zu bytes at %zu: byte %zu is %d, not %d\n", lengths[i], at, k, memory[k], byte_at(at + k + 1));
                exit(1);
            }
        }
        CHECK(memory[lengths[i]] == 42);
    }
    free(memory);
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    int is_first = strcmp(argv[1], "first") == 0;
    lay_out();
    if (is_first) {
        cxl_shm_format_options_t how = {.struct_size = sizeof how};
        CHECK_OK(cxl_shm_format(argv[2], &how));
    }
    check_open(argv[2], NULL);
    if (is_first)
        first();
    else
        second();
    CHECK_OK(cxl_shm_fini());
    return 0;
}
