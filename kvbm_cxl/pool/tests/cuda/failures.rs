// SPDX-License-Identifier: Apache-2.0
//! Drivers and GPUs that do not do what they should: every answer is an error that says what failed, nothing is used again too early, and
//! what was taken is given back.

use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::scenes::*;
use cxl_pool::Error;
use cxl_pool::coherence::{CoherenceOptions, over_mapping};
use cxl_pool::copy::{After, ByPlace, Checksum, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine, LocalPlace, OnGpu, ReadList};
use cxl_pool::device::{Access, Device, Sysfs, map_part};
use std::sync::Arc;
use std::time::{Duration, Instant};

const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

fn block() -> Block {
    Block { offset: 4100, pieces: vec![(0, 20_000), (20_500, 9_000)] }
}

#[test]
fn a_driver_that_is_not_there_or_too_old_is_not_found() {
    let [host, _] = hosts("native");
    let open =
        |library: &str, device| match CudaEngine::open(&CudaConfig { library: library.into(), ..Default::default() }, device, host.clone())
        {
            Err(Error::NotFound(what)) => what,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{library} is a driver"),
        };
    let what = open("libno-such-driver.so.1", 0);
    assert!(what.contains("CUDA driver") && what.contains("libno-such-driver.so.1"), "{what}");
    for off in ["none", ""] {
        assert!(open(off, 0).contains("CXL_CUDA_LIBRARY"));
    }
    let broken = Fake::new(Kind::Broken);
    let what = open(broken.path(), 0);
    assert!(what.contains("cuEventQuery") && what.contains("CUDA 11"), "{what}");
    let fake = Fake::new(Kind::Engine);
    assert!(open(fake.path(), 1).contains("GPU 1"));
    fake.assert_left_clean();
    let fake = Fake::new(Kind::Engine);
    fake.set("devices", 0);
    assert!(open(fake.path(), 0).contains("a GPU of the CUDA driver"));
    let fake = Fake::new(Kind::Engine);
    fake.fail("cuInit", 0, 1, 999);
    assert!(open(fake.path(), 0).contains("999"));
    // The next one may find it started.
    assert!(CudaEngine::open(&fake.config(), 0, host.clone()).is_ok());
}

#[test]
fn numbers_that_cannot_be_meant_are_refused() {
    let fake = Fake::new(Kind::Engine);
    let [host, _] = hosts("native");
    let good = fake.config();
    let bad = [
        CudaConfig { granule_bytes: 5000, ..good.clone() },
        CudaConfig { granule_bytes: 2048, ..good.clone() },
        CudaConfig { buffer_bytes: 4100, ..good.clone() },
        CudaConfig { buffer_bytes: 64, ..good.clone() },
    ];
    for config in bad {
        assert!(matches!(CudaEngine::open(&config, 0, host.clone()), Err(Error::Invalid(_))), "{config:?}");
    }
    assert!(CudaConfig::default().check().is_ok());
}

#[test]
fn a_pool_that_cannot_be_registered_is_reached_through_buffers() {
    for (text, error) in [("CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY), ("CUDA_ERROR_INVALID_VALUE", 1), ("error 801", 801)] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let hosts = hosts("emulated:seed=9,noise=0");
        let engine = CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap();
        // All that comes: also the second try as memory of a device.
        fake.fail("cuMemHostRegister_v2", 1, 1000, error);
        assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 5)));
        let refusal = engine.reach().refusal.unwrap();
        assert!(refusal.contains("registering 65536 bytes of the pool at offset 0x10000") && refusal.contains(text), "{refusal}");
        assert_eq!((fake.get("registered"), engine.reach().registered_bytes), (1, 64 << 10));
        // What is registered is used, and what was refused is not tried again.
        fake.forgive();
        let copies = fake.get("copies");
        let memory = gpu.memory(&pattern(1, 30_000));
        engine.publish(&*hosts[0], &block().write_list(&memory, on(0)), Checksum::Off).unwrap();
        assert_eq!((fake.get("copies"), fake.get("registered")), (copies + 2, 1));
        drop((engine, memory));
        drop(gpu);
        fake.assert_left_clean();
    }
}

#[test]
fn memory_of_devices_is_registered_as_such() {
    let fake = Fake::new(Kind::Engine);
    fake.set("io_only", 1);
    let gpu = Gpu::open(fake.path(), 0);
    let hosts = hosts("native");
    let engine = CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap();
    assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 5)));
    assert!(fake.get("io_registered") > 0 && fake.get("pinned") == 0 && engine.reach().refusal.is_none());
    drop((engine, gpu));
    fake.assert_left_clean();
}

