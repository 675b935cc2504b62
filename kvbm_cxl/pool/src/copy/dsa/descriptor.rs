// SPDX-License-Identifier: Apache-2.0
//! The descriptors for the accelerator and its completion records, byte for byte (Intel DSA architecture specification: descriptor, memory
//! move and batch operations, completion record).

use bytemuck::{Pod, Zeroable};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};

/// A descriptor as the device reads it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Descriptor {
    /// Address space and privilege: filled in by the CPU where the queue is shared, zero otherwise.
    pub pasid: u32,
    /// Flags in bits 0 to 23, operation in bits 24 to 31.
    pub flags_and_operation: u32,
    /// Address of the completion record.
    pub completion: u64,
    /// Source of a move, or the list of a batch.
    pub source: u64,
    /// Destination of a move.
    pub destination: u64,
    /// Bytes of a move, or descriptors of a batch.
    pub size: u32,
    /// Not used: completion is polled for.
    pub interrupt: u16,
    /// Zero.
    pub reserved: u16,
    /// Zero for the operations used here.
    pub operation_specific: [u64; 3],
}

const _: () = {
    assert!(size_of::<Descriptor>() == 64);
    assert!(offset_of!(Descriptor, flags_and_operation) == 4);
    assert!(offset_of!(Descriptor, completion) == 8);
    assert!(offset_of!(Descriptor, source) == 16);
    assert!(offset_of!(Descriptor, destination) == 24);
    assert!(offset_of!(Descriptor, size) == 32);
    assert!(offset_of!(Descriptor, interrupt) == 36);
    assert!(offset_of!(Descriptor, operation_specific) == 40);
    assert!(size_of::<Completion>() == 32 && align_of::<Completion>() == 32);
};

/// Execution of a list of descriptors.
const BATCH: u32 = 1;
/// Copy of memory.
const MEMORY_MOVE: u32 = 3;

/// The device waits for the system to bring in a page that is not there, instead of giving up.
const BLOCK_ON_FAULT: u32 = 1 << 1;
/// The completion address means something.
const COMPLETION_VALID: u32 = 1 << 2;
/// The completion record is written also when all went well.
const REQUEST_COMPLETION: u32 = 1 << 3;
/// Writes are to stay in the CPU's cache. Without it they are to go to the memory, which is a hint only.
const CACHE_CONTROL: u32 = 1 << 8;

/// Where a move writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The memory, past the caches as far as the device follows the hint.
    Memory,
    /// The CPU's cache.
    Cache,
}

impl Descriptor {
    pub(super) fn memory_move(source: usize, destination: usize, len_bytes: u32, target: Target, block_on_fault: bool) -> Self {
        let mut flags = COMPLETION_VALID | REQUEST_COMPLETION;
        if target == Target::Cache {
            flags |= CACHE_CONTROL;
        }
        if block_on_fault {
            flags |= BLOCK_ON_FAULT;
        }
        Descriptor {
            flags_and_operation: MEMORY_MOVE << 24 | flags,
            source: source as u64,
            destination: destination as u64,
            size: len_bytes,
            ..Descriptor::zeroed()
        }
    }

    /// The descriptors of a list that stays where it is until the batch is complete. Two at least, as the device demands.
    pub(super) fn batch(list: &[Descriptor]) -> Self {
        Descriptor {
            flags_and_operation: BATCH << 24 | COMPLETION_VALID | REQUEST_COMPLETION,
            source: list.as_ptr().expose_provenance() as u64,
            size: list.len() as u32,
            ..Descriptor::zeroed()
        }
    }

    pub(super) fn answered_at(self, completion: &Completion) -> Self {
        Descriptor { completion: std::ptr::from_ref(completion).expose_provenance() as u64, ..self }
    }

    /// Operation code.
    pub fn operation(&self) -> u32 {
        self.flags_and_operation >> 24
    }
}

/// A completion record, which the device writes.
#[repr(C, align(32))]
#[derive(Debug, Default)]
pub struct Completion([AtomicU64; 4]);

/// What a completion record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing yet.
    Pending,
    /// Done, all of it.
    Done,
    /// Stopped at a page that could not be mapped.
    PageFault {
        /// The address.
        address: u64,
        /// Whether it was to be written.
        is_write: bool,
        /// Bytes done before.
        done_bytes: u32,
    },
    /// Refused or failed.
    Failed {
        /// Status code.
        status: u8,
    },
}

/// Status codes that mean something here; every other one is a failure.
const SUCCESS: u8 = 1;
const PAGE_FAULT: u8 = 3;
/// Bit 7 tells writes from reads.
const STATUS_WRITE: u8 = 0x80;

impl Completion {
    /// What the device has written so far.
    pub fn answer(&self) -> Answer {
        let [first, address, ..] = &self.0;
        let word = first.load(Ordering::Acquire);
        let status = word as u8;
        match status & !STATUS_WRITE {
            0 => Answer::Pending,
            SUCCESS => Answer::Done,
            PAGE_FAULT => Answer::PageFault {
                address: address.load(Ordering::Relaxed),
                is_write: status & STATUS_WRITE != 0,
                done_bytes: (word >> 32) as u32,
            },
            status => Answer::Failed { status },
        }
    }
}

#[cfg(test)]
mod tests;
