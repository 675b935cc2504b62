// SPDX-License-Identifier: Apache-2.0
//! Formats over pools of earlier versions: their hosts are seen. The images are written here as those versions wrote them.

use super::*;
use std::time::{Duration, Instant};

const UUID: [u8; 16] = *b"an earlier pool!";
const SLOTS: u64 = 4;
const LOCKS: u64 = 200;
/// Summary lines of a slot: a version of 24 request lines, with 6 locks each, in each.
const SUMMARY_LINES: u64 = 2;

/// A version before this one: number, incompat bits, and its regions after the first sixteen, by number and lines.
type Version = ((u16, u16), u64, &'static [(u32, u64)]);

const VERSIONS: [Version; 3] =
    [((1, 0), 0, &[]), ((2, 0), 0, &[(17, 4 * SLOTS), (23, 32), (24, 16), (25, 64)]), ((2, 1), 1, &[(17, 10 * SLOTS), (23, 32)])];

/// A pool of an earlier version over the files of a bench.
struct Earlier<'a> {
    bench: &'a Bench,
    identity: u64,
    summary: u64,
}

impl<'a> Earlier<'a> {
    fn write(bench: &'a Bench, version: (u16, u16), incompat: u64, more: &[(u32, u64)]) -> Earlier<'a> {
        let devices = bench.paths.len() as u64;
        // Regions 1 to 16 with numbers of lines like those of the time; only 7 and 8 count here.
        let lines = [4, 4 * 50, 4 * SLOTS, 4, 4, 8, SLOTS, SLOTS * SUMMARY_LINES, SLOTS * 34, SLOTS * 8, SLOTS * 17, SLOTS, 16, 16, 60, 60];
        let regions: Vec<(u32, u64)> = (1..).zip(lines).chain(more.iter().copied()).collect();
        let mut offset = devices * DEVICE_HEADER_BYTES;
        let mut table = vec![0u8; 768];
        let mut places = [0; 2];
        for ((number, lines), entry) in regions.iter().zip(table.chunks_exact_mut(24)) {
            if let 7 | 8 = number {
                places[*number as usize - 7] = offset;
            }
            entry[..4].copy_from_slice(&number.to_le_bytes());
            entry[8..16].copy_from_slice(&offset.to_le_bytes());
            entry[16..].copy_from_slice(&lines.to_le_bytes());
            offset += lines * 64;
        }
        for index in 0..devices {
            let mut block = vec![0u8; 4096];
            let mut set = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
            set(0, b"kvbmcxl\0");
            set(8, &version.0.to_le_bytes());
            set(10, &version.1.to_le_bytes());
            set(16, &UUID);
            set(32, &77u64.to_le_bytes());
            set(56, &incompat.to_le_bytes());
            set(64, &4711u64.to_le_bytes());
            set(72, &(devices * SIZE).to_le_bytes());
            set(80, &(64u64 << 10).to_le_bytes());
            set(88, &(64u64 << 10).to_le_bytes());
            for (at, number) in [(96, devices), (100, index), (104, 4), (108, SLOTS), (112, LOCKS), (116, 16), (120, 1)] {
                set(at, &(number as u32).to_le_bytes());
            }
            set(124, &(regions.len() as u32).to_le_bytes());
            set(256, &table);
            for (device, path) in bench.paths.iter().enumerate() {
                let at = 1024 + 128 * device;
                set(at, &[device as u8 + 1; 16]);
                set(at + 16, &SIZE.to_le_bytes());
                let name = path.to_str().unwrap().as_bytes();
                set(at + 24, &name[name.len().saturating_sub(104)..]);
            }
            let crc = crc32c::crc32c(&block);
            block[12..16].copy_from_slice(&crc.to_le_bytes());
            std::fs::write(&bench.paths[index as usize], vec![0; SIZE as usize]).unwrap();
            bench.patch(index as usize, 0, &block);
        }
        Earlier { bench, identity: places[0], summary: places[1] }
    }

    /// Writes a line at a pool offset, which lies on the first device for one device, and in the first stripe for several.
    fn line(&self, region: u32, index: u64, pool_offset: u64, fields: &[(usize, u64)]) {
        let mut line = [0u8; 64];
        fields.iter().for_each(|(at, value)| line[*at..*at + 8].copy_from_slice(&value.to_le_bytes()));
        let mut bytes = [0u8; 72];
        bytes[..4].copy_from_slice(&region.to_le_bytes());
        bytes[4..12].copy_from_slice(&index.to_le_bytes());
        bytes[12..].copy_from_slice(&line[4..]);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&UUID), &bytes);
        line[..4].copy_from_slice(&crc.to_le_bytes());
        let on_device = pool_offset - (self.bench.paths.len() as u64 - 1) * DEVICE_HEADER_BYTES;
        assert!(on_device + 64 <= DEVICE_HEADER_BYTES + (64 << 10));
        self.bench.patch(0, on_device, &line);
    }

    fn identity(&self, slot: u64, state: u64) {
        self.line(7, slot, self.identity + slot * 64, &[(4, 5 | state << 32)]);
    }

    fn beat(&self, slot: u64, heartbeat: u64) {
        let index = slot * SUMMARY_LINES;
        self.line(8, index, self.summary + index * 64, &[(4, 5), (8, heartbeat)]);
    }

    fn is_void(&self) -> bool {
        self.bench.bytes_of(0)[..64] == [0; 64]
    }
}

