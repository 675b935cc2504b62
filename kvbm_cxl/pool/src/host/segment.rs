// SPDX-License-Identifier: Apache-2.0
//! The host's local segment: what the processes of one machine share about their membership, in ordinary coherent memory.
//!
//! It is the truth about everything this host publishes: a published line is always composed from here and never read back. Only atomics
//! live in it, zero is the empty state, and it goes away with the machine, which is what a new incarnation assumes.

use super::local_mutex::LocalMutex;
use crate::error::{Error, Result};
use crate::limits::{MAX_NUMBER, MAX_PROCESSES, MAX_SLOTS};
use crate::media::Geometry;
use crate::platform::{LocalMemory, ProcessId};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Version of this structure: processes of different builds must not share a segment that they lay out differently.
const VERSION: u32 = 6;

pub(crate) mod state {
    /// No incarnation runs.
    pub const NONE: u32 = 0;
    /// Joined.
    pub const LIVE: u32 = 1;
    /// Fenced: protected work has to end, then the host joins again.
    pub const FENCED: u32 = 2;
    /// Left the pool.
    pub const LEFT: u32 = 3;
    /// Another machine with the same identity writes our lines: this one has stopped.
    pub const FOREIGN: u32 = 4;
    /// The pool was formatted again under this host: the new content is none of its business.
    pub const REPLACED: u32 = 5;
    /// The file of this segment was removed, replaced or truncated: the next process of this machine would not find it.
    pub const UNROOTED: u32 = 6;
}

/// Flags of a lock in the local tier.
pub(crate) mod flag {
    /// Wanted or held, as in the published request.
    pub const WANT: u32 = 1;
    /// Last given back with nothing left to repair.
    pub const CLEAN: u32 = 2;
    /// A critical section of this host was cut short, or a repair was not done, since the last grant that told to repair.
    pub const DIRTY: u32 = 4;
    /// The grant is accepted and held.
    pub const GRANTED: u32 = 8;
    /// The structure has to be repaired before use.
    pub const REPAIR: u32 = 16;
    /// The manager wants the grant back.
    pub const RECALL: u32 = 32;
    /// The part that is published in the request line.
    pub const PUBLISHED: u32 = WANT | CLEAN | DIRTY;
}

#[repr(C)]
pub(crate) struct Header {
    pub version: AtomicU32,
    pub state: AtomicU32,
    pub incarnation: AtomicU32,
    pub slot: AtomicU32,
    pub nonce: [AtomicU64; 2],
    pub manager_seat: AtomicU32,
    /// The manager seat that this session claimed, plus 1; 0 = none.
    pub seat: AtomicU32,
    pub seat_generation: AtomicU32,
    /// Random number of this session: the time between two moments at which no process of this machine was joined.
    pub session: [AtomicU64; 2],
    /// The kernel and the file under which every process of this incarnation is marked; 0 = not all are under one.
    pub witness: AtomicU64,
    pub upkeep: Upkeep,
    /// Incarnations that an operator on this machine stated to be dead, by slot.
    pub declared_dead: [AtomicU32; MAX_SLOTS],
    /// Incarnations that a process on this machine takes for dead before their heartbeats are missed, by slot.
    pub suspected: [AtomicU32; MAX_SLOTS],
    /// The seat of this machine plus one, once its rows and its epoch stand here; 0 = not known.
    pub rows_of_seat: AtomicU32,
    /// The highest epoch that this machine claimed for its seat, or is about to.
    pub seat_epoch: AtomicU32,
    /// What this machine published in its seat's fence and death rows, or is about to, by slot: from here a row that does not verify any
    /// more is written again.
    pub fence_row: [AtomicU32; MAX_SLOTS],
    pub death_row: [AtomicU32; MAX_SLOTS],
    pub processes: [ProcessEntry; MAX_PROCESSES],
}

/// What the service writes in every round: apart from what every operation reads, which would else be fetched from another core's cache
/// each time.
#[repr(C, align(64))]
pub(crate) struct Upkeep {
    /// Serialises service rounds of this host's processes.
    pub service: LocalMutex,
    /// Serialises compositions and publishes of the summary lines.
    pub summary: LocalMutex,
    /// Lets one process of this host at a time look for hosts that have ended, and bring out what they left.
    pub witness: LocalMutex,
    /// Payload of this incarnation and older ones is not written any more; as in the identity line.
    pub drained: AtomicU32,
    /// What this host reports in its identity line ([`crate::media::Identity::report`]).
    pub report: AtomicU32,
    pub heartbeat: AtomicU64,
    pub heartbeat_at_ns: AtomicU64,
    /// When the service last looked for unused locks.
    pub idle_looked_at_ns: AtomicU64,
}

