// SPDX-License-Identifier: Apache-2.0
//! Flushes overlap the copies of other parts, by the clock of a fake driver whose copies take their time, and by memory whose flushes do.

use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::scenes::*;
use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{Checksum, CopyEngine, CudaConfig, CudaEngine};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

const PART_BYTES: usize = 512 << 10;
const PARTS: usize = 7;
/// A part takes 8 ms to copy, and 2 ms to flush by two threads.
const BYTES_PER_US: i32 = 64;
const FLUSH: Duration = Duration::from_millis(2);

/// What lay where in the pool, from when to when, in microseconds of the monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Span {
    offset: u64,
    start_us: u64,
    end_us: u64,
}

impl Span {
    fn part(&self) -> usize {
        self.offset as usize / PART_BYTES
    }

    fn overlaps(&self, other: &Span) -> bool {
        self.start_us < other.end_us && other.start_us < self.end_us
    }
}

fn now_us() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes to `now`.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) }, 0);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1_000
}

/// The copies of the driver, by addresses: to, from.
static COPIES: Mutex<Vec<(u64, u64, u64, u64)>> = Mutex::new(Vec::new());

extern "C" fn copied(to: u64, from: u64, _len_bytes: usize, start_us: u64, end_us: u64) {
    COPIES.lock().unwrap().push((to, from, start_us, end_us));
}

/// Memory whose flushes take their time.
struct Slow {
    memory: Arc<dyn Coherence>,
    flushes: Mutex<Vec<(Span, ThreadId)>>,
}

impl Coherence for Slow {
    cxl_pool::forward_coherence!(
        memory: len_bytes load_line write_line flush_line fence_stores fence_all fence_loads copy_in copy_out address
    );

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let start_us = now_us();
        std::thread::sleep(FLUSH);
        let flushed = self.memory.flush_range(offset, len_bytes);
        self.flushes.lock().unwrap().push((Span { offset, start_us, end_us: now_us() }, std::thread::current().id()));
        flushed
    }
}

/// How often a flush went while another part was copied, each way: of a publish and of a pull. The order of each part is as it must be.
fn overlaps(part_bytes: usize) -> [usize; 2] {
    let fake = Fake::new(Kind::Engine);
    fake.hook(copied);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let base = host.address(0, 1).unwrap().as_ptr().expose_provenance() as u64;
    let host = Arc::new(Slow { memory: host, flushes: Mutex::default() });
    let config = CudaConfig { part_bytes, threads: 4, granule_bytes: 4 << 20, timeout_ms: 120_000, ..fake.config() };
    let engine = CudaEngine::open(&config, 0, host.clone()).unwrap();
    let (memory, back) = (gpu.memory(&pattern(1, PARTS * PART_BYTES)), gpu.memory(&vec![0; PARTS * PART_BYTES]));
    let block = Block { offset: 0, pieces: vec![(0, PARTS * PART_BYTES)] };
    fake.set("bytes_per_us", BYTES_PER_US);
    let found = [false, true].map(|is_pull| {
        COPIES.lock().unwrap().clear();
        host.flushes.lock().unwrap().clear();
        match is_pull {
            false => engine.publish(&*host, &block.write_list(&memory, on(0)), Checksum::Off).unwrap(),
            true => engine.pull(&*host, &mut block.read_list(&back, on(0)), Checksum::Off).unwrap(),
        };
        let end_us = now_us();
        let in_pool = |&(to, from, start_us, end_us): &(u64, u64, u64, u64)| Span {
            offset: (if is_pull { from } else { to }) - base,
            start_us,
            end_us,
        };
        let copies: Vec<Span> = COPIES.lock().unwrap().iter().map(in_pool).collect();
        let flushes = host.flushes.lock().unwrap().clone();
        assert!(!copies.is_empty() && flushes.len() >= PARTS, "{} copies, {} flushes", copies.len(), flushes.len());
        for (flush, _) in &flushes {
            assert!(flush.end_us <= end_us, "the call has ended before a flush");
            for copy in copies.iter().filter(|copy| copy.part() == flush.part()) {
                match is_pull {
                    false => assert!(copy.end_us <= flush.start_us, "part {} was flushed before it was written", copy.part()),
                    true => assert!(flush.end_us <= copy.start_us, "part {} was read before it was flushed", copy.part()),
                }
            }
        }
        let threads: BTreeSet<String> = flushes.iter().map(|(_, thread)| format!("{thread:?}")).collect();
        assert!(threads.len() > 1, "one thread flushed all");
        flushes.iter().filter(|(flush, _)| copies.iter().any(|copy| flush.overlaps(copy))).count()
    });
    assert!(back.read() == memory.read());
    fake.set("bytes_per_us", 0);
    drop((engine, memory, back));
    drop(gpu);
    fake.assert_left_clean();
    found
}

#[test]
fn flushes_overlap_the_copies_of_other_parts() {
    let [publish, pull] = overlaps(PART_BYTES);
    assert!(publish >= PARTS / 2 && pull >= PARTS / 2, "{publish} flushes of a publish overlap a copy, {pull} of a pull");
    // As one part nothing can: the measure sees it.
    assert_eq!(overlaps(usize::MAX), [0, 0]);
}
