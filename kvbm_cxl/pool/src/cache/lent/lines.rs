// SPDX-License-Identifier: Apache-2.0
//! The lines of a region, all of them at the start of its block, and what a cell holds of a lent block. Each is written by the region's
//! process only, until that is dead.

use super::super::{BlockKey, Namespace};
use crate::limits::LINE_BYTES;
use crate::line::{BlockLine, FIRST_BLOCK_KIND};
use crate::media::REFERENCE_BYTES;
use bytemuck::{Pod, Zeroable};

/// Parts that one part line tells.
pub(super) const PARTS_PER_LINE: u64 = 2;

/// Asserts size and offsets of a line structure.
macro_rules! sized {
    ($name:ident { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(size_of::<$name>() == LINE_BYTES);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
    };
}

/// First line of a region: whose it is, and how much lies behind. Sealed with its pool offset alone, so that the next owner of the block
/// can tell that it is a region.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Head {
    /// CRC32C of the line.
    pub crc: u32,
    /// Layout of the region.
    pub version: u16,
    /// Slot of the host whose process made it.
    pub slot: u16,
    /// Made at random with the region; part of the seal of all its other lines.
    pub nonce: u64,
    /// The machine of that process.
    pub machine: [u8; 16],
    /// Bytes of the memory that blocks lie in.
    pub len_bytes: u64,
    /// Process id.
    pub pid: u32,
    /// Start time of the process.
    pub start: u32,
    /// Blocks.
    pub blocks: u32,
    /// Parts of a block that there is room for.
    pub parts_most: u16,
    /// Parts of a block; 0 = not told yet.
    pub parts: u16,
    /// Incarnation of the host when the region was made.
    pub incarnation: u32,
    /// Zero.
    pub reserved: u32,
}
sized!(Head {
    crc @ 0, version @ 4, slot @ 6, nonce @ 8, machine @ 16, len_bytes @ 32, pid @ 40, start @ 44, blocks @ 48, parts_most @ 52, parts @ 54,
    incarnation @ 56, reserved @ 60,
});

impl Head {
    /// The layout of this build.
    pub const VERSION: u16 = 1;
}

impl BlockLine for Head {
    const KIND: u32 = FIRST_BLOCK_KIND + 0x10;

    fn check(&self) -> Result<(), &'static str> {
        match self {
            head if head.version != Head::VERSION => Err("another version of a region"),
            head if head.parts > head.parts_most => Err("a region with more parts of a block than it has room for"),
            head if head.blocks == 0 || head.len_bytes == 0 => Err("a region of no blocks, or of no bytes"),
            _ => Ok(()),
        }
    }
}

/// Where one part of every block lies: that of block `b` begins `start + b * stride` bytes into the region's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct PartWords {
    pub start: u64,
    pub stride: u64,
    pub len_bytes: u64,
}

/// Two parts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct PartLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Zero.
    pub reserved0: u32,
    /// Parts 2i and 2i+1; zero where there is none.
    pub parts: [PartWords; PARTS_PER_LINE as usize],
    /// Zero.
    pub reserved: u64,
}
sized!(PartLine { crc @ 0, reserved0 @ 4, parts @ 8, reserved @ 56 });

impl BlockLine for PartLine {
    const KIND: u32 = FIRST_BLOCK_KIND + 0x11;
}

/// How one block stands. Memory that was never one of this region's lines does not verify, and says so: not lent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct LentLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// The block.
    pub block: u32,
    /// Counts up with every lending in the region and is never used again.
    pub generation: u64,
    /// [`LentLine::HELD`] or [`LentLine::LENT`].
    pub state: u32,
    /// Zero.
    pub reserved: u32,
    /// Key under which it is lent.
    pub key: [u8; 16],
    /// Namespace of the key.
    pub namespace: [u8; 16],
    /// Of the region.
    pub nonce: u64,
}
sized!(LentLine { crc @ 0, block @ 4, generation @ 8, state @ 16, reserved @ 20, key @ 24, namespace @ 40, nonce @ 56 });

impl BlockLine for LentLine {
    const KIND: u32 = FIRST_BLOCK_KIND + 0x12;

    fn check(&self) -> Result<(), &'static str> {
        if matches!(self.state, LentLine::HELD | LentLine::LENT) { Ok(()) } else { Err("unknown state of a block") }
    }
}

impl LentLine {
    /// Its memory is the engine's to write.
    pub const HELD: u32 = 1;
    /// Its memory does not change.
    pub const LENT: u32 = 2;
}

/// What a cell holds of a lent block.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Reference {
    /// [`Reference::MAGIC`].
    pub magic: u32,
    /// The block.
    pub block: u32,
    /// Pool offset of the region's head.
    pub region: u64,
    /// Of the region.
    pub nonce: u64,
    /// Of the lending.
    pub generation: u64,
    /// XXH3 of the block's bytes, part after part, where `has_checksum` is 1.
    pub checksum: u64,
    /// 0 or 1.
    pub has_checksum: u32,
    /// Zero.
    pub reserved: [u32; 5],
}
const _: () = assert!(size_of::<Reference>() == REFERENCE_BYTES as usize);

impl Reference {
    /// "LENT", and version 1 of the layout.
    pub const MAGIC: u32 = u32::from_le_bytes(*b"LNT1");

    /// The line in which the block stands, if it is lent as this says, under this name.
    pub fn lent(&self, namespace: Namespace, key: BlockKey) -> LentLine {
        LentLine {
            block: self.block,
            generation: self.generation,
            state: LentLine::LENT,
            key: key.0,
            namespace: namespace.0,
            nonce: self.nonce,
            ..LentLine::default()
        }
    }
}
