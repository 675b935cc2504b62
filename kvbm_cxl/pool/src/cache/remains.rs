// SPDX-License-Identifier: Apache-2.0
//! What processes of this host that are gone have left in this machine's caches (CACHE.md 12.6).
//!
//! Caches outlive processes. Whoever fills a cell may do so with stores through the cache: in place, in a part of a line, or everywhere on
//! processors without another way. If it dies before it has flushed them, they are written back at any later time, onto whatever the
//! cell holds by then, and no descriptor tells. Only this machine can bring them out, so it does before it says that the work of that
//! process has ended: until then nobody else may use the cell.

use super::local::LocalCells;
use crate::error::{Error, Result};
use crate::fault::point;
use crate::line::Lines;
use crate::media::Descriptor;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// Brings out what processes left that were filling cells, those for whose tags `is_gone`; tag 0 is that of a chunk nobody has. `above` is
/// the memory above the host with slot `slot`.
///
/// # Errors
/// Those of the memory; then nothing may be said of those processes yet.
pub(crate) fn bring_out(
    lines: &Lines,
    above: (NonNull<u8>, usize, Arc<dyn Any + Send + Sync>),
    slot: u16,
    is_gone: impl Fn(u32) -> bool,
) -> Result<()> {
    let chunks = lines.layout().geometry().cell_chunks();
    if chunks == 0 {
        return Ok(());
    }
    let local = LocalCells::behind(lines.layout(), above)?;
    for chunk in 0..chunks {
        let found = local.chunk(chunk);
        if found.is_filled() && is_gone(found.owner()) {
            bring_out_of(lines, chunk, slot)?;
            local.brought_out(chunk, found);
        }
    }
    Ok(())
}

/// Brings out what was stored to the cells of a chunk that may have been being filled.
pub(super) fn bring_out_of(lines: &Lines, chunk: u64, slot: u16) -> Result<()> {
    let per_chunk = u64::from(lines.layout().geometry().cells_per_chunk);
    let cells: Vec<u64> = (chunk * per_chunk..(chunk + 1) * per_chunk).collect();
    let mut fetched: Vec<Result<Descriptor>> = Vec::with_capacity(cells.len());
    lines.fetch_many(&cells, &mut fetched)?;
    // A line of anybody else's may lie on the one that said WRITING.
    let is_settled = |found: &Descriptor| found.owner == slot && found.state != Descriptor::WRITING;
    for (&cell, _) in cells.iter().zip(&fetched).filter(|(_, found)| !found.as_ref().is_ok_and(is_settled)) {
        let (offset, len_bytes) = lines.layout().cell(cell)?;
        match lines.memory().flush_range(offset, len_bytes) {
            // No block is ever served from there.
            Err(Error::Poisoned { .. }) => {}
            other => other?,
        }
    }
    lines.memory().fence_all();
    point!("cache.brought_out");
    Ok(())
}
