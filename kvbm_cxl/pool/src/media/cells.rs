// SPDX-License-Identifier: Apache-2.0
//! The 64-byte structures of the prefix cache (CACHE.md section 2); each states its line number within its region.

use super::lines::{media_line, within};
use super::{MediaLine, Region};
use crate::limits::MAX_SLOTS;

/// Hints in one hint line.
pub const HINTS_PER_LINE: usize = 4;
/// Cells in one pin line.
pub const CELLS_PER_PIN: usize = 112;
/// Cell chunks in one claim line.
pub const CHUNKS_PER_CELL_CLAIM: usize = 448;

media_line! {
    /// DESC\[c\]: line c: the content of cell c.
    Descriptor in Descriptor {
        /// [`Descriptor::FREE`] to [`Descriptor::RETIRING`].
        @4 state: u8,
        /// [`Descriptor::NO_CHECKSUM`] or [`Descriptor::XXH3`]; the upper half is the version of the line, 0.
        @5 kind: u8,
        /// Slot of the owner that wrote it.
        @6 owner: u16,
        /// Incarnation of the owner that wrote it.
        @8 incarnation: u32,
        /// Bytes of the block.
        @12 len_bytes: u32,
        /// Counts up in the owner's incarnation and is never used again: with owner and incarnation the stamp.
        @16 seq: u64,
        /// Key of the block.
        @24 key: [u8; 16],
        /// Namespace of the key.
        @40 namespace: [u8; 16],
        /// Checksum of the payload, as `kind` says.
        @56 checksum: u64,
    } where |line| {
        if line.state > Descriptor::RETIRING {
            return Err("unknown state");
        }
        if line.kind > Descriptor::XXH3 {
            return Err("unknown version or checksum kind");
        }
        if usize::from(line.owner) >= MAX_SLOTS {
            return Err("written by a slot above the highest that a pool has");
        }
        within([line.incarnation])
    }
}

impl Descriptor {
    /// Nothing in it.
    pub const FREE: u8 = 0;
    /// Reserved: its owner may be writing payload.
    pub const WRITING: u8 = 1;
    /// Holds a complete block.
    pub const READY: u8 = 2;
    /// Complete, and about to go unless a reader pins it.
    pub const EVICTING: u8 = 3;
    /// Content is void; about to be free unless a reader pins it.
    pub const RETIRING: u8 = 4;
    /// The payload has no checksum.
    pub const NO_CHECKSUM: u8 = 0;
    /// XXH3, 64 bits, seed 0, over the payload.
    pub const XXH3: u8 = 1;

    /// Name of the state.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            Descriptor::FREE => "free",
            Descriptor::WRITING => "writing",
            Descriptor::READY => "ready",
            Descriptor::EVICTING => "evicting",
            _ => "retiring",
        }
    }
}

media_line! {
    /// HINT\[i\]: line i of the table; stripe s has lines s * hint_lines_per_stripe and on.
    HintLine in Hint {
        /// Version of the line, 0.
        @4 version: u8,
        /// Zero.
        @5 reserved: [u8; 3],
        /// Fingerprint (8 bytes) and cell (6 bytes), little-endian.
        @8 hints: [[u8; 14]; HINTS_PER_LINE],
    } where |line| {
        if line.version == 0 { Ok(()) } else { Err("unknown version") }
    }
}

/// One place of a hint line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Never used since the places after it were: a probe ends here.
    Empty,
    /// Used once: a probe continues.
    Tomb,
    /// A key with this fingerprint may be in this cell.
    Cell {
        /// Fingerprint of namespace and key; not 0.
        fingerprint: u64,
        /// Cell number.
        cell: u64,
    },
}

impl HintLine {
    const TOMB: u64 = (1 << 48) - 1;

    /// The hint at `place`, below [`HINTS_PER_LINE`].
    pub fn get(&self, place: usize) -> Hint {
        let mut word = [0; 8];
        word[..6].copy_from_slice(&self.hints[place][8..]);
        match (self.fingerprint(place), u64::from_le_bytes(word)) {
            (0, _) => Hint::Empty,
            (_, Self::TOMB) => Hint::Tomb,
            (fingerprint, cell) => Hint::Cell { fingerprint, cell },
        }
    }

