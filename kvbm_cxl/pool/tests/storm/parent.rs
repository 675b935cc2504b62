// SPDX-License-Identifier: Apache-2.0
//! The parent: makes the pool, starts the hosts, strikes them, and judges what is left.

use crate::leases;
use crate::log::{self, Summary};
use crate::worker::{self, COUNTER};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea, audit};
use cxl_pool::device::PoolSpec;
use cxl_pool::fsck::{self, Severity};
use cxl_pool::machine;
use cxl_pool::objects::Objects;
use cxl_pool::pool::{FormatOptions, OpenOptions, Pool};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// One storm.
pub struct Storm {
    pub name: &'static str,
    pub coherence: Option<&'static str>,
    pub machines: usize,
    pub processes_each: usize,
}

/// A place for a child; killed ones are started again in it.
struct Place {
    machine: usize,
    child: Option<Child>,
    start: u64,
    log: PathBuf,
    stopped_until: Option<Instant>,
}

struct Field<'s> {
    storm: &'s Storm,
    directory: PathBuf,
    spec: String,
    places: Vec<Place>,
    starts: u64,
    kills: u64,
    stops: u64,
    random: u64,
}

const POOL_BYTES: u64 = 96 << 20;
/// Longest wait for anything once the storm is over.
const PATIENCE: Duration = Duration::from_secs(240);

fn seconds() -> u64 {
    std::env::var("STORM_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(30)
}

/// Lets a storm rage and judges. One at a time: the parent takes part as machine 0, and its identity lies in the environment.
pub fn rage(storm: &Storm) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let place = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let scratch = tempfile::Builder::new().prefix("cxl-storm-").tempdir_in(place).unwrap();
    let mut field = Field::new(storm, scratch.path().to_path_buf());
    let begun = Instant::now();
    field.make_pool();
    let end = Instant::now() + Duration::from_secs(seconds());
    field.start_all();
    while Instant::now() < end {
        field.strike();
    }
    field.calm_down();
    field.ask_to_leave();
    field.judge(begun);
}

