// SPDX-License-Identifier: Apache-2.0
//! Runs a scenario on many seeds, and shows that a test would notice the loss of a rule.
//!
//! `SEED=n` runs that seed alone and prints its trace, `SEEDS=n` changes how many seeds are run: a hundred times the usual number at most.

use crate::config::{Fault, Planned, When};
use crate::engine::heartbeat;
use crate::outcome::{Failure, Stats, abort};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Worlds that run at once; each is confined to its OS thread.
const WORKERS: usize = 2;
/// Real time without a single step after which a run hangs.
const HANG: Duration = Duration::from_secs(60);
/// Trace lines printed with a failure, unless the seed is replayed alone.
const SHORT_TRACE: usize = 40;

/// A scenario: builds the world of a seed, runs it and checks what it left.
pub type Scenario = fn(u64) -> Result<Stats, Failure>;

/// What many runs added up to.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Runs.
    pub runs: u64,
    /// Steps of all of them.
    pub steps: u64,
    /// Crashes of all of them.
    pub crashes: u64,
    /// Pauses of all of them.
    pub pauses: u64,
    /// Visits of each named point.
    pub points: BTreeMap<&'static str, u64>,
}

impl Summary {
    fn add(&mut self, stats: &Stats) {
        self.runs += 1;
        self.steps += stats.steps;
        self.crashes += stats.crashes;
        self.pauses += stats.pauses;
        for (name, visits) in &stats.points {
            *self.points.entry(name).or_default() += visits;
        }
    }

    /// Those of `names` that were never visited.
    pub fn unvisited(&self, names: &[&'static str]) -> Vec<&'static str> {
        names.iter().copied().filter(|name| !self.points.contains_key(name)).collect()
    }
}

/// Runs `scenario` on `seeds` seeds from 0 and returns what they added up to.
///
/// # Panics
/// When a seed fails: with the reason, the end of its trace, and the command that replays it.
pub fn explore(name: &str, seeds: u64, scenario: impl Fn(u64) -> Result<Stats, Failure> + Sync) -> Summary {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let replay = number("SEED");
    let range = match replay {
        Some(seed) => seed..seed + 1,
        None => 0..number("SEEDS").map_or(seeds, |most| most.min(100 * seeds)),
    };
    let begin = Instant::now();
    match search(range, None, &scenario) {
        Ok(summary) => {
            let seconds = begin.elapsed().as_secs_f64();
            let rate = summary.steps as f64 / seconds.max(1e-9) / 1e6;
            let Summary { runs, steps, crashes, pauses, .. } = summary;
            println!("{name}: {runs} runs, {steps} steps ({rate:.2} M/s), {crashes} crashes, {pauses} pauses");
            summary
        }
        Err(failure) => report(name, &failure, replay.is_some()),
    }
}

fn report(name: &str, failure: &Failure, whole: bool) -> ! {
    let shown = if whole { failure.trace.len() } else { failure.trace.len().min(SHORT_TRACE) };
    let trace = failure.trace[failure.trace.len() - shown..].join("\n");
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    let seed = failure.seed;
    panic!("{name}: {failure}\n{trace}\nreplay: SEED={seed} cargo test -p {package} {test}\n")
}

/// Runs `scenario` with each of the faults at each of the named points, at the first and at later visits, on `seeds` seeds each.
/// Returns the points at which no fault ever struck because no run visited them.
///
/// # Panics
/// When a run fails, as [`explore`] does, with the point and the fault.
pub fn strike_points(
    points: &[&'static str],
    faults: &[Fault],
    seeds: u64,
    scenario: impl Fn(u64, Planned) -> Result<Stats, Failure> + Sync,
) -> Vec<&'static str> {
    let mut unvisited = Vec::new();
    for &point in points {
        let mut visits = 0;
        for &fault in faults {
            // The visit follows from the seed alone, so that the seed replays the run.
            let planned = |seed| Planned { when: When::Point(point, 1 + seed % 4), host: None, fault };
            match search(0..seeds, None, &|seed| scenario(seed, planned(seed))) {
                Ok(summary) => visits += summary.points.get(point).copied().unwrap_or(0),
                Err(failure) => report(&format!("{fault:?} at {point}"), &failure, false),
            }
        }
        if visits == 0 {
            unvisited.push(point);
        }
    }
    unvisited
}

/// As [`strike_points`], with a machine and a process that crash and come back, and a host and a thread that pause: `seeds` of each first,
/// then `rare_seeds` at the points that only few seeds visit.
///
/// # Panics
/// As [`strike_points`], and when no run visited one of the points.
pub fn strike_all_points(
    points: &[&'static str],
    seeds: u64,
    rare_seeds: u64,
    scenario: impl Fn(u64, Planned) -> Result<Stats, Failure> + Sync,
) {
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let rare = strike_points(points, &faults, seeds, &scenario);
    let unvisited = strike_points(&rare, &faults, rare_seeds, &scenario);
    assert_eq!(unvisited, [""; 0], "no run came by there");
}

/// Runs `scenario` on the seeds of `range`, with the rule `mutant` dropped if one is named.
///
/// # Errors
/// The failure of the lowest seed that fails.
pub fn search(
    range: Range<u64>,
    mutant: Option<&'static str>,
    scenario: &(impl Fn(u64) -> Result<Stats, Failure> + Sync),
) -> Result<Summary, Failure> {
    let next = AtomicU64::new(range.start);
    let lowest = AtomicU64::new(range.end);
    let found = Mutex::new((Summary::default(), None::<Failure>));
    let watch = HangWatch::default();
    let work = |worker: usize| {
        cxl_pool::fault::drop_rule(mutant);
        watch.begin(worker);
        loop {
            let seed = next.fetch_add(1, SeqCst);
            if seed >= lowest.load(SeqCst) {
                break;
            }
            watch.runs(worker, seed);
            let result = scenario(seed);
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            match result {
                Ok(stats) => found.0.add(&stats),
                Err(failure) => {
                    // Seeds below are still run, so that the seed that is reported does not depend on the workers.
                    if lowest.fetch_min(seed, SeqCst) > seed {
                        found.1 = Some(failure);
                    }
                }
            }
        }
        cxl_pool::fault::drop_rule(None);
        watch.end(worker);
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let work = &work;
                scope.spawn(move || work(worker))
            })
            .collect();
        watch.stand_guard(|| workers.iter().all(|worker| worker.is_finished()));
    });
    let (summary, failure) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    failure.map_or(Ok(summary), Err)
}

