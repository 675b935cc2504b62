/* SPDX-License-Identifier: Apache-2.0
 *
 * naive_lock DEVICE OFFSET HOST HOSTS ROUNDS: a lock as one writes it for the cores of one machine, between hosts. It stands on an atomic
 * compare-exchange of a word that all hosts share, which memory behind CXL 2.0 does not give. Prints the counter that it should have
 * protected, how often another one was in the section as well, and whether it was never released again, as JSON. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define MAP_BYTES (2ul << 20) /* devdax maps in such units */
#define STUCK_S 10
#define START_S 120

/* Each on a line of its own; what a host says of itself is written by that host alone. */
struct shared {
    _Alignas(LINE) volatile uint32_t lock;
    _Alignas(LINE) volatile uint64_t counter;
    _Alignas(LINE) volatile uint64_t owner;
    struct {
        _Alignas(LINE) volatile uint64_t reached;
    } hosts[8];
};

static struct shared* shared;
static unsigned host, hosts;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void meet(uint64_t stage) {
    double since = now();
    shared->hosts[host].reached = stage;
    for (unsigned other = 0; other < hosts; other++)
        while (shared->hosts[other].reached < stage)
            if (now() - since > START_S) {
                fprintf(stderr, "host %u does not come to stage %lu\n", other, (unsigned long)stage);
                exit(1);
            }
}

/* 0 when no host releases it. */
static int acquire(void) {
    double since = now();
    for (uint64_t tries = 1;; tries++) {
        uint32_t open = 0;
        if (__atomic_compare_exchange_n((uint32_t*)&shared->lock, &open, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return 1;
        if (tries % 256 == 0 && now() - since > STUCK_S)
            return 0;
    }
}

int main(int argc, char** argv) {
    if (argc != 6)
        return 2;
    int device = open(argv[1], O_RDWR);
    off_t offset = strtoll(argv[2], NULL, 0);
    off_t begin = offset / (off_t)MAP_BYTES * (off_t)MAP_BYTES;
    host = (unsigned)atoi(argv[3]);
    hosts = (unsigned)atoi(argv[4]);
    uint64_t rounds = strtoull(argv[5], NULL, 0), in = 0, doubles = 0;
    char* memory = mmap(NULL, MAP_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, device, begin);
    if (device < 0 || memory == MAP_FAILED) {
        perror(argv[1]);
        return 1;
    }
    shared = (struct shared*)(memory + (offset - begin));

    meet(1);
    while (in < rounds && acquire()) {
        uint64_t before = shared->counter;
        shared->owner = host;
        for (volatile int spin = 0; spin < 20; spin++)
            ;
        doubles += shared->owner != host;
        shared->counter = before + 1;
        in++;
        __atomic_store_n((uint32_t*)&shared->lock, 0, __ATOMIC_SEQ_CST);
    }
    meet(2);
    printf("{\"counter\": %lu, \"in\": %lu, \"doubles\": %lu, \"stuck\": %s}\n", (unsigned long)shared->counter, (unsigned long)in,
           (unsigned long)doubles, in < rounds ? "true" : "false");
    return 0;
}
