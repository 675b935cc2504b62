// SPDX-License-Identifier: Apache-2.0
//! The parent: makes the pool, starts the hosts, strikes them, and lets the judge look at what is left.

use crate::judge;
use crate::log::Summary;
use crate::payload::{CELL_BYTES, Random};
use crate::worker;
use cxl_pool::coherence::CoherenceOptions;
use cxl_pool::device::PoolSpec;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One soak.
pub struct Soak {
    pub name: &'static str,
    pub number: u8,
    /// One in so many steps of the emulator makes noise; `None` = no emulator.
    pub emulator_noise: Option<u32>,
    pub machines: usize,
    pub processes_each: usize,
}

/// A place for a child; one that ended is started again in it.
struct Place {
    machine: usize,
    child: Option<Child>,
    log: PathBuf,
    stopped_until: Option<Instant>,
}

struct Field<'s> {
    soak: &'s Soak,
    directory: PathBuf,
    spec: PoolSpec,
    places: Vec<Place>,
    /// How often each machine was replaced by another one.
    replaced: Vec<u8>,
    starts: u64,
    kills: u64,
    stops: u64,
    departures: u64,
    random: Random,
    seed: u64,
}

/// Longest wait for anything once the storm is over.
pub const PATIENCE: Duration = Duration::from_secs(240);

