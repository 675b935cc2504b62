// SPDX-License-Identifier: Apache-2.0
//! Looking at the allocator's metadata from outside, without changing it: for `cxlctl fsck` and for callers that were given an offset.

use super::Block;
use super::class::Classes;
use super::content::{self, Content};
use crate::error::{Error, Result};
use crate::host::fence;
use crate::line::Lines;
use crate::media::{CHUNKS_PER_CLAIM, Claim, Identity};

/// One thing that is wrong, or that an adoption would mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Two hosts that are both alive claim the chunk.
    TwoOwners {
        /// The chunk.
        chunk: u64,
        /// Their slots.
        slots: (u16, u16),
    },
    /// A chunk's head or keep map does not verify: its owner does not use it, and no process knows which of its blocks were kept.
    BadChunk {
        /// The chunk.
        chunk: u64,
        /// Why.
        reason: &'static str,
    },
    /// Only dead or fenced hosts claim a chunk with kept blocks: adoption brings it back once their death is proven.
    Orphan {
        /// The chunk.
        chunk: u64,
    },
    /// A chunk with kept blocks has no claim. The next host that claims it finds them.
    Unclaimed {
        /// The chunk.
        chunk: u64,
    },
    /// A claim line does not verify; its chunks cannot be given to any host.
    BadClaim {
        /// Slot of its writer.
        slot: u16,
        /// Line of that slot.
        line: u64,
    },
}

/// The state of all chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocAudit {
    /// Chunks in the pool.
    pub chunks: u64,
    /// Chunks that one live host claims.
    pub owned: u64,
    /// Chunks without a claim.
    pub free: u64,
    /// Chunks that only dead or fenced hosts claim.
    pub waiting: u64,
    /// Kept blocks, and the chunks' bytes they take.
    pub kept_blocks: u64,
    /// Bytes of the kept blocks.
    pub kept_bytes: u64,
    /// The faults.
    pub findings: Vec<Finding>,
}

fn ended_incarnations(lines: &Lines) -> Result<Vec<u32>> {
    let standings = fence::standings(lines)?;
    let slots: Vec<u64> = (0..standings.len() as u64).collect();
    let mut identities: Vec<Result<Identity>> = Vec::with_capacity(slots.len());
    lines.fetch_many(&slots, &mut identities)?;
    let ended = standings.iter().zip(identities).map(|(standing, identity)| {
        let over = match identity {
            Ok(identity) if identity.state == Identity::LEFT => identity.incarnation,
            Ok(identity) => identity.incarnation.saturating_sub(1),
            Err(Error::BadLine { .. }) => 0,
            Err(error) => return Err(error),
        };
        Ok(over.max(standing.fenced).max(standing.dead))
    });
    ended.collect()
}

fn claim_lines(lines: &Lines, line: u64) -> Result<Vec<Result<Claim>>> {
    let per_slot = lines.layout().claim_lines();
    let indexes: Vec<u64> = (0..u64::from(lines.layout().geometry().slots)).map(|slot| slot * per_slot + line).collect();
    let mut fetched = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut fetched)?;
    Ok(fetched)
}

fn is_claimed(claim: &Claim, chunk: u64) -> bool {
    let bit = (chunk % CHUNKS_PER_CLAIM as u64) as usize;
    claim.bits[bit / 8] >> (bit % 8) & 1 != 0
}

