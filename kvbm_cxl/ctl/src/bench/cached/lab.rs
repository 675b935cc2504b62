// SPDX-License-Identifier: Apache-2.0
//! A pool with cells in /dev/shm, a host of this process on it, its cache, and bare memory of the same pool beside it.

use crate::bench::hosts;
use crate::bench::wrong;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace};
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, Instructions};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::{Host, Service};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::pool::{CellArea, Share};
use cxl_pool::{Error, Result};
use std::sync::Arc;

/// Bare memory beside the cells, in bytes.
pub const BARE_BYTES: usize = 64 << 20;

/// Where everything is measured.
pub struct Lab {
    pub cache: Cache,
    pub bare: Bare,
    /// Pool offset of the bare memory.
    pub bare_offset: u64,
    allocator: Allocator,
    service: Service,
    host: Host,
    description: String,
    _bed: hosts::Lab,
}

/// The namespace of everything measured.
pub const NAMESPACE: Namespace = Namespace(*b"bench/namespace!");

/// Key number `number`.
pub fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    BlockKey(bytes)
}

/// Bytes of which no word is like another of this block or of any other.
pub fn fill(bytes: &mut [u8], block: u64) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((index as u64 + 1).wrapping_mul(2 * block + 0x9e37_79b9_7f4a_7c15)).to_le_bytes());
    }
}

/// Whether these are the bytes of a block.
pub fn is_block(bytes: &[u8], block: u64) -> bool {
    let word = |index: usize| ((index as u64 + 1).wrapping_mul(2 * block + 0x9e37_79b9_7f4a_7c15)).to_le_bytes();
    bytes.chunks_exact(8).enumerate().all(|(index, found)| found == word(index))
}

/// A host on machine `number` of a pool, which has to be served.
pub fn join(bed: &hosts::Lab, number: u8) -> Result<Host> {
    let machine = hosts::real_machine(bed.pool(), &bed.state(), number)?;
    Host::join(bed.pool().lines().clone(), Arc::new(machine), hosts::config(bed.pool()))
}

/// How the caches of the benches behave: the caller copies alone.
pub fn config() -> CacheConfig {
    CacheConfig { copy: Some(CopyConfig::alone()), ..CacheConfig::default() }
}

impl Lab {
    /// Cells of 64 KiB, 1 MiB and 4 MiB.
    pub fn for_transfers() -> Result<Lab> {
        let area = |cell_bytes, len_bytes| CellArea { cell_bytes, share: Share::Bytes(len_bytes) };
        // More than the last-level cache of most machines, for what is measured beside others' reads.
        Lab::new(1 << 30, vec![area(64 << 10, 64 << 20), area(1 << 20, 576 << 20), area(4 << 20, 128 << 20)], config())
    }

    /// A pool of `len_bytes` with cells.
    pub fn new(len_bytes: u64, cells: Vec<CellArea>, config: CacheConfig) -> Result<Lab> {
        let options = CoherenceOptions::from_env()?;
        if options.emulator.is_some() {
            return Err(Error::Invalid("emulated hosts have no instructions to measure: unset CXL_COHERENCE".into()));
        }
        let bed = hosts::Lab::with_cells(len_bytes, cells)?;
        let host = join(&bed, 0)?;
        let service = host.serve()?;
        let allocator = Allocator::attach(&host, LocalArea::of(&host)?, AllocConfig::default())?;
        let cache = Cache::open(&host, config)?;
        let bare_offset = allocator.alloc(BARE_BYTES as u64)?.offset;
        let memory = bed.pool().lines().memory().clone();
        // Not zeros, and written once: pages that are not there yet would be all that is measured.
        memory.copy_in(bare_offset, &vec![1; BARE_BYTES])?;
        let instructions = match options.instructions {
            Some(chosen) => chosen,
            None => Instructions::best()?,
        };
        let bare = Bare::over(memory, bare_offset, (BARE_BYTES / LINE_BYTES) as u64, instructions)?;
        let description = bed.pool().description().to_owned();
        Ok(Lab { cache, bare, bare_offset, allocator, service, host, description, _bed: bed })
    }

    /// What is measured, on what.
    pub fn title(&self, what: &str) -> String {
        format!("{what}, {}", self.description)
    }

    /// The memory of the pool.
    pub fn memory(&self) -> &dyn Coherence {
        &**self.host.lines().memory()
    }

    /// Takes the lines of a range of the pool out of every cache.
    pub fn uncached(&self, offset: u64, len_bytes: usize) -> Result<()> {
        self.memory().flush_range(offset, len_bytes as u64)?;
        self.memory().fence_all();
        Ok(())
    }

    /// Pool offset of a block that is there.
    pub fn offset_of(&self, block: u64) -> Result<u64> {
        let found = self.cache.lookup(NAMESPACE, key(block))?.ok_or_else(|| wrong(format!("block {block} is not there")))?;
        Ok(self.host.lines().layout().cell(found.cell)?.0)
    }

    /// Opens the cache anew with another configuration.
    pub fn reopen(self, config: CacheConfig) -> Result<Lab> {
        let Lab { cache, bare, bare_offset, allocator, service, host, description, _bed } = self;
        cache.close()?;
        let cache = Cache::open(&host, config)?;
        Ok(Lab { cache, bare, bare_offset, allocator, service, host, description, _bed })
    }

    /// Ends it in good order.
    pub fn end(self) -> Result<()> {
        let Lab { cache, allocator, service, host, .. } = self;
        cache.close()?;
        allocator.close()?;
        drop(service);
        host.leave()
    }
}