    /// The fingerprint at `place`, below [`HINTS_PER_LINE`]: 0 where it is empty, anything in a tomb.
    #[inline]
    pub fn fingerprint(&self, place: usize) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.hints[place][..8]);
        u64::from_le_bytes(word)
    }

    /// Changes the hint at `place`, below [`HINTS_PER_LINE`].
    pub fn set(&mut self, place: usize, hint: Hint) {
        let (fingerprint, cell) = match hint {
            Hint::Empty => (0, 0),
            Hint::Tomb => (u64::MAX, Self::TOMB),
            Hint::Cell { fingerprint, cell } => (fingerprint, cell & Self::TOMB),
        };
        self.hints[place][..8].copy_from_slice(&fingerprint.to_le_bytes());
        self.hints[place][8..].copy_from_slice(&cell.to_le_bytes()[..6]);
    }

    /// Its hints in order.
    pub fn iter(&self) -> impl Iterator<Item = Hint> + '_ {
        (0..HINTS_PER_LINE).map(|place| self.get(place))
    }
}

media_line! {
    /// PIN\[s\]\[i\]: line s * pin_lines + i: cells 112i to 112i+111 as host s uses them.
    PinLine in Pin {
        /// Incarnation of the pinning host.
        @4 incarnation: u32,
        /// 112 nibbles, lowest first: bit 3 pinned, bits 0 to 2 the tick of the last use (0 = never).
        @8 nibbles: [u64; 7],
    } where |line| within([line.incarnation])
}

impl PinLine {
    /// Bit of a nibble that says pinned.
    pub const PINNED: u8 = 8;
    /// Bits of a nibble with the tick.
    pub const TICK: u8 = 7;

    /// The nibble of cell `place` of the line, below [`CELLS_PER_PIN`].
    pub fn nibble(&self, place: usize) -> u8 {
        (self.nibbles[place / 16] >> (place % 16 * 4)) as u8 & 15
    }
}

media_line! {
    /// CCLAIM\[s\]\[i\]: line s * cell_claim_lines + i: cell chunks 448i to 448i+447 that host s claims.
    CellClaim in CellClaim {
        /// Incarnation of the claimant.
        @4 incarnation: u32,
        /// One bit per cell chunk.
        @8 bits: [u8; CHUNKS_PER_CELL_CLAIM / 8],
    } where |line| within([line.incarnation])
}

impl CellClaim {
    /// Whether cell chunk `bit` of the line is claimed.
    pub fn has(&self, bit: usize) -> bool {
        self.bits[bit / 8] >> (bit % 8) & 1 != 0
    }

    /// Claims cell chunk `bit` of the line, or gives it up.
    pub fn set(&mut self, bit: usize, value: bool) {
        let mask = 1 << (bit % 8);
        self.bits[bit / 8] = if value { self.bits[bit / 8] | mask } else { self.bits[bit / 8] & !mask };
    }
}

media_line! {
    /// ASK\[s\]: line s: what host s asks the owners of cells to do.
    Ask in Ask {
        /// Incarnation of the host that asks.
        @4 incarnation: u32,
        /// Number of the request in that incarnation; 0 = none yet.
        @8 number: u64,
        /// [`Ask::EVICT`] to [`Ask::ROOM`].
        @16 what: u32,
        /// Class of the cells wanted, with [`Ask::ROOM`].
        @20 class: u32,
        /// Zero.
        @24 reserved: [u32; 2],
        /// Key to evict.
        @32 key: [u8; 16],
        /// Namespace of the key, or to be cleared.
        @48 namespace: [u8; 16],
    } where |line| {
        if line.what > Ask::ROOM {
            return Err("unknown request");
        }
        within([line.incarnation])
    }
}

impl Ask {
    /// Evict the block of one key.
    pub const EVICT: u32 = 0;
    /// Evict the blocks of one namespace.
    pub const CLEAR: u32 = 1;
    /// Evict every block.
    pub const CLEAR_ALL: u32 = 2;
    /// Give a chunk back: the host that asks has no cell and the pool no chunk.
    pub const ROOM: u32 = 3;
}
