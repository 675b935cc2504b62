// SPDX-License-Identifier: Apache-2.0
// Calls between two processes by active messages of UCX: the peer that `cxl-bench rpc --ucx` measures its calls against.
//
//     ucx-calls TLS          TLS as UCX_TLS: shm, tcp
//
// The caller is this process, the one that answers its child; each has a worker, an endpoint and a CPU of its own, and looks for messages
// without resting, but for the child between two batches. Requests and responses are the bench's: 64 bytes, every byte of a response
// another one than that of its request, and compared. Batches are asked for on stdin, one a line, and each is answered by a line:
//
//     calls DEPTH COUNT      COUNT calls, DEPTH under way at a time: `ns PER_CALL LATENCY...`, or `error TEXT`
//     quit
//
// The first line printed is `ready DESCRIPTION`.

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { MESSAGE_BYTES = 64, MAX_DEPTH = 128, MAX_CALLS = 4096, ADDRESS_BYTES = 4096, TIMEOUT_S = 30, IDLE_LOOKS = 1024 };
// Active messages: a call, its answer, and the one after which the child rests until the pipe tells it of the next batch.
enum { REQUEST, RESPONSE, REST };

typedef struct {
    uint8_t bytes[MESSAGE_BYTES];
} message_t;

// One end. Messages on their way lie in `out`; with at most MAX_DEPTH calls under way none is written over before it has arrived.
typedef struct {
    ucp_worker_h worker;
    ucp_ep_h endpoint;
    int pipe;
    int is_resting;
    message_t out[2 * MAX_DEPTH];
    uint64_t begun_ns[MAX_DEPTH];
    uint64_t latency_ns[MAX_CALLS];
    uint64_t first, begun, done;
    unsigned depth;
    const char* wrong;
} end_t;

static end_t end;

static void check(ucs_status_t status, const char* what) {
    if (status != UCS_OK) {
        printf("error %s: %s\n", what, ucs_status_string(status));
        exit(1);
    }
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

// A CPU of its own among those that the process may use, as the bench gives its two processes.
static void pin(int number) {
    cpu_set_t allowed, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed) && number-- == 0) {
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof(one), &one);
            return;
        }
    }
}

// Request `number`, of which no word is that of another request.
static message_t request(uint64_t number) {
    uint64_t words[MESSAGE_BYTES / 8];
    for (uint64_t word = 0; word < MESSAGE_BYTES / 8; word++)
        words[word] = (number * 8 + word + 1) * 0x9e3779b97f4a7c15u;
    words[1] = number;
    message_t made;
    memcpy(made.bytes, words, sizeof(made.bytes));
    return made;
}

static message_t response(const uint8_t* bytes) {
    message_t made;
    for (int index = 0; index < MESSAGE_BYTES; index++)
        made.bytes[index] = (uint8_t)~bytes[index];
    return made;
}

static void send_message(unsigned id, const message_t* message) {
    ucp_request_param_t parameters = {.op_attr_mask = 0};
    void* sent = ucp_am_send_nbx(end.endpoint, id, NULL, 0, message->bytes, MESSAGE_BYTES, &parameters);
    if (UCS_PTR_IS_ERR(sent))
        end.wrong = ucs_status_string(UCS_PTR_STATUS(sent));
    // What is under way is given back when it is done.
    else if (sent != NULL)
        ucp_request_free(sent);
}

static ucs_status_t on_request(void* argument, const void* header, size_t header_bytes, void* data, size_t len_bytes,
                               const ucp_am_recv_param_t* parameters) {
    (void)argument, (void)header, (void)header_bytes;
    if (len_bytes != MESSAGE_BYTES || (parameters->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        end.wrong = "a request of another length";
        return UCS_OK;
    }
    message_t* out = &end.out[end.done++ % (2 * MAX_DEPTH)];
    *out = response(data);
    send_message(RESPONSE, out);
    return UCS_OK;
}

// UCX delivers the messages of an endpoint in order, so the next one is the response to the oldest call.
static ucs_status_t on_response(void* argument, const void* header, size_t header_bytes, void* data, size_t len_bytes,
                                const ucp_am_recv_param_t* parameters) {
    (void)argument, (void)header, (void)header_bytes, (void)parameters;
    message_t asked = request(end.first + end.done), expected = response(asked.bytes);
    if (len_bytes != MESSAGE_BYTES || memcmp(data, expected.bytes, MESSAGE_BYTES) != 0)
        end.wrong = "a response is not that of its request";
    end.latency_ns[end.done] = now_ns() - end.begun_ns[end.done % MAX_DEPTH];
    end.done++;
    return UCS_OK;
}

static ucs_status_t on_rest(void* argument, const void* header, size_t header_bytes, void* data, size_t len_bytes,
                            const ucp_am_recv_param_t* parameters) {
    (void)argument, (void)header, (void)header_bytes, (void)data, (void)len_bytes, (void)parameters;
    end.is_resting = 1;
    return UCS_OK;
}

static void handle(unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t parameters = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB, .id = id, .cb = callback};
    check(ucp_worker_set_am_recv_handler(end.worker, &parameters), "set a handler");
}

