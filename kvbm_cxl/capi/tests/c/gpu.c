/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of GPU memory over a fake driver:  gpu all|no-fork|no-wait FILE DRIVER BROKEN
 *
 * FILE becomes a pool; what lies in the file is what other hosts see. DRIVER is the fake, BROKEN one that lacks a function. "no-wait" takes
 * copies for made before their end is told. */
#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES 1000003
#define PIECES 200
#define PATIENCE_MS (PATIENCE_S * 1000u)
#define LAUNCH_FAILED 719

/* ---- The fake driver ---- */

static void (*fake_fail)(const char*, int, int, int);
static void (*fake_forgive)(void);
static void (*fake_hold)(void*, int);
static void* (*fake_newest_stream)(void);

static void load(const char* path) {
    load_driver(path);
    *(void**)&fake_fail = symbol("fake_fail");
    *(void**)&fake_forgive = symbol("fake_forgive");
    *(void**)&fake_hold = symbol("fake_hold");
    *(void**)&fake_newest_stream = symbol("fake_newest_stream");
}

/* ---- The scene: a block of the pool, ordinary memory, and memory of GPU 0 ---- */

static const char *file, *driver;
static uint8_t bytes[BYTES], seen[BYTES], heap[BYTES];
static uint8_t* block;
static uint64_t memory;
static cxl_gpu_t gpu;

static void fill(uint32_t salt) {
    for (uint32_t index = 0; index < BYTES; index++)
        bytes[index] = (uint8_t)(((index + 1) * 0x9e3779b9u ^ salt * 0x85ebca6bu) >> 21);
}

static void to_gpu(uint32_t salt) {
    fill(salt);
    CHECK(write_memory(memory, bytes, BYTES) == 0);
}

/* What other hosts write to the block, and what they see there. */
static void written_elsewhere(uint32_t salt) {
    fill(salt);
    int fd = open(file, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes, BYTES, (off_t)cxl_shm_get_offset(block)) == BYTES);
    close(fd);
}

static const uint8_t* elsewhere(void) {
    int fd = open(file, O_RDONLY);
    CHECK(fd >= 0 && pread(fd, seen, BYTES, (off_t)cxl_shm_get_offset(block)) == BYTES);
    close(fd);
    return seen;
}

/* Pieces of an odd size that change places, with gaps: piece k of the GPU is piece PIECES-1-k of the host. */
static cxl_shm_gpu_piece_t pieces[PIECES];

static void list(uint8_t* host) {
    size_t each = BYTES / PIECES;
    for (size_t k = 0; k < PIECES; k++)
        pieces[k] = (cxl_shm_gpu_piece_t){memory + k * each, host + (PIECES - 1 - k) * each, each - 37 - k % 5};
}

/* Whether `bytes` have gone from one side of the list to the other, which begins at `host` and has `content`. */
static int agree(const uint8_t* host, const uint8_t* content) {
    static uint8_t of_gpu[BYTES];
    CHECK(read_memory(of_gpu, memory, BYTES) == 0);
    for (size_t k = 0; k < PIECES; k++) {
        if (memcmp(of_gpu + (pieces[k].device - memory), content + ((uint8_t*)pieces[k].host - host), pieces[k].len_bytes) != 0)
            return 0;
    }
    return 1;
}

static int holds(const uint8_t* host) {
    return agree(host, host == heap ? heap : elsewhere());
}

static cxl_gpu_copy_t begin(uint32_t direction, uint32_t flags, uint8_t* host) {
    cxl_gpu_copy_t copy = CXL_SHM_GPU_COPY_NONE;
    list(host);
    CHECK_OK(cxl_shm_gpu_start(gpu, direction, flags, pieces, PIECES, &copy));
    CHECK(copy != CXL_SHM_GPU_COPY_NONE);
    return copy;
}

