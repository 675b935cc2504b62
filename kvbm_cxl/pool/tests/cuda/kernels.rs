// SPDX-License-Identifier: Apache-2.0
//! Kernels, as they are on GPUs but compiled for the CPU (kernel/simt.h), launched by the fake driver for the engine: lists of all shapes
//! and alignments against copies by the CPU and the pool's checksum, and what becomes of them when the driver or a kernel does not do its
//! part.

use crate::device::{Gpu, Memory};
use crate::fake::{Fake, Kind, kernels};
use crate::scenes::*;
use cxl_pool::Error;
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine, ReadList, WriteList, checksum_of};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// Lists of the test with random ones.
const LISTS: usize = 10_000;
/// So many show the loss of a step of a kernel.
const LISTS_FOR_A_MUTANT: usize = 1_500;
const GPU_BYTES: usize = 256 << 10;

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % end
    }

    /// Mostly short, of any length; some whole units, some longer than a chunk of a kernel.
    fn len_bytes(&mut self) -> usize {
        match self.below(8) {
            0 | 1 => 1 + self.below(20),
            2 | 3 => 1 + self.below(200),
            4 => 16 * (1 + self.below(40)),
            5 => 160,
            6 => 64 * (1 + self.below(40)),
            _ => 1 + self.below(5000),
        }
    }

    /// How far behind the one before it a piece begins: often on a round address, so that whole units are moved.
    fn gap(&mut self, at: usize) -> usize {
        match self.below(3) {
            0 => at.next_multiple_of(16) - at,
            1 => at.next_multiple_of(4) - at,
            _ => self.below(40),
        }
    }
}

fn patient(fake: &Fake) -> CudaConfig {
    CudaConfig { timeout_ms: 60_000, ..fake.config() }
}

/// Blocks beside one another in the pool and on the GPU, for one call. Each has at least `least` bytes.
fn random_blocks(random: &mut Random, most: usize, least: usize) -> Vec<Block> {
    let (mut offset, mut at) = (random.below(100_000), random.below(10_000));
    let count = 1 + random.below(most);
    let mut blocks = Vec::new();
    while blocks.len() < count {
        offset += random.gap(offset);
        let (wanted, mut block) = (1 + random.below(12), Block { offset: offset as u64, pieces: Vec::new() });
        while block.pieces.len() < wanted || block.len_bytes() < least {
            at += random.gap(at);
            let len_bytes = random.len_bytes();
            block.pieces.push((at, len_bytes));
            at += len_bytes;
        }
        if at > GPU_BYTES {
            break;
        }
        offset += block.len_bytes();
        blocks.push(block);
    }
    blocks
}

/// Two hosts, one with an engine.
struct Bench<'g> {
    memory: Memory<'g>,
    back: Memory<'g>,
    hosts: [Arc<dyn Coherence>; 2],
    engine: CudaEngine,
}

impl<'g> Bench<'g> {
    fn new(fake: &Fake, gpu: &'g Gpu, config: &CudaConfig) -> Self {
        let hosts = hosts("native");
        let engine = CudaEngine::open(config, 0, hosts[0].clone()).unwrap();
        assert_eq!(engine.reach().no_kernels, None, "{}", fake.misuse());
        Bench { memory: gpu.memory(&pattern(1, GPU_BYTES)), back: gpu.memory(&[0; GPU_BYTES]), hosts, engine }
    }

    /// Publishes blocks, and pulls them to another part of the GPU: every byte of both memories is looked at, and every checksum.
    fn there_and_back(&self, blocks: &[Block], checksum: Checksum, seed: u64) {
        let bytes = pattern(seed, GPU_BYTES);
        self.memory.write(&bytes);
        let (first, last) = (&blocks[0], &blocks[blocks.len() - 1]);
        let (start, end) = (first.offset.saturating_sub(100), last.offset + last.len_bytes() as u64 + 100);
        let (mut pool, cpu) = (pattern(seed + 1, (end - start) as usize), CpuEngine::new(CopyConfig::alone()));
        cpu.publish(&*self.hosts[1], &WriteList::gather(start, [&pool[..]]), Checksum::Off).unwrap();
        let lists: Vec<_> = blocks.iter().map(|block| block.write_list(&self.memory, on(0))).collect();
        let written = self.engine.publish_each(&*self.hosts[0], &lists, checksum);
        for (block, outcome) in blocks.iter().zip(&written) {
            let bytes = block.of(&bytes);
            let at = (block.offset - start) as usize;
            pool[at..at + bytes.len()].copy_from_slice(&bytes);
            assert_eq!(*outcome.as_ref().unwrap(), (checksum == Checksum::Xxh3).then(|| checksum_of(&bytes)), "{} bytes", bytes.len());
        }
        let mut found = vec![0; pool.len()];
        cpu.pull(&*self.hosts[1], &mut ReadList::scatter(start, [&mut found[..]]), Checksum::Off).unwrap();
        assert!(found == pool, "byte {:?} of the pool", (0..pool.len()).find(|&at| found[at] != pool[at]));

        let mut expected = pattern(seed + 2, GPU_BYTES);
        self.back.write(&expected);
        let mut lists: Vec<_> = blocks.iter().map(|block| block.read_list(&self.back, on(0))).collect();
        let read = self.engine.pull_each(&*self.hosts[0], &mut lists, checksum);
        assert_eq!(read.into_iter().map(Result::unwrap).collect::<Vec<_>>(), written.into_iter().map(Result::unwrap).collect::<Vec<_>>());
        for &(at, len_bytes) in blocks.iter().flat_map(|block| &block.pieces) {
            expected[at..at + len_bytes].copy_from_slice(&bytes[at..at + len_bytes]);
        }
        let found = self.back.read();
        assert!(found == expected, "byte {:?} of the GPU", (0..found.len()).find(|&at| found[at] != expected[at]));
    }
}

