/* SPDX-License-Identifier: Apache-2.0
 *
 * Two hosts share one pool:  two_hosts first|second POOL ROUNDS [MISTAKE]
 *
 * The first builds a list with shmalloc and names its root; the second finds and verifies it. Both count under one lock, with two threads
 * each. Each frees what the other allocated, and the room is there again. MISTAKE leaves one step out, so that the harness can see that it
 * would be noticed: no-flush, no-invalidate, no-lock. Exit status 3 means that the count is wrong. */
#include "check.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#define THREADS 2
#define NODES 200
#define BLOCK (256 << 10) /* of the pool, and what fills it */
#define MAGIC 0x43584c31u

struct node {
    shm_ptr_t next;
    uint32_t number;
    uint32_t words;
    uint32_t content[];
};

/* Each host has a line of its own in which it says how far it is. What it has said stays there: the other one may look late. `sum` is of
 * all that is before it, so that a line that is seen in parts shows. */
struct stage {
    uint64_t reached;
    shm_ptr_t list;
    uint64_t filled;
    shm_ptr_t place;
    uint8_t fill[CXL_SHM_LINE_BYTES - 40];
    uint64_t sum;
};

struct root {
    uint32_t magic;
    cxl_lock_t lock;
    shm_ptr_t list;
    shm_ptr_t counter;
    shm_ptr_t stages[2];
};

static const char* mistake = "";
static int host;
static uint64_t rounds;
static bool lines_are_whole;
static struct root root;
static struct stage own, other;

static uint32_t content_of(uint32_t owner, uint32_t number, uint32_t index) {
    return (owner * 0x9e3779b9u + number) * 0x85ebca6bu + index * 0xc2b2ae35u;
}

