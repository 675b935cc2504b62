// SPDX-License-Identifier: Apache-2.0
//! Hosts commit to host-owned records under their lock, and read them with and without it, while hosts are fenced, crash and restart.
//!
//! Each commit writes a number of its own, so that every value names the commits it descends from. Checked (protocols/LOCKS.md section 8):
//! - V4: no version is confirmed twice, and every later confirmed read descends from every confirmed commit;
//! - V5: a holder that reads a record twice reads the same;
//! - V6: every later confirmed read descends from what a lock-free reader accepted.

use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, Stats, When, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::media::{Geometry, RECORD_BYTES};
use cxl_pool::record::{self, Best, Locked, Reading, Structure};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Sections that each start of a process wants to get through.
const SECTIONS: usize = 6;
/// The hosts run until then, so that a zombie that wakes up meets live hosts.
const UNTIL_NS: u64 = 60_000_000;
/// Records that are used.
const RECORDS: u64 = 3;

/// What happened to one record.
#[derive(Default)]
struct Record {
    /// Commits that are confirmed or were read as final: every later reader must see them.
    certain: u64,
    /// Numbers of the confirmed commits by (grant, version).
    confirmed: BTreeMap<(u32, u32), u64>,
}

#[derive(Default)]
struct Ledger {
    records: BTreeMap<u64, Record>,
    /// The commit that each commit was made on; 0 = the empty record.
    parents: Vec<u64>,
    confirmed: u64,
}

type Shared = Rc<RefCell<Ledger>>;

/// The number of the commit that wrote a value.
fn number(best: &Best) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&best.copy.data[..8]);
    u64::from_le_bytes(bytes)
}

impl Ledger {
    /// A new commit on what `best` shows.
    fn begin(&mut self, best: &Best) -> [u8; RECORD_BYTES] {
        if self.parents.is_empty() {
            self.parents.push(0);
        }
        self.parents.push(number(best));
        let mut data = [0; RECORD_BYTES];
        data[..8].copy_from_slice(&(self.parents.len() as u64 - 1).to_le_bytes());
        data
    }

    fn certain(&self, record: u64) -> u64 {
        self.records.get(&record).map_or(0, |record| record.certain)
    }

    fn descends(&self, mut from: u64, ancestor: u64) -> bool {
        while from > ancestor {
            from = self.parents[from as usize];
        }
        from == ancestor
    }

    /// A read that was certain at its end showed commit `shown`; when it began, `before` was certain.
    fn read(&mut self, env: &Env, record: u64, shown: u64, before: u64, rule: &str) {
        if !self.descends(shown, before) {
            env.fail(format!("{rule}: commit {shown} of record {record} was read, which does not descend from {before}"));
        }
        let certain = self.certain(record);
        if self.descends(shown, certain) {
            self.records.entry(record).or_default().certain = shown;
        } else if !self.descends(certain, shown) {
            env.fail(format!("{rule}: commits {shown} and {certain} of record {record} were both certain"));
        }
    }
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let hosts = crate::Random::new(seed).pick(&[2, 2, 3, 3, 4]);
    let mut cluster = Cluster::new(seed, hosts, hosts, |config, random| {
        // A half-written line of a machine without power blocks its record until an operator acts, which ends no run.
        if random.one_in(2) && !matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })) {
            config.chances.crash_machine = 0;
        } else {
            config.write_path = WritePath::OneUnit;
        }
    });
    let ledger = Shared::default();
    for host in cluster.hosts.clone() {
        let (ledger, config) = (Rc::clone(&ledger), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (ledger, config) = (Rc::clone(&ledger), config.clone());
            env.spawn("main", move |env| main(&env, &ledger, &config));
        });
    }
    plan_zombies(&mut cluster);
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    let stats = cluster.world.run()?;
    if ledger.borrow().confirmed == 0 {
        return Err(cluster.world.failure("nothing was ever confirmed: nothing was tested"));
    }
    Ok(stats)
}

