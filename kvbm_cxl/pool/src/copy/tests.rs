// SPDX-License-Identifier: Apache-2.0
//! Random lists against a plain model, hostile lists, engines over the CPU's own instructions and over an emulated host.

use super::*;
use crate::coherence::{CoherenceOptions, FaultMap, LineSum, MappedMemory, over_mapping};
use crate::device::{Access, Device, Sysfs, map_part};
use crate::line::Line;
use crate::media::Stripes;
use std::ptr::NonNull;
use std::sync::Arc;

const POOL_BYTES: u64 = 8 << 20;
const TEXTS: [&str; 3] =
    ["native", "native:copy=sse2,flush=clflush,range=clflush,write=stores-flush,load=words", "emulated:seed=5,noise=16"];

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *state;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn below(state: &mut u64, limit: usize) -> usize {
    (splitmix(state) % limit as u64) as usize
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    (0..len.div_ceil(8)).flat_map(|_| splitmix(&mut state).to_le_bytes()).take(len).collect()
}

struct Pool {
    memory: Arc<dyn Coherence>,
    faults: Arc<FaultMap>,
}

/// Two hosts over one file: what the first has published the second must find.
fn hosts(text: &str) -> Option<[Pool; 2]> {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let options: CoherenceOptions = match text.parse() {
        Ok(options) => options,
        Err(_) if cfg!(not(target_arch = "x86_64")) => return None,
        Err(error) => panic!("{error}"),
    };
    file.as_file().set_len(POOL_BYTES).unwrap();
    let open = || {
        let device = Device::open(file.path(), Access::Write, &Sysfs::default()).unwrap();
        let MappedMemory { memory, faults, .. } = over_mapping(map_part(&device, 0, POOL_BYTES).unwrap(), &options).unwrap();
        Pool { memory, faults }
    };
    Some([open(), open()])
}

/// Engines that divide work at different places, and one that works alone.
fn engines() -> Vec<CpuEngine> {
    let small = CopyConfig { workers: 2, parallel_from_bytes: 1, window_bytes: 4096, stream_from_bytes: 0, ..CopyConfig::default() };
    let stripes = Stripes::fit(&[4 << 20, 4 << 20], 64 << 10).unwrap();
    vec![
        CpuEngine::new(CopyConfig::alone()),
        CpuEngine::new(CopyConfig { workers: 0, ..small }),
        CpuEngine::new(CopyConfig { stream_from_bytes: u64::MAX, ..small }),
        CpuEngine::striped(small, stripes),
    ]
}

/// Stretches of the pool, disjoint, in any order: (offset, length).
fn stretches(state: &mut u64, most: usize) -> Vec<(u64, usize)> {
    let mut at = below(state, 5000) as u64;
    let mut found = Vec::new();
    for _ in 0..1 + below(state, most) {
        let len = match below(state, 6) {
            0 => 0,
            1 => 1 + below(state, 63),
            2 => 160,
            3 => 64 * (1 + below(state, 40)),
            4 => 20 << 10,
            _ => below(state, 9000),
        };
        if at + len as u64 > POOL_BYTES {
            break;
        }
        found.push((at, len));
        at += len as u64 + if below(state, 2) == 0 { 0 } else { below(state, 300) as u64 };
    }
    if below(state, 2) == 0 {
        for index in (1..found.len()).rev() {
            found.swap(index, below(state, index + 1));
        }
    }
    found
}

