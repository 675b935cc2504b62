// SPDX-License-Identifier: Apache-2.0
//! What all benchmarks share: a pool in a scratch file, hosts on it, a second process, and measuring in turn.

use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, PublishRequest, Reservation, Reserved, chain};
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, Instructions};
use cxl_pool::copy::{CopyConfig, LocalPlace, LocalRange};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::machine::{Machine, State};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use cxl_pool::{Error, Result};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

pub const NAMESPACE: Namespace = Namespace(*b"cxlctl bench    ");
/// Blocks of each size that a pool has cells for.
pub const BLOCKS: u64 = 16;
/// Local memory that destinations go round in, in bytes: much more than the second-level cache.
const LOCAL_BYTES: usize = 64 << 20;

pub fn machine(number: u8) -> MachineId {
    MachineId([number + 1; 16])
}

/// A pool that lasts as long as this value.
pub struct Lab {
    pub pool: Pool,
    directory: tempfile::TempDir,
}

impl Lab {
    /// Formats a pool with `cells` cells of `cell_bytes` (0: no cells) and `data_bytes` of other memory.
    pub fn new(cell_bytes: u64, cells: u64, data_bytes: u64) -> Result<Lab> {
        let failed = |source| Error::Os { what: "making a directory in /dev/shm".into(), source };
        let directory = tempfile::Builder::new().prefix(".cxl-bench-").tempdir_in("/dev/shm").map_err(failed)?;
        let bytes = cell_bytes * cells;
        let len_bytes = (bytes + data_bytes + cells * 512 + (32 << 20)).next_multiple_of(2 << 20);
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(len_bytes))?;
        let areas = (cells > 0).then_some(CellArea { cell_bytes, share: Share::Bytes(bytes) });
        let options = FormatOptions { machine: Some(machine(0)), slots: 8, cells: areas.into_iter().collect(), ..FormatOptions::default() };
        let lab = Lab { pool: Pool::format(&spec, &options)?, directory };
        // Page faults belong to no measurement.
        let (zeros, layout) = (vec![0; 1 << 20], lab.pool.layout());
        let end = layout.data_offset() + data_bytes.min(8 << 20);
        for offset in (layout.cells_offset()..end).step_by(zeros.len()) {
            lab.memory().copy_in(offset, &zeros[..zeros.len().min((end - offset) as usize)])?;
        }
        Ok(lab)
    }

    pub fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// The arguments by which a second process finds the pool.
    pub fn arguments(&self) -> [String; 2] {
        [self.directory.path().join("pool"), self.state()].map(|path| path.display().to_string())
    }

    /// Bare instructions on the `len_bytes` bytes from `offset`.
    pub fn bare(&self, offset: u64, len_bytes: u64) -> Result<Bare> {
        Bare::over(self.memory().clone(), offset, (len_bytes / LINE_BYTES as u64).next_power_of_two(), instructions()?)
    }

    pub fn memory(&self) -> &Arc<dyn Coherence> {
        self.pool.lines().memory()
    }

    /// A host with a cache on machine `number`.
    pub fn join(&self, number: u8, config: CacheConfig) -> Result<Member> {
        self.join_over(self.memory().clone(), number, config)
    }

    /// The same, where the host reaches the pool by `memory`.
    pub fn join_over(&self, memory: Arc<dyn Coherence>, number: u8, config: CacheConfig) -> Result<Member> {
        let (layout, superblock) = (self.pool.layout(), self.pool.superblock());
        let lines = Lines::new(memory, layout.clone(), superblock.uuid(), superblock.incarnation());
        let machine = Arc::new(real_machine(&self.pool, &self.state(), number)?);
        let host = cxl_pool::pool::join(lines, machine, host_config(&self.pool))?;
        let service = host.serve()?;
        // Page faults of this process belong to no measurement.
        for offset in (layout.cells_offset()..layout.data_offset()).step_by(4096) {
            self.memory().copy_out(offset, &mut [0; 8])?;
        }
        Ok(Member { cache: Cache::open(&host, config)?, service, host })
    }
}

pub fn host_config(pool: &Pool) -> HostConfig {
    HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() }
}

/// Machine `number`, with its state below `state`.
pub fn real_machine(pool: &Pool, state: &Path, number: u8) -> Result<Machine> {
    Machine::new(machine(number), State::open(state, pool.superblock().uuid(), machine(number))?)
}

/// A host on machine `number` of a pool, and its service.
pub fn join_host(pool: &Pool, state: &Path, number: u8) -> Result<(Host, Service)> {
    let host = cxl_pool::pool::join(pool.lines().clone(), Arc::new(real_machine(pool, state, number)?), host_config(pool))?;
    let service = host.serve()?;
    Ok((host, service))
}

