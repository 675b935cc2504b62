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

/// Held by a test: the copies of the driver are in one place.
static ALONE: Mutex<()> = Mutex::new(());
/// The copies of the driver, by addresses: to, from.
static COPIES: Mutex<Vec<(u64, u64, u64, u64)>> = Mutex::new(Vec::new());

extern "C" fn copied(to: u64, from: u64, _len_bytes: usize, start_us: u64, end_us: u64) {
    COPIES.lock().unwrap().push((to, from, start_us, end_us));
}

/// Memory whose flushes take their time.
struct Slow {
    memory: Arc<dyn Coherence>,
    flushes: Mutex<Vec<(Span, ThreadId)>>,
    /// No flush ends while this is held.
    gate: Mutex<()>,
}

impl Coherence for Slow {
    cxl_pool::forward_coherence!(
        memory: len_bytes load_line write_line flush_line fence_stores fence_all fence_loads copy_in copy_out address
    );

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let start_us = now_us();
        std::thread::sleep(FLUSH);
        drop(self.gate.lock().unwrap());
        let flushed = self.memory.flush_range(offset, len_bytes);
        self.flushes.lock().unwrap().push((Span { offset, start_us, end_us: now_us() }, std::thread::current().id()));
        flushed
    }
}

/// A GPU whose copies take their time, memory whose flushes do, and an engine between them.
struct Scene {
    fake: Fake,
    gpu: Gpu,
    host: Arc<Slow>,
    base: u64,
    engine: Arc<CudaEngine>,
    parts: usize,
    block: Block,
}

impl Scene {
    fn new(parts: usize) -> Scene {
        let fake = Fake::new(Kind::Engine);
        fake.hook(copied);
        let gpu = Gpu::open(fake.path(), 0);
        let [memory, _] = hosts("native");
        let base = memory.address(0, 1).unwrap().as_ptr().expose_provenance() as u64;
        let host = Arc::new(Slow { memory, flushes: Mutex::default(), gate: Mutex::default() });
        let config = CudaConfig { part_bytes: PART_BYTES, threads: 4, granule_bytes: 4 << 20, timeout_ms: 120_000, ..fake.config() };
        let engine = Arc::new(CudaEngine::open(&config, 0, host.clone()).unwrap());
        fake.set("bytes_per_us", BYTES_PER_US);
        Scene { fake, gpu, host, base, engine, parts, block: Block { offset: 0, pieces: vec![(0, parts * PART_BYTES)] } }
    }

    /// Of a call that has ended: how many flushes overlap the copy of another part. The order of each part is as it must be.
    fn overlaps(&self, is_pull: bool) -> usize {
        let end_us = now_us();
        let in_pool = |&(to, from, start_us, end_us): &(u64, u64, u64, u64)| Span {
            offset: (if is_pull { from } else { to }) - self.base,
            start_us,
            end_us,
        };
        let copies: Vec<Span> = COPIES.lock().unwrap().drain(..).map(|copy| in_pool(&copy)).collect();
        let flushes = std::mem::take(&mut *self.host.flushes.lock().unwrap());
        assert!(!copies.is_empty() && flushes.len() >= self.parts, "{} copies, {} flushes", copies.len(), flushes.len());
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
    }

    fn close(self) {
        self.fake.set("bytes_per_us", 0);
        drop(self.engine);
        drop(self.gpu);
        self.fake.assert_left_clean();
    }
}

/// How often a flush overlaps the copy of another part: of a publish and of a pull.
fn overlaps(parts: usize) -> [usize; 2] {
    let scene = Scene::new(parts);
    let (memory, back) = (scene.gpu.memory(&pattern(1, parts * PART_BYTES)), scene.gpu.memory(&vec![0; parts * PART_BYTES]));
    scene.engine.publish(&*scene.host, &scene.block.write_list(&memory, on(0)), Checksum::Off).unwrap();
    let publish = scene.overlaps(false);
    scene.engine.pull(&*scene.host, &mut scene.block.read_list(&back, on(0)), Checksum::Off).unwrap();
    let pull = scene.overlaps(true);
    assert!(back.read() == memory.read());
    drop((memory, back));
    scene.close();
    [publish, pull]
}

#[test]
fn flushes_overlap_the_copies_of_other_parts() {
    let _alone = ALONE.lock().unwrap();
    let [publish, pull] = overlaps(PARTS);
    assert!(publish >= PARTS / 2 && pull >= PARTS / 2, "{publish} flushes of a publish overlap a copy, {pull} of a pull");
    // As one part nothing can: the measure sees it.
    assert_eq!(overlaps(1), [0, 0]);
}

/// A call that queues returns while no flush can end, and its thread flushes nothing that the GPU reads. A stream that comes after the
/// copies comes after the flushes.
#[test]
fn no_call_that_queues_waits_for_a_flush() {
    let _alone = ALONE.lock().unwrap();
    let scene = Scene::new(PARTS);
    let (memory, back) = (scene.gpu.memory(&pattern(1, PARTS * PART_BYTES)), scene.gpu.memory(&vec![0; PARTS * PART_BYTES]));
    let (stream, len_bytes) = (scene.gpu.stream(), (PARTS * PART_BYTES) as u64);
    let gate = scene.host.gate.lock().unwrap();
    let room = scene.engine.queue_room(len_bytes).unwrap();
    // SAFETY: the memory stays until the end of the copies; the same below.
    let published = unsafe { room.publish(&[scene.block.write_list(&memory, on(0))], Checksum::Off) }.unwrap().unwrap();
    assert!(scene.host.flushes.lock().unwrap().is_empty());
    drop(gate);
    assert!(published.wait(120_000).unwrap().is_ok());
    scene.overlaps(false);
    drop(room);

    let gate = scene.host.gate.lock().unwrap();
    let room = scene.engine.queue_room(len_bytes).unwrap();
    // SAFETY: as above, and the stream is there.
    let pulled = unsafe { room.pull(&[scene.block.read_list(&back, on(0))], Checksum::Off, Some(stream.handle)) }.unwrap().unwrap();
    assert!(pulled.poll().is_none() && !stream.is_done(), "the copies came before the flush of what they read");
    drop(gate);
    while !stream.is_done() {
        std::thread::yield_now();
    }
    assert!(back.read() == memory.read());
    assert!(pulled.wait(120_000).unwrap().is_ok());
    assert!(scene.host.flushes.lock().unwrap().iter().all(|(_, thread)| *thread != std::thread::current().id()), "the caller has flushed");
    let found = scene.overlaps(true);
    assert!(found >= PARTS / 2, "{found} flushes of a queued pull overlap a copy");
    drop((pulled, published, room, memory, back, stream));
    scene.close();
}
