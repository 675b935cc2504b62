// SPDX-License-Identifier: Apache-2.0
//! A server and a caller as processes of their own, killed and stopped in the middle of their calls.

use crate::lab::PATIENCE_MS;
use crate::load;
use crate::worker::{self, peer_timeout_ms};
use cxl_pool::alloc::audit;
use cxl_pool::device::PoolSpec;
use cxl_pool::machine::{ENV_MACHINE_ID, ENV_STATE_DIR};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{FormatOptions, OpenOptions, Pool};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time until the death of a process that can only be seen to be silent has to be noticed, in milliseconds: the tests share the
/// machine with others.
fn noticed_ms() -> u64 {
    peer_timeout_ms() + load::ms(4_000)
}

/// The same where the process can be seen to have ended.
fn seen_ms() -> u64 {
    peer_timeout_ms()
}

/// The machines; the first has the pool's first seat.
const ONE: u8 = 1;
const TWO: u8 = 2;

struct Field {
    directory: tempfile::TempDir,
    spec: String,
    coherence: Option<&'static str>,
    started: u64,
}

/// A child; killed with the test if it still runs.
struct Running {
    child: Child,
    log: PathBuf,
}

impl Field {
    fn new(coherence: Option<&'static str>) -> Field {
        let directory = tempfile::Builder::new().prefix("cxl-ring-").tempdir_in("/dev/shm").unwrap();
        let spec = format!("{},size=24M", directory.path().join("pool").display());
        let machine = Some(MachineId([ONE; 16]));
        let options = FormatOptions { machine, slots: 8, locks: 32, objects: 64, chunk_bytes: 256 << 10, ..Default::default() };
        Pool::format(&PoolSpec::parse(&spec).unwrap(), &options).unwrap();
        Field { directory, spec, coherence, started: 0 }
    }

    fn start(&mut self, role: &str, machine: u8) -> Running {
        self.started += 1;
        let log = self.directory.path().join(format!("{role}-{}", self.started));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(worker::POOL, &self.spec)
            .env(worker::ROLE, role)
            .env(worker::LOG, &log)
            .env(worker::STOP, self.directory.path().join("stop"))
            .env(worker::NUMBER, self.started.to_string())
            .env(load::ENV_FACTOR, load::factor().to_string())
            .env(ENV_STATE_DIR, self.directory.path().join("state"))
            .env(ENV_MACHINE_ID, MachineId([machine; 16]).to_string())
            .env_remove("CXL_COHERENCE")
            .stdout(Stdio::null());
        command.envs(self.coherence.map(|coherence| ("CXL_COHERENCE", coherence)));
        Running { child: command.spawn().unwrap(), log }
    }

    /// Ends all processes in good order and looks at what is left.
    fn end(self, running: impl IntoIterator<Item = Running>) {
        std::fs::write(self.directory.path().join("stop"), "").unwrap();
        for mut process in running {
            let status = process.await_end();
            assert!(status.success(), "{status}: {}", process.text());
            assert!(!process.text().contains("failed"), "{}", process.text());
        }
        let pool = Pool::open(&PoolSpec::parse(&self.spec).unwrap(), &OpenOptions::default()).unwrap();
        // The doors are all that outlives the processes, killed ones included.
        assert_eq!(audit(pool.lines()).unwrap().kept_blocks, 1);
    }
}

impl Running {
    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill has no memory effects; the child is ours and not reaped yet, so its pid is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn calls(&self) -> u64 {
        self.text().lines().filter_map(|line| line.strip_prefix("calls ")?.parse().ok()).next_back().unwrap_or(0)
    }

