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

/// Asserts the size of a line structure and the offset of each of its fields, and ties it to its region.
macro_rules! media_line {
    ($name:ident, $region:ident { $($field:ident @ $offset:literal),* $(,)? }) => {
        const _: () = {
            assert!(size_of::<$name>() == 64);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        impl MediaLine for $name {
            const REGION: Region = Region::$region;
        }
    };
    ($name:ident, $region:ident { $($field:ident @ $offset:literal),* $(,)? }, $check:expr) => {
        const _: () = {
            assert!(size_of::<$name>() == 64);
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };
        impl MediaLine for $name {
            const REGION: Region = Region::$region;
            fn check(&self) -> Result<(), &'static str> {
                let check: fn(&$name) -> Result<(), &'static str> = $check;
                check(self)
            }
        }
    };
}

pub(super) use media_line;

/// SEAT\[k\]: line k.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Seat {
    /// CRC32C of the line.
    pub crc: u32,
    /// Epoch claimed by this seat; 0 = never.
    pub epoch: u32,
    /// Counts up while this seat serves, so that others see it alive.
    pub beat: u64,
    /// The machine that wrote it.
    pub machine: [u8; 16],
    /// The session of that machine; zero for a seat that the superblock gives to the machine.
    pub session: [u8; 16],
    /// Sessions that this seat was given to, this one included; 0 as `session` is.
    pub generation: u32,
    /// [`Seat::RELEASED`], or 0.
    pub state: u32,
    /// Zero.
    pub reserved: u64,
}
media_line!(
    Seat,
    Seat { crc @ 0, epoch @ 4, beat @ 8, machine @ 16, session @ 32, generation @ 48, state @ 52, reserved @ 56 },
    |line| {
        if line.state > Seat::RELEASED {
            return Err("unknown state");
        }
        within([line.epoch, line.generation])
    }
);

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

/// GR\[k\]\[j\]: line k * grant_lines + j, locks 4j to 4j+3.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct GrantLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Epoch under which the line was last adopted or changed; 0 = never.
    pub tag: u32,
    /// The four locks.
    pub grants: [Grant; LOCKS_PER_GRANT],
    /// Zero.
    pub reserved: u64,
}
media_line!(GrantLine, Grant { crc @ 0, tag @ 4, grants @ 8, reserved @ 56 }, |line| {
    if line.grants.iter().any(|grant| usize::from(grant.slot) >= MAX_SLOTS) {
        return Err("a grant to a slot above the highest that a pool has");
    }
    within([line.tag])?;
    within(line.grants.map(|grant| grant.number))?;
    within(line.grants.map(|grant| grant.incarnation))
});

/// BIND\[k\]\[i\]: line k * N + i: slot i.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Binding {
    /// CRC32C of the line.
    pub crc: u32,
    /// Epoch under which the line was last adopted or changed; 0 = never.
    pub tag: u32,
    /// Incarnation bound; 0 = never bound.
    pub incarnation: u32,
    /// Zero.
    pub reserved0: u32,
    /// The machine bound to it.
    pub machine: [u8; 16],
    /// The join attempt it was bound for.
    pub nonce: [u8; 16],
    /// Zero.
    pub reserved: [u64; 2],
}
media_line!(
    Binding,
    Binding { crc @ 0, tag @ 4, incarnation @ 8, reserved0 @ 12, machine @ 16, nonce @ 32, reserved @ 48 },
    |line| within([line.tag, line.incarnation])
);

/// FEN\[k\]\[i\]: line k * fence_lines + i, slots 12i to 12i+11. Only ever grows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FenceLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Zero.
    pub reserved0: u32,
    /// Incarnation up to which each slot is fenced.
    pub fenced: [u32; SLOTS_PER_FENCE],
    /// Zero.
    pub reserved: u64,
}
media_line!(FenceLine, Fence { crc @ 0, reserved0 @ 4, fenced @ 8, reserved @ 56 }, |line| within(line.fenced));

/// DEAD\[k\]\[i\]: same form as [`FenceLine`]: incarnations whose death is proven. Only ever grows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct DeathLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Zero.
    pub reserved0: u32,
    /// Incarnation up to which each slot is proven dead.
    pub dead: [u32; SLOTS_PER_FENCE],
    /// Zero.
    pub reserved: u64,
}
media_line!(DeathLine, Death { crc @ 0, reserved0 @ 4, dead @ 8, reserved @ 56 }, |line| within(line.dead));

