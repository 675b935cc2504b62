// SPDX-License-Identifier: Apache-2.0
//! Lent blocks: an engine whose paged KV cache lies in memory of the pool publishes a block without copying it. The specification is
//! protocols/LENT.md.
//!
//! The memory is a *region*: one kept block of the allocator, which one process writes, with plain stores. To publish a block of it the
//! process *lends* it: it promises not to write to it. Readers on any host copy it from where it lies. Before the engine writes to the
//! block again the process *takes it back*, which is one line and no wait for anybody. In the cache's index a lent block is an ordinary one
//! whose cell holds a reference of 64 bytes; so format the pool with some small cells beside the large ones.
//!
//! | module | what it does |
//! |---|---|
//! | `lines`, `shape` | the lines of a region; where its blocks lie |
//! | `lend` | lending and taking back |
//! | `follow` | a pull of a lent block |
//! | `reap` | what becomes of a region whose process is gone |

mod follow;
mod lend;
mod lines;
mod reap;
mod shape;

pub use lend::{Lend, Lending, Offer};
pub use reap::reap;
pub use shape::Part;
pub(crate) use shape::Shapes;

use super::Cache;
use crate::alloc::Allocator;
use crate::copy::LocalRange;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::Lines;
use crate::lock::LOCK_CHUNKS;
use lend::State;
use lines::{Head, Standing};
use shape::{MAX_PARTS, Place, Shape, head_seal, refused};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};

/// Tries to keep the block of a region while this host is fenced again and again.
const KEEP_TRIES: usize = 16;

/// How large a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSize {
    /// Bytes of memory for the engine, from a multiple of 4096 on.
    pub len_bytes: u64,
    /// Blocks that the engine cuts it into.
    pub blocks: u32,
    /// Most parts of a block.
    pub parts: usize,
}

/// Memory of the pool that this process alone writes, whose blocks it can lend.
///
/// All methods may be called from any thread. A region that is dropped without [`LentRegion::close`] stays what it is until this process
/// ends: lent blocks can be pulled, and the memory is nobody else's.
pub struct LentRegion {
    cache: Cache,
    allocator: Arc<Allocator>,
    place: Place,
    head: Head,
    shape: OnceLock<Shape>,
    states: Mutex<lend::States>,
    closed: AtomicBool,
}

impl LentRegion {
    /// Makes a region, which outlives this process until somebody [reaps](reap) it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size that cannot be meant; [`Error::Full`] when the pool has no room; [`Error::Fenced`],
    /// [`Error::Timeout`]; those of the memory.
    pub fn create(cache: &Cache, allocator: &Arc<Allocator>, size: RegionSize) -> Result<LentRegion> {
        let parts_most = u16::try_from(size.parts).ok().filter(|&parts| parts > 0);
        let parts_most = parts_most.ok_or_else(|| Error::Invalid(format!("a block has 1 to {MAX_PARTS} parts, not {}", size.parts)))?;
        let (host, lines) = (cache.host(), cache.host().lines());
        let nonce = host.platform().random();
        let place = |region| Place { region, nonce, blocks: size.blocks, parts_most, len_bytes: size.len_bytes };
        place(lines.layout().chunk_offset(0)?).check(lines.layout()).map_err(refused)?;
        reap(host, allocator)?;
        let block = allocator.alloc(place(0).wanted_bytes())?;
        let place = place(block.offset);
        // Kept before the first store: what this process leaves in its host's caches must not meet the data of whoever has the memory next.
        if let Err(error) = keep(cache, allocator, block.offset) {
            let _ = allocator.free(block.offset);
            return Err(error);
        }
        point!("lent.kept");
        let process = host.platform().process();
        let head = Head {
            version: Head::VERSION,
            slot: host.slot(),
            nonce,
            machine: host.platform().machine().0,
            len_bytes: size.len_bytes,
            pid: process.pid,
            start: process.start,
            blocks: size.blocks,
            parts_most,
            incarnation: host.incarnation(),
            ..Head::default()
        };
        let states = Mutex::new(lend::States::new(size.blocks));
        let region = LentRegion {
            cache: cache.clone(),
            allocator: allocator.clone(),
            place,
            head,
            shape: OnceLock::new(),
            states,
            closed: false.into(),
        };
        region.publish_head(head)?;
        point!("lent.made");
        // What this host's caches hold of the memory's life before may be anything, and must not become a part of a block.
        if !mutant!("lent.made_unflushed") {
            region.flush_all()?;
        }
        Ok(region)
    }

    fn lines(&self) -> &Lines {
        self.cache.host().lines()
    }

    fn publish_head(&self, head: Head) -> Result<()> {
        let (lines, region) = (self.lines(), self.place.region);
        lines.publish_in(head_seal(lines, region), 0, region, head)
    }

    /// Writes back and drops everything that this host's caches hold of the region.
    fn flush_all(&self) -> Result<()> {
        flush(self.lines(), &self.place)
    }

    /// Pool offset of the region's memory.
    pub fn offset(&self) -> u64 {
        self.place.memory()
    }

    /// Bytes of the region's memory.
    pub fn len_bytes(&self) -> u64 {
        self.place.len_bytes
    }

    /// Blocks of the region.
    pub fn blocks(&self) -> u32 {
        self.place.blocks
    }

