// SPDX-License-Identifier: Apache-2.0
//! What allocating and freeing a block costs in steady state, beside the C library's `malloc` and `free` of the same size.
//!
//! Batches of both alternate in one run. Blocks are looked at for overlap, and every write of a pool line by this thread is counted: there
//! must be none.
//!
//! Usage: `alloc_cost [FILE]` — a file of at least 64 MiB, which is formatted as a pool; a temporary one without it. The last line is
//! `RATIOS` and JSON; the exit status is 0 only when the blocks were right, no line was written and a pair stayed below 150 ns.

use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::coherence::Coherence;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::line::{Line, Lines};
use cxl_pool::machine::Machine;
use cxl_pool::pool::{FormatOptions, Pool};
use std::cell::Cell;
use std::error::Error;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

const POOL_BYTES: u64 = 64 << 20;
const SIZES: [u64; 4] = [64, 1024, 16 << 10, 128 << 10];
/// Blocks out at a time.
const WINDOW: usize = 64;
const BATCHES: usize = 2001;
const TARGET_NS: f64 = 150.0;

thread_local! {
    static WRITES: Cell<u64> = const { Cell::new(0) };
}

/// The pool's memory, counting this thread's writes.
struct Counting(Arc<dyn Coherence>);

impl Coherence for Counting {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
    fn load_line(&self, offset: u64) -> cxl_pool::Result<Line> {
        self.0.load_line(offset)
    }
    fn write_line(&self, offset: u64, line: &Line) -> cxl_pool::Result<()> {
        WRITES.set(WRITES.get() + 1);
        self.0.write_line(offset, line)
    }
    fn flush_line(&self, offset: u64) -> cxl_pool::Result<()> {
        self.0.flush_line(offset)
    }
    fn fence_stores(&self) {
        self.0.fence_stores();
    }
    fn fence_all(&self) {
        self.0.fence_all();
    }
    fn fence_loads(&self) {
        self.0.fence_loads();
    }
    fn flush_range(&self, offset: u64, len_bytes: u64) -> cxl_pool::Result<()> {
        self.0.flush_range(offset, len_bytes)
    }
    fn copy_in(&self, offset: u64, source: &[u8]) -> cxl_pool::Result<()> {
        WRITES.set(WRITES.get() + 1);
        self.0.copy_in(offset, source)
    }
    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> cxl_pool::Result<()> {
        self.0.copy_out(offset, destination)
    }
    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.0.address(offset, len_bytes)
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Nanoseconds per pair of a batch, after which nothing is out.
fn ours(allocator: &Allocator, len_bytes: u64, out: &mut Vec<u64>) -> cxl_pool::Result<f64> {
    out.clear();
    let begin = Instant::now();
    for _ in 0..WINDOW {
        out.push(allocator.alloc(len_bytes)?.offset);
    }
    for &offset in out.iter() {
        allocator.free(offset)?;
    }
    Ok(begin.elapsed().as_nanos() as f64 / WINDOW as f64)
}

fn theirs(len_bytes: u64, out: &mut Vec<*mut libc::c_void>) -> f64 {
    out.clear();
    let begin = Instant::now();
    for _ in 0..WINDOW {
        // SAFETY: any size may be asked for.
        out.push(black_box(unsafe { libc::malloc(len_bytes as usize) }));
    }
    for &address in out.iter() {
        // SAFETY: it came from malloc above and is freed once.
        unsafe { libc::free(address) };
    }
    begin.elapsed().as_nanos() as f64 / WINDOW as f64
}

fn check(out: &[u64], len_bytes: u64) -> Result<(), Box<dyn Error>> {
    let mut sorted = out.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).all(|pair| pair[0] + len_bytes <= pair[1]) {
        true => Ok(()),
        false => Err("two blocks overlap".into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let file = match std::env::args_os().nth(1) {
        Some(file) => file.into(),
        None => folder.path().join("pool"),
    };
    let spec = PoolSpec::new(vec![file], Some(POOL_BYTES))?;
    let pool = Pool::format(&spec, &FormatOptions { slots: 4, ..FormatOptions::default() })?;
    let lines = Lines::new(Arc::new(Counting(Arc::clone(pool.lines().memory()))), Arc::clone(pool.layout()), pool.superblock().uuid());
    let platform = Machine::for_pool(pool.superblock().uuid())?;
    let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = Host::join(lines, Arc::new(platform), config)?;
    let _service = host.serve()?;
    let allocator = Allocator::attach(&host, LocalArea::of(&host)?, AllocConfig::default())?;
    let (mut offsets, mut addresses) = (Vec::with_capacity(WINDOW), Vec::with_capacity(WINDOW));
    let (mut ratio, mut slowest) = (0.0f64, 0.0f64);
    for len_bytes in SIZES {
        let (mut our_times, mut their_times) = (Vec::with_capacity(BATCHES), Vec::with_capacity(BATCHES));
        ours(&allocator, len_bytes, &mut offsets)?;
        let before = WRITES.get();
        for _ in 0..BATCHES {
            our_times.push(ours(&allocator, len_bytes, &mut offsets)?);
            their_times.push(theirs(len_bytes, &mut addresses));
        }
        check(&offsets, len_bytes)?;
        let written = WRITES.get() - before;
        if written != 0 {
            return Err(format!("{written} pool lines were written while nothing but scratch blocks was allocated").into());
        }
        let (our_ns, their_ns) = (median(&mut our_times), median(&mut their_times));
        println!("{len_bytes:>7} bytes: {our_ns:.1} ns for alloc + free, malloc + free {their_ns:.1} ns");
        (ratio, slowest) = (ratio.max(our_ns / their_ns), slowest.max(our_ns));
    }
    println!("slowest pair {slowest:.1} ns, pool lines written 0");
    println!("RATIOS {{\"alloc_free_over_malloc_free\": {ratio:.2}, \"alloc_free_over_target\": {:.3}}}", slowest / TARGET_NS);
    drop(allocator);
    host.leave()?;
    if slowest > TARGET_NS { Err(format!("{slowest:.1} ns for a pair, the target is {TARGET_NS} ns").into()) } else { Ok(()) }
}
