// SPDX-License-Identifier: Apache-2.0
//! The 64-byte structures. Names follow protocols/LOCKS.md; each states its line number within its region.

use super::{MediaLine, Region};
use crate::limits::{INTENT_LINES, MAX_NUMBER, MAX_OBJECT_NAME_BYTES, MAX_SLOTS};
use bytemuck::{Pod, Zeroable};

/// Grants in one grant line.
pub const LOCKS_PER_GRANT: usize = 4;
/// Requests in one request line.
pub const LOCKS_PER_REQUEST: usize = 6;
/// Request-line versions in one summary line.
pub const VERSIONS_PER_SUMMARY: usize = 24;
/// Slots in one fence or death line.
pub const SLOTS_PER_FENCE: usize = 12;
/// Data bytes of a record.
pub const RECORD_BYTES: usize = 40;
/// Locks whose allocation one record of the lock table tells.
pub const LOCKS_PER_RECORD: usize = RECORD_BYTES * 8;
/// Chunks in one claim line.
pub const CHUNKS_PER_CLAIM: usize = 448;
/// Blocks in one keep-map line.
pub const BLOCKS_PER_KEEP: usize = 448;
/// Blocks in one free-box line.
pub const BLOCKS_PER_FREE_BOX: usize = 6;
/// Stats lines per slot of pools that are formatted now.
pub const STATS_LINES: usize = 10;
/// Stats lines per slot of pools that were formatted before counters of transfers came (format 2.0).
pub const FIRST_STATS_LINES: usize = 4;
/// Counters in one stats line.
pub const COUNTERS_PER_STATS: usize = 7;

/// Refuses epochs, incarnations, grant, request and message numbers that no host can have reached: the code counts on, and nothing may
/// wrap.
pub(super) fn within<const N: usize>(numbers: [u32; N]) -> Result<(), &'static str> {
    // All of them at once first: these are the fence words that every operation looks at.
    let bits = numbers.iter().fold(0, |bits, number| bits | number);
    if bits < MAX_NUMBER || numbers.iter().all(|&number| number <= MAX_NUMBER) { Ok(()) } else { Err("a number beyond the limit") }
}

