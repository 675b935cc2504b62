// SPDX-License-Identifier: Apache-2.0
//! Pools with hosts in this process. The test itself runs the upkeep of the caches.

use crate::load;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Pulled, chain};
use cxl_pool::coherence::CoherenceOptions;
use cxl_pool::device::{DevicePart, PoolSpec};
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::line::Line;
use cxl_pool::machine::{Machine, State};
use cxl_pool::media::Region;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for anything: it only ends a test that hangs.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A pool in a file.
pub struct Bench {
    pub directory: Arc<tempfile::TempDir>,
    pub spec: PoolSpec,
}

/// One process of a host, as far as the pool can tell.
pub struct Member {
    pub pool: Pool,
    pub host: Host,
    pub service: Option<Service>,
    pub cache: Cache,
}

/// Identity of a machine.
pub fn machine_id(number: u8) -> MachineId {
    MachineId([number; 16])
}

pub fn host_config() -> HostConfig {
    // A join may have to wait for a manager that is taken for dead first.
    let (suspect_ms, join_timeout_ms) = (load::ms(300), Some(load::ms(10_000)));
    HostConfig { heartbeat_ms: 10, suspect_ms, damage_ms: suspect_ms, join_timeout_ms, poll_us: 500, ..HostConfig::default() }
}

/// Checks bytes, has locks for a while, and does all of its upkeep in every round.
pub fn config() -> CacheConfig {
    CacheConfig { checksums: true, lock_timeout_ms: Some(20_000), upkeep_ms: 1, ..CacheConfig::default() }
}

impl Bench {
    /// A pool with so many cells of each size: (bytes of a cell, cells). Machines 1 to 3 have manager seats.
    pub fn new(cells: &[(u64, u64)]) -> Bench {
        let directory = Arc::new(tempfile::tempdir_in("/dev/shm").unwrap());
        Bench::at(directory, 0, cells)
    }

    /// Several pools, one behind the other, in a file that has `gap` bytes before each of them and behind the last.
    pub fn side_by_side(count: u64, gap: u64, cells: &[(u64, u64)]) -> Vec<Bench> {
        let directory = Arc::new(tempfile::tempdir_in("/dev/shm").unwrap());
        let step = gap + Bench::size_for(cells);
        std::fs::write(directory.path().join("pool"), bytes(7, (count * step + gap) as usize)).unwrap();
        (0..count).map(|number| Bench::at(directory.clone(), gap + number * step, cells)).collect()
    }

    fn size_for(cells: &[(u64, u64)]) -> u64 {
        let cells_bytes: u64 = cells.iter().map(|(cell_bytes, count)| cell_bytes * count).sum();
        (8 << 20) + (2 * cells_bytes).next_multiple_of(2 << 20)
    }

    fn at(directory: Arc<tempfile::TempDir>, offset: u64, cells: &[(u64, u64)]) -> Bench {
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(Bench::size_for(cells)));
        Bench::of(directory, spec.unwrap().with_offset(offset).unwrap(), cells)
    }

    /// A pool whose cells and chunks lie in so many files, `pool0` and up, and its metadata in another one, `metadata`.
    pub fn apart(payload: usize, cells: &[(u64, u64)]) -> Bench {
        let directory = Arc::new(tempfile::tempdir_in("/dev/shm").unwrap());
        let paths = (0..payload).map(|index| directory.path().join(format!("pool{index}"))).collect();
        let metadata = DevicePart { size_bytes: Some(32 << 20), ..DevicePart::whole(directory.path().join("metadata")) };
        let spec = PoolSpec::new(paths, Some(Bench::size_for(cells))).unwrap().with_metadata(Some(metadata));
        Bench::of(directory, spec.unwrap(), cells)
    }

    fn of(directory: Arc<tempfile::TempDir>, spec: PoolSpec, cells: &[(u64, u64)]) -> Bench {
        let area = |&(cell_bytes, count)| CellArea { cell_bytes, share: Share::Bytes(cell_bytes * count) };
        let options = FormatOptions {
            slots: 4,
            locks: 64,
            objects: 16,
            chunk_bytes: 256 << 10,
            cells: cells.iter().map(area).collect(),
            machine: Some(machine_id(1)),
            seats: vec![machine_id(2), machine_id(3)],
            memory: Some(CoherenceOptions::default()),
            force: spec.offset_bytes() > 0,
            ..FormatOptions::default()
        };
        Pool::format(&spec, &options).unwrap();
        Bench { directory, spec }
    }

    pub fn state_directory(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub fn open(&self) -> Pool {
        Pool::open(&self.spec, &OpenOptions { memory: Some(CoherenceOptions::default()), ..OpenOptions::default() }).unwrap()
    }

    /// A process of machine `machine`, with its own mapping of the pool.
    pub fn join(&self, machine: u8) -> (Pool, Host) {
        self.join_in(machine, None)
    }

    /// As [`Bench::join`], in this slot where one is named.
    pub fn join_in(&self, machine: u8, slot: Option<u16>) -> (Pool, Host) {
        let pool = self.open();
        let state = State::open(&self.state_directory(), pool.superblock().uuid(), machine_id(machine)).unwrap();
        let machine = Arc::new(Machine::new(machine_id(machine), state).unwrap());
        let config = HostConfig { seats: pool.superblock().seats(), slot, ..host_config() };
        let host = cxl_pool::pool::join(pool.lines().clone(), machine, config).unwrap();
        (pool, host)
    }

    /// As [`Bench::join`], with a cache.
    pub fn member_with(&self, machine: u8, config: CacheConfig) -> Member {
        let (pool, host) = self.join(machine);
        let service = Some(host.serve().unwrap());
        let cache = Cache::open(&host, config).unwrap();
        Member { pool, host, service, cache }
    }

    pub fn member(&self, machine: u8) -> Member {
        self.member_with(machine, config())
    }
}

