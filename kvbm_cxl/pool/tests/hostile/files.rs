// SPDX-License-Identifier: Apache-2.0
//! Damaged pools behind real mappings: superblocks that lie, files that get shorter, local memory that was overwritten.

use crate::harness::Choices;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea, audit};
use cxl_pool::cache::survey::CacheView;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Pulled};
use cxl_pool::coherence::CoherenceOptions;
use cxl_pool::device::{DevicePart, PoolSpec};
use cxl_pool::fsck;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::machine::{Machine, State};
use cxl_pool::media::SUPERBLOCK_BYTES;
use cxl_pool::objects::Objects;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use cxl_pool::{Error, Result, lock_table};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MACHINE: MachineId = MachineId([5; 16]);
const SIZE: u64 = 6 << 20;
/// Longest that any of these calls may take: their deadlines are far below.
const LONGEST: Duration = Duration::from_secs(240);

/// A formatted pool in a file, or in two, the first of which carries the metadata alone; and the state directory of a machine.
struct Bench {
    folder: tempfile::TempDir,
    devices: usize,
}

impl Bench {
    fn new(devices: usize) -> Bench {
        let bench = Bench { folder: tempfile::tempdir_in("/dev/shm").unwrap(), devices };
        let options = FormatOptions {
            slots: 4,
            locks: 32,
            objects: 16,
            chunk_bytes: 64 << 10,
            cells: vec![CellArea { cell_bytes: 4096, share: Share::Bytes(1 << 20) }],
            machine: Some(MACHINE),
            memory: Some(CoherenceOptions::default()),
            ..FormatOptions::default()
        };
        Pool::format(&bench.spec(Some(SIZE)), &options).unwrap();
        bench
    }

    fn path(&self, device: usize) -> PathBuf {
        self.folder.path().join(format!("device{device}"))
    }

    fn spec(&self, size_bytes: Option<u64>) -> PoolSpec {
        let metadata = (self.devices > 1).then(|| DevicePart { size_bytes, ..DevicePart::whole(self.path(0)) });
        PoolSpec::new(vec![self.path(self.devices - 1)], size_bytes).unwrap().with_metadata(metadata).unwrap()
    }

    fn file(&self, device: usize) -> File {
        File::options().read(true).write(true).open(self.path(device)).unwrap()
    }

    fn open(&self, read_only: bool) -> Result<Pool> {
        let options = OpenOptions { read_only, memory: Some(CoherenceOptions::default()), ..OpenOptions::default() };
        Pool::open(&self.spec(None), &options)
    }

    fn state(&self, pool: &Pool) -> State {
        State::open(&self.folder.path().join("state"), pool.superblock().uuid(), MACHINE).unwrap()
    }

    fn join(&self, pool: &Pool, suspect_ms: u64) -> Result<Host> {
        let config = HostConfig {
            seats: pool.superblock().seats(),
            join_timeout_ms: Some(3 * suspect_ms),
            heartbeat_ms: 5,
            suspect_ms,
            ..HostConfig::default()
        };
        cxl_pool::pool::join(pool.lines().clone(), Arc::new(Machine::new(MACHINE, self.state(pool))?), config)
    }
}

