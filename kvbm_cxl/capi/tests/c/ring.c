/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages between two processes:  ring serve POOL | ring serve-own POOL | ring call POOL | ring dies POOL
 * Whether a listener is there:      ring listens POOL | ring looks-here POOL | ring looks-elsewhere POOL
 *
 * The server answers a caller that closes in good order, then one that is killed, and says what it saw. Every message differs in length and
 * in every byte from the others. */
#include "check.h"

#include <pthread.h>

#define ROUNDS 400
#define MOST 3000
#define SUSPECT_MS 1000

static uint8_t content_of(uint64_t round, size_t index) {
    return (uint8_t)((round * 0x9e3779b97f4a7c15ull + index * 0xc2b2ae3d27d4eb4full) >> 29);
}

static size_t size_of(uint64_t round) {
    return (size_t)(round * 37 % MOST);
}

static void fill(uint8_t* message, uint64_t round) {
    for (size_t i = 0; i < size_of(round); i++)
        message[i] = content_of(round, i);
}

static void check_filled(const uint8_t* message, size_t len, uint64_t round, uint8_t flipped) {
    CHECK(len == size_of(round));
    for (size_t i = 0; i < len; i++)
        CHECK((uint8_t)(message[i] ^ flipped) == content_of(round, i));
}

/* What can never work is refused, and the rings go on. */
static void check_refusals(cxl_ring_t listener, cxl_ring_t connection) {
    uint8_t byte = 1;
    size_t len = 0, most = 0;
    cxl_ring_t other;
    CHECK_STATUS(cxl_shm_ring_listen(NULL, "service", &other), CXL_SHM_E_EXISTS);
    CHECK_STATUS(cxl_shm_ring_listen(NULL, "", &other), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_listen(NULL, NULL, &other), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_listen(NULL, "other", NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_connect(NULL, "unbound", 0, &other), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_ring_presence(NULL, "unbound"), CXL_SHM_E_PEER_GONE);
    CHECK_STATUS(cxl_shm_ring_presence(NULL, ""), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_presence(NULL, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_accept(NULL, listener, 0, &other), CXL_SHM_E_TIMEOUT);
    CHECK_STATUS(cxl_shm_ring_accept(NULL, connection, 0, &other), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_accept(NULL, CXL_SHM_RING_NONE, 0, &other), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_send(NULL, listener, &byte, 1, 0), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_send(NULL, 99999, &byte, 1, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_send(NULL, connection, NULL, 1, 0), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_ring_max_message(NULL, connection, &most));
    CHECK(most >= MOST);
    CHECK_STATUS(cxl_shm_ring_max_message(NULL, connection, NULL), CXL_SHM_E_INVALID);
    uint8_t* large = malloc(most + 1);
    CHECK(large != NULL);
    memset(large, 7, most + 1);
    CHECK_STATUS(cxl_shm_ring_send(NULL, connection, large, most + 1, 0), CXL_SHM_E_TOO_LARGE);
    free(large);
    CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, &byte, 1, NULL, 0), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, NULL, 1, &len, 0), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, &byte, 1, &len, 0), CXL_SHM_E_TIMEOUT);
    CHECK_STATUS(cxl_shm_ring_close(NULL, 99999, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_check(NULL, listener, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_check(NULL, 99999, NULL), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_trace(NULL, connection, NULL), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_trace(NULL, listener, &connection), CXL_SHM_E_INVALID);
    uint32_t has_let_go;
    CHECK_STATUS(cxl_shm_ring_has_let_go(NULL, listener, &has_let_go), CXL_SHM_E_INVALID);
    CHECK_STATUS(cxl_shm_ring_has_let_go(NULL, listener, NULL), CXL_SHM_E_INVALID);
}

/* The other end is alive; `same_host` is whether that can be seen, or is only what its host says. */
static void check_alive(cxl_ring_t connection, uint32_t same_host) {
    uint32_t seen = 7;
    CHECK_OK(cxl_shm_ring_check(NULL, connection, &seen));
    CHECK(seen == same_host);
    CHECK_OK(cxl_shm_ring_check(NULL, connection, NULL));
}

/* Looks until the other end is found to be gone, without receiving anything. */
static void check_until_gone(cxl_ring_t connection) {
    time_t since = time(NULL);
    uint32_t seen = 7;
    int status;
    while ((status = cxl_shm_ring_check(NULL, connection, &seen)) == CXL_SHM_OK)
        check_rest(since, "the end of a killed process");
    CHECK(status == CXL_SHM_E_PEER_GONE);
}

/* Whether the other end of a connection that may be closed has let go of it. */
static void check_let_go(cxl_ring_t trace, uint32_t wanted) {
    uint32_t has_let_go = 7;
    CHECK_OK(cxl_shm_ring_has_let_go(NULL, trace, &has_let_go));
    CHECK(has_let_go == wanted);
}

static cxl_ring_t accept_one(cxl_ring_t listener) {
    cxl_ring_t connection;
    CHECK_OK(cxl_shm_ring_accept(NULL, listener, PATIENCE_S * 1000, &connection));
    return connection;
}

/* `dies_here`: the caller that is killed is a process of this host. */
static void serve(uint32_t dies_here) {
    static uint8_t message[MOST];
    size_t len;
    cxl_ring_t listener;
    CHECK_STATUS(cxl_shm_ring_presence(NULL, "service"), CXL_SHM_E_PEER_GONE);
    CHECK_OK(cxl_shm_ring_listen(NULL, "service", &listener));
    CHECK_OK(cxl_shm_ring_presence(NULL, "service"));
    puts("listening");
    fflush(stdout);
    cxl_ring_t connection = accept_one(listener);
    check_refusals(listener, connection);
    check_alive(connection, 0);
    CHECK_OK(cxl_shm_ring_send(NULL, connection, NULL, 0, CXL_SHM_TIMEOUT_DEFAULT));
    for (uint64_t round = 0; round < ROUNDS; round++) {
        if (size_of(round) > 1) {
            /* It stays until there is room for it. */
            CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, message, 1, &len, CXL_SHM_TIMEOUT_DEFAULT), CXL_SHM_E_TOO_LARGE);
            CHECK(len == size_of(round));
        }
        CHECK_OK(cxl_shm_ring_recv(NULL, connection, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT));
        check_filled(message, len, round, 0);
        for (size_t i = 0; i < len; i++)
            message[i] ^= 0x5a;
        CHECK_OK(cxl_shm_ring_send(NULL, connection, message, len, CXL_SHM_TIMEOUT_DEFAULT));
    }
    CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT), CXL_SHM_E_PEER_CLOSED);
    CHECK_OK(cxl_shm_ring_close(NULL, connection, 0));
    CHECK_STATUS(cxl_shm_ring_close(NULL, connection, 0), CXL_SHM_E_CLOSED);
    CHECK_STATUS(cxl_shm_ring_check(NULL, connection, NULL), CXL_SHM_E_CLOSED);
    puts("closed");
    fflush(stdout);

    connection = accept_one(listener);
    CHECK_OK(cxl_shm_ring_recv(NULL, connection, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT));
    check_filled(message, len, 1, 0);
    check_alive(connection, dies_here);
    cxl_ring_t trace;
    CHECK_OK(cxl_shm_ring_trace(NULL, connection, &trace));
    check_let_go(trace, 0);
    puts("waiting");
    fflush(stdout);
    check_until_gone(connection);
    CHECK_STATUS(cxl_shm_ring_recv(NULL, connection, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT), CXL_SHM_E_PEER_GONE);
    CHECK_OK(cxl_shm_ring_close(NULL, connection, 0));
    check_let_go(trace, 1);
    CHECK_STATUS(cxl_shm_ring_check(NULL, trace, NULL), CXL_SHM_E_INVALID);
    CHECK_OK(cxl_shm_ring_close(NULL, trace, 0));
    CHECK_STATUS(cxl_shm_ring_trace(NULL, connection, &trace), CXL_SHM_E_CLOSED);
    CHECK_OK(cxl_shm_ring_close(NULL, listener, 0));
    CHECK_STATUS(cxl_shm_ring_connect(NULL, "service", 0, &connection), CXL_SHM_E_NOT_FOUND);
    CHECK_STATUS(cxl_shm_ring_presence(NULL, "service"), CXL_SHM_E_PEER_GONE);
}

