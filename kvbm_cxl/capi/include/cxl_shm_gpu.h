/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of GPUs: the part of the C interface of the CXL pool that is about them. cxl_shm.h includes it, and says how its calls behave. */
#ifndef CXL_SHM_GPU_H
#define CXL_SHM_GPU_H

#include "cxl_shm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory of GPUs
 *
 * Copies between the memory of a GPU and the pool, or ordinary memory of this process. They run asynchronously, and the caller
 * waits for them. The CUDA driver is loaded at run time; nothing here needs CUDA before.
 *
 * The GPU reaches the pool itself: its memory is registered with the driver, as a whole while the GPU is opened, or in parts when a copy
 * first needs them. It is unregistered when the GPU is closed. The GPU reads the bytes that other hosts made visible before.
 * They see its writes once a call has reported the end of the copies. Ordinary memory, and memory of the pool that cannot be registered,
 * goes through pinned buffers of the library.
 *
 * Ownership   The memory of copies, on both sides, is the GPU's from the call of cxl_shm_gpu_start() on until cxl_shm_gpu_wait() has said
 *             how they ended. There is no other way to get it back: a GPU cannot be stopped, cxl_shm_gpu_cancel() and closing do not end
 *             what it was given, and the number of copies whose end is not known cannot be released. The pool stays mapped for as long as
 *             a GPU of it is open or copies are not released.
 *             Copies make progress within calls of cxl_shm_gpu_wait() on them, by any thread; without these they may stand still.
 * Order       The caller has ordered its own work on the memory before it starts a copy. Copies are in no order among them.
 */

#define CXL_SHM_GPU_NONE 0u      /* never an open GPU */
#define CXL_SHM_GPU_COPY_NONE 0u /* never copies of a GPU */
#define CXL_SHM_GPU_TO_HOST 0u   /* from the GPU to `host` */
#define CXL_SHM_GPU_FROM_HOST 1u /* from `host` to the GPU */
#define CXL_SHM_GPU_BUFFERED 1u  /* through pinned buffers only: cancelled copies do not touch memory of the host any more */

/* Whether payload is flushed around the copies of a GPU. CACHED is right on every platform. UNCACHED is right only where the pool's memory
 * is uncacheable on this host and I/O leaves nothing in its caches (DDIO is off): elsewhere others see old bytes. No fence is left out. */
#define CXL_SHM_GPU_DMA_DEFAULT 0u /* as CXL_CUDA_DMA says, else cached */
#define CXL_SHM_GPU_DMA_CACHED 1u
#define CXL_SHM_GPU_DMA_UNCACHED 2u

typedef uint64_t cxl_gpu_t;      /* a GPU that this process has open: never used again */
typedef uint64_t cxl_gpu_copy_t; /* copies that were started on a GPU: never used again */

typedef struct cxl_shm_gpu_options {
    size_t struct_size;      /* sizeof(cxl_shm_gpu_options_t) */
    const char* library;     /* the CUDA driver, "none" = there is none; NULL = CXL_CUDA_LIBRARY of the environment, else libcuda.so.1 */
    uint64_t register_bytes; /* of the pool, from its beginning, registered when the GPU is opened; 0 = CXL_CUDA_REGISTER_BYTES, else all */
    uint32_t dma;            /* CXL_SHM_GPU_DMA_...: what this host's platform does with lines that a GPU reads and writes */
    uint32_t reserved;       /* 0 */
} cxl_shm_gpu_options_t;

typedef struct cxl_shm_gpu_info {
    size_t struct_size;        /* in: sizeof(cxl_shm_gpu_info_t) */
    uint64_t registered_bytes; /* of the pool, so far */
    uint64_t to_pool_bytes;    /* copied from the GPU, to ordinary memory included ... */
    uint64_t from_pool_bytes;  /* ... and to it */
    uint64_t failed;           /* calls of cxl_shm_gpu_start() whose copies ended with an error */
    uint32_t device;           /* number in CUDA */
    uint32_t dma;              /* CXL_SHM_GPU_DMA_CACHED or CXL_SHM_GPU_DMA_UNCACHED */
    char refusal[256];         /* why memory of the pool could not be registered, the first time; "" = it could. Cut if longer */
    uint64_t unflushed_bytes;  /* copied to and from the pool and not flushed, because dma is uncached */
} cxl_shm_gpu_info_t;

