// SPDX-License-Identifier: Apache-2.0
//! Processes of their own: what they are told to do, and how their parent hears of it.

use crate::bench::*;
use crate::instance;
use cxl_tier::{Outcome, Ranks, Tier, TierConfig};
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::rc::Rc;

/// What the child does; only set for children.
const TASK: &str = "TIER_CHILD_TASK";
/// Begins the line of the child's output that is its report.
const REPORT: &str = "report: ";

/// Does the task and then nothing until its standard input ends, if this process is a child.
pub fn run_if_child() {
    let Ok(task) = std::env::var(TASK) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let number = |place: usize| words[place].parse::<u64>().unwrap();
    let report = |text: String| {
        println!("\n{REPORT}{text}");
        std::io::stdout().flush().unwrap();
    };
    let tier = Tier::open(&TierConfig::from_env().unwrap()).unwrap();
    match words[0] {
        // prefill BLOCKS LIES RANKS [HOLE]: the block at HOLE is evicted again, of the last rank alone.
        "prefill" => {
            let offloaded = instance::prefill(&tier, number(1) as usize, number(2), number(3) as u32);
            if words.len() > 4 {
                let (ranks, hole) = (number(3) as u32, instance::hashes(number(1) as usize)[number(4) as usize]);
                let namespace = instance::namespace_of(ranks - 1, ranks);
                assert!(tier.cache().evict(namespace, cxl_tier::keys::key_of(hole).unwrap()).unwrap());
            }
            report(offloaded);
        }
        "decode" => report(instance::decode(&tier, number(1) as usize, number(2), number(3) as u32)),
        // put SEED COUNT: stores blocks, and reports the points that it passes.
        // put SEED COUNT POINT TIMES: dies when it has passed the point so often, or reports what became of each block.
        // stand SEED COUNT POINT TIMES: reports that it has come to the point, and stands still there.
        "put" | "stand" => {
            let blocks = tier.blocks(&model(), shape(), Ranks::ALONE).unwrap();
            let last = words.get(3).map(|&point| (point.to_owned(), number(4)));
            let passed = watch_points(last, words[0] == "stand");
            let outcomes = put(&blocks, &chain(number(2) as usize, number(1)), number(1));
            cxl_pool::fault::on_point(None);
            report(if words.len() > 3 { names_of(&outcomes) } else { passed.take().join(" ") });
        }
        // ask: for each line `get SEED COUNT` or `put SEED COUNT` a report of what became of each block.
        "ask" => {
            let blocks = tier.blocks(&model(), shape(), Ranks::ALONE).unwrap();
            report("joined".into());
            for line in std::io::stdin().lines() {
                let line = line.unwrap();
                let asked: Vec<&str> = line.split(' ').collect();
                let (seed, count) = (asked[1].parse().unwrap(), asked[2].parse().unwrap());
                let of = if asked[0] == "put" { put } else { get };
                report(names_of(&of(&blocks, &chain(count, seed), seed)));
            }
        }
        other => panic!("{other:?} is no task"),
    }
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    // Killed or not, it leaves without a word: what that does to others is what is tested.
    std::process::exit(0);
}

fn names_of(outcomes: &[Outcome]) -> String {
    outcomes.iter().map(|outcome| outcome.name()).collect::<Vec<_>>().join(" ")
}

/// Notes the points that this thread passes. Where it has passed one of them often enough it stands still, or kills this process.
fn watch_points(last: Option<(String, u64)>, stands: bool) -> Rc<RefCell<Vec<&'static str>>> {
    let passed = Rc::new(RefCell::new(Vec::new()));
    let noted = passed.clone();
    cxl_pool::fault::on_point(Some(Rc::new(move |point| {
        let mut noted = noted.borrow_mut();
        noted.push(point);
        let times = noted.iter().filter(|&&before| before == point).count() as u64;
        if last.as_ref().is_some_and(|(name, most)| name == point && *most == times) {
            if stands {
                println!("\n{REPORT}stands");
                loop {
                    std::thread::park();
                }
            }
            // SAFETY: plain system calls. Nothing of this process runs afterwards.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        }
    })));
    passed
}

/// A child, which is killed when this is dropped.
pub struct Process {
    child: Child,
    _stdin: ChildStdin,
}

impl Process {
    /// Starts a child of machine `machine`, and waits for its report, or for its end: `None`.
    pub fn run(bench: &Bench, machine: u8, coherence: &str, task: &str) -> (Process, Option<String>) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(TASK, task)
            .env("DYN_KVBM_CXL_POOL", bench.spec.to_string())
            .env("DYN_KVBM_CXL_CHECKSUMS", "on")
            .env("CXL_STATE_DIR", bench.state_directory())
            .env("CXL_MACHINE_ID", machine_id(machine).to_string())
            .env("CXL_COHERENCE", coherence)
            // A process that gets no processor for a second is not dead.
            .env("CXL_SUSPECT_MS", "10000")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let report = lines.find_map(|line| line.unwrap().strip_prefix(REPORT).map(str::to_owned));
        // The rest is read, so that the child never waits for its reader.
        std::thread::spawn(move || lines.for_each(drop));
        (Process { child, _stdin: stdin }, report)
    }

    /// How it ended, if it did by itself.
    pub fn was_killed(&mut self) -> bool {
        use std::os::unix::process::ExitStatusExt;
        self.child.wait().unwrap().signal() == Some(libc::SIGKILL)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
