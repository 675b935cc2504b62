// SPDX-License-Identifier: Apache-2.0
//! The lines of rings, all of them inside blocks of the pool. Each is written by one process only.

use crate::limits::MAX_OBJECT_NAME_BYTES;
use crate::line::{BlockLine, FIRST_BLOCK_KIND};

/// Payload bytes of a slot.
pub const SLOT_BYTES: usize = 48;

/// Lines of a half before its slots: the control line and the progress line.
pub const HEAD_LINES: u64 = 2;

macro_rules! block_line {
    ($(#[$doc:meta])* $name:ident = $kind:literal $fields:tt $(where $check:expr)?) => {
        crate::media::line_structure!($(#[$doc])* $name $fields);

        impl BlockLine for $name {
            const KIND: u32 = FIRST_BLOCK_KIND + $kind;
            $(fn check(&self) -> Result<(), &'static str> {
                let check: fn(&$name) -> Result<(), &'static str> = $check;
                check(self)
            })?
        }
    };
}

block_line! {
    RingSlot = 1 {
        @4 sequence: u32,
        /// Low half of the connection's nonce.
        @8 connection: u32,
        /// Bytes of the message from this line on, this line's included.
        @12 rest_bytes: u16,
        /// [`RingSlot::FIRST`], [`RingSlot::MORE`] or [`RingSlot::END`].
        @14 kind: u16,
        @16 payload: [u8; SLOT_BYTES],
    } where |line| if matches!(line.kind, RingSlot::FIRST..=RingSlot::END) { Ok(()) } else { Err("unknown kind of slot") }
}

impl RingSlot {
    /// Begins a message.
    pub const FIRST: u16 = 1;
    /// Continues a message.
    pub const MORE: u16 = 2;
    /// Nothing follows: the sender closed in good order.
    pub const END: u16 = 3;
}

block_line! {
    /// First line of a half: whose it is and how it lies.
    Control = 2 {
        /// [`Control::OPEN`] or [`Control::CLOSED`].
        @4 state: u32,
        @8 nonce: u64,
        @16 slots: u64,
        /// Lines sent in all, once closed.
        @24 end: u64,
        @32 reserved: [u64; 4],
    } where |line| if matches!(line.state, Control::OPEN | Control::CLOSED) { Ok(()) } else { Err("unknown state of a half") }
}

impl Control {
    /// In use.
    pub const OPEN: u32 = 1;
    /// Its owner neither sends nor receives any more.
    pub const CLOSED: u32 = 2;
}

block_line! {
    /// Second line of a half: how far its owner has read the other half's ring.
    Progress = 3 {
        @4 reserved0: u32,
        @8 read: u64,
        @16 reserved: [u64; 6],
    }
}

block_line! {
    /// First line of the doors' block.
    DoorsHead = 4 {
        /// Layout of the block.
        @4 version: u32,
        /// Made at random with the block; part of the seal of all its lines.
        @8 nonce: u64,
        @16 slots: u32,
        @20 processes: u32,
        @24 reserved: [u64; 5],
    }
}

impl DoorsHead {
    /// The layout of this build.
    pub const VERSION: u32 = 1;
}

block_line! {
    /// One per host: changes whenever a door of that host does, so that listeners look at few lines.
    Bell = 5 {
        @4 reserved0: u32,
        /// Another number every time.
        @8 ring: u64,
        @16 reserved: [u64; 6],
    }
}

block_line! {
    /// One per process: that it lives, and whom it wants to be connected to.
    Door = 6 {
        /// Rises while the process lives.
        @4 beat: u32,
        @8 instance: u64,
        @16 incarnation: u32,
        /// Process id, for the processes of its own machine.
        @20 pid: u32,
        @24 start: u32,
        @28 slots: u32,
        /// Listener that it wants; 0 = none.
        @32 listener: u64,
        @40 nonce: u64,
        @48 half: u64,
        @56 reserved: u64,
    }
}

block_line! {
    /// First line of a listener's block, which its name is bound to.
    Listening = 7 {
        @4 door: u32,
        @8 nonce: u64,
        @16 instance: u64,
        @24 doors: u64,
        /// Bytes of `name` that count.
        @32 name_len: u32,
        @36 reserved: u32,
        /// Its name: a leftover object may be bound to memory that another listener has by now.
        @40 name: [u8; MAX_OBJECT_NAME_BYTES],
    } where |line| if line.name_len as usize <= MAX_OBJECT_NAME_BYTES { Ok(()) } else { Err("a name longer than can be") }
}

block_line! {
    /// A later line of a listener's block, one for each door: the connection last accepted from there.
    ConnectAnswer = 8 {
        /// Zero.
        @4 reserved0: u32,
        /// The connection.
        @8 nonce: u64,
        /// Pool offset of the listener's half.
        @16 half: u64,
        /// Slots of that half.
        @24 slots: u64,
        /// Zero.
        @32 reserved: [u64; 4],
    }
}
