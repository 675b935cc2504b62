// SPDX-License-Identifier: Apache-2.0
//
// A process as another one of the same kernel can find it, to prove that it has ended.
#pragma once

#include <cstdint>

namespace kvbm_cxl {

/// Which process of which kernel. All zero where one of the numbers cannot be read: nothing is proven of it then.
struct ProcessMark {
    uint64_t boot = 0;         // of the kernel's boot id
    uint64_t namespace_id = 0; // of its PID namespace
    uint64_t start_ticks = 0;  // when it began, in clock ticks since the boot
    uint32_t pid = 0;          // in that namespace

    bool operator==(const ProcessMark&) const = default;
};

/// This process.
ProcessMark own_process();

/// Whether a process has certainly ended: it is of this kernel and PID namespace, and its number is free, another process's, or that of one
/// that was killed and not yet waited for. False if it runs or if its state is unknown.
bool has_process_ended(const ProcessMark& process);

} // namespace kvbm_cxl
