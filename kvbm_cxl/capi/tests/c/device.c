/* SPDX-License-Identifier: Apache-2.0
 *
 * Devices by themselves:  device write|read FOLDER
 *
 * In FOLDER, the first host makes a pool striped over two files, a second pool, and a file that is no pool. It writes to the file and, by
 * place on the device, to a block that it allocated; the second host reads both. A third pool is a part of its file, a
 * fourth has its metadata in another file. Then the file is cut under a host that has it open. */
#define _GNU_SOURCE /* memmem */
#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define BYTES 300001 /* whole lines they are not */
#define FILE_BYTES (1 << 20)
#define AT 12345 /* of the file, where the bytes begin: no start of a line */
#define STRIPE (64 << 10)

static char plain[4096], first[4096], second[4096], spec[9000], other[4200];

static void name_files(const char* folder) {
    snprintf(plain, sizeof plain, "%s/plain", folder);
    snprintf(first, sizeof first, "%s/first", folder);
    snprintf(second, sizeof second, "%s/second", folder);
    snprintf(spec, sizeof spec, "%s,%s,size=24M", first, second);
    snprintf(other, sizeof other, "%s/other,size=16M", folder);
}

static void fill(uint8_t* bytes, uint32_t salt) {
    for (uint32_t index = 0; index < BYTES; index++)
        bytes[index] = (uint8_t)(((index + salt) * 0x9e3779b9u) >> 24);
}

static uint8_t bytes[BYTES], seen[BYTES];

/* Which of the two devices has the block's bytes, and where: they are looked for, as only the format of the pool could tell. */
static uint64_t look_for(const char* path, const uint8_t* wanted, size_t size) {
    static uint8_t content[24 << 20];
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && read(fd, content, sizeof content) == (ssize_t)sizeof content);
    close(fd);
    uint8_t* found = memmem(content, sizeof content, wanted, size);
    return found == NULL ? UINT64_MAX : (uint64_t)(found - content);
}

