// SPDX-License-Identifier: Apache-2.0
//! Hit rates of the eviction policies on synthetic requests, by cache size.
//!
//! Counted, not timed: a seed gives the same figures wherever it runs. What is counted is in [`mod@replay`], what is asked for in
//! [`workload`].

mod replay;
#[cfg(test)]
mod tests;
mod workload;

use super::to_json;
use crate::output::{Exit, Failure, Out};
use ctl_common::planner::trace::Trace as Recorded;
use cxl_pool::{Error, Result};
use replay::{Contender, Rates, replay};
use serde::Serialize;
use std::path::{Path, PathBuf};
use workload::{BLOCK_TOKENS, Trace, WORKLOADS, generate};

/// Sizes of the cache in per cent of the working set, which is all blocks that the trace asks for.
const SIZES_PERCENT: [usize; 9] = [1, 2, 5, 10, 20, 30, 50, 70, 100];
/// The size whose ratios are reported.
const RATIO_PERCENT: usize = 10;

/// Options of `bench policies`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Ends with a line `RATIOS {json}`: prefix hit rates over those of LRU, with room for a tenth of the working set.
    #[arg(long)]
    ratios: bool,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests of each workload.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    requests: u64,
    /// Writes hit-rate.csv and hit-rate.svg there.
    #[arg(long, value_name = "DIRECTORY")]
    write: Option<PathBuf>,
}

/// Hit rates at one size.
#[derive(Debug, Serialize)]
struct Row {
    cache_percent: usize,
    cache_blocks: usize,
    /// In the order of [`Contender::ALL`].
    rates: Vec<(Contender, Rates)>,
}

impl Row {
    fn rates(&self, contender: Contender) -> Rates {
        self.rates.iter().find(|(other, _)| *other == contender).map(|(_, rates)| *rates).unwrap_or_default()
    }
}

/// One workload at all sizes.
#[derive(Debug, Serialize)]
struct Study {
    workload: &'static str,
    title: &'static str,
    requests: usize,
    working_set_blocks: usize,
    asked_blocks: usize,
    mean_input_tokens: f64,
    rows: Vec<Row>,
}

fn study(trace: &Trace, sizes: &[usize]) -> Result<Study> {
    let mut rows = Vec::new();
    for &cache_percent in sizes {
        let cache_blocks = (trace.blocks.len() * cache_percent).div_ceil(100);
        let rates = |contender| Ok((contender, replay(trace, cache_blocks, contender)?));
        rows.push(Row { cache_percent, cache_blocks, rates: Contender::ALL.into_iter().map(rates).collect::<Result<_>>()? });
    }
    let requests = trace.tokens.len();
    Ok(Study {
        workload: trace.name,
        title: trace.title,
        requests,
        working_set_blocks: trace.blocks.len(),
        asked_blocks: trace.accesses().len(),
        mean_input_tokens: trace.tokens.iter().map(|tokens| tokens.0 as f64).sum::<f64>() / requests.max(1) as f64,
        rows,
    })
}

/// Each workload on a thread of its own: they share nothing.
fn studies(requests: usize, seed: u64) -> Result<Vec<Study>> {
    std::thread::scope(|scope| {
        let run = move |number| scope.spawn(move || study(&generate(number, requests, seed), &SIZES_PERCENT));
        let running: Vec<_> = (0..WORKLOADS).map(run).collect();
        let broken = |_| Err(Error::Invalid("a workload ended in a panic".into()));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(broken)).collect()
    })
}

/// The workloads as requests that come evenly, for programs that read recorded ones.
///
/// # Errors
/// [`Failure`] where they are not what a trace may be.
pub fn synthetic(requests: usize) -> std::result::Result<Vec<Recorded>, Failure> {
    let as_recorded = |number: usize| {
        let trace = generate(number, requests, 1);
        let mut text = String::new();
        for ((at, chain), (tokens, _)) in trace.requests().enumerate().zip(&trace.tokens).filter(|((_, chain), _)| !chain.is_empty()) {
            // Whole blocks only, as the workloads have them.
            let tokens = chain.len() as u64 * BLOCK_TOKENS + tokens % BLOCK_TOKENS;
            let request = serde_json::json!({"timestamp": at * 100, "input_length": tokens, "hash_ids": chain});
            text.push_str(&format!("{request}\n"));
        }
        Recorded::parse(&format!("synthetic-{}", trace.name), text.as_bytes(), usize::MAX, Some(BLOCK_TOKENS)).map_err(Failure::from)
    };
    (0..WORKLOADS).map(as_recorded).collect()
}