fn force() -> FormatOptions {
    FormatOptions { force: true, ..options() }
}

/// Runs `act` while the host of slot 2 beats; it leaves when the superblock is void, as hosts of every version do.
fn while_beating<T>(pool: &Earlier<'_>, act: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for beat in 1.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                if pool.is_void() {
                    pool.identity(2, 2);
                    return;
                }
                pool.beat(2, beat);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let result = act();
        stop.store(true, Ordering::SeqCst);
        result
    })
}

#[test]
fn hosts_of_every_earlier_version_are_seen() {
    for (version, incompat, more) in VERSIONS {
        for devices in [1, 2] {
            let bench = Bench::new(devices);
            let pool = Earlier::write(&bench, version, incompat, more);
            pool.identity(2, 1);
            let spec = bench.spec_of(&(0..devices).collect::<Vec<_>>());
            let refused = Pool::format(&spec, &options());
            let text = format!("format version {}.{}", version.0, version.1);
            assert!(matches!(&refused, Err(Error::HasContent { found, .. }) if found.contains(&text)), "{version:?}");
            match while_beating(&pool, || Pool::format(&spec, &force())) {
                Err(Error::InUse { slots }) => assert_eq!(slots, [2], "{version:?}"),
                other => panic!("{version:?}: {:?}", other.map(|_| ())),
            }
            assert!(!pool.is_void(), "{version:?}: a refused format writes nothing");
            // It stands still.
            Pool::format(&spec, &force()).unwrap();
            open(&spec).unwrap();
        }
    }
}

#[test]
fn hosts_of_an_earlier_version_are_evicted() {
    let (version, incompat, more) = VERSIONS[2];
    let bench = Bench::new(1);
    let pool = Earlier::write(&bench, version, incompat, more);
    pool.identity(2, 1);
    let begun = Instant::now();
    while_beating(&pool, || Pool::format(&bench.spec_of(&[0]), &FormatOptions { evict_hosts: true, ..force() })).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60));
    open(&bench.spec_of(&[0])).unwrap();
}

#[test]
fn a_part_of_an_earlier_pool_is_not_formatted_while_its_hosts_cannot_be_seen() {
    let (version, incompat, more) = VERSIONS[1];
    let bench = Bench::new(2);
    let pool = Earlier::write(&bench, version, incompat, more);
    pool.identity(2, 1);
    // By its name in the superblock the other device is found.
    while_beating(&pool, || match Pool::format(&bench.spec_of(&[1]), &force()) {
        Err(Error::InUse { slots }) => assert_eq!(slots, [2]),
        other => panic!("{:?}", other.map(|_| ())),
    });
    std::fs::remove_file(&bench.paths[0]).unwrap();
    assert!(matches!(Pool::format(&bench.spec_of(&[1]), &force()), Err(Error::HostsUnseen { .. })));
}

#[test]
fn a_pool_of_an_unknown_version_is_formatted_by_eviction_alone() {
    // A later version, the checksum of which may lie elsewhere, and an unknown feature of this one.
    for (at, value) in [(8, &[9u8, 0][..]), (56, &[0, 0, 1, 0])] {
        let bench = Bench::formatted(1);
        bench.patch_superblock(0, at, value);
        if at == 8 {
            bench.patch(0, 12, &[0; 4]);
        }
        match Pool::format(&bench.spec_of(&[0]), &force()) {
            Err(error @ Error::HostsUnseen { .. }) => assert!(error.to_string().contains("--evict-hosts"), "{error}"),
            other => panic!("{:?}", other.map(|_| ())),
        }
        Pool::format(&bench.spec_of(&[0]), &FormatOptions { evict_hosts: true, ..force() }).unwrap();
    }
    // A damaged superblock is none: its pool cannot be used.
    let bench = Bench::formatted(1);
    bench.patch(0, 100, &[0xff]);
    Pool::format(&bench.spec_of(&[0]), &force()).unwrap();
}

#[test]
fn tables_that_no_version_wrote_are_not_followed() {
    let (version, incompat, more) = VERSIONS[0];
    // Lines outside the pool, at an odd place, too few of them, and none.
    for (at, value) in [(256 + 7 * 24 + 8, u64::MAX - 63), (256 + 7 * 24 + 8, 65), (256 + 7 * 24 + 16, 1), (256 + 6 * 24, 99)] {
        let bench = Bench::new(1);
        Earlier::write(&bench, version, incompat, more);
        bench.patch_superblock(0, at, &value.to_le_bytes());
        assert!(matches!(Pool::format(&bench.spec_of(&[0]), &force()), Err(Error::HostsUnseen { .. })), "{at} {value}");
    }
}
