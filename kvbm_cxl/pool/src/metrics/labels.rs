// SPDX-License-Identifier: Apache-2.0
//! The labels that metrics have, and the reasons that the cache gives.

/// A label with a fixed set of values.
pub trait Label: Copy + 'static {
    /// Its name.
    const NAME: &'static str;
    /// Its values, in the order of [`Label::index`].
    const VALUES: &'static [&'static str];
    /// What each of them means.
    const MEANINGS: &'static [&'static str];

    /// The place of this value among all.
    fn index(self) -> usize;
}

/// Makes an enum whose variants are the values of a label.
macro_rules! label {
    ($(#[$doc:meta])* $name:ident($label:literal) { $($variant:ident = $value:literal, $meaning:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $(#[doc = $meaning] $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: [$name; <$name as Label>::VALUES.len()] = [$($name::$variant),*];

            /// The value of the label.
            pub const fn text(self) -> &'static str {
                match self { $($name::$variant => $value,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.text())
            }
        }

        impl Label for $name {
            const NAME: &'static str = $label;
            const VALUES: &'static [&'static str] = &[$($value),*];
            const MEANINGS: &'static [&'static str] = &[$($meaning),*];

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

label!(
    /// Why a pull or lookup is answered with a miss (CACHE.md section 5). A miss is counted once, under the reason of the last match that
    /// was tried.
    MissReason("reason") {
        Absent = "absent", "No hint names the key.";
        BadLine = "bad_line", "The descriptor does not verify.";
        Free = "free", "The cell that the hint names is free.";
        Writing = "writing", "The block is still being written.";
        Evicting = "evicting", "The block is being evicted.";
        Retiring = "retiring", "The cell is in quarantine or leaving it.";
        OtherKey = "other_key", "The cell holds a block of another key.";
        Namespace = "namespace", "The cell holds a block of the same key in another namespace.";
        FencedOwner = "fenced_owner", "The host that owns the block was fenced before the copy.";
        FencedDuring = "fenced_during", "The host that owns the block was fenced during the copy, which was discarded.";
        Changed = "changed", "The descriptor changed during the copy, which was discarded.";
        Checksum = "checksum", "The bytes do not have the checksum of the descriptor and were discarded.";
        Length = "length", "The block is longer than the destination.";
        PinsFull = "pins_full", "This host's table of pins is full.";
        HostFenced = "host_fenced", "The host that asks is fenced itself.";
        Device = "device_error", "The memory failed: poisoned, or its device is lost.";
    }
);

label!(
    /// Why a round of a background thread failed. The values are those of [`crate::ERROR_CLASSES`], in the same order.
    FailureReason("reason") {
        Device = "device", "A device is lost, poisoned, or a GPU's copy failed.";
        Damaged = "damaged", "A line does not verify, or the memory is no pool.";
        Fenced = "fenced", "This host is fenced; it joins again by itself.";
        Timeout = "timeout", "A lock or another host did not answer in time.";
        Full = "full", "A table or the pool is full.";
        InUse = "in_use", "Another machine uses this host's identity or slot.";
        Replaced = "replaced", "The pool was formatted again.";
        Other = "other", "Any other error; the log has it.";
    }
);

label!(
    /// Why a block is not published.
    RefusalReason("reason") {
        Exists = "exists", "Another process has published the key already, or is about to.";
        Busy = "busy", "A block with this key is being evicted.";
        TableFull = "table_full", "The window of the hint table has no room.";
        PoolFull = "pool_full", "No cell is free and none can be evicted.";
        Quota = "quota", "The namespace or host has as many blocks as it may have.";
        TooLong = "too_long", "The block is longer than the largest cell.";
        Fenced = "fenced", "This host is fenced.";
        Device = "device_error", "The memory failed: poisoned, or its device is lost.";
    }
);

label!(
    /// Why a block was evicted.
    EvictionReason("reason") {
        Capacity = "capacity", "Its cell was needed for another block.";
        Quota = "quota", "Its namespace or host had more blocks than it may have.";
        Cleared = "cleared", "Its namespace was cleared, or its removal was requested.";
        Duplicate = "duplicate", "Another host has the same block, and hints lead there.";
    }
);

label!(
    /// What copies payload.
    Engine("engine") {
        Cpu = "cpu", "Loads and non-temporal stores.";
        Dsa = "dsa", "The data streaming accelerator.";
        Cuda = "cuda", "The GPU.";
    }
);

label!(
    /// The fate of a page that was prefetched on the device before its copy.
    AheadFate("fate") {
        Given = "given", "Prefetched pages.";
        Used = "used", "Pages of blocks that were copied afterwards or at that time.";
        Wasted = "wasted", "Pages prefetched in vain: the copy failed or had passed them.";
    }
);

label!(
    /// Which way a message goes.
    Direction("direction") {
        Sent = "sent", "Written to another host's ring.";
        Received = "received", "Taken out of this host's ring.";
    }
);
