// SPDX-License-Identifier: Apache-2.0
//! A format without force destroys nothing that it can find.

use super::*;
use crate::pool::mark_format;
use std::os::unix::fs::MetadataExt;

const LARGE: u64 = 80 << 20;

/// A file with holes of so many bytes, on which a pool is to be formatted.
fn with_holes(len_bytes: u64) -> (Bench, PoolSpec) {
    let bench = Bench::new(1);
    File::create(&bench.paths[0]).unwrap().set_len(len_bytes).unwrap();
    let spec = bench.spec_of(&[0]);
    (bench, spec)
}

/// Where a format says that it found what.
fn found(spec: &PoolSpec) -> (u64, String) {
    match Pool::format(spec, &options()) {
        Err(Error::HasContent { offset, found, .. }) => (offset, found),
        other => panic!("{:?}", other.map(|_| ())),
    }
}

#[test]
fn what_others_wrote_is_named() {
    for (at, magic, name) in [
        (0x438, &b"\x53\xef"[..], "an ext2, ext3 or ext4 file system"),
        (0, b"XFSB", "an XFS file system"),
        (0x10040, b"_BHRfS_M", "a Btrfs file system"),
        (0x200, b"EFI PART", "a GPT partition table"),
        (0x1fe, b"\x55\xaa", "an MBR partition table"),
        (0x218, b"LVM2 001", "a physical volume of LVM"),
        (0x1000, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
        (0, b"LUKS\xba\xbe", "a LUKS volume"),
        (0x777, b"else", "unknown data"),
    ] {
        let (bench, spec) = with_holes(SIZE);
        bench.patch(0, at, magic);
        assert_eq!(found(&spec), (at, name.to_owned()));
    }
    // A boot sector before the partitions of a GPT is not what the device is.
    let (bench, spec) = with_holes(SIZE);
    bench.patch(0, 0x1fe, b"\x55\xaaEFI PART");
    assert_eq!(found(&spec).1, "a GPT partition table");
}

#[test]
fn data_far_from_the_header_is_found_and_the_file_keeps_its_holes() {
    // Every page of a small part; of a large one every 2 MiB, and its end.
    for (len_bytes, at) in [(SIZE, 2 << 20), (SIZE, (3 << 20) + 4095), (SIZE, SIZE - 1), (LARGE, 40 << 20), (LARGE, LARGE - 512)] {
        let (bench, spec) = with_holes(len_bytes);
        bench.patch(0, at, &[7]);
        let blocks = bench.paths[0].metadata().unwrap().blocks();
        assert_eq!(found(&spec), (at, "data".to_owned()), "{len_bytes} bytes");
        assert_eq!(bench.paths[0].metadata().unwrap().blocks(), blocks, "a refused format gives a file no memory");
        Pool::format(&spec, &FormatOptions { force: true, ..options() }).unwrap();
    }
}

#[test]
fn only_the_part_of_the_pool_is_looked_at() {
    let (bench, spec) = with_holes(LARGE);
    bench.patch(0, 60 << 20, &[7]);
    Pool::format(&spec.clone().with_size(Some(40 << 20)).unwrap(), &options()).unwrap();
    let second = |offset| Pool::format(&spec.clone().with_size(Some(20 << 20)).unwrap().with_offset(offset).unwrap(), &options());
    match second(50 << 20) {
        Err(Error::HasContent { offset, device, .. }) => {
            assert_eq!(offset, 10 << 20, "from the beginning of the part");
            assert!(device.contains("52428800"), "{device}");
        }
        other => panic!("{:?}", other.map(|_| ())),
    }
    second(40 << 20).unwrap();
}

#[test]
fn a_first_format_that_was_interrupted_begins_again_without_force() {
    let plan = Bench::formatted(2);
    let superblock = open(&plan.spec()).unwrap().superblock().clone();
    for writes in [1, 3, 5, 6, 20, 40, 60] {
        let bench = Bench::new(2);
        bench.paths.iter().for_each(|path| std::fs::write(path, vec![0; SIZE as usize]).unwrap());
        {
            let pool = open(&plan.spec()).unwrap();
            let image = pool.lines().memory().clone();
            let devices: Vec<Device> = bench.spec().parts().map(|part| part.open(Access::Write, &Sysfs::default()).unwrap()).collect();
            let mapping = map(&devices, &Stripes::of(superblock.layout().geometry()).unwrap(), mapping_limit()).unwrap();
            let memory = connect(mapping, CoherenceMode::Software, Some(CoherenceOptions::default())).unwrap().memory;
            assert_eq!(memory.len_bytes(), image.len_bytes());
            let memory: Arc<dyn Coherence> = Arc::new(Stops { memory, writes_left: writes.into() });
            let lines = Lines::of(memory.clone(), &superblock);
            let outcome = erase_superblocks(&*memory, 2)
                .and_then(|()| mark_format(&*memory, devices.iter().map(|device| device.info().len_bytes)))
                .and_then(|()| write_regions(&lines))
                .and_then(|()| write_superblocks(&*memory, &superblock));
            assert!(outcome.is_err(), "{writes} writes");
        }
        refusal(open(&bench.spec_of(&[0, 1])));
        let made = Pool::format(&bench.spec_of(&[0, 1]), &options()).unwrap_or_else(|error| panic!("{writes} writes: {error}"));
        assert_eq!(open(&bench.spec_of(&[0, 1])).unwrap().superblock(), made.superblock());
    }
}

#[test]
fn a_mark_of_a_smaller_format_hides_nothing_else() {
    let (bench, spec) = with_holes(LARGE);
    let device = spec.parts().next().unwrap().open(Access::Write, &Sysfs::default()).unwrap();
    let memory = over_mapping(map_header(&device).unwrap(), &CoherenceOptions::default()).unwrap().memory;
    mark_format(&*memory, std::iter::once(40 << 20)).unwrap();
    bench.patch(0, 60 << 20, &[7]);
    assert_eq!(found(&spec), (60 << 20, "data".to_owned()));
    bench.patch(0, (16 << 10) + 20, &[1]);
    assert_eq!(found(&spec), (16 << 10, "unknown data".to_owned()), "a damaged mark");
}

#[test]
fn an_erased_pool_leaves_nothing_that_a_format_finds() {
    let (bench, spec) = with_holes(LARGE);
    let part = |offset, size| spec.clone().with_size(Some(size)).unwrap().with_offset(offset).unwrap();
    let pool = Pool::format(&part(0, 70 << 20), &options()).unwrap();
    let from = pool.layout().data_offset();
    drop(pool);
    bench.patch(0, from, &vec![0xee; (LARGE - from) as usize]);
    Pool::erase(&spec, &options()).unwrap();
    let left = bench.bytes_of(0);
    assert!(left[70 << 20..].iter().all(|&byte| byte == 0xee), "a byte after the pool was written");
    for size in [70 << 20, 10 << 20, 40 << 20] {
        Pool::format(&part(0, size), &options()).unwrap_or_else(|error| panic!("{size} bytes: {error}"));
        Pool::erase(&spec, &options()).unwrap();
    }
    assert!(matches!(Pool::format(&part(70 << 20, 10 << 20), &options()), Err(Error::HasContent { .. })));
}
