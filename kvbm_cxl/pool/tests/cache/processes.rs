// SPDX-License-Identifier: Apache-2.0
//! Processes and hosts that end, with and without a word, and those that come after them.

use crate::bench::*;
use cxl_pool::cache::{Cache, PublishRequest, Reserved};
use cxl_pool::device::PoolSpec;
use cxl_pool::pool::{OpenOptions, Pool};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names the pool; only set for children.
const POOL: &str = "CACHE_CHILD_POOL";
/// What the child does: `pin NUMBER...`, or `publish FIRST COUNT`, which also leaves a block half written.
const TASK: &str = "CACHE_CHILD_TASK";
/// File that the child makes when it has done so.
const DONE: &str = "CACHE_CHILD_DONE";

const LEN: usize = 1000;

/// Does the task and then nothing until it is killed, if this process is a child.
pub fn run_if_child() {
    let Ok(spec) = std::env::var(POOL) else { return };
    let pool = Pool::open(&PoolSpec::parse(&spec).unwrap(), &OpenOptions::default()).unwrap();
    let host = pool.join(host_config()).unwrap();
    let _service = host.serve().unwrap();
    let cache = Cache::open(&host, config()).unwrap();
    let task = std::env::var(TASK).unwrap();
    let words: Vec<&str> = task.split(' ').collect();
    let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
    let mut pins = Vec::new();
    let mut half = None;
    match words[0] {
        // Twice: pins of one process add up.
        "pin" => (0..2).for_each(|_| pins.extend(numbers.iter().map(|&number| cache.pin(SPACE, key(number)).unwrap().unwrap()))),
        _ => {
            for number in numbers[0]..numbers[0] + numbers[1] {
                cache.publish(SPACE, key(number), None, &bytes(number, LEN)).unwrap();
            }
            let request = PublishRequest { namespace: SPACE, key: key(1_000), parent: None, len_bytes: LEN as u64 };
            if let Reserved::Cell(mut reservation) = cache.reserve(&request).unwrap() {
                reservation.write(0, &bytes(1_000, LEN)[..500]).unwrap();
                half = Some(reservation);
            }
        }
    }
    std::fs::write(std::env::var(DONE).unwrap(), b"").unwrap();
    while Path::new(&std::env::var(DONE).unwrap()).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    drop((pins, half));
}

/// A child that has done its task; it is killed when this is dropped.
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts it as a process of `machine` and waits until it has done the task.
    pub fn start(bench: &Bench, machine: u8, task: &str) -> Process {
        Process::start_with(bench, machine, task, None)
    }

    /// The same with another `CXL_COHERENCE`.
    pub fn start_with(bench: &Bench, machine: u8, task: &str, coherence: Option<&str>) -> Process {
        let done: PathBuf = bench.directory.path().join(format!("done-{}", task.replace(' ', "-")));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(POOL, bench.spec.to_string())
            .env(TASK, task)
            .env(DONE, &done)
            .env("CXL_STATE_DIR", bench.state_directory())
            .env("CXL_MACHINE_ID", machine_id(machine).to_string())
            .env_remove("CXL_COHERENCE")
            .stdout(Stdio::null());
        if let Some(coherence) = coherence {
            command.env("CXL_COHERENCE", coherence);
        }
        let mut process = Process { child: command.spawn().unwrap() };
        let deadline = Instant::now() + PATIENCE;
        while !done.exists() {
            assert!(process.child.try_wait().unwrap().is_none(), "the child ended by itself");
            assert!(Instant::now() < deadline, "the child does not get on");
            std::thread::sleep(Duration::from_millis(2));
        }
        process
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_pins_of_a_killed_process_go() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..4, LEN);
    // Another process of the same host, and one of another host.
    let same = Process::start(&bench, 1, "pin 0 1");
    let other = Process::start(&bench, 2, "pin 2");
    let mine = member.cache.pin(SPACE, key(0)).unwrap().unwrap();
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 1, "only block 3 is not pinned");
    same.kill();
    member.cache.service_round().unwrap();
    // Its pins are gone; this process's own on the same block is not.
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 1, "block 1");
    assert_eq!((0..4).filter(|&number| member.has(number, LEN)).collect::<Vec<_>>(), [0, 2]);
    drop(mine);
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 1, "block 0");
    // The host of the other one is fenced after a while, and then its pin counts no more.
    other.kill();
    member.serve_until("the pin of a dead host", || member.cache.clear(Some(SPACE)).unwrap() == 1);
    let usage = member.cache.usage();
    assert_eq!(usage.free, usage.owned);
}

