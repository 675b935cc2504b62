// SPDX-License-Identifier: Apache-2.0
//! Pools side by side on one file: refusals, finds, and that no byte outside of a pool changes.

use super::*;
use crate::device::{Access, DevicePart, PoolSpec, Sysfs};
use crate::host::HostConfig;
use crate::limits::DEVICE_HEADER_BYTES;
use crate::machine::{Machine, State};
use crate::media::Seat;
use crate::platform::{MachineId, Platform};
use crate::pool::{FormatOptions, OpenOptions, Pool, join};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

const M: u64 = 1 << 20;

struct Shelf {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Shelf {
    /// A file of bytes that differ everywhere.
    fn new(len_bytes: u64) -> Shelf {
        let shelf = Shelf::with_holes(len_bytes);
        let words = (0..len_bytes / 8).flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes());
        std::fs::write(&shelf.path, words.collect::<Vec<u8>>()).unwrap();
        shelf
    }

    fn with_holes(len_bytes: u64) -> Shelf {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("shelf");
        std::fs::File::create(&path).unwrap().set_len(len_bytes).unwrap();
        Shelf { folder, path }
    }

    fn spec(&self, offset: u64, size: Option<u64>) -> PoolSpec {
        PoolSpec::new(vec![self.path.clone()], size).unwrap().with_offset(offset).unwrap()
    }

    fn format(&self, offset: u64, size: Option<u64>) -> Result<Pool> {
        Pool::format(&self.spec(offset, size), &FormatOptions { force: true, ..options() })
    }

    /// The pools on it, as offset and length in MiB.
    fn pools(&self) -> Vec<(u64, u64)> {
        let device = DevicePart::whole(&self.path).open(Access::Read, &Sysfs::default()).unwrap();
        pools_on(&device).unwrap().iter().map(|pool| (pool.offset_bytes / M, pool.len_bytes / M)).collect()
    }

    /// A sum over the bytes that do not lie in `without`.
    fn sum_outside(&self, without: std::ops::Range<u64>) -> u32 {
        let bytes = std::fs::read(&self.path).unwrap();
        let before = crc32c::crc32c(&bytes[..without.start as usize]);
        crc32c::crc32c_append(before, &bytes[without.end as usize..])
    }

    fn machine(&self, pool: &Pool, number: u8) -> Machine {
        let id = MachineId([number; 16]);
        let state = State::open(&self.folder.path().join("state"), pool.superblock().uuid(), id).unwrap();
        let file = std::fs::File::options().read(true).write(true).open(&self.path).unwrap();
        Machine::new(id, state).unwrap().with_file(file, pool.devices()[0].offset_bytes).unwrap()
    }
}

fn options() -> FormatOptions {
    FormatOptions {
        slots: 4,
        locks: 32,
        objects: 16,
        chunk_bytes: 64 << 10,
        memory: Some(CoherenceOptions::default()),
        ..FormatOptions::default()
    }
}

fn open(spec: &PoolSpec) -> Pool {
    Pool::open(spec, &OpenOptions { memory: Some(CoherenceOptions::default()), ..OpenOptions::default() }).unwrap()
}

fn problem(outcome: Result<Pool>) -> PartitionProblem {
    match outcome {
        Err(Error::Partition { problem, .. }) => problem,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("it was formatted"),
    }
}

#[test]
fn a_pool_lives_and_goes_without_a_byte_beside_it() {
    let shelf = Shelf::new(24 * M);
    let range = 8 * M..14 * M;
    let before = shelf.sum_outside(range.clone());
    let spec = shelf.spec(8 * M, Some(6 * M));
    drop(shelf.format(8 * M, Some(6 * M)).unwrap());
    assert_eq!(shelf.sum_outside(range.clone()), before, "formatted");
    let pool = open(&spec);
    assert_eq!(pool.layout().geometry().len_bytes, 6 * M);
    let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = join(pool.lines().clone(), Arc::new(shelf.machine(&pool, 1)), config).unwrap();
    host.service_round().unwrap();
    // All of the pool's memory, to its last byte.
    let (memory, data) = (pool.lines().memory(), pool.layout().data_offset());
    memory.copy_in(data, &vec![0x5a; (6 * M - data) as usize]).unwrap();
    memory.fence_stores();
    assert!(memory.copy_in(6 * M - 64, &[0; 128]).is_err(), "the border is the pool's end");
    host.service_round().unwrap();
    host.leave().unwrap();
    assert_eq!(shelf.sum_outside(range.clone()), before, "lived");
    Pool::erase(&spec, &options()).unwrap();
    assert_eq!(shelf.sum_outside(range), before, "erased");
    assert_eq!(shelf.pools(), []);
}

