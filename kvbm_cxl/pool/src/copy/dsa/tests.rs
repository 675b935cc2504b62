// SPDX-License-Identifier: Apache-2.0
//! The engine over a stand-in that executes descriptors as the specification says, and fails in every way that it names.

use super::*;
use crate::coherence::{CoherenceOptions, over_mapping};
use crate::copy::{CopyConfig, checksum_of};
use crate::device::{Access, Device, Sysfs, map_part};
use bytemuck::Zeroable;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const POOL_BYTES: u64 = 4 << 20;
const BATCH: u32 = 1;
const MOVE: u32 = 3;

/// How the stand-in behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Willing,
    /// Every n-th move meets a page that is not there, half way.
    Faulting(usize),
    /// Never has room.
    Full,
    /// Does nothing until it is closed.
    Late,
    /// Does nothing at all.
    Dead,
}

/// Moves and batches executed.
#[derive(Default)]
struct Seen {
    moves: AtomicUsize,
    batches: AtomicUsize,
    bytes: AtomicU64,
    is_cached: AtomicUsize,
}

struct StandIn {
    mood: Mood,
    limits: Limits,
    seen: Arc<Seen>,
    waiting: Vec<Descriptor>,
}

fn answer(descriptor: &Descriptor, status: u8, done_bytes: u32, address: u64) {
    assert!(descriptor.flags_and_operation & 0b1100 == 0b1100, "an answer is asked for");
    let at = std::ptr::with_exposed_provenance::<AtomicU64>(descriptor.completion as usize);
    // SAFETY: the engine keeps the completion record until it has been written.
    unsafe {
        (*at.add(1)).store(address, Ordering::Relaxed);
        (*at).store(u64::from(status) | u64::from(done_bytes) << 32, Ordering::Release);
    }
}

impl StandIn {
    fn execute(&self, descriptor: &Descriptor) -> bool {
        assert!(descriptor.pasid == 0 && descriptor.reserved == 0 && descriptor.operation_specific == [0; 3]);
        assert_eq!(descriptor.completion % 32, 0);
        match descriptor.operation() {
            BATCH => {
                assert!((2..=self.limits.batch_len).contains(&descriptor.size) && descriptor.source.is_multiple_of(64));
                self.seen.batches.fetch_add(1, Ordering::Relaxed);
                let list = std::ptr::with_exposed_provenance::<Descriptor>(descriptor.source as usize);
                // SAFETY: the engine keeps the list until the batch is complete. All are executed, whatever becomes of the others.
                let done = (0..descriptor.size as usize).filter(|&index| self.execute(unsafe { &*list.add(index) })).count();
                let all = done == descriptor.size as usize;
                answer(descriptor, if all { 1 } else { 5 }, done as u32, 0);
                all
            }
            MOVE => {
                assert!(descriptor.size > 0 && descriptor.size <= self.limits.transfer_bytes);
                let number = self.seen.moves.fetch_add(1, Ordering::Relaxed);
                let faults = matches!(self.mood, Mood::Faulting(every) if number % every == every - 1);
                let len = if faults { descriptor.size / 2 } else { descriptor.size };
                self.seen.bytes.fetch_add(len.into(), Ordering::Relaxed);
                self.seen.is_cached.fetch_add((descriptor.flags_and_operation >> 8 & 1) as usize, Ordering::Relaxed);
                let from = std::ptr::with_exposed_provenance::<u8>(descriptor.source as usize);
                let to = std::ptr::with_exposed_provenance_mut::<u8>(descriptor.destination as usize);
                // SAFETY: the engine names memory that is there until the move is complete.
                unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) };
                answer(descriptor, if faults { 0x83 } else { 1 }, len, descriptor.destination + u64::from(len));
                !faults
            }
            other => panic!("operation {other}"),
        }
    }
}

// SAFETY: executes on the spot, or when dropped, or never.
unsafe impl WorkQueue for StandIn {
    fn submit(&mut self, descriptor: &Descriptor) -> bool {
        match self.mood {
            Mood::Full => return false,
            Mood::Late => self.waiting.push(*descriptor),
            Mood::Dead => {}
            Mood::Willing | Mood::Faulting(_) => drop(self.execute(descriptor)),
        }
        true
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        for descriptor in std::mem::take(&mut self.waiting) {
            self.execute(&descriptor);
        }
    }
}