    /// Waits until the log has `count` lines that begin with one of `wanted`; returns the last one.
    fn await_lines(&mut self, wanted: &[&str], count: usize) -> String {
        let since = Instant::now();
        loop {
            let text = self.text();
            let found: Vec<&str> = text.lines().filter(|line| wanted.iter().any(|of| line.starts_with(of))).collect();
            if found.len() >= count {
                return found[count - 1].to_owned();
            }
            let ended = self.child.try_wait().unwrap();
            let is_late = since.elapsed() > Duration::from_millis(PATIENCE_MS);
            assert!(ended.is_none() && !is_late, "{wanted:?} came only {} times ({ended:?}):\n{text}", found.len());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn await_calls(&mut self, more: u64) {
        let (since, before) = (Instant::now(), self.calls());
        while self.calls() < before + more {
            let is_late = since.elapsed() > Duration::from_millis(PATIENCE_MS);
            assert!(!is_late && self.child.try_wait().unwrap().is_none(), "no calls any more:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn await_end(&mut self) -> std::process::ExitStatus {
        let since = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(since.elapsed() < Duration::from_millis(PATIENCE_MS), "it does not end:\n{}", self.text());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long after the last message the end was noticed.
fn took_ms(line: &str) -> u64 {
    line.split_once(' ').unwrap().1.parse().unwrap()
}

fn server_is_killed(coherence: Option<&'static str>, machine: u8, within_ms: u64) {
    let mut field = Field::new(coherence);
    let mut server = field.start("serve", ONE);
    server.await_lines(&["listening"], 1);
    let mut caller = field.start("call", machine);
    caller.await_lines(&["connected"], 1);
    caller.await_calls(500);
    server.kill();
    let noticed = took_ms(&caller.await_lines(&["gone", "closed"], 1));
    assert!(noticed <= within_ms, "noticed after {noticed} ms");
    // The next one takes the name over.
    let mut server = field.start("serve", ONE);
    server.await_lines(&["listening"], 1);
    caller.await_lines(&["connected"], 2);
    caller.await_calls(500);
    field.end([caller, server]);
}

#[test]
fn a_killed_server_is_noticed_on_another_host() {
    server_is_killed(None, TWO, noticed_ms());
}

#[test]
fn a_killed_server_is_noticed_on_its_own_host_at_once() {
    server_is_killed(None, ONE, seen_ms());
}

#[test]
fn a_killed_server_is_noticed_without_coherence() {
    server_is_killed(Some("emulated:seed=3,noise=4"), TWO, noticed_ms());
}

fn caller_is_killed(coherence: Option<&'static str>) {
    let mut field = Field::new(coherence);
    let mut server = field.start("serve", ONE);
    server.await_lines(&["listening"], 1);
    for round in 1..=3 {
        let mut caller = field.start("call", TWO);
        caller.await_calls(300);
        caller.kill();
        let noticed = took_ms(&server.await_lines(&["gone", "closed"], round));
        assert!(noticed <= noticed_ms(), "noticed after {noticed} ms");
    }
    let mut caller = field.start("call", TWO);
    caller.await_calls(500);
    field.end([caller, server]);
}

#[test]
fn a_killed_caller_is_noticed_and_another_one_served() {
    caller_is_killed(None);
}

#[test]
fn a_killed_caller_is_noticed_without_coherence() {
    caller_is_killed(Some("emulated:seed=5,noise=4"));
}

fn stopped_and_continued(coherence: Option<&'static str>) {
    let mut field = Field::new(coherence);
    let mut server = field.start("serve", ONE);
    server.await_lines(&["listening"], 1);
    let mut caller = field.start("call", TWO);
    caller.await_calls(300);
    // For a moment: no process notices.
    server.signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(peer_timeout_ms() / 6));
    server.signal(libc::SIGCONT);
    caller.await_calls(300);
    assert!(!caller.text().contains("gone"), "{}", caller.text());
    // For too long: the other end gives up, and the one that goes on meets a closed connection, whichever it is.
    for round in 1..=2 {
        let (stopped, other) = if round == 1 { (&mut server, &mut caller) } else { (&mut caller, &mut server) };
        stopped.signal(libc::SIGSTOP);
        other.await_lines(&["gone", "closed"], round);
        stopped.signal(libc::SIGCONT);
        stopped.await_lines(&["gone", "closed"], round);
        caller.await_calls(300);
    }
    field.end([caller, server]);
}

#[test]
fn a_stopped_process_goes_on_or_is_given_up() {
    stopped_and_continued(None);
}

#[test]
fn a_stopped_process_goes_on_or_is_given_up_without_coherence() {
    stopped_and_continued(Some("emulated:seed=7,noise=4"));
}