/// Declares the structure of a line: its CRC, then each field at its offset, which is asserted.
macro_rules! line_structure {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* @$offset:literal $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name {
            /// CRC32C of the line.
            pub crc: u32,
            $($(#[$field_doc])* pub $field: $type,)*
        }

        const _: () = {
            assert!(size_of::<$name>() == $crate::limits::LINE_BYTES && std::mem::offset_of!($name, crc) == 0);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };

        impl Default for $name {
            fn default() -> Self {
                bytemuck::Zeroable::zeroed()
            }
        }
    };
}

/// Declares the structure of a region's lines; `where` checks what the CRC cannot know ([`MediaLine::check`]).
macro_rules! media_line {
    ($(#[$doc:meta])* $name:ident in $region:ident $fields:tt $(where $check:expr)?) => {
        crate::media::line_structure!($(#[$doc])* $name $fields);

        impl MediaLine for $name {
            const REGION: Region = Region::$region;
            $(fn check(&self) -> Result<(), &'static str> {
                let check: fn(&$name) -> Result<(), &'static str> = $check;
                check(self)
            })?
        }
    };
}

pub(crate) use line_structure;
pub(super) use media_line;

media_line! {
    /// SEAT\[k\]: line k.
    Seat in Seat {
        /// Epoch claimed by this seat; 0 = never.
        @4 epoch: u32,
        /// Counts up while this seat serves, so that others see it alive.
        @8 beat: u64,
        /// The machine that wrote it.
        @16 machine: [u8; 16],
        /// The session of that machine; zero for a seat that the superblock gives to the machine.
        @32 session: [u8; 16],
        /// Sessions that this seat was given to, this one included; 0 as `session` is.
        @48 generation: u32,
        /// [`Seat::RELEASED`], or 0.
        @52 state: u32,
        /// Zero.
        @56 reserved: u64,
    } where |line| {
        if line.state > Seat::RELEASED {
            return Err("unknown state");
        }
        within([line.epoch, line.generation])
    }
}

impl Seat {
    /// The session gave the seat up: this was its last write to any line of the seat.
    pub const RELEASED: u32 = 1;
}

/// One lock's grant.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Grant {
    /// Grant number, rising by one; 0 = never granted.
    pub number: u32,
    /// Incarnation of the holder.
    pub incarnation: u32,
    /// Low 16 bits of the request it answers.
    pub request: u16,
    /// Slot of the holder.
    pub slot: u8,
    /// [`Grant::REPAIR`] and [`Grant::RECALL`].
    pub flags: u8,
}

impl Grant {
    /// The holder before did not end cleanly: repair before use.
    pub const REPAIR: u8 = 1;
    /// A host waits: give it back.
    pub const RECALL: u8 = 2;
}

media_line! {
    /// GR\[k\]\[j\]: line k * grant_lines + j, locks 4j to 4j+3.
    GrantLine in Grant {
        /// Epoch under which the line was last adopted or changed; 0 = never.
        @4 tag: u32,
        /// The four locks.
        @8 grants: [Grant; LOCKS_PER_GRANT],
        /// Zero.
        @56 reserved: u64,
    } where |line| {
        if line.grants.iter().any(|grant| usize::from(grant.slot) >= MAX_SLOTS) {
            return Err("a grant to a slot above the highest that a pool has");
        }
        within([line.tag])?;
        within(line.grants.map(|grant| grant.number))?;
        within(line.grants.map(|grant| grant.incarnation))
    }
}

media_line! {
    /// BIND\[k\]\[i\]: line k * N + i: slot i.
    Binding in Binding {
        /// Epoch under which the line was last adopted or changed; 0 = never.
        @4 tag: u32,
        /// Incarnation bound; 0 = never bound.
        @8 incarnation: u32,
        /// Zero.
        @12 reserved0: u32,
        /// The machine bound to it.
        @16 machine: [u8; 16],
        /// The join attempt it was bound for.
        @32 nonce: [u8; 16],
        /// Zero.
        @48 reserved: [u64; 2],
    } where |line| within([line.tag, line.incarnation])
}

media_line! {
    /// FEN\[k\]\[i\]: line k * fence_lines + i, slots 12i to 12i+11. Only ever grows.
    FenceLine in Fence {
        /// Zero.
        @4 reserved0: u32,
        /// Incarnation up to which each slot is fenced.
        @8 fenced: [u32; SLOTS_PER_FENCE],
        /// Zero.
        @56 reserved: u64,
    } where |line| within(line.fenced)
}

media_line! {
    /// DEAD\[k\]\[i\]: same form as [`FenceLine`]: incarnations whose death is proven. Only ever grows.
    DeathLine in Death {
        /// Zero.
        @4 reserved0: u32,
        /// Incarnation up to which each slot is proven dead.
        @8 dead: [u32; SLOTS_PER_FENCE],
        /// Zero.
        @56 reserved: u64,
    } where |line| within(line.dead)
}

media_line! {
    /// JOINBOX\[b\]: line b. Any content, old or lost, only delays a machine.
    JoinBox in JoinBox {
        /// Slot asked for.
        @4 slot: u32,
        /// The machine that asks.
        @8 machine: [u8; 16],
        /// Its fresh nonce.
        @24 nonce: [u8; 16],
        /// The nonce that it found bound to the slot.
        @40 previous: [u8; 16],
        /// [`JoinBox::vouching`] for `previous` where the asker states that the incarnation of that nonce has ended (LOCKS.md 12.19).
        @56 vouch: u64,
    }
}

impl JoinBox {
    /// The word that vouches for the end of the incarnation with the nonce `previous`. It repeats the nonce, so that a box that two askers
    /// wrote over each other vouches for nothing.
    pub fn vouching(previous: &[u8; 16]) -> u64 {
        previous.first_chunk().map_or(0, |half| u64::from_le_bytes(*half))
    }

    /// Whether the asker states the end of the incarnation with the nonce `previous`.
    pub fn vouches(&self) -> bool {
        self.vouch != 0 && self.vouch == Self::vouching(&self.previous)
    }
}

media_line! {
    /// ID\[s\]: line s.
    Identity in Identity {
        /// Incarnation of the slot's owner; 0 = never joined.
        @4 incarnation: u32,
        /// [`Identity::LIVE`] or [`Identity::LEFT`]; 0 = never joined.
        @8 state: u32,
        /// Fence acknowledged: no thread of this incarnation or an older one is inside a protected commit any more.
        @12 acknowledged: u32,
        /// The machine.
        @16 machine: [u8; 16],
        /// The join attempt.
        @32 nonce: [u8; 16],
        /// Payload of this incarnation and older ones is not written any more (CACHE.md section 7).
        @48 drained: u32,
        /// An incarnation that this host states to have ended, as [`Identity::report_of`] packs it; 0 = none. Never taken back.
        @52 report: u32,
        /// First half of the machine's session, which may have a seat: the death of this incarnation is the death of that session.
        @56 session: u64,
    } where |line| {
        if line.state > Identity::LEFT {
            return Err("unknown state");
        }
        within([line.incarnation, line.acknowledged, line.drained])
    }
}

impl Identity {
    /// The slot is in use.
    pub const LIVE: u32 = 1;
    /// The slot was left: nothing of it runs any more.
    pub const LEFT: u32 = 2;
    /// Bits of [`Identity::report`] for the incarnation; the slot is above them.
    const REPORT_BITS: u32 = 26;

    /// Packs the statement that incarnation `incarnation` of `slot` has ended; `None` for numbers that do not fit.
    pub fn report_of(slot: u32, incarnation: u32) -> Option<u32> {
        let fits = (slot as usize) < MAX_SLOTS && (1..1 << Self::REPORT_BITS).contains(&incarnation);
        fits.then_some(slot << Self::REPORT_BITS | incarnation)
    }

    /// Slot and incarnation that this host states to have ended.
    pub fn reported(&self) -> Option<(u32, u32)> {
        let incarnation = self.report & ((1 << Self::REPORT_BITS) - 1);
        (incarnation != 0).then_some((self.report >> Self::REPORT_BITS, incarnation))
    }
}

media_line! {
    /// SUM\[s\]\[i\]: line s * summary_lines + i; the versions of request lines 24i to 24i+23. The heartbeat counts in line 0 only.
    Summary in Summary {
        /// Incarnation of the slot's owner.
        @4 incarnation: u32,
        /// Heartbeat counter.
        @8 heartbeat: u64,
        /// A number per request line that changes whenever the line does.
        @16 versions: [u16; VERSIONS_PER_SUMMARY],
    } where |line| within([line.incarnation])
}

/// One lock's request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Request {
    /// Request number, rising by one.
    pub number: u32,
    /// [`Request::WANT`], [`Request::CLEAN`] and [`Request::DIRTY`].
    pub flags: u32,
}

impl Request {
    /// The lock is wanted or held.
    pub const WANT: u32 = 1;
    /// It was given back with nothing left to repair.
    pub const CLEAN: u32 = 2;
    /// The structure was left half done: the next holder repairs, whatever this grant said.
    pub const DIRTY: u32 = 4;
}

media_line! {
    /// REQ\[s\]\[j\]: line s * request_lines + j, locks 6j to 6j+5.
    RequestLine in Request {
        /// Incarnation of the slot's owner.
        @4 incarnation: u32,
        /// The six locks.
        @8 requests: [Request; LOCKS_PER_REQUEST],
        /// In line 0: the kernel and the file under which all processes of this incarnation are marked
        /// ([`crate::platform::Platform::witness`]); 0 = none.
        @56 witness: u64,
    } where |line| {
        within([line.incarnation])?;
        within(line.requests.map(|request| request.number))
    }
}

media_line! {
    /// INTENT\[s\]\[i\]: line s * INTENTS + i, i = the protected structure.
    Intent in Intent {
        /// Incarnation of the slot's owner.
        @4 incarnation: u32,
        /// Lock under which the lines are written.
        @8 lock: u32,
        /// Grant number of that lock.
        @12 grant: u32,
        /// How many of `lines` count; 0 = nothing intended.
        @16 count: u32,
        /// Structure-specific repair data.
        @20 data: u32,
        /// Numbers of the lines about to be written, in the structure's own numbering.
        @24 lines: [u32; INTENT_LINES],
    } where |line| {
        if line.count as usize > INTENT_LINES {
            return Err("more intended lines than fit");
        }
        within([line.incarnation, line.grant])
    }
}

media_line! {
    /// REC\[s\]\[r\]: line s * records + r. The value of record r is that of the highest (grant, version) over all slots.
    Record in Record {
        /// Grant number under which it was written; 0 = never.
        @4 grant: u32,
        /// Version of the value, rising by one with each commit.
        @8 version: u32,
        /// Incarnation of the writer.
        @12 incarnation: u32,
        /// Zero.
        @16 reserved: u64,
        /// The value.
        @24 data: [u8; RECORD_BYTES],
    } where |line| within([line.grant, line.version, line.incarnation])
}

/// The value of an object record: a name and where it points.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ObjectValue {
    /// Pool offset.
    pub offset: u64,
    /// Length in bytes that the publisher gave; 0 = not given.
    pub len_bytes: u32,
    /// [`ObjectValue::EMPTY`], [`ObjectValue::LIVE`] or [`ObjectValue::TOMB`].
    pub state: u8,
    /// Bytes of `name` that count.
    pub name_len: u8,
    /// [`ObjectValue::LISTENER`], or what says nothing of what the name is for.
    pub kind: u16,
    /// The name.
    pub name: [u8; MAX_OBJECT_NAME_BYTES],
}
const _: () = assert!(size_of::<ObjectValue>() == RECORD_BYTES && std::mem::offset_of!(ObjectValue, kind) == 14);