/// Everything that a host does, as far as it gets. Returns how many steps failed.
fn use_all(pool: &Pool, host: &Host, timeout_ms: u64) -> usize {
    let start = Instant::now();
    let (objects, seats) = (Objects::new(host), pool.superblock().seats());
    let config = AllocConfig { lock_timeout_ms: Some(timeout_ms), ..AllocConfig::default() };
    let allocator = LocalArea::of(host).and_then(|local| Allocator::attach(host, local, config));
    let mut outcomes = vec![
        pool.check_not_replaced(),
        host.service_round().map(drop),
        host.acquire(30, timeout_ms).map(drop),
        lock_table::allocate_lock(host, timeout_ms).map(drop),
        objects.put(b"name", pool.layout().data_offset(), 64, timeout_ms),
        objects.list(timeout_ms).map(drop),
        audit(pool.lines()).map(drop),
        fsck::check(pool.lines(), &seats).map(drop),
        fsck::survey(pool.lines(), &seats).map(drop),
    ];
    match &allocator {
        Ok(allocator) => {
            let block = allocator.alloc(100);
            outcomes.push(block.as_ref().map_or_else(|_| Err(Error::Closed), |block| allocator.keep(block.offset)));
            outcomes.push(block.map_or_else(Err, |block| allocator.free(block.offset)));
            outcomes.push(allocator.service_round());
            outcomes.push(allocator.adopt_dead().map(drop));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    outcomes.push(use_cache(pool, host, timeout_ms));
    assert!(start.elapsed() < LONGEST, "{:?}", start.elapsed());
    outcomes.iter().filter(|outcome| outcome.is_err()).count()
}

/// A block published, pulled and cleared.
fn use_cache(pool: &Pool, host: &Host, timeout_ms: u64) -> Result<()> {
    let (namespace, key, block) = (Namespace([1; 16]), BlockKey([2; 16]), (0..3000u32).map(|at| (at * 7) as u8).collect::<Vec<u8>>());
    let cache = Cache::open(host, CacheConfig { checksums: true, lock_timeout_ms: Some(timeout_ms), ..CacheConfig::default() })?;
    let mut found = vec![0; 4096];
    let outcome = cache
        .publish(namespace, key, None, &block)
        .and_then(|_| cache.pull(namespace, key, &mut found))
        .map(|pulled| assert!(matches!(pulled, Pulled::Miss(_)) || found[..3000] == block))
        .and_then(|()| cache.service_round())
        .and_then(|()| CacheView::load(pool.lines())?.summary(true).map(drop))
        .and_then(|()| cache.clear(None).map(drop));
    outcome.and(cache.close())
}

/// The superblock of a device as it is there.
fn superblock_of(bench: &Bench, device: usize) -> Vec<u8> {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    bench.file(device).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// `good` with some numbers changed, and a right checksum.
fn lying(choices: &mut Choices, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for _ in 0..=choices.below(3) {
        let width = choices.pick(&[1, 2, 4, 8]);
        // In the first part, or where cells and the bytes of metadata are.
        let (from, len) = choices.pick(&[(0, 1400), (0, 1400), (3072, 96)]);
        let at = from + choices.below((len / width) as u64) as usize * width;
        let values = [0, 1, 2, 3, 64, 255, 4096, 1 << 16, 1 << 22, 1 << 31, u64::from(u32::MAX), 1 << 46, u64::MAX, choices.word()];
        bytes[at..at + width].copy_from_slice(&choices.pick(&values).to_le_bytes()[..width]);
    }
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn a_superblock_that_lies_is_refused_or_harmless_and_never_written() {
    let (one, apart) = (Bench::new(1), Bench::new(2));
    // Of two devices, one lies, or both say the same.
    for (bench, liars) in [(&one, 0..1), (&apart, 0..1), (&apart, 1..2), (&apart, 0..2)] {
        let good: Vec<_> = (0..bench.devices).map(|device| superblock_of(bench, device)).collect();
        for seed in 0..400 {
            let mut written = good.clone();
            for device in liars.clone() {
                written[device] = lying(&mut Choices::of_seed(seed), &good[device]);
                bench.file(device).write_all_at(&written[device], 0).unwrap();
            }
            for read_only in [true, false] {
                match bench.open(read_only) {
                    // What it says of devices, seats and identity cannot be told from the truth; the lines then belong to another pool.
                    Ok(pool) => {
                        let seats = pool.superblock().seats();
                        fsck::check(pool.lines(), &seats).unwrap();
                        fsck::survey(pool.lines(), &seats).unwrap();
                        assert!(matches!(audit(pool.lines()), Ok(_) | Err(Error::BadLine { .. })));
                    }
                    Err(error) => assert!(!error.to_string().is_empty(), "seed {seed}"),
                }
            }
            let after: Vec<_> = (0..bench.devices).map(|device| superblock_of(bench, device)).collect();
            assert!(after == written, "seed {seed}: an open wrote to a superblock");
        }
        liars.for_each(|device| bench.file(device).write_all_at(&good[device], 0).unwrap());
        bench.open(false).unwrap();
    }
}

#[test]
fn a_file_that_gets_shorter_under_a_host_is_an_error_in_time() {
    let one = [0, 4096, 2 << 20, (2 << 20) + 8192, 3 << 20].map(|len_bytes| (1, 0, len_bytes));
    let apart = [(2, 0, 0), (2, 0, 4096), (2, 0, 2 << 20), (2, 0, (2 << 20) + 8192), (2, 1, 0), (2, 1, 2 << 20)];
    for (devices, device, len_bytes) in one.into_iter().chain(apart) {
        let bench = Bench::new(devices);
        let pool = bench.open(false).unwrap();
        let host = bench.join(&pool, 2_000).unwrap();
        let service = host.serve().unwrap();
        assert_eq!(use_all(&pool, &host, 20_000), 0, "before the loss");
        bench.file(device).set_len(len_bytes).unwrap();
        let failed = use_all(&pool, &host, 50);
        assert!(failed > 0 || len_bytes >= 3 << 20, "{len_bytes} bytes are left, yet all is well");
        let start = Instant::now();
        drop(service);
        // Nothing can be published any more where the lines were.
        let left = host.leave();
        assert!(left.is_err() || len_bytes > 2 << 20 || device > 0, "{len_bytes} bytes are left, yet the slot was given up");
        drop(host);
        assert!(start.elapsed() < LONGEST);
        assert!(matches!(bench.open(false), Err(Error::NotAPool { .. } | Error::Os { .. } | Error::Invalid(_) | Error::DeviceLost { .. })));
        assert_eq!(bench.file(device).metadata().unwrap().len(), len_bytes, "no process may make the file longer");
    }
}

#[test]
fn periods_with_which_living_hosts_seem_dead_are_refused_before_anything_is_bound() {
    let bench = Bench::new(1);
    let pool = bench.open(false).unwrap();
    let told = bench.join(&pool, 9).err().expect("a host that is suspected between two beats").to_string();
    assert!(told.contains("suspect_ms (9)") && told.contains("heartbeat_ms (5)"), "{told}");
    let host = bench.join(&pool, 1_000).unwrap();
    assert_eq!(host.incarnation(), 1);
    host.leave().unwrap();
}

#[test]
fn local_memory_that_was_overwritten_is_survived_by_the_next_process() {
    let bench = Bench::new(1);
    let pool = bench.open(false).unwrap();
    let local = bench.state(&pool).directory().join("local");
    drop(bench.join(&pool, 1_000).unwrap());
    let good = std::fs::read(&local).unwrap();
    for seed in 0..24 {
        let mut choices = Choices::of_seed(seed);
        let mut bytes = good.clone();
        match seed % 4 {
            // Everything but the versions of the two parts, or anything at all.
            0 => bytes.iter_mut().skip(4).for_each(|byte| *byte = choices.word() as u8),
            1 => bytes.iter_mut().for_each(|byte| *byte = choices.word() as u8),
            2 => bytes.truncate(choices.below(bytes.len() as u64) as usize),
            _ => {
                for _ in 0..40 {
                    let at = 4 + choices.below(bytes.len() as u64 - 12) as usize;
                    bytes[at..at + 4].copy_from_slice(&choices.pick(&[0, 1, 5, u32::MAX, 1 << 31]).to_le_bytes());
                }
            }
        }
        std::fs::write(&local, &bytes).unwrap();
        let start = Instant::now();
        match bench.join(&pool, 100) {
            Ok(host) => {
                use_all(&pool, &host, 50);
            }
            Err(error) => assert!(!error.to_string().is_empty(), "seed {seed}"),
        }
        assert!(start.elapsed() < LONGEST, "seed {seed}: {:?}", start.elapsed());
        std::fs::write(&local, &good).unwrap();
    }
    let host = bench.join(&pool, 10_000).unwrap();
    host.leave().unwrap();
}