#[test]
fn random_lists_move_what_a_plain_model_moves() {
    for text in TEXTS {
        let Some([writer, reader]) = hosts(text) else { continue };
        let mut model = vec![0u8; POOL_BYTES as usize];
        let mut state = 7;
        for round in 0..12u64 {
            for engine in engines() {
                let places = stretches(&mut state, 60);
                let total: usize = places.iter().map(|place| place.1).sum();
                let skew = below(&mut state, 64);
                let bytes = pattern(splitmix(&mut state), total + skew);
                let mut rest = &bytes[skew..];
                let mut list = WriteList::new();
                for &(offset, len) in &places {
                    let (now, behind) = rest.split_at(len);
                    list.push(offset, now);
                    model[offset as usize..offset as usize + len].copy_from_slice(now);
                    rest = behind;
                }
                assert_eq!(list.len_bytes(), total as u64);
                assert_eq!(engine.publish(&*writer.memory, &list, Checksum::Off).unwrap(), None);

                // Stretches of its own choice, which may repeat in the pool.
                let mut wanted = stretches(&mut state, 60);
                wanted.extend_from_within(..wanted.len() / 2);
                let total: usize = wanted.iter().map(|place| place.1).sum();
                let mut found = vec![0u8; total + skew];
                let mut rest = &mut found[skew..];
                let mut list = ReadList::new();
                for &(offset, len) in &wanted {
                    let (now, behind) = rest.split_at_mut(len);
                    list.push(offset, now);
                    rest = behind;
                }
                assert_eq!(engine.pull(&*reader.memory, &mut list, Checksum::Off).unwrap(), None);
                let expected: Vec<u8> =
                    wanted.iter().flat_map(|&(offset, len)| &model[offset as usize..offset as usize + len]).copied().collect();
                assert!(found[skew..] == expected, "{text}, round {round}, {:?}", engine.config());
            }
        }
        // Also what lay between the pieces.
        let mut all = vec![0; POOL_BYTES as usize];
        let engine = CpuEngine::new(CopyConfig::alone());
        engine.pull(&*reader.memory, &mut ReadList::scatter(0, [&mut all[..]]), Checksum::Off).unwrap();
        assert!(all == model, "{text}: bytes outside the pieces");
    }
}

/// Cuts a block of `len` bytes at random places.
fn cuts(state: &mut u64, len: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = (0..below(state, 40)).map(|_| below(state, len + 1)).chain([0, len]).collect();
    cuts.sort_unstable();
    cuts
}

#[test]
fn a_checksum_does_not_depend_on_how_lists_are_cut() {
    for text in TEXTS {
        let Some([writer, reader]) = hosts(text) else { continue };
        let mut state = 11;
        for engine in engines() {
            let sizes = [0usize, 1, 63, 64, 1000, 4096, 70_001, 300_000];
            let blocks: Vec<Vec<u8>> = sizes.iter().map(|&len| pattern(splitmix(&mut state), len)).collect();
            let mut offsets = Vec::new();
            let mut at = 3u64;
            for len in sizes {
                offsets.push(at);
                at += len as u64 + 77;
            }
            let mut lists = Vec::new();
            for (block, &offset) in blocks.iter().zip(&offsets) {
                let mut parts: Vec<(usize, usize)> = cuts(&mut state, block.len()).windows(2).map(|cut| (cut[0], cut[1])).collect();
                let turn = below(&mut state, 2).min(parts.len());
                parts.rotate_left(turn);
                let mut list = WriteList::new();
                parts.iter().for_each(|&(from, to)| list.push(offset + from as u64, &block[from..to]));
                lists.push(list);
            }
            let sums: Vec<u64> = blocks.iter().map(|block| checksum_of(block)).collect();
            let written: Vec<u64> =
                engine.publish_each(&*writer.memory, &lists, Checksum::Xxh3).into_iter().map(|sum| sum.unwrap().unwrap()).collect();
            assert_eq!(written, sums, "{text}, {:?}", engine.config());

            let mut found: Vec<Vec<u8>> = sizes.iter().map(|&len| vec![0; len]).collect();
            let mut lists = Vec::new();
            for (block, &offset) in found.iter_mut().zip(&offsets) {
                let cuts = cuts(&mut state, block.len());
                let mut rest = &mut block[..];
                let mut pieces = Vec::new();
                for cut in cuts.windows(2) {
                    let (now, behind) = rest.split_at_mut(cut[1] - cut[0]);
                    pieces.push((offset + cut[0] as u64, now));
                    rest = behind;
                }
                let turn = below(&mut state, 2).min(pieces.len());
                pieces.rotate_left(turn);
                let mut list = ReadList::new();
                pieces.into_iter().for_each(|(offset, piece)| list.push(offset, piece));
                lists.push(list);
            }
            let read: Vec<u64> =
                engine.pull_each(&*reader.memory, &mut lists, Checksum::Xxh3).into_iter().map(|sum| sum.unwrap().unwrap()).collect();
            assert_eq!(read, sums, "{text}, {:?}", engine.config());
            assert!(found == blocks, "{text}, {:?}", engine.config());
        }
    }
}

/// Memory of whole lines.
fn lines(len: usize) -> Vec<Line> {
    vec![Line([0; 64]); len / 64]
}