/* Listens until it is killed. */
static void listen_until_killed(void) {
    cxl_ring_t listener;
    CHECK_OK(cxl_shm_ring_listen(NULL, "service", &listener));
    puts("listening");
    fflush(stdout);
    getchar();
    CHECK(!"killed before");
}

/* Looks at a listener that lives, and until it is found to be there no more: `end` is what is said of it then. */
static void look(int end) {
    time_t since = time(NULL);
    int status;
    CHECK_OK(cxl_shm_ring_presence(NULL, "service"));
    puts("seen");
    fflush(stdout);
    while ((status = cxl_shm_ring_presence(NULL, "service")) == CXL_SHM_OK)
        check_rest(since, "the end of the listener");
    CHECK(status == end);
    /* A name that is bound to something else says nothing of a listener. */
    uint64_t* object = NULL;
    CHECK_OK(cxl_shm_alloc(NULL, 4096, 0, (void**)&object));
    CHECK_OK(cxl_shm_put("object", object));
    CHECK_STATUS(cxl_shm_ring_presence(NULL, "object"), CXL_SHM_E_TIMEOUT);
    CHECK_OK(cxl_shm_destroy("object"));
    CHECK_OK(cxl_shm_free(object));
}

static cxl_ring_t connect_one(void) {
    cxl_ring_t connection;
    time_t since = time(NULL);
    int status;
    while ((status = cxl_shm_ring_connect(NULL, "service", CXL_SHM_TIMEOUT_DEFAULT, &connection)) == CXL_SHM_E_NOT_FOUND)
        check_rest(since, "the listener");
    CHECK(status == CXL_SHM_OK);
    CHECK_OK(cxl_shm_ring_presence(NULL, "service"));
    return connection;
}