/* Waits for the end and lets go. */
static void end(cxl_gpu_copy_t copy, int status) {
    CHECK_STATUS(cxl_shm_gpu_wait(copy, PATIENCE_MS), status);
    CHECK_STATUS(cxl_shm_gpu_wait(copy, 0), status);
    CHECK_OK(cxl_shm_gpu_release(copy));
    CHECK_STATUS(cxl_shm_gpu_wait(copy, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_CLOSED);
}

static void open_gpu(void) {
    cxl_shm_gpu_options_t options = {.struct_size = sizeof options, .library = driver};
    CHECK_OK(cxl_shm_gpu_open(NULL, 0, &options, &gpu));
}

static cxl_shm_gpu_info_t info_of(cxl_gpu_t of) {
    cxl_shm_gpu_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_gpu_get_info(of, &info));
    return info;
}

/* ---- What is tested ---- */

/* The pool is registered while a GPU is opened, unless the driver refuses. Nothing stays registered of a GPU that is closed. */
static void registered_at_start(void) {
    cxl_shm_gpu_options_t options = {.struct_size = sizeof options, .library = driver};
    cxl_shm_info_t pool = {.struct_size = sizeof pool};
    CHECK_OK(cxl_shm_get_info(NULL, &pool));
    cxl_gpu_t opened = CXL_SHM_GPU_NONE;
    for (uint64_t bytes_at_start = 0; bytes_at_start < 2; bytes_at_start++) {
        options.register_bytes = bytes_at_start;
        CHECK_OK(cxl_shm_gpu_open(NULL, 0, &options, &opened));
        CHECK(info_of(opened).registered_bytes == pool.len_bytes && !info_of(opened).refusal[0]);
        CHECK_OK(cxl_shm_gpu_close(opened));
        CHECK(fake_get("registered") == 0);
    }
    fake_fail("cuMemHostRegister_v2", 0, 1000000, 2);
    CHECK_OK(cxl_shm_gpu_open(NULL, 0, &options, &opened));
    CHECK(strstr(info_of(opened).refusal, "CUDA_ERROR_OUT_OF_MEMORY") != NULL && strstr(info_of(opened).refusal, "memlock") != NULL);
    CHECK_OK(cxl_shm_gpu_close(opened));
    CHECK(fake_get("registered") == 0);
    fake_forgive();
    /* As the environment says. */
    options.register_bytes = 0;
    CHECK(setenv("CXL_CUDA_REGISTER_BYTES", "0", 1) == 0);
    for (uint32_t dma = CXL_SHM_GPU_DMA_DEFAULT; dma <= CXL_SHM_GPU_DMA_UNCACHED; dma++) {
        options.dma = dma;
        CHECK_OK(cxl_shm_gpu_open(NULL, 0, &options, &opened));
        CHECK(info_of(opened).dma == (dma == CXL_SHM_GPU_DMA_UNCACHED ? CXL_SHM_GPU_DMA_UNCACHED : CXL_SHM_GPU_DMA_CACHED));
        CHECK(info_of(opened).registered_bytes == 0 && info_of(opened).unflushed_bytes == 0);
        CHECK_OK(cxl_shm_gpu_close(opened));
    }
    options.dma = 3;
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 0, &options, &opened), CXL_SHM_E_INVALID);
}

static void no_driver(const char* broken) {
    uint32_t count = 77;
    CHECK_STATUS(cxl_shm_gpu_count("libno-such-driver.so.1", &count), CXL_SHM_E_NOT_FOUND);
    CHECK(strstr(cxl_shm_last_error(), "libno-such-driver.so.1") != NULL);
    CHECK_STATUS(cxl_shm_gpu_count("none", &count), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_gpu_count(broken, &count), CXL_SHM_E_NOT_FOUND);
    CHECK(strstr(cxl_shm_last_error(), "cuEventQuery") != NULL);
    CHECK_STATUS(cxl_shm_gpu_count(driver, NULL), CXL_SHM_E_INVALID);
    CHECK(count == 77);
    CHECK_OK(cxl_shm_gpu_count(driver, &count));
    CHECK(count == 1);
    cxl_gpu_t none = CXL_SHM_GPU_NONE;
    cxl_shm_gpu_options_t options = {.struct_size = sizeof options, .library = "libno-such-driver.so.1"};
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 0, &options, &none), CXL_SHM_E_NOT_FOUND);
    options.library = driver;
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 1, &options, &none), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 0, &options, NULL), CXL_SHM_E_INVALID);
    fake_fail("cuDevicePrimaryCtxRetain", 0, 1, 2);
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 0, &options, &none), CXL_SHM_E_GPU);
    CHECK(strstr(cxl_shm_last_error(), "CUDA_ERROR_OUT_OF_MEMORY") != NULL);
    options.struct_size = 3;
    CHECK_STATUS(cxl_shm_gpu_open(NULL, 0, &options, &none), CXL_SHM_E_INVALID);
    CHECK(none == CXL_SHM_GPU_NONE);
}

