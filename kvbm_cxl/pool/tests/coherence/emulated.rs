// SPDX-License-Identifier: Apache-2.0
//! Two emulated hosts, each a process of its own, over one file: what is forgotten in a protocol shows, the right protocol passes.

use crate::support::{BAD_ROLE, MIB, child, map_files, map_new, pattern};
use cxl_pool::coherence::*;
use cxl_pool::line::Line;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POOL_BYTES: u64 = MIB;
const FLAG: u64 = 0;
const ANSWER: u64 = 64;
const SHARED_LINE: u64 = 128;
const DONE: [u64; 2] = [512, 576];
const COUNTER: u64 = 640;
const DATA: u64 = 4096;
const DATA_BYTES: usize = 4096;
/// Rounds of a right protocol; a planted bug ends its run when it shows, so it may try for longer.
const ROUNDS: u64 = 40;
const ROUNDS_WITH_BUG: u64 = 4000;
const COUNTS: u64 = 3000;
const MEET_AFTER: u64 = 50;

/// How long a host waits for the other before it says so: long where all is well, short where a bug makes the wait vain.
const PATIENCE: Duration = Duration::from_secs(240);
const IMPATIENCE: Duration = Duration::from_secs(3);
/// How long a buggy host is paused where the bug can show.
const PAUSE: Duration = Duration::from_millis(20);

const WRONG_DATA: i32 = 5;
const NO_ANSWER: i32 = 6;
const LOST_COUNTS: i32 = 7;

/// One emulated host, used as C++ and Python use it: plain loads and stores at addresses, and the hooks.
struct Host {
    memory: Arc<dyn Coherence>,
}

impl Host {
    fn word(&self, offset: u64) -> *mut u64 {
        self.memory.address(offset, 8).unwrap().as_ptr().cast()
    }

    fn load(&self, offset: u64) -> u64 {
        // SAFETY: an aligned word of the view.
        unsafe { self.word(offset).read_volatile() }
    }

    fn store(&self, offset: u64, value: u64) {
        // SAFETY: as above.
        unsafe { self.word(offset).write_volatile(value) }
    }

    fn flush(&self, offset: u64, len_bytes: usize) {
        self.memory.flush_range(offset, len_bytes as u64).unwrap();
        self.memory.fence_all();
    }

    fn wait(&self, offset: u64, value: u64, fetch: bool, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.load(offset) != value {
            if fetch {
                self.flush(offset, 8);
            } else {
                std::thread::yield_now();
            }
            if Instant::now() > deadline {
                return false;
            }
        }
        true
    }
}

/// What a host does in a child process: `path noise side bug`.
pub fn host(scenario: &str) -> i32 {
    let [path, noise, side, bug] = scenario.splitn(4, ' ').collect::<Vec<_>>()[..] else { return BAD_ROLE };
    let file = File::options().read(true).write(true).open(path).unwrap();
    let text = format!("emulated:seed={}{},noise={noise}", if side == "writer" { 1 } else { 2 }, std::process::id());
    let pool = over_mapping(map_files(&[&file], POOL_BYTES, POOL_BYTES), &text.parse().unwrap()).unwrap();
    let host = Host { memory: pool.memory };
    match (side, bug) {
        (_, "false sharing" | "separate lines") => share_a_line(&host, side == "writer", bug == "false sharing"),
        (_, "cross-host atomics") => count_together(&host, side == "writer"),
        ("writer", _) => write_rounds(&host, bug),
        ("reader", _) => read_rounds(&host, bug),
        _ => BAD_ROLE,
    }
}

fn patience(bug: &str) -> Duration {
    if bug.starts_with("none") { PATIENCE } else { IMPATIENCE }
}

fn rounds(bug: &str) -> std::ops::RangeInclusive<u64> {
    if bug.starts_with("none") { 1..=ROUNDS } else { 1..=ROUNDS_WITH_BUG }
}

fn round_data(round: u64) -> Vec<u8> {
    pattern(round, DATA_BYTES)
}

fn flag_line(round: u64) -> Line {
    let mut line = Line::ZERO;
    line.0[..8].copy_from_slice(&round.to_le_bytes());
    line
}

fn write_rounds(host: &Host, bug: &str) -> i32 {
    let by_hooks = bug.contains("hooks") || bug == "no store fence";
    let publish_flag = |round| {
        host.store(FLAG, round);
        if bug != "no flush of the flag" {
            host.flush(FLAG, 8);
        }
    };
    for round in rounds(bug) {
        let data = round_data(round);
        if by_hooks {
            host.memory.copy_in(DATA, &data).unwrap();
            if bug != "no store fence" {
                host.memory.fence_stores();
            }
            host.memory.write_line(FLAG, &flag_line(round)).unwrap();
            host.memory.fence_stores();
        } else {
            if bug == "flag before data" {
                publish_flag(round);
                host.wait(ANSWER, round, true, PAUSE);
            }
            for (index, word) in data.chunks_exact(8).enumerate() {
                host.store(DATA + index as u64 * 8, u64::from_le_bytes(word.try_into().unwrap()));
            }
            if bug != "no flush of the data" {
                host.flush(DATA, DATA_BYTES);
            }
            if bug != "flag before data" {
                publish_flag(round);
            }
        }
        if !host.wait(ANSWER, round, true, patience(bug)) {
            return NO_ANSWER;
        }
    }
    0
}

