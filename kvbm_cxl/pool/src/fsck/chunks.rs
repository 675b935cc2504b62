// SPDX-License-Identifier: Apache-2.0
//! Chunks: who claims them, what they are cut into, which blocks outlive their host, and frees on their way to another host.

use super::report::{Remedy, Report, Severity, Write};
use super::view::{View, add_finding, scan};
use crate::error::Result;
use crate::limits::{LINE_BYTES, MIN_BLOCK_BYTES};
use crate::media::*;
use bytemuck::Zeroable;

#[derive(Clone, Copy, Default)]
struct ChunkLines {
    /// Its head; `None` where it does not verify.
    head: Option<RunHead>,
    /// Kept blocks, and whether block 0 is one.
    kept: u32,
    keeps_first: bool,
}

#[derive(Clone, Copy)]
struct RunHead {
    state: u32,
    block_bytes: u64,
    run: u64,
}

pub(super) fn check(view: &View<'_>, report: &mut Report) -> Result<()> {
    let mut chunks = vec![ChunkLines::default(); view.lines.layout().chunks() as usize];
    let mut damaged = Vec::new();
    heads(view, report, &mut chunks, &mut damaged)?;
    keep_maps(view, report, &mut chunks)?;
    damaged_heads(view, report, &chunks, &damaged);
    for chunk in 0..chunks.len() as u64 {
        ownership(view, report, chunk, &chunks[chunk as usize]);
        run(view, report, chunk, &chunks);
    }
    claim_lines(view, report);
    free_boxes(view, report);
    Ok(())
}

/// Whether a chunk can be cut into blocks of this size: 2^k or 3 * 2^(k-1) lines up to half a chunk, or the whole chunk.
fn is_class(block_bytes: u64, chunk_bytes: u64) -> bool {
    let lines = block_bytes / MIN_BLOCK_BYTES;
    let is_step = lines.is_power_of_two() || (lines.is_multiple_of(3) && (lines / 3).is_power_of_two());
    block_bytes == chunk_bytes || (block_bytes.is_multiple_of(MIN_BLOCK_BYTES) && block_bytes <= chunk_bytes / 2 && lines > 0 && is_step)
}

fn heads(view: &View<'_>, report: &mut Report, chunks: &mut [ChunkLines], damaged: &mut Vec<(u64, String)>) -> Result<()> {
    let chunk_bytes = view.geometry.chunk_bytes;
    let count = chunks.len() as u64;
    scan::<ChunkHead>(view.lines, 0..count, |chunk, head| {
        let head = match head {
            Ok(head) => head,
            Err(reason) => return damaged.push((chunk, reason)),
        };
        let at = (Region::ChunkHead, chunk);
        chunks[chunk as usize].head = Some(RunHead { state: head.state, block_bytes: head.block_bytes, run: head.run });
        let mut wrong = |rule, meaning: String, remedy| add_finding(report, Severity::Error, rule, at, meaning, remedy);
        let slot = u64::from(head.slot);
        if head.incarnation != 0 || head.slot != 0 {
            let remedy = Remedy::None("none: a machine that was never bound to the slot wrote it (a cloned machine id?)");
            if slot >= view.geometry.slots.into() {
                wrong("chunk.slot", format!("written by slot {slot}, which does not exist"), remedy);
            } else if head.incarnation > view.bound(slot) && !view.decided_bindings[slot as usize].hidden {
                let bound = view.bound(slot);
                wrong(
                    "chunk.unbound",
                    format!("written by incarnation {} of slot {slot}, only {bound} is bound", head.incarnation),
                    remedy,
                );
            }
        }
        let reason = match head.state {
            ChunkHead::BLOCKS if !is_class(head.block_bytes, chunk_bytes) => "cut into blocks of a size that there is not",
            ChunkHead::RUN if head.run == 0 || head.run > count - chunk => "begins a block of more chunks than there are",
            ChunkHead::INSIDE if head.run >= chunk => "lies inside a block that begins after it",
            _ => return,
        };
        let writes = empty_lines(view, chunk);
        wrong(
            "chunk.form",
            format!("{reason}: nothing of the chunk may be used"),
            Remedy::Loss { what: "frees the chunk, with whatever was in it", writes },
        );
    })
}