static void refuse(uint64_t device, void* host, size_t len_bytes, int status) {
    cxl_shm_gpu_piece_t two[2] = {{memory, block, 1}, {device, host, len_bytes}};
    cxl_gpu_copy_t copy = CXL_SHM_GPU_COPY_NONE;
    for (uint32_t direction = CXL_SHM_GPU_TO_HOST; direction <= CXL_SHM_GPU_FROM_HOST; direction++)
        CHECK_STATUS(cxl_shm_gpu_start(gpu, direction, 0, two, 2, &copy), status);
    CHECK(copy == CXL_SHM_GPU_COPY_NONE);
}

static void refusals(void) {
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    char* base = info.base;
    refuse(memory, NULL, 1, CXL_SHM_E_INVALID);
    refuse(UINT64_MAX, heap, 2, CXL_SHM_E_INVALID);
    refuse(memory, heap, SIZE_MAX, CXL_SHM_E_INVALID);
    refuse(memory, base, 64, CXL_SHM_E_NOT_IN_POOL);
    refuse(memory, block, SIZE_MAX / 2, CXL_SHM_E_NOT_IN_POOL);
    refuse(memory, base - 8, 16, CXL_SHM_E_NOT_IN_POOL);
    refuse(memory, base + info.len_bytes - 1, 2, CXL_SHM_E_NOT_IN_POOL);
    cxl_gpu_copy_t copy = CXL_SHM_GPU_COPY_NONE;
    list(block);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, 2, 0, pieces, PIECES, &copy), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, 0, 2, pieces, PIECES, &copy), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, 0, 0, NULL, PIECES, &copy), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, 0, 0, pieces, SIZE_MAX, &copy), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, 0, 0, pieces, PIECES, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_start(gpu + 1000, 0, 0, pieces, PIECES, &copy), CXL_SHM_E_CLOSED);
    CHECK(copy == CXL_SHM_GPU_COPY_NONE);
    for (uint64_t wrong = 0; wrong < 2; wrong++) {
        cxl_shm_gpu_info_t found = {.struct_size = sizeof found};
        CHECK_STATUS(cxl_shm_gpu_wait(wrong ? UINT64_MAX : CXL_SHM_GPU_COPY_NONE, 0), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_gpu_cancel(wrong), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_gpu_release(wrong), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_gpu_close(wrong), CXL_SHM_E_CLOSED);
        CHECK_STATUS(cxl_shm_gpu_get_info(wrong, &found), CXL_SHM_E_CLOSED);
    }
    CHECK_STATUS(cxl_shm_gpu_get_info(gpu, NULL), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_gpu_check(gpu, memory, BYTES));
    CHECK_STATUS(cxl_shm_gpu_check(gpu, memory, BYTES + 1), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_check(gpu, memory, 0), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_check(gpu, memory, SIZE_MAX), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_gpu_check(gpu, (uintptr_t)heap, 1), CXL_SHM_E_INVALID);
    /* Nothing at all is copied at once. */
    CHECK_OK(cxl_shm_gpu_start(gpu, 0, 0, NULL, 0, &copy));
    end(copy, CXL_SHM_OK);
}

