// SPDX-License-Identifier: Apache-2.0
//! The memory of a region: it is kept before it is first written, and freed only when it is unused and no store to it can still come.
//!
//! It stands apart from the region, because an engine may use it longer than the cache: tensors of a KV cache outlive the connector that
//! published its blocks.

use super::super::Cache;
use super::lines::Head;
use super::shape::{MAX_PARTS, RegionPlace, head_seal, refused};
use super::{RegionSize, flush, reap, void};
use crate::alloc::Allocator;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::line::Lines;
use crate::lock::LOCK_CHUNKS;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tries to keep the block of a region while this host is fenced again and again.
const KEEP_TRIES: usize = 16;

/// Memory of the pool that this process alone writes. Dropped without [`RegionMemory::free`] it has no user until this process ends.
pub struct RegionMemory {
    host: Host,
    allocator: Arc<Allocator>,
    place: RegionPlace,
    head: Head,
    is_freed: AtomicBool,
}

impl RegionMemory {
    pub(super) fn create(cache: &Cache, allocator: &Arc<Allocator>, size: RegionSize) -> Result<RegionMemory> {
        let parts_most = u16::try_from(size.parts).ok().filter(|&parts| parts > 0);
        let parts_most = parts_most.ok_or_else(|| Error::Invalid(format!("a block has 1 to {MAX_PARTS} parts, not {}", size.parts)))?;
        let (host, lines) = (cache.host(), cache.host().lines());
        let nonce = host.platform().random();
        let place = |region| RegionPlace { region, nonce, blocks: size.blocks, parts_most, len_bytes: size.len_bytes };
        place(lines.layout().chunk_offset(0)?).check(lines.layout()).map_err(refused)?;
        reap(host, allocator)?;
        let block = allocator.alloc(place(0).wanted_bytes())?;
        let place = place(block.offset);
        // Kept before the first store: what this process leaves in its host's caches must not meet the data of the memory's next owner.
        if let Err(error) = keep(cache, allocator, block.offset) {
            // It may be kept, and has no head by which a reaper would know it.
            allocator.free_or_later(block.offset);
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
        let memory = RegionMemory { host: host.clone(), allocator: allocator.clone(), place, head, is_freed: false.into() };
        memory.publish_head(head)?;
        point!("lent.made");
        // What this host's caches hold of the memory's life before may be anything, and must not become a part of a block.
        if !mutant!("lent.made_unflushed") {
            flush(memory.lines(), &memory.place)?;
        }
        Ok(memory)
    }

    fn lines(&self) -> &Lines {
        self.host.lines()
    }

    pub(super) fn place(&self) -> &RegionPlace {
        &self.place
    }

    fn publish_head(&self, head: Head) -> Result<()> {
        let (lines, region) = (self.lines(), self.place.region);
        lines.publish_in(head_seal(lines, region), 0, region, head)
    }

    /// Publishes how many parts a block has, behind the parts.
    pub(super) fn tell_parts(&self, parts: u16) -> Result<()> {
        self.publish_head(Head { parts, ..self.head })
    }

    /// Pool offset of the memory.
    pub fn offset(&self) -> u64 {
        self.place.memory()
    }

    /// Bytes of the memory.
    pub fn len_bytes(&self) -> u64 {
        self.place.len_bytes
    }

    /// Where this process maps the memory; `None` where there is no mapping. No other process writes to it, and this process writes with
    /// plain stores, to blocks that are not lent.
    pub fn address(&self) -> Option<NonNull<u8>> {
        self.lines().memory().address(self.offset(), self.len_bytes())
    }

    /// Gives the memory back to the pool: no thread of this process uses it any more, and no block of it is being lent. Blocks that are
    /// still lent are misses from now on. Once it is back, a further call does nothing.
    ///
    /// # Errors
    /// [`Error::Fenced`], [`Error::Timeout`], those of the memory: to be called again; [`Error::NotFound`] when it is not this process's
    /// any more.
    pub fn free(&self) -> Result<()> {
        if self.is_freed.load(Ordering::Acquire) {
            return Ok(());
        }
        void(self.lines(), &self.place)?;
        let freed = self.allocator.free(self.place.region);
        match freed {
            // Without an owner, or another process's.
            Ok(()) | Err(Error::NotFound(_)) => self.is_freed.store(true, Ordering::Release),
            // Still allocated: by its head it can be told what it is, until the next try.
            Err(_) => self.publish_head(self.head)?,
        }
        freed
    }
}

/// Keeps a block, through a fence and re-join of this host: where it cannot be told whether it is kept, it could not be freed either.
fn keep(cache: &Cache, allocator: &Allocator, offset: u64) -> Result<()> {
    for _ in 0..KEEP_TRIES {
        match allocator.keep(offset) {
            Err(Error::Fenced { .. }) => drop(cache.host().acquire(LOCK_CHUNKS, cache.config().lock_timeout_ms(cache.host()))?),
            other => return other,
        }
    }
    allocator.keep(offset)
}

impl std::fmt::Debug for RegionMemory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "RegionMemory {:?}", self.place)
    }
}
