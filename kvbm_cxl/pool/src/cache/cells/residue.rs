// SPDX-License-Identifier: Apache-2.0
//! What processes of this host that are gone have left in this machine's caches (CACHE.md 12.6).
//!
//! Caches outlive processes. A process that fills a cell may do so with stores through the cache: in place, in a part of a line, or
//! everywhere on processors without another way. If it dies before it has flushed them, they are written back at any later time, onto
//! whatever the cell holds by then, and no descriptor tells. Only this machine can bring them out, so it does before it says that the work
//! of that process has ended: until then no other process may use the cell.

use crate::cache::cells::local::{LocalCells, local_bytes};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::{Hooks, Residue, Work};
use crate::line::{Lines, if_whole};
use crate::media::{CHUNKS_PER_CELL_CLAIM, CellClaim, Descriptor};
use crate::platform::LocalMemory;

pub(crate) const HOOKS: Hooks = Hooks { name: "the cache", local_bytes, flush_residue };

fn flush_residue(residue: &Residue<'_>) -> Result<()> {
    let is_skipped = match residue.of {
        Work::Former { .. } => mutant!("cache.joined_unflushed"),
        Work::Leaving => mutant!("cache.left_unflushed"),
        Work::Processes(_) => mutant!("cache.reaped_unflushed"),
        Work::Void | Work::Claimed => false,
    };
    match residue.of {
        _ if is_skipped => Ok(()),
        Work::Processes(is_gone) => flush_stores(residue.lines, residue.local.clone(), residue.slot, is_gone),
        Work::Former { .. } | Work::Leaving | Work::Void => flush_stores(residue.lines, residue.local.clone(), residue.slot, |_| true),
        Work::Claimed => flush_claimed(residue.lines, residue.slot),
    }
}

/// Brings out what processes left that were filling cells, those for whose tags `is_gone`; tag 0 is that of a chunk without an owner.
/// `local` is the cache's part of the memory of the host with slot `slot`.
///
/// # Errors
/// Those of the memory; then nothing may be said of those processes yet.
fn flush_stores(lines: &Lines, local: LocalMemory, slot: u16, is_gone: impl Fn(u32) -> bool) -> Result<()> {
    let chunks = lines.layout().geometry().cell_chunks();
    if chunks == 0 {
        return Ok(());
    }
    let local = LocalCells::over(lines.layout(), local)?;
    for chunk in 0..chunks {
        let found = local.chunk(chunk);
        if found.is_filled() && is_gone(found.owner()) {
            flush_chunk(lines, chunk, slot)?;
            local.note_flushed(chunk, found);
        }
    }
    Ok(())
}

/// Flushes the stores to the cells of the chunks that `slot` claims: before a line says that another host of this machine's kernel has
/// ended. Only that host's own memory knew which of them were being filled, and it may be gone with its container.
///
/// # Errors
/// Those of the memory; then that may not be said yet.
fn flush_claimed(lines: &Lines, slot: u16) -> Result<()> {
    let geometry = lines.layout().geometry();
    let per_line = CHUNKS_PER_CELL_CLAIM as u64;
    for line in 0..geometry.cell_claim_lines() {
        let claim = if_whole(lines.fetch::<CellClaim>(u64::from(slot) * geometry.cell_claim_lines() + line))?;
        let chunks = line * per_line..geometry.cell_chunks().min((line + 1) * per_line);
        // A line that a process died in the middle of may claim anything.
        let is_claimed = |chunk: &u64| claim.is_none_or(|claim| claim.has((*chunk % per_line) as usize));
        chunks.filter(is_claimed).try_for_each(|chunk| flush_chunk(lines, chunk, slot))?;
    }
    Ok(())
}

/// Flushes the stores to the cells of a chunk that may have been being filled.
pub(in crate::cache) fn flush_chunk(lines: &Lines, chunk: u64, slot: u16) -> Result<()> {
    let per_chunk = u64::from(lines.layout().geometry().cells_per_chunk);
    let cells: Vec<u64> = (chunk * per_chunk..(chunk + 1) * per_chunk).collect();
    let mut fetched: Vec<Result<Descriptor>> = Vec::with_capacity(cells.len());
    lines.fetch_many(&cells, &mut fetched)?;
    for (&cell, _) in cells.iter().zip(&fetched).filter(|(_, found)| !found.as_ref().is_ok_and(|found| is_settled(found, slot))) {
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

/// Whether no process of `slot` was filling the cell of this line. A line of any other host may lie on the one that said WRITING.
fn is_settled(found: &Descriptor, slot: u16) -> bool {
    found.owner == slot && found.state != Descriptor::WRITING
}

#[cfg(test)]
mod tests;