static uint64_t sum_of(const struct stage* stage) {
    uint64_t words[offsetof(struct stage, sum) / sizeof(uint64_t)], sum = 0;
    memcpy(words, stage, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15u;
    return sum;
}

static void say(uint64_t reached) {
    own.reached = reached;
    memset(own.fill, (int)reached, sizeof own.fill);
    own.sum = sum_of(&own);
    CHECK_OK(cxl_shm_publish_line(cxl_shm_get_ptr(root.stages[host]), &own));
}

static void await(uint64_t reached) {
    time_t since = time(NULL);
    for (;;) {
        CHECK_OK(cxl_shm_fetch_line(cxl_shm_get_ptr(root.stages[1 - host]), &other));
        bool whole = other.sum == sum_of(&other);
        CHECK(whole || !lines_are_whole);
        if (whole && other.reached >= reached)
            return;
        check_rest(since, "the other host");
    }
}

/* A block of the other host must not be seen half written: it is flushed before its name is bound. */
static shm_ptr_t build_list(void) {
    shm_ptr_t head = CXL_SHM_NULL_OFFSET;
    for (uint32_t number = 0; number < NODES; number++) {
        uint32_t words = 1 + number * 7 % 300;
        size_t size = sizeof(struct node) + words * sizeof(uint32_t);
        struct node* node = shmalloc(size);
        CHECK(node != NULL);
        CHECK((uintptr_t)node % CXL_SHM_LINE_BYTES == 0);
        node->next = head;
        node->number = number;
        node->words = words;
        for (uint32_t i = 0; i < words; i++)
            node->content[i] = content_of((uint32_t)host, number, i);
        if (strcmp(mistake, "no-flush") != 0)
            clflush(node, size);
        head = cxl_shm_get_offset(node);
        CHECK(head != CXL_SHM_NULL_OFFSET && cxl_shm_get_ptr(head) == (void*)node);
    }
    return head;
}

static void check_and_free_list(shm_ptr_t head, uint32_t owner) {
    for (uint32_t number = NODES; number-- > 0;) {
        struct node* node;
        void* place;
        CHECK_OK(cxl_shm_get_range(NULL, head, sizeof *node, &place));
        node = place;
        CHECK_OK(cxl_shm_invalidate(node, sizeof *node));
        CHECK(node->number == number && node->words == 1 + number * 7 % 300);
        size_t size = sizeof *node + node->words * sizeof(uint32_t);
        CHECK_OK(cxl_shm_invalidate(node, size));
        for (uint32_t i = 0; i < node->words; i++)
            CHECK(node->content[i] == content_of(owner, number, i));
        head = node->next;
        cxl_shm_clear_error();
        shfree(node);
        CHECK(cxl_shm_last_status() == CXL_SHM_OK);
    }
    CHECK(head == CXL_SHM_NULL_OFFSET);
}

static void* count(void* unused) {
    uint64_t* counter = cxl_shm_get_ptr(root.counter);
    (void)unused;
    for (uint64_t round = 0; round < rounds; round++) {
        if (strcmp(mistake, "no-lock") != 0)
            CHECK_OK(cxl_shm_acquire_lock(root.lock));
        if (strcmp(mistake, "no-invalidate") != 0)
            CHECK_OK(cxl_shm_invalidate(counter, sizeof *counter));
        uint64_t found = *(volatile uint64_t*)counter;
        /* Without the lock nothing may hang on luck: another host always comes in between. */
        if (strcmp(mistake, "no-lock") == 0)
            check_rest(time(NULL), "nothing");
        *(volatile uint64_t*)counter = found + 1;
        if (strcmp(mistake, "no-flush") != 0)
            clflush(counter, sizeof *counter);
        if (strcmp(mistake, "no-lock") != 0)
            CHECK_OK(cxl_shm_release_lock(root.lock));
    }
    return NULL;
}

static void count_together(void) {
    pthread_t threads[THREADS];
    uint64_t* counter = cxl_shm_get_ptr(root.counter);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, count, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    say(2);
    await(2);
    CHECK_OK(cxl_shm_acquire_lock(root.lock));
    CHECK_OK(cxl_shm_invalidate(counter, sizeof *counter));
    if (*counter != 2 * THREADS * rounds) {
        fprintf(stderr, "host %d: the count is %llu, not %llu\n", host, (unsigned long long)*counter,
                (unsigned long long)(2 * THREADS * rounds));
        exit(3);
    }
    CHECK_OK(cxl_shm_release_lock(root.lock));
}

/* Fills the pool with large blocks, which the other host frees: they are there again soon. */
static void fill_and_refill(void) {
    enum { MOST = 4096 };
    static shm_ptr_t offsets[MOST];
    const size_t size = BLOCK;
    size_t filled = 0;
    void* block;
    int status;
    while ((status = cxl_shm_alloc(NULL, size, 0, &block)) == CXL_SHM_OK) {
        CHECK(filled < MOST);
        offsets[filled++] = cxl_shm_get_offset(block);
    }
    CHECK(status == CXL_SHM_E_FULL);
    CHECK(filled >= 4);
    shm_ptr_t* list = cxl_shm_get_ptr(offsets[0]);
    CHECK(sizeof(shm_ptr_t) * filled <= size);
    CHECK_OK(cxl_shm_copy_in(list, offsets, sizeof(shm_ptr_t) * filled));
    CHECK_OK(cxl_shm_put_ex(NULL, "full", list, sizeof(shm_ptr_t) * filled, 0, CXL_SHM_TIMEOUT_DEFAULT));
    own.filled = filled;
    say(2001);
    await(2002);
    time_t since = time(NULL);
    for (size_t again = 0; again < filled; again++)
        while (cxl_shm_alloc(NULL, size, 0, &block) != CXL_SHM_OK)
            check_rest(since, "the blocks that the other host freed");
    say(2003);
}

static void free_what_fills(void) {
    static shm_ptr_t offsets[4096];
    void* list;
    uint64_t len_bytes;
    await(2001);
    uint64_t filled = other.filled;
    CHECK_OK(cxl_shm_get_ex(NULL, "full", &list, &len_bytes, CXL_SHM_TIMEOUT_DEFAULT));
    CHECK(len_bytes == filled * sizeof(shm_ptr_t) && len_bytes <= sizeof offsets);
    CHECK_OK(cxl_shm_copy_out(offsets, list, len_bytes));
    CHECK_OK(cxl_shm_destroy("full"));
    for (uint64_t i = 0; i < filled; i++)
        CHECK_OK(cxl_shm_free(cxl_shm_get_ptr(offsets[i])));
    say(2002);
    await(2003);
}

/* Ping-pong: a host that sees the flag sees what was copied and published before it, whatever order the memory would like better. */
static void exchange(void) {
    enum { TURNS = 300, BYTES = 5 * CXL_SHM_LINE_BYTES + 20 };
    char* mine = shmalloc(BYTES + CXL_SHM_LINE_BYTES);
    uint8_t bytes[BYTES], line[CXL_SHM_LINE_BYTES];
    CHECK(mine != NULL);
    char* before = mine + 6 * CXL_SHM_LINE_BYTES;
    own.place = cxl_shm_get_offset(mine);
    say(100);
    await(100);
    const char* place = cxl_shm_get_ptr(other.place);
    for (int turn = 1; turn <= TURNS; turn++) {
        if (turn % 2 == host) {
            memset(bytes, turn, sizeof bytes);
            memset(line, turn + 1, sizeof line);
            /* Each of the two has to be in order by its own fence: either is the last before the flag in some turns. */
            if (turn % 4 < 2)
                CHECK_OK(cxl_shm_copy_in(mine, bytes, sizeof bytes));
            CHECK_OK(cxl_shm_publish_line(before, line));
            if (turn % 4 >= 2)
                CHECK_OK(cxl_shm_copy_in(mine, bytes, sizeof bytes));
            say(100 + (uint64_t)turn);
        } else {
            await(100 + (uint64_t)turn);
            CHECK_OK(cxl_shm_fetch_line(place + 6 * CXL_SHM_LINE_BYTES, line));
            CHECK_OK(cxl_shm_copy_out(bytes, place, sizeof bytes));
            for (size_t i = 0; i < sizeof bytes; i++)
                CHECK(bytes[i] == (uint8_t)turn);
            for (size_t i = 0; i < sizeof line; i++)
                CHECK(line[i] == (uint8_t)(turn + 1));
        }
    }
    say(1000);
    await(1000);
    CHECK_OK(cxl_shm_free(mine));
}

static shm_ptr_t zeroed(size_t size) {
    static const uint8_t zeros[CXL_SHM_LINE_BYTES];
    void* block = shmalloc(size);
    CHECK(block != NULL && size <= sizeof zeros);
    CHECK_OK(cxl_shm_copy_in(block, zeros, sizeof zeros));
    return cxl_shm_get_offset(block);
}

static void make_root(void) {
    struct root* shared = shmalloc(sizeof root);
    CHECK(shared != NULL);
    CHECK_OK(cxl_shm_allocate_lock(&root.lock));
    root.magic = MAGIC;
    root.counter = zeroed(sizeof(uint64_t));
    root.stages[0] = zeroed(sizeof(struct stage));
    root.stages[1] = zeroed(sizeof(struct stage));
    root.list = build_list();
    *shared = root;
    clflush(shared, sizeof *shared);
    CHECK_OK(cxl_shm_put("root", shared));
}

static void find_root(void) {
    void* shared = check_await("root");
    CHECK_OK(cxl_shm_copy_out(&root, shared, sizeof root));
    CHECK(root.magic == MAGIC);
}

int main(int argc, char** argv) {
    CHECK(argc >= 4);
    host = strcmp(argv[1], "second") == 0;
    rounds = strtoull(argv[3], NULL, 10);
    if (argc > 4)
        mistake = argv[4];
    cxl_shm_options_t options = {.struct_size = sizeof options, .timeout_ms = PATIENCE_S * 1000, .join_timeout_ms = 30000};
    if (host == 0) {
        cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 32, .objects = 32, .chunk_bytes = BLOCK};
        CHECK_OK(cxl_shm_format(argv[2], &format));
    }
    check_open(argv[2], &options);
    cxl_shm_info_t info = {.struct_size = sizeof info};
    CHECK_OK(cxl_shm_get_info(NULL, &info));
    lines_are_whole = (info.flags & CXL_SHM_INFO_WHOLE_LINES) != 0;
    CHECK(!lines_are_whole || (strstr(info.memory, "write=stores") == NULL && strstr(info.memory, "load=words") == NULL));
    CHECK((info.flags & CXL_SHM_INFO_JOINED) != 0 && info.slot < info.slots && info.incarnation != 0);

    if (host == 0)
        make_root();
    else
        find_root();
    if (host == 1)
        own.list = build_list();
    say(1);
    await(1);
    check_and_free_list(host == 0 ? other.list : root.list, (uint32_t)(1 - host));
    count_together();
    exchange();
    if (host == 0)
        fill_and_refill();
    else
        free_what_fills();
    if (host == 0) {
        CHECK_OK(cxl_shm_destroy("root"));
        CHECK_OK(cxl_shm_free_lock(root.lock));
        CHECK_STATUS(cxl_shm_free_lock(root.lock), CXL_SHM_E_NOT_FOUND);
    }
    CHECK_OK(cxl_shm_fini());
    printf("host %d slot %u: ok (%s)\n", host, info.slot, info.memory);
    return 0;
}
