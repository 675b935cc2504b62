/* SPDX-License-Identifier: Apache-2.0
 *
 * C interface of the CXL pool: memory that several hosts map at once WITHOUT cache coherence and WITHOUT atomics between them.
 *
 * What the caller has to know
 *
 *   Coherence   Threads of one host see each other's stores as usual. Another host sees a store only after the storing host has flushed
 *               the line (clflush, cxl_shm_flush) or written past its caches (cxl_shm_copy_in, cxl_shm_publish_line), and only if it has
 *               itself dropped what it had cached of the line (clflush, cxl_shm_invalidate, cxl_shm_copy_out, cxl_shm_fetch_line).
 *               Never use C or C++ atomics, or a pthread mutex, to synchronise hosts through pool memory.
 *   Lines       The unit is a line of CXL_SHM_LINE_BYTES. At any time at most one host may write to a line, because a cache writes whole
 *               lines back. Blocks of this library start at a line and own whole lines.
 *   Locks       Under a lock: invalidate what you are about to read, write, flush what you wrote, release. A release does not flush.
 *   Addresses   Every process maps the pool at another address: store cxl_shm_get_offset() in the pool, never a pointer.
 *
 * Conventions
 *
 *   Pool        A cxl_pool_t* names an open pool. NULL names the default pool of the process: the one that cxl_shm_init() opened, else the
 *               one that CXL_POOL names, opened at the first call that needs it. The calls of TraCT, which take no pool, use the default
 *               pool. Calls that take an address find the pool that it lies in by themselves. Handles are numbers in disguise: one that
 *               is wrong or closed is refused, not followed. A process has at most CXL_SHM_MAX_POOLS open.
 *   Result      0 (CXL_SHM_OK) or a negative cxl_shm_status. cxl_shm_last_error() has the reason in words. Outputs are only written on
 *               success, unless a function says otherwise.
 *   Threads     Every function may be called from any thread at any time, except that no call may be under way on a pool, and no address
 *               in it be in use, when cxl_shm_close() or cxl_shm_fini() returns. A lock is released by the thread that acquired it.
 *   fork        A child must not use what its parent opened: its calls fail with CXL_SHM_E_FORKED, and it opens the pool for itself.
 *   Structures  Their first member is struct_size: set it to sizeof the structure, and everything else to zero for the defaults.
 *   Ownership   Strings and structures passed in are copied. Strings returned belong to the library.
 *
 * Calls marked "TraCT 4.1" have the name and the signature of the CXL shared memory library in that paper.
 */
#ifndef CXL_SHM_H
#define CXL_SHM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header; cxl_shm_version() has that of the library. The same major version means the same binary interface. */
#define CXL_SHM_VERSION_MAJOR 0
#define CXL_SHM_VERSION_MINOR 2
#define CXL_SHM_VERSION_PATCH 0

#define CXL_SHM_LINE_BYTES 64              /* bytes of a line */
#define CXL_SHM_MAX_KEY_BYTES 24           /* longest name of an object, without the closing zero */
#define CXL_SHM_MAX_POOLS 64               /* pools that a process can have open at a time */
#define CXL_SHM_LOCK_NONE 0u               /* never a lock that can be allocated */
#define CXL_SHM_RING_NONE 0u               /* never a listener or a connection */
#define CXL_SHM_DEVICE_NONE 0u             /* never an open device */
#define CXL_SHM_NULL_OFFSET 0u             /* never the offset of a block */
#define CXL_SHM_NO_SLOT UINT32_MAX         /* in cxl_shm_info_t: not joined */
#define CXL_SHM_TIMEOUT_DEFAULT UINT64_MAX /* the timeout_ms that the pool was opened with */

/* What a call failed with. New ones may be added; treat those you do not know as errors. */
typedef enum cxl_shm_status {
    CXL_SHM_OK = 0,
    CXL_SHM_E_INVALID = -1,      /* an argument that can never work */
    CXL_SHM_E_FULL = -2,         /* no room: pool, table of locks or of objects */
    CXL_SHM_E_NOT_FOUND = -3,    /* no such name or lock */
    CXL_SHM_E_EXISTS = -4,       /* the name is bound already */
    CXL_SHM_E_TIMEOUT = -5,      /* the deadline passed; nothing was changed */
    CXL_SHM_E_FENCED = -6,       /* this host was taken for dead: whether the call had its effect is unknown; it joins again by itself */
    CXL_SHM_E_CLOSED = -7,       /* the handle is closed, or the host has left or not joined the pool */
    CXL_SHM_E_NOT_IN_POOL = -8,  /* the address or offset lies in no block area of an open pool */
    CXL_SHM_E_NOT_A_BLOCK = -9,  /* the address is not the start of an allocated block (or it was freed already) */
    CXL_SHM_E_NOT_A_POOL = -10,  /* the devices cannot be opened as they are */
    CXL_SHM_E_CORRUPT = -11,     /* metadata does not verify: run cxlctl fsck */
    CXL_SHM_E_DEVICE_LOST = -12, /* a device is gone */
    CXL_SHM_E_POISONED = -13,    /* the memory is damaged there */
    CXL_SHM_E_REPLACED = -14,    /* the pool was formatted again under this handle */
    CXL_SHM_E_SLOT_IN_USE = -15, /* the slot belongs to another machine */
    CXL_SHM_E_OS = -16,          /* the operating system refused */
    CXL_SHM_E_RECOVERED = -17,   /* what the lock protects must be repaired first: cxl_shm_acquire_lock_ex() */
    CXL_SHM_E_NOT_HELD = -18,    /* this thread does not hold the lock */
    CXL_SHM_E_DEADLOCK = -19,    /* this thread holds the lock already */
    CXL_SHM_E_BUSY = -20,        /* locks of this handle are held */
    CXL_SHM_E_FORKED = -21,      /* the handle was opened by the parent process */
    CXL_SHM_E_PEER_GONE = -22,   /* the other end of the connection is gone: messages in flight may or may not have arrived */
    CXL_SHM_E_PEER_CLOSED = -23, /* the other end has closed the connection, and everything that it had sent was received */
    CXL_SHM_E_TOO_LARGE = -24,   /* the message is longer than the ring allows, or than the room for it */
    CXL_SHM_E_GPU = -25,         /* a GPU or its driver did not do what it was asked to */
    CXL_SHM_E_CANCELLED = -26,   /* ended early, as the caller asked: what of it was done is not known */
    CXL_SHM_E_INTERNAL = -99     /* a bug of this library */
} cxl_shm_status;