#[test]
fn pools_on_one_file_are_found_where_they_are() {
    let shelf = Shelf::with_holes(64 * M);
    for (offset, size) in [(0, 6), (32, 8), (8, 6)] {
        drop(shelf.format(offset * M, Some(size * M)).unwrap());
    }
    let blocks = std::fs::metadata(&shelf.path).unwrap().blocks();
    assert_eq!(blocks * 512, 20 * M, "the parts of the pools got memory, and nothing else did");
    assert_eq!(shelf.pools(), [(0, 6), (8, 6), (32, 8)]);
    assert_eq!(std::fs::metadata(&shelf.path).unwrap().blocks(), blocks, "looking for pools fills no holes");
    // Each is its own, and none is another's.
    for (number, offset) in [0, 8, 32].into_iter().enumerate() {
        let pool = open(&shelf.spec(offset * M, None));
        pool.lines().publish(0, Seat { epoch: 100 + number as u32, ..Seat::default() }).unwrap();
    }
    for (number, offset) in [0, 8, 32].into_iter().enumerate() {
        assert_eq!(open(&shelf.spec(offset * M, None)).lines().fetch::<Seat>(0).unwrap().epoch, 100 + number as u32);
    }
    let nothing = Pool::open(&shelf.spec(2 * M, None), &OpenOptions::default()).err().unwrap().to_string();
    assert!(nothing.contains("shelf,offset=2097152"), "an error says which part: {nothing}");
}

#[test]
fn what_lies_within_a_pool_is_its_own_whatever_it_looks_like() {
    let shelf = Shelf::with_holes(32 * M);
    drop(shelf.format(0, Some(12 * M)).unwrap());
    drop(shelf.format(16 * M, Some(6 * M)).unwrap());
    let file = std::fs::File::options().read(true).write(true).open(&shelf.path).unwrap();
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 16 * M).unwrap();
    file.write_all_at(&header, 10 * M).unwrap();
    assert_eq!(shelf.pools(), [(0, 12), (16, 6)]);
    // A superblock that cannot be read is still one, of which no more is known than its header.
    file.write_all_at(&[0xff; 8], 16 * M + 256).unwrap();
    assert_eq!(shelf.pools(), [(0, 12), (16, 2)]);
    assert!(matches!(problem(shelf.format(14 * M, Some(6 * M))), PartitionProblem::Overlaps { pool_offset, .. } if pool_offset == 16 * M));
}

/// Superblocks of a stranger: any bytes, and any numbers under a right checksum.
#[test]
fn whatever_lies_on_the_device_the_walk_ends() {
    let shelf = Shelf::with_holes(32 * M);
    for offset in [0, 8, 16] {
        drop(shelf.format(offset * M, Some(6 * M)).unwrap());
    }
    let file = std::fs::File::options().read(true).write(true).open(&shelf.path).unwrap();
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 8 * M).unwrap();
    let (mut random, mut seen) = (0x9e37_79b9_7f4a_7c15_u64, std::collections::BTreeSet::new());
    for _ in 0..300 {
        let mut strange = header.clone();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = 16 + (random >> 8) as usize % 600 / 8 * 8;
        let value = [0, 1, u64::MAX, u64::MAX / 2, 1 << 62, random][(random % 6) as usize];
        strange[at..at + 8].copy_from_slice(&value.to_le_bytes());
        strange[12..16].fill(0);
        let crc = crc32c::crc32c(&strange);
        strange[12..16].copy_from_slice(&crc.to_le_bytes());
        file.write_all_at(&strange, 8 * M).unwrap();
        let device = DevicePart::whole(&shelf.path).open(Access::Write, &Sysfs::default()).unwrap();
        let found = pools_on(&device).unwrap();
        assert!((2..=3).contains(&found.len()) && found[0].offset_bytes == 0 && found[1].offset_bytes == 8 * M, "{found:?}");
        // Where it says that it lies, nothing is formatted.
        let outcome = refuse_overlap(&device.part(10 * M, Some(6 * M)).unwrap(), 0, 6 * M);
        assert_eq!(outcome.is_err(), found[1].end() > 10 * M, "{found:?}");
        seen.insert((found[1].is_readable, found.len()));
    }
    assert!(seen.len() > 1, "all of them were taken for the same: {seen:?}");
}

