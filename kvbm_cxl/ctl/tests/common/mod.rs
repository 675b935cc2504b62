// SPDX-License-Identifier: Apache-2.0
//! A pool of its own for each test, and real runs of the program on it.
#![allow(dead_code, missing_docs, reason = "every test program uses a part of it")]

mod worker;

use cxl_pool::device::PoolSpec;
use cxl_pool::line::Lines;
use cxl_pool::media::{FIRST_STATS_LINES, Geometry, Layout, Region, Superblock, SuperblockParts};
use cxl_pool::pool::{OpenOptions, Pool, write_regions, write_superblocks};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const EXE: &str = env!("CARGO_BIN_EXE_cxlctl");

/// A directory in memory with one pool in it; gone with the test.
pub struct Bench {
    pub directory: tempfile::TempDir,
    pub machine: &'static str,
}

/// How a run ended.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Bench {
    pub fn new() -> Bench {
        Bench { directory: tempfile::Builder::new().prefix("cxlctl-test-").tempdir_in("/dev/shm").unwrap(), machine: "machine-a" }
    }

    /// With a small pool on it, which has every region.
    pub fn formatted() -> Bench {
        Bench::formatted_with(&[])
    }

    /// The same with more options of `format`.
    pub fn formatted_with(more: &[&str]) -> Bench {
        let bench = Bench::new();
        let counts =
            ["--slots", "4", "--advanced", "seats=2", "--advanced", "locks=64", "--advanced", "objects=16", "--advanced", "chunk=64K"];
        let ran = bench.run(&[&["format", "--size", "16M", "--cells", "4K:2M", "--cells", "64K:25%"], &counts[..], more].concat());
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        bench
    }

    /// The same as a program of format 2.0 made it, with fewer stats lines.
    pub fn formatted_before_wide_stats() -> Bench {
        Bench::formatted_before(|geometry| Geometry { stats_lines: FIRST_STATS_LINES as u32, slot_seats: false, ..geometry })
    }

    /// The same as a program made it whose slots had no manager seats.
    pub fn formatted_before_slot_seats() -> Bench {
        Bench::formatted_before(|geometry| Geometry { slot_seats: false, ..geometry })
    }

    fn formatted_before(adjust: impl Fn(Geometry) -> Geometry) -> Bench {
        let bench = Bench::formatted();
        let pool = bench.open();
        let found = pool.superblock();
        let layout = Layout::new(adjust(*pool.layout().geometry())).unwrap();
        let parts = SuperblockParts {
            uuid: *found.uuid(),
            incarnation: found.incarnation() + 1,
            layout: layout.clone(),
            coherence: found.coherence(),
            seats: found.seats(),
            devices: found.devices(),
        };
        let lines = Lines::new(pool.lines().memory().clone(), Arc::new(layout), &parts.uuid, parts.incarnation);
        write_regions(&lines).unwrap();
        write_superblocks(&**lines.memory(), &Superblock::new(&parts).unwrap()).unwrap();
        bench
    }

    pub fn file(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    pub fn spec(&self) -> String {
        self.file().display().to_string()
    }

    /// The program with this test's environment and nothing of the outer one.
    pub fn command(&self, machine: &str) -> Command {
        let mut command = Command::new(EXE);
        self.give_environment(&mut command, machine);
        command
    }

    fn give_environment(&self, command: &mut Command, machine: &str) {
        command.env("CXL_POOL", self.spec()).env("CXL_MACHINE_ID", machine).env("CXL_STATE_DIR", self.directory.path().join(machine));
    }

    pub fn run(&self, args: &[&str]) -> Ran {
        ran(self.command(self.machine).args(args).output().unwrap())
    }

    pub fn json(&self, args: &[&str]) -> (i32, serde_json::Value) {
        let ran = self.run(&[&["--json"], args].concat());
        let value = serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {} {}", ran.out, ran.err));
        (ran.code, value)
    }

    /// The pool, opened in the test itself.
    pub fn open(&self) -> Pool {
        Pool::open(&PoolSpec::parse(&self.spec()).unwrap(), &OpenOptions::default()).unwrap()
    }

    /// Flips a bit of a line.
    pub fn damage(&self, region: Region, index: u64) {
        let pool = self.open();
        let offset = pool.layout().line_offset(region, index).unwrap();
        let mut line = pool.lines().fetch_raw(offset).unwrap();
        line.0[9] ^= 0x10;
        pool.lines().memory().write_line(offset, &line).unwrap();
        pool.lines().memory().fence_stores();
    }

    /// Damages every copy of the line that binds a slot to a machine.
    pub fn damage_bindings(&self, slot: u64) {
        let geometry = *self.open().layout().geometry();
        (0..geometry.all_seats()).for_each(|seat| self.damage(Region::Binding, seat * geometry.bindings() + slot));
    }

    /// Waits until the pool's hosts are as `is_done` says; what they are instead is the message.
    pub fn wait_for_hosts(&self, what: &str, is_done: impl Fn(&serde_json::Value) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            let (_, hosts) = self.json(&["hosts", "--watch-ms", "50"]);
            if is_done(&hosts) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {hosts:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A host that runs until its standard input ends; returns once it has joined.
    pub fn host(&self, machine: &str) -> HostProcess {
        self.host_on(&self.spec(), machine)
    }

    /// The same on the pool of another name.
    pub fn host_on(&self, pool: &str, machine: &str) -> HostProcess {
        self.start_host(pool, machine, machine)
    }

    /// The same with another identity than its state directory is named for.
    pub fn host_named(&self, machine: &str, identity: &str) -> HostProcess {
        self.start_host(&self.spec(), machine, identity)
    }

    fn start_host(&self, pool: &str, machine: &str, identity: &str) -> HostProcess {
        let mut command = host_command();
        self.give_environment(&mut command, machine);
        let mut process =
            command.env("CXL_POOL", pool).env("CXL_MACHINE_ID", identity).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let replies = BufReader::new(process.stdout.take().unwrap());
        let mut host = HostProcess { process, replies };
        let joined = host.reply();
        assert!(joined.contains("Joined"), "{joined}");
        host
    }
}

/// This test program once more, as a host of the pool that its environment names ([`worker`]).
pub fn host_command() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "common::host_process", "--nocapture"]).env("HOST_PROCESS", "1");
    command
}

/// The process of [`Bench::host`]; nothing where the test harness runs it.
#[test]
fn host_process() {
    if std::env::var_os("HOST_PROCESS").is_some() {
        worker::run();
    }
}

/// A host process; killed with the test if it still runs.
pub struct HostProcess {
    process: Child,
    replies: BufReader<ChildStdout>,
}

impl HostProcess {
    /// Sends an order of [`worker`].
    pub fn order(&mut self, order: &str) {
        writeln!(self.process.stdin.as_mut().unwrap(), "{order}").unwrap();
    }

    /// The answer to an order.
    pub fn reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            let is_over = self.replies.read_line(&mut line).unwrap() == 0;
            match line.strip_prefix(worker::REPLY) {
                Some(reply) => return reply.to_owned(),
                None if is_over => return line,
                None => {}
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Power off.
    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn ran(output: Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let ran = Ran { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) };
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
    if ran.code > 2 {
        assert_eq!(ran.err.lines().count(), 1, "one clear line: {}", ran.err);
    }
    ran
}

/// The rules that a JSON report found.
pub fn rules(findings: &serde_json::Value) -> Vec<String> {
    findings.as_array().unwrap().iter().map(|found| found["rule"].as_str().unwrap().to_owned()).collect()
}