typedef struct cxl_pool cxl_pool_t; /* an open pool */
typedef uint32_t cxl_lock_t;        /* a lock: the same number on every host, so it can be stored in the pool */
typedef uint64_t cxl_ring_t;        /* a listener or connection of one pool handle: means nothing elsewhere, and is never used again */
typedef uint64_t cxl_device_t;      /* a device that this process has open: never used again */
typedef uint64_t shm_ptr_t;         /* an offset from the start of the pool: the same on every host */

/* ---- Errors -------------------------------------------------------------------------------------------------------------------------- */

/* The name of a status in words; never NULL, valid for ever. */
const char* cxl_shm_strerror(int status);

/* Why the last failing call of this thread failed; "" if none has. At most 511 bytes, valid until the thread's next failing call.
 * Successful calls leave it as it is. */
const char* cxl_shm_last_error(void);

/* The status of the last failing call of this thread, for the calls that cannot return it; 0 if none has failed, or since
 * cxl_shm_clear_error(). */
int cxl_shm_last_status(void);

/* Forgets the last error of this thread. */
void cxl_shm_clear_error(void);

/* A function for the warnings and errors of the library's background threads (heartbeat, upkeep), which have no caller. An error that
 * repeats comes once a minute. `level` is 1 for errors and 2 for warnings; `message` is valid during the call. It is called on the
 * library's threads, several at a time: it must return soon, must not call this library, and must not throw. */
typedef void (*cxl_shm_log_fn)(void* context, int level, const char* message);

/* Has `log` called from now on, for all pools of the process; NULL ends that. When this returns, the function given before is called no
 * more. */
void cxl_shm_set_log(cxl_shm_log_fn log, void* context);

/* Version of the library: major << 16 | minor << 8 | patch. */
uint32_t cxl_shm_version(void);

/* ---- Opening, joining, formatting ---------------------------------------------------------------------------------------------------- */

#define CXL_SHM_OPEN_READ_ONLY 1u /* map read-only: nothing can be written or locked, and the host does not join */
#define CXL_SHM_OPEN_NO_JOIN 2u   /* map only; cxl_shm_join() joins later */
#define CXL_SHM_OPEN_SLOT 4u      /* ask for the host slot `slot` instead of any free one; a wish, the pool decides */

typedef struct cxl_shm_options {
    size_t struct_size;       /* sizeof(cxl_shm_options_t) */
    uint32_t flags;           /* CXL_SHM_OPEN_... */
    uint32_t slot;            /* with CXL_SHM_OPEN_SLOT */
    uint64_t timeout_ms;      /* deadline of the calls that take none; 0 = 30 000, more where suspect_ms asks for it: see join_timeout_ms */
    uint64_t join_timeout_ms; /* deadline of joining and leaving; 0 = 3 suspect_ms + 5 000, at least 10 000: two managers may die one after
                                 the other */
    uint64_t heartbeat_ms;    /* period of this host's heartbeat; 0 = 50. The same on every host */
    uint64_t suspect_ms;      /* silence after which a host is suspected; 0 = CXL_SUSPECT_MS of the environment, else 1 000. The same on
                               * every host, a multiple of heartbeat_ms */
} cxl_shm_options_t;

/* Opens a pool and joins it as part of this machine's host; the processes of one machine share a host. A thread of the library keeps the
 * host alive until the pool is closed. Never formats.
 *
 * spec     The devices, like "/dev/dax0.0,/dev/dax1.0" or "/dev/shm/kv", or a part of each, like "/dev/dax0.0,offset=64G", or with the
 *          metadata on a device of its own, like "/dev/dax0.0,metadata=/dev/dax1.0"; NULL = CXL_POOL of the environment.
 * options  NULL = defaults.
 *
 * The environment is read here: CXL_MACHINE_ID (who this machine is), CXL_STATE_DIR, CXL_COHERENCE (instructions, or the emulator),
 * CXL_SUSPECT_MS, CXL_POLL_US (how often recalls of locks and fences are looked for). */
int cxl_shm_open(const char* spec, const cxl_shm_options_t* options, cxl_pool_t** pool);

/* Joins a pool that was opened without joining, or left. CXL_SHM_E_EXISTS if it is joined. */
int cxl_shm_join(cxl_pool_t* pool);

/* Leaves the pool but keeps it mapped. Scratch blocks of this handle end. The last process of a host gives the slot back.
 * CXL_SHM_E_BUSY while this handle holds locks, and CXL_SHM_E_TIMEOUT while calls on it are under way: then it is joined as before. After
 * any other failure it has left all the same, and its host is taken for dead after a while if no other process runs it. */
int cxl_shm_leave(cxl_pool_t* pool);

/* Leaves if joined, then unmaps: addresses in the pool become invalid, as do locks and blocks of this handle. Fails as cxl_shm_leave()
 * does, and the pool stays open. A process that ends without it is noticed, after a while, and its host taken for dead. */
int cxl_shm_close(cxl_pool_t* pool);

/* cxl_shm_open() of the default pool. CXL_SHM_E_EXISTS if it is open. */
int cxl_shm_init(const char* spec, const cxl_shm_options_t* options);

/* cxl_shm_close() of the default pool; 0 if it is not open. */
int cxl_shm_fini(void);

#define CXL_SHM_FORMAT_FORCE 1u    /* format even if the devices hold something, which is lost */
#define CXL_SHM_FORMAT_COHERENT 2u /* one host, or hardware that keeps hosts coherent: flushes are left out. Wrong elsewhere */

