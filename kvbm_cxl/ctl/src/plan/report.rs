// SPDX-License-Identifier: Apache-2.0
//! The report of a plan: rows, the size that is enough, and the assumptions.

use ctl_common::planner::keys::{KEYS, Rack};
use ctl_common::planner::rack::Described;
use ctl_common::planner::sim::outcome::Outcome;
use ctl_common::planner::sim::{Routing, System};
use ctl_common::planner::trace::Trace;
use ctl_common::text::table;
use serde::Serialize;
use serde_json::{Map, Value, json};

/// The part of what a cache without limit would find that is enough.
pub const ENOUGH: f64 = 0.9;

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Where blocks are.
    #[serde(serialize_with = "system_name")]
    pub system: System,
    /// Where requests go.
    #[serde(serialize_with = "routing_name")]
    pub routing: Routing,
    pub dram_gib: f64,
    /// The pool, 0 where the system has none.
    pub pool_gib: f64,
    /// The size that the row stands for, in GiB.
    pub size_gib: f64,
    #[serde(flatten)]
    pub outcome: Outcome,
}

fn system_name<S: serde::Serializer>(system: &System, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(system.name())
}

fn routing_name<S: serde::Serializer>(routing: &Routing, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(routing.name())
}

pub struct Plan {
    /// The requests, with the arrivals that were simulated.
    pub trace: Trace,
    pub described: Described,
    /// How requests arrive, in words.
    pub arrivals: String,
    /// Seed of the random numbers.
    pub seed: u64,
    /// What decides about eviction from the pool.
    pub eviction: String,
    pub rows: Vec<Row>,
}

/// How large a pool is enough.
#[derive(Debug, PartialEq, Serialize)]
pub struct Sizing {
    /// By this system and routing.
    pub by: String,
    /// The hit rate to reach: a part of that of a cache without limit.
    pub wanted_hit_rate: f64,
    /// The smallest simulated size that reaches it, in GiB; none where none does.
    pub enough_gib: Option<f64>,
}

impl Plan {
    fn rack(&self) -> &Rack {
        &self.described.rack
    }

    fn block_bytes(&self) -> f64 {
        self.rack().kv_kib_per_token * 1024.0 * self.trace.block_tokens as f64
    }

    fn working_set_gib(&self) -> f64 {
        self.trace.blocks.len() as f64 * self.block_bytes() / f64::from(1 << 30)
    }

    /// The load of the instances' computing if nothing were found.
    pub fn offered_load(&self) -> f64 {
        let rack = self.rack();
        self.trace.asked_tokens() as f64 / rack.tokens_per_s / rack.instances / self.trace.span_s().max(1e-9)
    }

    /// The smallest size that is enough, by the first system with a pool, under least-loaded where that was simulated. None for one size.
    pub fn sizing(&self) -> Option<Sizing> {
        let with_pool = |row: &&Row| row.system.has_pool();
        let of = self.rows.iter().filter(with_pool).find(|row| row.routing == Routing::LeastLoaded).or(self.rows.iter().find(with_pool))?;
        let mut of_it: Vec<&Row> = self.rows.iter().filter(|row| row.system == of.system && row.routing == of.routing).collect();
        of_it.sort_by(|one, next| one.size_gib.total_cmp(&next.size_gib));
        let wanted_hit_rate = ENOUGH * self.trace.ceiling();
        let enough = of_it.iter().find(|row| row.outcome.hit_rate >= wanted_hit_rate).map(|row| row.size_gib);
        let by = format!("{}, {}", of.system.name(), of.routing.name());
        (of_it.len() > 1).then_some(Sizing { by, wanted_hit_rate, enough_gib: enough })
    }

    /// Assumptions and omissions, one sentence each.
    pub fn assumptions(&self) -> Vec<String> {
        let rack = self.rack();
        let mut all = vec![
            "Simulated, not measured: a discrete-event model of prefill with the numbers of the rack.".to_string(),
            format!(
                "Prefill takes {} ms and {:.3} us a token that is not found{}; an instance serves one request at a time, in order of \
                 arrival, and reads the blocks found before it computes. No batching, no chunked prefill.",
                rack.fixed_ms,
                1e6 / rack.tokens_per_s,
                if rack.attention_tokens > 0.0 {
                    format!(", more in a long context: twice that at {} tokens", rack.attention_tokens)
                } else {
                    ", whatever the context".into()
                }
            ),
            "Hits are leading whole blocks of the input; the last token is always computed. Blocks can be found once they are computed \
             and written, not before. Output tokens are not cached."
                .into(),
            format!("A block of {} tokens has {:.0} bytes.", self.trace.block_tokens, self.block_bytes()),
            format!(
                "A transfer of the pool takes its bytes at {} GB/s (reads) or {} GB/s (writes) of the instance, not less than the \
                 devices, which serve transfers in the order in which they begin, at {} GB/s each; and {} ns for each of {} line fetches \
                 a block.",
                rack.read_gb_s, rack.write_gb_s, rack.device_gb_s, rack.latency_ns, rack.block_latencies
            ),
            format!("Outside of instances each request takes {} ms, which none of them waits for.", rack.overhead_ms),
            "Writes take devices' time and none of the instance's. Hits are read even if computing them would be faster.".into(),
            format!(
                "Eviction: {} in the pool{}, least recently used in own caches; a use counts in every cache that has the block, a publish \
                 of a cached block is none; at least {} % of the cells are free, and {} % after each eviction round.",
                self.eviction,
                if rack.owners != 0.0 { ", by each instance in its own cells" } else { ", one order for all" },
                rack.low_water_percent,
                rack.high_water_percent
            ),
            "prefix-aware knows all caches and queues exactly: no real router does. least-loaded knows the queues in seconds of work."
                .into(),
            format!(
                "Arrivals: {}; {}.",
                self.arrivals,
                if self.trace.has_sessions() {
                    "a request of a session comes no sooner than the first token of the one before it"
                } else {
                    "the trace names no sessions, so no request waits for an answer to another"
                }
            ),
        ];
        if rack.nand_cache_gib > 0.0 {
            all.push(format!(
                "Devices are NAND with a cache of {} GiB of DRAM (least recently used, written back): an instance waits {} us for every {} \
                 pages that miss, one after the other; a device has {} pages of NAND under way at a time. No garbage collection.",
                rack.nand_cache_gib,
                rack.nand_read_us,
                rack.nand_read_ahead + 1.0,
                rack.nand_ways
            ));
        }
        all.push(if rack.disaggregated != 0.0 {
            format!(
                "The KV of the whole prompt is handed over to another instance: over the network at {} GB/s in the system own, else \
                 published to the pool and read from it; the decoder's memory is never full, and its own caches count for nothing.",
                rack.network_gb_s
            )
        } else {
            "Decode is left out: it takes no time of an instance, and nothing is handed over.".into()
        });
        all.push("Left out: failures, processor time, contention of the network, memory bandwidth of hosts.".into());
        all
    }

