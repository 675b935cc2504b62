// SPDX-License-Identifier: Apache-2.0
//
// What kernels use of CUDA, on a CPU: threads of a launch as coroutines that take turns at random, or in half of the launches by random
// priorities that change now and then, so that one may come late by as much as there is to do; and memory that shows as little as the
// programming guide promises. A store is seen by no other thread before a fence of its own: in memory of the device after any, in memory of
// the host after one for the system. What is not fenced by the end of a thread is lost. A load sees memory of the device as it was at the
// last fence of its thread.
//
// Addresses are numbers to these functions; who runs a kernel gives the function that finds the memory behind one.
#ifndef SIMT_H
#define SIMT_H

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

namespace simt {

constexpr unsigned warp_lanes = 32;
constexpr size_t stack_bytes = 64 << 10;
// Warps that run at a time; the others wait for their turn, as where a GPU has no room for them.
constexpr unsigned warps_at_a_time = 4;

// The memory behind an address, or null where the kernel must not touch it. `is_device` tells where it lies.
using Reach = void* (*)(uint64_t address, size_t len_bytes, int is_write, int* is_device);

struct Dimensions {
    unsigned x;
};

struct Pending {
    uint64_t address;
    size_t len_bytes;
    unsigned char bytes[16];
};

// What lay at an address of the device before a store.
struct Before {
    uint64_t number;
    unsigned char bytes[16];
};

struct Warp;

struct Lane {
    ucontext_t context;
    Warp* warp;
    unsigned index, word = 0;
    int barrier = 0; // the kind that it waits at; 0 = it runs
    bool has_ended = false;
    uint64_t seen = 0, priority = 0;
    std::vector<Pending> pending;
    std::unique_ptr<unsigned char[]> stack;
};

struct Warp {
    unsigned block, first_thread;
    std::vector<Lane> lanes;
    unsigned words[warp_lanes];
};

struct Run {
    Reach reach;
    uint64_t random, stores = 0, loads = 0;
    std::map<uint64_t, std::vector<Before>> history;
    Dimensions grid, block;
    void (*kernel)(const void*);
    const void* parameters;
    ucontext_t scheduler;
    Lane* current = nullptr;
    const char* wrong = nullptr;
};

// A kernel that reads a table which is not whole may count to any number.
constexpr uint64_t most_loads = UINT64_C(1) << 26;

// Not `inline`: each library that this is in has its own.
static Run* run;

inline void note(const char* what) {
    if (!run->wrong)
        run->wrong = what;
}

inline uint64_t next_random() {
    run->random ^= run->random << 13;
    run->random ^= run->random >> 7;
    run->random ^= run->random << 17;
    return run->random;
}

inline void yield() {
    swapcontext(&run->current->context, &run->scheduler);
}

inline Dimensions thread_index() {
    return {run->current->warp->first_thread + run->current->index};
}

inline void load(void* to, uint64_t address, size_t len_bytes) {
    int is_device = 0;
    if (++run->loads > most_loads) {
        note("a kernel that does not end");
        yield(); // for good: the launch gives up
    }
    if (address % len_bytes)
        return note("a load that is not aligned");
    const void* from = run->reach(address, len_bytes, 0, &is_device);
    if (!from)
        return note("a load from memory that is not the kernel's");
    memcpy(to, from, len_bytes);
    auto found = run->history.find(address & ~UINT64_C(15));
    if (!is_device || found == run->history.end())
        return;
    for (const Before& before : found->second) {
        if (before.number > run->current->seen) {
            memcpy(to, before.bytes + address % 16, len_bytes);
            return;
        }
    }
}

inline void store(uint64_t address, const void* from, size_t len_bytes) {
    if (address % len_bytes)
        return note("a store that is not aligned");
    Pending pending{address, len_bytes, {}};
    memcpy(pending.bytes, from, len_bytes);
    run->current->pending.push_back(pending);
}

inline void apply(const Pending& one, void* to, bool is_device) {
    if (is_device) {
        int ignored = 0;
        uint64_t start = one.address & ~UINT64_C(15);
        const void* line = run->reach(start, 16, 0, &ignored);
        Before before{++run->stores, {}};
        if (line)
            memcpy(before.bytes, line, 16);
        run->history[start].push_back(before);
    }
    memcpy(to, one.bytes, one.len_bytes);
}

inline void fence(bool is_for_system) {
    yield();
    Lane* lane = run->current;
    std::vector<Pending> kept;
    for (const Pending& one : lane->pending) {
        int is_device = 0;
        void* to = run->reach(one.address, one.len_bytes, 1, &is_device);
        if (!to)
            note("a store to memory that is not the kernel's");
        else if (is_device || is_for_system)
            apply(one, to, is_device);
        else
            kept.push_back(one);
    }
    lane->pending.swap(kept);
    lane->seen = run->stores;
}

// Waits until all lanes of the warp are at the same place, and gives what each of them brought.
inline unsigned exchanged(int kind, unsigned mask, unsigned word, unsigned other) {
    if (mask != 0xffffffffu)
        note("a mask without all lanes");
    run->current->word = word;
    run->current->barrier = kind;
    yield();
    return run->current->warp->words[other % warp_lanes];
}

inline void run_lane() {
    run->kernel(run->parameters);
    run->current->has_ended = true;
    yield();
}

inline void begin(Warp& warp) {
    warp.lanes = std::vector<Lane>(warp_lanes);
    for (unsigned index = 0; index < warp_lanes; index++) {
        Lane& lane = warp.lanes[index];
        lane.warp = &warp;
        lane.index = index;
        lane.seen = run->stores;
        lane.priority = next_random();
        lane.stack.reset(new unsigned char[stack_bytes]);
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = stack_bytes;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, run_lane, 0);
    }
}