fn seconds() -> u64 {
    std::env::var("SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(30)
}

/// Lets a soak run and judges.
pub fn run(soak: &Soak) {
    let place = if Path::new("/dev/shm").is_dir() { "/dev/shm" } else { "/tmp" };
    let scratch = tempfile::Builder::new().prefix("cxl-soak-").tempdir_in(place).unwrap();
    let mut field = Field::new(soak, scratch.path().to_path_buf());
    let begun = Instant::now();
    field.make_pool();
    field.start_all();
    let end = Instant::now() + Duration::from_secs(seconds());
    while Instant::now() < end {
        field.strike();
    }
    field.calm_down();
    field.end_all();
    field.judge(begun);
}

impl<'s> Field<'s> {
    fn new(soak: &'s Soak, directory: PathBuf) -> Self {
        let places = (0..soak.machines * soak.processes_each)
            .map(|index| Place {
                machine: index % soak.machines,
                child: None,
                log: directory.join(format!("log-{index}")),
                stopped_until: None,
            })
            .collect();
        let seed = std::env::var("SOAK_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | u64::from(soak.number));
        println!("soak {}: SOAK_SEED={seed}, {} s", soak.name, seconds());
        let spec = PoolSpec::parse(&format!("{},size=32M", directory.join("pool").display())).unwrap();
        let replaced = vec![0; soak.machines];
        Field { soak, directory, spec, places, replaced, starts: 0, kills: 0, stops: 0, departures: 0, random: Random::new(seed), seed }
    }

    fn machine_id(&self, machine: usize) -> MachineId {
        let mut id = [0x50; 16];
        (id[0], id[1], id[2]) = (self.soak.number, machine as u8, self.replaced[machine]);
        MachineId(id)
    }

    /// The pool, with a seat for the judge, whose word on who is dead has to count.
    fn make_pool(&mut self) {
        let area = |cell_bytes| CellArea { cell_bytes, share: Share::Bytes(3 << 20) };
        let options = FormatOptions {
            chunk_bytes: 256 << 10,
            slots: 12,
            locks: 64,
            objects: 16,
            cells: CELL_BYTES.map(area).to_vec(),
            machine: Some(self.machine_id(0)),
            seats: vec![judge::machine_id(self.soak.number), self.machine_id(1)],
            memory: Some(CoherenceOptions::default()),
            ..FormatOptions::default()
        };
        Pool::format(&self.spec, &options).unwrap();
    }

    fn state_directory(&self) -> PathBuf {
        self.directory.join("state")
    }

    fn calm_sign(&self) -> PathBuf {
        self.directory.join("calm")
    }

    fn stop_sign(&self, index: usize) -> PathBuf {
        self.directory.join(format!("stop-{index}"))
    }

    fn start(&mut self, index: usize) {
        self.starts += 1;
        let place = &self.places[index];
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(worker::POOL, self.spec.to_string())
            .env(worker::LOG, &place.log)
            .env(worker::CALM, self.calm_sign())
            .env(worker::STOP, self.stop_sign(index))
            .env(worker::START, self.starts.to_string())
            .env(worker::RANDOM, (self.seed ^ self.starts << 32).to_string())
            .env("CXL_STATE_DIR", self.state_directory())
            .env("CXL_MACHINE_ID", self.machine_id(place.machine).to_string())
            .stdout(Stdio::null());
        match self.soak.emulator_noise {
            Some(noise) => command.env("CXL_COHERENCE", format!("emulated:seed={},noise={noise}", self.seed ^ self.starts)),
            None => command.env_remove("CXL_COHERENCE"),
        };
        self.places[index].child = Some(command.spawn().unwrap());
    }

    fn start_all(&mut self) {
        (0..self.places.len()).for_each(|index| self.start(index));
    }

    fn signal(&self, index: usize, signal: i32) {
        if let Some(child) = &self.places[index].child {
            // SAFETY: kill has no memory effects; the child is ours and not reaped yet, so its pid is its own.
            unsafe { libc::kill(child.id() as i32, signal) };
        }
    }

    /// One blow and a short wait.
    fn strike(&mut self) {
        let pause_ms = 5 + self.random.below(75);
        std::thread::sleep(Duration::from_millis(pause_ms));
        let index = self.random.below(self.places.len() as u64) as usize;
        self.look_after(index);
        if self.places[index].child.is_none() || self.places[index].stopped_until.is_some() {
            return;
        }
        // Sometimes all processes of a machine at once, so that no process keeps its heartbeat going.
        let machine = self.places[index].machine;
        let all = self.random.below(3) == 0;
        let is_struck = |place: &Place| place.machine == machine && place.child.is_some() && place.stopped_until.is_none();
        let struck: Vec<usize> = (0..self.places.len()).filter(|&other| other == index || all && is_struck(&self.places[other])).collect();
        match self.random.below(12) {
            0 => {
                self.kills += struck.len() as u64;
                struck.iter().for_each(|&index| self.signal(index, libc::SIGKILL));
                struck.iter().for_each(|&index| self.reap(index));
            }
            1 | 2 => {
                // From far shorter than a lease to many of them.
                let for_ms = 1 << self.random.below(11);
                self.stops += struck.len() as u64;
                for index in struck {
                    self.signal(index, libc::SIGSTOP);
                    self.places[index].stopped_until = Some(Instant::now() + Duration::from_millis(for_ms));
                }
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
        self.see_departed(index);
        if self.places[index].child.is_none() && self.random.below(2) == 0 {
            self.start(index);
        }
    }

    /// Sees whether a child has left of its own will. When it was the last of its machine, another machine may come in its place.
    fn see_departed(&mut self, index: usize) {
        let Some(child) = &mut self.places[index].child else { return };
        let Some(status) = child.try_wait().unwrap() else { return };
        if !status.success() {
            let log = std::fs::read_to_string(&self.places[index].log).unwrap_or_default();
            let bad: Vec<&str> = log.lines().filter(|line| line.starts_with("bad")).collect();
            panic!("soak {}, SOAK_SEED={}: a child ended by itself ({status}): {bad:?}", self.soak.name, self.seed);
        }
        self.departures += 1;
        self.places[index].child = None;
        let machine = self.places[index].machine;
        let is_last = !self.places.iter().any(|place| place.machine == machine && place.child.is_some());
        // The first two have seats that are named in the superblock.
        if is_last && machine > 1 && self.random.below(2) == 0 {
            self.replaced[machine] = self.replaced[machine].wrapping_add(1);
        }
    }

    fn reap(&mut self, index: usize) {
        if let Some(mut child) = self.places[index].child.take() {
            child.wait().unwrap();
        }
    }

    fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        self.places.iter().for_each(|place| summary.read(&place.log));
        summary
    }

    /// No more faults: every child has to get on.
    fn calm_down(&mut self) {
        std::fs::write(self.calm_sign(), b"").unwrap();
        let deadline = Instant::now() + PATIENCE;
        (0..self.places.len()).for_each(|index| {
            self.signal(index, libc::SIGCONT);
            self.places[index].stopped_until = None;
        });
        loop {
            for index in 0..self.places.len() {
                self.see_departed(index);
                if self.places[index].child.is_none() {
                    self.start(index);
                }
            }
            let summary = self.summary();
            assert!(summary.bad.is_empty(), "SOAK_SEED={}: {:?}", self.seed, summary.bad);
            if summary.calm.len() == self.places.len() {
                return;
            }
            let (seed, late) = (self.seed, Instant::now() >= deadline);
            assert!(!late, "SOAK_SEED={seed}: after {PATIENCE:?} of quiet these did not get on: {:#?}", summary.others());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Half of the children leave, then the others end without a word: those of machine 0 are among these, so that no host has to leave a
    /// pool in which no machine with a seat is left.
    fn end_all(&mut self) {
        let leaving: Vec<usize> =
            (0..self.places.len()).filter(|&index| self.places[index].machine != 0 && self.random.below(2) == 0).collect();
        leaving.iter().for_each(|&index| std::fs::write(self.stop_sign(index), b"").unwrap());
        let deadline = Instant::now() + PATIENCE;
        for index in leaving {
            let (place, seed) = (&mut self.places[index], self.seed);
            let Some(child) = &mut place.child else { continue };
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break status;
                }
                assert!(Instant::now() < deadline, "SOAK_SEED={seed}: a child did not leave within {PATIENCE:?}");
                std::thread::sleep(Duration::from_millis(5));
            };
            place.child = None;
            let log = std::fs::read_to_string(&place.log).unwrap_or_default();
            assert!(status.success(), "SOAK_SEED={seed}: a child left with {status}: {:?}", log.lines().next_back());
        }
        for index in 0..self.places.len() {
            self.signal(index, libc::SIGKILL);
            self.reap(index);
        }
    }

    fn judge(&mut self, begun: Instant) {
        let summary = self.summary();
        assert!(summary.bad.is_empty(), "SOAK_SEED={}: {:?}", self.seed, summary.bad);
        let sums = summary.sums();
        let sum = |name: &str| sums.get(name).copied().unwrap_or(0);
        let told = |misses: bool| -> String {
            let told = sums.iter().filter(|(name, _)| name.starts_with(worker::MISS) == misses);
            told.map(|(name, sum)| format!(" {} {sum}", name.trim_start_matches(worker::MISS))).collect()
        };
        println!(
            "soak {}: {:.0} s, {} starts, {} kills, {} stops, {} departures, wrong 0;{}; misses:{}",
            self.soak.name,
            begun.elapsed().as_secs_f64(),
            self.starts,
            self.kills,
            self.stops,
            self.departures,
            told(false),
            told(true)
        );
        for (name, least) in [("stored", 200), ("hits", 200), ("foreign_hits", 50), ("aborted", 5), ("evicted", 50), ("raw_looks", 20)] {
            assert!(sum(name) >= least, "SOAK_SEED={}: only {} {name}: nothing was tested", self.seed, sum(name));
        }
        // Nothing damages the memory here, so a checksum that differs means that wrong bytes came through everything else.
        assert_eq!(sum("miss_checksum"), 0, "SOAK_SEED={}: blocks with wrong checksums", self.seed);
        let pool = Pool::open(&self.spec, &OpenOptions { memory: Some(CoherenceOptions::default()), ..OpenOptions::default() }).unwrap();
        let verdict = judge::judge(&pool, self.soak.number, &self.state_directory());
        println!("soak {}: afterwards {verdict}", self.soak.name);
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
