// SPDX-License-Identifier: Apache-2.0
//! Blocks between the memory of a GPU and a pool that two hosts share, with every byte looked at: what was to be copied, and what lies
//! beside it.

use crate::device::{Gpu, Memory};
use cxl_pool::coherence::{Coherence, CoherenceOptions, over_mapping};
use cxl_pool::copy::{After, Checksum, CopyConfig, CopyEngine, CpuEngine, LocalPlace, OnGpu, Outcome, ReadList, WriteList, checksum_of};
use cxl_pool::device::{Access, Device, Sysfs, map_part};
use std::path::Path;
use std::sync::Arc;
use tempfile::NamedTempFile;

pub const POOL_BYTES: u64 = 4 << 20;

/// The file of a pool.
pub fn file() -> NamedTempFile {
    let file = NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(POOL_BYTES).unwrap();
    file
}

/// A host over a file.
pub fn host(path: &Path, text: &str) -> Arc<dyn Coherence> {
    let options: CoherenceOptions = text.parse().unwrap();
    let device = Device::open(path, Access::Write, &Sysfs::default()).unwrap();
    over_mapping(map_part(&device, 0, POOL_BYTES).unwrap(), &options).unwrap().memory
}

/// Two hosts over one file.
pub fn hosts(text: &str) -> [Arc<dyn Coherence>; 2] {
    let file = file();
    [host(file.path(), text), host(file.path(), text)]
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let word = |index: u64| {
        let mixed = (seed.wrapping_mul(0xd134_2543_de82_ef95) ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ seed).to_le_bytes()
    };
    (0..len.div_ceil(8) as u64).flat_map(word).take(len).collect()
}

/// A place on a GPU, after nothing.
pub fn on(device: u32) -> LocalPlace {
    LocalPlace::Gpu(OnGpu { device, after: After::Nothing })
}

/// A block: where it begins in the pool, and the pieces of the GPU's memory that it is made of.
pub struct Block {
    pub offset: u64,
    pub pieces: Vec<(usize, usize)>,
}