impl Member {
    /// Ends in good order.
    pub fn leave(self) {
        self.cache.close().unwrap();
        self.host.leave().unwrap();
    }

    /// Rounds of the upkeep until `is_done`.
    pub fn serve_until(&self, what: &str, mut is_done: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_done() {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.cache.usage());
            self.cache.service_round().unwrap();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Rounds of the upkeep until the host has joined again after the fence of `incarnation`.
    pub fn serve_until_rejoined(&self, incarnation: u32) {
        let deadline = Instant::now() + PATIENCE;
        while self.cache.service_round().is_err() || self.host.incarnation() == incarnation {
            assert!(Instant::now() < deadline, "the host did not join again");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Publishes blocks `range` of `len_bytes` bytes, which are not published yet.
    pub fn publish(&self, range: std::ops::Range<u64>, len_bytes: usize) {
        for number in range {
            let published = self.cache.publish(SPACE, key(number), None, &bytes(number, len_bytes));
            assert_eq!(published.unwrap(), cxl_pool::cache::Published::Stored, "block {number}");
        }
    }

    /// Whether a block is there; its bytes have to be right then.
    pub fn has(&self, number: u64, len_bytes: usize) -> bool {
        let mut found = vec![0; len_bytes];
        match self.cache.pull(SPACE, key(number), &mut found).unwrap() {
            Pulled::Hit { len_bytes: found_len } => {
                assert!(found_len == len_bytes as u64 && found == bytes(number, len_bytes), "block {number} has wrong bytes");
                true
            }
            Pulled::Miss(_) => false,
        }
    }

    /// How many of some blocks are there.
    pub fn count(&self, range: std::ops::Range<u64>, len_bytes: usize) -> usize {
        range.filter(|&number| self.has(number, len_bytes)).count()
    }
}

/// Waits until the host that has `slot` is fenced.
pub fn await_fence(observer: &Member, slot: u16, incarnation: u32) {
    let deadline = Instant::now() + PATIENCE;
    while !observer.host.is_fenced(slot, incarnation).unwrap() {
        assert!(Instant::now() < deadline, "a silent host was not fenced");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Leaves a line as a writer does that stops in the middle of it; returns what it was.
pub fn tear(member: &Member, region: Region, index: u64) -> Line {
    let offset = member.pool.layout().line_offset(region, index).unwrap();
    let whole = member.pool.lines().fetch_raw(offset).unwrap();
    let mut torn = whole;
    torn.0[..4].iter_mut().for_each(|byte| *byte ^= 0xff);
    mend(member, region, index, &torn);
    whole
}

/// Writes a line as it is.
pub fn mend(member: &Member, region: Region, index: u64, line: &Line) {
    let memory = member.pool.lines().memory();
    memory.write_line(member.pool.layout().line_offset(region, index).unwrap(), line).unwrap();
    memory.fence_stores();
}

/// The namespace of most tests.
pub const SPACE: Namespace = Namespace([0x11; 16]);
/// Another one.
pub const OTHER_SPACE: Namespace = Namespace([0x22; 16]);

/// Key of a block.
pub fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32, (number >> 32) as u32], b"test")
}

/// Bytes of a block: different in every block and at every place.
pub fn bytes(number: u64, len_bytes: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635;
    let words = (0..len_bytes.div_ceil(8)).flat_map(|_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).to_le_bytes()
    });
    words.take(len_bytes).collect()
}