/* Both ways, between the GPU and the pool or ordinary memory: nothing arrives before its time. */
static void both_ways(uint32_t salt, uint32_t flags, uint8_t* host) {
    fake_set("queries_until_done", 3);
    for (uint32_t round = 0; round < 2; round++) {
        to_gpu(++salt);
        list(host);
        CHECK(!holds(host));
        cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, flags, host);
        CHECK_STATUS(cxl_shm_gpu_wait(copy, 0), CXL_SHM_E_TIMEOUT);
        CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_BUSY);
        CHECK(!holds(host));
        end(copy, CXL_SHM_OK);
        CHECK(holds(host));

        if (host == heap) {
            fill(++salt);
            memcpy(heap, bytes, BYTES);
        } else {
            written_elsewhere(++salt);
        }
        copy = begin(CXL_SHM_GPU_FROM_HOST, flags, host);
        CHECK(!holds(host));
        end(copy, CXL_SHM_OK);
        CHECK(holds(host) && agree(host, bytes));
    }
    fake_set("queries_until_done", 0);
}

static void ways(void) {
    cxl_shm_gpu_info_t info = {.struct_size = sizeof info};
    both_ways(10, 0, block);
    CHECK_OK(cxl_shm_gpu_get_info(gpu, &info));
    CHECK(fake_get("pinned") == 0 && fake_get("registered") == 1);
    CHECK(info.registered_bytes > BYTES && info.device == 0 && info.refusal[0] == 0);
    both_ways(20, CXL_SHM_GPU_BUFFERED, block);
    CHECK(fake_get("pinned") == 1);
    both_ways(30, 0, heap);
    uint64_t before = info.to_pool_bytes;
    CHECK_OK(cxl_shm_gpu_get_info(gpu, &info));
    CHECK(info.to_pool_bytes == 3 * before && info.from_pool_bytes == info.to_pool_bytes && info.failed == 0);

    /* In the pool and outside of it in one list. */
    to_gpu(40);
    cxl_shm_gpu_piece_t mixed[2] = {{memory, heap, 5000}, {memory + 7000, block + 100, 6000}};
    cxl_gpu_copy_t copy;
    CHECK_OK(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, 0, mixed, 2, &copy));
    end(copy, CXL_SHM_OK);
    CHECK(memcmp(heap, bytes, 5000) == 0 && memcmp(elsewhere() + 100, bytes + 7000, 6000) == 0);
}

/* Memory that cannot be registered goes through buffers, and the GPU says why. */
static void unregistered(void) {
    fake_fail("cuMemHostRegister_v2", 0, 1000, 2);
    open_gpu();
    both_ways(50, 0, block);
    cxl_shm_gpu_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_gpu_get_info(gpu, &info));
    CHECK(info.registered_bytes == 0 && strstr(info.refusal, "CUDA_ERROR_OUT_OF_MEMORY") != NULL);
    fake_forgive();
    CHECK_OK(cxl_shm_gpu_close(gpu));
}

/* A call that fails fails the copies, not before the GPU has ended; the next ones are well. */
static void failures(void) {
    static const struct {
        const char* call;
        int after;
        uint32_t flags;
    } cases[] = {{"cuMemcpyAsync", 0, 0}, {"cuMemcpyAsync", 100, 0}, {"cuMemcpyAsync", 2, 1}, {"cuEventRecord", 0, 0},
                 {"cuEventRecord", 0, 1}, {"cuEventQuery", 0, 0},    {"cuEventQuery", 1, 1}};
    fake_set("queries_until_done", 1);
    for (size_t index = 0; index < sizeof cases / sizeof *cases; index++) {
        for (uint32_t direction = CXL_SHM_GPU_TO_HOST; direction <= CXL_SHM_GPU_FROM_HOST; direction++) {
            to_gpu(60);
            fake_fail(cases[index].call, cases[index].after, 1, LAUNCH_FAILED);
            cxl_gpu_copy_t copy = begin(direction, cases[index].flags, block);
            int status = cxl_shm_gpu_wait(copy, PATIENCE_MS);
            CHECK(status == CXL_SHM_E_GPU && strstr(cxl_shm_last_error(), "CUDA_ERROR_LAUNCH_FAILED") != NULL);
            fake_forgive();
            end(copy, status);
            to_gpu(61);
            end(begin(CXL_SHM_GPU_TO_HOST, 0, block), CXL_SHM_OK);
            CHECK(holds(block));
        }
    }
    fake_set("copy_error", LAUNCH_FAILED);
    end(begin(CXL_SHM_GPU_TO_HOST, 0, block), CXL_SHM_E_GPU);
    fake_set("copy_error", 0);
    /* Of a start that fails nothing is under way. */
    cxl_gpu_copy_t copy = CXL_SHM_GPU_COPY_NONE;
    list(block);
    fake_fail("cuCtxPushCurrent_v2", 0, 1, 2);
    CHECK_STATUS(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, 0, pieces, PIECES, &copy), CXL_SHM_E_GPU);
    CHECK_OK(cxl_shm_gpu_close(gpu));
    open_gpu();
    static const char* const makes[] = {"cuStreamCreate", "cuEventCreate", "cuMemHostAlloc"};
    for (size_t index = 0; index < 3; index++) {
        fake_fail(makes[index], 0, 1, 2);
        CHECK_STATUS(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, CXL_SHM_GPU_BUFFERED, pieces, PIECES, &copy), CXL_SHM_E_GPU);
    }
    CHECK(copy == CXL_SHM_GPU_COPY_NONE);
    fake_set("queries_until_done", 0);
}