fn markdown(studies: &[Study], seed: u64) -> String {
    let names: Vec<&str> = Contender::ALL.iter().map(|contender| contender.name()).collect();
    let mut text = format!(
        "Prefix hit rate in % of the blocks asked for (block hit rate in brackets), seed {seed}, blocks of {BLOCK_TOKENS} tokens.\n"
    );
    for study in studies {
        text.push_str(&format!(
            "\n**{}**: {} requests, {:.0} tokens on average, {} blocks asked for, working set {} blocks\n\n| cache | {} |\n|---|{}\n",
            study.title,
            study.requests,
            study.mean_input_tokens,
            study.asked_blocks,
            study.working_set_blocks,
            names.join(" | "),
            "---|".repeat(names.len())
        ));
        for row in &study.rows {
            let cells = row.rates.iter().map(|(_, rates)| format!("{:.1} ({:.1})", rates.prefix * 100.0, rates.block * 100.0));
            text.push_str(&format!("| {} % | {} |\n", row.cache_percent, cells.collect::<Vec<_>>().join(" | ")));
        }
    }
    text
}

fn csv(studies: &[Study], seed: u64) -> String {
    let mut text = String::from("workload,seed,requests,cache_percent,cache_blocks,policy,prefix_hit_rate,block_hit_rate\n");
    for study in studies {
        for row in &study.rows {
            for (contender, rates) in &row.rates {
                text.push_str(&format!(
                    "{},{seed},{},{},{},{},{:.6},{:.6}\n",
                    study.workload,
                    study.requests,
                    row.cache_percent,
                    row.cache_blocks,
                    contender.name(),
                    rates.prefix,
                    rates.block
                ));
            }
        }
    }
    text
}

fn picture(studies: &[Study]) -> String {
    use ctl_common::svg::{self, Curve, Key, Panel, Style};
    let key =
        |contender: Contender, meaning, style| (contender, Key { name: contender.name().into(), meaning: String::from(meaning), style });
    // Without LRU told backwards, which is the curve of leaves first.
    let (drawn, keys): (Vec<Contender>, Vec<Key>) = [
        key(Contender::Optimal, "Belady's, which knows the future", Style("#1a1a1a", "2 3", 1.6)),
        key(Contender::Lru, "least recently used, TraCT's order", Style("#f0b27a", "", 5.0)),
        key(Contender::LeafLru, "lru, no block before its continuation", Style("#a04000", "", 1.4)),
        key(Contender::S3Fifo, "Yang et al., SOSP 2023", Style("#0072b2", "", 1.8)),
        key(Contender::Sieve, "Zhang et al., NSDI 2024", Style("#009e73", "7 3", 1.8)),
        key(Contender::Fifo, "in order of entry", Style("#8c8c8c", "3 2", 1.6)),
    ]
    .into_iter()
    .unzip();
    let curve = |study: &Study, contender| Curve {
        points: study.rows.iter().map(|row| (row.cache_percent as f64, row.rates(contender).prefix * 100.0)).collect(),
    };
    let panel = |study: &Study| Panel {
        title: study.title.into(),
        x_label: "cache size, % of the working set".into(),
        x_marks: vec![1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0],
        y_label: "prefix hit rate, %".into(),
        y_from: None,
        y_step: 10.0,
        curves: drawn.iter().map(|&contender| curve(study, contender)).collect(),
    };
    svg::draw("Prefix hit rate by cache size and eviction policy", &studies.iter().map(panel).collect::<Vec<_>>(), &keys)
}

fn ratios(studies: &[Study]) -> serde_json::Value {
    let mut ratios = serde_json::Map::new();
    for study in studies {
        let Some(row) = study.rows.iter().find(|row| row.cache_percent == RATIO_PERCENT) else { continue };
        let lru = row.rates(Contender::Lru).prefix;
        for contender in [Contender::LruBackwards, Contender::S3Fifo, Contender::Sieve, Contender::LeafLru, Contender::Optimal] {
            let name = format!("{}_over_lru_{}", contender.name().replace('-', "_"), study.workload.to_lowercase());
            ratios.insert(name, (row.rates(contender).prefix / lru).into());
        }
    }
    ratios.into()
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| Error::Os { what: format!("writing {}", path.display()), source })
}

/// Runs the command.
pub fn run(args: &Args, out: &mut Out) -> std::result::Result<Exit, Failure> {
    let studies = studies(args.requests as usize, args.seed)?;
    if let Some(directory) = &args.write {
        write(&directory.join("hit-rate.csv"), &csv(&studies, args.seed))?;
        write(&directory.join("hit-rate.svg"), &picture(&studies))?;
    }
    let json = to_json(&studies)?;
    out.answer(|| json, || markdown(&studies, args.seed))?;
    if args.ratios && !out.is_json() {
        out.line(format!("RATIOS {}", ratios(&studies)))?;
    }
    Ok(Exit::Done)
}