#[test]
fn parts_that_cannot_be_are_refused_with_their_kind() {
    let shelf = Shelf::new(24 * M);
    drop(shelf.format(8 * M, Some(8 * M)).unwrap());
    let before = shelf.sum_outside(0..0);
    let parse = PoolSpec::parse(&format!("{},offset=3M", shelf.path.display())).unwrap_err();
    assert!(matches!(&parse, Error::Partition { problem: PartitionProblem::Unaligned { next, .. }, .. } if *next == 4 * M), "{parse:?}");
    assert_eq!(problem(shelf.format(24 * M, None)), PartitionProblem::BehindEnd { offset: 24 * M, device_bytes: 24 * M });
    assert_eq!(
        problem(shelf.format(u64::MAX / (2 * M) * (2 * M), Some(2 * M))),
        PartitionProblem::BehindEnd { offset: u64::MAX / (2 * M) * (2 * M), device_bytes: 24 * M }
    );
    assert_eq!(
        problem(shelf.format(16 * M, Some(8 * M + 4096))),
        PartitionProblem::TooLong { offset: 16 * M, size_bytes: 8 * M + 4096, left_bytes: 8 * M }
    );
    // Over its beginning, within it, over its end, around it, and to the end of the device: not even by force.
    for (offset, size) in [(0, Some(10)), (2, Some(8)), (10, Some(4)), (14, Some(6)), (0, Some(24)), (0, None), (14, None)] {
        match problem(shelf.format(offset * M, size.map(|size| size * M))) {
            PartitionProblem::Overlaps { offset: at, pool_offset, pool_bytes, .. } => {
                assert_eq!((at, pool_offset, pool_bytes), (offset * M, 8 * M, 8 * M));
            }
            other => panic!("{offset} {size:?}: {other:?}"),
        }
    }
    assert_eq!(shelf.sum_outside(0..0), before, "a refused format wrote nothing");
    // Next to it, up to the border; and the same place, which is not a neighbour's.
    drop(shelf.format(0, Some(8 * M)).unwrap());
    drop(shelf.format(16 * M, None).unwrap());
    let again = Pool::format(&shelf.spec(8 * M, Some(8 * M)), &options()).err().unwrap();
    assert!(matches!(&again, Error::HasContent { found, .. } if found.contains("a pool")), "{again:?}");
    drop(shelf.format(8 * M, Some(6 * M)).unwrap());
    assert_eq!(shelf.pools(), [(0, 8), (8, 6), (16, 8)]);
}

#[test]
fn no_file_is_made_or_made_longer_for_a_part() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("pool");
    let spec = |offset, size| PoolSpec::new(vec![path.clone()], Some(size)).unwrap().with_offset(offset).unwrap();
    assert!(matches!(Pool::format(&spec(8 * M, 8 * M), &options()), Err(Error::NotAPool { .. })));
    assert!(!path.exists());
    drop(Pool::format(&spec(0, 8 * M), &options()).unwrap());
    assert!(matches!(problem(Pool::format(&spec(8 * M, 8 * M), &options())), PartitionProblem::BehindEnd { .. }));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8 * M);
    // An operator makes it longer under the pool that is there.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(16 * M).unwrap();
    drop(Pool::format(&spec(8 * M, 8 * M), &options()).unwrap());
    open(&spec(0, 8 * M)).check_not_replaced().unwrap();
}

#[test]
fn a_unit_larger_than_the_header_is_that_of_offsets() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("dev/char/1:5");
    std::fs::create_dir_all(&folder).unwrap();
    for (name, value) in [("size", 8u64 << 30), ("align", 1 << 30)] {
        std::fs::write(folder.join(name), format!("{value}\n")).unwrap();
    }
    let part = |offset_bytes| DevicePart { offset_bytes, ..DevicePart::whole("/dev/zero") };
    let open = |offset_bytes| part(offset_bytes).open(Access::Write, &Sysfs::at(root.path()));
    match open(DEVICE_HEADER_BYTES) {
        Err(Error::Partition { problem: PartitionProblem::Unaligned { unit_bytes, next, .. }, .. }) => {
            assert_eq!((unit_bytes, next), (1 << 30, 1 << 30));
        }
        other => panic!("{other:?}"),
    }
    let second = open(1 << 30).unwrap();
    assert_eq!((second.info().offset_bytes, second.info().len_bytes), (1 << 30, 7 << 30));
}