/// JOINBOX\[b\]: line b. Any content, old or lost, only delays a machine.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct JoinBox {
    /// CRC32C of the line.
    pub crc: u32,
    /// Slot asked for.
    pub slot: u32,
    /// The machine that asks.
    pub machine: [u8; 16],
    /// Its fresh nonce.
    pub nonce: [u8; 16],
    /// The nonce that it found bound to the slot.
    pub previous: [u8; 16],
    /// [`JoinBox::vouching`] for `previous` where the asker states that the incarnation of that nonce has ended (LOCKS.md 12.19).
    pub vouch: u64,
}
media_line!(JoinBox, JoinBox { crc @ 0, slot @ 4, machine @ 8, nonce @ 24, previous @ 40, vouch @ 56 });

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

/// ID\[s\]: line s.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Identity {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the slot's owner; 0 = never joined.
    pub incarnation: u32,
    /// [`Identity::LIVE`] or [`Identity::LEFT`]; 0 = never joined.
    pub state: u32,
    /// Fence acknowledged: no thread of this incarnation or an older one is inside a protected commit any more.
    pub acknowledged: u32,
    /// The machine.
    pub machine: [u8; 16],
    /// The join attempt.
    pub nonce: [u8; 16],
    /// Payload of this incarnation and older ones is not written any more (CACHE.md section 7).
    pub drained: u32,
    /// An incarnation that this host states to have ended, as [`Identity::report_of`] packs it; 0 = none. Never taken back.
    pub report: u32,
    /// First half of the machine's session, which may have a seat: the death of this incarnation is the death of that session.
    pub session: u64,
}
media_line!(
    Identity,
    Identity {
        crc @ 0, incarnation @ 4, state @ 8, acknowledged @ 12, machine @ 16, nonce @ 32, drained @ 48, report @ 52, session @ 56,
    },
    |line| {
        if line.state > Identity::LEFT {
            return Err("unknown state");
        }
        within([line.incarnation, line.acknowledged, line.drained])
    }
);

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

/// SUM\[s\]\[i\]: line s * summary_lines + i; the versions of request lines 24i to 24i+23. The heartbeat counts in line 0 only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Summary {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the slot's owner.
    pub incarnation: u32,
    /// Heartbeat counter.
    pub heartbeat: u64,
    /// A number per request line that changes whenever the line does.
    pub versions: [u16; VERSIONS_PER_SUMMARY],
}
media_line!(Summary, Summary { crc @ 0, incarnation @ 4, heartbeat @ 8, versions @ 16 }, |line| within([line.incarnation]));

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

/// REQ\[s\]\[j\]: line s * request_lines + j, locks 6j to 6j+5.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct RequestLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the slot's owner.
    pub incarnation: u32,
    /// The six locks.
    pub requests: [Request; LOCKS_PER_REQUEST],
    /// In line 0: the kernel and the file under which all processes of this incarnation are marked
    /// ([`crate::platform::Platform::witness`]); 0 = none.
    pub witness: u64,
}
media_line!(RequestLine, Request { crc @ 0, incarnation @ 4, requests @ 8, witness @ 56 }, |line| {
    within([line.incarnation])?;
    within(line.requests.map(|request| request.number))
});

/// INTENT\[s\]\[i\]: line s * INTENTS + i, i = the protected structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Intent {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the slot's owner.
    pub incarnation: u32,
    /// Lock under which the lines are written.
    pub lock: u32,
    /// Grant number of that lock.
    pub grant: u32,
    /// How many of `lines` count; 0 = nothing intended.
    pub count: u32,
    /// Structure-specific repair data.
    pub data: u32,
    /// Numbers of the lines about to be written, in the structure's own numbering.
    pub lines: [u32; INTENT_LINES],
}
media_line!(
    Intent,
    Intent { crc @ 0, incarnation @ 4, lock @ 8, grant @ 12, count @ 16, data @ 20, lines @ 24 },
    |line| {
        if line.count as usize > INTENT_LINES {
            return Err("more intended lines than fit");
        }
        within([line.incarnation, line.grant])
    }
);