static void transfer(int is_read, void* bytes, size_t len_bytes) {
    for (size_t done = 0; done < len_bytes;) {
        ssize_t moved =
            is_read ? read(end.pipe, (char*)bytes + done, len_bytes - done) : write(end.pipe, (const char*)bytes + done, len_bytes - done);
        if (moved <= 0)
            exit(is_read && moved == 0 ? 0 : 1); // The other process has ended.
        done += (size_t)moved;
    }
}

// A worker, and an endpoint to that of the process at the other end of the pipe.
static void connect_ends(void) {
    ucp_params_t parameters = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_AM};
    ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_context_h context;
    ucp_config_t* config;
    check(ucp_config_read(NULL, NULL, &config), "read UCX's settings");
    check(ucp_init(&parameters, config, &context), "start UCX");
    ucp_config_release(config);
    check(ucp_worker_create(context, &single, &end.worker), "make a worker");
    handle(REQUEST, on_request);
    handle(RESPONSE, on_response);
    handle(REST, on_rest);

    ucp_address_t* address;
    size_t len_bytes;
    uint8_t other[ADDRESS_BYTES];
    check(ucp_worker_get_address(end.worker, &address, &len_bytes), "tell the worker's address");
    transfer(0, &len_bytes, sizeof(len_bytes));
    transfer(0, address, len_bytes);
    transfer(1, &len_bytes, sizeof(len_bytes));
    if (len_bytes > sizeof(other))
        exit(1);
    transfer(1, other, len_bytes);
    ucp_ep_params_t remote = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t*)other};
    check(ucp_ep_create(end.worker, &remote, &end.endpoint), "make an endpoint");
}

// Looks for messages, and gives the CPU away now and then, as the bench does where nothing comes.
static void progress(unsigned* idle) {
    *idle = ucp_worker_progress(end.worker) ? 0 : *idle + 1;
    if (*idle % 64 == 63)
        sched_yield();
}

static void answer_calls(void) {
    for (unsigned idle = 0; end.wrong == NULL;) {
        char turn;
        transfer(1, &turn, 1);
        for (end.is_resting = 0; !end.is_resting && end.wrong == NULL;)
            progress(&idle);
    }
    exit(1);
}

static void batch(unsigned depth, uint64_t calls) {
    char turn = 1;
    unsigned idle = 0;
    transfer(0, &turn, 1);
    end.begun = end.done = 0;
    uint64_t start_ns = now_ns();
    while (end.done < calls && end.wrong == NULL) {
        for (; end.begun < calls && end.begun - end.done < depth; end.begun++) {
            message_t* out = &end.out[end.begun % (2 * MAX_DEPTH)];
            *out = request(end.first + end.begun);
            end.begun_ns[end.begun % MAX_DEPTH] = now_ns();
            send_message(REQUEST, out);
        }
        progress(&idle);
        if (idle % 65536 == 65535 && now_ns() - start_ns > TIMEOUT_S * 1000000000ull)
            end.wrong = "no response";
    }
    uint64_t taken_ns = now_ns() - start_ns;
    end.first += calls;
    send_message(REST, &end.out[0]);
    ucp_worker_progress(end.worker);
    if (end.wrong != NULL) {
        printf("error %s\n", end.wrong);
        exit(1);
    }
    printf("ns %.1f", (double)taken_ns / (double)calls);
    for (uint64_t call = 0; call < calls; call++)
        printf(" %llu", (unsigned long long)end.latency_ns[call]);
    printf("\n");
}

int main(int count, char** arguments) {
    int pipes[2];
    if (count != 2) {
        fprintf(stderr, "usage: ucx-calls shm|tcp\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("UCX_TLS", arguments[1], 1);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pipes) != 0)
        return 1;
    int child = fork();
    if (child < 0)
        return 1;
    end.pipe = pipes[child == 0];
    close(pipes[child != 0]);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, 9);
        pin(1);
        connect_ends();
        answer_calls();
    }
    pin(0);
    connect_ends();
    printf("ready UCX %s, active messages, UCX_TLS=%s\n", ucp_get_version_string(), arguments[1]);
    char line[128];
    while (fgets(line, sizeof(line), stdin) != NULL && strcmp(line, "quit\n") != 0) {
        unsigned depth, calls;
        if (sscanf(line, "calls %u %u", &depth, &calls) != 2 || depth < 1 || depth > MAX_DEPTH || calls < 1 || calls > MAX_CALLS) {
            printf("error %.*s is no request\n", (int)strcspn(line, "\n"), line);
            continue;
        }
        batch(depth, calls);
    }
    return 0;
}