impl Block {
    pub fn len_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.1).sum()
    }

    /// Its bytes, of the memory's.
    pub fn of(&self, memory: &[u8]) -> Vec<u8> {
        self.pieces.iter().flat_map(|&(start, len)| &memory[start..start + len]).copied().collect()
    }

    pub fn write_list(&self, memory: &Memory<'_>, place: LocalPlace) -> WriteList<'static> {
        // SAFETY: the memory outlives every call with the list, and no other thread uses it meanwhile; the same below.
        let (mut list, mut at) = (unsafe { WriteList::lying_on(place) }, self.offset);
        for &(start, len) in &self.pieces {
            // SAFETY: as above.
            unsafe { list.push_raw(at, memory.range(start, len)) };
            at += len as u64;
        }
        list
    }

    pub fn read_list(&self, memory: &Memory<'_>, place: LocalPlace) -> ReadList<'static> {
        // SAFETY: as above.
        let (mut list, mut at) = (unsafe { ReadList::lying_on(place) }, self.offset);
        for &(start, len) in &self.pieces {
            // SAFETY: as above.
            unsafe { list.push_raw(at, memory.range(start, len)) };
            at += len as u64;
        }
        list
    }
}

/// Blocks of several shapes at offsets of no roundness, with gaps on both sides; the memory that they need.
pub fn blocks() -> (Vec<Block>, usize) {
    let shapes: [(usize, usize); 7] = [(1, 1), (5, 13), (1, 64), (1, 200_000), (40, 1000), (3, 17_000), (12, 4096)];
    let (mut offset, mut at) = (7, 3);
    let mut blocks = Vec::new();
    for (count, len) in shapes {
        let mut pieces = Vec::new();
        for index in 0..count {
            pieces.push((at, len));
            // Every third piece goes on where the one before it ended.
            at += len + if index % 3 == 1 { 0 } else { 5 };
        }
        blocks.push(Block { offset, pieces });
        offset += (count * len) as u64 + 61;
    }
    (blocks, at + 100)
}

pub fn content(memory: &dyn Coherence) -> Vec<u8> {
    let mut all = vec![0; POOL_BYTES as usize];
    CpuEngine::new(CopyConfig::alone()).pull(memory, &mut ReadList::scatter(0, [&mut all[..]]), Checksum::Off).unwrap();
    all
}

/// Publishes from the GPU for another host, then pulls what that host has published instead. The answers of both calls; whatever was
/// answered well is looked at byte by byte, and everything else is as it was.
pub fn there_and_back(
    gpu: &Gpu,
    device: u32,
    engine: &dyn CopyEngine,
    [host, other]: &[Arc<dyn Coherence>; 2],
    checksum: Checksum,
    seed: u64,
) -> (Vec<Outcome>, Vec<Outcome>) {
    let (blocks, len_bytes) = blocks();
    there_and_back_of(&blocks, len_bytes, gpu, device, engine, [host, other], checksum, seed)
}

/// As [`there_and_back`], of some blocks, which need so much memory of the GPU.
#[allow(clippy::too_many_arguments)] // A scene has these parts.
pub fn there_and_back_of(
    blocks: &[Block],
    len_bytes: usize,
    gpu: &Gpu,
    device: u32,
    engine: &dyn CopyEngine,
    [host, other]: [&Arc<dyn Coherence>; 2],
    checksum: Checksum,
    seed: u64,
) -> (Vec<Outcome>, Vec<Outcome>) {
    let cpu = CpuEngine::new(CopyConfig::alone());
    let sum = |bytes: &[u8]| (checksum == Checksum::Xxh3).then(|| checksum_of(bytes));

    // The bytes that the pool and this host's caches hold before.
    let mut model = pattern(seed, POOL_BYTES as usize);
    cpu.publish(&**other, &WriteList::gather(0, [&model[..]]), Checksum::Off).unwrap();
    assert!(content(&**host) == model);
    // The other host writes what lies between the blocks anew: the lines that they share must keep it.
    let between = pattern(seed + 1, POOL_BYTES as usize);
    let mut list = WriteList::new();
    for pair in blocks.windows(2) {
        let (start, end) = ((pair[0].offset as usize) + pair[0].len_bytes(), pair[1].offset as usize);
        model[start..end].copy_from_slice(&between[start..end]);
        list.push(start as u64, &between[start..end]);
    }
    cpu.publish(&**other, &list, Checksum::Off).unwrap();

    let bytes = pattern(seed + 2, len_bytes);
    let memory = gpu.memory(&bytes);
    let lists: Vec<WriteList<'_>> = blocks.iter().map(|block| block.write_list(&memory, on(device))).collect();
    let written = engine.publish_each(&**host, &lists, checksum);
    assert_eq!(written.len(), blocks.len());
    assert!(memory.read() == bytes, "the source changed");
    let found = content(&**other);
    for (block, outcome) in blocks.iter().zip(&written) {
        let range = block.offset as usize..block.offset as usize + block.len_bytes();
        match outcome {
            Ok(found) => {
                let bytes = block.of(&bytes);
                assert_eq!(*found, sum(&bytes), "the block at {}", block.offset);
                model[range].copy_from_slice(&bytes);
            }
            Err(_) => model[range.clone()].copy_from_slice(&found[range]),
        }
    }
    assert!(found == model, "byte {:?} of the pool", (0..model.len()).find(|&at| found[at] != model[at]));

    // The other host's own version of all of it, of which this host has old lines.
    let model = pattern(seed + 3, POOL_BYTES as usize);
    cpu.publish(&**other, &WriteList::gather(0, [&model[..]]), Checksum::Off).unwrap();
    let mut expected = pattern(seed + 4, len_bytes);
    let memory = gpu.memory(&expected);
    let mut lists: Vec<ReadList<'_>> = blocks.iter().map(|block| block.read_list(&memory, on(device))).collect();
    let read = engine.pull_each(&**host, &mut lists, checksum);
    assert_eq!(read.len(), blocks.len());
    let found = memory.read();
    for (block, outcome) in blocks.iter().zip(&read) {
        let mut bytes = &model[block.offset as usize..block.offset as usize + block.len_bytes()];
        if let Ok(found) = outcome {
            assert_eq!(*found, sum(bytes), "the block at {}", block.offset);
        }
        for &(start, len) in &block.pieces {
            let (now, behind) = bytes.split_at(len);
            expected[start..start + len].copy_from_slice(if outcome.is_ok() { now } else { &found[start..start + len] });
            bytes = behind;
        }
    }
    assert!(found == expected, "byte {:?} of the GPU's memory", (0..expected.len()).find(|&at| found[at] != expected[at]));
    (written, read)
}

pub fn all_well(outcomes: &(Vec<Outcome>, Vec<Outcome>)) -> bool {
    outcomes.0.iter().chain(&outcomes.1).all(Result::is_ok)
}