typedef struct cxl_shm_format_options {
    size_t struct_size;     /* sizeof(cxl_shm_format_options_t) */
    uint32_t flags;         /* CXL_SHM_FORMAT_... */
    uint32_t slots;         /* most hosts at a time, 1 to 64; 0 = 16 */
    uint32_t seats;         /* machines that may manage the locks, 1 to 8; 0 = 4. This machine has the first */
    uint32_t locks;         /* locks, 8 of them the pool's own; 0 = 256 */
    uint32_t objects;       /* names; 0 = by the size of the pool: one for each 256 KiB, 256 to 8192 */
    uint32_t reserved;      /* zero */
    uint64_t chunk_bytes;   /* what a host takes at a time, a power of two; 0 = 2 MiB */
    uint64_t stripe_bytes;  /* stripe over several devices, a power of two; 0 = 2 MiB or what fits */
    uint64_t cell_bytes;    /* the largest block that the prefix cache takes, a multiple of 64; 0 = no prefix cache */
    uint32_t cells_percent; /* how much of the pool is for the prefix cache; 0 = 75 */
    uint32_t reserved2;     /* zero */
} cxl_shm_format_options_t;

/* Formats devices as one pool; whatever they held is lost. Does not open it. With "size=" in the spec, as in "/dev/shm/kv,size=1G",
 * missing files are made. CXL_SHM_E_NOT_A_POOL, naming the content, if a device is not empty and CXL_SHM_FORMAT_FORCE is not given;
 * CXL_SHM_E_EXISTS, whatever is given, if it would overlap another pool on the device. */
int cxl_shm_format(const char* spec, const cxl_shm_format_options_t* options);

#define CXL_SHM_INFO_READ_ONLY 1u
#define CXL_SHM_INFO_JOINED 2u
#define CXL_SHM_INFO_COHERENT 4u
#define CXL_SHM_INFO_WHOLE_LINES 8u /* this CPU writes and loads a line as one unit: cxl_shm_publish_line */

typedef struct cxl_shm_info {
    size_t struct_size;        /* in: sizeof(cxl_shm_info_t) */
    uint8_t uuid[16];          /* of the pool */
    uint64_t pool_incarnation; /* of the format */
    uint64_t len_bytes;        /* of the whole pool, metadata included */
    uint64_t data_offset;      /* where blocks can lie ... */
    uint64_t data_bytes;       /* ... and how much of it there is */
    uint64_t chunk_bytes;
    void* base;     /* address of offset 0 in this process */
    uint32_t flags; /* CXL_SHM_INFO_... */
    uint32_t devices;
    uint32_t slots;
    uint32_t locks;
    uint32_t objects;
    uint32_t slot;        /* of this host; CXL_SHM_NO_SLOT if not joined */
    uint32_t incarnation; /* of this host; rises when it was fenced and joined again */
    uint32_t process;     /* of this handle among those of the host */
    int32_t numa_node;    /* of the first device; -1 = not known */
    uint32_t reserved;    /* zero */
    char memory[128];     /* what the memory is reached with, like "native:write=movdir64b,...", cut if longer */
} cxl_shm_info_t;

/* Fills *info as far as info->struct_size goes. */
int cxl_shm_get_info(cxl_pool_t* pool, cxl_shm_info_t* info);

/* CXL_SHM_E_REPLACED if a device was formatted, erased or swapped since the pool was opened. */
int cxl_shm_check(cxl_pool_t* pool);

/* The identity under which this machine joins pools, 16 bytes: CXL_MACHINE_ID, or derived from the machine. */
int cxl_shm_machine_id(uint8_t* id);

/* Lets the calling thread run only on the CPUs of a NUMA node. CXL_SHM_E_INVALID for a node with memory only, as CXL memory often is. */
int cxl_shm_bind_thread(uint32_t numa_node);

/* Lets the calling thread run only where CXL_CPUS says that workers of a program on this pool do ("workers=..."), and anywhere that it
 * could before where it says nothing. The threads of the library see to themselves. */
int cxl_shm_bind_worker(cxl_pool_t* pool);

/* ---- Locks --------------------------------------------------------------------------------------------------------------------------- *
 *
 * A lock excludes threads of this process, processes of this host, and hosts. It is not recursive. Its users must keep sections short:
 * while one runs, a host that was taken for dead cannot join again.
 *
 * When the holder of a lock dies, the lock is passed on once it is certain that the dead host does not write any more (its process is gone
 * and another one of its machine noticed, its machine joined again, or an operator said so). The data that the lock protects may then be
 * half done: CXL_SHM_E_RECOVERED says so to each holder until one calls cxl_shm_lock_repaired(). A holder also gets it, with nothing to
 * repair, if the host that had the lock last has left and joined again since: no other host knows how that one ended.
 */

/* Allocates a lock of the default pool. It belongs to no host: it lasts until it is freed, so store it where other hosts find it.
 * TraCT 4.1 */
int cxl_shm_allocate_lock(cxl_lock_t* lock);

/* Frees a lock of the default pool, which no host may use any more. CXL_SHM_E_NOT_FOUND if it is not allocated; CXL_SHM_E_BUSY if a thread
 * of this process holds it through the same handle. TraCT 4.1 */
int cxl_shm_free_lock(cxl_lock_t lock);

/* Acquires a lock of the default pool; waits up to its timeout_ms. Any error means: not held.
 * CXL_SHM_E_RECOVERED when a former holder died or was fenced in its section and no holder has repaired since: acquire with
 * cxl_shm_acquire_lock_ex(), repair, call cxl_shm_lock_repaired(). CXL_SHM_E_DEADLOCK when this thread holds it. Whether the lock is
 * allocated is not looked up. TraCT 4.1 */
int cxl_shm_acquire_lock(cxl_lock_t lock);

/* Releases a lock of the default pool. CXL_SHM_E_NOT_HELD if this thread does not hold it. CXL_SHM_E_FENCED if this host was taken for
 * dead meanwhile: the lock is released, and the next holder must repair. Flushes nothing. TraCT 4.1 */
int cxl_shm_release_lock(cxl_lock_t lock);

typedef struct cxl_lock_info {
    size_t struct_size; /* in: sizeof(cxl_lock_info_t) */
    uint32_t recovered; /* 1 = repair before use: the last holder may not have ended its section */
    uint32_t grant;     /* number of this grant; rises each time that the lock passes from host to host */
} cxl_lock_info_t;

/* The calls above for any pool and deadline. timeout_ms is in milliseconds, CXL_SHM_TIMEOUT_DEFAULT for that of the pool; with 0 a lock is
 * only acquired if this host has it and no thread uses it.
 * cxl_shm_acquire_lock_ex() also succeeds where a repair is due, and says so in *info; NULL is treated like cxl_shm_acquire_lock(). */
