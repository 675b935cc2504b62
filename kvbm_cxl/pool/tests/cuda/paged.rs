// SPDX-License-Identifier: Apache-2.0
//! Blocks of a paged cache on a GPU, two hosts with a prefix cache, and what is queued there.

use crate::bench::{Bench, SPACE, bytes, config, key};
use crate::device::{Memory, Stream};
use crate::fake::{Fake, Kind};
use cxl_pool::Error;
use cxl_pool::cache::queued::Queued;
use cxl_pool::cache::tier::Answer;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Pulled};
use cxl_pool::copy::{After, ByPlace, CopyConfig, CpuEngine, CudaConfig, LocalRange, OnGpu};
use cxl_pool::host::{Host, Service};
use cxl_pool::pool::Pool;
use std::ops::Range;
use std::sync::Arc;

pub const BLOCKS: u64 = 12;
const PARTS: usize = 4;
const PART_BYTES: usize = 3000;
pub const BLOCK_BYTES: usize = PARTS * PART_BYTES;
pub const CELL_BYTES: u64 = BLOCK_BYTES.next_multiple_of(64) as u64;

pub fn cache(host: &Host, config: CacheConfig, cuda: CudaConfig) -> Cache {
    let engine = ByPlace::new(Arc::new(CpuEngine::new(CopyConfig::alone())), host.lines().memory().clone(), cuda);
    Cache::open_with(host, config, Arc::new(engine)).unwrap()
}

/// The pieces of block `slot` of a paged cache: its part of each of several tensors.
pub fn pieces(memory: &Memory<'_>, slot: usize) -> Vec<LocalRange> {
    (0..PARTS).map(|part| memory.range((part * BLOCKS as usize + slot) * PART_BYTES, PART_BYTES)).collect()
}

/// All of a paged cache, with block `number` in `slot_of(number)`.
pub fn paged(slot_of: impl Fn(u64) -> usize, seed: u64) -> Vec<u8> {
    let mut all = bytes(seed, BLOCKS as usize * BLOCK_BYTES);
    for number in 0..BLOCKS {
        for (part, piece) in bytes(number, BLOCK_BYTES).chunks(PART_BYTES).enumerate() {
            let at = (part * BLOCKS as usize + slot_of(number)) * PART_BYTES;
            all[at..at + PART_BYTES].copy_from_slice(piece);
        }
    }
    all
}

/// What there is of each answer: enough to compare.
pub fn words(answers: &[Answer]) -> Vec<String> {
    answers
        .iter()
        .map(|answer| match answer {
            Answer::Missed(reason) => reason.text().into(),
            Answer::Refused(reason) => reason.text().into(),
            Answer::Failed(error) => error.class().into(),
            other => format!("{other:?}"),
        })
        .collect()
}

/// What became of the blocks; waits for it.
pub fn end(queued: &Queued) -> Vec<String> {
    words(&queued.wait(120_000).expect("an end"))
}

pub fn all(word: &str, count: usize) -> Vec<String> {
    vec![word.into(); count]
}

pub fn on(stream: &Stream<'_>) -> OnGpu {
    OnGpu { device: 0, after: After::Stream(stream.handle) }
}

/// Publishes blocks `numbers` from the places of their numbers.
pub fn try_publish(cache: &Cache, numbers: Range<u64>, memory: &Memory<'_>, on: OnGpu, wait_ms: u64) -> Result<Queued, Error> {
    let first = numbers.start as usize;
    let requests: Vec<PublishRequest> =
        numbers.map(|number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: BLOCK_BYTES as u64 }).collect();
    // SAFETY: the memory of the tests stays, and only streams that are ordered use it meanwhile; the same below.
    unsafe { cache.queue_publish(&requests, on, wait_ms, |place| pieces(memory, first + place)) }
}

pub fn publish(cache: &Cache, numbers: Range<u64>, memory: &Memory<'_>, on: OnGpu) -> Queued {
    try_publish(cache, numbers, memory, on, 0).unwrap()
}

/// Pulls blocks `numbers` to the places of their numbers.
pub fn try_pull(cache: &Cache, numbers: Range<u64>, memory: &Memory<'_>, on: OnGpu, wait_ms: u64) -> Result<Queued, Error> {
    let first = numbers.start as usize;
    let keys: Vec<BlockKey> = numbers.map(key).collect();
    // SAFETY: as above.
    unsafe { cache.queue_pull(SPACE, &keys, on, wait_ms, |place, _| pieces(memory, first + place)) }
}

pub fn pull(cache: &Cache, numbers: Range<u64>, memory: &Memory<'_>, on: OnGpu) -> Queued {
    try_pull(cache, numbers, memory, on, 0).unwrap()
}

/// Two hosts with a cache each, and a GPU.
pub struct Scene {
    pub fake: Fake,
    pub caches: [Cache; 2],
    pub hosts: [Host; 2],
    pub services: [Option<Service>; 2],
    _pools: [Pool; 2],
    pub bench: Bench,
}

impl Scene {
    pub fn new(kind: Kind, checksums: bool, alter: impl FnOnce(&mut CudaConfig)) -> Scene {
        let fake = Fake::new(kind);
        let bench = Bench::new(&[(CELL_BYTES, 60)]);
        let [(pool, host), (other_pool, other)] = [1, 2].map(|machine| bench.join(machine));
        let services = [host.serve().unwrap(), other.serve().unwrap()].map(Some);
        let mut cuda = CudaConfig { timeout_ms: 60_000, ..fake.config() };
        alter(&mut cuda);
        let config = CacheConfig { checksums, ..config() };
        let caches = [&host, &other].map(|host| cache(host, config.clone(), cuda.clone()));
        // Before a test keeps the GPU from its work: kernels are tried when it is opened.
        caches.iter().for_each(|cache| drop(cache.copy_engine().open_gpu(0).unwrap()));
        Scene { fake, caches, hosts: [host, other], services, _pools: [pool, other_pool], bench }
    }

    /// Whether another host finds a block.
    pub fn is_there(&self, number: u64) -> bool {
        let mut found = vec![0; BLOCK_BYTES];
        match self.caches[1].pull(SPACE, key(number), &mut found).unwrap() {
            Pulled::Hit { .. } => {
                assert!(found == bytes(number, BLOCK_BYTES), "block {number} has wrong bytes");
                true
            }
            Pulled::Miss(_) => false,
        }
    }

    /// Ends in good order: nothing is pinned, and nothing of the driver is left.
    pub fn close(self) {
        let Scene { fake, caches, hosts, services, .. } = self;
        for cache in caches {
            assert_eq!(cache.pinned(), 0);
            cache.close().unwrap();
        }
        drop(services);
        drop(hosts);
        assert_eq!(fake.misuse(), "");
        assert_eq!(fake.get("registered") + fake.get("pinned"), 0);
    }
}

/// How the GPU moves bytes in these tests: by copies, by kernels, by kernels that take checksums.
pub const WAYS: [(Kind, bool); 3] = [(Kind::Engine, false), (Kind::Kernels, false), (Kind::Kernels, true)];
