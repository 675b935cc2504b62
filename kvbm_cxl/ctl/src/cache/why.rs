// SPDX-License-Identifier: Apache-2.0
//! `cxlctl why`.

use super::list::cell_json;
use super::{WhyArgs, namespace_of, view};
use crate::output::{Exit, Failure, Out};
use crate::text::list;
use cxl_pool::cache::survey::{Explanation, HintSeen, Verdict};
use serde_json::{Value, json};

pub fn run(pool: Option<&str>, args: &WhyArgs, out: &mut Out) -> Result<Exit, Failure> {
    let view = view(&crate::pool::open(pool, true)?)?;
    let Some(namespace) = namespace_of(&view, &args.block)? else {
        let reason = "no cell of any namespace holds the key: it was never published, or has been evicted";
        let key = args.block.key;
        out.answer(
            || json!({"hit": false, "verdict": "nowhere", "key": key.to_string(), "meaning": reason}),
            || format!("miss: {reason}\n"),
        )?;
        return Ok(Exit::Failed);
    };
    let told = view.why(namespace, args.block.key, !args.no_scan)?;
    out.answer(|| json_of(&told), || text_of(&told))?;
    Ok(if told.is_hit() { Exit::Done } else { Exit::Failed })
}

/// What a verdict means, and what becomes of it.
fn meaning(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Hit => "a lookup hits",
        Verdict::NoHint => "the block is complete, but no hint leads to it: its owner puts the hint back within its upkeep, if it runs",
        Verdict::BehindTheEnd => "a hint follows an empty place, where every lookup ends: the block's owner writes another one",
        Verdict::NoSuchCell => "a hint names a cell that the pool does not have: the next publish of the key rewrites it",
        Verdict::Damaged => "the descriptor of the cell does not verify: its content is lost (cxlctl fsck)",
        Verdict::Free => "the cell that the hint names is free: the block was evicted, or given up while it was published",
        Verdict::Writing => "the block is just being published; if that lasts, its publisher hangs or died (cxlctl hosts)",
        Verdict::Evicting => "the block is just being evicted; it stays if a reader pins it in time",
        Verdict::Retiring => "the cell is leaving quarantine: its content is void",
        Verdict::OtherKey => "the cell that the hint names holds another block: this one was evicted and the cell used again",
        Verdict::OtherNamespace => "the cell that the hint names holds a block of the same key in another namespace",
        Verdict::FencedOwner { is_claimed: false } => {
            "its owner is fenced and no host has adopted its cells yet: it comes back when one with a running cache does"
        }
        Verdict::FencedOwner { is_claimed: true } => {
            "its owner is fenced and another host has its chunk: that host stamps it again, or keeps the cell until the owner is proven to \
             have ended"
        }
        Verdict::FencesUnknown => "the fences cannot be read, so that every block counts as void (cxlctl fsck)",
        Verdict::TooLong => "the descriptor tells of more bytes than the cell has: a host other than its owner wrote it (cxlctl fsck)",
    }
}

const NOTHING: &str = "no hint leads to it";

fn json_of(told: &Explanation) -> Value {
    let seen = told.seen.iter().map(|seen| {
        json!({"cell": seen.cell, "hint_line": seen.line, "verdict": seen.verdict.name(), "info": seen.info.as_ref().map(cell_json)})
    });
    let answer = told.answer().map(|seen| seen.verdict);
    json!({"hit": told.is_hit(), "verdict": answer.map_or("no-hint-at-all", Verdict::name), "meaning": answer.map_or(NOTHING, meaning),
        "namespace": told.namespace.to_string(), "key": told.key.to_string(), "home_line": told.home_line,
        "damaged_lines": told.damaged_lines, "free_places": told.free_places, "scanned": told.is_scanned,
        "seen": seen.collect::<Vec<_>>(), "elsewhere": told.elsewhere.iter().map(ToString::to_string).collect::<Vec<_>>()})
}

fn seen_text(seen: &HintSeen) -> String {
    let from = seen.line.map_or("found by a scan".into(), |line| format!("hint in line {line}"));
    let mut text = format!("  cell {} ({from}): {}\n", seen.cell, meaning(seen.verdict));
    if let Some(info) = &seen.info {
        text.push_str(&format!(
            "    {}, stamped by slot {} incarnation {} ({}), {} bytes at {:#x}, pinned by {}\n",
            info.state.name(),
            info.descriptor.owner,
            info.descriptor.incarnation,
            info.standing.name(),
            info.descriptor.len_bytes,
            info.offset,
            list(&info.pinned_by)
        ));
    }
    text
}

fn text_of(told: &Explanation) -> String {
    let mut text = match told.answer() {
        Some(seen) if seen.verdict == Verdict::Hit => String::from("hit\n"),
        Some(seen) => format!("miss: {}\n", meaning(seen.verdict)),
        None if told.is_scanned => format!("miss: {NOTHING}, and no cell holds it: it was never published, or has been evicted\n"),
        None => format!("miss: {NOTHING}; without --no-scan cells without a hint are found as well\n"),
    };
    text.push_str(&format!("namespace {}, key {}, first hint line {}\n", told.namespace, told.key, told.home_line));
    told.seen.iter().for_each(|seen| text.push_str(&seen_text(seen)));
    if told.damaged_lines > 0 {
        text.push_str(&format!("{} hint lines of its window do not verify: its hint may be lost (cxlctl fsck)\n", told.damaged_lines));
    }
    if told.free_places == 0 {
        text.push_str("no place of its window is free: a publish has to find a stale hint, or is refused\n");
    }
    for namespace in &told.elsewhere {
        text.push_str(&format!("namespace {namespace} has a block of this key: was that one meant?\n"));
    }
    text
}