/// Opens the pool that the first process formatted.
pub fn open(path: &Path) -> Result<Pool> {
    Pool::open(&PoolSpec::new(vec![path.to_path_buf()], None)?, &OpenOptions::default())
}

pub struct Member {
    pub cache: Cache,
    service: Service,
    host: Host,
}

impl Member {
    pub fn leave(self) -> Result<()> {
        let Member { cache, service, host } = self;
        cache.close()?;
        drop(service);
        host.leave()
    }
}

/// The instructions in force.
///
/// # Errors
/// [`Error::Invalid`] where hosts are emulated: there is nothing to measure.
pub fn instructions() -> Result<Instructions> {
    match CoherenceOptions::from_env()? {
        CoherenceOptions { emulator: Some(_), .. } => {
            Err(Error::Invalid("emulated hosts have no instructions to measure: unset CXL_COHERENCE".into()))
        }
        CoherenceOptions { instructions: Some(chosen), .. } => Ok(chosen),
        _ => Instructions::best(),
    }
}

/// A cache whose copies run on the calling thread, as the bare loops do.
pub fn alone() -> CacheConfig {
    CacheConfig { copy: Some(CopyConfig::alone()), ..CacheConfig::default() }
}

pub fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32, (number >> 32) as u32], b"bench")
}

/// Fills `bytes` with words that differ from each other and from those of any other `number`.
pub fn fill(bytes: &mut [u8], number: u64) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((index as u64 + 1).wrapping_mul(2 * number + 0x9e37_79b9_7f4a_7c15)).to_le_bytes());
    }
}

/// The error of a measurement that gave a wrong result.
pub fn wrong(what: impl Into<String>) -> Error {
    Error::Invalid(format!("{}: the figures mean nothing", what.into()))
}

pub fn place(cache: &Cache, pool: &Pool, block: BlockKey) -> Result<u64> {
    match cache.lookup(NAMESPACE, block)? {
        Some(found) => Ok(pool.layout().cell(found.cell)?.0),
        None => Err(wrong("a published block is missing")),
    }
}

/// Takes the lines of a range out of every cache.
pub fn uncache(memory: &dyn Coherence, offset: u64, len_bytes: usize) -> Result<()> {
    memory.flush_range(offset, len_bytes as u64)?;
    memory.fence_all();
    Ok(())
}

/// Publishes blocks as those of one step of an engine.
pub fn publish_together<B: AsRef<[u8]>>(member: &Member, keys: &[BlockKey], blocks: &[B]) -> Result<()> {
    let request = |(block, &key): (&B, &BlockKey)| {
        let len_bytes = block.as_ref().len() as u64;
        PublishRequest { namespace: NAMESPACE, key, parent: None, len_bytes }
    };
    let requests: Vec<PublishRequest> = blocks.iter().zip(keys).map(request).collect();
    let cells = member.cache.reserve_all(&requests)?.into_iter().map(|reserved| match reserved {
        Reserved::Cell(reservation) => Ok(reservation),
        _ => Err(wrong("a new block got no cell")),
    });
    let mut cells = cells.collect::<Result<Vec<_>>>()?;
    let range = |block: &B| LocalRange { address: NonNull::from(block.as_ref()).cast(), len_bytes: block.as_ref().len() };
    // SAFETY: the blocks are borrowed until this returns, and memory of this process.
    unsafe { Reservation::fill_all_raw(&mut cells, LocalPlace::Host, |index| blocks.get(index).map(range)) }?;
    member.cache.commit_all(cells)
}

/// [`ctl_common::stats::in_turn`] with a fixed number of ways; `measure` returns nanoseconds.
pub fn in_turn<const WAYS: usize>(batches: u64, measure: impl FnMut(u64, usize) -> Result<f64>) -> Result<[Vec<f64>; WAYS]> {
    let taken = ctl_common::stats::in_turn(WAYS, batches, measure)?;
    taken.try_into().map_err(|_| wrong("a way was not measured"))
}

pub fn time(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_nanos() as f64)
}

/// Destinations of copies: each begins a page that no recent copy used.
pub struct Destinations {
    bytes: Box<[u8]>,
    next: usize,
}

impl Destinations {
    /// All of them.
    pub fn new() -> Destinations {
        // Not zeros: the system would map those pages in the middle of a copy.
        Destinations { bytes: vec![1; LOCAL_BYTES + 2 * 4096].into(), next: 0 }
    }

    /// The next one, `skip_bytes` after the start of its page.
    pub fn next(&mut self, len_bytes: usize, skip_bytes: usize) -> &mut [u8] {
        let start = (self.bytes.as_ptr() as usize).wrapping_neg() % 4096;
        if self.next + len_bytes > LOCAL_BYTES {
            self.next = 0;
        }
        let at = start + self.next + skip_bytes;
        self.next += (skip_bytes + len_bytes).next_multiple_of(4096);
        &mut self.bytes[at..at + len_bytes]
    }
}
