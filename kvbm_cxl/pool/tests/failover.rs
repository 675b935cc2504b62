// SPDX-License-Identifier: Apache-2.0
//! Processes of several machines whose managers leave or are killed, one after the other: another one has their locks within the bound of
//! LOCKS.md 12.21, on the clock of the machine that runs the test.

#[path = "common/load.rs"]
mod load;

use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{LOCK_CELLS, LOCK_CHUNKS, LOCK_OBJECTS, LOCK_TABLE, LockGuard};
use cxl_pool::machine::{ENV_MACHINE_ID, ENV_STATE_DIR};
use cxl_pool::media::Seat;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{FormatOptions, OpenOptions, Pool};
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const POOL: &str = "FAILOVER_POOL";
/// Ends the lines that children write; the test harness may have begun the line.
const ANSWER: &str = "failover: ";
const MACHINES: u8 = 4;
/// Locks that the manager holds, and those that the others want.
const HELD: [u32; 2] = [LOCK_TABLE, LOCK_OBJECTS];
const WANTED: [u32; 4] = [LOCK_TABLE, LOCK_OBJECTS, LOCK_CHUNKS, LOCK_CELLS];

fn config() -> HostConfig {
    // No host gives a lock back unasked.
    HostConfig { heartbeat_ms: load::ms(50), suspect_ms: load::ms(1_000), idle_release_ms: 1 << 30, ..HostConfig::default() }
}

/// Not a test of its own: the program of the child processes.
#[test]
fn child() {
    let Ok(spec) = std::env::var(POOL) else { return };
    let pool = Pool::open(&PoolSpec::parse(&spec).unwrap(), &OpenOptions::default()).unwrap();
    let host = pool.join(config()).unwrap();
    let _service = host.serve().unwrap();
    println!("{ANSWER}ready");
    let mut inside = Vec::new();
    for line in std::io::stdin().lines() {
        obey(&host, &line.unwrap(), &mut inside);
        println!("{ANSWER}done");
    }
}

fn obey<'h>(host: &'h Host, order: &str, inside: &mut Vec<LockGuard<'h>>) {
    let timeout_ms = host.config().default_timeout_ms();
    let acquire = |lock: u32| host.acquire(lock, timeout_ms).unwrap();
    match order {
        // One grant without a section, and one with.
        "hold" => {
            drop(acquire(HELD[0]));
            inside.push(acquire(HELD[1]));
        }
        "acquire" => WANTED.into_iter().for_each(|lock| drop(acquire(lock))),
        "leave" => {
            inside.clear();
            host.leave().unwrap();
        }
        other => panic!("{other} is no order"),
    }
}

struct Machine {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Machine {
    fn start(directory: &std::path::Path, spec: &str, number: u8) -> Machine {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(POOL, spec)
            .env(load::ENV_FACTOR, load::factor().to_string())
            .env(ENV_STATE_DIR, directory.join(format!("state-{number}")))
            .env(ENV_MACHINE_ID, MachineId([number; 16]).to_string())
            .env_remove("CXL_COHERENCE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut machine = Machine { child, orders, answers: BufReader::new(answers).lines() };
        machine.await_answer();
        machine
    }

    fn send(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    fn await_answer(&mut self) {
        self.answers.find(|line| line.as_ref().unwrap().contains(ANSWER)).expect("the child answers").unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The machine of the seat in charge.
fn manager(pool: &Pool) -> u8 {
    let seats = pool.layout().geometry().all_seats();
    let newest = (0..seats).map(|seat| pool.lines().fetch::<Seat>(seat).unwrap()).max_by_key(|seat| seat.epoch);
    newest.unwrap().machine[0]
}

/// Ends one manager after the other, each as `ends` says, and returns how long another machine waited for its locks.
fn waits(ends: &[&str]) -> Vec<(String, Duration)> {
    let directory = tempfile::Builder::new().prefix("cxl-failover-").tempdir_in("/dev/shm").unwrap();
    let spec = format!("{},size=24M", directory.path().join("pool").display());
    let options = FormatOptions { machine: None, slots: 8, locks: 32, objects: 64, chunk_bytes: 256 << 10, ..Default::default() };
    Pool::format(&PoolSpec::parse(&spec).unwrap(), &options).unwrap();
    let pool = Pool::open(&PoolSpec::parse(&spec).unwrap(), &OpenOptions::default()).unwrap();
    let mut machines: Vec<Option<Machine>> =
        (0..MACHINES).map(|number| Some(Machine::start(directory.path(), &spec, number + 1))).collect();
    let mut waits = Vec::new();
    for end in ends {
        let number = manager(&pool);
        let mut ending = machines[usize::from(number) - 1].take().unwrap();
        ending.send("hold");
        ending.await_answer();
        // The one that joined last, and so, first of all, one that may have no seat yet.
        let heir = machines.iter_mut().flatten().next_back().unwrap();
        let begun = Instant::now();
        match *end {
            "kill" => ending.kill(),
            order => ending.send(order),
        }
        heir.send("acquire");
        heir.await_answer();
        waits.push((format!("{end} of machine {number}"), begun.elapsed()));
        if *end == "leave" {
            ending.await_answer();
        }
    }
    waits
}

/// What a test that shares the machine with others may be late by: every step of three processes waits for a core.
fn late() -> Duration {
    Duration::from_millis(load::ms(250))
}

fn within(ends: &[&str]) {
    let (kill, leave) = (Duration::from_millis(config().suspect_ms * 3 / 2), Duration::from_millis(config().heartbeat_ms * 2));
    for (what, waited) in waits(ends) {
        let most = if what.starts_with("kill") { kill } else { leave };
        println!("{what}: {waited:?} of {most:?}");
        assert!(waited < most + late(), "{what}: another one waited {waited:?}, and not {most:?}");
    }
}

#[test]
fn managers_that_are_killed_one_after_the_other() {
    within(&["kill", "kill", "kill"]);
}

#[test]
fn managers_that_leave_one_after_the_other() {
    within(&["leave", "leave", "leave"]);
}

#[test]
fn a_manager_leaves_between_deaths() {
    within(&["kill", "leave", "kill"]);
}
