// SPDX-License-Identifier: Apache-2.0
//! What became of every block that was asked for. KVBM's interface says `Ok` or `Err` for each; here is why.

use cxl_pool::Error;
use cxl_pool::cache::tier::Answer;
use cxl_pool::metrics::{MissReason, RefusalReason};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

cxl_pool::named_enum!(
    /// The kind of a request.
    Operation {
        /// Whether a block is there.
        Has = "has",
        /// G2 to the pool.
        Put = "put",
        /// The pool to G2.
        Get = "get",
    }
);

cxl_pool::named_enum!(
    /// What became of one block.
    Outcome {
        /// It was there, was stored, or was copied and verified.
        Done = "done",
        /// Put: the pool has it already.
        Exists = "exists",
        /// Has, get: the pool does not have it, or not any more.
        Absent = "absent",
        /// Get: the host that stored it is fenced.
        OwnerGone = "owner_gone",
        /// Get: it was evicted during the copy, which was discarded.
        Changed = "changed",
        /// Get: checksum or descriptor do not verify.
        Corrupt = "corrupt",
        /// The block in the pool has another length.
        Length = "length",
        /// Get: this host has too many pins.
        PinsFull = "pins_full",
        /// Put: another process is writing the block, or it is about to be evicted.
        Busy = "busy",
        /// Put: no cell is free and none can be evicted.
        NoRoom = "no_room",
        /// Put: the hint table has no place for the key.
        NoHint = "no_hint",
        /// Put: the namespace has used up its quota.
        Quota = "quota",
        /// This host is fenced. It joins again by itself.
        Fenced = "fenced",
        /// The pool's memory failed, or the pool was replaced.
        Device = "device_error",
        /// The two lists of the call are not of one length, or it came from outside a Tokio runtime.
        Request = "request",
        /// The hash is of another encoding than `keys::ENCODING`.
        Key = "key",
        /// The blocks of the layout have other bytes than those of this tier.
        Layout = "layout",
        /// The layout has no block of this number.
        BlockId = "block_id",
        /// The layout lies on a GPU, on disk, or in the pool itself.
        Memory = "memory",
        /// Get: the call names the block of the layout a second time.
        Twice = "twice",
        /// The caller dropped the call before it came to this block.
        Dropped = "dropped",
    }
);

impl Outcome {
    /// Whether KVBM gets `Ok`.
    pub fn is_ok(self) -> bool {
        matches!(self, Outcome::Done | Outcome::Exists)
    }

    /// Of what the pool says.
    pub(crate) fn of(answer: &Answer) -> Outcome {
        match answer {
            Answer::Done => Outcome::Done,
            Answer::Exists => Outcome::Exists,
            Answer::Absent => Outcome::Absent,
            Answer::Length => Outcome::Length,
            Answer::Twice => Outcome::Twice,
            Answer::Dropped => Outcome::Dropped,
            Answer::Refused(reason) => match reason {
                RefusalReason::PoolFull => Outcome::NoRoom,
                RefusalReason::TableFull => Outcome::NoHint,
                RefusalReason::Quota => Outcome::Quota,
                _ => Outcome::Busy,
            },
            Answer::Missed(reason) => match reason {
                MissReason::FencedOwner | MissReason::FencedDuring => Outcome::OwnerGone,
                MissReason::Changed => Outcome::Changed,
                MissReason::BadLine | MissReason::Checksum => Outcome::Corrupt,
                MissReason::Length => Outcome::Length,
                MissReason::PinsFull => Outcome::PinsFull,
                MissReason::HostFenced => Outcome::Fenced,
                MissReason::Device => Outcome::Device,
                _ => Outcome::Absent,
            },
            Answer::Failed(error) => match **error {
                Error::Fenced { .. } => Outcome::Fenced,
                Error::Full { .. } => Outcome::PinsFull,
                _ => Outcome::Device,
            },
        }
    }
}

/// How many blocks, by operation and outcome, since the tier was made.
#[derive(Default)]
pub struct Counts {
    cells: [[AtomicU64; Outcome::ALL.len()]; Operation::ALL.len()],
}

impl Counts {
    /// Blocks of an operation with this outcome.
    pub fn of(&self, operation: Operation, outcome: Outcome) -> u64 {
        self.cells[operation as usize][outcome as usize].load(Ordering::Relaxed)
    }

    /// Blocks of an operation with any outcome.
    pub fn all(&self, operation: Operation) -> u64 {
        Outcome::ALL.iter().map(|&outcome| self.of(operation, outcome)).sum()
    }

    pub(crate) fn count(&self, operation: Operation, outcomes: &[Outcome]) {
        for &outcome in outcomes {
            self.cells[operation as usize][outcome as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// As Prometheus reads them: `kvbm_cxl_tier_blocks_total{operation="put",outcome="done"} 16`.
    pub fn render(&self) -> String {
        let name = "kvbm_cxl_tier_blocks_total";
        let mut text = format!("# HELP {name} Blocks asked of the CXL tier, by what became of them.\n# TYPE {name} counter\n");
        for &operation in Operation::ALL {
            for &outcome in Outcome::ALL {
                let count = self.of(operation, outcome);
                if count > 0 {
                    // Writing to a `String` does not fail.
                    let _ = writeln!(text, "{name}{{operation=\"{}\",outcome=\"{}\"}} {count}", operation.name(), outcome.name());
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests;
