// SPDX-License-Identifier: Apache-2.0
//! Steps of order around the copies of a GPU, on emulated hosts with a driver that is faked: what it wrote lies in this host's caches, and
//! what it reads may be there from before. And on hosts whose DMA goes past the caches.

#[path = "../../pool/tests/cuda/device.rs"]
#[allow(dead_code)] // The tests of the engine use the rest; the same below.
mod device;
#[path = "../../pool/tests/cuda/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../pool/tests/cuda/scenes.rs"]
#[allow(dead_code)]
mod scenes;

use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{
    After, Checksum, Copied, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine, Dma, LocalPlace, OnGpu, Outcome, ReadList,
    WriteList, checksum_of,
};
use cxl_pool::fault::drop_rule;
use fake::{Fake, Kind};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// An engine that makes its copies without a rule.
struct Without {
    engine: CudaEngine,
    rule: Option<&'static str>,
}

impl CopyEngine for Without {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        drop_rule(self.rule);
        let outcomes = self.engine.publish_each(memory, lists, checksum);
        drop_rule(None);
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        drop_rule(self.rule);
        let outcomes = self.engine.pull_each(memory, lists, checksum);
        drop_rule(None);
        outcomes
    }

    fn is_settled(&self, timeout_ms: u64) -> bool {
        self.engine.is_settled(timeout_ms)
    }

    fn counters(&self) -> Vec<Copied> {
        self.engine.counters()
    }
}

/// Whether a byte or a checksum is wrong when a rule is dropped; `alter` is what happens to the driver before.
fn is_noticed(rule: Option<&'static str>, kind: Kind, checksum: Checksum, alter: fn(&Fake)) -> bool {
    is_noticed_on(PLATFORM, Dma::Cached, rule, kind, checksum, alter)
}

/// As [`is_noticed`], on a platform, of which something is believed.
fn is_noticed_on(platform: &str, dma: Dma, rule: Option<&'static str>, kind: Kind, checksum: Checksum, alter: fn(&Fake)) -> bool {
    let fake = Fake::new(kind);
    let gpu = device::Gpu::open(fake.path(), 0);
    let hosts = scenes::hosts(platform);
    // In steps of which many are not the last.
    let config = CudaConfig { in_flight_bytes: 256 << 10, timeout_ms: 60_000, dma, ..fake.config() };
    let engine = Without { engine: CudaEngine::open(&config, 0, hosts[0].clone()).unwrap(), rule };
    assert_eq!(engine.engine.reach().no_kernels.is_none(), kind == Kind::Kernels);
    alter(&fake);
    let tried = catch_unwind(AssertUnwindSafe(|| scenes::there_and_back(&gpu, 0, &engine, &hosts, checksum, 1)));
    if let Ok(outcomes) = &tried {
        assert!(scenes::all_well(outcomes), "{outcomes:?}");
        let copied = engine.counters()[0];
        // Through buffers the CPU flushes whatever is believed of devices.
        let is_direct = kind == Kind::Kernels || checksum == Checksum::Off;
        let unflushed = if dma == Dma::Uncached && is_direct { copied.published_bytes + copied.pulled_bytes } else { 0 };
        // Lists of so few bytes that no kernel sums them take the others along, through buffers.
        assert!(copied.unflushed_bytes == unflushed || checksum != Checksum::Off && copied.unflushed_bytes == 0, "{copied:?}");
    }
    tried.is_err()
}

/// Hosts whose devices reach the pool through their caches, and hosts whose devices go past them.
const PLATFORM: &str = "emulated:seed=3,noise=0";
const UNCACHED_PLATFORM: &str = "emulated:seed=3,noise=0,dma=uncached";

/// Flushes around DMA are a property of the platform. Without them nothing is missing where DMA goes past the caches; where it goes
/// through them, what one host's GPU writes is not seen by the other, and what it reads is old.
#[test]
fn uncached_is_right_where_it_is_true_and_noticed_where_it_is_not() {
    for kind in [Kind::Engine, Kind::Kernels] {
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            for dma in [Dma::Cached, Dma::Uncached] {
                assert!(!is_noticed_on(UNCACHED_PLATFORM, dma, None, kind, checksum, |_| {}), "{dma:?}, {kind:?}, {checksum:?}");
            }
        }
        assert!(is_noticed_on(PLATFORM, Dma::Uncached, None, kind, Checksum::Off, |_| {}), "{kind:?}: nothing noticed a wrong belief");
        // What is believed of devices leaves the end of their work awaited.
        let late = |fake: &Fake| fake.set("queries_until_done", 3);
        for (rule, is_expected) in [(None, false), (Some("copy.dma_unawaited"), true)] {
            assert_eq!(is_noticed_on(UNCACHED_PLATFORM, Dma::Uncached, rule, kind, Checksum::Off, late), is_expected, "{rule:?}, {kind:?}");
        }
    }
}

#[test]
fn the_loss_of_a_step_around_a_copy_is_noticed() {
    for kind in [Kind::Engine, Kind::Kernels] {
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            assert!(!is_noticed(None, kind, checksum, |_| {}));
            for rule in ["copy.publish_no_fence", "copy.pull_no_flush", "copy.pull_no_full_fence"] {
                assert!(is_noticed(Some(rule), kind, checksum, |_| {}), "{rule}, {kind:?}, {checksum:?}: nothing noticed its loss");
            }
        }
        for rule in ["copy.dma_no_flush", "copy.dma_no_edge_flush"] {
            assert!(is_noticed(Some(rule), kind, Checksum::Off, |_| {}), "{rule}, {kind:?}: nothing noticed its loss");
        }
        let late = |fake: &Fake| fake.set("queries_until_done", 3);
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            assert!(!is_noticed(None, kind, checksum, late));
            assert!(is_noticed(Some("copy.dma_unawaited"), kind, checksum, late), "{kind:?}, {checksum:?}: nothing noticed its loss");
        }
    }
}

