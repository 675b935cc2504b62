// SPDX-License-Identifier: Apache-2.0
//! Blocks that are lent where they lie: by processes of other machines that write to them again and again, with plain stores to a mapping,
//! with and without an emulator of hosts that are not coherent; and by processes that are killed.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::cache::lent::{Lend, Lending, LentRegion, Part, RegionSize, reap};
use cxl_pool::cache::{Cache, Pulled};
use cxl_pool::coherence::CoherenceOptions;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, Service};
use cxl_pool::lock::{LOCK_CHUNKS, LockGuard};
use cxl_pool::metrics::MissReason;
use cxl_pool::pool::{OpenOptions, Pool};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names the pool; only set for children.
const POOL: &str = "LENT_CHILD_POOL";
/// File that the child makes once it has lent every block.
const DONE: &str = "LENT_CHILD_DONE";
/// File whose presence tells the child to write and lend again and again.
const AGAIN: &str = "LENT_CHILD_AGAIN";

const BLOCKS: u32 = 8;
const PARTS: [Part; 3] = [
    Part { start_bytes: 0, stride_bytes: 4096, len_bytes: 4096 },
    Part { start_bytes: 8 * 4096, stride_bytes: 1000, len_bytes: 1000 },
    Part { start_bytes: 8 * 4096 + 8 * 1000, stride_bytes: 3072, len_bytes: 3000 },
];
const SIZE: RegionSize = RegionSize { len_bytes: 80_000, blocks: BLOCKS, parts: PARTS.len() };
const LEN: usize = 4096 + 1000 + 3000;

