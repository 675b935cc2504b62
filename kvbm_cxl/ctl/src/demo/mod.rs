// SPDX-License-Identifier: Apache-2.0
//! `cxlctl demo`: two processes as two hosts on one pool. One publishes blocks, the other finds them by name and verifies every byte; then
//! both raise one counter under a lock that goes back and forth.

mod blocks;
mod child;
pub mod host;

use crate::cli::DemoArgs;
use crate::format;
use crate::output::{Exit, Failure, Out};
use crate::text::bytes;
use child::Child;
use cxl_pool::device::PoolSpec;
use cxl_pool::machine::random_bytes;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{FormatOptions, Pool};
use host::{Order, Reply};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause between two rounds.
const PAUSE: Duration = Duration::from_millis(500);

/// `cxlctl demo`.
pub fn run(pool: Option<&str>, args: &DemoArgs, out: &mut Out) -> Result<Exit, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        // The first one ends the round; a second one, if that hangs, the process.
        signal_hook::flag::register_conditional_shutdown(signal, Exit::Failed as i32, stop.clone())
            .and_then(|_| signal_hook::flag::register(signal, stop.clone()))
            .map_err(|error| Failure::new(Exit::Failed, format!("cannot handle signals: {error}")))?;
    }
    let once = args.once || std::env::var("ONCE").is_ok_and(|value| value == "1");
    let machines = [MachineId(random_bytes()?), MachineId(random_bytes()?)];
    let stage = Stage::set(pool, args, machines[0])?;
    if !out.is_json() {
        out.line(format!("pool {} ({})", stage.spec, bytes(stage.len_bytes)))?;
        out.flush()?;
    }
    let mut hosts = stage.start(args, &machines)?;
    let names = ["publisher", "reader"];
    for (host, name) in hosts.iter_mut().zip(names) {
        let Reply::Joined { slot, incarnation } = host.receive()? else { return Err(host.confused()) };
        if !out.is_json() {
            out.line(format!("{name}: process {} joined as slot {slot}, incarnation {incarnation}", host.pid()))?;
            out.flush()?;
        }
    }
    // Both have it mapped: from here on nothing is left behind, however this ends.
    stage.forget_file();
    let copy_rate = copy_rate();
    let Reply::Prepared { lock } = hosts[0].ask(Order::Prepare)? else { return Err(hosts[0].confused()) };
    let mut round = 0;
    let mut counted = 0;
    loop {
        round += 1;
        let figures = play(&mut hosts, round, lock, args.turns)?;
        counted += 2 * u64::from(args.turns);
        if figures.total != counted {
            let message = format!("counts were lost: {} of {counted}, so the lock let both hosts in at once", figures.total);
            return Err(Failure::new(Exit::Failed, message));
        }
        out.text(figures.tell(out.is_json(), round, copy_rate))?;
        out.flush()?;
        if once || out.is_closed() || stopped_within(&stop, PAUSE) {
            break;
        }
    }
    // The machine with the fixed seat goes last: until then there is a manager to give the other one its locks.
    for host in hosts.iter_mut().rev() {
        let Reply::Left = host.ask(Order::Leave)? else { return Err(host.confused()) };
    }
    for host in hosts {
        host.finish()?;
    }
    if !out.is_json() {
        let rounds = if round == 1 { "round" } else { "rounds" };
        out.line(format!("{round} {rounds}, every byte verified; both hosts left the pool"))?;
    }
    Ok(Exit::Done)
}

fn stopped_within(stop: &AtomicBool, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while !stop.load(Ordering::Relaxed) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    stop.load(Ordering::Relaxed)
}

/// The pool and the directories of the two machines; all of it goes away with this, except a pool that the user named.
struct Stage {
    spec: String,
    len_bytes: u64,
    file: Option<PathBuf>,
    states: tempfile::TempDir,
}