#[test]
fn memory_that_other_code_registered_is_not_relied_upon() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let hosts = hosts("native");
    let engine = CudaEngine::open(&fake.config(), 0, hosts[0].clone()).unwrap();
    fake.fail("cuMemHostRegister_v2", 0, 1000, 712);
    assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 5)));
    assert_eq!((fake.get("registered"), fake.get("io_registered")), (0, 0));
    assert!(engine.reach().refusal.unwrap().contains("712"));
    drop((engine, gpu));
    fake.assert_left_clean();
}

#[test]
fn whatever_call_fails_is_an_error_and_the_next_one_is_well() {
    let calls = [
        "cuCtxPushCurrent_v2", "cuStreamCreate", "cuEventCreate", "cuMemHostAlloc", "cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent",
        "cuEventQuery", "cuStreamQuery",
    ];
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        for call in calls {
            for after in 0..4 {
                let fake = Fake::new(Kind::Engine);
                let gpu = Gpu::open(fake.path(), 0);
                let [host, other] = hosts("native");
                let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
                let bytes = pattern(1, 30_000);
                let (memory, stream) = (gpu.memory(&bytes), gpu.stream());
                let place = LocalPlace::Gpu(OnGpu { device: 0, after: After::Stream(stream.handle) });
                let what = format!("{call} after {after}, {checksum:?}");
                for round in 0..3u64 {
                    // What takes calls of its own, before a failure is asked for.
                    let target = gpu.memory(&pattern(50 + round, 30_000));
                    fake.forgive();
                    fake.fail(call, after, 1, 999);
                    let written = engine.publish(&*host, &block().write_list(&memory, place), checksum);
                    let read = engine.pull(&*host, &mut block().read_list(&target, place), checksum);
                    fake.forgive();
                    for outcome in [&written, &read] {
                        if let Err(error) = outcome {
                            assert!(matches!(error, Error::Gpu { device: 0, what } if what.contains("999")), "{what}: {error}");
                        }
                    }
                    if let (Ok(written), Ok(read)) = (written, read) {
                        assert!(written == read && block().of(&target.read()) == block().of(&bytes), "{what}");
                    }
                }
                let target = gpu.memory(&pattern(60, 30_000));
                engine.publish(&*host, &block().write_list(&memory, place), checksum).unwrap();
                engine.pull(&*host, &mut block().read_list(&target, place), checksum).unwrap();
                assert!(block().of(&target.read()) == block().of(&bytes), "{what}");
                let mut found = vec![0; 29_000];
                CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(4100, [&mut found[..]]), Checksum::Off).unwrap();
                assert!(found == block().of(&bytes), "{what}");
                assert!(engine.is_settled(0), "{what}");
                drop((engine, memory, target, stream));
                drop(gpu);
                fake.assert_left_clean();
            }
        }
    }
}

#[test]
fn a_refused_list_stops_no_other() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let [host, other] = hosts("native");
        let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
        let bytes = pattern(1, 30_000);
        let memory = gpu.memory(&bytes);
        let at = |number: u64| Block {
            offset: number * 10_000,
            pieces: vec![(number as usize * 10_000, 4_000), (number as usize * 10_000 + 4_001, 4_000)],
        };
        let gone = gpu.memory(&pattern(2, 30_000));
        let mut lists: Vec<_> = [at(0), at(2)].iter().map(|block| block.write_list(&memory, on(0))).collect();
        lists.insert(1, at(1).write_list(&gone, on(0)));
        let mut beyond = at(0).write_list(&memory, on(0));
        // SAFETY: refused, so that nothing is touched.
        unsafe { beyond.push_raw(POOL_BYTES - 1, memory.range(0, 2)) };
        lists.push(beyond);
        drop(gone);
        let written = engine.publish_each(&*host, &lists, checksum);
        let [Ok(_), Err(Error::Gpu { what, .. }), Ok(_), Err(Error::OutOfRange { .. })] = &written[..] else { panic!("{written:?}") };
        assert!(what.contains("CUDA_ERROR_INVALID_VALUE"), "{what}");
        for block in [at(0), at(2)] {
            let mut found = vec![0; 8_000];
            CpuEngine::new(CopyConfig::alone())
                .pull(&*other, &mut ReadList::scatter(block.offset, [&mut found[..]]), Checksum::Off)
                .unwrap();
            assert!(found == block.of(&bytes));
        }
        assert_eq!((engine.counters()[0].published_bytes, engine.counters()[0].failed_lists), (16_000, 2));
        drop((engine, memory));
        drop(gpu);
        fake.assert_left_clean();
    }
}

