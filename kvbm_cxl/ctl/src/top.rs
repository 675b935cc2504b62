// SPDX-License-Identifier: Apache-2.0
//! `cxlctl top`: what every host does, as it does it.

use crate::cli::TopArgs;
use crate::hosts::standing;
use crate::output::{Exit, Failure, Out};
use crate::pool_view::{HostView, PoolView};
use crate::text::{bytes, table};
use cxl_pool::metrics::Kind;
use cxl_pool::metrics::stats::Stat;
use serde_json::{Map, Value, json};
use std::io::IsTerminal;
use std::time::Duration;

/// Puts the cursor at the top and clears the screen.
const REDRAW: &str = "\x1b[H\x1b[J";

pub fn run(pool: Option<&str>, args: &TopArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, true)?;
    let is_screen = !args.once && !out.is_json() && std::io::stdout().is_terminal();
    let mut before = PoolView::of(&pool)?;
    if is_screen {
        out.text("\x1b[2J")?;
    }
    while !out.is_closed() {
        std::thread::sleep(Duration::from_millis(args.interval_ms));
        let now = PoolView::of(&pool)?;
        if out.is_json() && !args.once {
            // One object per line, so that a reader knows where each ends.
            out.line(json_of(&before, &now).to_string())?;
        } else {
            let redraw = if is_screen { REDRAW } else { "" };
            out.answer(|| json_of(&before, &now), || format!("{redraw}{}", text_of(&before, &now)))?;
        }
        out.flush()?;
        if args.once {
            break;
        }
        before = now;
    }
    Ok(Exit::Done)
}

/// A host at two moments.
struct Pair<'a> {
    before: Option<&'a HostView>,
    now: &'a HostView,
    seconds: f64,
}

impl<'a> Pair<'a> {
    fn all(before: &'a PoolView, now: &'a PoolView) -> impl Iterator<Item = Pair<'a>> {
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        now.hosts.iter().map(move |host| {
            // Counters of another incarnation started at zero.
            let is_same = |other: &&HostView| (other.slot.slot, other.slot.incarnation) == (host.slot.slot, host.slot.incarnation);
            Pair { before: before.hosts.iter().find(is_same), now: host, seconds }
        })
    }

    /// How much a counter rose.
    fn rise(&self, stat: Stat) -> Option<u64> {
        self.now.stat(stat)?.checked_sub(self.before?.stat(stat)?)
    }

    /// How much it rose per second.
    fn rate(&self, stat: Stat) -> Option<f64> {
        Some(self.rise(stat)? as f64 / self.seconds)
    }

    /// Hits among all that was asked for between the two moments, 0 to 1; `None` when nothing was.
    fn hit_ratio(&self) -> Option<f64> {
        let (hits, misses) = (self.rise(Stat::Hits)?, self.rise(Stat::Misses)?);
        (hits + misses > 0).then(|| hits as f64 / (hits + misses) as f64)
    }

    fn is_moving(&self) -> bool {
        self.before.is_some_and(|before| before.slot.heartbeat != self.now.slot.heartbeat)
    }
}

fn json_of(before: &PoolView, now: &PoolView) -> Value {
    let hosts = Pair::all(before, now).map(|pair| {
        let slot = &pair.now.slot;
        let stats: Map<String, Value> =
            Stat::ALL.iter().filter_map(|stat| Some((stat.name().to_owned(), pair.now.stat(*stat)?.into()))).collect();
        let counters = Stat::ALL.iter().filter(|stat| stat.kind() == Kind::Counter);
        let rates: Map<String, Value> = counters.filter_map(|stat| Some((stat.name().to_owned(), pair.rate(*stat)?.into()))).collect();
        json!({"slot": slot.slot, "state": slot.state.name(), "standing": standing(slot), "incarnation": slot.incarnation,
            "moving": pair.is_moving(), "stats": stats, "per_second": rates, "hit_ratio": pair.hit_ratio()})
    });
    json!({"seconds": now.at.duration_since(before.at).as_secs_f64(), "hosts": hosts.collect::<Vec<_>>()})
}

