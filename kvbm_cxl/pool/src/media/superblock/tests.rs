// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::limits::{CELL_CLASSES, DEVICE_HEADER_BYTES};
use crate::media::CellClass;
use proptest::prelude::*;

fn parts(devices: u32, seats: u32) -> SuperblockParts {
    let rounds = u64::from(devices) * (8 << 20);
    let mut geometry =
        Geometry { devices, seats, stripe_bytes: 1 << 20, ..Geometry::with_len(u64::from(devices) * DEVICE_HEADER_BYTES + rounds) };
    (geometry.stripes, geometry.cells_per_chunk) = (4, 7);
    geometry.cells[0] = CellClass { cell_bytes: 4096, chunks: 6 };
    geometry.cells[1] = CellClass { cell_bytes: 16384, chunks: 5 };
    let record = |index: u32| DeviceRecord { id: [index as u8 + 1; 16], len_bytes: 10 << 20, name: format!("/dev/dax{index}.0") };
    SuperblockParts {
        uuid: [0x5a; 16],
        incarnation: 77,
        layout: Layout::new(geometry).unwrap(),
        coherence: CoherenceMode::Software,
        seats: vec![MachineId([9; 16])],
        devices: (0..devices).map(record).collect(),
    }
}

fn bytes_of(superblock: &Superblock) -> Vec<u8> {
    superblock.encode().to_vec()
}