impl ObjectValue {
    /// Never used: a probe ends here.
    pub const EMPTY: u8 = 0;
    /// The name is bound.
    pub const LIVE: u8 = 1;
    /// The name was destroyed: a probe continues.
    pub const TOMB: u8 = 2;
    /// Bound by a listener to its own block, and of no use once that listener is gone.
    pub const LISTENER: u16 = 1;
}

media_line! {
    /// CLAIM\[s\]\[i\]: line s * claim_lines + i, chunks 448i to 448i+447.
    Claim in Claim {
        /// Incarnation of the claimant.
        @4 incarnation: u32,
        /// One bit per chunk.
        @8 bits: [u8; CHUNKS_PER_CLAIM / 8],
    } where |line| within([line.incarnation])
}

media_line! {
    /// FREEBOX\[s\]\[o\]: line s * N + o: blocks that slot s wants slot o to free.
    FreeBox in FreeBox {
        /// Incarnation of the sender.
        @4 incarnation: u32,
        /// Incarnation of the receiver it is meant for.
        @8 receiver: u32,
        /// Number of this message; the next one waits for its acknowledgement.
        @12 sequence: u32,
        /// Pool offsets of the blocks; 0 = none.
        @16 offsets: [u64; BLOCKS_PER_FREE_BOX],
    } where |line| within([line.incarnation, line.receiver, line.sequence])
}