int cxl_shm_allocate_lock_ex(cxl_pool_t* pool, uint64_t timeout_ms, cxl_lock_t* lock);
int cxl_shm_free_lock_ex(cxl_pool_t* pool, cxl_lock_t lock, uint64_t timeout_ms);
int cxl_shm_acquire_lock_ex(cxl_pool_t* pool, cxl_lock_t lock, uint64_t timeout_ms, cxl_lock_info_t* info);
int cxl_shm_release_lock_ex(cxl_pool_t* pool, cxl_lock_t lock);

/* States that what the lock protects is whole again. The caller holds the lock; CXL_SHM_E_NOT_HELD. Without it, a release leaves the next
 * holder to repair. */
int cxl_shm_lock_repaired(cxl_pool_t* pool, cxl_lock_t lock);

/* States that what the lock protects was left half done: the next holder repairs. The caller holds the lock; CXL_SHM_E_NOT_HELD. */
int cxl_shm_lock_damaged(cxl_pool_t* pool, cxl_lock_t lock);

/* ---- Blocks -------------------------------------------------------------------------------------------------------------------------- *
 *
 * A block starts at a line and owns whole lines. Its bytes are undefined. Any host may free a block of any host; the caller knows
 * that it is not used any more. Flush stores to a kept block before it is freed (clflush, cxl_shm_flush): a line that is still in
 * the cache of some host would be written back onto the bytes of the memory's next owner. Scratch blocks need no flush.
 *
 *   kept     lives until it is freed, beyond its process and host: for structures that hosts find through a named object
 *   scratch  lives at most as long as the process that allocated it: for what needs no cleaning up after a crash. Only cxl_shm_keep()
 *            makes it fit to be known to another process
 */

#ifndef CXL_SHM_NO_SHORT_NAMES
/* Allocates a kept block of at least `size` bytes in the default pool; NULL on failure (cxl_shm_last_error()), and for size 0.
 * The block is kept before the call returns. TraCT 4.1 */
void* shmalloc(size_t size);

/* Frees a block of any open pool, kept or scratch. NULL does nothing. An address that is not the start of an allocated block is refused
 * (cxl_shm_last_status(), cxl_shm_last_error()) if this process allocated the memory around it. Blocks of other processes and hosts are
 * freed there, soon after the call; a request that is wrong is refused there and only counted. TraCT 4.1 */
void shfree(void* ptr);
#endif

#define CXL_SHM_ALLOC_SCRATCH 1u /* a scratch block instead of a kept one */

/* shmalloc() in any pool, with a status. flags: 0 or CXL_SHM_ALLOC_SCRATCH. */
int cxl_shm_alloc(cxl_pool_t* pool, size_t size, uint32_t flags, void** ptr);

/* A scratch block in the default pool; otherwise as shmalloc(). */
void* cxl_shm_alloc_scratch(size_t size);

/* Makes the scratch block of this process around `ptr` a kept one; one that is kept stays so. CXL_SHM_E_NOT_A_BLOCK. */
int cxl_shm_keep(void* ptr);

/* shfree() with a status. */
int cxl_shm_free(void* ptr);

/* ---- Named objects ------------------------------------------------------------------------------------------------------------------- *
 *
 * A small table from names of 1 to CXL_SHM_MAX_KEY_BYTES bytes to addresses in the pool: for the few roots from which structures are linked
 * by offsets. Flush a structure before its name is put.
 */

/* Binds a name of the default pool to an address in it. CXL_SHM_E_EXISTS if it is bound. TraCT 4.1 (there: char *key) */
int cxl_shm_put(const char* key, void* ptr);

/* Looks a name of the default pool up: *ptr is the address in this process. CXL_SHM_E_NOT_FOUND. Takes no lock. The bytes there must be
 * invalidated before they are read. TraCT 4.1 (there: char *key) */
int cxl_shm_get(const char* key, void** ptr);

/* Unbinds a name of the default pool. What it was bound to is left alone. CXL_SHM_E_NOT_FOUND. TraCT 4.1 (there: char *key) */
int cxl_shm_destroy(const char* key);

#define CXL_SHM_PUT_REPLACE 1u /* rebind the name if it is bound; readers see the old or the new binding */

/* The calls above for any pool and deadline. len_bytes (below 4 GiB) is stored and returned; 0 = not given. len_bytes of
 * cxl_shm_get_ex() may be NULL. */
int cxl_shm_put_ex(cxl_pool_t* pool, const char* key, void* ptr, uint64_t len_bytes, uint32_t flags, uint64_t timeout_ms);
int cxl_shm_get_ex(cxl_pool_t* pool, const char* key, void** ptr, uint64_t* len_bytes, uint64_t timeout_ms);
int cxl_shm_destroy_ex(cxl_pool_t* pool, const char* key, uint64_t timeout_ms);

/* ---- Rings: messages between processes ------------------------------------------------------------------------------------------------ *
 *
 * A connection carries messages between two processes of any hosts, in both directions: each arrives whole, once, in order, or the
 * connection ends with an error. They go through rings of lines in the pool, without a system call; a message of 64 bytes takes two lines.
 *
 * All calls are of the handle `pool` (NULL = the default pool), and so are the numbers they give. One thread may send while another
 * receives on the same connection; two that send, or two that receive, take turns. timeout_ms is in milliseconds, CXL_SHM_TIMEOUT_DEFAULT
 * for that of the pool; with 0 a call does what can be done at once, and fails with CXL_SHM_E_TIMEOUT otherwise. A new connection needs
 * memory of the pool: where that takes a lock which another host has and does not give back, the call, and a close that has to wait for
 * it, last up to join_timeout_ms longer.
 *
 * A process that is gone is noticed by those who wait for it: at once on its own host, elsewhere once it was silent for twice the pool's
 * suspect_ms. A thread of the library says for this process that it lives. When a process ends, or leaves the pool, its connections end;
 * nothing of them is left in the pool.
 */

/* Listens under a name of 1 to CXL_SHM_MAX_KEY_BYTES bytes, which is a named object of the pool. CXL_SHM_E_EXISTS if a living process does,
 * or the name is bound to something else; the name of one that is gone is taken over, which may take as long as noticing that. */
int cxl_shm_ring_listen(cxl_pool_t* pool, const char* name, cxl_ring_t* listener);