/// Makes a zombie of a host that is about to write, and often has the next one stand still in the same place: its successor, amid the seal.
fn plan_zombies(cluster: &mut Cluster) {
    let visit = cluster.random.between(1, 12);
    let mut pause = |visit, shortest_ms, longest_ms| {
        let for_ns = cluster.random.between(shortest_ms, longest_ms) * 1_000_000;
        let when = When::Point("record.checked", visit);
        cluster.world.plan(Planned { when, host: None, fault: Fault::PauseHost { for_ns } });
    };
    pause(visit, 10, 40);
    pause(visit + 1, 1, 25);
}

fn main(env: &Env, ledger: &Shared, config: &HostConfig) -> Result<()> {
    let host = join(env, config)?;
    let (reader, seen) = (host.clone(), Rc::clone(ledger));
    env.spawn("reader", move |env| {
        while env.global_ns() < UNTIL_NS {
            look(&env, &reader, &seen)?;
        }
        Ok(())
    });
    let mut rounds = 0;
    let mut done = 0;
    while done < SECTIONS || env.global_ns() < UNTIL_NS {
        env.platform().sleep_ns(env.below(2_000_000) as u64);
        rounds += 1;
        match section(env, &host, ledger) {
            Ok(()) => done += 1,
            Err(Error::Fenced { .. } | Error::BadLine { .. }) if rounds < 500 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A record of the structure, by chance.
fn any_record(env: &Env, geometry: &Geometry) -> u64 {
    Structure::Objects.records(geometry).start + env.below(RECORDS as usize) as u64
}

fn section(env: &Env, host: &Host, ledger: &Shared) -> Result<()> {
    let geometry = *host.lines().layout().geometry();
    let before: BTreeMap<u64, u64> = {
        let ledger = ledger.borrow();
        Structure::Objects.records(&geometry).map(|record| (record, ledger.certain(record))).collect()
    };
    let mut locked = Locked::acquire(host, Structure::Objects, 500_000)?;
    for _ in 0..1 + env.below(3) {
        let record = any_record(env, &geometry);
        let best = locked.read(record)?;
        if env.below(4) == 0 {
            env.platform().sleep_ns(env.below(10_000_000) as u64);
        }
        let again = locked.read(record)?;
        locked.confirm()?;
        if number(&best) != number(&again) {
            env.fail(format!("V5: a holder read commit {} of record {record}, then {}", number(&best), number(&again)));
        }
        ledger.borrow_mut().read(env, record, number(&again), before[&record], "V4");
        if env.below(4) == 0 {
            continue;
        }
        let other = any_record(env, &geometry);
        let mut changes = vec![(again, ledger.borrow_mut().begin(&again))];
        if other != record && env.below(2) == 0 {
            let best = locked.read(other)?;
            changes.push((best, ledger.borrow_mut().begin(&best)));
        }
        locked.commit(&changes)?;
        for (best, data) in &changes {
            let commit = number(&Best { copy: cxl_pool::media::Record { data: *data, ..best.copy }, ..*best });
            confirmed(env, &mut ledger.borrow_mut(), locked.grant(), best, commit);
        }
    }
    Ok(())
}

/// A commit on `best` under `grant` was confirmed.
fn confirmed(env: &Env, ledger: &mut Ledger, grant: u32, best: &Best, commit: u64) {
    ledger.confirmed += 1;
    let key = (grant, best.copy.version + 1);
    let first = *ledger.records.entry(best.number).or_default().confirmed.entry(key).or_insert(commit);
    if first != commit {
        env.fail(format!("V4: version {key:?} of record {} was confirmed by commits {first} and {commit}", best.number));
    }
    ledger.read(env, best.number, commit, 0, "V4");
}

fn look(env: &Env, host: &Host, ledger: &Shared) -> Result<()> {
    let record = any_record(env, host.lines().layout().geometry());
    let before = ledger.borrow().certain(record);
    match record::read(host, record) {
        Ok(Reading::Final(best)) => ledger.borrow_mut().read(env, record, number(&best), before, "V6"),
        // A line may look damaged while its writer is stopped in the middle of it.
        Ok(Reading::Doubtful) | Err(Error::BadLine { .. }) => {}
        Err(error) => return Err(error),
    }
    env.platform().sleep_ns(env.below(400_000) as u64);
    Ok(())
}