fn empty_lines(view: &View<'_>, chunk: u64) -> Vec<Write> {
    let per_chunk = view.geometry.keep_lines();
    let keep = (chunk * per_chunk..(chunk + 1) * per_chunk).map(|index| view.write(index, KeepMap::zeroed()));
    keep.chain([view.write(chunk, ChunkHead::default())]).collect()
}

/// Blocks that keep-map line `line` of a chunk can tell of, under what its head says.
fn blocks_in_line(view: &View<'_>, head: Option<RunHead>, line: u64) -> u64 {
    let blocks = match head {
        Some(RunHead { state: ChunkHead::BLOCKS, block_bytes, .. }) if is_class(block_bytes, view.geometry.chunk_bytes) => {
            view.geometry.chunk_bytes / block_bytes
        }
        Some(RunHead { state: ChunkHead::RUN, .. }) => 1,
        _ => 0,
    };
    blocks.saturating_sub(line * BLOCKS_PER_KEEP as u64).min(BLOCKS_PER_KEEP as u64)
}

fn keep_maps(view: &View<'_>, report: &mut Report, chunks: &mut [ChunkLines]) -> Result<()> {
    let per_chunk = view.geometry.keep_lines();
    let count = chunks.len() as u64;
    scan::<KeepMap>(view.lines, 0..count * per_chunk, |index, keep| {
        let (number, line) = (index / per_chunk, index % per_chunk);
        let head = chunks[number as usize].head;
        let blocks = blocks_in_line(view, head, line);
        match keep {
            Ok(keep) => {
                let last = (0..BLOCKS_PER_KEEP).rev().find(|bit| keep.bits[bit / 8] >> (bit % 8) & 1 == 1);
                let chunk = &mut chunks[number as usize];
                if blocks > 0 {
                    chunk.kept += keep.bits.iter().map(|byte| byte.count_ones()).sum::<u32>();
                    chunk.keeps_first |= line == 0 && keep.bits[0] & 1 == 1;
                }
                // Lines after the last block may hold what an earlier cut left; those of an uncut chunk are not read.
                if blocks > 0 && last.is_some_and(|last| last as u64 >= blocks) {
                    let mut bits = keep.bits;
                    (blocks as usize..BLOCKS_PER_KEEP).for_each(|bit| bits[bit / 8] &= !(1 << (bit % 8)));
                    let writes = vec![view.write(index, KeepMap { bits, ..keep })];
                    let remedy = Remedy::Safe { what: "clears the bits that stand for no block", writes };
                    let meaning = "keeps blocks after the chunk's last one: nothing of the chunk may be used";
                    add_finding(report, Severity::Error, "keep.range", (Region::KeepMap, index), meaning, remedy);
                }
            }
            Err(reason) => {
                let (meaning, remedy) = damaged_keep(view, chunks, number, index, blocks);
                add_finding(report, Severity::Error, "line.damaged", (Region::KeepMap, index), format!("{reason}: {meaning}"), remedy);
            }
        }
    })
}

fn damaged_keep(view: &View<'_>, chunks: &[ChunkLines], chunk: u64, index: u64, blocks: u64) -> (&'static str, Remedy) {
    let Some(head) = chunks[chunk as usize].head else {
        return ("the chunk's head is damaged as well", Remedy::None("the chunk's head has to be repaired first"));
    };
    // A block of several chunks whose later chunks say otherwise is none any more.
    let is_live = blocks > 0 && (head.state != ChunkHead::RUN || !matches!(parts(chunks, chunk, head.run), Parts::Broken(_)));
    if !is_live {
        let writes = vec![view.write(index, KeepMap::zeroed())];
        return ("nothing of the chunk depends on it", Remedy::Safe { what: "writes an empty line", writes });
    }
    let mut keep = KeepMap::zeroed();
    (0..blocks as usize).for_each(|bit| keep.bits[bit / 8] |= 1 << (bit % 8));
    let what = "keeps all of these blocks: nothing is lost, but unused ones stay allocated until they are freed";
    let meaning = "which of these blocks are in use is unknown: nothing of the chunk may be used";
    (meaning, Remedy::Safe { what, writes: vec![view.write(index, keep)] })
}

/// What the later chunks of a block of several chunks say about it.
enum Parts {
    /// All of them belong to it.
    Whole,
    /// This one's head does not verify.
    Unknown,
    /// This one is used otherwise.
    Broken(u64),
}