/* Waits for a process that connects. CXL_SHM_E_NOT_FOUND if the name does not mean this listener any more. */
int cxl_shm_ring_accept(cxl_pool_t* pool, cxl_ring_t listener, uint64_t timeout_ms, cxl_ring_t* connection);

/* Connects to a listener, waiting until it accepts. CXL_SHM_E_NOT_FOUND if no process listens under the name, CXL_SHM_E_PEER_GONE if its
 * process is gone, CXL_SHM_E_TIMEOUT if it did not accept in time. */
int cxl_shm_ring_connect(cxl_pool_t* pool, const char* name, uint64_t timeout_ms, cxl_ring_t* connection);

/* Whether the listener of a name is there, without waiting. Success: nothing says that it has ended, though a process of another host may
 * have been killed. CXL_SHM_E_PEER_GONE: it is certain that it listens no more (it gave the name back, its process has ended, or its host
 * is proven dead or has left). CXL_SHM_E_TIMEOUT: unknown; a host that was taken for dead may come back. */
int cxl_shm_ring_presence(cxl_pool_t* pool, const char* name);

/* Longest message of a connection, in bytes. */
int cxl_shm_ring_max_message(cxl_pool_t* pool, cxl_ring_t connection, size_t* len_bytes);

/* Sends a message of `len_bytes` bytes, which may be 0; waits for room in the ring. Success says that it was written, not that
 * it was received. CXL_SHM_E_TOO_LARGE, CXL_SHM_E_PEER_GONE, CXL_SHM_E_PEER_CLOSED; on any error it was not sent. */
int cxl_shm_ring_send(cxl_pool_t* pool, cxl_ring_t connection, const void* message, size_t len_bytes, uint64_t timeout_ms);

/* Waits for a message and copies it to `message`, which has room for `size` bytes; *len_bytes is its length. CXL_SHM_E_TOO_LARGE if the
 * room is too small: *len_bytes is written then as well, and the next call gets the message. CXL_SHM_E_PEER_CLOSED once everything sent
 * before a close has been received, CXL_SHM_E_PEER_GONE if the last messages may be lost. */
int cxl_shm_ring_recv(cxl_pool_t* pool, cxl_ring_t connection, void* message, size_t size, size_t* len_bytes, uint64_t timeout_ms);

/* Looks now whether the other end of a connection is alive, without waiting, whatever other threads do with the connection. Success after a
 * copy out of memory that the other end owns says whose the memory was during the copy: with *seen (which may be NULL) 1, when the other
 * end is a process of this host, that is certain. With 0 it is on another host, where nothing says that it has ended, but it may have ended
 * a moment ago and its memory be reused: then only a message that it sent after the copy is proof. CXL_SHM_E_PEER_CLOSED if it has closed,
 * CXL_SHM_E_PEER_GONE if it has ended, or its host was taken for dead, or this is unknown. */
int cxl_shm_ring_check(cxl_pool_t* pool, cxl_ring_t connection, uint32_t* seen);

/* Remembers the other end of a connection under a number of its own, which is closed with cxl_shm_ring_close(): for a process that gives a
 * connection up and has to know when the other end cannot use any more what it was lent. */
int cxl_shm_ring_trace(cxl_pool_t* pool, cxl_ring_t connection, cxl_ring_t* trace);

/* Whether the other end is certain to have let go: *has_let_go is 1 when it has closed its end of the connection, when its process has
 * ended, and when its host was fenced or has left the pool. 0: unknown. A stopped process may continue. If a process is
 * killed on another host, this host may never learn of it while that host stays up. One exception after a fence: a process that was
 * stopped in the middle of a copy, on a host that lives, ends that copy when it continues. */
int cxl_shm_ring_has_let_go(cxl_pool_t* pool, cxl_ring_t trace, uint32_t* has_let_go);

/* Closes a connection, a listener or a trace; the number is not valid any more whatever the result is. A connection is closed once the
 * other end has received everything, or timeout_ms has passed (CXL_SHM_E_TIMEOUT); with 0 it is dropped, and the other end is notified.
 * Calls that wait on other threads end first, most of them within some 20 ms, with CXL_SHM_E_CLOSED. */
int cxl_shm_ring_close(cxl_pool_t* pool, cxl_ring_t ring, uint64_t timeout_ms);

/* ---- Counters ------------------------------------------------------------------------------------------------------------------------ *
 *
 * Every host publishes the sums of its processes in the pool, about twice a second; cxlctl shows them (docs/operating/metrics.md). The
 * library counts for itself; what a program above it counts, it hands in by these numbers. Those marked "now" rise and fall, all others
 * only rise. What a process handed in stays in its host's sums when it ends, in whatever way, except for what it handed in during the last
 * 0.1 s before it was killed; of those marked "now" its share goes. Sums start at zero when the machine restarts.
 */
