// SPDX-License-Identifier: Apache-2.0
//! What became of every block that was asked for. KVBM's interface says `Ok` or `Err` for each; here is why.

use cxl_pool::Error;
use cxl_pool::cache::tier::Answer;
use cxl_pool::metrics::{MissReason, RefusalReason};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes an enumeration with a name for each variant.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$of])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// As metrics and logs name it.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }
        }
    };
}

named!(
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

named!(
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
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn counts_are_kept_apart_and_rendered() {
        let counts = Counts::default();
        counts.count(Operation::Put, &[Outcome::Done, Outcome::NoRoom, Outcome::Done]);
        counts.count(Operation::Get, &[Outcome::Dropped]);
        assert_eq!((counts.of(Operation::Put, Outcome::Done), counts.all(Operation::Put), counts.all(Operation::Has)), (2, 3, 0));
        let text = counts.render();
        assert!(text.contains("kvbm_cxl_tier_blocks_total{operation=\"put\",outcome=\"no_room\"} 1\n"), "{text}");
        assert!(text.contains("{operation=\"get\",outcome=\"dropped\"} 1\n") && !text.contains("\"has\""), "{text}");
        let names: HashSet<_> = Outcome::ALL.iter().map(|outcome| outcome.name()).collect();
        assert_eq!(names.len(), Outcome::ALL.len());
    }

    #[test]
    fn only_what_is_there_is_ok() {
        let ok: Vec<_> = Outcome::ALL.iter().filter(|outcome| outcome.is_ok()).collect();
        assert_eq!(ok, [&Outcome::Done, &Outcome::Exists]);
        assert_eq!(Outcome::of(&Answer::Missed(MissReason::Writing)), Outcome::Absent);
        assert_eq!(Outcome::of(&Answer::Missed(MissReason::FencedDuring)), Outcome::OwnerGone);
        assert_eq!(Outcome::of(&Answer::Refused(RefusalReason::Busy)), Outcome::Busy);
    }
}
