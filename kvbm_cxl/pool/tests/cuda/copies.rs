// SPDX-License-Identifier: Apache-2.0
//! What is copied, which way, in how many calls of the driver, and what comes before it.

use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::order::Watched;
use crate::scenes::*;
use cxl_pool::Error;
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{
    After, ByPlace, Checksum, Copied, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine, DsaEngine, LocalPlace, OnGpu, ReadList,
    WriteList,
};
use std::sync::Arc;
use std::time::Duration;

const TEXTS: [&str; 2] = ["native", "emulated:seed=5,noise=16"];

fn total() -> u64 {
    blocks().0.iter().map(|block| block.len_bytes() as u64).sum()
}

#[test]
fn every_byte_arrives_on_both_ways() {
    for text in TEXTS {
        for checksum in [Checksum::Off, Checksum::Xxh3] {
            let fake = Fake::new(Kind::Engine);
            let gpu = Gpu::open(fake.path(), 0);
            let hosts = hosts(text);
            let engine = CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap();
            assert_eq!((engine.name(), engine.device()), ("cuda", 0));
            for (round, late) in [0, 1, 3].into_iter().enumerate() {
                fake.set("queries_until_done", late);
                let outcomes = there_and_back(&gpu, 0, &engine, &hosts, checksum, 10 * round as u64 + 1);
                assert!(all_well(&outcomes), "{text} {checksum:?}: {outcomes:?}");
            }
            let moved = Copied { engine: "cuda", published_bytes: 3 * total(), pulled_bytes: 3 * total(), ..Copied::default() };
            assert_eq!(engine.counters(), [Copied { registered_bytes: engine.reach().registered_bytes, ..moved }]);
            // Without checksums the GPU reaches the pool itself, and nothing goes through buffers.
            let (reach, is_direct) = (engine.reach(), checksum == Checksum::Off);
            assert_eq!((reach.registered_bytes > 0, fake.get("pinned")), (is_direct, if is_direct { 0 } else { 2 }));
            assert_eq!(reach.refusal, None);
            drop(engine);
            drop(gpu);
            fake.assert_left_clean();
        }
    }
}

#[test]
fn pieces_that_follow_one_another_are_one_copy() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = CudaEngine::open(&CudaConfig { granule_bytes: 4 << 20, ..fake.config() }, 0, host.clone()).unwrap();
    let bytes = pattern(1, 64_000);
    let memory = gpu.memory(&bytes);
    // Eight blocks; each has ten pieces that are one, then ten that are not.
    let block = |number: usize| Block {
        offset: number as u64 * 8192,
        pieces: (0..10)
            .map(|index| (number * 100 + index * 10, 10))
            .chain((0..10).map(|index| (10_000 + number * 400 + index * 20, 10)))
            .collect(),
    };
    let blocks: Vec<Block> = (0..8).map(block).collect();
    let lists: Vec<WriteList<'_>> = blocks.iter().map(|block| block.write_list(&memory, on(0))).collect();
    assert!(engine.publish_each(&*host, &lists, Checksum::Off).iter().all(Result::is_ok));
    assert_eq!(fake.get("copies"), 8 * 11);
    // No piece crosses a border between two registrations.
    drop(engine);
    let engine = CudaEngine::open(&CudaConfig { granule_bytes: 4096, ..fake.config() }, 0, host.clone()).unwrap();
    let block = Block { offset: 100, pieces: vec![(0, 3 * 4096)] };
    engine.publish(&*host, &block.write_list(&memory, on(0)), Checksum::Off).unwrap();
    assert_eq!((fake.get("copies"), fake.get("registered"), engine.reach().registered_bytes), (8 * 11 + 4, 4, 4 * 4096));
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

/// What the tests on a real GPU do, so that they are known to be sound where there is none.
#[test]
fn the_tests_for_real_gpus_pass_with_this_one() {
    let fake = Fake::new(Kind::Engine);
    fake.set("queries_until_done", 1);
    crate::real::on_every_gpu(&CudaConfig { library: fake.path().into(), ..CudaConfig::default() }, Gpu::count(fake.path()).unwrap());
    fake.assert_left_clean();
    // Without what is timed, which kernels on a CPU would take minutes for.
    let fake = Fake::new(Kind::Kernels);
    let config = CudaConfig { library: fake.path().into(), ..CudaConfig::default() };
    crate::real::every_byte_on_every_gpu(&config, Gpu::count(fake.path()).unwrap());
    assert!(fake.get("launches") > 32, "{} launches", fake.get("launches"));
    fake.assert_left_clean();
}

#[test]
fn the_pool_is_registered_once_in_a_process() {
    let fake = Fake::new(Kind::Engine);
    fake.set("devices", 2);
    let gpus = [Gpu::open(fake.path(), 0), Gpu::open(fake.path(), 1)];
    let hosts = hosts("native");
    let engines = [0, 1].map(|device| CudaEngine::open(&fake.config(), device, hosts[0].clone()).unwrap());
    for device in [0, 1] {
        assert!(all_well(&there_and_back(&gpus[device], device as u32, &engines[device], &hosts, Checksum::Off, device as u64 * 10)));
    }
    let registered = fake.get("registered");
    assert!(registered > 0 && fake.get("registrations") == registered, "each granule once for both GPUs");
    // The one that registered it goes first; the other still has it, and so the context that it was registered in.
    let [first, second] = engines;
    drop(first);
    drop(gpus);
    assert_eq!(fake.get("registered"), registered);
    let gpu = Gpu::open(fake.path(), 1);
    assert!(all_well(&there_and_back(&gpu, 1, &second, &hosts, Checksum::Off, 77)));
    drop((gpu, second));
    fake.assert_left_clean();
}

