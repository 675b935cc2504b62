// SPDX-License-Identifier: Apache-2.0
//! The pool is registered before a copy needs it: all of it or the part that is named, by several threads, and what becomes of refusals.

use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::scenes::*;
use cxl_pool::Error;
use cxl_pool::copy::{ByPlace, Checksum, CopyConfig, CopyEngine, CpuEngine, CudaConfig, CudaEngine};
use std::sync::Arc;

const GRANULES: i64 = POOL_BYTES as i64 / (64 << 10);

fn at_start(fake: &Fake) -> CudaConfig {
    CudaConfig { register_bytes: u64::MAX, register_threads: 4, ..fake.config() }
}

#[test]
fn the_pool_is_registered_by_several_threads_before_the_first_copy() {
    let fake = Fake::new(Kind::Engine);
    fake.set("register_us", 3_000);
    let gpu = Gpu::open(fake.path(), 0);
    let hosts = hosts("emulated:seed=9,noise=0");
    let engine = CudaEngine::open(&at_start(&fake), 0, hosts[0].clone()).unwrap();
    assert_eq!((fake.get("registered"), engine.counters()[0].registered_bytes), (0, 0));
    engine.register_ahead();
    assert_eq!((fake.get("registered"), fake.get("registrations")), (GRANULES, GRANULES));
    assert_eq!((engine.reach().registered_bytes, engine.counters()[0].registered_bytes), (POOL_BYTES, POOL_BYTES));
    assert!((2..=4).contains(&fake.get("most_registering")), "{} at a time", fake.get("most_registering"));
    // Again, and copies, register nothing more.
    engine.register_ahead();
    assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 5)));
    assert_eq!((fake.get("registrations"), fake.get("pinned")), (GRANULES, 0));
    drop((engine, gpu));
    fake.assert_left_clean();
}

/// Copies, and another engine over the same pool, need granules at which the threads are.
#[test]
fn copies_and_other_engines_go_on_meanwhile() {
    let fake = Fake::new(Kind::Engine);
    fake.set("devices", 2);
    fake.set("register_us", 2_000);
    let gpus = [Gpu::open(fake.path(), 0), Gpu::open(fake.path(), 1)];
    let hosts = hosts("emulated:seed=9,noise=0");
    let engines = [0, 1].map(|device| CudaEngine::open(&at_start(&fake), device, hosts[0].clone()).unwrap());
    std::thread::scope(|scope| {
        for engine in &engines {
            scope.spawn(|| engine.register_ahead());
        }
        assert!(all_well(&there_and_back(&gpus[0], 0, &engines[0], &hosts, Checksum::Off, 5)));
    });
    // Once in the process, for both.
    assert_eq!((fake.get("registered"), fake.get("registrations")), (GRANULES, GRANULES));
    let [first, second] = engines;
    assert_eq!(first.reach().registered_bytes, POOL_BYTES);
    drop(first);
    assert_eq!((fake.get("registered"), second.reach().registered_bytes), (GRANULES, POOL_BYTES));
    drop(second);
    drop(gpus);
    fake.assert_left_clean();
}

#[test]
fn a_part_is_registered_and_the_rest_when_it_is_needed() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let hosts = hosts("native");
    let engine = CudaEngine::open(&CudaConfig { register_bytes: 100_000, ..at_start(&fake) }, 0, hosts[0].clone()).unwrap();
    engine.register_ahead();
    assert_eq!(engine.reach().registered_bytes, 2 * (64 << 10));
    let memory = gpu.memory(&pattern(1, 1000));
    let block = Block { offset: 3 << 20, pieces: vec![(0, 1000)] };
    engine.publish(&*hosts[0], &block.write_list(&memory, on(0)), Checksum::Off).unwrap();
    assert_eq!((engine.reach().registered_bytes, fake.get("pinned")), (3 * (64 << 10), 0));
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

/// The driver refuses in the middle: of what it took copies are made directly, the others go through buffers.
#[test]
fn a_refusal_in_the_middle_says_what_to_change() {
    // Out of memory is not tried as memory of a device.
    for (error, tries, advice) in [(2, 1, "memlock"), (801, 2, "of CUDA 13.0"), (712, 1, "other code"), (999, 2, "dmesg")] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let hosts = hosts("emulated:seed=9,noise=0");
        let config = CudaConfig { register_threads: 1, ..at_start(&fake) };
        let engine = CudaEngine::open(&config, 0, hosts[0].clone()).unwrap();
        fake.fail("cuMemHostRegister_v2", 20, tries, error);
        engine.register_ahead();
        let reach = engine.reach();
        assert_eq!((reach.registered_bytes, fake.get("registered")), (20 * (64 << 10), 20), "{error}");
        let refusal = reach.refusal.unwrap();
        assert!(refusal.contains("offset 0x140000") && refusal.contains(advice), "{error}: {refusal}");
        assert!(all_well(&there_and_back(&gpu, 0, &engine, &hosts, Checksum::Off, 5)));
        drop((engine, gpu));
        fake.assert_left_clean();
    }
}

/// A driver that takes pages alone, one that takes I/O memory alone, and one without a context.
#[test]
fn what_drivers_lack_is_found_at_the_start() {
    let fake = Fake::new(Kind::Engine);
    fake.set("io_only", 1);
    let hosts = hosts("native");
    let engine = ByPlace::new(Arc::new(CpuEngine::new(CopyConfig::alone())), hosts[0].clone(), at_start(&fake));
    let reach = engine.open_gpu(0).unwrap();
    assert_eq!((reach.registered_bytes, reach.refusal, fake.get("io_registered")), (POOL_BYTES, None, GRANULES));
    assert_eq!(engine.counters().last().unwrap().registered_bytes, POOL_BYTES);
    drop(engine);
    let engine = CudaEngine::open(&at_start(&fake), 0, hosts[0].clone()).unwrap();
    fake.fail("cuCtxPushCurrent_v2", 0, 1_000, 2);
    engine.register_ahead();
    fake.forgive();
    assert_eq!(engine.reach().registered_bytes, 0);
    drop(engine);
    let cpu = CpuEngine::new(CopyConfig::alone());
    assert!(matches!(cpu.open_gpu(0), Err(Error::NotFound(_))));
    fake.assert_left_clean();
}