impl<'s> Field<'s> {
    fn new(storm: &'s Storm, directory: PathBuf) -> Self {
        let places = (0..storm.machines * storm.processes_each)
            .map(|index| Place {
                machine: index % storm.machines,
                child: None,
                start: 0,
                log: directory.join(format!("log-{index}")),
                stopped_until: None,
            })
            .collect();
        let seed = std::env::var("STORM_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 1);
        println!("storm {}: STORM_SEED={seed}, {} s", storm.name, seconds());
        let spec = format!("{},size={POOL_BYTES}", directory.join("pool").display());
        Field { storm, directory, spec, places, starts: 0, kills: 0, stops: 0, random: seed | 1 }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn machine_name(&self, machine: usize) -> String {
        format!("storm-{}-{}", self.storm.name, machine)
    }

    /// Formats the pool for machine 0 and publishes the counter as that machine, in a child of its own.
    fn make_pool(&mut self) {
        // SAFETY: storms run one at a time, and no other thread of this test program reads the environment.
        unsafe {
            std::env::set_var("CXL_STATE_DIR", self.directory.join("state"));
            std::env::set_var("CXL_MACHINE_ID", self.machine_name(0));
        }
        let options = FormatOptions { chunk_bytes: 256 << 10, slots: 8, locks: 16, objects: 128, ..FormatOptions::default() };
        let pool = Pool::format(&PoolSpec::parse(&self.spec).unwrap(), &options).unwrap();
        let host = pool.join(leases::host_config()).unwrap();
        let service = host.serve().unwrap();
        let allocator = Allocator::attach(&host, LocalArea::of(&host).unwrap(), AllocConfig::default()).unwrap();
        let block = allocator.alloc(64).unwrap();
        let memory = host.lines().memory();
        memory.copy_in(block.offset, &[0; 64]).unwrap();
        memory.fence_stores();
        allocator.keep(block.offset).unwrap();
        Objects::new(&host).put(COUNTER, block.offset, 64, 10_000).unwrap();
        allocator.close().unwrap();
        host.leave().unwrap();
        drop(service);
        assert!(!machine::machine_id().unwrap().is_none());
    }

    fn start(&mut self, index: usize) {
        self.starts += 1;
        let place = &self.places[index];
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(worker::POOL, &self.spec)
            .env(worker::LOG, &place.log)
            .env(worker::STOP, self.directory.join("stop"))
            .env(worker::START, self.starts.to_string())
            .env(worker::DEAD, self.directory.join("dead-"))
            .env("CXL_STATE_DIR", self.directory.join("state"))
            .env("CXL_MACHINE_ID", self.machine_name(place.machine))
            .stdout(Stdio::null());
        if let Some(coherence) = self.storm.coherence {
            command.env("CXL_COHERENCE", coherence);
        }
        self.places[index].child = Some(command.spawn().unwrap());
        self.places[index].start = self.starts;
    }

    fn start_all(&mut self) {
        for index in 0..self.places.len() {
            self.start(index);
        }
    }

    fn signal(&self, index: usize, signal: i32) {
        if let Some(child) = &self.places[index].child {
            // SAFETY: kill has no memory effects; the child is ours and not reaped yet, so its pid is its own.
            unsafe { libc::kill(child.id() as i32, signal) };
        }
    }

    /// One blow and a short wait.
    fn strike(&mut self) {
        let pause_ms = 5 + self.random(60);
        std::thread::sleep(Duration::from_millis(pause_ms));
        let index = self.random(self.places.len() as u64) as usize;
        self.look_after(index);
        if self.places[index].child.is_none() || self.places[index].stopped_until.is_some() {
            return;
        }
        match self.random(4) {
            0 => {
                self.signal(index, libc::SIGKILL);
                self.kills += 1;
                self.reap(index);
            }
            1 => {
                // From far shorter than a lease to many of them.
                let for_ms = 1 << self.random(11);
                self.signal(index, libc::SIGSTOP);
                self.stops += 1;
                self.places[index].stopped_until = Some(Instant::now() + Duration::from_millis(for_ms));
            }
            _ => {}
        }
    }

    fn look_after(&mut self, index: usize) {
        for other in 0..self.places.len() {
            if self.places[other].stopped_until.is_some_and(|until| until <= Instant::now()) {
                self.signal(other, libc::SIGCONT);
                self.places[other].stopped_until = None;
            }
        }
        if let Some(child) = &mut self.places[index].child
            && let Some(status) = child.try_wait().unwrap()
        {
            let log = std::fs::read_to_string(&self.places[index].log).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(3).collect();
            panic!("a child ended by itself ({status}): {tail:?}");
        }
        if self.places[index].child.is_none() && self.random(2) == 0 {
            self.start(index);
        }
    }

    fn reap(&mut self, index: usize) {
        if let Some(mut child) = self.places[index].child.take() {
            child.wait().unwrap();
            std::fs::write(self.directory.join(format!("dead-{}", self.places[index].start)), b"").unwrap();
        }
    }

    /// No more faults: every child has to get on.
    fn calm_down(&mut self) {
        for index in 0..self.places.len() {
            self.signal(index, libc::SIGCONT);
            self.places[index].stopped_until = None;
            if self.places[index].child.is_none() {
                self.start(index);
            }
        }
        let before: Vec<u64> = self.places.iter().map(|place| log::progress(&place.log)).collect();
        let deadline = Instant::now() + PATIENCE;
        let mut waiting: Vec<usize> = (0..self.places.len()).collect();
        while !waiting.is_empty() {
            waiting.retain(|&index| log::progress(&self.places[index].log) == before[index]);
            assert!(Instant::now() < deadline, "no progress of children {waiting:?} within {PATIENCE:?} of quiet");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn ask_to_leave(&mut self) {
        std::fs::write(self.directory.join("stop"), b"").unwrap();
        let deadline = Instant::now() + PATIENCE;
        for place in &mut self.places {
            let Some(child) = &mut place.child else { continue };
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < deadline, "a child did not leave within {PATIENCE:?}");
                std::thread::sleep(Duration::from_millis(5));
            };
            place.child = None;
            let log = std::fs::read_to_string(&place.log).unwrap_or_default();
            assert!(status.success(), "a child left with {status}: {:?}", log.lines().next_back());
        }
    }

    fn judge(&mut self, begun: Instant) {
        let mut summary = Summary::default();
        self.places.iter().for_each(|place| log::read(&place.log, &mut summary));
        assert!(summary.bad.is_empty(), "{:?}", summary.bad);
        let doubled: Vec<_> = summary.counted.iter().filter(|(_, times)| **times > 1).collect();
        assert!(doubled.is_empty(), "counted twice: {doubled:?}");

        let pool = Pool::open(&PoolSpec::parse(&self.spec).unwrap(), &OpenOptions::default()).unwrap();
        let host = pool.join(leases::host_config()).unwrap();
        let service = host.serve().unwrap();
        let objects = Objects::new(&host);
        let counter = objects.get(COUNTER, 10_000).unwrap();
        let mut value = [0; 8];
        pool.lines().memory().copy_out(counter.offset, &mut value).unwrap();
        let value = u64::from_le_bytes(value);
        // A child that is killed between the count and its log leaves a value without an owner; nothing else may.
        let unclaimed = value - summary.counted.len() as u64;
        assert!(summary.counted.keys().all(|counted| *counted <= value), "counts beyond the counter");
        assert!(unclaimed <= self.kills, "{unclaimed} counts are lost, with {} kills", self.kills);
        assert!(summary.counted.len() > 20, "only {} counts: nothing was tested", summary.counted.len());

        let allocator = Allocator::attach(&host, LocalArea::of(&host).unwrap(), AllocConfig::default()).unwrap();
        allocator.adopt_dead().unwrap();
        let found = audit(pool.lines()).unwrap();
        assert!(found.findings.is_empty(), "{:?}", found.findings);
        let named = objects.list(10_000).unwrap().len() as u64;
        // A kill between keep and put, or between destroy and free, leaves a kept block without a name, and so does a fence in a clean-up.
        let nameless = found.kept_blocks - named;
        assert!(nameless <= self.kills + self.stops, "{nameless} nameless blocks, with {} kills", self.kills);
        allocator.close().unwrap();
        host.leave().unwrap();
        drop(service);
        let report = fsck::check(pool.lines(), &pool.superblock().seats()).unwrap();
        let found: Vec<_> = report.findings.iter().filter(|finding| finding.severity > Severity::Note).collect();
        assert!(report.is_clean(), "{found:?}");
        println!(
            "storm {}: {:.0} s, {} starts, {} kills, {} stops, counted to {value} ({unclaimed} unclaimed), {named} objects, {nameless} \
             nameless blocks",
            self.storm.name,
            begun.elapsed().as_secs_f64(),
            self.starts,
            self.kills,
            self.stops
        );
    }
}

impl Drop for Field<'_> {
    fn drop(&mut self) {
        for place in &mut self.places {
            if let Some(child) = &mut place.child {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
