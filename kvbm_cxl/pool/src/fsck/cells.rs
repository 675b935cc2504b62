// SPDX-License-Identifier: Apache-2.0
//! The prefix cache: claims on cell chunks, descriptors, hints, pins.
//!
//! What a repair writes here is never served: it may cost cached blocks, and keep cells and chunks back until more hosts are proven to have
//! ended, but nothing that was lost can be taken for a block.

use super::damage::joined_incarnation;
use super::report::{Remedy, Report, Severity};
use super::slots::NOT_THE_OWNER;
use super::view::{View, add_finding, scan};
use crate::cache::survey::{CacheView, ChunkInfo, ChunkState, Claimant, OwnerStatus};
use crate::error::Result;
use crate::media::*;
use bytemuck::Zeroable;
use std::collections::HashMap;

const IS_NOT_READ: Remedy = Remedy::None("none needed: what does not exist is not read");

pub(super) fn check(view: &View<'_>, report: &mut Report) -> Result<()> {
    if view.geometry.cell_chunks() == 0 {
        return Ok(());
    }
    let cache = CacheView::load(view.lines)?;
    claims(view, &cache, report);
    owners(&cache, report)?;
    descriptors(view, &cache, report)?;
    hints(view, &cache, report)?;
    pins(view, report)
}

fn chunks_in(view: &View<'_>, line: u64) -> std::ops::Range<u64> {
    let first = line * CHUNKS_PER_CELL_CLAIM as u64;
    first..view.geometry.cell_chunks().min(first + CHUNKS_PER_CELL_CLAIM as u64)
}