/// So many random lists, half of them with checksums, through kernels alone.
fn random_lists(fake: &Fake, count: usize) {
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(fake, &gpu, &patient(fake));
    let mut random = Random(7);
    let (mut lists, mut calls) = (0, fake.get("launches"));
    while lists < count {
        let checksum = if random.below(2) == 0 { Checksum::Off } else { Checksum::Xxh3 };
        let blocks = random_blocks(&mut random, 6, if checksum == Checksum::Off { 1 } else { 241 });
        if blocks.is_empty() {
            continue;
        }
        bench.there_and_back(&blocks, checksum, lists as u64 + 10);
        calls += 2;
        lists += 2 * blocks.len();
    }
    assert_eq!(fake.get("launches"), calls, "one launch for each call");
    drop(bench);
    drop(gpu);
    fake.assert_left_clean();
    assert_eq!(fake.get("allocated"), 0);
}

#[test]
fn ten_thousand_random_lists_arrive_with_their_checksums() {
    random_lists(&Fake::new(Kind::Kernels), LISTS);
}

/// What is dropped of the kernels, and how often it stands there.
const MUTANTS: [(&str, &str, &str); 12] = [
    ("stores are not released to the host", "    __threadfence_system();\n}", "}"),
    ("sums are not released to other warps", "    __threadfence();\n    __syncwarp();", "    __syncwarp();"),
    ("a chunk is counted before all lanes have stored", "    __threadfence();\n    __syncwarp();", "    __threadfence();"),
    ("sums of others may be old", "    __threadfence();\n    u64 checksum", "    u64 checksum"),
    ("loads from L1", "return __ldcv((const ulonglong2*)address);", "return *(const ulonglong2*)address;"),
    ("a piece ends with a whole unit", "left < UNIT_BYTES ? (u32)left : UNIT_BYTES", "UNIT_BYTES"),
    ("the second word of an unaligned load", "skew + len_bytes > UNIT_BYTES", "skew + len_bytes > UNIT_BYTES + 1"),
    ("pieces behind the first of a unit", "rest = moved_rest(tables, far, last);", ""),
    ("a whole last stripe is summed twice", "(u32)(left - 1) / STRIPE_BYTES", "(u32)left / STRIPE_BYTES"),
    ("the tail of the far units", "    keep_tail(tail, list.len_bytes, into + CHUNK_BYTES / 2, both.far);\n", ""),
    ("lists are folded by one of their warps", "+ 1 != list.chunks", "+ 1 > list.chunks"),
    ("chunks mix", "sum = (sum ^ sum >> 47 ^ key) * 0x9e3779b1;", ""),
];

fn mutated(number: usize) -> String {
    let (name, from, to) = MUTANTS[number];
    let text = std::fs::read_to_string(kernels()).unwrap();
    assert!(text.contains(from), "{name}: the kernels have no {from:?}");
    text.replace(from, to)
}

/// What `every_step_of_the_kernels_is_needed` runs, as a process of its own, which a mutant may crash.
#[test]
#[ignore = "a part of another test"]
fn with_a_mutant() {
    let number: usize = std::env::var("KERNEL_MUTANT").unwrap().parse().unwrap();
    let fake = Fake::with_kernels(&mutated(number));
    random_lists(&fake, LISTS_FOR_A_MUTANT);
    println!("survived");
}

#[test]
fn every_step_of_the_kernels_is_needed() {
    let mut survivors = Vec::new();
    for (number, mutant) in MUTANTS.iter().enumerate() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "kernels::with_a_mutant", "--ignored", "--nocapture"]).env("KERNEL_MUTANT", number.to_string());
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(said.contains("running 1 test") && !said.contains("does not compile"), "{}: {said}", mutant.0);
        let how = said.lines().find(|line| line.contains("byte ") || line.contains("left:"));
        println!("{}: {}", mutant.0, how.unwrap_or(if output.status.success() { "SURVIVED" } else { "a crash" }));
        if output.status.success() {
            survivors.push(mutant.0);
        }
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}