/// Writes `value` at `offset` and makes the CRC right again.
fn altered(bytes: &[u8], offset: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[offset..offset + value.len()].copy_from_slice(value);
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn reason(bytes: &[u8]) -> String {
    match Superblock::decode("/dev/dax0.0", bytes) {
        Err(Error::NotAPool { device, reason }) => {
            assert_eq!(device, "/dev/dax0.0");
            reason
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn comes_back_as_it_was_written() {
    let superblock = Superblock::new(&parts(3, 4)).unwrap();
    for index in 0..3 {
        let copy = superblock.for_device(index).unwrap();
        let decoded = Superblock::decode("x", copy.encode()).unwrap();
        assert_eq!(decoded, copy);
        assert!(decoded.is_copy_of(&superblock));
        assert_eq!(decoded.device_index(), index);
        assert_eq!((decoded.uuid(), decoded.incarnation()), (&[0x5a; 16], 77));
        assert_eq!(decoded.devices(), parts(3, 4).devices);
        assert_eq!(decoded.seats()[0], MachineId([9; 16]));
        assert!(decoded.seats()[1..].iter().all(MachineId::is_none));
        assert_eq!(decoded.layout(), superblock.layout());
    }
    assert!(superblock.for_device(3).is_err());
    let mut other = parts(3, 4);
    other.incarnation = 78;
    assert!(!Superblock::new(&other).unwrap().is_copy_of(&superblock));
}

#[test]
fn long_names_keep_their_end() {
    let mut parts = parts(1, 1);
    parts.devices[0].name = format!("/{}/é/dax0.0", "x".repeat(200));
    let superblock = Superblock::new(&parts).unwrap();
    assert!(superblock.devices()[0].name.ends_with("/é/dax0.0"));
    assert!(superblock.devices()[0].name.len() <= DeviceRecord::NAME_BYTES);
    assert_eq!(tail("é", 1), "");
}

#[test]
fn each_kind_of_wrong_has_its_own_reason() {
    let good = bytes_of(&Superblock::new(&parts(2, 2)).unwrap());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (vec![0; SUPERBLOCK_BYTES], "empty"),
        (vec![0; 2 << 20], "empty"),
        (b"\x7fELF".repeat(2000), "foreign"),
        (good[..SUPERBLOCK_BYTES - 1].to_vec(), "truncated"),
        (vec![], "truncated"),
        (altered(&good, 8, &4u16.to_le_bytes()), "version 4.0 is newer"),
        (altered(&good, 8, &2u16.to_le_bytes()), "version 2.0 is older"),
        (altered(&good, 56, &8u64.to_le_bytes()), "incompat bits 0x8"),
        (altered(&good, 16, &[0; 16]), "UUID or incarnation is zero"),
        (altered(&good, 32, &[0; 8]), "UUID or incarnation is zero"),
        (altered(&good, 64, &[1; 8]), "layout"),
        (altered(&good, 124, &15u32.to_le_bytes()), "layout"),
        (altered(&good, 256 + 8, &[1]), "layout"),
        (altered(&good, 72, &(1u64 << 50).to_le_bytes()), "geometry"),
        (altered(&good, 72, &(21u64 << 20).to_le_bytes()), "geometry"),
        (altered(&good, 80, &0u64.to_le_bytes()), "geometry"),
        (altered(&good, 88, &u64::MAX.to_le_bytes()), "geometry"),
        (altered(&good, 96, &u32::MAX.to_le_bytes()), "geometry"),
        (altered(&good, 100, &2u32.to_le_bytes()), "device index 2 of 2"),
        (altered(&good, 108, &u32::MAX.to_le_bytes()), "geometry"),
        (altered(&good, 3072, &0u32.to_le_bytes()), "stripes is 0"),
        (altered(&good, 3072, &8u32.to_le_bytes()), "layout"),
        (altered(&good, 3076, &5u32.to_le_bytes()), "must divide"),
        (altered(&good, 3076, &0u32.to_le_bytes()), "cells_per_chunk is 0"),
        (altered(&good, 3080, &4097u64.to_le_bytes()), "multiple of 64"),
        (altered(&good, 3080, &u64::MAX.to_le_bytes()), "cell"),
        (altered(&good, 3088, &u64::MAX.to_le_bytes()), "cell chunks"),
        (altered(&good, 3088, &7u64.to_le_bytes()), "layout"),
        (altered(&good, 3080, &16384u64.to_le_bytes()), "rising size"),
        (altered(&good, 3080 + 48, &64u64.to_le_bytes()), "without gaps"),
        (altered(&good, 120, &3u32.to_le_bytes()), "coherence mode 3"),
        (altered(&good, 128 + 16, &[9; 16]), "another seat"),
        (altered(&good, 128 + 32, &[1; 16]), "behind the last"),
        (altered(&good, 1024, &[0; 16]), "zero or used twice"),
        (altered(&good, 1024 + 128, &[1; 16]), "zero or used twice"),
        (altered(&good, 1024 + 16, &(1u64 << 20).to_le_bytes()), "smaller than its share"),
        (altered(&good, 1024 + 256, &[1]), "behind the last"),
    ];
    for (bytes, expected) in cases {
        let reason = reason(&bytes);
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    let mut torn = good.clone();
    torn[64 * 5..64 * 6].fill(0);
    assert!(reason(&torn).contains("damaged"), "{}", reason(&torn));
}

#[test]
fn a_torn_write_in_either_order_is_no_pool() {
    let good = bytes_of(&Superblock::new(&parts(16, 8)).unwrap());
    for cut in 1..SUPERBLOCK_BYTES / 64 {
        let mut front = good.clone();
        front[cut * 64..].fill(0);
        let mut back = good.clone();
        back[..cut * 64].fill(0);
        // Lines that are zero anyway may be missing: then nothing is torn.
        assert!(front == good || Superblock::decode("x", &front).is_err(), "first {cut} lines");
        assert!(Superblock::decode("x", &back).is_err(), "all but the first {cut} lines");
    }
}

#[test]
fn feature_bits_of_a_newer_minor_version() {
    let good = bytes_of(&Superblock::new(&parts(1, 1)).unwrap());
    let compat = Superblock::decode("x", &altered(&good, 40, &1u64.to_le_bytes())).unwrap();
    assert_eq!((compat.features(), compat.unknown_ro_compat()), ([1, 0, WIDE_STATS], 0));
    let ro_compat = Superblock::decode("x", &altered(&good, 48, &2u64.to_le_bytes())).unwrap();
    assert_eq!(ro_compat.unknown_ro_compat(), 2);
    let minor = Superblock::decode("x", &altered(&good, 10, &9u16.to_le_bytes())).unwrap();
    assert_eq!(minor.version(), (3, 9));
    let reserved = altered(&good, 4000, &[1, 2, 3]);
    assert_eq!(Superblock::decode("x", &reserved).unwrap().encode(), reserved);
}

/// Pools without metadata apart are to the byte what programs from before that feature write.
#[test]
fn a_pool_without_metadata_apart_is_what_it_was() {
    let sum = |devices, seats| crc32c::crc32c(Superblock::new(&parts(devices, seats)).unwrap().encode());
    assert_eq!([sum(1, 1), sum(2, 2), sum(16, 8)], [939227154, 2297469878, 3252176349]);
}

/// A pool whose metadata has a device of its own, and two of payload.
fn apart() -> SuperblockParts {
    let mut apart = parts(3, 2);
    let geometry = Geometry { metadata_bytes: 0, ..*apart.layout.geometry() };
    apart.layout = Layout::new(geometry.with_metadata_apart(16 << 20).unwrap()).unwrap();
    apart
}

#[test]
fn metadata_apart_is_told_by_a_bit_that_older_programs_refuse() {
    let parts = apart();
    let geometry = *parts.layout.geometry();
    let superblock = Superblock::new(&parts).unwrap();
    assert_eq!(superblock.features(), [0, 0, WIDE_STATS | METADATA_APART]);
    let good = bytes_of(&superblock);
    assert_eq!(good[3144..3152], geometry.metadata_bytes.to_le_bytes());
    let found = Superblock::decode("x", &good).unwrap();
    assert_eq!((found.layout(), &found), (&parts.layout, &superblock));
    assert_eq!(parts.layout.cells_offset(), geometry.metadata_bytes + 2 * DEVICE_HEADER_BYTES);
    // Each number that cannot be has its reason, and none is taken for a pool without the bit.
    let metadata = |bytes: u64| altered(&good, 3144, &bytes.to_le_bytes());
    for (bytes, expected) in [
        (metadata(0), "malformed: 0 bytes of metadata apart"),
        (metadata(1), "metadata_bytes is 1"),
        (metadata(DEVICE_HEADER_BYTES), "metadata_bytes is 2097152"),
        (metadata(u64::MAX), "metadata_bytes is 18446744073709551615"),
        (metadata(u64::MAX / DEVICE_HEADER_BYTES * DEVICE_HEADER_BYTES), "metadata_bytes is"),
        (metadata(geometry.len_bytes), "metadata_bytes is"),
        (metadata(geometry.len_bytes - DEVICE_HEADER_BYTES), "geometry"),
        (metadata(geometry.metadata_bytes + DEVICE_HEADER_BYTES), "geometry"),
        (metadata(geometry.metadata_bytes + 2 * DEVICE_HEADER_BYTES), "layout"),
        (altered(&good, 56, &WIDE_STATS.to_le_bytes()), "bytes of metadata apart, and incompat bits 0x1"),
        (altered(&good, 96, &1u32.to_le_bytes()), "needs another device for the payload"),
        (altered(&good, 96, &2u32.to_le_bytes()), "layout"),
        (altered(&good, 1024 + 16, &(2u64 << 20).to_le_bytes()), "device 0 of 2097152 bytes is smaller"),
        (altered(&good, 1024 + 128 + 16, &(9u64 << 20).to_le_bytes()), "device 1 of 9437184 bytes is smaller"),
    ] {
        let reason = reason(&bytes);
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    let without = bytes_of(&Superblock::new(&self::parts(3, 2)).unwrap());
    assert!(reason(&altered(&without, 3144, &(4u64 << 20).to_le_bytes())).contains("4194304 bytes of metadata apart"));
    assert!(reason(&altered(&without, 56, &(WIDE_STATS | METADATA_APART).to_le_bytes())).contains("0 bytes of metadata apart"));
}

#[test]
fn metadata_that_does_not_fit_its_device_is_refused() {
    let geometry = *apart().layout.geometry();
    let payload_bytes = geometry.payload_bytes();
    let mut locks = Geometry { locks: 60_000, slots: 64, ..geometry };
    let error = Layout::new(locks).unwrap_err().to_string();
    assert!(error.contains("the metadata needs") && error.contains("of its device"), "{error}");
    locks = locks.with_metadata_apart(payload_bytes).unwrap();
    assert_eq!((Layout::new(locks).unwrap().chunks(), locks.payload_bytes()), (apart().layout.chunks(), payload_bytes));
    let less =
        Geometry { metadata_bytes: locks.metadata_bytes - DEVICE_HEADER_BYTES, len_bytes: locks.len_bytes - DEVICE_HEADER_BYTES, ..locks };
    assert!(Layout::new(less).is_err(), "no more is taken than is needed");
    assert!(geometry.with_metadata_apart(4096).unwrap_err().to_string().contains("no room for one chunk"));
    assert!(geometry.with_metadata_apart(u64::MAX).is_err());
    assert!(Geometry { devices: 1, ..geometry }.with_metadata_apart(payload_bytes).is_err());
}

/// Pools of format 2.0 have fewer stats lines, and no feature bit that says so.
#[test]
fn pools_from_before_counters_of_transfers_open_as_they_are() {
    let mut first = parts(1, 1);
    let geometry = Geometry { stats_lines: FIRST_STATS_LINES as u32, ..*first.layout.geometry() };
    first.layout = Layout::new(geometry).unwrap();
    let bytes = altered(&bytes_of(&Superblock::new(&first).unwrap()), 10, &0u16.to_le_bytes());
    let found = Superblock::decode("x", &bytes).unwrap();
    assert_eq!((found.version(), found.features(), found.layout()), ((3, 0), [0; 3], &first.layout));
    let lines = |layout: &Layout| layout.span(Region::Stats).lines;
    let now = bytes_of(&Superblock::new(&parts(1, 1)).unwrap());
    assert_eq!(lines(found.layout()) * STATS_LINES as u64, lines(&parts(1, 1).layout) * FIRST_STATS_LINES as u64);
    // The bit alone says it: with the other one the layout is not that of the region table.
    assert!(reason(&altered(&bytes, 56, &WIDE_STATS.to_le_bytes())).contains("layout"));
    assert!(reason(&altered(&now, 56, &[0; 8])).contains("layout"));
}

#[test]
fn a_flipped_bit_in_any_byte_is_refused() {
    let good = bytes_of(&Superblock::new(&parts(2, 2)).unwrap());
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(Superblock::decode("x", &bytes).is_err(), "bit {bit}");
    }
}

#[test]
fn parts_that_contradict_each_other_are_refused() {
    let mut short = parts(2, 2);
    short.devices.pop();
    let mut seats = parts(2, 2);
    seats.seats = vec![MachineId([1; 16]); 2];
    let mut many = parts(2, 2);
    many.seats = (1..4).map(|id| MachineId([id; 16])).collect();
    let mut small = parts(2, 2);
    small.devices[1].len_bytes = 4096;
    for wrong in [short, seats, many, small] {
        assert!(matches!(Superblock::new(&wrong), Err(Error::Invalid(_))));
    }
}

#[test]
fn line_0_tells_the_identity() {
    let good = bytes_of(&Superblock::new(&parts(2, 2)).unwrap());
    let mut line = crate::coherence::Line::ZERO;
    assert_eq!(Superblock::identity_in(&line), None);
    line.0.copy_from_slice(&good[..64]);
    assert_eq!(Superblock::identity_in(&line), Some(([0x5a; 16], 77)));
}

/// Cell classes as a format makes them, or none.
fn cells() -> impl Strategy<Value = [CellClass; CELL_CLASSES]> {
    let sizes = proptest::collection::btree_set(1u64..2000, 0..=CELL_CLASSES);
    (sizes, proptest::array::uniform4(1u64..40)).prop_map(|(sizes, chunks)| {
        let mut classes = [CellClass::default(); CELL_CLASSES];
        for (class, (lines, chunks)) in classes.iter_mut().zip(sizes.into_iter().zip(chunks)) {
            *class = CellClass { cell_bytes: lines * 64, chunks };
        }
        classes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_legal_superblock_comes_back(
        devices in 1u32..=16, seats in 1u32..=8, slots in 1u32..=64, locks in 8u32..2000, objects in 1u32..500,
        chunk in 12u32..24, stripe in 12u32..24, rounds in 1u64..64, uuid in any::<[u8; 16]>(), incarnation in 1u64..,
        hardware in any::<bool>(), name in "\\PC{0,200}", (stripes, per_chunk, cells) in (1u32..20, 0usize..6, cells()),
        cut in 0usize..SUPERBLOCK_BYTES, bit in 0usize..SUPERBLOCK_BYTES * 8, is_apart in any::<bool>(),
    ) {
        let geometry = Geometry {
            devices, seats, slots, locks, objects,
            slot_seats: hardware,
            metadata_bytes: 0,
            stripe_bytes: 1 << stripe,
            chunk_bytes: 1 << chunk,
            stats_lines: if hardware { STATS_LINES as u32 } else { FIRST_STATS_LINES as u32 },
            len_bytes: u64::from(devices) * (DEVICE_HEADER_BYTES + (rounds << stripe)),
            stripes: if cells[0].chunks == 0 { 0 } else { stripes },
            cells_per_chunk: if cells[0].chunks == 0 { 0 } else { [1, 2, 7, 14, 56, 112][per_chunk] },
            cells,
        };
        let payload_bytes = u64::from(devices.max(2) - 1) * (rounds << stripe);
        let apart = if is_apart { geometry.with_metadata_apart(payload_bytes) } else { Ok(geometry) };
        let Ok(layout) = apart.and_then(Layout::new) else { return Ok(()) };
        let record = |index: u32| DeviceRecord { id: [index as u8 + 1; 16], len_bytes: 1 << 40, name: name.clone() };
        let parts = SuperblockParts {
            uuid, incarnation, layout,
            coherence: if hardware { CoherenceMode::Hardware } else { CoherenceMode::Software },
            seats: (0..seats).map(|seat| MachineId([seat as u8; 16])).collect(),
            devices: (0..devices).map(record).collect(),
        };
        prop_assume!(uuid != [0; 16]);
        let superblock = Superblock::new(&parts).unwrap();
        prop_assert_eq!(&Superblock::decode("x", superblock.encode()).unwrap(), &superblock);
        prop_assert!(Superblock::decode("x", &superblock.encode()[..cut]).is_err());
        let mut flipped = superblock.encode().to_vec();
        flipped[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Superblock::decode("x", &flipped).is_err());
    }

    #[test]
    fn hostile_numbers_behind_a_right_checksum(field in 8usize..SUPERBLOCK_BYTES - 8, value in any::<u64>(), small in 0u64..70) {
        let parts = if small % 2 == 0 { apart() } else { parts(2, 2) };
        let good = bytes_of(&Superblock::new(&parts).unwrap());
        for value in [value, small, 1 << (small % 64), u64::MAX - small] {
            let bytes = altered(&good, field, &value.to_le_bytes());
            if let Ok(superblock) = Superblock::decode("x", &bytes) {
                prop_assert_eq!(superblock.encode(), &bytes[..]);
                prop_assert!(superblock.device_index() < superblock.devices().len());
            }
        }
    }

    #[test]
    fn any_geometry_is_answered_at_once_and_stays_within_the_pool(
        wild in any::<[u32; 5]>(), near in (0u32..18, 0u32..10, 0u32..70, 0u32..3000, 0u32..3000),
        lens in any::<[u64; 3]>(), shifts in (10u32..43, 10u32..32, 0u32..50), is_wild in 0u8..8,
        (stripes, per_chunk) in (any::<u32>(), any::<u32>()), wild_cells in any::<[(u64, u64); 4]>(), tame in cells(),
        (metadata, is_apart) in (any::<u64>(), 0u8..4),
    ) {
        let wild_cells = wild_cells.map(|(cell_bytes, chunks)| CellClass { cell_bytes, chunks });
        let near = [near.0, near.1, near.2, near.3, near.4];
        let number = |index: usize| if is_wild == 0 { wild[index] } else { near[index] };
        let geometry = Geometry {
            devices: number(0), seats: number(1), slots: number(2), locks: number(3), objects: number(4),
            slot_seats: is_apart & 1 == 1,
            metadata_bytes: match is_apart { 0 => metadata, 1 => metadata % 64 * DEVICE_HEADER_BYTES, _ => 0 },
            stripe_bytes: if is_wild == 1 { lens[0] } else { 1 << shifts.0 },
            chunk_bytes: if is_wild == 2 { lens[1] } else { 1 << shifts.1 },
            len_bytes: lens[2] >> shifts.2,
            stats_lines: if is_wild == 6 { number(2) } else { STATS_LINES as u32 },
            stripes: if is_wild == 3 { stripes } else { stripes % 20 },
            cells_per_chunk: if is_wild == 4 { per_chunk } else { [0, 1, 7, 112][per_chunk as usize % 4] },
            cells: if is_wild == 5 { wild_cells } else { tame },
        };
        let start = std::time::Instant::now();
        if let Ok(layout) = Layout::new(geometry) {
            let data = layout.data_offset() + layout.chunks() * geometry.chunk_bytes;
            prop_assert!(layout.chunks() > 0 && data <= geometry.len_bytes);
            let spans = layout.spans();
            for pair in spans.windows(2) {
                prop_assert!(pair[0].offset + pair[0].lines * 64 <= pair[1].offset);
            }
            let last = spans[spans.len() - 1];
            prop_assert!(last.offset + last.lines * 64 <= layout.cells_offset());
            prop_assert!(layout.cells_offset() + geometry.cells_len_bytes() <= layout.data_offset());
            let _ = Stripes::of(&geometry).map(|stripes| stripes.pieces_len());
        }
        let _ = geometry.with_metadata_apart(lens[2] >> shifts.2);
        prop_assert!(start.elapsed().as_millis() < 1000);
    }
}