/* A stretch to be copied. `host` lies in the blocks of the GPU's pool, or is ordinary memory, which no open pool is. */
typedef struct cxl_shm_gpu_piece {
    uint64_t device;  /* address of the first byte in the memory of the GPU (CUdeviceptr) */
    void* host;       /* first byte of the host's */
    size_t len_bytes; /* 0 = nothing is done */
} cxl_shm_gpu_piece_t;

/* How many GPUs this process sees; `library` as in the options. CXL_SHM_E_NOT_FOUND where there is no driver, it is too old, or it has no
 * GPU; the reason says which. */
int cxl_shm_gpu_count(const char* library, uint32_t* count);

/* Opens a GPU, by its number in CUDA, for copies to and from a pool; it uses the primary context. A pool may have GPUs open several times.
 * CXL_SHM_E_NOT_FOUND as above, and where there is no such GPU; CXL_SHM_E_GPU. */
int cxl_shm_gpu_open(cxl_pool_t* pool, uint32_t device, const cxl_shm_gpu_options_t* options, cxl_gpu_t* gpu);

/* Closes a GPU: the number is not valid any more. Copies that were started stay, and are waited for and released as before. */
int cxl_shm_gpu_close(cxl_gpu_t gpu);

/* Fills *info as far as info->struct_size goes. */
int cxl_shm_gpu_get_info(cxl_gpu_t gpu, cxl_shm_gpu_info_t* info);

/* CXL_SHM_E_INVALID unless a range, which has a byte at least, is memory of this GPU, as far as the driver knows. */
int cxl_shm_gpu_check(cxl_gpu_t gpu, uint64_t address, size_t len_bytes);

/* Starts copies and returns at once. Where two pieces have one byte as their destination, it is of one of them. On failure nothing is under
 * way: CXL_SHM_E_INVALID or CXL_SHM_E_NOT_IN_POOL for a piece that cannot be meant, CXL_SHM_E_GPU, CXL_SHM_E_CLOSED if the pool was closed.
 * cxl_shm_gpu_wait() reports the outcome of the copies. */
int cxl_shm_gpu_start(cxl_gpu_t gpu, uint32_t direction, uint32_t flags, const cxl_shm_gpu_piece_t* pieces, size_t count,
                      cxl_gpu_copy_t* copy);

/* Drives copies until they end or `timeout_ms` have passed; 0 looks, and never waits for the GPU. CXL_SHM_OK if all of them were
 * made, CXL_SHM_E_TIMEOUT if they have not ended yet, anything else if they have ended and not all were made: their destinations may hold
 * anything. A later call reports the same end again. */
int cxl_shm_gpu_wait(cxl_gpu_copy_t copy, uint64_t timeout_ms);

/* Submits nothing more of copies; the GPU finishes its submitted part, and cxl_shm_gpu_wait() waits for that. It then says CXL_SHM_OK if
 * they were all made nevertheless, or CXL_SHM_E_CANCELLED. Does nothing to copies that have ended. */
int cxl_shm_gpu_cancel(cxl_gpu_copy_t copy);

/* Forgets copies that have ended: the number is not valid any more. CXL_SHM_E_BUSY if they have not, as far as is known: then nothing
 * changes, and their memory stays in use. */
int cxl_shm_gpu_release(cxl_gpu_copy_t copy);