static void refusals(void) {
    cxl_device_t device = CXL_SHM_DEVICE_NONE;
    CHECK_STATUS(cxl_shm_device_open(NULL, NULL, 0, &device, NULL, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_open(NULL, plain, 2, &device, NULL, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_open(NULL, plain, 0, NULL, NULL, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_open(NULL, "/dev/null", 0, &device, NULL, NULL), CXL_SHM_E_NOT_A_POOL);
    *strchr(other, ',') = 0;
    CHECK_STATUS(cxl_shm_device_open(NULL, other, 0, &device, NULL, NULL), CXL_SHM_E_EXISTS);
    CHECK(device == CXL_SHM_DEVICE_NONE);
    CHECK_STATUS(cxl_shm_device_read(77, 0, seen, 1), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_device_close(77), CXL_SHM_E_CLOSED);

    CHECK_OK(cxl_shm_device_open(NULL, plain, CXL_SHM_DEVICE_READ_ONLY, &device, NULL, NULL));
    CHECK_STATUS(cxl_shm_device_write(device, 0, bytes, 1), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_read(device, FILE_BYTES - 1, seen, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_read(device, UINT64_MAX, seen, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_read(device, 0, NULL, 2), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_device_read(device, 0, seen, SIZE_MAX), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_STATUS(cxl_shm_device_read(device, 0, seen, 1), CXL_SHM_E_CLOSED);
}

/* The pool's own lines are not to be had, on neither device, and the pool is as it was. */
static void metadata(const char* path) {
    cxl_device_t device;
    uint64_t len_bytes = 0;
    uint32_t found = 0;
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    CHECK_OK(cxl_shm_device_open(NULL, path, 0, &device, &len_bytes, &found));
    CHECK(found == CXL_SHM_DEVICE_IN_POOL && len_bytes == 24 << 20);
    CHECK_STATUS(cxl_shm_device_write(device, 0, bytes, 64), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_device_read(device, 0, seen, 64), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_device_write(device, info.data_offset / 2 - STRIPE, bytes, BYTES), CXL_SHM_E_NOT_IN_POOL);
    CHECK_STATUS(cxl_shm_device_write(device, len_bytes, bytes, 1), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_OK(cxl_shm_check(NULL));
}

/* A pool that lies behind an offset of a file: places on the file count from its start. */
static void part_of_a_file(const char* folder) {
    static char shelf[4096], part[4200];
    snprintf(shelf, sizeof shelf, "%s/shelf", folder);
    snprintf(part, sizeof part, "%s,offset=8M,size=8M", shelf);
    int fd = open(shelf, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 24 << 20) == 0);
    close(fd);
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 64, .objects = 16, .chunk_bytes = 64 << 10};
    CHECK_OK(cxl_shm_format(part, &format));
    cxl_device_t device = CXL_SHM_DEVICE_NONE;
    CHECK_STATUS(cxl_shm_device_open(NULL, shelf, 0, &device, NULL, NULL), CXL_SHM_E_EXISTS);
    *strrchr(part, ',') = 0;
    CHECK_STATUS(cxl_shm_format(shelf, &format), CXL_SHM_E_EXISTS);
    static char beside[4200];
    snprintf(beside, sizeof beside, "%s,offset=9M,size=8M", shelf);
    CHECK_STATUS(cxl_shm_format(beside, &format), CXL_SHM_E_INVALID);

    cxl_pool_t* pool = NULL;
    CHECK_OK(cxl_shm_open(part, NULL, &pool));
    uint64_t len_bytes = 0;
    uint32_t found = 0;
    CHECK_OK(cxl_shm_device_open(pool, shelf, 0, &device, &len_bytes, &found));
    CHECK(found == CXL_SHM_DEVICE_IN_POOL && len_bytes == 24 << 20);
    void* block = NULL;
    static uint8_t mark[256];
    CHECK_OK(cxl_shm_alloc(pool, 4096, 0, &block));
    for (size_t index = 0; index < sizeof mark; index++)
        mark[index] = (uint8_t)(index * 11 + 5);
    CHECK_OK(cxl_shm_copy_in(block, mark, sizeof mark));
    uint64_t at = look_for(shelf, mark, sizeof mark);
    CHECK(at != UINT64_MAX && at > 8 << 20 && at < 16 << 20);
    CHECK_OK(cxl_shm_device_read(device, at, seen, sizeof mark));
    CHECK(memcmp(seen, mark, sizeof mark) == 0);
    CHECK_OK(cxl_shm_device_write(device, at, seen + 1, 255));
    CHECK_OK(cxl_shm_copy_out(seen, block, 255));
    CHECK(memcmp(seen, mark + 1, 255) == 0);
    uint64_t outside[] = {0, at - (8 << 20), 8 << 20, 16 << 20, (24 << 20) - 64};
    for (size_t index = 0; index < sizeof outside / sizeof *outside; index++)
        CHECK_STATUS(cxl_shm_device_write(device, outside[index], bytes, 64), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_OK(cxl_shm_free(block));
    CHECK_OK(cxl_shm_close(pool));
}

/* A pool with its metadata on another device: of that one nothing is to be had, of the other one the blocks. */
static void metadata_elsewhere(const char* folder) {
    static char payload[4096], apart[4096], name[9000];
    snprintf(payload, sizeof payload, "%s/payload", folder);
    snprintf(apart, sizeof apart, "%s/apart", folder);
    snprintf(name, sizeof name, "%s,size=24M,metadata=%s,metadata_size=24M", payload, apart);
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 64, .objects = 16, .chunk_bytes = 64 << 10};
    CHECK_OK(cxl_shm_format(name, &format));
    cxl_pool_t* pool = NULL;
    CHECK_STATUS(cxl_shm_open(payload, NULL, &pool), CXL_SHM_E_NOT_A_POOL);
    CHECK(strstr(cxl_shm_last_error(), "metadata=PATH") != NULL);
    cxl_device_t device = CXL_SHM_DEVICE_NONE;
    CHECK_STATUS(cxl_shm_device_open(NULL, payload, 0, &device, NULL, NULL), CXL_SHM_E_EXISTS);
    CHECK_STATUS(cxl_shm_device_open(NULL, apart, 0, &device, NULL, NULL), CXL_SHM_E_EXISTS);

    CHECK_OK(cxl_shm_open(name, NULL, &pool));
    void* block = NULL;
    static uint8_t mark[256];
    for (size_t index = 0; index < sizeof mark; index++)
        mark[index] = (uint8_t)(index * 13 + 1);
    CHECK_OK(cxl_shm_alloc(pool, 4096, 0, &block));
    CHECK_OK(cxl_shm_copy_in(block, mark, sizeof mark));
    CHECK(look_for(apart, mark, sizeof mark) == UINT64_MAX);
    uint64_t at = look_for(payload, mark, sizeof mark), len_bytes = 0;
    CHECK(at != UINT64_MAX);
    CHECK_OK(cxl_shm_device_open(pool, payload, 0, &device, &len_bytes, NULL));
    CHECK_OK(cxl_shm_device_read(device, at, seen, sizeof mark));
    CHECK(len_bytes == 24 << 20 && memcmp(seen, mark, sizeof mark) == 0);
    CHECK_OK(cxl_shm_device_write(device, at, seen + 1, 255));
    CHECK_OK(cxl_shm_copy_out(seen, block, 255));
    CHECK(memcmp(seen, mark + 1, 255) == 0);
    CHECK_STATUS(cxl_shm_device_write(device, 4096, bytes, 64), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_OK(cxl_shm_device_open(pool, apart, 0, &device, &len_bytes, NULL));
    for (uint64_t place = 0; place < len_bytes; place += len_bytes / 12)
        CHECK_STATUS(cxl_shm_device_write(device, place, bytes, 64), CXL_SHM_E_NOT_IN_POOL);
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_OK(cxl_shm_check(pool));
    CHECK_OK(cxl_shm_free(block));
    CHECK_OK(cxl_shm_close(pool));
}

static void write_all(const char* folder) {
    cxl_shm_format_options_t format = {
        .struct_size = sizeof format, .slots = 4, .locks = 64, .objects = 16, .chunk_bytes = 64 << 10, .stripe_bytes = STRIPE};
    CHECK_OK(cxl_shm_format(other, &format));
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    int fd = open(plain, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && ftruncate(fd, FILE_BYTES) == 0);
    close(fd);
    refusals();
    metadata(first);
    metadata(second);
    part_of_a_file(folder);
    metadata_elsewhere(folder);

    cxl_device_t device;
    uint64_t len_bytes = 0;
    uint32_t found = 9;
    CHECK_OK(cxl_shm_device_open(NULL, plain, 0, &device, &len_bytes, &found));
    CHECK(len_bytes == FILE_BYTES && found == 0);
    fill(bytes, 1);
    CHECK_OK(cxl_shm_device_write(device, AT, bytes, BYTES));
    cxl_device_t written = device;

    /* A block whose place on its device is known by a mark, written as any block is; the rest of the stripe is then written by place. */
    void* block = NULL;
    static uint8_t mark[256];
    CHECK_OK(cxl_shm_alloc(NULL, 4096, 0, &block));
    for (size_t index = 0; index < sizeof mark; index++)
        mark[index] = (uint8_t)(index * 7 + 3);
    CHECK_OK(cxl_shm_copy_in(block, mark, sizeof mark));
    uint64_t at = look_for(first, mark, sizeof mark);
    const char* path = at != UINT64_MAX ? first : second;
    at = at != UINT64_MAX ? at : look_for(second, mark, sizeof mark);
    CHECK(at != UINT64_MAX);
    CHECK_OK(cxl_shm_device_open(NULL, path, 0, &device, NULL, &found));
    CHECK_OK(cxl_shm_device_read(device, at, seen, sizeof mark));
    CHECK(found == CXL_SHM_DEVICE_IN_POOL && memcmp(seen, mark, sizeof mark) == 0);
    CHECK_OK(cxl_shm_device_write(device, at + sizeof mark, bytes, 1000));
    CHECK_OK(cxl_shm_device_close(device));
    CHECK_OK(cxl_shm_put("block", block));
    printf("written\n");
    fflush(stdout);
    check_await("seen");
    fill(bytes, 2);
    CHECK_OK(cxl_shm_device_write(written, AT, bytes, BYTES));
    CHECK_OK(cxl_shm_device_close(written));
    CHECK_OK(cxl_shm_put("anew", block));
    check_await("done");
    CHECK_OK(cxl_shm_fini());
}

static void read_all(void) {
    check_open(spec, NULL);
    cxl_device_t device;
    CHECK_OK(cxl_shm_device_open(NULL, plain, 0, &device, NULL, NULL));
    fill(bytes, 1);
    CHECK_OK(cxl_shm_device_read(device, AT, seen, BYTES));
    CHECK(memcmp(seen, bytes, BYTES) == 0);
    void* block = check_await("block");
    CHECK_OK(cxl_shm_copy_out(seen, (char*)block + 256, 1000));
    CHECK(memcmp(seen, bytes, 1000) == 0);
    /* What this host has cached by now is not what it gets. */
    CHECK_OK(cxl_shm_put("seen", block));
    check_await("anew");
    fill(bytes, 2);
    CHECK_OK(cxl_shm_device_read(device, AT, seen, BYTES));
    CHECK(memcmp(seen, bytes, BYTES) == 0);

    /* Formatted as a pool behind the back of who has it open. */
    static const uint8_t magic[8] = {'k', 'v', 'b', 'm', 'c', 'x', 'l'};
    uint64_t number;
    memcpy(&number, magic, sizeof number);
    CHECK(number == CXL_SHM_MAGIC);
    CHECK_OK(cxl_shm_device_write(device, 0, magic, sizeof magic));
    CHECK_STATUS(cxl_shm_device_write(device, AT, bytes, 1), CXL_SHM_E_EXISTS);
    CHECK_OK(cxl_shm_device_read(device, AT, seen, 1));

    CHECK(truncate(plain, 4096) == 0);
    CHECK_STATUS(cxl_shm_device_read(device, 8192, seen, BYTES), CXL_SHM_E_DEVICE_LOST);
    CHECK_OK(cxl_shm_device_close(device));
    printf("read\n");
    fflush(stdout);
    CHECK_OK(cxl_shm_put("done", block));
    CHECK_OK(cxl_shm_fini());
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    name_files(argv[2]);
    if (strcmp(argv[1], "write") == 0)
        write_all(argv[2]);
    else
        read_all();
    return 0;
}
