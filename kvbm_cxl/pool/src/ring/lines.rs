// SPDX-License-Identifier: Apache-2.0
//! The lines of rings, all of them inside blocks of the pool. Each is written by one process only.

use crate::limits::{LINE_BYTES, MAX_OBJECT_NAME_BYTES};
use crate::line::{BlockLine, FIRST_BLOCK_KIND};
use bytemuck::{Pod, Zeroable};

/// Payload bytes of a slot.
pub const SLOT_BYTES: usize = 48;

/// Lines of a half before its slots: the control line and the progress line.
pub const HEAD_LINES: u64 = 2;

macro_rules! block_line {
    ($name:ident = $kind:literal { $($field:ident @ $offset:literal),* $(,)? }, $check:expr) => {
        const _: () = {
            assert!(size_of::<$name>() == LINE_BYTES);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        impl BlockLine for $name {
            const KIND: u32 = FIRST_BLOCK_KIND + $kind;
            fn check(&self) -> Result<(), &'static str> {
                let check: fn(&$name) -> Result<(), &'static str> = $check;
                check(self)
            }
        }
    };
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RingSlot {
    /// CRC32C of the line, continued from the connection's seal and the whole number of the line in its ring.
    pub crc: u32,
    pub sequence: u32,
    /// Low half of the connection's nonce.
    pub connection: u32,
    /// Bytes of the message from this line on, this line's included.
    pub rest_bytes: u16,
    /// [`RingSlot::FIRST`], [`RingSlot::MORE`] or [`RingSlot::END`].
    pub kind: u16,
    pub payload: [u8; SLOT_BYTES],
}
block_line!(
    RingSlot = 1 { crc @ 0, sequence @ 4, connection @ 8, rest_bytes @ 12, kind @ 14, payload @ 16 },
    |line| if matches!(line.kind, RingSlot::FIRST..=RingSlot::END) { Ok(()) } else { Err("unknown kind of slot") }
);

impl RingSlot {
    /// Begins a message.
    pub const FIRST: u16 = 1;
    /// Continues a message.
    pub const MORE: u16 = 2;
    /// Nothing follows: the sender closed in good order.
    pub const END: u16 = 3;
}

/// First line of a half: whose it is and how it lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Control {
    /// CRC32C of the line.
    pub crc: u32,
    /// [`Control::OPEN`] or [`Control::CLOSED`].
    pub state: u32,
    pub nonce: u64,
    pub slots: u64,
    /// Lines sent in all, once closed.
    pub end: u64,
    pub reserved: [u64; 4],
}
block_line!(
    Control = 2 { crc @ 0, state @ 4, nonce @ 8, slots @ 16, end @ 24, reserved @ 32 },
    |line| if matches!(line.state, Control::OPEN | Control::CLOSED) { Ok(()) } else { Err("unknown state of a half") }
);

impl Control {
    /// In use.
    pub const OPEN: u32 = 1;
    /// Its owner neither sends nor receives any more.
    pub const CLOSED: u32 = 2;
}

/// Second line of a half: how far its owner has read the other half's ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Progress {
    /// CRC32C of the line.
    pub crc: u32,
    pub reserved0: u32,
    pub read: u64,
    pub reserved: [u64; 6],
}
block_line!(Progress = 3 { crc @ 0, reserved0 @ 4, read @ 8, reserved @ 16 }, |_| Ok(()));

/// First line of the doors' block.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct DoorsHead {
    /// CRC32C of the line.
    pub crc: u32,
    /// Layout of the block.
    pub version: u32,
    /// Made at random with the block; part of the seal of all its lines.
    pub nonce: u64,
    pub slots: u32,
    pub processes: u32,
    pub reserved: [u64; 5],
}
block_line!(DoorsHead = 4 { crc @ 0, version @ 4, nonce @ 8, slots @ 16, processes @ 20, reserved @ 24 }, |_| Ok(()));

impl DoorsHead {
    /// The layout of this build.
    pub const VERSION: u32 = 1;
}

/// One per host: changes whenever a door of that host does, so that listeners look at few lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Bell {
    /// CRC32C of the line.
    pub crc: u32,
    pub reserved0: u32,
    /// Another number every time.
    pub ring: u64,
    pub reserved: [u64; 6],
}
block_line!(Bell = 5 { crc @ 0, reserved0 @ 4, ring @ 8, reserved @ 16 }, |_| Ok(()));

/// One per process: that it lives, and whom it wants to be connected to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Door {
    /// CRC32C of the line.
    pub crc: u32,
    /// Rises while the process lives.
    pub beat: u32,
    pub instance: u64,
    pub incarnation: u32,
    /// Process id, for the processes of its own machine.
    pub pid: u32,
    pub start: u32,
    pub slots: u32,
    /// Listener that it wants; 0 = none.
    pub listener: u64,
    pub nonce: u64,
    pub half: u64,
    pub reserved: u64,
}
block_line!(
    Door = 6 {
        crc @ 0, beat @ 4, instance @ 8, incarnation @ 16, pid @ 20, start @ 24, slots @ 28, listener @ 32, nonce @ 40, half @ 48,
        reserved @ 56,
    },
    |_| Ok(())
);

/// First line of a listener's block, which its name is bound to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Listening {
    /// CRC32C of the line.
    pub crc: u32,
    pub door: u32,
    pub nonce: u64,
    pub instance: u64,
    pub doors: u64,
    /// Bytes of `name` that count.
    pub name_len: u32,
    pub reserved: u32,
    /// Its name: a leftover object may be bound to memory that another listener has by now.
    pub name: [u8; MAX_OBJECT_NAME_BYTES],
}
block_line!(
    Listening = 7 { crc @ 0, door @ 4, nonce @ 8, instance @ 16, doors @ 24, name_len @ 32, reserved @ 36, name @ 40 },
    |line| if line.name_len as usize <= MAX_OBJECT_NAME_BYTES { Ok(()) } else { Err("a name longer than can be") }
);

/// A later line of a listener's block, one for each door: the connection last accepted from there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ConnectAnswer {
    /// CRC32C of the line.
    pub crc: u32,
    /// Zero.
    pub reserved0: u32,
    /// The connection.
    pub nonce: u64,
    /// Pool offset of the listener's half.
    pub half: u64,
    /// Slots of that half.
    pub slots: u64,
    /// Zero.
    pub reserved: [u64; 4],
}
block_line!(ConnectAnswer = 8 { crc @ 0, reserved0 @ 4, nonce @ 8, half @ 16, slots @ 24, reserved @ 32 }, |_| Ok(()));