/// The step counter of a worker and the seed that it runs.
type Running = (Arc<AtomicU64>, u64);

/// Sees to it that a run that hangs within one step, where no budget ends it, is named.
#[derive(Default)]
struct HangWatch {
    workers: Mutex<[Option<Running>; WORKERS]>,
    moved: Condvar,
}

impl HangWatch {
    fn begin(&self, worker: usize) {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)[worker] = Some((heartbeat(), 0));
    }

    fn end(&self, worker: usize) {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)[worker] = None;
        self.moved.notify_one();
    }

    fn runs(&self, worker: usize, seed: u64) {
        if let Some(of) = &mut self.workers.lock().unwrap_or_else(PoisonError::into_inner)[worker] {
            of.1 = seed;
        }
        self.moved.notify_one();
    }

    fn stand_guard(&self, done: impl Fn() -> bool) {
        let mut seen = [(0, 0); WORKERS];
        let mut since = [Instant::now(); WORKERS];
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        while !done() {
            for worker in 0..WORKERS {
                let Some((steps, seed)) = &workers[worker] else { continue };
                let now = (steps.load(SeqCst), *seed);
                if now != seen[worker] {
                    (seen[worker], since[worker]) = (now, Instant::now());
                } else if since[worker].elapsed() > HANG && !done() {
                    abort(&format!("seed {seed} hangs inside one step: does code hold a std::sync::Mutex across an access to the pool?"));
                }
            }
            workers = self.moved.wait_timeout(workers, Duration::from_millis(10)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// How a mutant was noticed.
#[derive(Clone, Debug)]
pub struct Kill {
    /// Name of the scenario.
    pub scenario: &'static str,
    /// Seed that failed.
    pub seed: u64,
    /// Why it failed.
    pub reason: String,
}

/// Drops the rule `mutant` and runs the scenarios in turn, on more and more seeds, until one fails. `None` when all passed all seeds:
/// then the tests are missing something.
pub fn run_mutant(mutant: &'static str, scenarios: &[(&'static str, Scenario)], max_seeds: u64) -> Option<Kill> {
    let (mut begin, mut end) = (0, 64.min(max_seeds));
    while begin < end {
        for &(name, scenario) in scenarios {
            if let Err(failure) = search(begin..end, Some(mutant), &scenario) {
                return Some(Kill { scenario: name, seed: failure.seed, reason: failure.reason });
            }
        }
        (begin, end) = (end, (end * 4).min(max_seeds));
    }
    None
}

/// Runs every mutant, prints what noticed each, and returns those that nothing noticed.
pub fn mutation_table(mutants: &[&'static str], scenarios: &[(&'static str, Scenario)], max_seeds: u64) -> Vec<&'static str> {
    let mut survivors = Vec::new();
    for &mutant in mutants {
        match run_mutant(mutant, scenarios, max_seeds) {
            Some(Kill { scenario, seed, reason }) => println!("{mutant:<36} killed by {scenario}, seed {seed}: {reason}"),
            None => {
                println!("{mutant:<36} SURVIVED");
                survivors.push(mutant);
            }
        }
    }
    survivors
}
