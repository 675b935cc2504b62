// SPDX-License-Identifier: Apache-2.0
//! The allocator: chunks for hosts, blocks for all processes (TraCT section 3.5; CACHE.md D5 and section 7).
//!
//! | level | who has it | kept where | changed under |
//! |---|---|---|---|
//! | chunk | a host | `Claim` lines of that host | the chunk lock |
//! | chunk | one process of that host | [`LocalArea`], memory of that machine | the chunk lock |
//! | block | the process that allocated it | free lists of that process; `KeepMap` bit if kept | a mutex of the process |
//!
//! A block has one of two lifetimes. [`Allocator::alloc`] gives a *scratch* block and writes nothing shared: it is free again when the
//! process that allocated it is gone. [`Allocator::keep`] publishes its bit in the chunk's keep map: from then on it outlives process and
//! host, until it is freed. So a block that is handed to another process is kept first. A process that takes a chunk over, after a restart,
//! from a dead process or from a host proven dead, reads exactly the kept blocks back; nothing is lost, nothing is there twice.
//!
//! A fenced host's chunks stay its own until its death is proven, so a late write of a zombie meets no data of others. Therefore the lines
//! of a chunk (`ChunkHead`, `KeepMap`) need no fence check to be safe: their writer has the chunk for as long as it can write at all.

mod audit;
mod claims;
mod class;
mod content;
mod freebox;
mod freeing;
mod heap;
mod load;
mod local;
mod remains;
mod runs;
mod spare;

pub use audit::{AllocAudit, Finding, audit, block_of, owner_of};
pub(crate) use freebox::LOST_NUMBERS;
pub use local::LocalArea;
pub(crate) use remains::HOOKS;

use crate::background::{held, try_held};
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::{Host, Op};
use crate::limits::MIN_BLOCK_BYTES;
use crate::line::Lines;
use crate::lock::LockGuard;
use crate::media::{ChunkHead, Layout};
use class::Classes;
use freeing::Begun;
use heap::{BlockSet, Heap, HeapChunk, Kept};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Locks that serialise changes of keep-map lines; more than one so that chunks do not wait for each other.
const STRIPES: usize = 16;
/// Chunks that one service round looks at for owners that died.
const SWEEP_CHUNKS: u64 = 4 * 448;
/// Empty chunks that one service round takes out of a size class.
const EMPTY_PER_ROUND: usize = 8;

/// How the allocator behaves.
#[derive(Clone, Debug)]
pub struct AllocConfig {
    /// Longest wait for the chunk lock, in milliseconds; `None` = [`crate::host::HostConfig::default_timeout_ms`] of the host.
    pub lock_timeout_ms: Option<u64>,
    /// Chunks without any block that a process keeps for later instead of giving them back to the pool.
    pub spare_chunks: usize,
}

impl Default for AllocConfig {
    fn default() -> Self {
        AllocConfig { lock_timeout_ms: None, spare_chunks: 2 }
    }
}

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Pool offset, a multiple of 64.
    pub offset: u64,
    /// Size in bytes: at least the requested size.
    pub len_bytes: u64,
}

/// What a process has of the pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All chunks of this process.
    pub owned_bytes: u64,
    /// Allocated blocks that end with this process.
    pub scratch_bytes: u64,
    /// Allocated blocks that outlive this process and host.
    pub kept_bytes: u64,
    /// Chunks without any block, ready for any size.
    pub spare_bytes: u64,
    /// Chunks that cannot be used because their metadata does not verify.
    pub bad_bytes: u64,
    /// Frees that this host was asked for and refused: double frees, offsets that are no blocks.
    pub rejected_frees: u64,
    /// Blocks that wait to be freed by another process or host.
    pub pending_frees: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkUse {
    None,
    Heap {
        class: usize,
        place: u32,
    },
    /// Spare, part of a run, bad, or on the way from one to the other.
    Other,
}