/* What a GPU does not end with stays in use, cancelled or not; what it writes after all is told when it is there. */
static void stuck(void) {
    for (uint32_t flags = 0; flags <= CXL_SHM_GPU_BUFFERED; flags++) {
        written_elsewhere(70);
        to_gpu(71 + flags);
        fake_set("is_stuck", 1);
        cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, flags, block);
        CHECK_STATUS(cxl_shm_gpu_wait(copy, 30), CXL_SHM_E_TIMEOUT);
        CHECK_OK(cxl_shm_gpu_cancel(copy));
        CHECK_STATUS(cxl_shm_gpu_wait(copy, 30), CXL_SHM_E_TIMEOUT);
        CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_BUSY);
        /* Closing the GPU ends nothing either. */
        CHECK_OK(cxl_shm_gpu_close(gpu));
        CHECK(fake_get("registered") + fake_get("pinned") > 0);
        CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_BUSY);
        fake_set("is_stuck", 0);
        /* The GPU had all of it when it reached the pool itself. */
        end(copy, flags ? CXL_SHM_E_CANCELLED : CXL_SHM_OK);
        CHECK(holds(block) == !flags);
        CHECK(fake_get("registered") + fake_get("pinned") == 0);
        open_gpu();
    }
    /* A context that cannot be had tells nothing of the end. */
    fake_set("queries_until_done", 1);
    cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, 0, block);
    fake_fail("cuCtxPushCurrent_v2", 0, 2, 2);
    CHECK_STATUS(cxl_shm_gpu_wait(copy, 0), CXL_SHM_E_TIMEOUT);
    CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_BUSY);
    end(copy, CXL_SHM_OK);
    fake_set("queries_until_done", 0);
}

/* The later of two copies ends first. */
static void reordered(void) {
    CHECK_OK(cxl_shm_gpu_close(gpu));
    open_gpu();
    fake_set("queries_until_done", 1);
    to_gpu(80);
    cxl_shm_gpu_piece_t first[1] = {{memory, block, 400000}}, second[1] = {{memory + 500000, block + 500000, 400000}};
    cxl_gpu_copy_t copies[2];
    CHECK_OK(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, 0, first, 1, &copies[0]));
    void* stream = fake_newest_stream();
    fake_hold(stream, 1);
    CHECK_OK(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, 0, second, 1, &copies[1]));
    CHECK(fake_newest_stream() != stream);
    end(copies[1], CXL_SHM_OK);
    CHECK_STATUS(cxl_shm_gpu_wait(copies[0], 20), CXL_SHM_E_TIMEOUT);
    CHECK(memcmp(elsewhere() + 500000, bytes + 500000, 400000) == 0 && memcmp(seen, bytes, 400000) != 0);
    fake_hold(stream, 0);
    end(copies[0], CXL_SHM_OK);
    CHECK(memcmp(elsewhere(), bytes, 400000) == 0);
    fake_set("queries_until_done", 0);
}

