// SPDX-License-Identifier: Apache-2.0
//! `cxlctl cache stat` and `cxlctl cache ls`.

use crate::output::{Exit, Failure, Out};
use crate::text::{bytes, list, table};
use cxl_pool::cache::Namespace;
use cxl_pool::cache::survey::{BATCH, CacheSummary, CacheView, CellInfo, CellState, ChunkCounts, Claimant, StateCounts};
use serde_json::{Value, json};

/// Namespaces that the text lists.
const NAMESPACES: usize = 20;

/// Slot and incarnation as they are printed.
pub fn claimant(of: Claimant) -> String {
    if of.incarnation == u32::MAX { format!("slot {}", of.slot) } else { format!("slot {} incarnation {}", of.slot, of.incarnation) }
}

pub fn stat(view: &CacheView, hints: bool, out: &mut Out) -> Result<Exit, Failure> {
    let summary = view.summary(hints)?;
    out.answer(|| stat_json(&summary), || stat_text(&summary))?;
    Ok(Exit::Done)
}

fn states_json(counts: &StateCounts) -> Value {
    CellState::ALL.into_iter().map(|state| (state.name().to_owned(), counts.of(state).into())).collect::<serde_json::Map<_, _>>().into()
}

fn chunks_json(chunks: &ChunkCounts) -> Value {
    json!({"claimed": chunks.claimed, "unclaimed": chunks.unclaimed, "abandoned": chunks.abandoned, "waiting": chunks.waiting,
        "contested": chunks.contested})
}

fn stat_json(summary: &CacheSummary) -> Value {
    let classes = summary
        .classes
        .iter()
        .map(|class| json!({"cell_bytes": class.cell_bytes, "cells": states_json(&class.cells), "chunks": chunks_json(&class.chunks)}));
    let owners = summary.owners.iter().map(|owner| {
        json!({"slot": owner.owner.slot, "incarnation": owner.owner.incarnation, "standing": owner.standing.name(),
            "cells": states_json(&owner.cells), "len_bytes": owner.len_bytes, "chunks": owner.chunks})
    });
    let namespaces = summary.namespaces.iter().map(|found| {
        json!({"namespace": found.namespace.map(|namespace| namespace.to_string()), "blocks": found.blocks,
            "len_bytes": found.len_bytes, "cell_bytes": found.cell_bytes})
    });
    let waits = summary.waits.iter().map(|wait| {
        json!({"slot": wait.awaited.slot, "incarnation": wait.awaited.incarnation, "standing": wait.standing.name(),
            "cells": wait.cells, "cell_bytes": wait.cell_bytes})
    });
    let pins = summary.pins.iter().map(|(slot, cells)| json!({"slot": slot, "cells": cells}));
    let hints = summary.hints.map(|hints| {
        json!({"places": hints.places, "used": hints.used, "tombs": hints.tombs, "stale": hints.stale,
            "damaged_lines": hints.damaged_lines, "unreachable_blocks": hints.unreachable_blocks})
    });
    json!({"cells": states_json(&summary.cells), "chunks": chunks_json(&summary.chunks), "served": summary.served,
        "pinned": summary.pinned, "pins": pins.collect::<Vec<_>>(),
        "classes": classes.collect::<Vec<_>>(), "owners": owners.collect::<Vec<_>>(), "namespaces": namespaces.collect::<Vec<_>>(),
        "waits": waits.collect::<Vec<_>>(), "waiting_bytes": summary.waiting_bytes, "hints": hints})
}

fn states_row(name: String, counts: &StateCounts) -> Vec<String> {
    std::iter::once(name).chain(CellState::ALL.into_iter().map(|state| counts.of(state).to_string())).collect()
}