/// Two blocks of a GPU by kernel, with checksums, behind work of the caller's.
fn summed(rule: Option<&'static str>, is_launch_lost: bool) -> bool {
    summed_on(PLATFORM, Dma::Cached, rule, is_launch_lost)
}

fn summed_on(platform: &str, dma: Dma, rule: Option<&'static str>, is_launch_lost: bool) -> bool {
    let fake = Fake::new(Kind::Kernels);
    let gpu = device::Gpu::open(fake.path(), 0);
    let hosts = scenes::hosts(platform);
    let engine = Without { engine: CudaEngine::open(&CudaConfig { dma, ..fake.config() }, 0, hosts[0].clone()).unwrap(), rule };
    assert_eq!(engine.engine.reach().no_kernels, None);
    let (memory, stream, bytes) = (gpu.memory(&scenes::pattern(1, 20_000)), gpu.stream(), scenes::pattern(2, 20_000));
    let place = LocalPlace::Gpu(OnGpu { device: 0, after: After::Stream(stream.handle) });
    let blocks = [
        scenes::Block { offset: 4100, pieces: vec![(0, 3000), (3001, 2000)] },
        scenes::Block { offset: 16_384, pieces: vec![(8192, 8192)] },
    ];
    fake.set("is_launch_lost", is_launch_lost.into());
    fake.kernel(stream.handle, memory.address, &bytes);
    let lists: Vec<_> = blocks.iter().map(|block| block.write_list(&memory, place)).collect();
    let written = engine.publish_each(&*hosts[0], &lists, Checksum::Xxh3);
    // The caller's stream ends, so that nothing is left of it.
    fake.finish();
    blocks.iter().zip(written).all(|(block, outcome)| {
        let mut found = vec![0; block.len_bytes()];
        CpuEngine::new(CopyConfig::alone())
            .pull(&*hosts[1], &mut ReadList::scatter(block.offset, [&mut found[..]]), Checksum::Off)
            .unwrap();
        match outcome {
            Ok(sum) => found == block.of(&bytes) && sum == Some(checksum_of(&found)),
            Err(_) => is_launch_lost,
        }
    })
}

/// Two lists of one call, each after a stream of its own; `late` computes the bytes of both. Whether the other host finds those of the list
/// that comes after it.
fn comes_after_each(rule: Option<&'static str>, checksum: Checksum, late: usize) -> bool {
    let fake = Fake::new(Kind::Engine);
    let gpu = device::Gpu::open(fake.path(), 0);
    let hosts = scenes::hosts(PLATFORM);
    let engine = Without { engine: CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap(), rule };
    let (memory, streams, bytes) = (gpu.memory(&scenes::pattern(5, 40_000)), [gpu.stream(), gpu.stream()], scenes::pattern(6, 40_000));
    let blocks = [
        scenes::Block { offset: 4096, pieces: vec![(128, 9000), (9500, 500)] },
        scenes::Block { offset: 65_536, pieces: vec![(20_000, 12_345)] },
    ];
    fake.kernel(streams[late].handle, memory.address, &bytes);
    let place = |stream: usize| LocalPlace::Gpu(OnGpu { device: 0, after: After::Stream(streams[stream].handle) });
    let lists = [blocks[0].write_list(&memory, place(0)), blocks[1].write_list(&memory, place(1))];
    let written = engine.publish_each(&*hosts[0], &lists, checksum);
    assert!(written.iter().all(Result::is_ok), "{written:?}");
    fake.finish();
    let mut found = vec![0; blocks[late].len_bytes()];
    let mut list = ReadList::scatter(blocks[late].offset, [&mut found[..]]);
    CpuEngine::new(CopyConfig::alone()).pull(&*hosts[1], &mut list, Checksum::Off).unwrap();
    found == blocks[late].of(&bytes)
}

#[test]
fn each_list_of_a_call_comes_after_the_work_of_its_own_stream() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        assert!([0, 1].into_iter().all(|late| comes_after_each(None, checksum, late)), "{checksum:?}");
        assert!(!comes_after_each(Some("copy.dma_after_one_stream"), checksum, 1), "{checksum:?}: nothing noticed its loss");
        assert!(!comes_after_each(Some("copy.dma_before_callers_work"), checksum, 0), "{checksum:?}: nothing noticed its loss");
    }
}

#[test]
fn the_loss_of_a_step_of_a_kernels_checksum_is_noticed() {
    assert!(summed(None, false) && summed(None, true));
    assert!(!summed(Some("copy.dma_before_callers_work"), false), "copies ran ahead of the caller's work");
    for rule in ["copy.dma_no_flush", "copy.publish_no_fence", "copy.dma_unawaited"] {
        assert!(!summed(Some(rule), false), "{rule}: nothing noticed its loss");
    }
    // Sums that kernels take are right whatever lies in caches: the bytes that another host finds are not.
    assert!(summed_on(UNCACHED_PLATFORM, Dma::Uncached, None, false) && !summed_on(PLATFORM, Dma::Uncached, None, false));
    assert!(!summed(Some("copy.dma_unmarked"), true), "a kernel that did nothing was believed");
}