// All lanes of a warp wait, or some have ended: those that wait go on.
inline bool pass_barrier(Warp& warp) {
    unsigned ended = 0;
    int kind = 0;
    for (Lane& lane : warp.lanes) {
        ended += lane.has_ended;
        if (lane.barrier && kind && kind != lane.barrier)
            note("lanes that wait for each other at different places");
        kind = lane.barrier ? lane.barrier : kind;
    }
    if (ended == warp_lanes)
        return false;
    if (ended)
        note("lanes that wait for one that has ended");
    for (Lane& lane : warp.lanes) {
        warp.words[lane.index] = lane.word;
        lane.barrier = 0;
    }
    return true;
}

// The lane of a warp that may go on first, or null.
inline Lane* ready(Warp& warp, bool by_priority) {
    Lane* found = nullptr;
    unsigned first = next_random() % warp_lanes;
    for (unsigned count = 0; count < warp_lanes; count++) {
        Lane& lane = warp.lanes[(first + count) % warp_lanes];
        if (lane.has_ended || lane.barrier || (found && found->priority > lane.priority))
            continue;
        found = &lane;
        if (!by_priority)
            break;
    }
    return found;
}

using Warps = std::vector<std::unique_ptr<Warp>>;

// Lets one lane go on. The number of the warp all of whose lanes have ended, or that of warps.
inline size_t step(Warps& active, bool by_priority) {
    Lane* chosen = nullptr;
    size_t first = next_random() % active.size();
    for (size_t count = 0; count < (by_priority ? active.size() : 1); count++) {
        size_t index = (first + count) % active.size();
        Lane* lane = ready(*active[index], by_priority);
        if (!lane) {
            // To pass costs no time.
            if (!pass_barrier(*active[index]))
                return index;
            lane = ready(*active[index], by_priority);
        }
        if (!chosen || chosen->priority < lane->priority)
            chosen = lane;
    }
    if (next_random() % 16 == 0)
        chosen->priority = next_random();
    run->current = chosen;
    swapcontext(&run->scheduler, &chosen->context);
    return active.size();
}

// Runs a launch to its end. What it did wrong, or null.
inline const char* launch(void (*kernel)(const void*), const void* parameters, unsigned grid, unsigned block, uint64_t seed, Reach reach) {
    Run this_run{};
    this_run.reach = reach;
    this_run.random = (seed * 2 + 1) * UINT64_C(0x9e3779b97f4a7c15);
    this_run.grid = {grid};
    this_run.block = {block};
    this_run.kernel = kernel;
    this_run.parameters = parameters;
    run = &this_run;
    Warps waiting, active;
    bool by_priority = next_random() >> 40 & 1;
    for (unsigned index = 0; index < grid * (block / warp_lanes); index++) {
        waiting.emplace_back(new Warp{});
        waiting.back()->block = index / (block / warp_lanes);
        waiting.back()->first_thread = index % (block / warp_lanes) * warp_lanes;
    }
    while (!waiting.empty() || !active.empty()) {
        while (!waiting.empty() && active.size() < warps_at_a_time) {
            std::swap(waiting[next_random() % waiting.size()], waiting.back());
            active.push_back(std::move(waiting.back()));
            waiting.pop_back();
            begin(*active.back());
        }
        size_t ended = step(active, by_priority);
        if (run->loads > most_loads)
            break;
        if (ended < active.size()) {
            std::swap(active[ended], active.back());
            active.pop_back();
        }
    }
    run = nullptr;
    return this_run.wrong;
}

template <typename T> T loaded(const T* address) {
    T value{};
    load(&value, (uint64_t)(uintptr_t)address, sizeof value);
    return value;
}

template <typename T> void stored(T* address, T value) {
    store((uint64_t)(uintptr_t)address, &value, sizeof value);
}

} // namespace simt

#define threadIdx (simt::thread_index())
#define blockIdx (simt::Dimensions{simt::run->current->warp->block})
#define blockDim (simt::run->block)
#define gridDim (simt::run->grid)

template <typename T> T __ldcv(const T* address) {
    return simt::loaded(address);
}

template <typename T> T __ldcg(const T* address) {
    return simt::loaded(address);
}

template <typename T> void __stwt(T* address, T value) {
    simt::stored(address, value);
}

template <typename T> void __stcg(T* address, T value) {
    simt::stored(address, value);
}

inline void __threadfence() {
    simt::fence(false);
}

inline void __threadfence_system() {
    simt::fence(true);
}

inline void __syncwarp() {
    simt::exchanged(1, 0xffffffffu, 0, 0);
}

inline unsigned __shfl_sync(unsigned mask, unsigned word, unsigned lane) {
    return simt::exchanged(2, mask, word, lane);
}

inline unsigned __shfl_xor_sync(unsigned mask, unsigned word, unsigned distance) {
    return simt::exchanged(3, mask, word, simt::run->current->index ^ distance);
}

inline unsigned atomicAdd(unsigned* address, unsigned value) {
    simt::yield();
    int is_device = 0;
    auto* word = (unsigned*)simt::run->reach((uint64_t)(uintptr_t)address, sizeof value, 1, &is_device);
    if (!word) {
        simt::note("a count in memory that is not the kernel's");
        return 0;
    }
    unsigned before = *word;
    *word += value;
    return before;
}

inline unsigned long long __umul64hi(unsigned long long one, unsigned long long other) {
    return (unsigned long long)((unsigned __int128)one * other >> 64);
}

#endif // SIMT_H
