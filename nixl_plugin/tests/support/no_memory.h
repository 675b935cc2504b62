// SPDX-License-Identifier: Apache-2.0
//
// Memory that runs out: for one file of a program.
#pragma once

#include <cstdlib>
#include <new>

/// Allocations of this thread until one fails; none does while it is negative.
inline thread_local long allocations_left = -1;

// Not inlined: where the compiler sees only one of the two, it takes them for a mismatch.
[[gnu::noinline]] void* operator new(size_t len_bytes) {
    if (allocations_left >= 0 && allocations_left-- == 0)
        throw std::bad_alloc();
    if (void* memory = std::malloc(len_bytes ? len_bytes : 1))
        return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
    std::free(memory);
}