#[test]
fn a_machine_that_comes_back_in_another_slot_publishes_its_pins_there() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..2, LEN);
    // The first one has no pin: its notes are the new process's, which publishes the lines of what it finds in them.
    let [first, second] = ["pin", "pin 0"].map(|task| Process::start(&bench, 2, task));
    first.kill();
    second.kill();
    let (_pool, host) = bench.join_in(2, Some(3));
    assert_eq!((host.slot(), host.incarnation()), (3, 1));
    let _service = host.serve().unwrap();
    let cache = Cache::open(&host, config()).unwrap();
    // What the second process left is not taken back before this one's upkeep: here a pin is one more, and nothing new to the line.
    let pin = cache.pin(SPACE, key(0)).unwrap().unwrap();
    assert!(!member.cache.evict(SPACE, key(0)).unwrap(), "a pinned block went");
    assert!(pin.is_unchanged().unwrap());
}

#[test]
fn the_cells_of_a_killed_process_are_its_hosts() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    let child = Process::start(&bench, 1, "publish 0 9");
    assert_eq!((member.count(0..9, LEN), member.cache.usage().ready), (9, 0));
    child.kill();
    member.serve_until("a chunk of a dead process", || member.cache.usage().ready == 9);
    // What it had half written is free again: on this machine its end is certain.
    let usage = member.cache.usage();
    assert_eq!((usage.quarantined, usage.free), (0, usage.owned - 9));
    assert_eq!(member.count(0..9, LEN), 9);
    member.publish(1_000..1_001, LEN);
    assert_eq!(member.cache.clear(None).unwrap(), 10);
}

#[test]
fn a_killed_host_finds_its_blocks_when_it_starts_again() {
    let bench = Bench::new(&[(1024, 28)]);
    let watcher = bench.member(2);
    Process::start(&bench, 1, "publish 0 9").kill();
    // At once, or after it was fenced: it makes no difference, as long as no host adopts.
    let member = bench.member(1);
    assert_eq!(member.cache.usage().ready, 9);
    assert_eq!((member.count(0..9, LEN), watcher.count(0..9, LEN)), (9, 9));
    assert!(!member.has(1_000, LEN) && member.cache.usage().quarantined == 0);
    assert!(member.cache.evict(SPACE, key(3)).unwrap());
    member.publish(1_000..1_001, LEN);
    assert_eq!(watcher.count(0..9, LEN), 8);
}

#[test]
fn a_host_that_left_finds_its_blocks_again() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..9, LEN);
    let incarnation = member.host.incarnation();
    member.leave();
    let member = bench.member(1);
    assert!(member.host.incarnation() > incarnation);
    let usage = member.cache.usage();
    assert_eq!((usage.ready, usage.quarantined), (9, 0));
    assert_eq!(member.count(0..9, LEN), 9);
    assert_eq!(member.cache.clear(None).unwrap(), 9);
}

#[test]
fn the_blocks_of_a_host_that_left_are_served_and_adopted() {
    let bench = Bench::new(&[(1024, 28)]);
    let (one, two) = (bench.member(1), bench.member(2));
    one.publish(0..9, LEN);
    one.leave();
    // Without an owner they are served all the same.
    assert_eq!((two.count(0..9, LEN), two.cache.usage().ready), (9, 0));
    two.serve_until("adoption", || two.cache.usage().ready == 9);
    assert_eq!((two.cache.usage().quarantined, two.cache.metrics().adopted_total.get()), (0, 9));
    assert_eq!(two.count(0..9, LEN), 9);
    assert!(two.cache.evict(SPACE, key(0)).unwrap());
    // Who comes back has nothing, and gets along.
    let one = bench.member(1);
    assert_eq!((one.cache.usage().ready, one.count(0..9, LEN)), (0, 8));
    assert_eq!(two.cache.clear(None).unwrap(), 8);
    one.publish(20..25, LEN);
    assert_eq!(two.count(20..25, LEN), 5);
}

#[test]
fn the_blocks_of_a_killed_host_are_adopted_and_what_it_wrote_waits_for_a_proof() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    let child = Process::start(&bench, 2, "publish 0 9");
    let slot = member.cache.lookup(SPACE, key(0)).unwrap().unwrap().owner;
    child.kill();
    member.serve_until("adoption", || member.cache.usage().ready == 9);
    assert_eq!(member.cache.usage().quarantined, 1);
    assert_eq!(member.count(0..9, LEN), 9);
    (0..20).for_each(|_| member.cache.service_round().unwrap());
    assert_eq!(member.cache.usage().quarantined, 1, "a fence is no proof");
    member.host.declare_dead(slot, 1).unwrap();
    member.serve_until("the end of the quarantine", || member.cache.usage().quarantined == 0);
    assert_eq!(member.cache.clear(None).unwrap(), 9);
    let usage = member.cache.usage();
    assert_eq!(usage.free, usage.owned);
}