typedef enum cxl_shm_counter {
    CXL_SHM_COUNT_NIXL_POSTED = 24,               /* transfers that NIXL agents posted */
    CXL_SHM_COUNT_NIXL_READS = 25,                /* READ transfers that ended well */
    CXL_SHM_COUNT_NIXL_WRITES = 26,               /* WRITE transfers that ended well */
    CXL_SHM_COUNT_NIXL_FAILED = 27,               /* transfers that failed */
    CXL_SHM_COUNT_NIXL_CANCELLED = 28,            /* transfers that were released while they were active */
    CXL_SHM_COUNT_NIXL_DISCONNECTED = 29,         /* transfers that failed because the peer was gone */
    CXL_SHM_COUNT_NIXL_POOL_READ_BYTES = 30,      /* bytes copied out of the pool, directly */
    CXL_SHM_COUNT_NIXL_POOL_WRITTEN_BYTES = 31,   /* bytes copied into the pool or within it, directly */
    CXL_SHM_COUNT_NIXL_LOCAL_BYTES = 32,          /* bytes copied between memory of one process */
    CXL_SHM_COUNT_NIXL_STAGED_READ_BYTES = 33,    /* bytes read from other processes over staging */
    CXL_SHM_COUNT_NIXL_STAGED_WRITTEN_BYTES = 34, /* bytes written to other processes over staging */
    CXL_SHM_COUNT_NIXL_SERVED_READ_BYTES = 35,    /* bytes gathered for the staged READs of other processes */
    CXL_SHM_COUNT_NIXL_SERVED_WRITTEN_BYTES = 36, /* bytes scattered for the staged WRITEs of other processes */
    CXL_SHM_COUNT_NIXL_VRAM_BYTES = 37,           /* bytes copied by GPUs, between their memory and the pool or this process */
    CXL_SHM_COUNT_NIXL_OBJECTS_WRITTEN = 38,      /* objects published by WRITE */
    CXL_SHM_COUNT_NIXL_OBJECTS_EXISTED = 39,      /* objects that were there when a WRITE came */
    CXL_SHM_COUNT_NIXL_OBJECTS_READ = 40,         /* objects read */
    CXL_SHM_COUNT_NIXL_OBJECTS_MISSED = 41,       /* objects that a READ did not find */
    CXL_SHM_COUNT_NIXL_OBJECT_WRITTEN_BYTES = 42, /* bytes of the objects published */
    CXL_SHM_COUNT_NIXL_OBJECT_READ_BYTES = 43,    /* bytes read from objects */
    CXL_SHM_COUNT_NIXL_FILE_WRITTEN_BYTES = 44,   /* bytes written to files */
    CXL_SHM_COUNT_NIXL_FILE_READ_BYTES = 45,      /* bytes read from files */
    CXL_SHM_COUNT_NIXL_NOTIFS_SENT = 46,          /* notifications sent */
    CXL_SHM_COUNT_NIXL_NOTIFS_RECEIVED = 47,      /* notifications received */
    CXL_SHM_COUNT_NIXL_NOTIFS_RESENT = 48,        /* notifications sent once more, because a link ended before */
    CXL_SHM_COUNT_NIXL_LINKS_MADE = 49,           /* links to peers that were made, from either end */
    CXL_SHM_COUNT_NIXL_LINKS_LOST = 50,           /* links that ended otherwise than by a close of the other end */
    CXL_SHM_COUNT_NIXL_PEERS_GONE = 51,           /* peers that ended, or could not be reached */
    CXL_SHM_COUNT_NIXL_REFUSED = 52,              /* requests of peers for memory that is not, or no longer, registered */
    CXL_SHM_COUNT_NIXL_LINKS = 53,                /* links to peers (now) */
    CXL_SHM_COUNT_NIXL_STAGING_USED_BYTES = 54,   /* pool memory that staged transfers use (now) */
    CXL_SHM_COUNT_NIXL_STAGING_BYTES = 55,        /* pool memory that engines hold for staged transfers (now) */
    CXL_SHM_COUNT_NIXL_ENGINES = 56               /* engines (now) */
} cxl_shm_counter;

typedef struct cxl_shm_count {
    uint32_t counter;  /* CXL_SHM_COUNT_... */
    uint32_t reserved; /* zero */
    int64_t change;    /* since the last call; negative only of those marked "now" */
} cxl_shm_count_t;

/* Adds counts: all entries, or none if it fails. Call it now and then, not for every operation. CXL_SHM_E_INVALID for a number
 * that is none of those above, and for a counter that would fall; CXL_SHM_E_CLOSED if the handle has not joined. */
int cxl_shm_count(cxl_pool_t* pool, const cxl_shm_count_t* counts, size_t count);

/* What the host in `slot` has published of a counter: one of those above, or the place of another (line x 7 + counter) in
 * docs/operating/metrics.md.
 * CXL_SHM_E_NOT_FOUND if it has published none yet, or if the pool was formatted by a version that did not have the counter. */
int cxl_shm_host_count(cxl_pool_t* pool, uint32_t slot, uint32_t counter, uint64_t* value);

/* ---- Offsets and addresses ----------------------------------------------------------------------------------------------------------- */

/* The offset of an address in the blocks of any open pool; CXL_SHM_NULL_OFFSET for NULL and, with CXL_SHM_E_NOT_IN_POOL as the last status,
 * for any other address. TraCT 4.1 */
shm_ptr_t cxl_shm_get_offset(void* ptr);

/* The address of an offset in the blocks of the default pool; NULL for CXL_SHM_NULL_OFFSET and, with CXL_SHM_E_NOT_IN_POOL as the last
 * status, for any other offset. TraCT 4.1 */
void* cxl_shm_get_ptr(shm_ptr_t offset);

/* cxl_shm_get_ptr() for `len_bytes` bytes in any pool: all of them lie in its blocks. For offsets that were read from the pool. */
int cxl_shm_get_range(cxl_pool_t* pool, shm_ptr_t offset, size_t len_bytes, void** ptr);

/* ---- Flushing, publishing, copying ---------------------------------------------------------------------------------------------------- *
 *
 * All of these find the pool by the address and refuse ranges that do not lie in its blocks (CXL_SHM_E_NOT_IN_POOL). They are the only
 * means that also work under the emulator: instructions and fences of the caller's own do not reach it.
 */

#ifndef CXL_SHM_NO_SHORT_NAMES
/* Writes the lines of a range back and drops them from this host's caches, fenced on both sides: before it returns, earlier stores to them
 * are in the memory, and later loads come from there. cxl_shm_flush() without a status (cxl_shm_last_status()). TraCT 4.1 */
void clflush(void* addr, size_t size);
#endif

/* Makes this host's stores to the range visible to the other hosts. They are when it returns. */
int cxl_shm_flush(const void* addr, size_t size);

/* Drops what this host has cached of the range, so that later loads see what other hosts made visible before. Lines that this host has
 * changed are written back as a whole: flush them while they are yours. */
int cxl_shm_invalidate(const void* addr, size_t size);

/* Writes a line as one unit: other hosts see all of `bytes` or nothing of it. It is ordered before this thread's later publishes.
 * This needs MOVDIR64B or AVX-512 on the writing host and AVX-512 on the fetching one: CXL_SHM_INFO_WHOLE_LINES. Where one of the two
 * has it not, a fetch may see old and new words side by side, for as long as the writer takes (a writer that is stopped in between: until
 * it continues). Let the line hold a checksum of itself, as the pool's own lines do, and fetch again where it does not fit.
 * `line` is a multiple of CXL_SHM_LINE_BYTES; `bytes` has as many and need not be aligned. */
int cxl_shm_publish_line(void* line, const void* bytes);