/// Reads all claims, heads and keep maps. On a running pool the result is a picture of a moving thing.
pub fn audit(lines: &Lines) -> Result<AllocAudit> {
    let classes = Classes::new(lines.layout().geometry().chunk_bytes);
    let ended = ended_incarnations(lines)?;
    let mut audit = AllocAudit { chunks: lines.layout().chunks(), ..AllocAudit::default() };
    for line in 0..lines.layout().claim_lines() {
        let claims = claim_lines(lines, line)?;
        for (slot, claim) in claims.iter().enumerate() {
            if let Err(Error::BadLine { .. }) = claim {
                audit.findings.push(Finding::BadClaim { slot: slot as u16, line });
            }
        }
        let first = line * CHUNKS_PER_CLAIM as u64;
        for chunk in first..audit.chunks.min(first + CHUNKS_PER_CLAIM as u64) {
            let claimants: Vec<(usize, bool)> = claims
                .iter()
                .enumerate()
                .filter_map(|(slot, claim)| claim.as_ref().ok().filter(|claim| is_claimed(claim, chunk)).map(|claim| (slot, claim)))
                .map(|(slot, claim)| (slot, claim.incarnation > ended[slot]))
                .collect();
            look_at(lines, &classes, chunk, &claimants, &mut audit)?;
        }
    }
    Ok(audit)
}

fn look_at(lines: &Lines, classes: &Classes, chunk: u64, claimants: &[(usize, bool)], audit: &mut AllocAudit) -> Result<()> {
    let live: Vec<usize> = claimants.iter().filter(|(_, live)| *live).map(|(slot, _)| *slot).collect();
    match live[..] {
        [] if claimants.is_empty() => audit.free += 1,
        [] => audit.waiting += 1,
        [_] => audit.owned += 1,
        [one, other, ..] => audit.findings.push(Finding::TwoOwners { chunk, slots: (one as u16, other as u16) }),
    }
    let (blocks, block_bytes) = match content::read(lines, classes, chunk)?.0 {
        Content::Nothing | Content::Inside(_) => return Ok(()),
        Content::Bad(reason) => {
            audit.findings.push(Finding::BadChunk { chunk, reason });
            return Ok(());
        }
        Content::Run(count) => (1, count * lines.layout().geometry().chunk_bytes),
        Content::Blocks { class, kept } => (u64::from(kept.count()), classes.bytes(class)),
    };
    audit.kept_blocks += blocks;
    audit.kept_bytes += blocks * block_bytes;
    match (live.is_empty(), claimants.is_empty()) {
        (true, true) => audit.findings.push(Finding::Unclaimed { chunk }),
        (true, false) => audit.findings.push(Finding::Orphan { chunk }),
        _ => {}
    }
    Ok(())
}

/// The live host that claims the chunk at a pool offset: its slot and incarnation.
pub fn owner_of(lines: &Lines, offset: u64) -> Result<Option<(u16, u32)>> {
    let Some(chunk) = lines.layout().chunk_of(offset) else { return Ok(None) };
    let ended = ended_incarnations(lines)?;
    for (slot, claim) in claim_lines(lines, chunk / CHUNKS_PER_CLAIM as u64)?.into_iter().enumerate() {
        let claim = claim?;
        if is_claimed(&claim, chunk) && claim.incarnation > ended[slot] {
            return Ok(Some((slot as u16, claim.incarnation)));
        }
    }
    Ok(None)
}

/// The *kept* block that a pool offset lies in. Scratch blocks are known to their process alone.
pub fn block_of(lines: &Lines, offset: u64) -> Result<Option<Block>> {
    let layout = lines.layout();
    let Some(chunk) = layout.chunk_of(offset) else { return Ok(None) };
    let classes = Classes::new(layout.geometry().chunk_bytes);
    let (content, _) = content::read(lines, &classes, chunk)?;
    let run = |first: u64, count: u64| -> Result<Option<Block>> {
        Ok(Some(Block { offset: layout.chunk_offset(first)?, len_bytes: count * layout.geometry().chunk_bytes }))
    };
    match content {
        Content::Blocks { class, kept } => {
            let (start, len_bytes) = (layout.chunk_offset(chunk)?, classes.bytes(class));
            let block = ((offset - start) / len_bytes) as u32;
            Ok(kept.has(block).then(|| Block { offset: start + u64::from(block) * len_bytes, len_bytes }))
        }
        Content::Run(count) => run(chunk, count),
        Content::Inside(first) => match content::read(lines, &classes, first)?.0 {
            Content::Run(count) => run(first, count),
            _ => Ok(None),
        },
        Content::Nothing | Content::Bad(_) => Ok(None),
    }
}