/// Bytes of version `version` of the block of key `number`: the first 8 say which version it is.
fn version(number: u64, version: u64) -> Vec<u8> {
    let mut bytes = bytes(number << 32 | version, LEN);
    bytes[..8].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Fails unless the bytes are some version of the block; returns which.
fn version_of(number: u64, found: &[u8]) -> u64 {
    let claimed = u64::from_le_bytes(found[..8].try_into().unwrap());
    assert!(found == version(number, claimed), "block {number} has bytes of no version");
    claimed
}

/// A process with what lending takes.
struct Lender {
    allocator: Arc<Allocator>,
    region: LentRegion,
}

impl Lender {
    fn new(host: &Host, cache: &Cache) -> Lender {
        let config = AllocConfig { lock_timeout_ms: Some(20_000), ..AllocConfig::default() };
        let allocator = Arc::new(Allocator::attach(host, LocalArea::of(host).unwrap(), config).unwrap());
        let region = LentRegion::create(cache, &allocator, SIZE).unwrap();
        region.set_parts(&PARTS).unwrap();
        assert_eq!(region.block_bytes(), LEN as u64);
        Lender { allocator, region }
    }

    /// Writes a block as an engine does.
    fn write(&self, block: u32, content: &[u8]) {
        let mut at = 0;
        for piece in self.region.pieces(block).unwrap() {
            // SAFETY: the piece is mapped memory of this region; the block is not lent, and no other thread of this test uses it.
            unsafe { std::ptr::copy_nonoverlapping(content[at..].as_ptr(), piece.address.as_ptr(), piece.len_bytes) };
            at += piece.len_bytes;
        }
    }

    fn lend(&self, block: u32, number: u64) -> Lending {
        self.region.lend_all(&[Lend { block, namespace: SPACE, key: key(number), parent: None }]).unwrap()[0]
    }
}

/// The child: lends every block, and writes and lends them again for as long as it is told to.
pub fn run_if_child() {
    let Ok(spec) = std::env::var(POOL) else { return };
    let memory = Some(CoherenceOptions::from_env().unwrap());
    let pool = Pool::open(&PoolSpec::parse(&spec).unwrap(), &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
    let host = pool.join(host_config()).unwrap();
    let _service = host.serve().unwrap();
    let cache = Cache::open(&host, config()).unwrap();
    let _upkeep = cache.serve().unwrap();
    let lender = Lender::new(&host, &cache);
    let (done, again) = (std::env::var(DONE).unwrap(), std::env::var(AGAIN).unwrap());
    for round in 1.. {
        for block in 0..BLOCKS {
            lender.region.take_back(&[block]).unwrap();
            lender.write(block, &version(block.into(), round));
            // A reader may have pinned the reference to the version before; then no reader can pull this one.
            let _ = lender.lend(block, block.into());
        }
        if round == 1 {
            assert_eq!(lender.region.lent(), BLOCKS as usize);
            std::fs::write(&done, b"").unwrap();
        }
        while !Path::new(&again).exists() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A child that has lent its blocks; it is killed when this is dropped.
struct Process(Child);

impl Process {
    fn start(bench: &Bench, machine: u8, coherence: &str) -> Process {
        let done: PathBuf = bench.directory.path().join("done");
        let _ = std::fs::remove_file(&done);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(POOL, bench.spec.to_string())
            .env(DONE, &done)
            .env(AGAIN, bench.directory.path().join("again"))
            .env("CXL_STATE_DIR", bench.state_directory())
            .env("CXL_MACHINE_ID", machine_id(machine).to_string())
            .env("CXL_COHERENCE", coherence)
            .stdout(Stdio::null());
        let mut process = Process(command.spawn().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while !done.exists() {
            assert!(process.0.try_wait().unwrap().is_none(), "the child ended by itself");
            assert!(Instant::now() < deadline, "the child does not get on");
            std::thread::sleep(Duration::from_millis(2));
        }
        process
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pulls a block; the version that it is.
fn pull(member: &Member, number: u64) -> Result<u64, MissReason> {
    let mut found = vec![0; LEN];
    match member.cache.pull(SPACE, key(number), &mut found).unwrap() {
        Pulled::Hit { len_bytes } => {
            assert_eq!(len_bytes, LEN as u64);
            Ok(version_of(number, &found))
        }
        Pulled::Miss(reason) => Err(reason),
    }
}

fn bench() -> Bench {
    Bench::new(&[(64, 56), (16 << 10, 28)])
}

#[test]
fn a_block_is_pulled_from_where_it_was_lent_until_it_is_taken_back() {
    let bench = bench();
    let (owner, reader) = (bench.member(1), bench.member(2));
    let lender = Lender::new(&owner.host, &owner.cache);
    assert!(matches!(
        lender.region.lend_all(&[Lend { block: BLOCKS, namespace: SPACE, key: key(0), parent: None }]),
        Err(Error::Invalid(_))
    ));
    for block in 0..BLOCKS {
        lender.write(block, &version(block.into(), 1));
        assert_eq!(lender.lend(block, block.into()), Lending::Lent);
    }
    assert_eq!(lender.lend(3, 3), Lending::Exists, "it is lent under this key");
    let keys: Vec<_> = (0..u64::from(BLOCKS)).map(key).collect();
    let found = reader.cache.lookup_chain(SPACE, &keys).unwrap();
    assert!(found.len() == keys.len() && found.iter().all(|block| block.len_bytes == LEN as u64));
    assert!((0..u64::from(BLOCKS)).all(|number| pull(&reader, number) == Ok(1)));
    // Nothing was copied into the pool but the references.
    assert_eq!((owner.cache.metrics().lent_total.get(), reader.cache.metrics().lent_pulled_total.get()), (8, 8));
    // A part of a block, across two of its parts.
    let pinned = reader.cache.pin(SPACE, key(2)).unwrap().unwrap();
    let mut middle = vec![0; 3000];
    let mut list = cxl_pool::copy::ReadList::scatter(pinned.offset() + 3500, middle.chunks_mut(777));
    assert_eq!(pinned.copy(&mut list).unwrap(), None);
    assert!(middle == version(2, 1)[3500..6500]);
    // It is no block for use in place, and the pin does not hold the lender up.
    assert!(pinned.is_lent() && pinned.address().is_none() && !pinned.is_unchanged().unwrap());
    lender.region.take_back(&[2]).unwrap();
    lender.write(2, &version(2, 2));
    assert_eq!(pinned.copy_to(&mut vec![0; LEN]).unwrap(), Some(MissReason::TakenBack));
    assert_eq!(lender.lend(2, 2), Lending::Exists, "the stale reference is pinned");
    drop(pinned);
    assert_eq!((lender.region.tidy().unwrap(), pull(&reader, 2)), (1, Err(MissReason::Absent)));
    assert_eq!((lender.lend(2, 2), pull(&reader, 2)), (Lending::Lent, Ok(2)));
    // An evicted reference comes back for the same lending.
    assert!(owner.cache.evict(SPACE, key(5)).unwrap());
    assert_eq!((pull(&reader, 5), lender.lend(5, 5), pull(&reader, 5)), (Err(MissReason::Absent), Lending::Lent, Ok(1)));
    assert_eq!(lender.region.lent(), 8);
    lender.region.take_back_all().unwrap();
    assert_eq!(pull(&reader, 0), Err(MissReason::TakenBack));
    lender.region.close().unwrap();
    assert_eq!((lender.allocator.usage().kept_bytes, owner.cache.usage().ready), (0, 0));
}

#[test]
fn a_lent_block_is_pulled_into_memory_of_the_readers_own_region() {
    let bench = bench();
    let (one, two) = (bench.member(1), bench.member(2));
    let (from, to) = (Lender::new(&one.host, &one.cache), Lender::new(&two.host, &two.cache));
    from.write(1, &version(7, 1));
    assert_eq!(from.lend(1, 7), Lending::Lent);
    let pieces = to.region.pieces(4).unwrap();
    // SAFETY: memory of the region of this test alone, in a block that is not lent and that no other thread uses.
    let pulled = unsafe { two.cache.pull_raw(SPACE, key(7), &pieces) }.unwrap();
    assert_eq!(pulled, Pulled::Hit { len_bytes: LEN as u64 });
    from.region.take_back_all().unwrap();
    from.region.tidy().unwrap();
    // What was pulled is lent on.
    assert_eq!((to.lend(4, 7), pull(&one, 7)), (Lending::Lent, Ok(1)));
}

#[test]
fn nothing_is_pulled_into_a_lent_block_nor_lent_while_it_is_filled() {
    let bench = bench();
    let (one, two) = (bench.member(1), bench.member(2));
    let (from, to) = (Lender::new(&one.host, &one.cache), Lender::new(&two.host, &two.cache));
    for block in 0..3 {
        from.write(block, &version(block.into(), 1));
        assert_eq!(from.lend(block, block.into()), Lending::Lent);
    }
    // SAFETY: blocks of the region of this test alone, which no other thread uses.
    let pull_into = |keys: &[u64], blocks: &[u32]| unsafe {
        to.region.pull(SPACE, &keys.iter().map(|&number| key(number)).collect::<Vec<_>>(), blocks)
    };
    let refused = |keys: &[u64], blocks: &[u32]| match pull_into(keys, blocks) {
        Err(Error::Invalid(message)) => message,
        other => panic!("{other:?}"),
    };
    let hit = Pulled::Hit { len_bytes: LEN as u64 };
    assert_eq!(pull_into(&[0, 9, 1], &[4, 5, 6]).unwrap(), [hit, Pulled::Miss(MissReason::Absent), hit]);
    let content_of = |block: u32| -> Vec<u8> {
        // SAFETY: as above.
        to.region
            .pieces(block)
            .unwrap()
            .iter()
            .flat_map(|it| unsafe { std::slice::from_raw_parts(it.address.as_ptr(), it.len_bytes) }.to_vec())
            .collect()
    };
    assert!(content_of(4) == version(0, 1) && content_of(6) == version(1, 1));
    to.write(4, &version(20, 1));
    assert_eq!(to.lend(4, 20), Lending::Lent);
    let offer = to.region.offer(&[Lend { block: 6, namespace: SPACE, key: key(21), parent: None }]).unwrap();
    for (keys, blocks) in [(&[2, 1][..], &[5, 4][..]), (&[2], &[6]), (&[1, 2], &[3, 3])] {
        assert!(refused(keys, blocks).contains("take it back"), "{blocks:?}");
    }
    assert!(refused(&[1], &[]).contains("give one block for each key") && refused(&[1], &[BLOCKS]).contains("of a region of"));
    // Not a byte of them was touched, and those that were named with them are as free as before.
    assert!(content_of(4) == version(20, 1) && pull(&one, 20) == Ok(1));
    assert_eq!(to.region.lend(offer).unwrap(), [Lending::Lent]);
    assert_eq!((to.region.take_back(&[3, 4, 5]).unwrap(), pull_into(&[2, 1], &[5, 4]).unwrap()), (1, vec![hit, hit]));
    assert_eq!(to.region.take_back_all().unwrap(), 1);
}

#[test]
fn the_memory_of_a_region_outlives_it() {
    let bench = bench();
    let (owner, reader) = (bench.member(1), bench.member(2));
    let Lender { allocator, region } = Lender::new(&owner.host, &owner.cache);
    let lender = Lender { allocator: allocator.clone(), region };
    lender.write(0, &version(0, 1));
    assert_eq!(lender.lend(0, 0), Lending::Lent);
    let memory = lender.region.memory().clone();
    lender.region.take_back_all().unwrap();
    drop(lender);
    assert!(allocator.usage().kept_bytes > 0 && memory.address().is_some());
    assert_eq!(pull(&reader, 0), Err(MissReason::TakenBack));
    memory.free().unwrap();
    memory.free().unwrap();
    assert_eq!(allocator.usage().kept_bytes, 0);
}

/// Fences a host, waits until it has joined again, and takes the lock of the chunks, which its next free needs, to another one.
fn fenced_and_without_the_lock<'h>(member: &Member, other: &'h Member) -> LockGuard<'h> {
    let incarnation = member.host.incarnation();
    [member, other].iter().for_each(|of| of.host.suspect(member.host.slot(), incarnation).unwrap());
    member.serve_until_rejoined(incarnation);
    other.host.acquire(LOCK_CHUNKS, 20_000).unwrap()
}

fn impatient_allocator(host: &Host) -> Arc<Allocator> {
    let config = AllocConfig { lock_timeout_ms: Some(100), ..AllocConfig::default() };
    Arc::new(Allocator::attach(host, LocalArea::of(host).unwrap(), config).unwrap())
}

#[test]
fn memory_whose_free_fails_can_be_freed_later() {
    let bench = bench();
    let (owner, other) = (bench.member(1), bench.member(2));
    let allocator = impatient_allocator(&owner.host);
    let region = LentRegion::create(&owner.cache, &allocator, SIZE).unwrap();
    let kept_bytes = allocator.usage().kept_bytes;
    let lock = fenced_and_without_the_lock(&owner, &other);
    for _ in 0..2 {
        assert!(matches!(region.memory().free(), Err(Error::Timeout { .. } | Error::Fenced { .. })));
        assert_eq!(allocator.usage().kept_bytes, kept_bytes);
    }
    drop(lock);
    region.memory().free().unwrap();
    assert_eq!(allocator.usage().kept_bytes, 0);
}

#[test]
fn memory_of_a_dead_process_whose_free_fails_is_reaped_later() {
    let bench = bench();
    let (member, other) = (bench.member(1), bench.member(2));
    let allocator = impatient_allocator(&member.host);
    drop(Process::start(&bench, 1, "native"));
    member.serve_until("the chunks of a dead process", || {
        allocator.service_round().unwrap();
        allocator.usage().kept_bytes > 0
    });
    let kept_bytes = allocator.usage().kept_bytes;
    let lock = fenced_and_without_the_lock(&member, &other);
    for _ in 0..2 {
        assert!(matches!(reap(&member.host, &allocator), Err(Error::Timeout { .. } | Error::Fenced { .. })));
        assert_eq!(allocator.usage().kept_bytes, kept_bytes);
    }
    drop(lock);
    assert_eq!(reap(&member.host, &allocator).unwrap(), 1);
    assert_eq!(allocator.usage().kept_bytes, 0);
}

#[test]
fn stale_references_in_cells_of_others_are_not_forgotten_by_a_tidy_that_fails() {
    let bench = bench();
    let (mut owner, other) = (bench.member(2), bench.member(1));
    let lender = Lender::new(&owner.host, &owner.cache);
    assert_eq!(lender.lend(0, 0), Lending::Lent);
    let fence = |owner: &mut Member| {
        drop(owner.service.take());
        await_fence(&other, owner.host.slot(), owner.host.incarnation());
    };
    let join_again = |owner: &mut Member| {
        let incarnation = owner.host.incarnation();
        owner.service = Some(owner.host.serve().unwrap());
        owner.serve_until_rejoined(incarnation);
    };
    let is_there = || other.cache.lookup(SPACE, key(0)).unwrap().is_some();
    fence(&mut owner);
    other.serve_until("adoption", is_there);
    join_again(&mut owner);
    lender.region.take_back(&[0]).unwrap();
    fence(&mut owner);
    assert!(matches!(lender.region.tidy(), Err(Error::Fenced { .. })));
    join_again(&mut owner);
    lender.region.tidy().unwrap();
    other.serve_until("the end of a stale reference", || !is_there());
}

#[test]
fn a_watch_sees_what_is_lent() {
    let bench = bench();
    let (owner, reader) = (bench.member(1), bench.member(2));
    let lender = Lender::new(&owner.host, &owner.cache);
    let mut watch = reader.cache.watch(SPACE, LEN as u64, &[]).unwrap();
    owner.cache.publish(SPACE, key(100), None, &version(100, 1)).unwrap();
    // As small as a reference, but none.
    owner.cache.publish(SPACE, key(200), None, &[7; 64]).unwrap();
    lender.write(0, &version(0, 1));
    assert_eq!(lender.lend(0, 0), Lending::Lent);
    let mut added = watch.look(&reader.cache).unwrap().added;
    added.sort_unstable();
    let mut expected = vec![key(0), key(100)];
    expected.sort_unstable();
    assert_eq!(added, expected);
    assert!(reader.cache.list(SPACE, LEN as u64).unwrap().iter().all(|block| block.is_lent == (block.key == key(0))));
    lender.region.take_back(&[0]).unwrap();
    lender.region.tidy().unwrap();
    assert_eq!(watch.look(&reader.cache).unwrap().removed, [key(0)]);
}

/// A child writes and lends its blocks again and again while they are pulled.
fn written_again(coherence: &str) {
    let bench = bench();
    let memory = Some(coherence.parse().unwrap());
    let pool = Pool::open(&bench.spec, &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
    let state = cxl_pool::machine::State::open(&bench.state_directory(), pool.superblock().uuid(), machine_id(1)).unwrap();
    let machine = Arc::new(cxl_pool::machine::Machine::new(machine_id(1), state).unwrap());
    let host_config = cxl_pool::host::HostConfig { seats: pool.superblock().seats(), ..host_config() };
    let host = cxl_pool::pool::join(pool.lines().clone(), machine, host_config).unwrap();
    let service: Service = host.serve().unwrap();
    let cache = Cache::open(&host, config()).unwrap();
    let reader = Member { pool, host, service: Some(service), cache };
    let child = Process::start(&bench, 2, coherence);
    assert!((0..u64::from(BLOCKS)).all(|number| pull(&reader, number) == Ok(1)));
    std::fs::write(bench.directory.path().join("again"), b"").unwrap();
    let (deadline, mut hits, mut taken_back, mut last) = (Instant::now() + PATIENCE, 0, 0, 0);
    while hits < 200 || taken_back == 0 || last < 20 {
        assert!(Instant::now() < deadline, "{hits} hits, {taken_back} were taken back, version {last}");
        for number in 0..u64::from(BLOCKS) {
            match pull(&reader, number) {
                Ok(version) => (hits, last) = (hits + 1, last.max(version)),
                Err(MissReason::TakenBack) => taken_back += 1,
                Err(MissReason::Checksum) => panic!("the lines vouched for bytes that have another checksum"),
                Err(_) => {}
            }
        }
    }
    assert!(reader.cache.metrics().lent_pulled_total.get() >= 200);
    drop(child);
}

#[test]
fn blocks_that_are_written_again_and_again_are_right_or_a_miss() {
    written_again("native");
}

#[test]
fn blocks_that_are_written_again_and_again_are_right_or_a_miss_without_coherence() {
    written_again("emulated:seed=5,noise=16");
}

#[test]
fn what_a_killed_process_lent_is_served_until_its_memory_is_reaped() {
    let bench = bench();
    let member = bench.member(1);
    let config = AllocConfig { lock_timeout_ms: Some(20_000), ..AllocConfig::default() };
    let allocator = Allocator::attach(&member.host, LocalArea::of(&member.host).unwrap(), config).unwrap();
    // Of the same machine: its cells and its memory go to this process.
    let child = Process::start(&bench, 1, "native");
    assert_eq!(reap(&member.host, &allocator).unwrap(), 0, "its process lives");
    drop(child);
    member.serve_until("the cells of a dead process", || member.cache.usage().ready == u64::from(BLOCKS));
    assert!((0..u64::from(BLOCKS)).all(|number| pull(&member, number) == Ok(1)), "they were lent when it died");
    member.serve_until("the memory of a dead process", || {
        allocator.service_round().unwrap();
        reap(&member.host, &allocator).unwrap() == 1
    });
    assert_eq!(allocator.usage().kept_bytes, 0);
    assert!((0..u64::from(BLOCKS)).all(|number| pull(&member, number) == Err(MissReason::TakenBack)));
    // The references went with that look: the keys are free again.
    assert_eq!(member.cache.usage().ready, 0);
    // Of another machine: its caches may hold what it wrote, so the memory stays until that machine is stated to be off.
    let child = Process::start(&bench, 2, "native");
    let slot = 1 - member.host.slot();
    drop(child);
    member.serve_until("the cells of a dead host", || {
        allocator.service_round().unwrap();
        reap(&member.host, &allocator).unwrap();
        (0..u64::from(BLOCKS)).filter(|&number| pull(&member, number) == Ok(1)).count() == BLOCKS as usize
    });
    assert_eq!(allocator.usage().kept_bytes, 0, "no host has its chunks before its death is proven");
    member.host.declare_dead(slot, 1).unwrap();
    member.serve_until("the memory of a dead host", || {
        let _ = allocator.adopt_dead();
        reap(&member.host, &allocator).unwrap() == 1
    });
    assert_eq!(allocator.usage().kept_bytes, 0);
}
