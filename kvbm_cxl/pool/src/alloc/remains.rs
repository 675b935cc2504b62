// SPDX-License-Identifier: Apache-2.0
//! What this host stored to chunks and is still in its machine's caches, brought out before they can be another host's (CACHE.md 12.6).
//!
//! Blocks are their users' memory: they store to them through the caches, and free them, or die, without a flush. As long as the chunk
//! stays with this host that does no harm, because its processes share the caches. Afterwards a line would be written back onto the bytes
//! of the memory's next owner. Kept blocks stay where they are, and their users flush what they let others find.

use super::claims::has;
use super::class::Classes;
use super::content::{self, Content};
use super::local::local_bytes;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::{Hooks, Residue, Work};
use crate::line::{Lines, if_whole};
use crate::media::{CHUNKS_PER_CLAIM, Claim};

pub(crate) const HOOKS: Hooks = Hooks { name: "the allocator", local_bytes, flush_residue };

fn flush_residue(residue: &Residue<'_>) -> Result<()> {
    let is_needed = match residue.of {
        // What it had it flushed as it left.
        Work::Former { has_left } => !has_left && !mutant!("alloc.joined_unflushed"),
        Work::Leaving => !mutant!("alloc.left_unflushed"),
        Work::Void | Work::Claimed => true,
        // Their blocks stay this host's.
        Work::Processes(_) => false,
    };
    match residue.of {
        _ if !is_needed => Ok(()),
        Work::Claimed => flush_claimed(residue.lines, residue.slot),
        _ => flush_stores(residue.lines, residue.slot),
    }
}

pub(super) fn flush_chunk(lines: &Lines, chunk: u64) -> Result<()> {
    let (offset, len_bytes) = (lines.layout().chunk_offset(chunk)?, lines.layout().geometry().chunk_bytes);
    match lines.memory().flush_range(offset, len_bytes) {
        // The memory has no owner any more.
        Err(Error::Poisoned { .. }) => {}
        other => other?,
    }
    lines.memory().fence_all();
    Ok(())
}

/// Flushes the stores to the chunks that `slot`, this host's, claims, except kept blocks of whole chunks: before a line says that this
/// host, or its former incarnation, writes nothing any more.
///
/// # Errors
/// Those of the memory; then that may not be said yet.
fn flush_stores(lines: &Lines, slot: u16) -> Result<()> {
    let classes = Classes::new(lines.layout().geometry().chunk_bytes);
    bring_out_if(lines, slot, |chunk| Ok(!matches!(content::read(lines, &classes, chunk)?.0, Content::Run(_) | Content::Inside(_))))
}

/// Flushes the stores to all chunks that `slot` claims, kept blocks included: before a line says that another host of this machine's kernel
/// has ended. Its users flush nothing any more.
///
/// # Errors
/// Those of the memory; then that may not be said yet.
fn flush_claimed(lines: &Lines, slot: u16) -> Result<()> {
    bring_out_if(lines, slot, |_| Ok(true))
}

fn bring_out_if(lines: &Lines, slot: u16, is_wanted: impl Fn(u64) -> Result<bool>) -> Result<()> {
    let layout = lines.layout();
    for line in 0..layout.claim_lines() {
        let claim = if_whole(lines.fetch::<Claim>(u64::from(slot) * layout.claim_lines() + line))?;
        let first = line * CHUNKS_PER_CLAIM as u64;
        let chunks = first..layout.chunks().min(first + CHUNKS_PER_CLAIM as u64);
        // A line that a process died in the middle of may claim anything.
        let is_claimed = |chunk: &u64| claim.is_none_or(|claim| has(&claim.bits, (*chunk - first) as usize));
        for chunk in chunks.filter(is_claimed) {
            if is_wanted(chunk)? {
                flush_chunk(lines, chunk)?;
                point!("alloc.brought_out");
            }
        }
    }
    Ok(())
}