/* Blocks of the prefix cache, in the order of a stream
 *
 * Blocks that lie on a GPU are published and pulled asynchronously. A call returns when the copies are submitted. They are ordered
 * after the earlier work of `stream` (CUstream; 0 is the default stream), and work that it gets after a pull is ordered after the copies. A
 * block that is published is committed when its copy has ended, by a thread of the library. cxl_shm_cache_open() comes before; the GPU is
 * opened with its first block, as the environment says (CXL_CUDA_...).
 *
 * Ownership   The memory of the blocks stays as it is (publish), or is used by work of that stream alone (pull), until
 *             cxl_shm_gpu_queued_wait() has said how they ended. A caller that overwrites the memory of a publish before that orders
 *             the work with cxl_shm_gpu_queued_hold(). After an outcome of CXL_SHM_E_TIMEOUT the GPU may use it until the cache is closed.
 * Misses      A pulled block is verified after its copy. Until its outcome is CXL_SHM_OK, work of the stream may have read
 *             anything there, and nothing of its results counts.
 * Bound       The copies that are under way have at most 256 MiB together. A call above that waits for earlier ones at most `wait_ms`
 *             (CXL_SHM_TIMEOUT_DEFAULT = the pool's), then fails with CXL_SHM_E_FULL; a call that is larger by itself waits for all others.
 *             Where a CPU has a part in the copies (the pool is not registered, or checksums are on and no kernel takes them) the call
 *             waits for its copies. */

#define CXL_SHM_GPU_QUEUED_NONE 0u /* never blocks that were queued */

typedef uint64_t cxl_gpu_queued_t; /* blocks that were queued: never used again */

/* A stretch of a GPU's memory. The parts of a block follow one another in it. */
typedef struct cxl_shm_gpu_part {
    uint64_t device; /* address of the first byte (CUdeviceptr) */
    size_t len_bytes;
} cxl_shm_gpu_part_t;

typedef struct cxl_shm_gpu_block {
    uint8_t name_space[CXL_SHM_ID_BYTES];
    uint8_t key[CXL_SHM_ID_BYTES];
    const uint8_t* parent;           /* of a publish: key of the block before it in its chain, or NULL */
    const cxl_shm_gpu_part_t* parts; /* where it lies, or goes to: as long as the block together */
    size_t count;                    /* of parts */
} cxl_shm_gpu_block_t;

/* Publishes blocks of GPU `device`. On failure nothing is under way: errors as above, and CXL_SHM_E_NOT_FOUND (no such GPU), CXL_SHM_E_GPU,
 * CXL_SHM_E_FENCED. */
int cxl_shm_gpu_queue_publish(cxl_pool_t* pool, uint32_t device, uint64_t stream, const cxl_shm_gpu_block_t* blocks, size_t count,
                              uint64_t wait_ms, cxl_gpu_queued_t* queued);

/* Pulls blocks to GPU `device`. Each byte of its memory is named once. Errors as cxl_shm_gpu_queue_publish(). */
int cxl_shm_gpu_queue_pull(cxl_pool_t* pool, uint32_t device, uint64_t stream, const cxl_shm_gpu_block_t* blocks, size_t count,
                           uint64_t wait_ms, cxl_gpu_queued_t* queued);

/* Waits for the end of blocks that were queued, at most `timeout_ms`; 0 looks. CXL_SHM_OK once all of them have ended: then outcomes[i]
 * is the outcome of blocks[i]; both arrays have `count` entries. CXL_SHM_OK: it is stored, or pulled and verified. CXL_SHM_E_EXISTS,
 * CXL_SHM_E_BUSY, CXL_SHM_E_FULL, CXL_SHM_E_NOT_FOUND: as of cxl_shm_cache_publish() and cxl_shm_cache_pull(). CXL_SHM_E_CLOSED: the cache
 * was closed before, and nothing was committed. CXL_SHM_E_GPU, CXL_SHM_E_TIMEOUT and others: it failed.
 * CXL_SHM_E_TIMEOUT if they have not ended; outcomes are not written then. */
int cxl_shm_gpu_queued_wait(cxl_gpu_queued_t queued, uint64_t timeout_ms, int32_t* outcomes, size_t count);

/* Has a stream come after the copies: work that it is given from here on finds them made. */
int cxl_shm_gpu_queued_hold(cxl_gpu_queued_t queued, uint64_t stream);

/* Forgets blocks that have ended: the number is not valid any more. CXL_SHM_E_BUSY if they have not, as far as is known. */
int cxl_shm_gpu_queued_release(cxl_gpu_queued_t queued);

#ifdef __cplusplus
}
#endif

#endif /* CXL_SHM_GPU_H */