/* Reads the line that is in the memory now, as one unit. Polling is a loop of this call. */
int cxl_shm_fetch_line(const void* line, void* bytes);

/* Copies `size` bytes from `source`, ordinary memory, into the pool past the caches; they are visible to other hosts before anything that
 * this thread publishes later. A part of a line at either end is written with the rest of its line. */
int cxl_shm_copy_in(void* destination, const void* source, size_t size);

/* Invalidates `size` bytes of the pool and copies them to `destination`, ordinary memory. Nothing keeps another host from writing
 * meanwhile: hold a lock, or verify what you got. */
int cxl_shm_copy_out(void* destination, const void* source, size_t size);

#define CXL_SHM_COPY_IN 0u     /* from ordinary memory to the pool, as cxl_shm_copy_in() */
#define CXL_SHM_COPY_OUT 1u    /* from the pool to ordinary memory, as cxl_shm_copy_out() */
#define CXL_SHM_COPY_WITHIN 2u /* from `memory` to `pool`, both in the pool, as one after the other */

/* An entry of a list of copies. */
typedef struct cxl_shm_copy {
    void* pool;       /* first byte in the pool */
    void* memory;     /* first byte of ordinary memory */
    size_t len_bytes; /* 0 = nothing is done */
} cxl_shm_copy_t;

/* Copies any number of pieces of one pool in the calling thread, in any order, with the fences of all made once; pieces that begin where
 * the one before ends, on both sides, count as one. No byte may be the destination of two pieces (CXL_SHM_E_INVALID), and with
 * CXL_SHM_COPY_WITHIN none may be both source and destination. A list with a piece that does not lie in the blocks is refused before any
 * byte moves; after other errors an unknown part of it was copied. A list in the order of its destinations is checked fastest. */
int cxl_shm_copy_list(uint32_t direction, const cxl_shm_copy_t* pieces, size_t count);

/* ---- Devices by themselves ------------------------------------------------------------------------------------------------------------ *
 *
 * The bytes of a devdax device, or of a file, by their offset on it: for data on a device outside pools, and for blocks of a pool that
 * are known by their place on a device. They are reached as the memory of a pool is: a read gives what other hosts made visible before, and
 * a write is visible to them when the call returns. Nothing else orders the hosts. Only whole pages of a file are reached, and it
 * never grows. A device that is lost or damaged under way is an error, as with a pool (CXL_SHM_E_DEVICE_LOST, CXL_SHM_E_POISONED).
 */

#define CXL_SHM_DEVICE_READ_ONLY 1u         /* open for reading only */
#define CXL_SHM_DEVICE_IN_POOL 1u           /* found: the device is part of the pool */
#define CXL_SHM_MAGIC 0x006c78636d62766bull /* the first 8 bytes, little-endian, of a device that is part of a pool */

/* Opens a device, all of it, whatever part of it a pool has; `pool` (NULL = the default pool) says which pool is this process's own. If it
 * is there, only its blocks can be read and written, cached ones excepted, and everything else of the device is refused
 * (CXL_SHM_E_NOT_IN_POOL), so that no pool is damaged this way. A device that has only other pools is refused (CXL_SHM_E_EXISTS), as is
 * writing where one begins by now. *len_bytes is its length and *found CXL_SHM_DEVICE_IN_POOL or 0; both may be NULL. */
int cxl_shm_device_open(cxl_pool_t* pool, const char* path, uint32_t flags, cxl_device_t* device, uint64_t* len_bytes, uint32_t* found);

/* Copies `size` bytes at `offset` of the device to `destination`, ordinary memory, whole or not usable at all. CXL_SHM_E_INVALID for bytes
 * that the device does not have. */
int cxl_shm_device_read(cxl_device_t device, uint64_t offset, void* destination, size_t size);

/* Copies `size` bytes from `source`, ordinary memory, to `offset` of the device. A failure may leave a part of them written. */
int cxl_shm_device_write(cxl_device_t device, uint64_t offset, const void* source, size_t size);

/* Closes a device: the number is not valid any more. Calls that are under way on it end as if it were open. */
int cxl_shm_device_close(cxl_device_t device);

/* ---- Prefix cache -------------------------------------------------------------------------------------------------------------------- *
 *
 * Blocks that one host publishes under a name and every host of the pool pulls. A name is a namespace (how the bytes were made: model, data
 * type, layout, rank) and a key (of which tokens). A block is immutable; it goes when room is needed and no host has it pinned. A pull
 * gives the bytes of one publication of that name, or CXL_SHM_E_NOT_FOUND: whatever is in doubt is not found.
 *
 * The pool has to be formatted with cells. A process opens the cache of a pool once, through one handle.
 */

#define CXL_SHM_ID_BYTES 16 /* bytes of a namespace, and of a key */

#define CXL_SHM_CACHE_CHECKSUMS 1u /* compute a checksum of every block while it is copied, and compare it */

/* Which block is evicted first. */
#define CXL_SHM_CACHE_LRU 0u      /* the one that was not used for longest, as TraCT */
#define CXL_SHM_CACHE_LEAF_LRU 3u /* LRU among blocks that no other cached block continues */

typedef struct cxl_shm_cache_options {
    size_t struct_size;          /* sizeof(cxl_shm_cache_options_t) */
    uint32_t flags;              /* CXL_SHM_CACHE_CHECKSUMS */
    uint32_t policy;             /* CXL_SHM_CACHE_LRU ... */
    uint32_t low_water_percent;  /* when to begin to make room ahead; 0 and 0 = 5 and 10 */
    uint32_t high_water_percent; /* when to end */
    uint32_t copy_workers;       /* threads that copy large blocks; 0 = as the machine has */
    uint32_t reserved;           /* zero */
} cxl_shm_cache_options_t;

typedef struct cxl_shm_block_id {
    uint8_t name_space[CXL_SHM_ID_BYTES];
    uint8_t key[CXL_SHM_ID_BYTES];
} cxl_shm_block_id_t;

/* A stretch of ordinary memory of the caller. The pieces of a call follow one another in the block; one without bytes is left out. */
typedef struct cxl_shm_piece {
    void* ptr;
    size_t len_bytes;
} cxl_shm_piece_t;

