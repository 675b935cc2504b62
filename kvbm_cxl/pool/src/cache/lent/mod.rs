// SPDX-License-Identifier: Apache-2.0
//! Lent blocks: an engine whose paged KV cache lies in memory of the pool publishes a block without copying it. The specification is
//! protocols/LENT.md.
//!
//! The memory is a *region*: one kept block of the allocator, which one process writes, with plain stores. To publish a block of it the
//! process *lends* it: it promises not to write to it. Readers on any host copy it from where it lies. Before the engine writes to the
//! block again the process *takes it back*, which is one line and no wait for any reader. In the cache's index a lent block is an ordinary
//! one whose cell holds a reference of 64 bytes; so format the pool with some small cells beside the large ones.
//!
//! | module | what it does |
//! |---|---|
//! | `lines`, `shape` | the lines of a region; where its blocks lie |
//! | `memory` | the memory of a region, as long as it is used |
//! | `lend` | lending and taking back |
//! | `fill` | pulls into blocks of a region |
//! | `follow` | a pull of a lent block |
//! | `reap` | what becomes of a region whose process is gone |

mod fill;
mod follow;
mod lend;
mod lines;
mod memory;
mod reap;
mod shape;

pub use lend::{Lend, Lending, Offer};
pub use memory::RegionMemory;
pub use reap::{is_region, reap};
pub use shape::Part;
pub(crate) use shape::Shapes;

use super::Cache;
use crate::alloc::Allocator;
use crate::copy::LocalRange;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::Lines;
use lend::LentBlockState;
use lines::LentLine;
use shape::{RegionPlace, Shape, refused};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};

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

/// Blocks of memory of the pool that this process alone writes, and can lend.
///
/// All methods may be called from any thread. The memory outlives the region as long as a caller holds it ([`LentRegion::memory`]). A
/// region that is dropped without [`LentRegion::close`] stays what it is until this process ends: lent blocks can be pulled, and the
/// memory has no other user.
pub struct LentRegion {
    cache: Cache,
    memory: Arc<RegionMemory>,
    shape: OnceLock<Shape>,
    states: Mutex<lend::States>,
}

impl LentRegion {
    /// Makes a region, which outlives this process until another process [reaps](reap) it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size that cannot be meant; [`Error::Full`] when the pool has no room; [`Error::Fenced`],
    /// [`Error::Timeout`]; those of the memory.
    pub fn create(cache: &Cache, allocator: &Arc<Allocator>, size: RegionSize) -> Result<LentRegion> {
        let memory = RegionMemory::create(cache, allocator, size)?;
        let states = Mutex::new(lend::States::new(size.blocks));
        Ok(LentRegion { cache: cache.clone(), memory: Arc::new(memory), shape: OnceLock::new(), states })
    }

    fn lines(&self) -> &Lines {
        self.cache.host().lines()
    }

    fn place(&self) -> &RegionPlace {
        self.memory.place()
    }

    /// The memory that the blocks lie in. Its last holder frees it, or this process's end does.
    pub fn memory(&self) -> &Arc<RegionMemory> {
        &self.memory
    }

    /// Blocks of the region.
    pub fn blocks(&self) -> u32 {
        self.place().blocks
    }

    /// Tells which parts make up a block, once and before the first block is lent. Parts do not overlap.
    ///
    /// # Errors
    /// [`Error::Invalid`] for parts that do not lie in the region, or when they were told before; those of the memory.
    pub fn set_parts(&self, parts: &[Part]) -> Result<()> {
        let shape = Shape::new(*self.place(), parts.to_vec()).map_err(refused)?;
        let _states = self.states();
        if self.shape.get().is_some() {
            return Err(refused("its parts were told before"));
        }
        shape.publish(self.lines())?;
        self.memory.tell_parts(parts.len() as u16)?;
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
    /// and no other thread of this process uses it, it is memory like any other to them.
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
        if block < self.blocks() {
            return Ok(());
        }
        Err(Error::Invalid(format!("block {block} of a region of {} blocks", self.blocks())))
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
        self.states().of.iter().filter(|state| matches!(state, LentBlockState::Lent { .. })).count()
    }

    /// Takes every block back and gives the memory back to the pool. The engine does not use it any more.
    ///
    /// # Errors
    /// [`Error::Fenced`], [`Error::Timeout`]: to be called again; those of the memory.
    pub fn close(&self) -> Result<()> {
        self.take_back_all()?;
        self.tidy()?;
        self.memory.free()
    }
}

fn flush(lines: &Lines, place: &RegionPlace) -> Result<()> {
    lines.memory().flush_range(place.region, place.end() - place.region)?;
    lines.memory().fence_all();
    Ok(())
}

/// Makes memory of a region ordinary memory again: no block of it is lent, to any reader, and no cache of this host holds anything of it
/// that could be written back onto what comes next. The head goes last, since by it another process can do the rest.
fn void(lines: &Lines, place: &RegionPlace) -> Result<()> {
    if !mutant!("lent.freed_while_lent") {
        for block in 0..place.blocks {
            lines.memory().write_line(place.standing(block), &crate::line::Line::ZERO)?;
        }
        lines.memory().fence_all();
    }
    point!("lent.voided");
    // Before the head goes: if the block is not freed any more, no process knows whose stores may lie in this machine's caches.
    flush(lines, place)?;
    point!("lent.flushed");
    lines.memory().write_line(place.region, &crate::line::Line::ZERO)?;
    lines.memory().fence_all();
    point!("lent.void");
    Ok(())
}

impl std::fmt::Debug for LentRegion {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "LentRegion {:?}", self.place())
    }
}

/// A block that stands like this may be written.
fn held_line(nonce: u64, block: u32, generation: u64) -> LentLine {
    LentLine { state: LentLine::HELD, block, generation, nonce, ..LentLine::default() }
}