media_line! {
    /// FREEACK\[o\]\[s\]: line o * N + s: what slot o has taken out of FREEBOX\[s\]\[o\].
    FreeAck in FreeAck {
        /// Incarnation of the receiver.
        @4 incarnation: u32,
        /// Incarnation of the sender.
        @8 sender: u32,
        /// Last message taken.
        @12 sequence: u32,
        /// Zero.
        @16 reserved: [u64; 6],
    } where |line| within([line.incarnation, line.sender, line.sequence])
}

media_line! {
    /// CHUNK\[c\]: line c: what the chunk is cut into.
    ChunkHead in ChunkHead {
        /// Slot of the owner that wrote it.
        @4 slot: u32,
        /// Incarnation of the owner that wrote it.
        @8 incarnation: u32,
        /// [`ChunkHead::UNCUT`], [`ChunkHead::BLOCKS`], [`ChunkHead::RUN`] or [`ChunkHead::INSIDE`].
        @12 state: u32,
        /// Size of a block in bytes (`BLOCKS`), or of the whole run (`RUN`).
        @16 block_bytes: u64,
        /// Chunks of the run (`RUN`), or the run's first chunk (`INSIDE`).
        @24 run: u64,
        /// Zero.
        @32 reserved: [u64; 4],
    } where |line| {
        if line.state > ChunkHead::INSIDE {
            return Err("unknown state");
        }
        if line.slot as usize >= MAX_SLOTS {
            return Err("written by a slot above the highest that a pool has");
        }
        within([line.incarnation])
    }
}

impl ChunkHead {
    /// Not cut: nothing is allocated in it.
    pub const UNCUT: u32 = 0;
    /// Cut into blocks of one size.
    pub const BLOCKS: u32 = 1;
    /// First chunk of a block larger than a chunk.
    pub const RUN: u32 = 2;
    /// A later chunk of such a block.
    pub const INSIDE: u32 = 3;
}

media_line! {
    /// KEEP\[c\]\[i\]: line c * keep_lines + i: blocks 448i to 448i+447 of chunk c that outlive their host.
    KeepMap in KeepMap {
        /// Incarnation of the chunk's owner.
        @4 incarnation: u32,
        /// One bit per block.
        @8 bits: [u8; BLOCKS_PER_KEEP / 8],
    } where |line| within([line.incarnation])
}

media_line! {
    /// STATS\[s\]\[i\]: line s * stats_lines + i: counters 7i to 7i+6 of [`crate::metrics::stats::Stat`]. Nothing depends on them.
    StatsLine in Stats {
        /// Incarnation of the slot's owner.
        @4 incarnation: u32,
        /// The counters.
        @8 counters: [u64; COUNTERS_PER_STATS],
    } where |line| within([line.incarnation])
}