fn engine(mood: Mood, limits: Limits) -> (DsaEngine, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let queue = StandIn { mood, limits, seen: seen.clone(), waiting: Vec::new() };
    (DsaEngine::over(Box::new(queue), CpuEngine::new(CopyConfig::alone()), 50), seen)
}

const LIMITS: Limits = Limits { transfer_bytes: 64 << 10, batch_len: 8, in_flight: 2, block_on_fault: true };

fn hosts(text: &str) -> [Arc<dyn Coherence>; 2] {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(POOL_BYTES).unwrap();
    let options: CoherenceOptions = text.parse().unwrap();
    let open = || {
        let device = Device::open(file.path(), Access::Write, &Sysfs::default()).unwrap();
        over_mapping(map_part(&device, 0, POOL_BYTES).unwrap(), &options).unwrap().memory
    };
    [open(), open()]
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| (((seed + 1) * 0x9e37_79b9 + index).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Lists of several sizes, none of them aligned, out and back.
fn there_and_back(engine: &DsaEngine, [writer, reader]: &[Arc<dyn Coherence>; 2], seed: u64) -> (Vec<Outcome>, Vec<Outcome>) {
    let sizes = [1_000_000usize, 100, 70_000, 4096, 4097 + 63];
    let bytes: Vec<Vec<u8>> = sizes.iter().zip(seed..).map(|(&len, seed)| pattern(seed, len)).collect();
    let offsets: Vec<u64> = (0..).map(|number| 37 + number * 1_000_100).take(3).chain([3 << 20, (3 << 20) + 40_000]).collect();
    // Two halves that do not adjoin in this process.
    let halves: Vec<(Vec<u8>, Vec<u8>)> = bytes.iter().map(|all| (all[..all.len() / 3].to_vec(), all[all.len() / 3..].to_vec())).collect();
    let lists: Vec<WriteList<'_>> =
        halves.iter().zip(&offsets).map(|((one, other), &offset)| WriteList::gather(offset, [&one[..], &other[..]])).collect();
    let written = engine.publish_each(&**writer, &lists, Checksum::Xxh3);
    let mut found: Vec<Vec<u8>> = sizes.iter().map(|&len| vec![0; len]).collect();
    let mut lists: Vec<ReadList<'_>> = found
        .iter_mut()
        .zip(&offsets)
        .map(|(found, &offset)| {
            let half = found.len() / 2 + 1;
            let (one, other) = found.split_at_mut(half);
            ReadList::scatter(offset, [one, other])
        })
        .collect();
    let read = engine.pull_each(&**reader, &mut lists, Checksum::Xxh3);
    for (number, ((written, read), bytes)) in written.iter().zip(&read).zip(&bytes).enumerate() {
        if let (Ok(written), Ok(read)) = (written, read) {
            assert_eq!((written, read), (&Some(checksum_of(bytes)), &Some(checksum_of(bytes))), "list {number}");
            assert!(found[number] == *bytes, "list {number}");
        }
    }
    (written, read)
}

fn all_well(outcomes: &(Vec<Outcome>, Vec<Outcome>)) -> bool {
    outcomes.0.iter().chain(&outcomes.1).all(Result::is_ok)
}

#[test]
fn the_device_moves_large_pieces_and_the_cpu_the_rest() {
    for text in ["native", "emulated:seed=2,noise=32"] {
        let hosts = hosts(text);
        for limits in
            [LIMITS, Limits { batch_len: 0, in_flight: 1, ..LIMITS }, Limits { batch_len: 1024, transfer_bytes: 1 << 30, ..LIMITS }]
        {
            let (engine, seen) = engine(Mood::Willing, limits);
            for seed in 0..4 {
                assert!(all_well(&there_and_back(&engine, &hosts, seed * 10)));
            }
            let [dsa, cpu] = engine.counters()[..] else { panic!("two engines") };
            assert_eq!((dsa.engine, cpu.engine, dsa.failed_lists, cpu.failed_lists), ("dsa", "cpu", 0, 0));
            assert_eq!(dsa.published_bytes + dsa.pulled_bytes, seen.bytes.load(Ordering::Relaxed));
            let total = 4 * (1_000_000 + 100 + 70_000 + 4096 + 4160);
            assert_eq!((dsa.published_bytes + cpu.published_bytes, dsa.pulled_bytes + cpu.pulled_bytes), (total, total));
            assert!(dsa.published_bytes > total * 9 / 10 && dsa.pulled_bytes > total * 9 / 10);
            assert_eq!(seen.batches.load(Ordering::Relaxed) > 0, limits.batch_len > 1);
            assert_eq!(seen.is_cached.load(Ordering::Relaxed), 0, "large copies stay out of the cache");
        }
    }
}

#[test]
fn small_pulls_are_to_stay_in_the_cache() {
    let [memory, _] = hosts("native");
    let (engine, seen) = engine(Mood::Willing, LIMITS);
    let mut found = vec![0; 40_000];
    engine.pull(&*memory, &mut ReadList::scatter(0, [&mut found[..]]), Checksum::Off).unwrap();
    assert_eq!((seen.moves.load(Ordering::Relaxed), seen.is_cached.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn whatever_the_device_does_not_do_the_cpu_does() {
    for mood in [Mood::Faulting(1), Mood::Faulting(3), Mood::Full, Mood::Late] {
        let hosts = hosts("native");
        let (engine, _) = engine(mood, LIMITS);
        for seed in 0..3 {
            assert!(all_well(&there_and_back(&engine, &hosts, seed * 10)), "{mood:?}");
        }
        let [dsa, cpu] = engine.counters()[..] else { panic!("two engines") };
        assert!(dsa.failed_lists > 0 && cpu.published_bytes > 0, "{mood:?}: {dsa:?} {cpu:?}");
        assert_eq!(engine.queue().is_some(), mood != Mood::Late, "a device that was late is not asked again");
    }
}

#[test]
fn a_device_that_is_never_done_is_an_error_and_no_copy() {
    let hosts = hosts("native");
    let (engine, _) = engine(Mood::Dead, LIMITS);
    let (written, read) = there_and_back(&engine, &hosts, 1);
    for outcome in [&written[0], &written[2]] {
        assert!(matches!(outcome, Err(Error::Timeout { timeout_ms: 50, .. })), "{outcome:?}");
    }
    assert!(!engine.is_settled(0), "it may still write");
    // Lists that the device had no part in are as well as ever, and so is everything afterwards.
    assert!(written[1].is_ok() && written[3].is_ok() && written[4].is_ok() && read.iter().all(Result::is_ok));
    assert!(all_well(&there_and_back(&engine, &hosts, 20)));
}

#[test]
fn bad_lists_never_reach_the_device() {
    let [memory, _] = hosts("native");
    let (engine, seen) = engine(Mood::Willing, LIMITS);
    let bytes = pattern(1, 100_000);
    for offset in [POOL_BYTES - 99_999, u64::MAX - 10] {
        assert!(matches!(engine.publish(&*memory, &WriteList::gather(offset, [&bytes[..]]), Checksum::Off), Err(Error::OutOfRange { .. })));
    }
    let mut list = WriteList::gather(0, [&bytes[..]]);
    list.push(50_000, &bytes);
    assert!(matches!(engine.publish(&*memory, &list, Checksum::Off), Err(Error::Invalid(_))));
    assert_eq!(seen.moves.load(Ordering::Relaxed), 0);
    assert_eq!(Descriptor::zeroed().operation(), 0);
}

#[test]
fn the_device_leaves_the_neighbours_in_a_line_alone() {
    let [writer, other] = hosts("emulated:seed=4,noise=0");
    let (engine, seen) = engine(Mood::Willing, LIMITS);
    let (bytes, beside) = (pattern(1, 100_000), pattern(2, 64));
    // The writer's cache still holds the lines as they were before.
    for (offset, len) in [(0, 37), (100_037, 20)] {
        other.copy_in(offset, &beside[..len]).unwrap();
        other.fence_stores();
    }
    engine.publish(&*writer, &WriteList::gather(37, [&bytes[..]]), Checksum::Off).unwrap();
    assert!(seen.moves.load(Ordering::Relaxed) > 0);
    let mut found = vec![0; 100_057];
    CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(0, [&mut found[..]]), Checksum::Off).unwrap();
    assert!(found[..37] == beside[..37] && found[37..100_037] == bytes && found[100_037..] == beside[..20]);
}