fn read_rounds(host: &Host, bug: &str) -> i32 {
    for round in rounds(bug) {
        if !host.wait(FLAG, round, bug != "no fetch in the poll", patience(bug)) {
            return NO_ANSWER;
        }
        match bug {
            "no fetch of the data" => {}
            "no full fence" => host.memory.flush_range(DATA, DATA_BYTES as u64).unwrap(),
            "store fence for full fence" => {
                host.memory.flush_range(DATA, DATA_BYTES as u64).unwrap();
                host.memory.fence_stores();
            }
            _ => host.flush(DATA, DATA_BYTES),
        }
        let mut data = vec![0; DATA_BYTES];
        host.memory.copy_out(DATA, &mut data).unwrap();
        if data != round_data(round) {
            return WRONG_DATA;
        }
        host.store(ANSWER, round);
        host.flush(ANSWER, 8);
    }
    0
}

/// Each host counts in a word of its own: in one line, or in a line each.
fn share_a_line(host: &Host, first: bool, one_line: bool) -> i32 {
    let distance = if one_line { 8 } else { 64 };
    let own = SHARED_LINE + if first { 0 } else { distance };
    for count in 0..COUNTS {
        // Together again and again, lest one host be through before the other has begun.
        if count % MEET_AFTER == 0 && !meet(host, first, 1 + count / MEET_AFTER) {
            return NO_ANSWER;
        }
        host.store(own, host.load(own) + 1);
        std::thread::yield_now();
        host.flush(own, 8);
    }
    if !meet(host, first, 1 + COUNTS / MEET_AFTER) {
        return NO_ANSWER;
    }
    host.flush(own, 8);
    if host.load(own) == COUNTS { 0 } else { LOST_COUNTS }
}

/// Both hosts add to one word, atomically as they believe.
fn count_together(host: &Host, first: bool) -> i32 {
    for count in 0..COUNTS {
        // Together again and again, lest one host be through before the other has begun.
        if count % MEET_AFTER == 0 && !meet(host, first, 1 + count / MEET_AFTER) {
            return NO_ANSWER;
        }
        host.flush(COUNTER, 8);
        // SAFETY: an aligned word of the view.
        unsafe { AtomicU64::from_ptr(host.word(COUNTER)) }.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
        host.flush(COUNTER, 8);
    }
    if !meet(host, first, 1 + COUNTS / MEET_AFTER) {
        return NO_ANSWER;
    }
    host.flush(COUNTER, 8);
    if host.load(COUNTER) == 2 * COUNTS { 0 } else { LOST_COUNTS }
}

