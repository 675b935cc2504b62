// SPDX-License-Identifier: Apache-2.0
//! The prefix cache: publish, pull and lookup, each beside bare instructions on the same memory in turn with it; and all of them together
//! from several processes.
//!
//! Every block has bytes of its own, which are compared after each copy. Where a figure says so, the lines of a block are in no cache
//! before the measurement, as after another host's publish.

mod accesses;
mod beside;
pub mod list_of_one;
pub mod lookup;
pub mod mixed;
pub mod pool;
pub mod publish;
pub mod pull;

use super::hosts::{config, machine, real_machine};
use super::{fill, wrong};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Upkeep, chain};
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, Instructions};
use cxl_pool::copy::CopyConfig;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::platform::Platform;
use cxl_pool::pool::{CellArea, FormatOptions, Pool, Share};
use cxl_pool::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Namespace of everything published here.
pub const NAMESPACE: Namespace = Namespace(*b"cxlctl bench    ");
/// Sizes of blocks, and what is said of a publish and of a pull.
pub const SIZES: [(usize, [Names; 2]); 3] = [
    (
        64 << 10,
        [
            Names { vs_bare: "publish_64k_vs_bare", vs_accesses: "publish_64k_vs_accesses", least: 1.0 / 1.3 },
            Names { vs_bare: "pull_64k_vs_bare", vs_accesses: "pull_64k_vs_accesses", least: 1.0 / 1.5 },
        ],
    ),
    (
        1 << 20,
        [
            Names { vs_bare: "publish_1m_vs_bare", vs_accesses: "publish_1m_vs_accesses", least: 0.95 },
            Names { vs_bare: "pull_1m_vs_bare", vs_accesses: "pull_1m_vs_accesses", least: 0.95 },
        ],
    ),
    (
        4 << 20,
        [
            Names { vs_bare: "publish_4m_vs_bare", vs_accesses: "publish_4m_vs_accesses", least: 0.95 },
            Names { vs_bare: "pull_4m_vs_bare", vs_accesses: "pull_4m_vs_accesses", least: 0.95 },
        ],
    ),
];
/// Ratios of speeds, and what the first of them has to reach.
#[derive(Clone, Copy)]
pub struct Names {
    /// Beside a bare copy.
    pub vs_bare: &'static str,
    /// Beside the same copy with the accesses around it that the protocol demands.
    pub vs_accesses: &'static str,
    /// What the first has to reach.
    pub least: f64,
}
/// Blocks of each size that a pool has cells for.
pub const BLOCKS: u64 = 16;

/// A pool with cells of one size, as long as this value lasts.
pub struct Lab {
    pool: Pool,
    directory: tempfile::TempDir,
}

/// A host with a cache, on a machine of its own.
pub struct Member {
    /// Declared first, dropped first: it needs the host's service.
    _upkeep: Option<Upkeep>,
    service: Option<Service>,
    pub cache: Cache,
    pub host: Host,
}

impl Lab {
    /// A pool with `cells` cells of `cell_bytes`, and `data_bytes` behind them. Metadata takes some more.
    pub fn new(cell_bytes: u64, cells: u64, data_bytes: u64) -> Result<Lab> {
        let failed = |source| Error::Os { what: "making a directory in /dev/shm".into(), source };
        let directory = tempfile::Builder::new().prefix(".cxlctl-bench-").tempdir_in("/dev/shm").map_err(failed)?;
        let bytes = cell_bytes * cells;
        let len_bytes = (bytes + data_bytes + cells * 512 + (32 << 20)).next_multiple_of(2 << 20);
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(len_bytes))?;
        let area = CellArea { cell_bytes, share: Share::Bytes(bytes) };
        let options = FormatOptions { machine: Some(machine(0)), slots: 8, cells: vec![area], ..FormatOptions::default() };
        let lab = Lab { pool: Pool::format(&spec, &options)?, directory };
        // So that no measurement pays for memory that the system has yet to find.
        let (zeros, layout) = (vec![0; 1 << 20], lab.pool.layout());
        let end = layout.data_offset() + data_bytes.min(8 << 20);
        for offset in (layout.cells_offset()..end).step_by(zeros.len()) {
            lab.memory().copy_in(offset, &zeros[..zeros.len().min((end - offset) as usize)])?;
        }
        Ok(lab)
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    pub fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// Bare instructions on the `len_bytes` bytes from `offset`, of which a power of two of lines is touched.
    pub fn bare(&self, offset: u64, len_bytes: u64) -> Result<Bare> {
        let instructions = match CoherenceOptions::from_env()?.instructions {
            Some(chosen) => chosen,
            None => Instructions::best()?,
        };
        Bare::over(self.memory().clone(), offset, (len_bytes / LINE_BYTES as u64).next_power_of_two(), instructions)
    }