fn stat_text(summary: &CacheSummary) -> String {
    let head = std::iter::once("cells").chain(CellState::ALL.into_iter().map(CellState::name));
    let mut rows: Vec<Vec<String>> = vec![head.map(String::from).collect()];
    rows.extend(summary.classes.iter().map(|class| states_row(format!("of {}", bytes(class.cell_bytes)), &class.cells)));
    rows.extend(summary.owners.iter().map(|owner| {
        states_row(format!("of {}, {}, {} chunks", claimant(owner.owner), owner.standing.name(), owner.chunks), &owner.cells)
    }));
    rows.push(states_row("all".into(), &summary.cells));
    let mut text = table(&rows);
    let chunks = &summary.chunks;
    text.push_str(&format!(
        "chunks: {} claimed, {} unclaimed, {} abandoned, {} wait for the proof of a host's end, {} contested\n",
        chunks.claimed, chunks.unclaimed, chunks.abandoned, chunks.waiting, chunks.contested
    ));
    text.push_str(&format!("blocks: {} available, {} cells pinned\n", summary.served, summary.pinned));
    if !summary.namespaces.is_empty() {
        let mut rows = vec![["namespace", "blocks", "size", "cells"].map(String::from).to_vec()];
        for found in summary.namespaces.iter().take(NAMESPACES) {
            let name = found.namespace.map_or("all others".into(), |namespace| namespace.to_string());
            rows.push(vec![name, found.blocks.to_string(), bytes(found.len_bytes), bytes(found.cell_bytes)]);
        }
        text.push_str(&table(&rows));
        if summary.namespaces.len() > NAMESPACES {
            text.push_str(&format!("and {} namespaces more (--json lists them)\n", summary.namespaces.len() - NAMESPACES));
        }
    }
    for wait in &summary.waits {
        text.push_str(&format!(
            "{} in {} cells cannot be used before {} ({}) is proven to have ended (cxlctl hosts)\n",
            bytes(wait.cell_bytes),
            wait.cells,
            claimant(wait.awaited),
            wait.standing.name()
        ));
    }
    if let Some(hints) = summary.hints {
        text.push_str(&format!(
            "hints: {} of {} places used, {} of them stale, {} tombs, {} damaged lines; {} blocks that no lookup comes to\n",
            hints.used, hints.places, hints.stale, hints.tombs, hints.damaged_lines, hints.unreachable_blocks
        ));
    }
    text
}

pub fn cell_json(cell: &CellInfo) -> Value {
    let mut value = json!({"cell": cell.cell, "chunk": cell.chunk, "offset": cell.offset, "cell_bytes": cell.cell_bytes,
        "state": cell.state.name(), "pinned_by": cell.pinned_by});
    if cell.state != CellState::Damaged {
        let stamp = json!({"owner": cell.descriptor.owner, "incarnation": cell.descriptor.incarnation, "seq": cell.descriptor.seq,
            "standing": cell.standing.name()});
        value["stamp"] = stamp;
    }
    if matches!(cell.state, CellState::Writing | CellState::Ready | CellState::Evicting) {
        value["namespace"] = cell.namespace().to_string().into();
        value["key"] = cell.key().to_string().into();
        value["len_bytes"] = cell.descriptor.len_bytes.into();
        value["served"] = cell.is_served().into();
    }
    value
}

pub fn ls(view: &CacheView, namespace: Option<Namespace>, state: Option<CellState>, limit: u64, out: &mut Out) -> Result<Exit, Failure> {
    let wanted = |cell: &CellInfo| {
        let holds = matches!(cell.state, CellState::Writing | CellState::Ready | CellState::Evicting);
        state.map_or(cell.state != CellState::Free, |state| cell.state == state)
            && namespace.is_none_or(|namespace| holds && cell.namespace() == namespace)
    };
    let mut listed: Vec<CellInfo> = Vec::new();
    let mut more = false;
    'cells: for first in (0..view.cell_count()).step_by(BATCH as usize) {
        for cell in view.cells(first, BATCH)?.into_iter().filter(wanted) {
            if listed.len() as u64 == limit {
                more = true;
                break 'cells;
            }
            listed.push(cell);
        }
    }
    let text = || {
        let head = ["cell", "state", "owner", "standing", "length", "pinned by", "namespace", "key"];
        let mut rows = vec![head.map(String::from).to_vec()];
        for cell in &listed {
            let stamp = Claimant { slot: cell.descriptor.owner, incarnation: cell.descriptor.incarnation };
            let is_block = matches!(cell.state, CellState::Writing | CellState::Ready | CellState::Evicting);
            let of_block = |text: String| if is_block { text } else { "-".into() };
            let is_readable = cell.state != CellState::Damaged;
            rows.push(vec![
                cell.cell.to_string(),
                cell.state.name().into(),
                if is_readable { format!("{}.{}", stamp.slot, stamp.incarnation) } else { "?".into() },
                if is_readable { cell.standing.name().into() } else { "?".into() },
                of_block(cell.descriptor.len_bytes.to_string()),
                list(&cell.pinned_by),
                of_block(cell.namespace().to_string()),
                of_block(cell.key().to_string()),
            ]);
        }
        let mut text =
            if listed.is_empty() { String::from("nothing to list: the cache is empty, or no cell matches\n") } else { table(&rows) };
        if more {
            text.push_str(&format!("more than {limit}: --limit lists more\n"));
        }
        text
    };
    out.answer(|| json!({"cells": listed.iter().map(cell_json).collect::<Vec<_>>(), "more": more}), text)?;
    Ok(Exit::Done)
}