impl Stage {
    fn set(pool: Option<&str>, args: &DemoArgs, first: MachineId) -> Result<Stage, Failure> {
        let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("making a temporary directory: {error}"));
        let states = tempfile::Builder::new().prefix("cxlctl-demo-").tempdir().map_err(failed)?;
        // Blocks are rounded up to a size class by at most half; and there is the metadata.
        let needed = u64::from(args.blocks).saturating_mul(args.block).saturating_mul(2).saturating_add(48 << 20);
        let (spec, file) = match pool {
            Some(text) => (text.to_owned(), None),
            None => {
                let name = format!("/dev/shm/cxlctl-demo-{}-{:08x}", std::process::id(), u32::from_le_bytes(random_bytes()?));
                (format!("{name},size={}", needed.next_multiple_of(2 << 20)), Some(PathBuf::from(name)))
            }
        };
        let mut stage = Stage { spec, len_bytes: 0, file, states };
        let parsed = PoolSpec::parse(&stage.spec).map_err(|error| Failure::usage(error.to_string()))?;
        if !args.force {
            format::refuse_if_used(&parsed, "demo")?;
        }
        let options = FormatOptions { machine: Some(first), force: args.force, ..FormatOptions::default() };
        let pool = Pool::format(&parsed, &options).map_err(format::failed)?;
        stage.len_bytes = pool.layout().geometry().len_bytes;
        Ok(stage)
    }

    fn start(&self, args: &DemoArgs, machines: &[MachineId; 2]) -> Result<[Child; 2], Failure> {
        let start = |number: usize| {
            let state = self.states.path().join(format!("host-{number}"));
            Child::start(&self.spec, args, machines[number], &state)
        };
        Ok([start(0)?, start(1)?])
    }

    /// Removes the pool's file; a process that has it mapped keeps it.
    fn forget_file(&self) {
        if let Some(file) = &self.file {
            // It may be gone already; there is nothing else to be done about a failure.
            let _ = std::fs::remove_file(file);
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.forget_file();
    }
}

/// What a round came to.
struct Figures {
    blocks: u64,
    bytes: u64,
    publish_ns: u64,
    pull_ns: u64,
    total: u64,
    handed_over: u64,
    count_ns: u64,
    turns: u64,
}

fn play(hosts: &mut [Child; 2], round: u64, lock: u32, turns: u32) -> Result<Figures, Failure> {
    let Reply::Moved { blocks, bytes, ns: publish_ns } = hosts[0].ask(Order::Publish { round })? else { return Err(hosts[0].confused()) };
    let Reply::Moved { blocks: found, bytes: verified, ns: pull_ns } = hosts[1].ask(Order::Pull { round })? else {
        return Err(hosts[1].confused());
    };
    if (found, verified) != (blocks, bytes) {
        let message = format!("{found} blocks with {verified} bytes were found, {blocks} with {bytes} were published");
        return Err(Failure::new(Exit::Failed, message));
    }
    let Reply::Counted { handed_over: before, .. } = hosts[0].ask(Order::Total { lock })? else { return Err(hosts[0].confused()) };
    let begun = Instant::now();
    for host in hosts.iter_mut() {
        host.send(Order::Count { lock, turns })?;
    }
    for host in hosts.iter_mut() {
        let Reply::Counted { .. } = host.receive()? else { return Err(host.confused()) };
    }
    let count_ns = begun.elapsed().as_nanos() as u64;
    let Reply::Counted { total, handed_over } = hosts[1].ask(Order::Total { lock })? else { return Err(hosts[1].confused()) };
    let handed_over = handed_over - before.min(handed_over);
    Ok(Figures { blocks, bytes, publish_ns, pull_ns, total, handed_over, count_ns, turns: 2 * u64::from(turns) })
}

/// Bytes and nanoseconds as GB/s (10^9).
fn rate(bytes: u64, ns: u64) -> f64 {
    bytes as f64 / ns.max(1) as f64
}

impl Figures {
    fn tell(&self, is_json: bool, round: u64, copy_rate: f64) -> String {
        let (publish, pull) = (rate(self.bytes, self.publish_ns), rate(self.bytes, self.pull_ns));
        if is_json {
            let value = json!({"round": round, "blocks": self.blocks, "bytes": self.bytes, "verified": true,
                "publish_gb_per_s": publish, "pull_gb_per_s": pull, "memcpy_gb_per_s": copy_rate,
                "lock_turns": self.turns, "lock_handed_over": self.handed_over, "lock_ns": self.count_ns});
            return format!("{value}\n");
        }
        format!(
            "round {round}: {} blocks, {}, every byte verified; publish {publish:.2} GB/s, pull {pull:.2} GB/s \
             (memcpy {copy_rate:.2} GB/s); lock: {} turns, handed over {} times, {:.1} ms\n",
            self.blocks,
            bytes(self.bytes),
            self.turns,
            self.handed_over,
            self.count_ns as f64 / 1e6,
        )
    }
}

/// What this machine's memory copies, for comparison: the best of a few rounds of 32 MiB, in GB/s.
fn copy_rate() -> f64 {
    let source = vec![1u8; 32 << 20];
    let mut destination = vec![0u8; 32 << 20];
    let once = |_| {
        let begun = Instant::now();
        destination.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&mut destination);
        rate(source.len() as u64, begun.elapsed().as_nanos() as u64)
    };
    (0..4).map(once).fold(0.0, f64::max)
}