static void* waits(void* copy) {
    CHECK_OK(cxl_shm_gpu_wait(*(cxl_gpu_copy_t*)copy, PATIENCE_MS));
    return NULL;
}

/* Threads that look after the same copies hear the same. */
static void shared(void) {
    fake_set("queries_until_done", 20);
    to_gpu(90);
    cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, 0, block);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, waits, &copy) == 0);
    CHECK_OK(cxl_shm_gpu_wait(copy, PATIENCE_MS));
    CHECK(pthread_join(thread, NULL) == 0 && holds(block));
    end(copy, CXL_SHM_OK);
    fake_set("queries_until_done", 0);
}

static void forked(void) {
    fake_set("queries_until_done", 1);
    cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, 0, block);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_STATUS(cxl_shm_gpu_wait(copy, 0), CXL_SHM_E_FORKED);
        CHECK_STATUS(cxl_shm_gpu_release(copy), CXL_SHM_E_FORKED);
        CHECK_STATUS(cxl_shm_gpu_close(gpu), CXL_SHM_E_FORKED);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    end(copy, CXL_SHM_OK);
    fake_set("queries_until_done", 0);
}

/* The pool is closed under an open GPU: copies under way end well, and no others begin. */
static void closed_pool(void) {
    fake_set("queries_until_done", 1);
    to_gpu(100);
    uint64_t offset = cxl_shm_get_offset(block);
    cxl_gpu_copy_t copy = begin(CXL_SHM_GPU_TO_HOST, 0, block), none = CXL_SHM_GPU_COPY_NONE;
    CHECK_OK(cxl_shm_fini());
    CHECK_STATUS(cxl_shm_gpu_start(gpu, CXL_SHM_GPU_TO_HOST, 0, pieces, PIECES, &none), CXL_SHM_E_CLOSED);
    end(copy, CXL_SHM_OK);
    int fd = open(file, O_RDONLY);
    CHECK(fd >= 0 && pread(fd, seen, BYTES, (off_t)offset) == BYTES);
    close(fd);
    CHECK(agree(block, seen));
    CHECK_OK(cxl_shm_gpu_close(gpu));
}

int main(int argc, char** argv) {
    CHECK(argc == 5);
    file = argv[2], driver = argv[3];
    char spec[4200];
    snprintf(spec, sizeof spec, "%s,size=24M", file);
    load(driver);
    cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 64, .objects = 16, .chunk_bytes = 64 << 10};
    CHECK_OK(cxl_shm_format(spec, &format));
    CHECK_OK(cxl_shm_init(spec, NULL));
    void* found = NULL;
    CHECK_OK(cxl_shm_alloc(NULL, BYTES, 0, &found));
    block = found;
    void *context = NULL, *popped = NULL;
    CHECK(retain(&context, 0) == 0 && push(context) == 0 && allocate(&memory, BYTES) == 0);

    if (strcmp(argv[1], "no-wait") == 0) {
        open_gpu();
        fake_set("queries_until_done", 3);
        to_gpu(1);
        begin(CXL_SHM_GPU_TO_HOST, 0, block);
        CHECK(holds(block));
        return 0;
    }
    no_driver(argv[4]);
    registered_at_start();
    unregistered();
    open_gpu();
    refusals();
    ways();
    failures();
    stuck();
    reordered();
    shared();
    if (strcmp(argv[1], "all") == 0)
        forked();
    closed_pool();

    CHECK(release_memory(memory) == 0 && pop(&popped) == 0 && release(0) == 0);
    if (fake_misuse()[0] != 0)
        fprintf(stderr, "misuse: %s\n", fake_misuse());
    CHECK(fake_misuse()[0] == 0);
    static const char* const taken[] = {"streams", "events", "registered", "pinned", "contexts"};
    for (size_t index = 0; index < 5; index++)
        CHECK(fake_get(taken[index]) == 0);
    return 0;
}