#[test]
fn kernels_are_used_only_after_a_trial() {
    let altered = [
        // Bytes of pieces alone are wrong, sums alone, and a kernel that does nothing.
        ("part = shifted_up(part, done);", "part = shifted_up(part, done); part.x ^= 1;", "checksums"),
        ("store(far.destination, both.far, far.len_bytes);", "store(far.destination + 1, both.far, far.len_bytes);", "byte "),
        ("all += list.len_bytes * START[1];", "", "checksums"),
        ("index < tables.chunk_count;", "index < 0;", "byte "),
    ];
    let text = std::fs::read_to_string(kernels()).unwrap();
    for (from, to, what) in altered {
        assert!(text.contains(from), "{from}");
        let fake = Fake::with_kernels(&text.replace(from, to));
        let gpu = Gpu::open(fake.path(), 0);
        let hosts = hosts("native");
        let engine = CudaEngine::open(&patient(&fake), 0, hosts[0].clone()).unwrap();
        let reason = engine.reach().no_kernels.unwrap();
        assert!(reason.contains("trial of the kernels") && reason.contains(what), "{reason}");
        let launches = fake.get("launches");
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, checksum, 5)));
        }
        assert_eq!(fake.get("launches"), launches);
        drop((engine, gpu));
        fake.assert_left_clean();
    }
}

#[test]
fn kernels_that_cannot_be_loaded_are_said_to_be_so_and_copies_go_as_without() {
    let cases = [
        ("loading kernels", "cuModuleLoadData", 0, 222),
        ("cxl_move_sum", "cuModuleGetFunction", 1, 500),
        ("of its memory", "cuMemAlloc_v2", 0, 2),
        ("launching a kernel", "cuLaunchKernel", 1, 701),
    ];
    for (what, call, after, error) in cases {
        let fake = Fake::new(Kind::Kernels);
        let gpu = Gpu::open(fake.path(), 0);
        let hosts = hosts("native");
        fake.fail(call, after, 1, error);
        let engine = CudaEngine::open(&patient(&fake), 0, hosts[0].clone()).unwrap();
        let reason = engine.reach().no_kernels.unwrap();
        assert!(reason.contains(what), "{what}: {reason}");
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, checksum, 5)), "{what}");
        }
        drop((engine, gpu));
        fake.assert_left_clean();
        assert_eq!(fake.get("allocated"), 0, "{what}");
    }
    // As do drivers without the functions.
    let fake = Fake::new(Kind::Engine);
    let [host, _] = hosts("native");
    let engine = CudaEngine::open(&fake.config(), 0, host).unwrap();
    assert!(engine.reach().no_kernels.unwrap().contains("cuLaunchKernel"));
}

#[test]
fn every_list_goes_by_kernel_that_one_can_sum() {
    let fake = Fake::new(Kind::Kernels);
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(&fake, &gpu, &fake.config());
    for (count, len_bytes) in [(8, 1000), (1, 1001), (30, 160), (1, 64), (1, 240), (1, 241)] {
        let pieces = (0..count).map(|index| (index * (len_bytes + 16), len_bytes)).collect();
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            let before = fake.get("launches");
            bench.there_and_back(&[Block { offset: 4096, pieces: Vec::clone(&pieces) }], checksum, 3);
            let is_kernel = checksum == Checksum::Off || count * len_bytes > 240;
            assert_eq!(fake.get("launches") - before, if is_kernel { 2 } else { 0 }, "{count} x {len_bytes}, {checksum:?}");
        }
    }
    drop(bench);
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn what_is_under_way_at_a_time_is_bounded() {
    let fake = Fake::new(Kind::Kernels);
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(&fake, &gpu, &CudaConfig { in_flight_bytes: 16 << 10, ..patient(&fake) });
    let mut random = Random(3);
    for late in [0, 1, 3] {
        fake.set("queries_until_done", late);
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            let blocks = random_blocks(&mut random, 30, 3000);
            let total: usize = blocks.iter().map(Block::len_bytes).sum();
            let before = fake.get("launches");
            bench.there_and_back(&blocks, checksum, 30 + late as u64);
            let steps = fake.get("launches") - before;
            assert!(steps as usize >= 2 * total / (8 << 10), "{steps} steps for {total} bytes");
        }
    }
    fake.set("queries_until_done", 0);
    drop(bench);
    drop(gpu);
    fake.assert_left_clean();
}

