// SPDX-License-Identifier: Apache-2.0
//! What this host stored to chunks and is still in its machine's caches, brought out before they can be another host's (CACHE.md 12.6).
//!
//! Blocks are their users' memory: they store to them through the caches, and free them, or die, without a flush. As long as the chunk
//! stays with this host that does no harm, because its processes share the caches. Afterwards a line would be written back onto the bytes
//! of whoever has the memory next. Kept blocks stay where they are, and their users flush what they let others find.

use super::claims::has;
use super::class::Classes;
use super::content::{self, Content};
use crate::error::{Error, Result};
use crate::fault::point;
use crate::line::{Lines, if_whole};
use crate::media::{CHUNKS_PER_CLAIM, Claim};

/// Brings out what was stored to a chunk.
pub(super) fn bring_out_of(lines: &Lines, chunk: u64) -> Result<()> {
    let (offset, len_bytes) = (lines.layout().chunk_offset(chunk)?, lines.layout().geometry().chunk_bytes);
    match lines.memory().flush_range(offset, len_bytes) {
        // It is nobody's memory any more.
        Err(Error::Poisoned { .. }) => {}
        other => other?,
    }
    lines.memory().fence_all();
    Ok(())
}

/// Brings out what was stored to the chunks that `slot`, this host's, claims, but for kept blocks of whole chunks: before it is said of
/// this host, or of its former incarnation, that nothing of it writes any more.
///
/// # Errors
/// Those of the memory; then that may not be said yet.
pub(crate) fn bring_out(lines: &Lines, slot: u16) -> Result<()> {
    let layout = lines.layout();
    let classes = Classes::new(layout.geometry().chunk_bytes);
    for line in 0..layout.claim_lines() {
        let claim = if_whole(lines.fetch::<Claim>(u64::from(slot) * layout.claim_lines() + line))?;
        let first = line * CHUNKS_PER_CLAIM as u64;
        let chunks = first..layout.chunks().min(first + CHUNKS_PER_CLAIM as u64);
        // A line that a process died in the middle of may claim anything.
        let is_claimed = |chunk: &u64| claim.is_none_or(|claim| has(&claim.bits, (*chunk - first) as usize));
        for chunk in chunks.filter(is_claimed) {
            if !matches!(content::read(lines, &classes, chunk)?.0, Content::Run(_) | Content::Inside(_)) {
                bring_out_of(lines, chunk)?;
                point!("alloc.brought_out");
            }
        }
    }
    Ok(())
}
