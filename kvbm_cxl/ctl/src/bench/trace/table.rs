// SPDX-License-Identifier: Apache-2.0
//! What a replay says, as tables, as CSV and as ratios.

use super::case::Result;
use cxl_pool::cache::policy::PolicyKind;
use serde_json::{Map, Value};

const HEAD: &str = "| cells | system | routing | eviction | found % | planned % | points | lost | evicted | refused | lookups /s | \
                    pulls /s | publishes /s |";

fn rate(count: u64, ns: u64) -> f64 {
    count as f64 * 1e9 / ns.max(1) as f64
}

fn row(result: &Result) -> String {
    let (all, points) = (&result.all, (result.replayed - result.planned) * 100.0);
    format!(
        "| {} ({} %) | {} | {} | {} | {:.2} | {:.2} | {points:+.2} | {} | {} | {} | {:.0} | {:.0} | {:.0} |\n",
        result.cells,
        result.pool_percent,
        result.system,
        result.routing,
        result.eviction,
        result.replayed * 100.0,
        result.planned * 100.0,
        all.lost,
        all.evicted,
        all.refused,
        rate(all.lookups, all.lookup_ns),
        rate(all.pulled, all.pull_ns),
        rate(all.stored, all.publish_ns),
    )
}

/// A table for each trace and number of hosts.
pub fn markdown(results: &[Result]) -> String {
    let mut text = String::from(
        "Part of the tokens found in the cache, replayed and planned. Lookups of chains, pulls and publishes of blocks a second: of one \
         host, while it does nothing else.\n",
    );
    for group in results.chunk_by(|one, other| (&one.trace, one.hosts) == (&other.trace, other.hosts)) {
        let Some(first) = group.first() else { continue };
        let pulled: u64 = group.iter().map(|result| result.all.pulled).sum();
        text.push_str(&format!(
            "\n**{}**, {} hosts; without limit {:.1} %; {pulled} blocks compared, in {:.0} s\n\n{HEAD}\n|{}\n",
            first.trace,
            first.hosts,
            first.ceiling * 100.0,
            group.iter().map(|result| result.seconds).sum::<f64>(),
            "---|".repeat(HEAD.matches('|').count() - 1)
        ));
        group.iter().for_each(|result| text.push_str(&row(result)));
    }
    text
}

/// All figures.
pub fn csv(results: &[Result]) -> String {
    let mut text = String::from(
        "trace,hosts,system,routing,eviction,pool_percent,cells,planned,replayed,evicted,refused,stored,met,lost,pulled,lookups_per_s,\
         pulls_per_s,publishes_per_s\n",
    );
    for result in results {
        let all = &result.all;
        text.push_str(&format!(
            "{},{},{},{},{},{},{},{:.6},{:.6},{},{},{},{},{},{},{:.0},{:.0},{:.0}\n",
            result.trace,
            result.hosts,
            result.system,
            result.routing,
            result.eviction,
            result.pool_percent,
            result.cells,
            result.planned,
            result.replayed,
            all.evicted,
            all.refused,
            all.stored,
            all.met,
            all.lost,
            all.pulled,
            rate(all.lookups, all.lookup_ns),
            rate(all.pulled, all.pull_ns),
            rate(all.stored, all.publish_ns)
        ));
    }
    text
}

/// For each trace, over its sizes and numbers of hosts: what was found by what was planned, and by each policy what was found by what lru
/// finds there.
pub fn ratios(results: &[Result]) -> Map<String, Value> {
    let mut ratios = Map::new();
    let mut add = |name: String, ratio: f64| {
        if ratio.is_finite() && ratio > 0.0 {
            ratios.insert(name.replace(['-', ' '], "_").to_lowercase(), ratio.into());
        }
    };
    let mut traces: Vec<&str> = results.iter().map(|result| result.trace.as_str()).collect();
    traces.dedup();
    let of = |trace: &str, system: &str, eviction: PolicyKind| -> Vec<&Result> {
        let is_it = |result: &&Result| result.trace == trace && result.system == system && result.eviction == eviction.name();
        results.iter().filter(is_it).collect()
    };
    let sum = |results: &[&Result]| results.iter().map(|result| result.replayed).sum::<f64>();
    for trace in traces {
        let lru = of(trace, "pool", PolicyKind::Lru);
        add(format!("found_over_planned_{trace}"), sum(&lru) / lru.iter().map(|result| result.planned).sum::<f64>());
        for policy in PolicyKind::ALL.into_iter().filter(|&policy| policy != PolicyKind::Lru) {
            add(format!("{policy}_over_lru_{trace}"), sum(&of(trace, "pool", policy)) / sum(&lru));
        }
        let own = of(trace, "own", PolicyKind::Lru);
        for routing in ["least-loaded", "prefix-aware"] {
            let own: Vec<&Result> = own.iter().copied().filter(|result| result.routing == routing).collect();
            add(format!("pool_over_own_{routing}_{trace}"), sum(&lru) / sum(&own));
        }
    }
    ratios
}