/// One block of each shape that the engine's own tests have, behind everything that can fail.
#[test]
fn whatever_call_fails_is_an_error_or_goes_another_way_and_the_next_one_is_well() {
    let calls = ["cuLaunchKernel", "cuMemcpyAsync", "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemHostGetDevicePointer_v2", "cuEventRecord"];
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        for call in calls {
            for (after, error) in [(0, 999), (1, 999), (0, 719)] {
                let fake = Fake::new(Kind::Kernels);
                let gpu = Gpu::open(fake.path(), 0);
                let bench = Bench::new(&fake, &gpu, &patient(&fake));
                let block = Block { offset: 4100, pieces: vec![(0, 2_000), (2_500, 900), (3_500, 77)] };
                let bytes = pattern(8, GPU_BYTES);
                bench.memory.write(&bytes);
                fake.fail(call, after, 1, error);
                let written = bench.engine.publish(&*bench.hosts[0], &block.write_list(&bench.memory, on(0)), checksum);
                let read = bench.engine.pull(&*bench.hosts[0], &mut block.read_list(&bench.back, on(0)), checksum);
                fake.forgive();
                let what = format!("{call} after {after}, {error}, {checksum:?}");
                for outcome in [&written, &read] {
                    match outcome {
                        Err(Error::Gpu { device: 0, what: said }) => assert!(said.contains(&error.to_string()), "{what}: {said}"),
                        Err(other) => panic!("{what}: {other}"),
                        Ok(_) => {}
                    }
                }
                let sum = (checksum == Checksum::Xxh3).then(|| checksum_of(&block.of(&bytes)));
                assert!(written.as_ref().is_err() || *written.as_ref().unwrap() == sum, "{what}: {written:?}");
                if let (Ok(_), Ok(read)) = (written, read) {
                    assert!(read == sum && block.of(&bench.back.read()) == block.of(&bytes), "{what}");
                }
                bench.there_and_back(&[block], checksum, 50);
                drop(bench);
                drop(gpu);
                fake.assert_left_clean();
                assert_eq!(fake.get("allocated"), 0, "{what}");
            }
        }
    }
}

#[test]
fn a_launch_that_is_lost_is_an_error_of_its_lists_and_ends_the_use_of_kernels() {
    let fake = Fake::new(Kind::Kernels);
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(&fake, &gpu, &patient(&fake));
    let blocks = [Block { offset: 64, pieces: vec![(0, 3000)] }, Block { offset: 8192, pieces: vec![(4000, 5000)] }];
    // Results of before are none of it.
    bench.there_and_back(&blocks, Checksum::Xxh3, 1);
    fake.set("is_launch_lost", 1);
    let lists: Vec<_> = blocks.iter().map(|block| block.write_list(&bench.memory, on(0))).collect();
    for outcome in bench.engine.publish_each(&*bench.hosts[0], &lists, Checksum::Xxh3) {
        assert!(matches!(&outcome, Err(Error::Gpu { what, .. }) if what.contains("before a list was moved")), "{outcome:?}");
    }
    assert!(bench.engine.reach().no_kernels.is_some());
    let launches = fake.get("launches");
    bench.there_and_back(&blocks, Checksum::Xxh3, 2);
    assert_eq!(fake.get("launches"), launches);
    drop(bench);
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn a_kernel_that_is_late_keeps_what_it_uses() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        let fake = Fake::new(Kind::Kernels);
        let gpu = Gpu::open(fake.path(), 0);
        let bench = Bench::new(&fake, &gpu, &CudaConfig { timeout_ms: 60, ..patient(&fake) });
        let block = Block { offset: 4100, pieces: vec![(0, 2_000), (2_500, 900)] };
        let bytes = pattern(8, GPU_BYTES);
        bench.memory.write(&bytes);
        fake.set("is_stuck", 1);
        let written = bench.engine.publish(&*bench.hosts[0], &block.write_list(&bench.memory, on(0)), checksum);
        assert!(matches!(written, Err(Error::Timeout { timeout_ms: 60, .. })), "{written:?}");
        assert!(!bench.engine.is_settled(0));
        // Another call meanwhile, with tables of its own.
        fake.set("is_stuck", 0);
        let other = Block { offset: 20_000, pieces: vec![(5_000, 2_000)] };
        bench.engine.publish(&*bench.hosts[0], &other.write_list(&bench.memory, on(0)), checksum).unwrap();
        assert!(bench.engine.is_settled(60_000));
        for block in [&block, &other] {
            let mut found = vec![0; block.len_bytes()];
            let list = &mut ReadList::scatter(block.offset, [&mut found[..]]);
            CpuEngine::new(CopyConfig::alone()).pull(&*bench.hosts[1], list, Checksum::Off).unwrap();
            assert!(found == block.of(&bytes), "{checksum:?}");
        }
        drop(bench);
        drop(gpu);
        fake.assert_left_clean();
    }
}
