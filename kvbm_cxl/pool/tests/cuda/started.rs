// SPDX-License-Identifier: Apache-2.0
//! Copies that were started and go on beside their caller.

use crate::device::{Gpu, Memory};
use crate::fake::{Fake, Kind};
use crate::scenes::*;
use cxl_pool::Error;
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::cuda::{Direction, Ending, GpuCopy, GpuPiece, HostPlace};
use cxl_pool::copy::{Checksum, Copied, CopyConfig, CopyEngine, CpuEngine, CudaEngine, ReadList, WriteList};
use std::sync::Arc;

const BYTES: usize = 200_000;

/// Pieces of the pool from `offset` on and of the GPU's memory, which change places.
fn pieces(memory: &Memory<'_>, offset: u64) -> Vec<GpuPiece> {
    let piece = |index: usize| GpuPiece {
        gpu: memory.address + index as u64 * 5000,
        host: HostPlace::Pool(offset + (39 - index as u64) * 5000),
        len_bytes: 4099,
    };
    (0..40).map(piece).collect()
}

fn start(engine: &Arc<CudaEngine>, direction: Direction, pieces: &[GpuPiece], is_buffered: bool) -> Result<GpuCopy, Error> {
    // SAFETY: the tests keep the memory, and the pool's is theirs alone, until the end.
    unsafe { engine.start(direction, pieces, is_buffered) }
}

fn end(copy: &GpuCopy) -> Ending {
    copy.wait(60_000).expect("an end")
}

/// The pool from `offset` on, as another host sees it.
fn seen(other: &dyn Coherence, offset: u64) -> Vec<u8> {
    let mut found = vec![0; BYTES];
    CpuEngine::new(CopyConfig::alone()).pull(other, &mut ReadList::scatter(offset, [&mut found[..]]), Checksum::Off).unwrap();
    found
}

fn arrived(memory: &[u8], pool: &[u8]) -> bool {
    (0..40).all(|index| {
        let (gpu, host) = (index * 5000, (39 - index) * 5000);
        memory[gpu..gpu + 4099] == pool[host..host + 4099]
    })
}

#[test]
fn both_ways_and_both_directions_with_two_hosts() {
    for text in ["native", "emulated:seed=7,noise=4"] {
        for is_buffered in [false, true] {
            let fake = Fake::new(Kind::Engine);
            let gpu = Gpu::open(fake.path(), 0);
            let [host, other] = hosts(text);
            let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
            fake.set("queries_until_done", 2);
            for (round, offset) in [4096, 70_001].into_iter().enumerate() {
                let bytes = pattern(round as u64 + 1, BYTES);
                let memory = gpu.memory(&bytes);
                let copy = start(&engine, Direction::ToHost, &pieces(&memory, offset), is_buffered).unwrap();
                assert!(copy.poll().is_none() && !arrived(&bytes, &seen(&*other, offset)));
                end(&copy).unwrap();
                assert!(arrived(&bytes, &seen(&*other, offset)), "{text} {is_buffered}");
                let bytes = pattern(round as u64 + 11, BYTES);
                CpuEngine::new(CopyConfig::alone()).publish(&*other, &WriteList::gather(offset, [&bytes[..]]), Checksum::Off).unwrap();
                let copy = start(&engine, Direction::FromHost, &pieces(&memory, offset), is_buffered).unwrap();
                end(&copy).unwrap();
                assert!(arrived(&memory.read(), &bytes), "{text} {is_buffered}");
            }
            let moved = 2 * 40 * 4099;
            let registered_bytes = engine.reach().registered_bytes;
            let moved = Copied { engine: "cuda", published_bytes: moved, pulled_bytes: moved, registered_bytes, ..Copied::default() };
            assert_eq!(engine.counters(), [moved]);
            assert_eq!(fake.get("pinned") > 0, is_buffered);
            drop((engine, gpu));
            fake.assert_left_clean();
        }
    }
}

#[test]
fn what_is_dropped_under_way_keeps_its_stream_until_the_engine_is_settled() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, other] = hosts("emulated:seed=3,noise=0");
    let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
    let bytes = pattern(1, BYTES);
    let memory = gpu.memory(&bytes);
    fake.set("is_stuck", 1);
    let copy = start(&engine, Direction::ToHost, &pieces(&memory, 4096), false).unwrap();
    drop(copy);
    assert!(!engine.is_settled(20));
    fake.set("is_stuck", 0);
    assert!(engine.is_settled(60_000));
    assert!(arrived(&bytes, &seen(&*other, 4096)), "what was late was left in a cache");
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn cancelled_copies_begin_nothing_more() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, other] = hosts("native");
    let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
    let bytes = pattern(1, BYTES);
    let memory = gpu.memory(&bytes);
    fake.set("is_stuck", 1);
    let copy = start(&engine, Direction::ToHost, &pieces(&memory, 4096), true).unwrap();
    let given = fake.get("copies");
    copy.cancel();
    assert!(copy.wait(20).is_none(), "a GPU cannot be stopped");
    fake.set("is_stuck", 0);
    assert!(matches!(&*end(&copy).unwrap_err(), Error::Cancelled(_)));
    assert_eq!(fake.get("copies"), given);
    assert!(seen(&*other, 4096).iter().all(|&byte| byte == 0), "a buffer was emptied after the end");
    drop((engine, memory, copy));
    drop(gpu);
    fake.assert_left_clean();
}

#[test]
fn pieces_that_cannot_be_meant_are_refused() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let [host, _] = hosts("native");
    let engine = Arc::new(CudaEngine::open(&fake.config(), 0, host.clone()).unwrap());
    let memory = gpu.memory(&pattern(1, 1000));
    let piece = |gpu, host, len_bytes| GpuPiece { gpu, host, len_bytes };
    let refused = |piece| start(&engine, Direction::ToHost, &[piece], false).err().expect("an error");
    assert!(matches!(refused(piece(u64::MAX, HostPlace::Pool(64), 2)), Error::Invalid(_)));
    assert!(matches!(refused(piece(memory.address, HostPlace::Process(0), 1)), Error::Invalid(_)));
    assert!(matches!(refused(piece(memory.address, HostPlace::Pool(POOL_BYTES - 1), 2)), Error::OutOfRange { .. }));
    assert!(matches!(refused(piece(memory.address, HostPlace::Pool(u64::MAX), 2)), Error::OutOfRange { .. }));
    assert!(matches!(refused(piece(memory.address, HostPlace::Process(usize::MAX), 2)), Error::OutOfRange { .. }));
    assert!(engine.check_memory(memory.address, 1000).is_ok());
    for (address, len_bytes) in [(memory.address, 1001), (memory.address, 0), (memory.address - 1, 1), (u64::MAX, 2)] {
        assert!(matches!(engine.check_memory(address, len_bytes), Err(Error::Invalid(_))), "{address:#x} {len_bytes}");
    }
    assert!(end(&start(&engine, Direction::ToHost, &[piece(1, HostPlace::Process(0), 0)], false).unwrap()).is_ok());
    assert_eq!(fake.get("copies"), 0);
    drop((engine, memory));
    drop(gpu);
    fake.assert_left_clean();
}