/// Waits until the other host is as far as this one.
fn meet(host: &Host, first: bool, stage: u64) -> bool {
    let (own, other) = if first { (DONE[0], DONE[1]) } else { (DONE[1], DONE[0]) };
    host.store(own, stage);
    host.flush(own, 8);
    let deadline = Instant::now() + PATIENCE;
    while host.load(other) < stage {
        host.flush(other, 8);
        if Instant::now() > deadline {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Runs both hosts until both have ended or one has noticed something; their exit codes, if they have one.
fn run(bug: &str, noise: u32) -> [Option<i32>; 2] {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(POOL_BYTES).unwrap();
    let path = file.path().to_str().unwrap();
    let mut hosts = ["writer", "reader"].map(|side| child(&format!("emulated {path} {noise} {side} {bug}")).spawn().unwrap());
    let deadline = Instant::now() + 2 * PATIENCE;
    loop {
        let codes = hosts.each_mut().map(|host| host.try_wait().unwrap().map(|status| status.code().unwrap_or(-1)));
        let decided = codes.iter().all(Option::is_some) || codes.iter().flatten().any(|code| *code != 0);
        if decided || Instant::now() > deadline {
            for host in &mut hosts {
                let _ = host.kill();
                host.wait().unwrap();
            }
            return codes;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn detected(bug: &str, by: i32) {
    for noise in [0, 4] {
        let codes = run(bug, noise);
        assert!(codes.contains(&Some(by)), "{bug} with noise {noise} was not noticed: {codes:?}");
    }
}

#[test]
fn right_protocols_pass() {
    for noise in [0, 1, 4, 64] {
        for protocol in ["none", "none, by hooks", "separate lines"] {
            assert_eq!(run(protocol, noise), [Some(0); 2], "{protocol} with noise {noise}");
        }
    }
}

#[test]
fn data_that_is_not_flushed_is_missed() {
    detected("no flush of the data", WRONG_DATA);
}

#[test]
fn a_flag_that_is_not_flushed_is_missed() {
    // Noise may write the flag back for the forgetful, so only the quiet host is sure to stall.
    assert!(run("no flush of the flag", 0).contains(&Some(NO_ANSWER)));
}

#[test]
fn data_that_is_not_fetched_is_stale() {
    detected("no fetch of the data", WRONG_DATA);
}

#[test]
fn a_poll_without_fetch_stalls() {
    detected("no fetch in the poll", NO_ANSWER);
}

#[test]
fn a_flag_before_its_data_is_noticed() {
    detected("flag before data", WRONG_DATA);
}

#[test]
fn a_lost_store_fence_is_noticed() {
    detected("no store fence", WRONG_DATA);
}

#[test]
fn a_lost_full_fence_is_noticed() {
    detected("no full fence", WRONG_DATA);
    detected("store fence for full fence", WRONG_DATA);
}

#[test]
fn false_sharing_is_noticed() {
    detected("false sharing", LOST_COUNTS);
}

#[test]
fn atomics_between_hosts_are_lost() {
    detected("cross-host atomics", LOST_COUNTS);
}

/// Two hosts in one process, without noise: single steps with known outcomes.
fn two_hosts() -> [Emulated; 2] {
    let mapping = map_new(MIB);
    let again = Mapping { devices: mapping.devices.clone(), segments: mapping.segments.clone(), owner: mapping.owner.clone(), ..mapping };
    let quiet = EmulatorOptions { noise: 0, ..EmulatorOptions::default() };
    [mapping, again].map(|mapping| Emulated::new(Arc::new(FaultMap::new(mapping).unwrap()), quiet).unwrap())
}

fn fetch(host: &Emulated, offset: u64) -> Line {
    host.flush_line(offset).unwrap();
    host.fence_all();
    host.load_line(offset).unwrap()
}

#[test]
fn steps_take_effect_at_their_fence_and_not_before() {
    let [writer, reader] = two_hosts();
    let line = Line([7; 64]);
    writer.write_line(64, &line).unwrap();
    assert_eq!(writer.load_line(64).unwrap(), line, "a host sees its own writes");
    assert_eq!(fetch(&reader, 64), Line::ZERO, "a write without a fence is not visible to others yet");
    writer.fence_loads();
    assert_eq!(fetch(&reader, 64), Line::ZERO, "a load fence is no store fence");
    writer.fence_stores();
    assert_eq!(reader.load_line(64).unwrap(), Line::ZERO, "what was loaded stays");
    reader.flush_line(64).unwrap();
    assert_eq!(reader.load_line(64).unwrap(), Line::ZERO, "a load passes a flush");
    reader.fence_stores();
    assert_eq!(reader.load_line(64).unwrap(), Line::ZERO, "and a store fence");
    reader.fence_all();
    assert_eq!(reader.load_line(64).unwrap(), line);
}

#[test]
fn a_flush_of_dirty_bytes_reaches_the_memory_at_a_store_fence() {
    let [writer, reader] = two_hosts();
    // SAFETY: inside the view.
    unsafe { writer.address(130, 1).unwrap().as_ptr().write_volatile(9) };
    assert_eq!(fetch(&reader, 128), Line::ZERO);
    writer.flush_line(128).unwrap();
    assert_eq!(fetch(&reader, 128), Line::ZERO);
    writer.fence_stores();
    assert_eq!(fetch(&reader, 128).0[2], 9);
}

#[test]
fn parts_of_lines_keep_what_others_wrote_to_the_rest() {
    let [first, second] = two_hosts();
    let bytes = pattern(5, 300);
    first.copy_in(1000, &bytes).unwrap();
    first.fence_stores();
    second.copy_in(1000 - 10, &[1; 10]).unwrap();
    second.copy_in(1300, &[2; 10]).unwrap();
    second.fence_stores();
    let mut read = vec![0; 320];
    first.flush_range(990, 320).unwrap();
    first.fence_all();
    first.copy_out(990, &mut read).unwrap();
    assert!(read == [&[1; 10][..], &bytes, &[2; 10]].concat());
}

#[test]
fn many_unfenced_writes_stay_bounded_and_all_arrive() {
    let [writer, reader] = two_hosts();
    let bytes = pattern(6, MIB as usize);
    writer.copy_in(0, &bytes).unwrap();
    drop(writer);
    let mut read = vec![0; MIB as usize];
    reader.flush_range(0, MIB).unwrap();
    reader.fence_all();
    reader.copy_out(0, &mut read).unwrap();
    assert!(read == bytes);
}

#[test]
fn threads_of_one_host_see_each_other() {
    const THREADS: u64 = 4;
    const ADDITIONS: u64 = 20_000;
    let noisy = EmulatorOptions { noise: 2, ..EmulatorOptions::default() };
    let host = Emulated::new(Arc::new(FaultMap::new(map_new(MIB)).unwrap()), noisy).unwrap();
    let word = host.address(64, 8).unwrap().as_ptr() as usize;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for round in 0..ADDITIONS {
                    // SAFETY: an aligned word of the view.
                    unsafe { AtomicU64::from_ptr(word as *mut u64) }.fetch_add(1, Ordering::SeqCst);
                    if round % 8 == 0 {
                        host.flush_line(64).unwrap();
                        host.fence_all();
                    }
                }
            });
        }
    });
    // SAFETY: as above.
    assert_eq!(unsafe { AtomicU64::from_ptr(word as *mut u64) }.load(Ordering::SeqCst), THREADS * ADDITIONS);
}

#[test]
fn a_store_during_the_refill_of_its_line_is_kept() {
    const ROUNDS: u64 = 20_000;
    let mapping = map_new(MIB);
    let memory = mapping.base.as_ptr() as usize;
    let quiet = EmulatorOptions { noise: 0, ..EmulatorOptions::default() };
    let host = Emulated::new(Arc::new(FaultMap::new(mapping).unwrap()), quiet).unwrap();
    let view = host.address(0, 8).unwrap().as_ptr() as usize;
    let (begun, stored) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut lost = 0;
    let until = |counter: &AtomicU64, value: u64| {
        let mut spins = 0u64;
        while counter.load(Ordering::Acquire) < value {
            spins += 1;
            if spins.is_multiple_of(2000) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                until(&begun, round);
                // A little later each time, so that the store meets every moment of the flush and the refill.
                (0..round % 128).for_each(|_| std::hint::spin_loop());
                // SAFETY: the first word of the view, which only this thread stores to.
                unsafe { (view as *mut u64).write_volatile(round * 2 + 1) };
                stored.store(round, Ordering::Release);
            }
        });
        for round in 1..=ROUNDS {
            // SAFETY: the first word of the pool, written by the host that owned the line before; the same below.
            unsafe { (memory as *mut u64).write_volatile(round * 2) };
            begun.store(round, Ordering::Release);
            (0..64).for_each(|_| std::hint::spin_loop());
            host.flush_line(0).unwrap();
            host.fence_all();
            until(&stored, round);
            host.flush_line(0).unwrap();
            host.fence_all();
            // SAFETY: as above.
            lost += u64::from(unsafe { (memory as *mut u64).read_volatile() } != round * 2 + 1);
        }
    });
    assert_eq!(lost, 0, "stores of {ROUNDS}");
}