#[test]
fn memory_of_another_pool_goes_through_buffers() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let (own, other) = (hosts("native"), hosts("native"));
    let engine = CudaEngine::open(&fake.config(), 0, own[0].clone()).unwrap();
    assert!(all_well(&there_and_back(&gpu, 0, &engine, &other, Checksum::Off, 3)));
    assert_eq!((fake.get("registered"), fake.get("pinned")), (0, 2));
    drop((engine, gpu));
    fake.assert_left_clean();
}

#[test]
fn a_copy_comes_after_the_callers_work() {
    for direct in [Checksum::Off, Checksum::Xxh3] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let [host, other] = hosts("native");
        let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
        let memory = gpu.memory(&pattern(1, 50_000));
        let block = Block { offset: 4096, pieces: vec![(100, 40_000)] };
        let at = |after| LocalPlace::Gpu(OnGpu { device: 0, after });
        let stored = || {
            let mut found = vec![0; 40_000];
            CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(4096, [&mut found[..]]), Checksum::Off).unwrap();
            found
        };

        // A kernel that has not run when the copy is asked for.
        let (stream, bytes) = (gpu.stream(), pattern(2, 50_000));
        fake.hold(stream.handle, true);
        fake.kernel(stream.handle, memory.address, &bytes);
        std::thread::scope(|scope| {
            let publish = scope.spawn(|| engine.publish(&*host, &block.write_list(&memory, at(After::Stream(stream.handle))), direct));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!publish.is_finished(), "nothing was waited for");
            fake.hold(stream.handle, false);
            publish.join().unwrap().unwrap();
        });
        assert!(stored() == bytes[100..40_100], "{direct:?}");

        // What the stream was given behind the event is not waited for.
        let bytes = pattern(3, 50_000);
        fake.kernel(stream.handle, memory.address, &bytes);
        let event = stream.event();
        let endless = gpu.stream();
        fake.hold(endless.handle, true);
        engine.publish(&*host, &block.write_list(&memory, at(After::Event(event.handle))), direct).unwrap();
        assert!(stored() == bytes[100..40_100], "{direct:?}");
        engine.publish(&*host, &block.write_list(&memory, at(After::Nothing)), direct).unwrap();

        // A pull comes after what still reads or writes its destination; handle 0 is the default stream.
        let after = pattern(4, 50_000);
        fake.kernel(0, memory.address, &after);
        let mut list = block.read_list(&memory, at(After::Stream(0)));
        engine.pull(&*host, &mut list, direct).unwrap();
        let mut expected = after;
        expected[100..40_100].copy_from_slice(&bytes[100..40_100]);
        assert!(memory.read() == expected, "{direct:?}");
        drop(event);
        drop((engine, stream, endless, memory));
        drop(gpu);
        fake.assert_left_clean();
    }
}

#[test]
fn threads_copy_side_by_side() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, other] = hosts("native");
    let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
    fake.set("queries_until_done", 2);
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (engine, host, gpu) = (&engine, &host, &gpu);
            scope.spawn(move || {
                for round in 0..20 {
                    let bytes = pattern(100 * thread + round, 30_000);
                    let (memory, back) = (gpu.memory(&bytes), gpu.memory(&[0; 30_000]));
                    let block = Block { offset: thread * 100_000 + round, pieces: vec![(0, 20_000), (21_000, 9_000)] };
                    let checksum = if round % 2 == 0 { Checksum::Off } else { Checksum::Xxh3 };
                    let written = engine.publish(&**host, &block.write_list(&memory, on(0)), checksum).unwrap();
                    let read = engine.pull(&**host, &mut block.read_list(&back, on(0)), checksum).unwrap();
                    assert!(written == read && block.of(&back.read()) == block.of(&bytes));
                }
            });
        }
    });
    let mut found = vec![0; 20_000];
    CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(519, [&mut found[..]]), Checksum::Off).unwrap();
    assert!(fake.get("streams") <= 4, "{} streams are kept", fake.get("streams"));
    drop((engine, gpu));
    fake.assert_left_clean();
}