#[repr(C, align(64))]
pub(crate) struct ProcessEntry {
    /// Process id; 0 = free.
    pub pid: AtomicU32,
    pub start: AtomicU32,
    /// Rises with every use of the entry, so that a tag never names two processes.
    pub generation: AtomicU32,
    pub reserved: AtomicU32,
    /// Operations that may publish shared lines and have not ended.
    pub operations: AtomicU64,
}

/// One lock in the local tier.
#[repr(C, align(64))]
pub(crate) struct LocalLock {
    pub mutex: LocalMutex,
    pub flags: AtomicU32,
    pub number: AtomicU32,
    pub grant: AtomicU32,
    /// Rises with every use; written by the mutex's owner alone.
    pub uses: AtomicU32,
    pub seen_uses: AtomicU32,
    pub seen_at_ns: AtomicU64,
}

impl LocalLock {
    pub fn note_use(&self) {
        self.uses.store(self.uses.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

#[repr(C)]
pub(crate) struct LocalRequestLine {
    pub mutex: LocalMutex,
    pub version: AtomicU16,
    /// One bit for each of its locks that is held.
    pub held: AtomicU16,
}

pub(crate) struct Segment {
    memory: LocalMemory,
    locks: usize,
    request_lines: usize,
}

impl Segment {
    const LOCKS_AT: usize = size_of::<Header>().next_multiple_of(64);

    fn requests_at(geometry: &Geometry) -> usize {
        Self::LOCKS_AT + geometry.locks as usize * size_of::<LocalLock>()
    }

    /// Bytes that the segment of a pool with this geometry takes.
    pub fn len_bytes(geometry: &Geometry) -> usize {
        (Self::requests_at(geometry) + geometry.request_lines() as usize * size_of::<LocalRequestLine>()).next_multiple_of(64)
    }

    /// Interprets `memory`, which is zero or a segment already.
    pub fn over(memory: LocalMemory, geometry: &Geometry) -> Result<Self> {
        if memory.len_bytes < Self::len_bytes(geometry) || !memory.start.as_ptr().addr().is_multiple_of(64) {
            return Err(Error::Invalid(
                "the local segment is too small or misaligned: another build made it; stop its processes and remove it".into(),
            ));
        }
        let segment = Segment { memory, locks: geometry.locks as usize, request_lines: geometry.request_lines() as usize };
        match segment.header().version.compare_exchange(0, VERSION, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(segment),
            Err(VERSION) => Ok(segment),
            Err(found) => Err(Error::Invalid(format!(
                "the local segment has version {found}, this build {VERSION}: stop the older processes of this machine first"
            ))),
        }
    }

    /// The memory after the segment, for the layers above.
    pub fn behind(&self) -> LocalMemory {
        let end = (Self::LOCKS_AT + self.locks * size_of::<LocalLock>() + self.request_lines * size_of::<LocalRequestLine>())
            .next_multiple_of(64);
        // SAFETY: `over` checked that the memory is at least as long as the segment, whose size this is.
        let start = unsafe { self.memory.start.byte_add(end) };
        LocalMemory { start, len_bytes: self.memory.len_bytes - end, owner: self.memory.owner.clone() }
    }

    /// The membership.
    pub fn header(&self) -> &Header {
        // SAFETY: `over` checked size and alignment, the memory stays mapped with `self`, and Header is atomics only, valid for any bytes.
        unsafe { self.memory.start.cast::<Header>().as_ref() }
    }

    /// Lock `lock`, which must be below the pool's number of locks.
    pub fn lock(&self, lock: u32) -> &LocalLock {
        &self.all_locks()[lock as usize]
    }

    /// Every lock.
    pub fn all_locks(&self) -> &[LocalLock] {
        // SAFETY: `over` checked that the array lies inside the mapping; LocalLock is atomics only, valid for any bytes.
        unsafe { std::slice::from_raw_parts(self.memory.start.byte_add(Self::LOCKS_AT).cast::<LocalLock>().as_ptr(), self.locks) }
    }

    /// Every request line.
    pub fn request_lines(&self) -> &[LocalRequestLine] {
        let at = Self::LOCKS_AT + self.locks * size_of::<LocalLock>();
        // SAFETY: as in `all_locks`.
        unsafe { std::slice::from_raw_parts(self.memory.start.byte_add(at).cast::<LocalRequestLine>().as_ptr(), self.request_lines) }
    }

    /// Enters a process into the table; the result is its index.
    pub fn attach(&self, process: ProcessId) -> Result<usize> {
        for (index, entry) in self.header().processes.iter().enumerate() {
            if entry.pid.compare_exchange(0, process.pid, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                entry.start.store(process.start, Ordering::Release);
                entry.generation.fetch_add(1, Ordering::AcqRel);
                entry.operations.store(0, Ordering::SeqCst);
                return Ok(index);
            }
        }
        Err(Error::Full {
            what: "process table of this host",
            limit: MAX_PROCESSES as u64,
            advice: "attach fewer processes of this machine",
        })
    }

    /// The tag under which a process owns local mutexes.
    pub fn tag_of(&self, index: usize) -> u32 {
        let generation = self.header().processes[index].generation.load(Ordering::Acquire) & 0x7fff;
        generation << 16 | (index as u32 + 1)
    }

    /// The process that a tag names, if the entry is still that process's.
    pub fn process_of(&self, tag: u32) -> Option<ProcessId> {
        let index = (tag & 0xffff).checked_sub(1)? as usize;
        let entry = self.header().processes.get(index)?;
        let process = ProcessId { pid: entry.pid.load(Ordering::Acquire), start: entry.start.load(Ordering::Acquire) };
        (process.pid != 0 && self.tag_of(index) == tag & 0x7fff_ffff).then_some(process)
    }

    /// Starts over for a new incarnation: every lock idle, no heartbeat. No other process may use the segment meanwhile.
    pub fn reset_locks(&self) {
        for lock in self.all_locks() {
            // DIRTY may go: a grant that ends because its incarnation did makes the next holder repair anyway.
            lock.flags.store(0, Ordering::Release);
            lock.grant.store(0, Ordering::Release);
        }
        for line in self.request_lines() {
            line.held.store(0, Ordering::Release);
        }
    }

    /// Begins a session of this machine: no process of the one before is left, and what it had claimed is not this one's.
    pub fn begin_session(&self, random: [u64; 2]) {
        let header = self.header();
        header.seat.store(0, Ordering::Release);
        // Zero means "no session".
        header.session[0].store(random[0] | 1, Ordering::Release);
        header.session[1].store(random[1], Ordering::Release);
    }

    /// The session of this machine.
    pub fn session(&self) -> [u8; 16] {
        let mut session = [0; 16];
        for (half, bytes) in self.header().session.iter().zip(session.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&half.load(Ordering::Acquire).to_le_bytes());
        }
        session
    }

    /// Empties every leftover of the processes: none of them runs any more. One may have died in the middle of its entry, and
    /// none that comes later may wait for a mutex of theirs.
    pub fn forget_processes(&self) {
        let header = self.header();
        for entry in &header.processes {
            entry.start.store(0, Ordering::Release);
            entry.operations.store(0, Ordering::SeqCst);
            entry.pid.store(0, Ordering::Release);
        }
        header.upkeep.service.free();
        header.upkeep.summary.free();
        header.upkeep.witness.free();
        header.upkeep.heartbeat_at_ns.store(0, Ordering::Release);
        self.all_locks().iter().for_each(|lock| lock.mutex.free());
        self.request_lines().iter().for_each(|line| line.mutex.free());
    }

    /// Refuses a membership that no join can have written: a process that attaches acts under it.
    pub fn check_membership(&self, geometry: &Geometry) -> Result<()> {
        let (slot, incarnation) = (self.header().slot.load(Ordering::Acquire), self.header().incarnation.load(Ordering::Acquire));
        if slot < geometry.slots && (1..MAX_NUMBER).contains(&incarnation) {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "the local segment tells of slot {slot} and incarnation {incarnation}, which cannot be: stop this machine's processes and \
             remove it"
        )))
    }