#[test]
fn blocks_of_whole_lines_are_summed_as_they_are_copied() {
    for text in TEXTS {
        let Some([writer, reader]) = hosts(text) else { continue };
        let can = cfg!(target_arch = "x86_64") && crate::coherence::CpuFeatures::detect().avx512;
        assert_eq!(reader.memory.sums_copies(), text == "native" && can, "{text}");
        let mut state = 23;
        for engine in engines() {
            for (len, cut) in [(4096, 1), (8192, 2), (4096 * 5 + 64, 1), (1 << 20, 8), ((1 << 20) + 960, 3), (300 << 10, 75)] {
                // Also where the block does not start a line of the pool.
                for offset in [4096u64, 4096 + 8] {
                    let bytes = pattern(splitmix(&mut state), len);
                    engine.publish(&*writer.memory, &WriteList::gather(offset, [&bytes[..]]), Checksum::Off).unwrap();
                    let mut found = lines(len);
                    let mut parts: Vec<&mut [u8]> = Vec::new();
                    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
                    for _ in 1..cut {
                        let (now, behind) = rest.split_at_mut(len / cut / 64 * 64);
                        (rest, parts) = (behind, parts.into_iter().chain([now]).collect());
                    }
                    parts.push(rest);
                    let mut list = ReadList::scatter(offset, parts);
                    let sum = engine.pull(&*reader.memory, &mut list, Checksum::Xxh3).unwrap();
                    assert_eq!(sum, Some(checksum_of(&bytes)), "{text}, {len} bytes in {cut}, {:?}", engine.config());
                    assert!(bytemuck::cast_slice::<Line, u8>(&found) == bytes);
                }
            }
        }
    }
}

#[test]
fn a_copy_with_a_sum_takes_whole_lines_of_the_pool() {
    let [pool, _] = hosts("native").unwrap();
    if !pool.memory.sums_copies() {
        return;
    }
    let mut found = lines(4096);
    let found: &mut [u8] = bytemuck::cast_slice_mut(&mut found);
    let mut sum = LineSum::of(4096).unwrap();
    assert!(matches!(pool.memory.copy_out_summed(0, &mut found[1..65], &mut sum), Err(Error::Invalid(_))));
    assert!(matches!(pool.memory.copy_out_summed(0, &mut found[..63], &mut sum), Err(Error::Invalid(_))));
    assert!(matches!(pool.memory.copy_out_summed(POOL_BYTES - 64, &mut found[..128], &mut sum), Err(Error::OutOfRange { .. })));
    assert!(pool.memory.copy_out_summed(64, found, &mut sum).is_ok() && sum.finish().is_some(), "refused bytes were not summed");
}

#[test]
fn a_checksum_is_of_one_stretch() {
    let [pool, _] = hosts("native").unwrap();
    let engine = CpuEngine::new(CopyConfig::alone());
    let bytes = pattern(1, 300);
    let mut list = WriteList::new();
    list.push(100, &bytes[..100]);
    list.push(201, &bytes[100..]);
    assert!(matches!(engine.publish(&*pool.memory, &list, Checksum::Xxh3), Err(Error::Invalid(_))));
    let mut found = vec![0; 300];
    let (one, other) = found.split_at_mut(100);
    let mut list = ReadList::new();
    list.push(100, one);
    list.push(150, other);
    assert!(matches!(engine.pull(&*pool.memory, &mut list, Checksum::Xxh3), Err(Error::Invalid(_))));
    assert_eq!(found, vec![0; 300], "refused before a byte moved");
}

fn range(bytes: &mut [u8]) -> LocalRange {
    LocalRange { address: NonNull::new(bytes.as_mut_ptr()).unwrap(), len_bytes: bytes.len() }
}

fn content(pool: &Pool) -> Vec<u8> {
    let mut all = vec![0; POOL_BYTES as usize];
    pool.memory.copy_out(0, &mut all).unwrap();
    all
}

