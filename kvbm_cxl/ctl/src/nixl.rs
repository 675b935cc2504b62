// SPDX-License-Identifier: Apache-2.0
//! `cxlctl nixl`: what the NIXL agents of every host have transferred.

use crate::hosts::{is_fenced, standing};
use crate::output::{Exit, Failure, Out};
use crate::pool_view::{HostView, PoolView};
use crate::text::{bytes, table};
use cxl_pool::metrics::stats::Stat;
use serde_json::{Map, Value, json};

/// What the names of these counters begin with.
const PREFIX: &str = "nixl_";

pub fn run(pool: Option<&str>, out: &mut Out) -> Result<Exit, Failure> {
    let view = PoolView::of(&crate::pool::open(pool, true)?)?;
    let is_old = view.stats_lines < cxl_pool::media::STATS_LINES;
    out.answer(|| json_of(&view, is_old), || text_of(&view, is_old))?;
    Ok(Exit::Done)
}

/// The counters, each with its name without the prefix that all have.
fn counters() -> impl Iterator<Item = (Stat, &'static str)> {
    Stat::ALL.iter().filter_map(|stat| Some((*stat, stat.name().strip_prefix(PREFIX)?)))
}

/// Whether a host has ever had an agent.
pub fn has_agents(host: &HostView) -> bool {
    counters().any(|(stat, _)| host.stat(stat).is_some_and(|value| value > 0))
}

fn sum(view: &PoolView, stat: Stat) -> u64 {
    view.hosts.iter().filter_map(|host| host.stat(stat)).fold(0, u64::saturating_add)
}

fn json_of(view: &PoolView, is_old: bool) -> Value {
    let hosts = view.hosts.iter().map(|host| {
        let counted: Map<String, Value> = counters().filter_map(|(stat, name)| Some((name.into(), host.stat(stat)?.into()))).collect();
        json!({"slot": host.slot.slot, "state": host.slot.state.name(), "standing": standing(&host.slot),
            "incarnation": host.slot.incarnation, "counters": counted})
    });
    let all: Map<String, Value> = counters().map(|(stat, name)| (name.to_owned(), sum(view, stat).into())).collect();
    json!({"hosts": hosts.collect::<Vec<_>>(), "all": all, "lacks_counters": is_old})
}

/// A row for each counter, so that a line is as long as there are hosts with agents.
fn text_of(view: &PoolView, is_old: bool) -> String {
    let hosts: Vec<&HostView> = view.hosts.iter().filter(|host| has_agents(host)).collect();
    let mut text = String::new();
    if hosts.is_empty() {
        text.push_str("no host has told of any NIXL agent\n");
    } else {
        // A host that is not fenced is shown with its state, which says more.
        let how = |host: &HostView| if is_fenced(&host.slot) == Some(true) { standing(&host.slot) } else { host.slot.state.name() };
        let heads = hosts.iter().map(|host| format!("slot {}, {}", host.slot.slot, how(host)));
        let mut rows: Vec<Vec<String>> = vec![std::iter::once(String::new()).chain(heads).chain(["all".into()]).collect()];
        for (stat, name) in counters() {
            let shown = |value: u64| if name.ends_with("bytes") { bytes(value) } else { value.to_string() };
            let cells = hosts.iter().map(|host| host.stat(stat).map_or("-".into(), shown));
            rows.push(std::iter::once(name.replace('_', " ")).chain(cells).chain([shown(sum(view, stat))]).collect());
        }
        text = table(&rows);
    }
    if is_old {
        text.push_str("the pool was formatted by an older version, with room for a few of these counters only\n");
    }
    text
}