    /// Whether any attached process but the one at `except` is alive.
    pub fn has_another(&self, except: usize, is_alive: impl Fn(ProcessId) -> bool) -> bool {
        self.header().processes.iter().enumerate().filter(|(index, _)| *index != except).any(|(_, entry)| {
            let process = ProcessId { pid: entry.pid.load(Ordering::Acquire), start: entry.start.load(Ordering::Acquire) };
            process.pid != 0 && process.start != 0 && is_alive(process)
        })
    }

    /// Tags of attached processes that no longer exist. The caller holds the service mutex.
    pub fn dead_tags(&self, is_alive: impl Fn(ProcessId) -> bool) -> Vec<u32> {
        let processes = self.header().processes.iter().enumerate();
        let gone = processes.filter(|(_, entry)| {
            let process = ProcessId { pid: entry.pid.load(Ordering::Acquire), start: entry.start.load(Ordering::Acquire) };
            process.pid != 0 && process.start != 0 && !is_alive(process)
        });
        gone.map(|(index, _)| self.tag_of(index)).collect()
    }

    /// Forgets processes that are [gone](Segment::gone), and with them the operations that they had under way.
    pub fn forget(&self, gone: &[u32]) {
        for (index, entry) in self.header().processes.iter().enumerate() {
            if gone.contains(&self.tag_of(index)) {
                entry.start.store(0, Ordering::Release);
                entry.operations.store(0, Ordering::SeqCst);
                entry.pid.store(0, Ordering::Release);
            }
        }
    }

    /// Operations under way in all attached processes.
    pub fn operations(&self) -> u64 {
        self.header().processes.iter().fold(0u64, |sum, entry| sum.saturating_add(entry.operations.load(Ordering::SeqCst)))
    }
}