#[test]
fn damaged_memory_is_said_to_be_so() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(8 << 20).unwrap();
    let device = Device::open(file.path(), Access::Write, &Sysfs::default()).unwrap();
    let options: CoherenceOptions = "native".parse().unwrap();
    let mapped = over_mapping(map_part(&device, 0, 8 << 20).unwrap(), &options).unwrap();
    let host = mapped.memory;
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
    let bytes = pattern(1, 30_000);
    let memory = gpu.memory(&bytes);
    mapped.faults.mark_poisoned(2 << 20).unwrap();
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        let bad = Block { offset: 2 << 20, pieces: vec![(0, 1000)] };
        let lists = [block().write_list(&memory, on(0)), bad.write_list(&memory, on(0))];
        let written = engine.publish_each(&*host, &lists, checksum);
        assert!(matches!(&written[..], [Ok(_), Err(Error::Poisoned { .. })]), "{written:?}");
        let target = gpu.memory(&pattern(2, 30_000));
        let mut lists = [block().read_list(&target, on(0)), bad.read_list(&target, on(0))];
        let read = engine.pull_each(&*host, &mut lists, checksum);
        assert!(matches!(&read[..], [Ok(_), Err(Error::Poisoned { .. })]), "{read:?}");
        assert!(block().of(&target.read()) == block().of(&bytes));
    }
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn a_context_that_is_damaged_is_an_error_of_every_list() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let [host, _] = hosts("native");
        let engine = CudaEngine::open(&fake.config(), 0, host.clone()).unwrap();
        let memory = gpu.memory(&pattern(1, 30_000));
        fake.set("copy_error", LAUNCH_FAILED);
        let lists = [block().write_list(&memory, on(0)), Block { offset: 100_000, pieces: vec![(0, 50)] }.write_list(&memory, on(0))];
        for outcome in engine.publish_each(&*host, &lists, checksum) {
            assert!(matches!(&outcome, Err(Error::Gpu { what, .. }) if what.contains("CUDA_ERROR_LAUNCH_FAILED")), "{outcome:?}");
        }
        let read = engine.pull(&*host, &mut block().read_list(&memory, on(0)), checksum);
        assert!(matches!(read, Err(Error::Gpu { .. })), "{read:?}");
        assert!(engine.is_settled(0), "it does nothing any more");
        drop((engine, memory));
        drop(gpu);
        fake.assert_left_clean();
    }
}

/// A call that does not end in time, of an engine that is patient for 60 ms.
fn late(fake: &Fake, host: &Arc<dyn cxl_pool::coherence::Coherence>) -> CudaEngine {
    CudaEngine::open(&CudaConfig { timeout_ms: 60, ..fake.config() }, 0, host.clone()).unwrap()
}

#[test]
fn what_is_late_is_not_used_again_before_it_has_ended() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, other] = hosts("emulated:seed=3,noise=0");
    let engine = late(&fake, &host);
    let bytes = pattern(1, 30_000);
    let memory = gpu.memory(&bytes);
    fake.set("is_stuck", 1);
    let start = Instant::now();
    let written = engine.publish(&*host, &block().write_list(&memory, on(0)), Checksum::Off);
    assert!(matches!(written, Err(Error::Timeout { timeout_ms: 60, .. })), "{written:?}");
    assert!((Duration::from_millis(60)..crate::load::secs(5)).contains(&start.elapsed()));
    assert!(!engine.is_settled(20));
    // Others go on meanwhile, with streams of their own: so many that are late are enough.
    for number in 0..3 {
        let target = gpu.memory(&pattern(number, 30_000));
        let read = engine.pull(&*host, &mut block().read_list(&target, on(0)), Checksum::Xxh3);
        assert!(matches!(read, Err(Error::Timeout { .. })), "{read:?}");
        // Its memory has to stay, as it says.
        std::mem::forget(target);
    }
    let refused = engine.publish(&*host, &block().write_list(&memory, on(0)), Checksum::Xxh3);
    assert!(matches!(&refused, Err(Error::Gpu { what, .. }) if what.contains("still under way")), "{refused:?}");
    let streams = fake.get("streams");
    // It ends after all: what it wrote into this host's caches arrives, and everything is as well as ever.
    fake.set("is_stuck", 0);
    assert!(engine.is_settled(5_000));
    let mut found = vec![0; 29_000];
    CpuEngine::new(CopyConfig::alone()).pull(&*other, &mut ReadList::scatter(4100, [&mut found[..]]), Checksum::Off).unwrap();
    assert!(found == block().of(&bytes), "what was late was left in a cache");
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        engine.publish(&*host, &block().write_list(&memory, on(0)), checksum).unwrap();
    }
    assert_eq!(fake.get("streams"), streams, "they are used again");
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn what_has_not_ended_when_its_engine_goes_is_never_given_back() {
    for checksum in [Checksum::Off, Checksum::Xxh3] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let [host, _] = hosts("native");
        let engine = late(&fake, &host);
        let memory = gpu.memory(&pattern(1, 30_000));
        fake.set("is_stuck", 1);
        let read = engine.pull(&*host, &mut block().read_list(&memory, on(0)), checksum);
        assert!(matches!(read, Err(Error::Timeout { .. })), "{read:?}");
        drop(engine);
        let [streams, events, registered, pinned, contexts, _] = fake.taken();
        assert!(streams > 0 && events > 0 && contexts > 1, "{:?}", fake.taken());
        match checksum {
            Checksum::Off => assert!(registered > 0 && Arc::strong_count(&host) > 1, "the pool may be unmapped under a copy"),
            Checksum::Xxh3 => assert_eq!(pinned, 2),
        }
        // The GPU comes to the copies at last, and finds everything where it was.
        fake.finish();
        assert_eq!(fake.misuse(), "");
    }
}

