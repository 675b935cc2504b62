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
use std::io::{BufRead, BufReader, Lines, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

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
    let config = CudaConfig { part_bytes: 128 << 10, timeout_ms: 60_000, dma, ..fake.config() };
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

/// Whether a byte is wrong in blocks that are large enough for several threads to flush each part, when a rule is dropped.
fn is_noticed_by_threads(rule: Option<&'static str>) -> bool {
    let fake = Fake::new(Kind::Engine);
    let gpu = device::Gpu::open(fake.path(), 0);
    let hosts = scenes::hosts(PLATFORM);
    let config = CudaConfig { part_bytes: 1 << 20, threads: 4, timeout_ms: 60_000, ..fake.config() };
    let engine = Without { engine: CudaEngine::open(&config, 0, hosts[0].clone()).unwrap(), rule };
    let blocks = [(64, 0), (2 << 20, 2 << 20)].map(|(offset, at)| scenes::Block { offset, pieces: vec![(at, 1_500_000)] });
    let both = [&hosts[0], &hosts[1]];
    let scene = || scenes::there_and_back_of(&blocks, 4 << 20, &gpu, 0, &engine, both, Checksum::Off, 1);
    catch_unwind(AssertUnwindSafe(scene)).is_err()
}

/// A thread that reports before its fence, a part that the GPU reads before its flush, an end that is seen before the last flush.
#[test]
fn the_loss_of_a_step_of_the_threads_is_noticed() {
    assert!(!is_noticed_by_threads(None));
    for rule in
        ["copy.dma_thread_unfenced", "copy.dma_part_read_first", "copy.dma_end_unflushed", "copy.dma_no_flush", "copy.pull_no_flush"]
    {
        assert!(is_noticed_by_threads(Some(rule)), "{rule}: nothing noticed its loss");
        // Small parts are flushed by the thread that asks.
        assert!(is_noticed(Some(rule), Kind::Engine, Checksum::Off, |_| {}), "{rule}: nothing noticed its loss");
    }
}

/// Names the file of a pool; only set for the second process, which is the other host.
const POOL: &str = "COPY_GPU_CHILD_POOL";

/// Obeys its standard input, a line each: `write SEED` fills the pool, `read` prints the checksum of its bytes.
#[test]
fn child() {
    let Ok(path) = std::env::var(POOL) else { return };
    let (memory, cpu) = (scenes::host(Path::new(&path), PLATFORM), CpuEngine::new(CopyConfig::alone()));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if let Some(seed) = line.strip_prefix("write ") {
            let bytes = scenes::pattern(seed.parse().unwrap(), scenes::POOL_BYTES as usize);
            cpu.publish(&*memory, &WriteList::gather(0, [&bytes[..]]), Checksum::Off).unwrap();
            println!("\nANSWER 0");
        } else {
            println!("\nANSWER {}", checksum_of(&scenes::content(&*memory)));
        }
    }
}

/// The other host, in a process of its own.
struct Other {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(path: &Path) -> Other {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["child", "--exact", "--nocapture", "--test-threads=1"]).env(POOL, path);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Other { process, lines }
    }

    fn ask(&mut self, what: &str) -> u64 {
        writeln!(self.process.stdin.as_mut().unwrap(), "{what}").unwrap();
        let answer = self.lines.by_ref().find_map(|line| line.unwrap().strip_prefix("ANSWER ").map(|number| number.parse().unwrap()));
        answer.expect("an answer of the other process")
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Whether a byte is wrong between two processes, in blocks that several threads flush in parts, when a rule is dropped in this one.
fn is_noticed_by_a_process(rule: Option<&'static str>) -> bool {
    let file = scenes::file();
    let (fake, mut other, host) = (Fake::new(Kind::Engine), Other::start(file.path()), scenes::host(file.path(), PLATFORM));
    let gpu = device::Gpu::open(fake.path(), 0);
    let config = CudaConfig { part_bytes: 1 << 20, threads: 4, timeout_ms: 60_000, ..fake.config() };
    let engine = Without { engine: CudaEngine::open(&config, 0, host.clone()).unwrap(), rule };
    let block = scenes::Block { offset: 64, pieces: vec![(0, 3_000_000)] };
    let range = 64..64 + block.len_bytes();
    // The bytes that the pool and this host's caches hold before.
    other.ask("write 1");
    let mut model = scenes::pattern(1, scenes::POOL_BYTES as usize);
    assert!(scenes::content(&*host) == model);
    let memory = gpu.memory(&scenes::pattern(2, block.len_bytes()));
    engine.publish(&*host, &block.write_list(&memory, scenes::on(0)), Checksum::Off).unwrap();
    model[range.clone()].copy_from_slice(&memory.read());
    let is_written = other.ask("read") == checksum_of(&model);
    // This host's caches have lines that are old once the other one has written.
    assert!(is_written || rule.is_some());
    scenes::content(&*host);
    other.ask("write 3");
    engine.pull(&*host, &mut block.read_list(&memory, scenes::on(0)), Checksum::Off).unwrap();
    !is_written || memory.read() != scenes::pattern(3, scenes::POOL_BYTES as usize)[range]
}

#[test]
fn another_process_notices_the_loss_of_a_step_of_the_threads() {
    assert!(!is_noticed_by_a_process(None));
    for rule in ["copy.dma_thread_unfenced", "copy.dma_part_read_first", "copy.dma_end_unflushed"] {
        assert!(is_noticed_by_a_process(Some(rule)), "{rule}: nothing noticed its loss");
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
    for rule in ["copy.dma_no_flush", "copy.publish_no_fence", "copy.dma_unawaited", "copy.dma_folded_first"] {
        assert!(!summed(Some(rule), false), "{rule}: nothing noticed its loss");
    }
    // Sums that kernels take are right whatever lies in caches: the bytes that another host finds are not.
    assert!(summed_on(UNCACHED_PLATFORM, Dma::Uncached, None, false) && !summed_on(PLATFORM, Dma::Uncached, None, false));
    assert!(!summed(Some("copy.dma_unmarked"), true), "a kernel that did nothing was believed");
}
