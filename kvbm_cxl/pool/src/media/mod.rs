// SPDX-License-Identifier: Apache-2.0
//! The on-media format: one source of truth for every structure in the pool.
//!
//! All numbers are little-endian, all offsets count from the start of the pool, and every metadata structure is one 64-byte line with a
//! CRC32C of its own. The pool starts with one 2 MiB header per device (superblock copies), then the regions below in this order, then
//! the chunks. Where device 0 carries the metadata alone ([`METADATA_APART`]), the regions lie on it after the headers, and cells and
//! chunks on the other devices.
//!
//! | region | lines | line owner (who may write) | readers | what recovers it |
//! |---|---|---|---|---|
//! | device header | superblock, 4 KiB per device | `cxlctl format`, operator | all hosts at open | re-format; copies on the other devices |
//! | `Seat` | K | machine of seat k | hosts, managers | blocks its locks until an operator acts |
//! | `Grant` | K x ceil(L/4) | machine of seat k | hosts, managers | collect + adopt by the next manager |
//! | `Binding` | K x N | machine of seat k | joining machines, managers | collect + adopt |
//! | `Fence` | K x ceil(N/12) | machine of seat k | all hosts | never needed: only grows, all rows are read |
//! | `Death` | K x ceil(N/12) | machine of seat k | managers, adopters | as `Fence` |
//! | `JoinBox` | 8 | any machine (hint) | managers | the joiner writes again |
//! | `Identity` | N | slot owner | managers, adopters | re-join |
//! | `Summary` | N x ceil(R/24) | slot owner | managers | re-join |
//! | `Request` | N x R, R = ceil(L/6) | slot owner | managers | re-join |
//! | `Intent` | N x 8 | slot owner | repairing holders | re-join empties it |
//! | `Record` | N x (M + O) | slot owner | all hosts | highest (grant, version) wins; seal |
//! | `Claim` | N x ceil(C/448) | slot owner | chunk lock holders | adoption after proof of death |
//! | `FreeBox` | N x N | slot owner of the row (the sender) | chunk owners | sent again |
//! | `FreeAck` | N x N | slot owner of the row (the receiver) | senders | the receiver writes it again |
//! | `ChunkHead` | C | chunk owner | all hosts | adoption after proof of death |
//! | `KeepMap` | C x ceil(B/448), 74 for chunks of 2 MiB | chunk owner | adopters, fsck | adoption after proof of death |
//! | `Stats` | N x 10, N x 4 in pools of format 2.0 | slot owner | operators | next round of the host |
//! | `Descriptor` | E, one per cell of the prefix cache | owner of the cell chunk | all hosts | adoption (CACHE.md section 7) |
//! | `Hint` | H | holder of the stripe lock | all hosts | inserted again by the owner's scrub |
//! | `Pin` | N x ceil(E/112) | slot owner | cell owners | void with the incarnation in it |
//! | `CellClaim` | N x ceil(D/448) | slot owner | holders of the cell lock | adoption |
//! | `Ask` | N | slot owner | cell owners | asked again |
//! | `Splitter` | 2 x P | any machine (one write each, LOCKS.md 12.15) | machines without a place | never needed: a place more is lost |
//! | `Claimant` | P | machine of place p | machines that claim a seat | blocks claims until an operator acts |
//! | `SeatClaim` | P x V | machine of place p | machines that claim a seat | blocks claims of its seat until an operator acts |
//!
//! K seats, P places for machines that claim one, N slots, L locks, C chunks, O object cells, M = ceil(L/320) lock-table records,
//! B = chunk / 64 bytes; E cells, D cell chunks, H = max(8, ceil(E/2/S)) lines for each of S stripes. The cells follow the regions,
//! and the chunks follow the cells.

mod cells;
mod layout;
mod lines;
mod places;
mod stripes;
mod superblock;

pub use cells::*;
pub use layout::{CellClass, FIRST_STRIPE_LOCK, Geometry, Layout, RegionSpan};
pub(crate) use lines::line_structure;
pub use lines::*;
pub use places::*;
pub use stripes::{Piece, Stripes};
pub use superblock::{
    CoherenceMode, DeviceRecord, KNOWN_COMPAT, KNOWN_INCOMPAT, KNOWN_RO_COMPAT, MAGIC, METADATA_APART, SUPERBLOCK_BYTES, Superblock,
    SuperblockParts, VERSION, WIDE_STATS, uuid_text,
};

crate::named::named_enum! {
    /// A region of metadata lines. The numbers are part of the format.
    #[repr(u32)]
    Region {
        /// Epoch claimed by each manager seat.
        Seat(1) = "Seat",
        /// Lock grants, one copy per seat.
        Grant(2) = "Grant",
        /// Slot bindings, one copy per seat.
        Binding(3) = "Binding",
        /// Fenced incarnations, one row per seat.
        Fence(4) = "Fence",
        /// Proven deaths, one row per seat.
        Death(5) = "Death",
        /// Hints of machines that ask for a slot.
        JoinBox(6) = "JoinBox",
        /// Who holds a slot.
        Identity(7) = "Identity",
        /// Heartbeats and request versions.
        Summary(8) = "Summary",
        /// Lock requests.
        Request(9) = "Request",
        /// Lines a commit is about to write.
        Intent(10) = "Intent",
        /// Host-owned protected records (class A).
        Record(11) = "Record",
        /// Chunks claimed by a host.
        Claim(12) = "Claim",
        /// Blocks freed by a host that does not own their chunk.
        FreeBox(13) = "FreeBox",
        /// What the owner has taken out of a free box.
        FreeAck(14) = "FreeAck",
        /// What a chunk is cut into.
        ChunkHead(15) = "ChunkHead",
        /// Blocks of a chunk that outlive the process and host that allocated them.
        KeepMap(16) = "KeepMap",
        /// What a host counted, for operators.
        Stats(17) = "Stats",
        /// The content of a cell of the prefix cache.
        Descriptor(18) = "Descriptor",
        /// Hash table of the prefix cache: fingerprint to cell.
        Hint(19) = "Hint",
        /// Cells that a host pins, and when it used them.
        Pin(20) = "Pin",
        /// Cell chunks claimed by a host.
        CellClaim(21) = "CellClaim",
        /// What a host asks the owners of cells to do.
        Ask(22) = "Ask",
        /// Where a machine that nothing is known of gets a place of its own.
        Splitter(23) = "Splitter",
        /// Whose a place is, and its newest ballot.
        Claimant(24) = "Claimant",
        /// Which session has a seat, one copy per place.
        SeatClaim(25) = "SeatClaim",
    }
}

impl Region {
    /// The region of that name.
    pub fn of_name(name: &str) -> Option<Region> {
        Region::ALL.into_iter().find(|region| region.name() == name)
    }
}

// A region's number is its place in the table.
const _: () = {
    let mut index = 0;
    while index < Region::ALL.len() {
        assert!(Region::ALL[index] as usize == index + 1);
        index += 1;
    }
};

/// A structure that fills exactly one metadata line and starts with its CRC.
pub trait MediaLine: bytemuck::Pod {
    /// The region whose lines have this form.
    const REGION: Region;

    /// Checks what the CRC cannot know: bounds and enumerations. A line that fails is treated like one with a bad CRC.
    fn check(&self) -> Result<(), &'static str> {
        Ok(())
    }
}

#[cfg(not(target_endian = "little"))]
compile_error!("the on-media format is little-endian and the structures are used as they lie");