#[test]
fn a_part_whose_file_was_cut_says_so() {
    let shelf = Shelf::with_holes(24 * M);
    let pool = shelf.format(8 * M, Some(8 * M)).unwrap();
    // Longer than the pool is, and shorter than where it ends.
    std::fs::File::options().write(true).open(&shelf.path).unwrap().set_len(8 * M).unwrap();
    match pool.check_not_replaced() {
        Err(Error::DeviceLost { device, cause, .. }) => {
            assert!(device.ends_with("shelf") && cause.contains("truncated"), "{device}: {cause}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn parts_side_by_side_are_formatted_at_once() {
    let shelf = Shelf::with_holes(32 * M);
    let whole = DevicePart::whole(&shelf.path).open(Access::Write, &Sysfs::default()).unwrap();
    let part = whole.part(8 * M, Some(8 * M)).unwrap();
    let turn = part.lock_for_format().unwrap();
    drop(shelf.format(0, Some(8 * M)).unwrap());
    drop(shelf.format(16 * M, Some(8 * M)).unwrap());
    let busy = shelf.format(8 * M, Some(6 * M)).err().unwrap().to_string();
    assert!(busy.contains("another process is formatting"), "{busy}");
    drop(turn);
    drop(shelf.format(8 * M, Some(6 * M)).unwrap());
}

#[test]
fn an_erased_pool_makes_room_and_hosts_at_work_keep_theirs() {
    let shelf = Shelf::with_holes(16 * M);
    drop(shelf.format(0, Some(8 * M)).unwrap());
    drop(shelf.format(8 * M, Some(8 * M)).unwrap());
    let spec = shelf.spec(8 * M, None);
    let pool = open(&spec);
    let config = HostConfig { seats: pool.superblock().seats(), heartbeat_ms: 1, ..HostConfig::default() };
    let host = join(pool.lines().clone(), Arc::new(shelf.machine(&pool, 1)), config).unwrap();
    let service = host.serve().unwrap();
    // Its neighbour has no hosts, and is none of its concern.
    Pool::erase(&shelf.spec(0, None), &options()).unwrap();
    assert!(matches!(Pool::erase(&spec, &options()), Err(Error::InUse { .. })));
    pool.check_not_replaced().unwrap();
    drop(shelf.format(0, Some(8 * M)).unwrap());
    assert!(matches!(problem(shelf.format(0, None)), PartitionProblem::Overlaps { .. }));
    Pool::erase(&spec, &FormatOptions { evict_hosts: true, ..options() }).unwrap();
    assert!(matches!(pool.check_not_replaced(), Err(Error::Replaced { now: 0, .. })));
    drop(service);
    drop(shelf.format(0, None).unwrap());
    assert_eq!(shelf.pools(), [(0, 16)]);
    let nothing = Pool::erase(&spec, &options()).err().unwrap().to_string();
    assert!(nothing.contains("no pool that could be erased"), "{nothing}");
}

#[test]
fn a_machine_is_marked_in_each_pool_by_itself() {
    let shelf = Shelf::with_holes(16 * M);
    let pools = [0, 8].map(|offset| {
        drop(shelf.format(offset * M, Some(8 * M)).unwrap());
        open(&shelf.spec(offset * M, None))
    });
    let [first, second] = pools.each_ref().map(|pool| shelf.machine(pool, 1));
    let id = MachineId([1; 16]);
    let (mark, has_others) = first.mark(true).unwrap().unwrap();
    assert!(!has_others && first.is_marked(id).unwrap());
    assert!(!second.is_marked(id).unwrap(), "a process of one pool is none of the other's");
    let (other, has_others) = second.mark(true).unwrap().expect("alone in its pool");
    assert!(!has_others);
    drop(mark);
    assert!(!first.is_marked(id).unwrap() && second.is_marked(id).unwrap());
    drop(other);
}