/// A rate with as many digits as are worth reading; `-` when there is none.
fn rate(value: Option<f64>) -> String {
    match value {
        None => "-".into(),
        Some(value) if value < 100.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.0}"),
    }
}

/// Bytes that agents moved to or from other processes and storage, as those count that asked for it.
const MOVED: [Stat; 8] = [
    Stat::NixlPoolReadBytes,
    Stat::NixlPoolWrittenBytes,
    Stat::NixlStagedReadBytes,
    Stat::NixlStagedWrittenBytes,
    Stat::NixlObjectReadBytes,
    Stat::NixlObjectWrittenBytes,
    Stat::NixlFileReadBytes,
    Stat::NixlFileWrittenBytes,
];

/// The hosts with NIXL agents; nothing where there are none.
fn nixl_text(before: &PoolView, now: &PoolView) -> String {
    let heads = [
        "slot", "agents", "posted/s", "reads/s", "writes/s", "failed/s", "moved/s", "staged/s", "served/s", "notifs/s", "links", "staging",
    ];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for pair in Pair::all(before, now).filter(|pair| crate::nixl::has_agents(pair.now)) {
        let sum =
            |stats: &[Stat]| stats.iter().map(|stat| pair.rate(*stat)).sum::<Option<f64>>().map_or("-".into(), |rate| bytes(rate as u64));
        let count = |stat| pair.now.stat(stat).map_or("-".into(), |count| count.to_string());
        rows.push(vec![
            pair.now.slot.slot.to_string(),
            count(Stat::NixlEngines),
            rate(pair.rate(Stat::NixlPosted)),
            rate(pair.rate(Stat::NixlReads)),
            rate(pair.rate(Stat::NixlWrites)),
            rate(pair.rate(Stat::NixlFailed)),
            sum(&MOVED),
            sum(&[Stat::NixlStagedReadBytes, Stat::NixlStagedWrittenBytes]),
            sum(&[Stat::NixlServedReadBytes, Stat::NixlServedWrittenBytes]),
            rate(pair.rate(Stat::NixlNotifsSent)),
            count(Stat::NixlLinks),
            pair.now.stat(Stat::NixlStagingUsedBytes).map_or("-".into(), bytes),
        ]);
    }
    if rows.len() == 1 { String::new() } else { format!("\nNIXL\n{}", table(&rows)) }
}

fn text_of(before: &PoolView, now: &PoolView) -> String {
    let heads = [
        "slot", "host", "heart", "published/s", "bytes/s", "pulled/s", "bytes/s", "hits", "misses/s", "evicted/s", "refused/s", "pins",
        "quarantined", "rejoins",
    ];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for pair in Pair::all(before, now) {
        let slot = &pair.now.slot;
        let size = |stat| pair.rate(stat).map_or("-".into(), |rate| bytes(rate as u64));
        let count = |stat| pair.now.stat(stat).map_or("-".into(), |count| count.to_string());
        rows.push(vec![
            slot.slot.to_string(),
            format!("{}, {}", slot.state.name(), standing(slot)),
            if pair.is_moving() { "moving" } else { "still" }.into(),
            rate(pair.rate(Stat::PublishedBlocks)),
            size(Stat::PublishedBytes),
            rate(pair.rate(Stat::PulledBlocks)),
            size(Stat::PulledBytes),
            pair.hit_ratio().map_or("-".into(), |ratio| format!("{:.1} %", 100.0 * ratio)),
            rate(pair.rate(Stat::Misses)),
            rate(pair.rate(Stat::Evictions)),
            rate(pair.rate(Stat::Refusals)),
            count(Stat::Pins),
            count(Stat::QuarantinedCells),
            count(Stat::Rejoins),
        ]);
    }
    let used = now.hosts.len();
    let nixl = nixl_text(before, now);
    format!("{}{nixl}{used} of {} slots were ever used\n", table(&rows), now.slot_count)
}