    pub fn memory(&self) -> &Arc<dyn Coherence> {
        self.pool.lines().memory()
    }
}

/// Refuses to measure hosts that are emulated.
pub fn refuse_emulated() -> Result<()> {
    match CoherenceOptions::from_env()?.emulator {
        None => Ok(()),
        Some(_) => Err(Error::Invalid("emulated hosts have no instructions to measure: unset CXL_COHERENCE".into())),
    }
}

/// As a bench uses a cache: one thread copies, as in the bare loops.
pub fn alone() -> CacheConfig {
    CacheConfig { copy: Some(CopyConfig::alone()), ..CacheConfig::default() }
}

/// Joins as machine `number`. Without `upkeep` nothing runs beside what is measured, except the host's own service.
pub fn join(pool: &Pool, state: &Path, number: u8, config_of: CacheConfig, upkeep: bool) -> Result<Member> {
    join_on(pool, Arc::new(real_machine(pool, state, number)?), config(pool), config_of, upkeep)
}

/// Joins as machine `number`, which reaches the pool by `memory`. Nothing runs beside what is measured, except the host's own service.
pub fn join_over(pool: &Pool, memory: Arc<dyn Coherence>, state: &Path, number: u8, config_of: CacheConfig) -> Result<Member> {
    let lines = Lines::new(memory, pool.layout().clone(), pool.superblock().uuid(), pool.superblock().incarnation());
    member(pool, lines, Arc::new(real_machine(pool, state, number)?), config(pool), config_of, false)
}

/// As [`join`], on a platform of the caller's.
pub fn join_on(pool: &Pool, platform: Arc<dyn Platform>, host_config: HostConfig, config_of: CacheConfig, upkeep: bool) -> Result<Member> {
    member(pool, pool.lines().clone(), platform, host_config, config_of, upkeep)
}

fn member(
    pool: &Pool,
    lines: Lines,
    platform: Arc<dyn Platform>,
    host_config: HostConfig,
    config_of: CacheConfig,
    upkeep: bool,
) -> Result<Member> {
    let host = cxl_pool::pool::join(lines, platform, host_config)?;
    let service = host.serve()?;
    // Pages that this process never touched would be found one by one, in the middle of what is measured.
    for offset in (pool.layout().cells_offset()..pool.layout().data_offset()).step_by(4096) {
        pool.lines().memory().copy_out(offset, &mut [0; 8])?;
    }
    let cache = Cache::open(&host, config_of)?;
    let upkeep = if upkeep { Some(cache.serve()?) } else { None };
    Ok(Member { _upkeep: upkeep, service: Some(service), cache, host })
}

impl Member {
    /// Ends in good order.
    pub fn leave(self) -> Result<()> {
        let Member { _upkeep, service, cache, host } = self;
        drop(_upkeep);
        cache.close()?;
        drop(service);
        host.leave()
    }
}

/// Key of block `number`.
pub fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32, (number >> 32) as u32], b"bench")
}

/// Where a block of this process's lies.
pub fn place(cache: &Cache, pool: &Pool, block: BlockKey) -> Result<u64> {
    match cache.lookup(NAMESPACE, block)? {
        Some(found) => Ok(pool.layout().cell(found.cell)?.0),
        None => Err(wrong("a block that was published is not there")),
    }
}

/// Takes the lines of a range out of every cache.
pub fn uncache(memory: &dyn Coherence, offset: u64, len_bytes: usize) -> Result<()> {
    memory.flush_range(offset, len_bytes as u64)?;
    memory.fence_all();
    Ok(())
}