#[test]
fn hostile_lists_are_refused_before_a_byte_moves() {
    let [pool, _] = hosts("native").unwrap();
    let mut bytes = pattern(3, 4096);
    for engine in engines() {
        let before = content(&pool);
        let ends = [u64::MAX, u64::MAX - 63, u64::MAX - 4095, POOL_BYTES, POOL_BYTES - 4095, 1 << 63];
        for end in ends {
            let mut list = WriteList::gather(0, [&bytes[..]]);
            list.push(end, &bytes);
            assert!(matches!(engine.publish(&*pool.memory, &list, Checksum::Off), Err(Error::OutOfRange { .. })), "{end:#x}");
            let (mut one, mut other) = ([0; 64], [0; 4096]);
            let mut list = ReadList::scatter(0, [&mut one[..]]);
            list.push(end, &mut other);
            assert!(matches!(engine.pull(&*pool.memory, &mut list, Checksum::Off), Err(Error::OutOfRange { .. })), "{end:#x}");
            assert!(one == [0; 64] && other == [0; 4096]);
        }
        // Lengths whose sums overflow, which no memory has: refused by their place in the pool, so nothing is read.
        let mut list = WriteList::new();
        for len_bytes in [usize::MAX, usize::MAX - 1, 1 << 62] {
            // SAFETY: the list is refused, so that the range is never touched.
            unsafe { list.push_raw(8, LocalRange { address: NonNull::dangling(), len_bytes }) };
        }
        assert!(matches!(engine.publish(&*pool.memory, &list, Checksum::Xxh3), Err(Error::OutOfRange { .. })));
        assert_eq!(list.len_bytes(), u64::MAX);

        // One byte of the pool twice.
        for (one, other) in [(1000, 1000 + 4095), (5000, 5000 - 4095), (64, 64)] {
            let mut list = WriteList::new();
            list.push(one, &bytes);
            list.push(other, &bytes);
            assert!(matches!(engine.publish(&*pool.memory, &list, Checksum::Off), Err(Error::Invalid(_))), "{one} {other}");
        }
        // One local byte twice, in and out of order.
        for (one, other) in [(0..100, 99..200), (99..200, 0..100), (7..8, 7..8)] {
            let mut list = ReadList::new();
            let (one, other) = (range(&mut bytes[one]), range(&mut bytes[other]));
            // SAFETY: `bytes` outlives the list and no other thread uses it meanwhile.
            unsafe {
                list.push_raw(0, one);
                list.push_raw(500, other);
            }
            assert!(matches!(engine.pull(&*pool.memory, &mut list, Checksum::Off), Err(Error::Invalid(_))));
        }
        assert!(content(&pool) == before && bytes == pattern(3, 4096), "something moved");
        assert_eq!(engine.counters()[0], Copied { engine: "cpu", failed_lists: 2 * ends.len() as u64 + 7, ..Copied::default() });
    }
}

#[test]
fn a_bad_list_stops_no_other() {
    let [pool, _] = hosts("native").unwrap();
    pool.faults.mark_poisoned(2 << 20).unwrap();
    for engine in engines() {
        let bytes = pattern(9, 30_000);
        let lists = [
            WriteList::gather(100, [&bytes[..10_000]]),
            WriteList::gather(POOL_BYTES, [&bytes[..1]]),
            WriteList::gather(2 << 20, [&bytes[10_000..20_000]]),
            WriteList::gather(6 << 20, [&bytes[20_000..]]),
        ];
        let done = engine.publish_each(&*pool.memory, &lists, Checksum::Off);
        assert!(matches!(done[..], [Ok(None), Err(Error::OutOfRange { .. }), Err(Error::Poisoned { .. }), Ok(None)]), "{done:?}");
        let mut found = vec![0; 30_000];
        let mut parts = found.chunks_mut(10_000);
        let mut lists: Vec<ReadList<'_>> =
            [2 << 20, 100, 6 << 20].into_iter().map(|offset| ReadList::scatter(offset, parts.next())).collect();
        let mut nowhere = [0; 1];
        lists.insert(1, ReadList::scatter(u64::MAX, [&mut nowhere[..]]));
        let done = engine.pull_each(&*pool.memory, &mut lists, Checksum::Off);
        assert!(matches!(done[..], [Err(Error::Poisoned { .. }), Err(Error::OutOfRange { .. }), Ok(None), Ok(None)]), "{done:?}");
        assert!(found[..10_000] == [0; 10_000] && found[10_000..20_000] == bytes[..10_000] && found[20_000..] == bytes[20_000..]);
        let moved = Copied { engine: "cpu", published_bytes: 20_000, pulled_bytes: 20_000, failed_lists: 4, ..Copied::default() };
        assert_eq!(engine.counters(), [moved]);
    }
}

#[test]
fn a_hundred_thousand_pieces_are_one_list() {
    const COUNT: usize = 100_000;
    let [writer, reader] = hosts("native").unwrap();
    let bytes = pattern(21, COUNT * 40);
    for engine in engines() {
        let mut list = WriteList::new();
        // Backwards, and with gaps of one byte on the local side only.
        for index in (0..COUNT).rev() {
            list.push(39 * index as u64, &bytes[40 * index..40 * index + 39]);
        }
        assert_eq!(list.pieces_len(), COUNT);
        engine.publish(&*writer.memory, &list, Checksum::Xxh3).unwrap();
        let mut found = vec![0u8; COUNT * 40];
        let mut list = ReadList::new();
        for (index, piece) in found.chunks_mut(40).enumerate() {
            // SAFETY: the pieces are disjoint parts of `found`, which outlives the list.
            unsafe { list.push_raw(39 * index as u64, range(&mut piece[..39])) };
        }
        engine.pull(&*reader.memory, &mut list, Checksum::Off).unwrap();
        assert!(found.chunks(40).zip(bytes.chunks(40)).all(|(found, bytes)| found[..39] == bytes[..39] && found[39] == 0));
    }
}

