// SPDX-License-Identifier: Apache-2.0
//! Processes of several machines count and publish what they counted, while processes are killed and start again, threads and machines
//! stand still, and machines are fenced and join again.
//!
//! Checked between any two steps: no published counter goes back or tells of more than was counted. After every publish, and at the end:
//! all that the processes of the machine had handed over is in it, also what those handed over that are dead.

use super::setup::{Cluster, join};
use crate::{Env, Failure, Planned, SimProcess, Stats};
use cxl_pool::host::HostConfig;
use cxl_pool::line::Lines;
use cxl_pool::media::{STATS_LINES, StatsLine};
use cxl_pool::metrics::Metrics;
use cxl_pool::metrics::stats::{Stat, StatsBoard, read_all};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Rounds of each life of a process.
const ROUNDS: usize = 8;
/// Tries to publish at the end of a life.
const LAST_TRIES: usize = 400;

/// Counts, and the share of them that a board has taken over.
#[derive(Default)]
struct Machine {
    counted: u64,
    taken: BTreeMap<SimProcess, u64>,
    slot: Option<u16>,
}

impl Machine {
    fn taken(&self) -> u64 {
        self.taken.values().sum()
    }
}

type Ledger = Rc<RefCell<Vec<Machine>>>;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with the given fault, if any, in addition to random ones.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 2, 2, |config, _| {
        // The board is in the machine's memory, which this run keeps: counters start again with the machine.
        config.chances.crash_machine = 0;
    });
    planned.into_iter().for_each(|planned| cluster.world.plan(planned));
    let ledger: Ledger = Rc::new(RefCell::new(cluster.hosts.iter().map(|_| Machine::default()).collect()));
    for host in cluster.hosts.clone() {
        let board = StatsBoard::private().expect("memory of its own");
        for _ in 0..2 {
            let (board, ledger, config) = (board.clone(), Rc::clone(&ledger), cluster.host_config.clone());
            cluster.world.start(host, move |env| {
                let (board, ledger, config) = (board.clone(), Rc::clone(&ledger), config.clone());
                env.spawn("main", move |env| count(&env, &board, &ledger, &config));
            });
        }
    }
    let (watched, lines, mut last) = (Rc::clone(&ledger), cluster.world.inspector(), BTreeMap::new());
    cluster.world.check_always(move |view| {
        for (index, machine) in watched.borrow().iter().enumerate() {
            let Some(slot) = machine.slot else { continue };
            let number = u64::from(slot) * STATS_LINES as u64;
            let offset = view.layout().line_offset(cxl_pool::media::Region::Stats, number).map_err(|error| error.to_string())?;
            // A line that is just being written by stores does not verify.
            let Ok(line) = lines.open::<StatsLine>(number, &view.line(offset)) else { continue };
            let published = line.counters[Stat::PublishedBlocks.place()];
            let before = last.insert(slot, published).unwrap_or(0);
            if published < before {
                return Err(format!("the counter of slot {slot} went back from {before} to {published}"));
            }
            if published > machine.counted {
                return Err(format!("slot {slot} tells of {published}, but machine {index} counted {}", machine.counted));
            }
        }
        Ok(())
    });
    let stats = cluster.world.run()?;
    let all = read_all(&cluster.world.inspector()).map_err(|error| cluster.world.failure(error.to_string()))?;
    for (index, machine) in ledger.borrow().iter().enumerate() {
        let Some(slot) = machine.slot else { return Err(cluster.world.failure("a machine never joined: nothing was tested")) };
        let published = all.iter().find(|host| host.slot == slot).map_or(0, |host| host.get(Stat::PublishedBlocks));
        if published < machine.taken() || published == 0 {
            let taken = machine.taken();
            return Err(cluster.world.failure(format!("machine {index} took over {taken} and ends with {published} published")));
        }
    }
    Ok(stats)
}

fn published(lines: &Lines, slot: u16) -> Result<u64> {
    let line: StatsLine = lines.fetch(u64::from(slot) * STATS_LINES as u64)?;
    Ok(line.counters[Stat::PublishedBlocks.place()])
}

/// One life of a process.
fn count(env: &Env, board: &StatsBoard, ledger: &Ledger, config: &HostConfig) -> Result<()> {
    let host = join(env, config)?;
    let machine = env.host().0;
    ledger.borrow_mut()[machine].slot = Some(host.slot());
    let metrics = Metrics::new();
    let mut has_row = false;
    for round in 0..ROUNDS + LAST_TRIES {
        let more = if round < ROUNDS { 1 + env.below(1000) as u64 } else { 0 };
        ledger.borrow_mut()[machine].counted += more;
        metrics.publish_total.add(more);
        let counted = metrics.publish_total.get();
        let floor = ledger.borrow()[machine].taken();
        let interval_ms = if round < ROUNDS { env.below(3) as u64 } else { 0 };
        match board.publish_round(&host, &metrics, interval_ms) {
            Ok(is_published) => {
                has_row |= is_published;
                if has_row {
                    ledger.borrow_mut()[machine].taken.insert(env.process(), counted);
                }
                if is_published {
                    let shown = match published(&env.lines(), host.slot()) {
                        Ok(shown) => shown,
                        // Another process of this machine is stopped in the middle of writing it.
                        Err(Error::BadLine { .. }) => continue,
                        Err(error) => return Err(error),
                    };
                    if shown < floor {
                        env.fail(format!("{shown} published, {floor} were taken over before"));
                    }
                    if round >= ROUNDS {
                        return Ok(());
                    }
                }
            }
            Err(Error::Fenced { .. }) => {}
            Err(error) => return Err(error),
        }
        env.platform().sleep_ns(env.below(2_000_000) as u64 + 1);
    }
    Err(Error::Timeout { what: "a last publish".into(), timeout_ms: LAST_TRIES as u64 })
}
