// SPDX-License-Identifier: Apache-2.0
//! Pools with hosts in this process, layouts in host memory, and blocks of which no two words are equal.

use crate::load;
use cxl_pool::cache::{Cache, CacheConfig};
use cxl_pool::coherence::CoherenceOptions;
use cxl_pool::device::PoolSpec;
use cxl_pool::fsck;
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::machine::{Machine, State};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use cxl_tier::memory::{Lies, host_layout};
use cxl_tier::{BlockShape, CxlBlocks, Model, Outcome, Ranks};
use dynamo_memory::nixl::NixlAgent;
use kvbm_engine::SequenceHash;
use kvbm_physical::layout::{KvBlockLayout, LayoutConfig, PhysicalLayout};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(300);
/// Bytes of a cell.
pub const CELL: u64 = 4096;
/// Hosts that are not coherent, as the pool emulates them.
pub const EMULATED: &str = "emulated:seed=11,noise=8";

/// A pool in a file.
pub struct Bench {
    pub directory: tempfile::TempDir,
    pub spec: PoolSpec,
}

/// A process of a host, as far as the pool can tell.
pub struct Member {
    pub cache: Cache,
    pub service: Option<Service>,
    pub host: Host,
    pub pool: Pool,
}

pub fn machine_id(number: u8) -> MachineId {
    MachineId([number; 16])
}

/// With checksums, and all upkeep in every round.
pub fn config() -> CacheConfig {
    CacheConfig { checksums: true, lock_timeout_ms: Some(20_000), upkeep_ms: 1, ..CacheConfig::default() }
}

impl Bench {
    /// A pool with so many cells of [`CELL`] bytes. Machines 1 to 3 have manager seats.
    pub fn new(cells: u64) -> Bench {
        Bench::of(CELL, cells)
    }

    pub fn of(cell_bytes: u64, cells: u64) -> Bench {
        Bench::of_areas(vec![CellArea { cell_bytes, share: Share::Bytes(cell_bytes * cells) }])
    }

    /// The same as [`Bench::new`], and so many cells of 64 bytes.
    pub fn with_small_cells(cells: u64, small: u64) -> Bench {
        let area = |cell_bytes, cells| CellArea { cell_bytes, share: Share::Bytes(cell_bytes * cells) };
        Bench::of_areas(vec![area(64, small), area(CELL, cells)])
    }

    fn of_areas(cells: Vec<CellArea>) -> Bench {
        let bytes = |area: &CellArea| if let Share::Bytes(bytes) = area.share { bytes } else { 0 };
        let cell_bytes = cells.iter().map(|area| area.cell_bytes).max().unwrap();
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let size = (8 << 20) + (2 * cells.iter().map(bytes).sum::<u64>()).next_multiple_of(2 << 20);
        let spec = PoolSpec::parse(&format!("{},size={size}", directory.path().join("pool").display())).unwrap();
        let options = FormatOptions {
            slots: 6,
            locks: 64,
            objects: 16,
            chunk_bytes: (256 << 10).max(cell_bytes.next_power_of_two()),
            cells,
            machine: Some(machine_id(1)),
            seats: vec![machine_id(2), machine_id(3)],
            memory: Some(CoherenceOptions::default()),
            ..FormatOptions::default()
        };
        Pool::format(&spec, &options).unwrap();
        Bench { directory, spec }
    }

