// SPDX-License-Identifier: Apache-2.0
//! The steps that the memory needs around a copy, in the order in which they are made.

use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::scenes::*;
use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::cuda::{Direction, GpuPiece, HostPlace};
use cxl_pool::copy::{Checksum, CopyEngine, CudaConfig, CudaEngine, Dma};
use cxl_pool::line::Line;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

/// One step of this thread. Ranges are offsets and lengths in the pool; the GPU's are only that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Flush(u64, u64),
    CopyIn(u64, usize),
    CopyOut(u64, usize),
    FenceStores,
    FenceAll,
    FenceLoads,
    /// A copy that the GPU has made.
    Gpu(usize),
}
use Step::{CopyIn, CopyOut, FenceAll, FenceLoads, FenceStores, Flush};

thread_local! {
    static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

fn note(step: Step) {
    STEPS.with_borrow_mut(|steps| steps.push(step));
}

extern "C" fn copied(_to: u64, _from: u64, len_bytes: usize, _start_us: u64, _end_us: u64) {
    note(Step::Gpu(len_bytes));
}

fn take_steps() -> Vec<Step> {
    STEPS.take()
}

/// Memory whose steps are noted, and which may be one that no device can reach.
pub struct Watched {
    pub memory: Arc<dyn Coherence>,
    pub is_mapped: bool,
}

impl Coherence for Watched {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.memory.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.memory.write_line(offset, line)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        note(Flush(offset, 64));
        self.memory.flush_line(offset)
    }

    fn fence_stores(&self) {
        note(FenceStores);
        self.memory.fence_stores();
    }

    fn fence_all(&self) {
        note(FenceAll);
        self.memory.fence_all();
    }

    fn fence_loads(&self) {
        note(FenceLoads);
        self.memory.fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        note(Flush(offset, len_bytes));
        self.memory.flush_range(offset, len_bytes)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        note(CopyIn(offset, source.len()));
        self.memory.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        note(CopyOut(offset, destination.len()));
        self.memory.copy_out(offset, destination)
    }

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.memory.address(offset, len_bytes).filter(|_| self.is_mapped)
    }
}

/// The steps of one call for two blocks, to the pool and back: 100 bytes from 4096 + 30 on in two pieces, and the two lines at 8192.
fn steps(checksum: Checksum) -> [Vec<Step>; 2] {
    steps_where(Dma::Cached, checksum)
}

fn steps_where(dma: Dma, checksum: Checksum) -> [Vec<Step>; 2] {
    let fake = Fake::new(Kind::Engine);
    fake.hook(copied);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let host: Arc<dyn Coherence> = Arc::new(Watched { memory: host, is_mapped: true });
    let engine = CudaEngine::open(&CudaConfig { dma, ..fake.config() }, 0, host.clone()).unwrap();
    assert_eq!(engine.reach().dma, dma);
    let memory = gpu.memory(&pattern(1, 1000));
    let blocks = [Block { offset: 4126, pieces: vec![(0, 60), (70, 40)] }, Block { offset: 8192, pieces: vec![(200, 128)] }];
    take_steps();
    let lists: Vec<_> = blocks.iter().map(|block| block.write_list(&memory, on(0))).collect();
    assert!(engine.publish_each(&*host, &lists, checksum).iter().all(Result::is_ok));
    let written = take_steps();
    let mut lists: Vec<_> = blocks.iter().map(|block| block.read_list(&memory, on(0))).collect();
    assert!(engine.pull_each(&*host, &mut lists, checksum).iter().all(Result::is_ok));
    let read = take_steps();
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
    [written, read]
}

#[test]
fn what_the_gpu_writes_to_the_pool_is_flushed_and_fenced() {
    let [written, _] = steps(Checksum::Off);
    let expected = [
        // Lines that the pieces touch in part: 4096 and 4160 by the first, 4160 and 4224 by the second. None of the block in whole lines.
        vec![Flush(4126, 1), Flush(4185, 1), Flush(4186, 1), Flush(4225, 1), FenceAll],
        vec![Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)],
        vec![Flush(4126, 60), Flush(4186, 40), Flush(8192, 128), FenceStores],
    ];
    assert_eq!(written, expected.concat());
}

#[test]
fn what_the_gpu_reads_in_the_pool_is_flushed_and_fenced_before() {
    let [_, read] = steps(Checksum::Off);
    let expected = [
        vec![Flush(4126, 60), Flush(4186, 40), Flush(8192, 128), FenceAll],
        vec![Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)],
        vec![FenceLoads],
    ];
    assert_eq!(read, expected.concat());
}

#[test]
fn through_buffers_the_steps_are_those_of_the_cpu() {
    let [written, read] = steps(Checksum::Xxh3);
    // What comes behind one another in the pool is written in one go, line by line where it can be.
    let expected = [vec![Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)], vec![CopyIn(4126, 100), CopyIn(8192, 128), FenceStores]];
    assert_eq!(written, expected.concat());
    let expected = [
        vec![Flush(4126, 60), Flush(4186, 40), Flush(8192, 128), FenceAll],
        vec![CopyOut(4126, 60), CopyOut(4186, 40), CopyOut(8192, 128)],
        vec![Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)],
        vec![FenceLoads],
    ];
    assert_eq!(read, expected.concat());
}