/// Looks at the later chunks up to the first that does not say it belongs to the block. A chunk belongs to one block, so that all blocks
/// together are looked at in linear time, whatever they say.
fn parts(chunks: &[ChunkLines], first: u64, run: u64) -> Parts {
    for part in first + 1..first.saturating_add(run).min(chunks.len() as u64) {
        match chunks[part as usize].head {
            None => return Parts::Unknown,
            Some(head) if head.state != ChunkHead::INSIDE || head.run != first => return Parts::Broken(part),
            Some(_) => {}
        }
    }
    Parts::Whole
}

/// Reports the heads that do not verify, given in rising order.
fn damaged_heads(view: &View<'_>, report: &mut Report, chunks: &[ChunkLines], damaged: &[(u64, String)]) {
    // The last chunk before the damaged one that begins something.
    let (mut start, mut next) = (None, 0);
    for (chunk, reason) in damaged {
        for before in next..*chunk {
            if chunks[before as usize].head.is_some_and(|head| head.state != ChunkHead::INSIDE) {
                start = Some(before);
            }
        }
        next = *chunk;
        // Part of a kept block of several chunks, if that says so and reaches this far.
        let covering = start.filter(|&start| {
            let first = &chunks[start as usize];
            first.keeps_first && first.head.is_some_and(|head| head.state == ChunkHead::RUN && chunk - start < head.run)
        });
        damaged_head(view, report, *chunk, reason, covering);
    }
}

fn damaged_head(view: &View<'_>, report: &mut Report, chunk: u64, reason: &str, covering: Option<u64>) {
    let at = (Region::ChunkHead, chunk);
    let meaning = format!("{reason}: what the chunk is cut into is unknown, nothing of it may be used");
    let remedy = match (covering, keeps_anything(view, chunk)) {
        (Some(start), _) => {
            let head = ChunkHead { state: ChunkHead::INSIDE, run: start, ..ChunkHead::default() };
            Remedy::Safe { what: "writes that it belongs to the block that covers it", writes: vec![view.write(chunk, head)] }
        }
        (None, Some(false)) => {
            let writes = vec![view.write(chunk, ChunkHead::default())];
            Remedy::Safe { what: "writes that it is not cut: its keep map keeps nothing", writes }
        }
        _ => Remedy::Loss { what: "frees the chunk, with the kept blocks that were in it", writes: empty_lines(view, chunk) },
    };
    add_finding(report, Severity::Error, "line.damaged", at, meaning, remedy);
}

/// Whether any keep bit of a chunk is set; `None` when a line does not verify.
fn keeps_anything(view: &View<'_>, chunk: u64) -> Option<bool> {
    let per_chunk = view.geometry.keep_lines();
    let mut kept = Some(false);
    let scanned = scan::<KeepMap>(view.lines, chunk * per_chunk..(chunk + 1) * per_chunk, |_, keep| match keep {
        Ok(keep) => kept = kept.map(|kept| kept || keep.bits.iter().any(|&byte| byte != 0)),
        Err(_) => kept = None,
    });
    scanned.ok().and(kept)
}

fn ownership(view: &View<'_>, report: &mut Report, chunk: u64, state: &ChunkLines) {
    let per_slot = view.lines.layout().claim_lines();
    let (line, bit) = (chunk / CHUNKS_PER_CLAIM as u64, (chunk % CHUNKS_PER_CLAIM as u64) as usize);
    let mut live: Option<u64> = None;
    let (mut is_claimed, mut is_certain) = (false, true);
    for slot in 0..u64::from(view.geometry.slots) {
        let index = slot * per_slot + line;
        let Some(claim) = view.claims.get(index) else {
            is_certain = false;
            continue;
        };
        if claim.bits[bit / 8] >> (bit % 8) & 1 == 0 {
            continue;
        }
        is_claimed = true;
        if view.is_fenced(slot, claim.incarnation) || view.is_proven_dead(slot, claim.incarnation) {
            continue;
        }
        if let Some(other) = live {
            let meaning = format!("chunk {chunk} is claimed by the hosts of slots {other} and {slot}, both unfenced");
            let remedy = Remedy::None("none: stop both hosts, and declare dead the one that is off; the other keeps the chunk");
            add_finding(report, Severity::Error, "claim.two_owners", (Region::Claim, index), meaning, remedy);
        }
        live = Some(slot);
    }
    if state.kept == 0 || live.is_some() || !is_certain {
        return;
    }
    let at = (Region::ChunkHead, chunk);
    if is_claimed {
        let meaning = "holds kept blocks of hosts that are fenced or gone";
        let remedy = Remedy::None("none needed: once their death is proven, the next host that needs room adopts it");
        add_finding(report, Severity::Note, "chunk.unadopted", at, meaning, remedy);
    } else if !matches!(state.head, Some(RunHead { state: ChunkHead::INSIDE, .. })) {
        let meaning = "holds kept blocks, but no host claims it";
        let remedy = Remedy::None("none needed: the next host that needs room claims it and keeps its blocks");
        add_finding(report, Severity::Warning, "chunk.orphan", at, meaning, remedy);
    }
}