/* A block that the caller holds reserved or pinned. */
typedef struct cxl_shm_block {
    size_t struct_size; /* in: sizeof(cxl_shm_block_t) */
    uint64_t handle;    /* for the calls below, until it is committed, aborted or unpinned */
    shm_ptr_t offset;   /* of its first byte */
    uint64_t len_bytes;
    void* ptr;         /* its first byte in this process */
    uint32_t owner;    /* slot of the host that owns the cell */
    uint32_t reserved; /* zero */
} cxl_shm_block_t;

/* Opens the cache of a pool that is joined; a thread of the library does its upkeep. NULL = defaults. CXL_SHM_E_INVALID if the pool has no
 * cells, CXL_SHM_E_EXISTS if it is open. */
int cxl_shm_cache_open(cxl_pool_t* pool, const cxl_shm_cache_options_t* options);

/* Closes it: reserved blocks are given up, pins given back; published blocks stay. cxl_shm_leave() and cxl_shm_close() do the same. */
int cxl_shm_cache_close(cxl_pool_t* pool);

/* A namespace from any bytes that say how blocks are made: equal bytes, equal namespace. */
int cxl_shm_cache_namespace(const void* text, size_t size, uint8_t* name_space);

/* A key from any bytes that identify the content of a block, and the key of the block before it, or NULL. */
int cxl_shm_cache_key(const uint8_t* parent, const void* text, size_t size, uint8_t* key);

/* Whether a block is there, and its length (`len_bytes` may be NULL). Advice: it may go right afterwards. CXL_SHM_E_NOT_FOUND. */
int cxl_shm_cache_lookup(cxl_pool_t* pool, const cxl_shm_block_id_t* id, uint64_t* len_bytes);

/* How many leading blocks of a chain are cached. `keys` has `count` contiguous keys of CXL_SHM_ID_BYTES. Advice. */
int cxl_shm_cache_lookup_chain(cxl_pool_t* pool, const uint8_t* name_space, const uint8_t* keys, size_t count, size_t* cached);

/* Publishes a block; every host can pull it when this returns. `parent` is the key of the block before it in its chain, or NULL.
 * CXL_SHM_E_EXISTS if it is there or is being written, CXL_SHM_E_BUSY if it is being evicted, CXL_SHM_E_FULL. */
int cxl_shm_cache_publish(cxl_pool_t* pool, const cxl_shm_block_id_t* id, const uint8_t* parent, const cxl_shm_piece_t* pieces,
                          size_t count);

/* Reserves room for a block, which no lookup finds until it is committed. Fill it in one of three ways: with cxl_shm_cache_fill(), at
 * `ptr` by stores (commit and abort flush them), or by a device (which must have ended, and have flushed, before the commit). After a fill
 * nothing may be stored at `ptr` any more: it would not be flushed, and could end in the next block there. Errors as
 * cxl_shm_cache_publish(). */
int cxl_shm_cache_reserve(cxl_pool_t* pool, const cxl_shm_block_id_t* id, const uint8_t* parent, uint64_t len_bytes,
                          cxl_shm_block_t* block);

/* Fills the whole of a reserved block from pieces, past the caches. */
int cxl_shm_cache_fill(cxl_pool_t* pool, uint64_t handle, const cxl_shm_piece_t* pieces, size_t count);

/* Publishes a reserved block. Whatever this returns, the handle is used up. */
int cxl_shm_cache_commit(cxl_pool_t* pool, uint64_t handle);

/* Gives a reserved block up. No thread and no device may still write to it. The handle is used up. */
int cxl_shm_cache_abort(cxl_pool_t* pool, uint64_t handle);

/* Copies a block to pieces, which may have more room than it has bytes; its length to *len_bytes unless that is NULL. When this fails the
 * pieces may hold anything. CXL_SHM_E_NOT_FOUND; CXL_SHM_E_INVALID if the pieces are too short. */
int cxl_shm_cache_pull(cxl_pool_t* pool, const cxl_shm_block_id_t* id, const cxl_shm_piece_t* pieces, size_t count, uint64_t* len_bytes);

/* Pins a block: it stays until it is unpinned, as long as this host is not taken for dead. CXL_SHM_E_NOT_FOUND. */
int cxl_shm_cache_pin(cxl_pool_t* pool, const cxl_shm_block_id_t* id, cxl_shm_block_t* block);

/* Pins the leading blocks of a chain that are there: as many handles as *pinned says. */
int cxl_shm_cache_pin_chain(cxl_pool_t* pool, const uint8_t* name_space, const uint8_t* keys, size_t count, uint64_t* handles,
                            size_t* pinned);

/* Copies a pinned block to pieces, as cxl_shm_cache_pull(). */
int cxl_shm_cache_read(cxl_pool_t* pool, uint64_t handle, const cxl_shm_piece_t* pieces, size_t count);

/* Use in place: invalidate, use the bytes at `ptr`, then check. If the check returns CXL_SHM_OK, the bytes were the block;
 * CXL_SHM_E_NOT_FOUND means that they may have been anything. */
int cxl_shm_cache_invalidate(cxl_pool_t* pool, uint64_t handle);
int cxl_shm_cache_check(cxl_pool_t* pool, uint64_t handle);

/* Gives a pin back. The handle is used up. */
int cxl_shm_cache_unpin(cxl_pool_t* pool, uint64_t handle);

/* Evicts a block, if no host has it pinned: at once if this process owns it, else its owner is asked to. A host asks for one thing at a
 * time, the others wait for some tens of milliseconds each, and a request can be lost: look whether the block is gone, and ask again. */
int cxl_shm_cache_evict(cxl_pool_t* pool, const cxl_shm_block_id_t* id);

/* Evicts the blocks of a namespace, or all if NULL, as cxl_shm_cache_evict(). */
int cxl_shm_cache_clear(cxl_pool_t* pool, const uint8_t* name_space);

/* What this process counted, as text for Prometheus with a closing zero. `needed` gets the bytes of the text, zero included, also when
 * there is too little room (CXL_SHM_E_FULL); with text NULL and size 0 it is only that. */
int cxl_shm_cache_metrics(cxl_pool_t* pool, char* text, size_t size, size_t* needed);

#ifdef __cplusplus
}
#endif

/* Memory of GPUs. */
#include "cxl_shm_gpu.h"

#endif /* CXL_SHM_H */