static cxl_ring_t shared;

/* Sends while the main thread receives. */
static void* send_all(void* unused) {
    static uint8_t message[MOST];
    (void)unused;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fill(message, round);
        CHECK_OK(cxl_shm_ring_send(NULL, shared, message, size_of(round), CXL_SHM_TIMEOUT_DEFAULT));
    }
    return NULL;
}

static void call(void) {
    static uint8_t message[MOST];
    size_t len = 1;
    pthread_t sender;
    shared = connect_one();
    CHECK_OK(cxl_shm_ring_recv(NULL, shared, NULL, 0, &len, CXL_SHM_TIMEOUT_DEFAULT));
    CHECK(len == 0);
    /* The other end waits meanwhile, longer than it would for a peer that is gone: a process is heard without any call of its own. */
    struct timespec away = {.tv_sec = 5 * SUSPECT_MS / 2000, .tv_nsec = 5 * SUSPECT_MS / 2 % 1000 * 1000000};
    CHECK(nanosleep(&away, NULL) == 0);
    CHECK(pthread_create(&sender, NULL, send_all, NULL) == 0);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        CHECK_OK(cxl_shm_ring_recv(NULL, shared, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT));
        check_filled(message, len, round, 0x5a);
    }
    CHECK(pthread_join(sender, NULL) == 0);
    CHECK_OK(cxl_shm_ring_close(NULL, shared, CXL_SHM_TIMEOUT_DEFAULT));
}

static void die(void) {
    static uint8_t message[MOST];
    size_t len;
    cxl_ring_t connection = connect_one();
    fill(message, 1);
    CHECK_OK(cxl_shm_ring_send(NULL, connection, message, size_of(1), CXL_SHM_TIMEOUT_DEFAULT));
    cxl_shm_ring_recv(NULL, connection, message, sizeof message, &len, CXL_SHM_TIMEOUT_DEFAULT);
    CHECK(!"killed before");
}

int main(int argc, char** argv) {
    CHECK(argc == 3);
    int serves_own = strcmp(argv[1], "serve-own") == 0;
    int serves = serves_own || strcmp(argv[1], "serve") == 0;
    int listens = strcmp(argv[1], "listens") == 0;
    cxl_shm_options_t options = {.struct_size = sizeof options,
                                 .timeout_ms = PATIENCE_S * 1000,
                                 .join_timeout_ms = 30000,
                                 .suspect_ms = SUSPECT_MS,
                                 .heartbeat_ms = 20};
    if (serves || listens) {
        cxl_shm_format_options_t format = {.struct_size = sizeof format, .slots = 4, .locks = 32, .objects = 32, .chunk_bytes = 256 << 10};
        CHECK_OK(cxl_shm_format(argv[2], &format));
    }
    check_open(argv[2], &options);
    if (serves)
        serve((uint32_t)serves_own);
    else if (listens)
        listen_until_killed();
    else if (strcmp(argv[1], "looks-here") == 0)
        look(CXL_SHM_E_PEER_GONE);
    else if (strcmp(argv[1], "looks-elsewhere") == 0)
        look(CXL_SHM_E_TIMEOUT);
    else if (strcmp(argv[1], "call") == 0)
        call();
    else
        die();
    CHECK_OK(cxl_shm_fini());
    printf("%s: ok\n", argv[1]);
    return 0;
}