    /// Where this process maps the region's memory; `None` where there is no mapping. Nobody else writes to it, and this process writes
    /// with plain stores, to blocks that are not lent.
    pub fn address(&self) -> Option<NonNull<u8>> {
        self.lines().memory().address(self.offset(), self.len_bytes())
    }

    /// Tells which parts make up a block, once and before the first block is lent. Parts do not overlap.
    ///
    /// # Errors
    /// [`Error::Invalid`] for parts that do not lie in the region, or when they were told before; those of the memory.
    pub fn set_parts(&self, parts: &[Part]) -> Result<()> {
        let shape = Shape::new(self.place, parts.to_vec()).map_err(refused)?;
        let _states = self.states();
        if self.shape.get().is_some() {
            return Err(refused("its parts were told before"));
        }
        shape.publish(self.lines())?;
        self.publish_head(Head { parts: parts.len() as u16, ..self.head })?;
        point!("lent.shaped");
        self.shape.set(shape).map_err(|_| refused("its parts were told before"))
    }

    fn shape(&self) -> Result<&Shape> {
        self.shape.get().ok_or_else(|| refused("its parts were not told yet"))
    }

    /// Length of a block in bytes; 0 until the parts are told.
    pub fn block_bytes(&self) -> u64 {
        self.shape.get().map_or(0, Shape::block_bytes)
    }

    /// The parts of a block by address, in order, for copies into a block of one's own ([`Cache::pull_raw`]). As long as it is not lent
    /// and nobody else of this process uses it, it is memory like any other to them.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such block, the parts were not told, or there is no mapping.
    pub fn pieces(&self, block: u32) -> Result<Vec<LocalRange>> {
        self.check_block(block)?;
        let memory = self.lines().memory();
        let piece = |(offset, len_bytes)| {
            let address = memory.address(offset, len_bytes).ok_or_else(|| refused("this process has no mapping of it"))?;
            Ok(LocalRange { address, len_bytes: len_bytes as usize })
        };
        self.shape()?.ranges(block).map(piece).collect()
    }

    fn check_block(&self, block: u32) -> Result<()> {
        if block < self.place.blocks {
            return Ok(());
        }
        Err(Error::Invalid(format!("block {block} of a region of {} blocks", self.place.blocks)))
    }

    /// The states of the blocks. Held across the lines that say the same, and polled for: threads of simulated hosts cannot block.
    fn states(&self) -> MutexGuard<'_, lend::States> {
        let mut round = 0;
        loop {
            match self.states.try_lock() {
                Ok(guard) => return guard,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => self.cache.host().platform().relax(round),
            }
            round = round.saturating_add(1);
        }
    }

    /// Blocks that are lent now.
    pub fn lent(&self) -> usize {
        self.states().of.iter().filter(|state| matches!(state, State::Lent { .. })).count()
    }

    /// Gives the memory back to the pool. The engine does not use it any more.
    ///
    /// # Errors
    /// [`Error::Fenced`], [`Error::Timeout`]: to be called again; those of the memory.
    pub fn close(&self) -> Result<()> {
        self.take_back_all()?;
        self.tidy()?;
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        void(self.lines(), &self.place)?;
        let freed = self.allocator.free(self.place.region);
        if matches!(freed, Err(Error::Fenced { .. })) {
            // Still allocated: by its head it can be told what it is, until the next try.
            self.publish_head(self.head)?;
        } else {
            self.closed.store(true, Ordering::Release);
        }
        freed
    }
}

/// Keeps a block, through a fence and re-join of this host: where it cannot be told whether it is kept, it could not be freed either.
fn keep(cache: &Cache, allocator: &Allocator, offset: u64) -> Result<()> {
    for _ in 0..KEEP_TRIES {
        match allocator.keep(offset) {
            Err(Error::Fenced { .. }) => drop(cache.host().acquire(LOCK_CHUNKS, cache.config().lock_timeout_ms)?),
            other => return other,
        }
    }
    allocator.keep(offset)
}

fn flush(lines: &Lines, place: &Place) -> Result<()> {
    lines.memory().flush_range(place.region, place.end() - place.region)?;
    lines.memory().fence_all();
    Ok(())
}

/// Makes memory of a region ordinary memory again: no block of it is lent, whoever looks, and no cache of this host holds anything of it
/// that could be written back onto what comes next. The head goes last, since by it another process can do the rest.
fn void(lines: &Lines, place: &Place) -> Result<()> {
    if !mutant!("lent.freed_while_lent") {
        for block in 0..place.blocks {
            lines.memory().write_line(place.standing(block), &crate::line::Line::ZERO)?;
        }
        lines.memory().fence_all();
    }
    point!("lent.voided");
    if !mutant!("lent.freed_unflushed") {
        flush(lines, place)?;
    }
    point!("lent.flushed");
    lines.memory().write_line(place.region, &crate::line::Line::ZERO)?;
    lines.memory().fence_all();
    point!("lent.void");
    Ok(())
}

impl std::fmt::Debug for LentRegion {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "LentRegion {:?}", self.place)
    }
}

/// A block that stands like this may be written.
fn held_line(nonce: u64, block: u32, generation: u64) -> Standing {
    Standing { state: Standing::HELD, block, generation, nonce, ..Standing::default() }
}