    pub fn state_directory(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// A process of machine `machine` that sees the pool directly.
    pub fn member(&self, machine: u8) -> Member {
        self.member_over(machine, "native")
    }

    pub fn member_over(&self, machine: u8, coherence: &str) -> Member {
        let memory = Some(coherence.parse().unwrap());
        let pool = Pool::open(&self.spec, &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
        let state = State::open(&self.state_directory(), pool.superblock().uuid(), machine_id(machine)).unwrap();
        let machine = Arc::new(Machine::new(machine_id(machine), state).unwrap());
        let seats = pool.superblock().seats();
        // A host that waits for a core on a loaded machine is not a dead one.
        let timing = HostConfig { heartbeat_ms: 10, suspect_ms: load::ms(1_000), poll_us: 500, ..HostConfig::default() };
        let host = cxl_pool::pool::join(pool.lines().clone(), machine, HostConfig { seats, ..timing }).unwrap();
        let service = Some(host.serve().unwrap());
        let cache = Cache::open(&host, config()).unwrap();
        Member { cache, service, host, pool }
    }
}

impl Member {
    /// The blocks of the only worker of the test's model.
    pub fn blocks(&self) -> CxlBlocks {
        self.rank(Ranks::ALONE)
    }

    pub fn rank(&self, ranks: Ranks) -> CxlBlocks {
        CxlBlocks::new(&self.cache, &model(), shape(), ranks).unwrap()
    }

    /// Rounds of the upkeep until `is_done`.
    pub fn serve_until(&self, what: &str, mut is_done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_done() {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.cache.usage());
            // Errors are those of a fence, until the host has joined again.
            let _ = self.cache.service_round();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The pool's metadata have no error.
    pub fn assert_clean(&self) {
        let report = fsck::check_twice(self.pool.lines(), &self.pool.superblock().seats()).unwrap();
        assert!(report.is_clean(), "{:?}", report.findings);
    }
}

pub fn model() -> Model {
    Model { name: "tiny".into(), dtype: "bfloat16".into(), ..Model::default() }
}

/// Blocks of 3 KiB: three layers of K and V, 512 bytes each.
pub fn small(num_blocks: usize) -> LayoutConfig {
    LayoutConfig::builder().num_blocks(num_blocks).num_layers(3).outer_dim(2).page_size(4).inner_dim(64).build().unwrap()
}

pub fn shape() -> BlockShape {
    BlockShape::new(&small(1), KvBlockLayout::Unknown).unwrap()
}

/// A layout of zeros.
pub fn layout_of(config: &LayoutConfig, lies: Lies) -> PhysicalLayout {
    static AGENTS: AtomicU32 = AtomicU32::new(0);
    let name = format!("agent-{}-{}", std::process::id(), AGENTS.fetch_add(1, Ordering::Relaxed));
    host_layout(NixlAgent::new(&name).unwrap(), config, lies).unwrap()
}

pub fn layout(num_blocks: usize) -> PhysicalLayout {
    layout_of(&small(num_blocks.max(1)), Lies::Contiguous)
}

/// A chain of keys; another seed makes another.
pub fn chain(len: usize, seed: u64) -> Vec<SequenceHash> {
    let mut hashes = vec![SequenceHash::root(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)];
    while hashes.len() < len {
        let (last, next) = (hashes[hashes.len() - 1], seed << 32 | hashes.len() as u64);
        hashes.push(last.extend(next));
    }
    hashes
}

/// Words of a block in memory, piece by piece.
fn words(layout: &PhysicalLayout, id: usize) -> Vec<&'static mut [u64]> {
    let inner = layout.layout();
    let places = (0..inner.num_layers()).flat_map(|layer| (0..inner.outer_dim()).map(move |outer| (layer, outer)));
    places
        .map(|(layer, outer)| {
            let region = layout.memory_region(id, layer, outer).unwrap();
            let start = std::ptr::with_exposed_provenance_mut(region.addr());
            // SAFETY: the layout's memory, which outlives the test's use of it, one test thread uses it at a time; pieces are aligned.
            unsafe { std::slice::from_raw_parts_mut(start, region.size() / 8) }
        })
        .collect()
}

/// The word at a place of a block that `seed` and `number` name. No two of them are equal within a test.
fn word(seed: u64, number: usize, at: usize) -> u64 {
    (seed << 48 ^ (number as u64) << 24 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

pub fn fill(layout: &PhysicalLayout, id: usize, seed: u64, number: usize) {
    words(layout, id).into_iter().flatten().enumerate().for_each(|(at, place)| *place = word(seed, number, at));
}

/// Whether every word is that of the named block.
pub fn holds(layout: &PhysicalLayout, id: usize, seed: u64, number: usize) -> bool {
    words(layout, id).into_iter().flatten().enumerate().all(|(at, found)| *found == word(seed, number, at))
}

/// Whether nothing was ever written there.
pub fn is_untouched(layout: &PhysicalLayout, id: usize) -> bool {
    words(layout, id).into_iter().flatten().all(|found| *found == 0)
}

/// Stores blocks with the words of `seed`, block `n` under key `n`.
pub fn put(blocks: &CxlBlocks, keys: &[SequenceHash], seed: u64) -> Vec<Outcome> {
    let source = layout(keys.len());
    (0..keys.len()).for_each(|number| fill(&source, number, seed, number));
    let ids: Vec<usize> = (0..keys.len()).collect();
    // SAFETY: this thread alone uses the layout.
    unsafe { blocks.put(keys, &source, &ids) }
}

/// Gets blocks in another order than they lie, and looks at every word of those that are said to be there.
pub fn get(blocks: &CxlBlocks, keys: &[SequenceHash], seed: u64) -> Vec<Outcome> {
    let destination = layout(keys.len());
    let ids: Vec<usize> = (0..keys.len()).rev().collect();
    // SAFETY: as above.
    let outcomes = unsafe { blocks.get(keys, &destination, &ids) };
    assert_eq!(outcomes.len(), keys.len());
    for (number, outcome) in outcomes.iter().enumerate() {
        assert!(*outcome != Outcome::Done || holds(&destination, ids[number], seed, number), "block {number} has wrong words");
    }
    outcomes
}

pub fn all(outcome: Outcome, len: usize) -> Vec<Outcome> {
    vec![outcome; len]
}
