// SPDX-License-Identifier: Apache-2.0
//! Which bytes of a layout a block consists of, in the order in which the pool stores them: layer by layer, K before V.

use crate::counts::Outcome;
use crate::names::BlockShape;
use cxl_pool::copy::LocalRange;
use dynamo_memory::{MemoryDescriptor, StorageKind};
use kvbm_physical::layout::PhysicalLayout;
use std::ops::Range;
use std::ptr::NonNull;

/// A layout whose blocks have the bytes that are stored, in memory that processors read and write.
pub(crate) struct Source<'l> {
    layout: &'l PhysicalLayout,
    regions: Vec<(usize, usize)>,
    piece_bytes: usize,
}

impl<'l> Source<'l> {
    /// `pool` is where this process maps the pool: that memory must not be copied as if it were memory of this host alone.
    pub(crate) fn of(layout: &'l PhysicalLayout, shape: &BlockShape, pool: &Range<usize>) -> Result<Self, Outcome> {
        let inner = layout.layout();
        if !shape.is_of(inner.config(), inner.block_layout()) {
            return Err(Outcome::Layout);
        }
        let memory = inner.memory_regions();
        let is_host = |kind| matches!(kind, StorageKind::System | StorageKind::Pinned);
        if memory.is_empty() || !memory.iter().all(|region| is_host(region.storage_kind())) {
            return Err(Outcome::Memory);
        }
        let regions: Vec<(usize, usize)> = memory.iter().map(|region| (region.addr(), region.size())).collect();
        if regions.iter().any(|&(start, len_bytes)| start < pool.end && pool.start < start.saturating_add(len_bytes)) {
            return Err(Outcome::Memory);
        }
        Ok(Source { layout, regions, piece_bytes: shape.piece_bytes() })
    }

    /// The pieces of a block; together they are as long as the block.
    pub(crate) fn block(&self, id: usize) -> Result<Vec<LocalRange>, Outcome> {
        let layout = self.layout.layout();
        if id >= layout.num_blocks() {
            return Err(Outcome::BlockId);
        }
        let mut pieces = Vec::with_capacity(layout.num_layers() * layout.outer_dim());
        for layer in 0..layout.num_layers() {
            for outer in 0..layout.outer_dim() {
                let region = self.layout.memory_region(id, layer, outer).map_err(|_| Outcome::BlockId)?;
                if region.size() != self.piece_bytes || !self.is_inside(layer, region.addr(), region.size()) {
                    return Err(Outcome::Layout);
                }
                let address = NonNull::new(std::ptr::with_exposed_provenance_mut(region.addr())).ok_or(Outcome::Layout)?;
                pieces.push(LocalRange { address, len_bytes: region.size() });
            }
        }
        Ok(pieces)
    }

    /// Whether a piece lies in the layout's memory. Arithmetic of another crate is looked at before it becomes an address to write to.
    fn is_inside(&self, layer: usize, start: usize, len_bytes: usize) -> bool {
        let holds = |&(from, bytes): &(usize, usize)| {
            start.checked_sub(from).and_then(|at| at.checked_add(len_bytes)).is_some_and(|end| end <= bytes)
        };
        // One region for all layers, or one for each.
        self.regions.get(layer).is_some_and(holds) || self.regions.iter().any(holds)
    }
}