#[test]
fn a_view_holds_the_pool_as_it_was_when_opened_up_to_its_limit() {
    let mapping = map_new(2 * MIB);
    let base = mapping.base.as_ptr();
    // SAFETY: inside the mapping.
    unsafe {
        base.add(100).write_volatile(3);
        base.add(MIB as usize + 100).write_volatile(4);
    }
    let options = EmulatorOptions { noise: 0, copy_mib: 1, ..EmulatorOptions::default() };
    let host = Emulated::new(Arc::new(FaultMap::new(mapping).unwrap()), options).unwrap();
    assert_eq!(host.load_line(64).unwrap().0[36], 3);
    assert_eq!(host.load_line(MIB + 64).unwrap().0[36], 0);
    assert_eq!(fetch(&host, MIB + 64).0[36], 4);
}

#[test]
fn stores_in_place_arrive_also_where_they_are_what_the_host_saw_before() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(POOL_BYTES).unwrap();
    let hosts = [1, 2].map(|seed| {
        let options = format!("emulated:seed={seed},noise=0").parse().unwrap();
        Host { memory: over_mapping(map_files(&[&file], POOL_BYTES, POOL_BYTES), &options).unwrap().memory }
    });
    let [first, second] = &hosts;
    // The first host's view is of before: it holds zeros.
    second.memory.copy_in(DATA, &[7; 256]).unwrap();
    second.memory.fence_all();
    let at = first.memory.address_for_stores(DATA, 129).unwrap();
    // SAFETY: the range is in the first host's view, and no other thread uses it.
    unsafe { at.as_ptr().write_bytes(0, 129) };
    first.flush(DATA, 129);
    let mut seen = [0; 256];
    second.flush(DATA, 256);
    second.memory.copy_out(DATA, &mut seen).unwrap();
    assert_eq!((&seen[..129], &seen[129..]), (&[0; 129][..], &[7; 127][..]));
}
