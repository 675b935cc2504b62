// SPDX-License-Identifier: Apache-2.0
//! Handing a 64-byte descriptor to a device: neither flush nor fence, but an instruction.

use super::{Line, arch};
use std::ptr::NonNull;

/// How a device takes descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submission {
    /// Enqueued, and refused when there is no room (x86-64: ENQCMD).
    Enqueue,
    /// Stored; the caller knows that there is room (x86-64: MOVDIR64B).
    DirectStore,
}

impl Submission {
    /// Hands `descriptor` to the portal. Earlier stores are visible to the device. False when the device refused it.
    ///
    /// # Safety
    /// `portal` is a mapped portal of such a device, aligned to 64, and the CPU has the instruction.
    pub unsafe fn submit(self, portal: NonNull<u8>, descriptor: &Line) -> bool {
        // Both instructions pass earlier stores, among them those that made the lists which the descriptor names.
        arch::fence_stores();
        // SAFETY: what the caller promises.
        unsafe { arch::submit(self, portal.as_ptr(), descriptor) }
    }
}