#[test]
fn where_dma_goes_past_the_caches_the_fences_stay() {
    let moved = [Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)];
    let [written, read] = steps_where(Dma::Uncached, Checksum::Off);
    assert_eq!(written, [&[FenceAll][..], &moved, &[FenceStores]].concat());
    assert_eq!(read, [&[FenceAll][..], &moved, &[FenceLoads]].concat());
    // The CPU's own copies are what they were.
    assert_eq!(steps_where(Dma::Uncached, Checksum::Xxh3), steps(Checksum::Xxh3));
}

/// The steps of copies that were started, which this thread then looks after: as of one call.
#[test]
fn copies_that_were_started_make_the_same_steps() {
    let fake = Fake::new(Kind::Engine);
    fake.hook(copied);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let host: Arc<dyn Coherence> = Arc::new(Watched { memory: host, is_mapped: true });
    let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
    let memory = gpu.memory(&pattern(1, 1000));
    let piece = |at, offset, len_bytes| GpuPiece { gpu: memory.address + at, host: HostPlace::Pool(offset), len_bytes };
    let pieces = [piece(200, 8192, 128), piece(0, 4126, 60), piece(70, 4186, 40)];
    let steps = |direction, is_buffered| {
        take_steps();
        // SAFETY: the memory is there until the end, and no other uses it.
        let copy = unsafe { engine.start(direction, &pieces, is_buffered) }.unwrap();
        copy.wait(60_000).unwrap().unwrap();
        take_steps()
    };
    let moved = vec![Step::Gpu(60), Step::Gpu(40), Step::Gpu(128)];
    let (edges, flushes) = (
        vec![Flush(4126, 1), Flush(4185, 1), Flush(4186, 1), Flush(4225, 1), FenceAll],
        vec![Flush(4126, 60), Flush(4186, 40), Flush(8192, 128)],
    );
    assert_eq!(steps(Direction::ToHost, false), [edges, moved.clone(), flushes.clone(), vec![FenceStores]].concat());
    assert_eq!(steps(Direction::FromHost, false), [flushes.clone(), vec![FenceAll], moved.clone(), vec![FenceLoads]].concat());
    let written = vec![CopyIn(4126, 100), CopyIn(8192, 128), FenceStores];
    assert_eq!(steps(Direction::ToHost, true), [moved.clone(), written].concat());
    let read = vec![FenceAll, CopyOut(4126, 60), CopyOut(4186, 40), CopyOut(8192, 128)];
    assert_eq!(steps(Direction::FromHost, true), [flushes, read, moved, vec![FenceLoads]].concat());
}

/// Between two looks, of which each may be another thread's, nothing is left that only the thread itself could fence.
#[test]
fn a_look_leaves_no_flush_and_no_store_without_a_fence() {
    let fake = Fake::new(Kind::Engine);
    fake.set("queries_until_done", 2);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let host: Arc<dyn Coherence> = Arc::new(Watched { memory: host, is_mapped: true });
    let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
    let len_bytes = 100_000;
    let memory = gpu.memory(&pattern(1, len_bytes));
    for direction in [Direction::ToHost, Direction::FromHost] {
        take_steps();
        let piece = GpuPiece { gpu: memory.address, host: HostPlace::Pool(4096), len_bytes };
        // SAFETY: as above.
        let copy = unsafe { engine.start(direction, &[piece], true) }.unwrap();
        let mut looks = 0;
        loop {
            let steps = take_steps();
            let is_open = |step: &Step| matches!(step, Flush(..) | CopyIn(..));
            let is_fence = |step: &Step| matches!(step, FenceAll | FenceStores);
            let open = steps.iter().rposition(is_open);
            assert!(open.is_none_or(|open| steps[open..].iter().any(is_fence)), "{direction:?}: {steps:?}");
            if copy.poll().is_some_and(|ending| ending.is_ok()) {
                break;
            }
            looks += 1;
        }
        assert!(looks > 6, "{looks}");
    }
}

#[test]
fn an_error_of_a_publish_is_behind_its_fence() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let host: Arc<dyn Coherence> = Arc::new(Watched { memory: host, is_mapped: true });
    let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
    let memory = gpu.memory(&pattern(1, 1000));
    let block = Block { offset: 64, pieces: vec![(0, 64)] };
    fake.set("copy_error", 719);
    take_steps();
    assert!(engine.publish(&*host, &block.write_list(&memory, on(0)), Checksum::Off).is_err());
    // What it did write must not linger in the caches either.
    assert_eq!(take_steps(), [FenceAll, Flush(64, 64), FenceStores]);
}