#[test]
fn a_list_goes_to_no_engine_but_that_of_its_place() {
    let fake = Fake::new(Kind::Engine);
    fake.set("devices", 2);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let cuda = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
    let cpu = CpuEngine::new(CopyConfig::alone());
    let dsa = DsaEngine::over(Box::new(NoQueue), CpuEngine::new(CopyConfig::alone()), 100);
    let bytes = pattern(1, 10_000);
    let memory = gpu.memory(&bytes);
    let block = Block { offset: 64, pieces: vec![(0, 10_000)] };
    let engines: [(&dyn CopyEngine, u32); 3] = [(&cpu, 0), (&dsa, 0), (&cuda, 1)];
    for (engine, device) in engines {
        let written = engine.publish(&*host, &block.write_list(&memory, on(device)), Checksum::Off);
        let read = engine.pull(&*host, &mut block.read_list(&memory, on(device)), Checksum::Off);
        assert!(matches!((&written, &read), (Err(Error::Invalid(_)), Err(Error::Invalid(_)))), "{}: {written:?} {read:?}", engine.name());
    }
    // Memory of the host is none of a GPU's, nor is a slice among addresses.
    let mut mixed = block.write_list(&memory, on(0));
    mixed.push(20_000, &bytes);
    for list in [WriteList::gather(0, [&bytes[..]]), mixed] {
        assert!(matches!(cuda.publish(&*host, &list, Checksum::Off), Err(Error::Invalid(_))));
    }
    assert_eq!(fake.get("copies"), 0);
    assert_eq!(cuda.counters()[0].failed_lists, 4);
}

struct NoQueue;

// SAFETY: takes nothing.
unsafe impl cxl_pool::copy::dsa::WorkQueue for NoQueue {
    fn submit(&mut self, _: &cxl_pool::copy::dsa::Descriptor) -> bool {
        false
    }

    fn limits(&self) -> cxl_pool::copy::dsa::Limits {
        cxl_pool::copy::dsa::Limits { transfer_bytes: 1 << 20, batch_len: 0, in_flight: 1, block_on_fault: false }
    }
}

#[test]
fn lists_of_several_places_find_their_engines() {
    let fake = Fake::new(Kind::Engine);
    fake.set("devices", 2);
    let gpus = [Gpu::open(fake.path(), 0), Gpu::open(fake.path(), 1)];
    let [host, other] = hosts("native");
    let engine = ByPlace::new(Arc::new(CpuEngine::new(CopyConfig::alone())), host.clone(), fake.config());
    assert_eq!((engine.name(), engine.counters().len()), ("cpu", 1));
    let bytes: Vec<Vec<u8>> = (0..6).map(|seed| pattern(seed, 5000)).collect();
    let memories = [&gpus[0], &gpus[1], &gpus[0]].map(|gpu| gpu.memory(&[0; 5000]));
    let devices = [0, 1, 0];
    let block = |number: usize| Block { offset: number as u64 * 8192, pieces: vec![(0, 5000)] };
    let mut lists = Vec::new();
    for number in 0..6 {
        lists.push(match number % 2 {
            0 => {
                memories[number / 2].write(&bytes[number]);
                block(number).write_list(&memories[number / 2], on(devices[number / 2]))
            }
            _ => WriteList::gather(number as u64 * 8192, [&bytes[number][..]]),
        });
    }
    lists.push(block(6).write_list(&memories[0], on(7)));
    lists.push(block(7).write_list(&memories[0], on(7)));
    let written = engine.publish_each(&*host, &lists, Checksum::Off);
    assert!(
        written[..6].iter().all(Result::is_ok) && written[6..].iter().all(|answer| matches!(answer, Err(Error::NotFound(_)))),
        "{written:?}"
    );
    let cpu = CpuEngine::new(CopyConfig::alone());
    for (number, bytes) in bytes.iter().enumerate() {
        let mut found = vec![0; 5000];
        cpu.pull(&*other, &mut ReadList::scatter(number as u64 * 8192, [&mut found[..]]), Checksum::Off).unwrap();
        assert!(found == *bytes, "list {number}");
    }
    // And back, into each other's places.
    let mut room = vec![0; 5000];
    let mut lists =
        vec![block(1).read_list(&memories[0], on(0)), block(2).read_list(&memories[1], on(1)), ReadList::scatter(0, [&mut room[..]])];
    let read = engine.pull_each(&*host, &mut lists, Checksum::Xxh3);
    assert!(read.iter().all(Result::is_ok), "{read:?}");
    assert!(memories[0].read() == bytes[1] && memories[1].read() == bytes[2] && room == bytes[0]);
    let [cpu, cuda] = engine.counters()[..] else { panic!("{:?}", engine.counters()) };
    assert_eq!(cpu, Copied { engine: "cpu", published_bytes: 15_000, pulled_bytes: 5_000, ..Copied::default() });
    let moved = Copied { engine: "cuda", published_bytes: 15_000, pulled_bytes: 10_000, ..Copied::default() };
    assert_eq!(cuda, Copied { registered_bytes: cuda.registered_bytes, ..moved });
    assert!(engine.is_settled(0));
    drop((memories, engine));
    drop(gpus);
    fake.assert_left_clean();
}

#[test]
fn memory_that_is_not_mapped_goes_through_buffers() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    // As that of a simulated host: nothing that a GPU could reach.
    let hosts = hosts("native").map(|memory| Arc::new(Watched { memory, is_mapped: false }) as Arc<dyn Coherence>);
    let engine = CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap();
    assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 3)));
    assert!(engine.reach().refusal.is_some() && fake.get("registered") == 0);
    drop((engine, gpu));
    fake.assert_left_clean();
}
