// SPDX-License-Identifier: Apache-2.0
//! What is tried on real GPUs, with nothing but what a real driver has.

use crate::device::Gpu;
use crate::scenes::*;
use cxl_pool::copy::{After, Checksum, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine, LocalPlace, OnGpu, ReadList, WriteList};
use std::time::Instant;

/// Bytes of the copies that are timed.
const TIMED_BYTES: usize = 2 << 20;
const ROUNDS: u64 = 16;

/// Tries every GPU, and prints how it was reached and how fast.
pub fn on_every_gpu(config: &CudaConfig, count: u32) {
    every_byte_on_every_gpu(config, count);
    for number in 0..count {
        let gpu = Gpu::open(&config.library, number);
        behind_a_stream(config, &gpu, number);
        timed(config, &gpu, number);
    }
}

/// Tries every GPU, and prints how it was reached.
pub fn every_byte_on_every_gpu(config: &CudaConfig, count: u32) {
    for number in 0..count {
        let gpu = Gpu::open(&config.library, number);
        for text in ["native", "emulated:seed=7,noise=16"] {
            for checksum in [Checksum::Off, Checksum::Xxh3] {
                let hosts = hosts(text);
                let engine = CudaEngine::open(config, number, hosts[0].clone()).unwrap();
                for seed in 0..4 {
                    let outcomes = there_and_back(&gpu, number, &engine, &hosts, checksum, 10 * seed + u64::from(number));
                    assert!(all_well(&outcomes), "GPU {number}, {text}, {checksum:?}: {outcomes:?}");
                }
                // Without those that no kernel sums.
                let (mut blocks, len_bytes) = blocks();
                blocks.retain(|block| block.len_bytes() > 240);
                for seed in 0..4 {
                    let both = [&hosts[0], &hosts[1]];
                    let outcomes = there_and_back_of(&blocks, len_bytes, &gpu, number, &engine, both, checksum, 100 + seed);
                    assert!(all_well(&outcomes), "GPU {number}, {text}, {checksum:?}: {outcomes:?}");
                }
                println!("GPU {number}, {text}, {checksum:?}: every byte is right; {:?}", engine.reach());
            }
        }
    }
}

/// A copy comes after what a stream, or an event, was given before it.
fn behind_a_stream(config: &CudaConfig, gpu: &Gpu, number: u32) {
    let [host, other] = hosts("native");
    let engine = CudaEngine::open(config, number, host.clone()).unwrap();
    let (stream, memory) = (gpu.stream(), gpu.memory(&pattern(1, TIMED_BYTES)));
    let block = Block { offset: 4096, pieces: vec![(0, TIMED_BYTES)] };
    for round in 0..ROUNDS as u32 {
        let words: Vec<u32> = (0..TIMED_BYTES as u32 / 4096).map(|index| (round << 24 | index).wrapping_mul(0x9e37_79b1)).collect();
        stream.write_words(&memory, &words);
        let event = stream.event();
        let after = if round % 2 == 0 { After::Stream(stream.handle) } else { After::Event(event.handle) };
        let list = block.write_list(&memory, LocalPlace::Gpu(OnGpu { device: number, after }));
        engine.publish(&*host, &list, if round % 4 < 2 { Checksum::Off } else { Checksum::Xxh3 }).unwrap();
        let mut found = vec![0; TIMED_BYTES];
        CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(4096, [&mut found[..]]), Checksum::Off).unwrap();
        let is_right = |(page, word): (&[u8], &u32)| page.chunks(4).all(|bytes| bytes == word.to_le_bytes());
        assert!(found.chunks(4096).zip(&words).all(is_right), "round {round}");
    }
}

/// The fastest of some rounds, for a report: nothing is asserted of a speed.
fn timed(config: &CudaConfig, gpu: &Gpu, number: u32) {
    let [host, _] = hosts("native");
    let engine = CudaEngine::open(config, number, host.clone()).unwrap();
    let memory = gpu.memory(&pattern(2, TIMED_BYTES));
    for (pieces, piece_bytes) in [(1, TIMED_BYTES), (TIMED_BYTES / 8192, 4096)] {
        let block = Block { offset: 0, pieces: (0..pieces).map(|index| (index * 2 * piece_bytes % TIMED_BYTES, piece_bytes)).collect() };
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            let mut fastest = [f64::MAX; 2];
            for _ in 0..ROUNDS {
                let list: WriteList<'_> = block.write_list(&memory, on(number));
                let start = Instant::now();
                engine.publish(&*host, &list, checksum).unwrap();
                fastest[0] = fastest[0].min(start.elapsed().as_secs_f64());
                let mut list = block.read_list(&memory, on(number));
                let start = Instant::now();
                engine.pull(&*host, &mut list, checksum).unwrap();
                fastest[1] = fastest[1].min(start.elapsed().as_secs_f64());
            }
            let [publish, pull] = fastest.map(|seconds| block.len_bytes() as f64 / seconds / 1e9);
            println!("GPU {number}: {pieces} pieces of {piece_bytes} bytes, {checksum:?}: publish {publish:.2} GB/s, pull {pull:.2} GB/s");
        }
    }
}