/// A kept block of several chunks: all of its chunks say so.
fn run(view: &View<'_>, report: &mut Report, chunk: u64, chunks: &[ChunkLines]) {
    let state = &chunks[chunk as usize];
    let Some(RunHead { state: ChunkHead::RUN, run, .. }) = state.head else { return };
    if !state.keeps_first || run == 0 || run > chunks.len() as u64 - chunk {
        return;
    }
    if let Parts::Broken(part) = parts(chunks, chunk, run) {
        let meaning = format!("a kept block of {run} chunks begins here, but chunk {part} is used otherwise");
        let remedy = Remedy::None("none: which of the two is right is unknown; free the block");
        add_finding(report, Severity::Error, "chunk.broken_run", (Region::ChunkHead, chunk), meaning, remedy);
    }
    let expected = view.geometry.chunk_bytes.saturating_mul(run);
    if state.head.is_some_and(|head| head.block_bytes > expected) {
        let meaning = format!("a block of more than the {expected} bytes of its {run} chunks");
        let remedy = Remedy::None("none: free the block");
        add_finding(report, Severity::Error, "chunk.run_bytes", (Region::ChunkHead, chunk), meaning, remedy);
    }
}

fn claim_lines(view: &View<'_>, report: &mut Report) {
    let layout = view.lines.layout();
    for (index, claim) in view.claims.iter() {
        let first = index % layout.claim_lines() * CHUNKS_PER_CLAIM as u64;
        let beyond =
            (0..CHUNKS_PER_CLAIM as u64).find(|bit| first + bit >= layout.chunks() && claim.bits[*bit as usize / 8] >> (bit % 8) & 1 == 1);
        if let Some(bit) = beyond {
            let meaning = format!("claims chunk {}, which does not exist", first + bit);
            let remedy = Remedy::None("none needed: what does not exist is not used");
            add_finding(report, Severity::Error, "claim.range", (Region::Claim, index), meaning, remedy);
        }
    }
}

fn free_boxes(view: &View<'_>, report: &mut Report) {
    let slots = u64::from(view.geometry.slots);
    for (index, message) in view.free_boxes.iter() {
        let (sender, receiver) = (index / slots, index % slots);
        let at = (Region::FreeBox, index);
        let remedy = || Remedy::None("none needed: the receiver refuses it");
        let is_block = |offset: u64| offset.is_multiple_of(LINE_BYTES as u64) && view.lines.layout().chunk_of(offset).is_some();
        if let Some(offset) = message.offsets.iter().find(|offset| **offset != 0 && !is_block(**offset)) {
            let meaning = format!("slot {sender} asks slot {receiver} to free {offset:#x}, which is no block");
            add_finding(report, Severity::Error, "free_box.offset", at, meaning, remedy());
        }
        if message.receiver > view.bound(receiver) && !view.decided_bindings[receiver as usize].hidden {
            let meaning = format!("meant for incarnation {} of slot {receiver}, which was never bound", message.receiver);
            add_finding(report, Severity::Error, "free_box.receiver", at, meaning, remedy());
        }
        let ack = view.free_acks.get(receiver * slots + sender);
        if ack.is_some_and(|ack| ack.sender == message.incarnation && ack.sequence > message.sequence) {
            let meaning = format!("slot {receiver} acknowledges a message of slot {sender} that was never sent");
            add_finding(report, Severity::Error, "free_box.ack", (Region::FreeAck, receiver * slots + sender), meaning, remedy());
        }
    }
}