#[test]
fn a_list_that_was_refused_in_part_is_late_with_the_others() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = late(&fake, &host);
    let memory = gpu.memory(&pattern(1, 30_000));
    fake.set("is_stuck", 1);
    // The second piece of the only list is refused, the first under way: the cell must not be used for anything else.
    fake.fail("cuMemcpyAsync", 1, 1, 999);
    let written = engine.publish(&*host, &block().write_list(&memory, on(0)), Checksum::Off);
    assert!(matches!(written, Err(Error::Timeout { .. })), "{written:?}");
    fake.set("is_stuck", 0);
    assert!(engine.is_settled(5_000));
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn a_late_copy_into_buffers_does_no_harm_to_the_pool() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = late(&fake, &host);
    let memory = gpu.memory(&pattern(1, 30_000));
    fake.set("is_stuck", 1);
    // The cell may be used for something else at once: no time-out, of which a cell cannot be given back.
    let written = engine.publish(&*host, &block().write_list(&memory, on(0)), Checksum::Xxh3);
    assert!(matches!(&written, Err(Error::Gpu { what, .. }) if what.contains("60 ms")), "{written:?}");
    fake.set("is_stuck", 0);
    assert!(engine.is_settled(5_000));
    let mut found = vec![1; 29_000];
    CpuEngine::new(CopyConfig::alone()).pull(&*host, &mut ReadList::scatter(4100, [&mut found[..]]), Checksum::Off).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "something was written behind the error");
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn work_of_the_callers_that_does_not_end_is_a_time_out() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = late(&fake, &host);
    let (memory, stream) = (gpu.memory(&pattern(1, 30_000)), gpu.stream());
    fake.hold(stream.handle, true);
    fake.kernel(stream.handle, memory.address, &pattern(2, 100));
    let place = LocalPlace::Gpu(OnGpu { device: 0, after: After::Stream(stream.handle) });
    let written = engine.publish(&*host, &block().write_list(&memory, place), Checksum::Off);
    assert!(matches!(written, Err(Error::Timeout { .. })), "{written:?}");
    // Those that come after nothing are not held up.
    engine.publish(&*host, &Block { offset: 100_000, pieces: vec![(0, 100)] }.write_list(&memory, on(0)), Checksum::Off).unwrap();
    fake.hold(stream.handle, false);
    assert!(engine.is_settled(5_000));
    drop((engine, memory, stream));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn a_gpu_is_opened_again_after_it_was_not_there() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = ByPlace::new(Arc::new(CpuEngine::new(CopyConfig::alone())), host.clone(), fake.config());
    let memory = gpu.memory(&pattern(1, 30_000));
    fake.fail("cuDevicePrimaryCtxRetain", 0, 1, OUT_OF_MEMORY);
    let lists = [block().write_list(&memory, on(0)), Block { offset: 100_000, pieces: vec![(0, 50)] }.write_list(&memory, on(0))];
    let written = engine.publish_each(&*host, &lists, Checksum::Off);
    assert!(
        written.iter().all(|outcome| matches!(outcome, Err(error) if error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"))),
        "{written:?}"
    );
    assert!(engine.publish_each(&*host, &lists, Checksum::Off).iter().all(Result::is_ok));
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}