fn claims(view: &View<'_>, cache: &CacheView, report: &mut Report) {
    let per_slot = view.geometry.cell_claim_lines();
    for (index, reason) in &view.cell_claims.bad {
        let (slot, line) = (index / per_slot, index % per_slot);
        let meaning =
            "it counts as a claim of every chunk in it, by the latest incarnation of its slot: no host adopts them while that may be there";
        let remedy = if view.is_never_bound(slot) {
            Remedy::Safe {
                what: "writes the empty line that stood there: the slot was never bound",
                writes: vec![view.write(*index, CellClaim::zeroed())],
            }
        } else {
            let incarnation = joined_incarnation(view, slot);
            let mut claim = CellClaim { incarnation, ..CellClaim::zeroed() };
            // A host that is there claims nothing that another one has. One that is gone may have: its late lines are to be expected there.
            let is_there = cache.standing(Claimant { slot: slot as u16, incarnation }).is_there();
            for chunk in chunks_in(view, line).filter(|&chunk| !is_there || !is_anothers(cache, chunk, slot)) {
                claim.set((chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize, true);
            }
            let what = "claims every chunk in it for this slot that may have been its own: blocks of others may be given up for it";
            Remedy::Safe { what, writes: vec![view.write(*index, claim)] }
        };
        add_finding(report, Severity::Error, "line.damaged", (Region::CellClaim, *index), format!("{reason}: {meaning}"), remedy);
    }
    for (index, claim) in view.cell_claims.iter() {
        let chunks = chunks_in(view, index % per_slot);
        let beyond = ((chunks.end - chunks.start) as usize..CHUNKS_PER_CELL_CLAIM).find(|&bit| claim.has(bit));
        if let Some(bit) = beyond {
            let meaning = format!("claims cell chunk {}, which does not exist", chunks.start + bit as u64);
            add_finding(report, Severity::Error, "cell_claim.range", (Region::CellClaim, index), meaning, IS_NOT_READ);
        }
    }
}

/// Whether a host that is there claims the chunk and is not of `slot`.
fn is_anothers(cache: &CacheView, chunk: u64, slot: u64) -> bool {
    cache.chunk(chunk).is_ok_and(|info| {
        let mut claimants = info.claimants.iter();
        claimants.any(|(claimant, standing)| u64::from(claimant.slot) != slot && *standing == OwnerStatus::Live)
    })
}

/// Chunks with several hosts, or only with ones that are gone.
fn owners(cache: &CacheView, report: &mut Report) -> Result<()> {
    for chunk in 0..cache.cell_chunks() {
        let info = cache.chunk(chunk)?;
        let Some((last, _)) = info.claimants.last() else { continue };
        let at = (Region::CellClaim, cache.claim_line(last.slot, chunk));
        match info.state {
            ChunkState::Contested => {
                let there = info.claimants.iter().filter(|(_, standing)| standing.is_there());
                let slots: Vec<String> = there.map(|(claimant, _)| claimant.slot.to_string()).collect();
                let meaning = format!("cell chunk {chunk} is claimed by slots {}, which are all there", slots.join(" and "));
                let remedy =
                    Remedy::None("the next join of each of their machines but the last gives it up; until then its blocks may be wrong");
                add_finding(report, Severity::Error, "cell_claim.two_owners", at, meaning, remedy);
            }
            ChunkState::Abandoned => {
                let remedy = Remedy::None("none needed: the next host with a running cache adopts it");
                add_finding(report, Severity::Note, "cell_claim.unadopted", at, "only hosts that are gone claim cell chunks in it", remedy);
            }
            ChunkState::Waiting => {
                let meaning = "only hosts that are gone claim cell chunks in it, and not all of them are proven to have ended";
                let remedy = Remedy::None("the next join of their machines, or cxlctl hosts declare-dead");
                add_finding(report, Severity::Note, "cell_claim.waits", at, meaning, remedy);
            }
            ChunkState::Unclaimed | ChunkState::Claimed(_) => {}
        }
    }
    Ok(())
}

/// Of no host, and so of no claimant: the chunk's next owner keeps the cell in quarantine, as if the line did not verify.
fn empty_cell(view: &View<'_>, cell: u64) -> Remedy {
    let what = "empties it: its block is given up, and the chunk's next owner keeps the cell in quarantine as long as need be";
    Remedy::Safe { what, writes: vec![view.write(cell, Descriptor::default())] }
}

fn descriptors(view: &View<'_>, cache: &CacheView, report: &mut Report) -> Result<()> {
    let (mut ready, mut known) = (HashMap::new(), None::<ChunkInfo>);
    let mut failed = Ok(());
    scan::<Descriptor>(view.lines, 0..cache.cell_count(), |cell, line| {
        let chunk = cell / u64::from(view.geometry.cells_per_chunk);
        let info = match known.take().filter(|info| info.chunk == chunk).map_or_else(|| cache.chunk(chunk), Ok) {
            Ok(info) => info,
            Err(error) => return failed = Err(error),
        };
        match line {
            Err(reason) => {
                let meaning =
                    format!("{reason}: what the cell holds is lost: it is not read, its chunk's next owner puts it in quarantine");
                add_finding(report, Severity::Error, "line.damaged", (Region::Descriptor, cell), meaning, empty_cell(view, cell));
            }
            Ok(line) => {
                let is_sound = descriptor(view, report, cell, &line, &info);
                if is_sound && line.state == Descriptor::READY && view.is_served(&line) {
                    duplicate(view, report, &mut ready, cell, &line);
                }
            }
        }
        known = Some(info);
    })?;
    failed?;
    unreachable(cache, report)
}

/// The faults of one descriptor, most serious first; true when it has none.
fn descriptor(view: &View<'_>, report: &mut Report, cell: u64, line: &Descriptor, chunk: &ChunkInfo) -> bool {
    let mut wrong = |severity, rule, meaning: String, remedy| {
        add_finding(report, severity, rule, (Region::Descriptor, cell), meaning, remedy);
        false
    };
    let slot = u64::from(line.owner);
    let holds = matches!(line.state, Descriptor::WRITING | Descriptor::READY | Descriptor::EVICTING);
    if slot >= view.geometry.slots.into() {
        return wrong(Severity::Error, "descriptor.slot", format!("written by slot {slot}, which does not exist"), empty_cell(view, cell));
    }
    if line.incarnation > view.bound(slot) && !view.decided_bindings[slot as usize].hidden {
        let bound = view.bound(slot);
        let meaning = format!("written by incarnation {} of slot {slot}, of which only {bound} is bound", line.incarnation);
        return wrong(Severity::Error, "descriptor.unbound", meaning, empty_cell(view, cell));
    }
    let cell_bytes = view.lines.layout().cell(cell).map_or(0, |(_, cell_bytes)| cell_bytes);
    if holds && (line.len_bytes == 0 || u64::from(line.len_bytes) > cell_bytes) {
        let meaning = format!("a block of {} bytes in a cell of {cell_bytes}", line.len_bytes);
        return wrong(Severity::Error, "descriptor.length", meaning, empty_cell(view, cell));
    }
    if !holds || line.incarnation == 0 {
        return true;
    }
    if chunk.state == ChunkState::Unclaimed {
        let meaning = format!("cell chunk {} has a block, but no claim", chunk.chunk);
        return wrong(Severity::Error, "descriptor.unclaimed", meaning, empty_cell(view, cell));
    }
    if chunk.claimants.iter().all(|(claimant, _)| claimant.slot != line.owner) {
        let meaning = format!("written by slot {slot}, which does not claim the chunk");
        if view.is_fenced(slot, line.incarnation) {
            let remedy = Remedy::None("none needed: a late line of a host that was fenced counts for nothing");
            return wrong(Severity::Note, "descriptor.late", meaning, remedy);
        }
        return wrong(Severity::Error, "descriptor.foreign", meaning, empty_cell(view, cell));
    }
    true
}

/// The block of each key that was met first, by fingerprint.
type Ready = HashMap<u64, u64>;

fn duplicate(view: &View<'_>, report: &mut Report, ready: &mut Ready, cell: u64, line: &Descriptor) {
    let fingerprint = CacheView::fingerprint(&view.geometry, line);
    let other = *ready.entry(fingerprint).or_insert(cell);
    let same = |found: Descriptor| found.state == line.state && (found.namespace, found.key) == (line.namespace, line.key);
    if other != cell && view.lines.fetch::<Descriptor>(other).is_ok_and(same) {
        let meaning = format!("cell {other} has a block of the same key");
        let remedy = Remedy::None("none needed: each is complete; the one that no hint names is evicted by its owner");
        add_finding(report, Severity::Warning, "descriptor.twice", (Region::Descriptor, cell), meaning, remedy);
    }
}

/// Blocks that no lookup comes to.
fn unreachable(cache: &CacheView, report: &mut Report) -> Result<()> {
    for first in (0..cache.cell_count()).step_by(crate::cache::survey::BATCH as usize) {
        let mut blocks = cache.cells(first, crate::cache::survey::BATCH)?;
        blocks.retain(|cell| cell.is_served());
        for (block, is_reachable) in blocks.iter().zip(cache.are_reachable(&blocks)?) {
            if !is_reachable {
                let remedy = Remedy::None("none needed: its owner puts the hint back, or evicts the block");
                let at = (Region::Descriptor, block.cell);
                add_finding(report, Severity::Note, "descriptor.unreachable", at, "no lookup of its key comes to the block", remedy);
            }
        }
    }
    Ok(())
}

fn hints(view: &View<'_>, cache: &CacheView, report: &mut Report) -> Result<()> {
    let lines = view.lines.layout().span(Region::Hint).lines;
    let mut named = Vec::new();
    let mut damaged = Vec::new();
    scan::<HintLine>(view.lines, 0..lines, |index, line| match line {
        Ok(line) => {
            let cells = line.iter().enumerate().filter_map(|(place, hint)| match hint {
                Hint::Cell { fingerprint, cell } => Some((index, place, fingerprint, cell)),
                Hint::Empty | Hint::Tomb => None,
            });
            named.extend(cells);
        }
        Err(reason) => damaged.push((index, reason)),
    })?;
    for (index, reason) in damaged {
        let meaning = format!("{reason}: it counts as four places that were used once; blocks whose hints stood there are not found");
        let (what, value) = replacement(view, index);
        let remedy = Remedy::Safe { what, writes: vec![view.write(index, value)] };
        add_finding(report, Severity::Error, "line.damaged", (Region::Hint, index), meaning, remedy);
    }
    for group in named.chunk_by(|one, other| one.0 == other.0) {
        let index = group[0].0;
        if let Some((_, place, _, cell)) = group.iter().find(|(_, _, _, cell)| *cell >= cache.cell_count()) {
            let mut line: HintLine = view.lines.fetch(index)?;
            line.set(*place, Hint::Tomb);
            let remedy = Remedy::Safe { what: "clears it", writes: vec![view.write(index, line)] };
            let meaning = format!("names cell {cell}, which does not exist");
            add_finding(report, Severity::Warning, "hint.range", (Region::Hint, index), meaning, remedy);
            continue;
        }
        let mut is_stale = false;
        for (_, _, fingerprint, cell) in group {
            let line = view.lines.fetch::<Descriptor>(*cell).ok();
            is_stale = is_stale || !cache.backs(*fingerprint, line.as_ref());
        }
        if is_stale {
            let remedy = Remedy::None("none needed: the next publish that needs the place takes it");
            let meaning = "names a cell that holds no block of its key";
            add_finding(report, Severity::Note, "hint.stale", (Region::Hint, index), meaning, remedy);
        }
    }
    Ok(())
}

/// An empty line where the line after it begins with an empty place, at which every probe that came through ends anyway; else four tombs.
fn replacement(view: &View<'_>, index: u64) -> (&'static str, HintLine) {
    let per_stripe = view.geometry.hint_lines_per_stripe();
    let (first, place) = (index / per_stripe * per_stripe, index % per_stripe);
    let behind = view.lines.fetch::<HintLine>(first + (place + 1) % per_stripe);
    let mut value = HintLine::default();
    if behind.is_ok_and(|line| line.get(0) == Hint::Empty) {
        return ("writes an empty line: no probe continued after it; blocks that it named get their hints back from their owners", value);
    }
    (0..HINTS_PER_LINE).for_each(|place| value.set(place, Hint::Tomb));
    ("writes four places that were used once; blocks that it named get their hints back from their owners", value)
}

fn pins(view: &View<'_>, report: &mut Report) -> Result<()> {
    let per_slot = view.geometry.pin_lines();
    scan::<PinLine>(view.lines, 0..u64::from(view.geometry.slots) * per_slot, |index, line| {
        let (slot, at) = (index / per_slot, (Region::Pin, index));
        let first = index % per_slot * CELLS_PER_PIN as u64;
        match line {
            Err(reason) => {
                let meaning =
                    format!("{reason}: all of its cells count as pinned while the slot's host may be there: they are not evicted");
                let (what, value) = if view.is_never_bound(slot) {
                    ("writes the empty line that stood there: the slot was never bound", PinLine::default())
                } else {
                    let value =
                        PinLine { incarnation: joined_incarnation(view, slot), nibbles: [0x8888_8888_8888_8888; 7], ..PinLine::default() };
                    ("pins all of its cells for the host that joined last: that ends when it joins again, is fenced or leaves", value)
                };
                let remedy = Remedy::Safe { what, writes: vec![view.write(index, value)] };
                add_finding(report, Severity::Error, "line.damaged", at, meaning, remedy);
            }
            Ok(line) => {
                if line.incarnation > view.bound(slot) && !view.decided_bindings[slot as usize].hidden {
                    let bound = view.bound(slot);
                    let meaning = format!("written by incarnation {} of slot {slot}, of which only {bound} is bound", line.incarnation);
                    add_finding(report, Severity::Error, "line.unbound", at, meaning, NOT_THE_OWNER);
                }
                let beyond =
                    (0..CELLS_PER_PIN).find(|&place| first + place as u64 >= view.geometry.cell_count() && line.nibble(place) != 0);
                if let Some(place) = beyond.filter(|_| line.nibbles != [0x8888_8888_8888_8888; 7]) {
                    let meaning = format!("uses cell {}, which does not exist", first + place as u64);
                    add_finding(report, Severity::Warning, "pin.range", at, meaning, IS_NOT_READ);
                }
            }
        }
    })
}