#[test]
fn neighbours_on_both_sides_become_one_piece() {
    let bytes = pattern(2, 1000);
    let mut list = WriteList::gather(64, bytes.chunks(10));
    list.push(64 + 1000, &[]);
    assert_eq!((list.pieces_len(), list.len_bytes()), (1, 1000));
    list.push(64 + 1001, &bytes[..1]);
    assert_eq!(list.pieces_len(), 2);
    let mut room = vec![0; 1000];
    let list = ReadList::scatter(64, room.chunks_mut(10));
    assert_eq!((list.pieces_len(), list.len_bytes()), (1, 1000));
}

#[test]
fn a_config_that_cannot_be_meant_is_refused() {
    assert!(CopyConfig::default().check().is_ok());
    for window_bytes in [0, 4095, 4097, 4096 + 32] {
        assert!(CopyConfig { window_bytes, ..CopyConfig::default() }.check().is_err(), "{window_bytes}");
    }
    assert!(CopyConfig { workers: 1000, ..CopyConfig::default() }.check().is_err());
}

#[test]
fn a_config_reads_back_from_its_text() {
    let text = "engine=cpu, workers=2,parallel_from=3M,window=64K,stream_from=128K,read_ahead=8,ahead_page=36K";
    let config: CopyConfig = text.parse().unwrap();
    let expected = CopyConfig {
        engine: EngineChoice::Cpu,
        workers: 2,
        parallel_from_bytes: 3 << 20,
        window_bytes: 64 << 10,
        stream_from_bytes: 128 << 10,
        read_ahead: ReadAhead::Blocks(8),
        ahead_page_bytes: 36 << 10,
    };
    assert_eq!(config, expected);
    let auto = CopyConfig { engine: EngineChoice::Dsa, read_ahead: ReadAhead::Auto, ..config };
    for config in [config, CopyConfig::default(), auto] {
        assert_eq!(config.to_string().parse::<CopyConfig>().unwrap(), config);
    }
    for text in [
        "read_ahead", "read_ahead=0", "read_ahead=9", "read_ahead=on", "ahead_page=0", "ahead_page=5K", "ahead_page=64", "ahead_page=1028K",
    ] {
        assert!(matches!(text.parse::<CopyConfig>(), Err(Error::Invalid(_))), "{text:?}");
    }
    for text in ["engine", "engine=gpu", "workers=-1", "workers=65", "window=1K", "window=4100", "window=18446744073709551616", "x=1"] {
        assert!(matches!(text.parse::<CopyConfig>(), Err(Error::Invalid(_))), "{text:?}");
    }
}

#[test]
fn the_engine_is_chosen_by_config_and_platform() {
    let config = CopyConfig { engine: EngineChoice::Cpu, ..CopyConfig::default() };
    assert_eq!(engine(config, None, None).unwrap().name(), "cpu");
    let nowhere = tempfile::tempdir().unwrap();
    let choose = |engine| engine_below(CopyConfig { engine, ..config }, None, None, nowhere.path(), nowhere.path());
    assert_eq!(choose(EngineChoice::Auto).unwrap().name(), "cpu");
    assert!(matches!(choose(EngineChoice::Dsa), Err(Error::NotFound(_))));
    assert!(engine(CopyConfig { workers: 999, ..config }, None, None).is_err());
}

#[test]
fn a_measured_config_can_be_meant_and_leaves_the_pool_as_it_was() {
    let [pool, _] = hosts("native").unwrap();
    pool.memory.copy_in(0, &pattern(5, POOL_BYTES as usize)).unwrap();
    let config = CopyConfig::measure(&*pool.memory, 4096).unwrap();
    assert!(config.check().is_ok() && config.engine == EngineChoice::Auto, "{config}");
    assert!(content(&pool) == pattern(5, POOL_BYTES as usize));
    for offset in [POOL_BYTES - (4 << 20) + 1, u64::MAX] {
        assert!(matches!(CopyConfig::measure(&*pool.memory, offset), Err(Error::OutOfRange { .. })));
    }
}