    pub fn json(&self) -> serde_json::Result<Value> {
        let rack: Map<String, Value> = KEYS.iter().zip(self.rack().values()).map(|(key, value)| (key.name.into(), value.into())).collect();
        Ok(json!({
            "trace": {
                "file": self.trace.file,
                "requests": self.trace.requests.len(),
                "asked_tokens": self.trace.asked_tokens(),
                "span_s": self.trace.span_s(),
                "block_tokens": self.trace.block_tokens,
                "working_set_gib": self.working_set_gib(),
                "ceiling_hit_rate": self.trace.ceiling(),
                "offered_load": self.offered_load(),
            },
            "preset": self.described.preset.name,
            "source": self.described.preset.source,
            "rack": rack,
            "seed": self.seed,
            "eviction": self.eviction,
            "rows": serde_json::to_value(&self.rows)?,
            "sizing": serde_json::to_value(self.sizing())?,
            "assumptions": self.assumptions(),
        }))
    }

    pub fn text(&self) -> String {
        let trace = &self.trace;
        let requests = trace.requests.len();
        let mut text = format!(
            "{}: {requests} requests in {:.0} s, {:.0} tokens on average, blocks of {} tokens\nworking set {:.1} GiB; a cache without \
             limit would find {:.1} % of the tokens\n{} instances, {:.2} of their computing asked for if nothing were found; preset \
             {}\n\n",
            trace.file,
            trace.span_s(),
            trace.asked_tokens() as f64 / requests.max(1) as f64,
            trace.block_tokens,
            self.working_set_gib(),
            trace.ceiling() * 100.0,
            self.rack().instances,
            self.offered_load(),
            self.described.preset.name,
        );
        text.push_str(&table(&self.cells()));
        if let Some(Sizing { by, wanted_hit_rate, enough_gib }) = self.sizing() {
            let wanted = format!("{:.1} % of the tokens, {:.0} % of what could be found", wanted_hit_rate * 100.0, ENOUGH * 100.0);
            text.push_str(&match enough_gib {
                Some(gib) => format!("\nA pool of {gib} GiB is the smallest of these to find {wanted} ({by}).\n"),
                None => format!("\nNo pool of these finds {wanted} ({by}): try larger ones with --pool-gib.\n"),
            });
        }
        text.push_str("\nAssumptions\n");
        self.assumptions().iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        text
    }

    fn cells(&self) -> Vec<Vec<String>> {
        let heads = [
            "system", "routing", "own GiB", "pool GiB", "hits %", "HBM/DRAM/pool", "TTFT s", "P50", "P99", "pool GB read", "written",
            "all GB", "device %", "busiest", "compute %",
        ];
        let mut rows = vec![heads.map(String::from).to_vec()];
        for row in &self.rows {
            let outcome = &row.outcome;
            let counts = &outcome.counts;
            let part = |tokens: u64| format!("{:.1}", tokens as f64 * 100.0 / counts.asked_tokens.max(1) as f64);
            let size = |is_there: bool, gib: f64| if is_there { gib.to_string() } else { "-".into() };
            let has_pool = row.system.has_pool();
            let of_pool = |value: String| if has_pool { value } else { "-".into() };
            rows.push(vec![
                row.system.name().into(),
                row.routing.name().into(),
                size(row.system.has_dram(), row.dram_gib),
                size(has_pool, row.pool_gib),
                format!("{:.1}", outcome.hit_rate * 100.0),
                [counts.hbm_tokens, counts.dram_tokens, counts.pool_tokens].map(part).join("/"),
                format!("{:.3}", outcome.ttft.mean_s),
                format!("{:.3}", outcome.ttft.p50_s),
                format!("{:.3}", outcome.ttft.p99_s),
                of_pool(format!("{:.0}", counts.pool_read_bytes / 1e9)),
                of_pool(format!("{:.0}", counts.pool_written_bytes / 1e9)),
                format!("{:.0}", counts.moved_bytes() / 1e9),
                of_pool(format!("{:.1}", outcome.device_load_mean * 100.0)),
                of_pool(format!("{:.1}", outcome.device_load_most * 100.0)),
                format!("{:.1}", outcome.instance_load * 100.0),
            ]);
        }
        rows
    }
}