const PLACE_BITS: u32 = 24;
const OTHER: u32 = 0xff << PLACE_BITS;

impl ChunkUse {
    fn encode(self) -> u32 {
        match self {
            ChunkUse::None => 0,
            ChunkUse::Heap { class, place } => (class as u32 + 1) << PLACE_BITS | place,
            ChunkUse::Other => OTHER,
        }
    }

    fn decode(word: u32) -> Self {
        match word {
            0 => ChunkUse::None,
            OTHER => ChunkUse::Other,
            word => ChunkUse::Heap { class: (word >> PLACE_BITS) as usize - 1, place: word & ((1 << PLACE_BITS) - 1) },
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Run {
    count: u64,
    kept: bool,
}

/// Chunks of this process that are in no heap.
#[derive(Default)]
struct Other {
    spare: Vec<u64>,
    /// Those of the spare ones that have not been used since they were brought out of this machine's caches.
    flushed: BTreeSet<u64>,
    /// By first chunk.
    runs: BTreeMap<u64, Run>,
    bad: BTreeMap<u64, &'static str>,
}

/// The allocator of one process. All methods may be called from any thread.
pub struct Allocator {
    host: Host,
    local: LocalArea,
    config: AllocConfig,
    classes: Classes,
    heaps: Vec<Mutex<Heap>>,
    places: Box<[AtomicU32]>,
    other: Mutex<Other>,
    stripes: [Mutex<()>; STRIPES],
    /// Incarnation of the host that the lists follow.
    incarnation: AtomicU32,
    /// Claim line where the last chunk was found.
    hint: AtomicU64,
    /// Chunk where the next sweep begins.
    swept: AtomicU64,
    /// Frees for which the local area had no room.
    backlog: Mutex<Vec<u64>>,
    /// Blocks freed for other hosts, by slot, that no caller may get before those hosts have the acknowledgement.
    untold: Mutex<Vec<(u16, Begun)>>,
    /// Held by the thread that frees what dead processes kept.
    /// Held by the thread that gives chunks back to the pool.
    giving: Mutex<()>,
}

fn not_allocated(offset: u64) -> Error {
    Error::NotFound(format!("an allocated block at pool offset {offset:#x} (freed before?)"))
}

impl Allocator {
    /// Starts the allocator of this process and takes over what this host has and no living process of it.
    ///
    /// `local` is the same memory for every process of the host.
    ///
    /// # Errors
    /// Those of [`Host::acquire`]; [`Error::BadLine`] when this host's chunks cannot be determined.
    pub fn attach(host: &Host, local: LocalArea, config: AllocConfig) -> Result<Self> {
        let layout = host.lines().layout();
        let classes = Classes::new(layout.geometry().chunk_bytes);
        // Hosts begin their search for chunks in different places, so that they seldom want the same claim lines.
        let hint = layout.claim_lines() * u64::from(host.slot()) / u64::from(layout.geometry().slots);
        let allocator = Allocator {
            host: host.clone(),
            local,
            config,
            heaps: (0..classes.count()).map(|_| Mutex::default()).collect(),
            classes,
            places: (0..layout.chunks()).map(|_| AtomicU32::new(0)).collect(),
            other: Mutex::default(),
            stripes: Default::default(),
            incarnation: AtomicU32::new(0),
            hint: AtomicU64::new(hint),
            swept: AtomicU64::new(0),
            backlog: Mutex::default(),
            untold: Mutex::default(),
            giving: Mutex::default(),
        };
        drop(allocator.lock_chunks()?);
        allocator.sweep(allocator.layout().chunks())?;
        Ok(allocator)
    }

    fn lines(&self) -> &Lines {
        self.host.lines()
    }

    fn layout(&self) -> &Layout {
        self.host.lines().layout()
    }

    fn tag(&self) -> u32 {
        self.host.inner.tag
    }

    fn place(&self, chunk: u64) -> ChunkUse {
        self.places.get(chunk as usize).map_or(ChunkUse::None, |word| ChunkUse::decode(word.load(Ordering::Acquire)))
    }

    fn set_place(&self, chunk: u64, place: ChunkUse) {
        if let Some(word) = self.places.get(chunk as usize) {
            word.store(place.encode(), Ordering::Release);
        }
    }

    fn blocks_per_chunk(&self, class: usize) -> u32 {
        (self.layout().geometry().chunk_bytes / self.classes.bytes(class)) as u32
    }

    fn block(&self, class: usize, (chunk, block): (u64, u32)) -> Block {
        let len_bytes = self.classes.bytes(class);
        let start = self.layout().data_offset() + chunk * self.layout().geometry().chunk_bytes;
        Block { offset: start + u64::from(block) * len_bytes, len_bytes }
    }

    /// The block of a chunk that `offset` lies in; none after the last one.
    fn block_around(&self, class: usize, chunk: u64, offset: u64) -> Option<u32> {
        let within = offset.checked_sub(self.layout().data_offset() + chunk * self.layout().geometry().chunk_bytes)?;
        let block = (within / self.classes.bytes(class)) as u32;
        (block < self.blocks_per_chunk(class)).then_some(block)
    }

    fn block_at(&self, class: usize, chunk: u64, offset: u64) -> Option<u32> {
        let block = self.block_around(class, chunk, offset)?;
        (self.block(class, (chunk, block)).offset == offset).then_some(block)
    }

    /// Begins work that publishes lines of this process's chunks, after a re-join under the new incarnation.
    fn work(&self) -> Result<Op<'_>> {
        self.work_after(|| self.lock_chunks())
    }

    /// [`Allocator::work`], which takes the chunk lock by `lock` if it has to.
    fn work_after<'a>(&'a self, lock: impl FnOnce() -> Result<LockGuard<'a>>) -> Result<Op<'a>> {
        let op = self.host.enter()?;
        if op.incarnation() == self.incarnation.load(Ordering::Acquire) {
            return Ok(op);
        }
        drop(op);
        drop(lock()?);
        self.host.enter()
    }

    fn deadline_ns(&self, timeout_ms: u64) -> u64 {
        self.host.platform().now_ns().saturating_add(timeout_ms.saturating_mul(1_000_000))
    }

    /// The lock for changes of a chunk's keep map. It is held across publishes, so waiting for it goes through the platform.
    fn stripe(&self, chunk: u64) -> MutexGuard<'_, ()> {
        let mutex = &self.stripes[chunk as usize % STRIPES];
        let mut round = 0;
        loop {
            if let Some(guard) = try_held(mutex) {
                return guard;
            }
            self.host.platform().relax(round);
            round += 1;
        }
    }

    fn lock_timeout_ms(&self) -> u64 {
        self.config.lock_timeout_ms.unwrap_or_else(|| self.host.config().default_timeout_ms())
    }

    /// Allocates a scratch block of at least `len_bytes`. Its content is undefined.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a length of zero or more than the pool has; [`Error::Full`]; when a chunk is needed, those of
    /// [`Host::acquire`].
    pub fn alloc(&self, len_bytes: u64) -> Result<Block> {
        self.alloc_within(len_bytes, self.lock_timeout_ms())
    }

    /// As [`Allocator::alloc`], where the chunk lock, should a chunk be needed, is waited for no longer than `timeout_ms`.
    pub fn alloc_within(&self, len_bytes: u64, timeout_ms: u64) -> Result<Block> {
        if len_bytes == 0 {
            return Err(Error::Invalid("a block has at least one byte".into()));
        }
        let Some(class) = self.classes.holding(len_bytes) else {
            return self.alloc_run(len_bytes, self.deadline_ns(timeout_ms));
        };
        let taken = held(&self.heaps[class]).take();
        match taken {
            Some(block) => Ok(self.block(class, block)),
            None => self.refill(class, self.deadline_ns(timeout_ms)),
        }
    }

    /// Cuts one more chunk for a class and takes its first block.
    fn refill(&self, class: usize, deadline_ns: u64) -> Result<Block> {
        let chunk = match self.pop_spare() {
            Some(chunk) => chunk,
            None => match self.claim_one(deadline_ns) {
                Err(full @ Error::Full { .. }) => self.steal_empty()?.ok_or(full)?,
                other => other?,
            },
        };
        point!("alloc.uncut");
        let cut = self
            .work_after(|| self.lock_chunks_until(deadline_ns))
            .and_then(|op| self.publish_head(&op, chunk, ChunkHead::BLOCKS, self.classes.bytes(class), 0));
        if let Err(error) = cut {
            held(&self.other).spare.push(chunk);
            return Err(error);
        }
        point!("alloc.cut");
        let mut heap = held(&self.heaps[class]);
        let place = heap.add(HeapChunk::empty(chunk, self.blocks_per_chunk(class)));
        self.set_place(chunk, ChunkUse::Heap { class, place });
        // The new chunk is the next one that the heap takes from, and the heap is still locked.
        heap.take().map(|block| self.block(class, block)).ok_or_else(|| not_allocated(chunk))
    }

    /// Makes the block around `offset` outlive this process and host: the offset that others get may lie in any part of it. Keeping a kept
    /// block again does nothing.
    ///
    /// # Errors
    /// [`Error::NotFound`] when nothing there is allocated, or by another process; [`Error::Fenced`]: it may or may not be kept.
    pub fn keep(&self, offset: u64) -> Result<()> {
        let within = self.layout().chunk_of(offset).ok_or_else(|| not_allocated(offset))?;
        let op = self.work()?;
        let chunk = self.first_chunk_around(within);
        let _stripe = self.stripe(chunk);
        let line = match self.place(chunk) {
            ChunkUse::None => return Err(not_allocated(offset)),
            ChunkUse::Heap { class, place } => {
                let block = self.block_around(class, chunk, offset).ok_or_else(|| not_allocated(offset))?;
                match held(&self.heaps[class]).keep(place, chunk, block) {
                    Kept::Publish(line) => line,
                    Kept::Already => return Ok(()),
                    Kept::NotAllocated => return Err(not_allocated(offset)),
                }
            }
            ChunkUse::Other => {
                let mut other = held(&self.other);
                let run = other.runs.get_mut(&chunk).filter(|run| within - chunk < run.count).ok_or_else(|| not_allocated(offset))?;
                run.kept = true;
                let mut first = BlockSet::new(1);
                first.insert(0);
                heap::KeepLine { line: 0, bits: first.line(0) }
            }
        };
        point!("alloc.keep");
        self.publish_keep(&op, chunk, line.line, line.bits)?;
        point!("alloc.kept");
        // Its full fence is what counts: the bit has arrived when this returns. The fence rows are read for early notice only, because
        // no host takes the chunk over before this host's death is proven.
        self.host.check_fences(&op)
    }

    /// The first chunk of the block of several chunks that a chunk is a part of; else the chunk.
    fn first_chunk_around(&self, chunk: u64) -> u64 {
        let other = held(&self.other);
        let last = other.runs.range(..=chunk).next_back();
        last.filter(|(first, run)| chunk - **first < run.count).map_or(chunk, |(first, _)| *first)
    }

    fn is_chunk_start(&self, chunk: u64, offset: u64) -> bool {
        self.layout().chunk_offset(chunk).is_ok_and(|start| start == offset)
    }

    /// Frees a block. One of another process or host is freed there soon; a request that turns out wrong is only counted there.
    ///
    /// A second free of a block that its owner has meanwhile given to another caller cannot be distinguished from a first one.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no allocated block of this process begins at `offset`, as after a double free; [`Error::Fenced`] for a kept
    /// block or one of several chunks: it is still allocated.
    pub fn free(&self, offset: u64) -> Result<()> {
        let chunk = self.layout().chunk_of(offset).ok_or_else(|| not_allocated(offset))?;
        if self.free_here(chunk, offset)? || (offset.is_multiple_of(MIN_BLOCK_BYTES) && self.free_elsewhere(offset)) {
            return Ok(());
        }
        Err(not_allocated(offset))
    }

    /// One round of the allocator's upkeep: frees asked for by others, chunks of processes that died, empty chunks back to the pool.
    ///
    /// It may wait for the chunk lock, and that needs the host's own service: never call it on the thread that runs that one.
    pub fn service_round(&self) -> Result<()> {
        self.post()?;
        self.sweep(SWEEP_CHUNKS)?;
        for class in 0..self.heaps.len() {
            self.uncut_empty(class, 1, EMPTY_PER_ROUND)?;
        }
        self.give_back(self.config.spare_chunks)
    }

    /// Adopts every chunk that only hosts claim whose death is proven; returns how many.
    ///
    /// Looks without the chunk lock first, so that hosts that do this now and then do not hold it whenever one of them dies.
    pub fn adopt_dead(&self) -> Result<u64> {
        // After a re-join this host first claims its own chunks again.
        drop(self.work()?);
        if !self.may_adopt()? {
            return Ok(0);
        }
        let guard = self.lock_chunks()?;
        self.adopt(&guard, u64::MAX, false)
    }

    /// Gives everything back that does not hold a kept block: for a process that ends in good order. Kept blocks go to another process of
    /// this host, or, once the host has left, to the host that adopts its chunks.
    ///
    /// Nothing of this process may still use its scratch blocks.
    pub fn close(self) -> Result<()> {
        self.post()?;
        let mine: Vec<u64> = (0..self.layout().chunks()).filter(|&chunk| self.place(chunk) != ChunkUse::None).collect();
        // Before the lock, which others want meanwhile. What belongs to a kept block stays where it is.
        mine.iter().filter(|&&chunk| !self.is_in_kept_run(chunk)).try_for_each(|&chunk| self.flush_stores(chunk))?;
        let guard = self.lock_chunks()?;
        for &chunk in &mine {
            self.forget(chunk);
            if self.local.owner(chunk) == self.tag() {
                self.local.set_owner(chunk, 0);
            }
        }
        for chunk in mine {
            let (content, head) = content::read(self.lines(), &self.classes, chunk)?;
            if content == content::Content::Nothing {
                if head.state != ChunkHead::UNCUT {
                    self.publish_head(guard.op(), chunk, ChunkHead::UNCUT, 0, 0)?;
                }
                self.unclaim(&guard, chunk)?;
            }
        }
        Ok(())
    }

    /// What this process has of the pool.
    pub fn usage(&self) -> Usage {
        let chunk_bytes = self.layout().geometry().chunk_bytes;
        let mut usage = Usage { rejected_frees: self.local.count_rejected_frees(), ..Usage::default() };
        usage.pending_frees = self.local.pending().count() as u64 + held(&self.backlog).len() as u64;
        for (class, heap) in self.heaps.iter().enumerate() {
            let (chunks, scratch, kept) = held(heap).count();
            usage.owned_bytes += chunks * chunk_bytes;
            usage.scratch_bytes += scratch * self.classes.bytes(class);
            usage.kept_bytes += kept * self.classes.bytes(class);
        }
        let other = held(&self.other);
        usage.spare_bytes = other.spare.len() as u64 * chunk_bytes;
        usage.bad_bytes = other.bad.len() as u64 * chunk_bytes;
        let run_bytes = |kept| other.runs.values().filter(|run| run.kept == kept).map(|run| run.count * chunk_bytes).sum::<u64>();
        usage.kept_bytes += run_bytes(true);
        usage.scratch_bytes += run_bytes(false);
        usage.owned_bytes += usage.spare_bytes + usage.bad_bytes + run_bytes(true) + run_bytes(false);
        usage
    }
}

#[cfg(test)]
mod tests;