/// REC\[s\]\[r\]: line s * records + r. The value of record r is that of the highest (grant, version) over all slots.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Record {
    /// CRC32C of the line.
    pub crc: u32,
    /// Grant number under which it was written; 0 = never.
    pub grant: u32,
    /// Version of the value, rising by one with each commit.
    pub version: u32,
    /// Incarnation of the writer.
    pub incarnation: u32,
    /// Zero.
    pub reserved: u64,
    /// The value.
    pub data: [u8; RECORD_BYTES],
}
media_line!(
    Record,
    Record { crc @ 0, grant @ 4, version @ 8, incarnation @ 12, reserved @ 16, data @ 24 },
    |line| within([line.grant, line.version, line.incarnation])
);

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

/// CLAIM\[s\]\[i\]: line s * claim_lines + i, chunks 448i to 448i+447.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Claim {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the claimant.
    pub incarnation: u32,
    /// One bit per chunk.
    pub bits: [u8; CHUNKS_PER_CLAIM / 8],
}
media_line!(Claim, Claim { crc @ 0, incarnation @ 4, bits @ 8 }, |line| within([line.incarnation]));

/// FREEBOX\[s\]\[o\]: line s * N + o: blocks that slot s wants slot o to free.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FreeBox {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the sender.
    pub incarnation: u32,
    /// Incarnation of the receiver it is meant for.
    pub receiver: u32,
    /// Number of this message; the next one waits for its acknowledgement.
    pub sequence: u32,
    /// Pool offsets of the blocks; 0 = none.
    pub offsets: [u64; BLOCKS_PER_FREE_BOX],
}
media_line!(
    FreeBox,
    FreeBox { crc @ 0, incarnation @ 4, receiver @ 8, sequence @ 12, offsets @ 16 },
    |line| within([line.incarnation, line.receiver, line.sequence])
);

/// FREEACK\[o\]\[s\]: line o * N + s: what slot o has taken out of FREEBOX\[s\]\[o\].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct FreeAck {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the receiver.
    pub incarnation: u32,
    /// Incarnation of the sender.
    pub sender: u32,
    /// Last message taken.
    pub sequence: u32,
    /// Zero.
    pub reserved: [u64; 6],
}
media_line!(
    FreeAck,
    FreeAck { crc @ 0, incarnation @ 4, sender @ 8, sequence @ 12, reserved @ 16 },
    |line| within([line.incarnation, line.sender, line.sequence])
);

/// CHUNK\[c\]: line c: what the chunk is cut into.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ChunkHead {
    /// CRC32C of the line.
    pub crc: u32,
    /// Slot of the owner that wrote it.
    pub slot: u32,
    /// Incarnation of the owner that wrote it.
    pub incarnation: u32,
    /// [`ChunkHead::UNCUT`], [`ChunkHead::BLOCKS`], [`ChunkHead::RUN`] or [`ChunkHead::INSIDE`].
    pub state: u32,
    /// Size of a block in bytes (`BLOCKS`), or of the whole run (`RUN`).
    pub block_bytes: u64,
    /// Chunks of the run (`RUN`), or the run's first chunk (`INSIDE`).
    pub run: u64,
    /// Zero.
    pub reserved: [u64; 4],
}
media_line!(
    ChunkHead,
    ChunkHead { crc @ 0, slot @ 4, incarnation @ 8, state @ 12, block_bytes @ 16, run @ 24, reserved @ 32 },
    |line| {
        if line.state > ChunkHead::INSIDE {
            return Err("unknown state");
        }
        if line.slot as usize >= MAX_SLOTS {
            return Err("written by a slot above the highest that a pool has");
        }
        within([line.incarnation])
    }
);

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

/// KEEP\[c\]\[i\]: line c * keep_lines + i: blocks 448i to 448i+447 of chunk c that outlive their host.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct KeepMap {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the chunk's owner.
    pub incarnation: u32,
    /// One bit per block.
    pub bits: [u8; BLOCKS_PER_KEEP / 8],
}
media_line!(KeepMap, KeepMap { crc @ 0, incarnation @ 4, bits @ 8 }, |line| within([line.incarnation]));

/// STATS\[s\]\[i\]: line s * stats_lines + i: counters 7i to 7i+6 of [`crate::metrics::stats::Stat`]. Nothing depends on them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StatsLine {
    /// CRC32C of the line.
    pub crc: u32,
    /// Incarnation of the slot's owner.
    pub incarnation: u32,
    /// The counters.
    pub counters: [u64; COUNTERS_PER_STATS],
}
media_line!(StatsLine, Stats { crc @ 0, incarnation @ 4, counters @ 8 }, |line| within([line.incarnation]));
