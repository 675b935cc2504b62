// SPDX-License-Identifier: Apache-2.0
//! Blocks that are published and pulled beside their caller, in the order of its streams: what comes before, what comes behind, and that
//! none of it is seen before its end.

use crate::bench::{SPACE, bytes, key};
use crate::device::Gpu;
use crate::fake::Kind;
use crate::paged::{BLOCK_BYTES, BLOCKS, Scene, WAYS, all, end, on, paged, pieces, publish, pull, try_publish, try_pull, words};
use cxl_pool::Error;
use cxl_pool::cache::PublishRequest;
use cxl_pool::copy::{After, OnGpu};
use std::time::{Duration, Instant};

#[test]
fn copies_come_behind_the_streams_work_and_the_streams_later_work_behind_them() {
    for (kind, checksums) in WAYS {
        let scene = Scene::new(kind, checksums, |_| ());
        let (fake, [prefill, decode]) = (&scene.fake, &scene.caches);
        let gpu = Gpu::open(fake.path(), 0);
        let place = |number: u64| number as usize;
        let (memory, streams) = (gpu.memory(&bytes(1, BLOCKS as usize * BLOCK_BYTES)), [gpu.stream(), gpu.stream()]);

        // The blocks are computed by work that the stream has not begun.
        fake.hold(streams[0].handle, true);
        fake.kernel(streams[0].handle, memory.address, &paged(place, 77));
        let published = publish(prefill, 0..BLOCKS, &memory, on(&streams[0]));
        for _ in 0..5 {
            assert!(published.poll().is_none());
        }
        assert!(decode.lookup(SPACE, key(0)).unwrap().is_none(), "committed before the end of its copy");
        // Later work of the stream, which is told to come behind the copies, writes their memory anew.
        // SAFETY: the stream is there.
        unsafe { published.hold(streams[0].handle) }.unwrap();
        fake.kernel(streams[0].handle, memory.address, &bytes(2, BLOCKS as usize * BLOCK_BYTES));
        fake.hold(streams[0].handle, false);
        assert!(streams[0].is_done());
        assert_eq!(end(&published), all("Done", BLOCKS as usize), "{kind:?}, {checksums}");
        assert!((0..BLOCKS).all(|number| scene.is_there(number)), "{kind:?}, {checksums}");

        // Memory that earlier work of the stream still writes, and later work uses.
        let target = gpu.memory(&bytes(3, BLOCKS as usize * BLOCK_BYTES));
        fake.kernel(streams[1].handle, target.address, &bytes(4, BLOCKS as usize * BLOCK_BYTES));
        let pulled = pull(decode, 0..BLOCKS, &target, on(&streams[1]));
        assert_eq!(decode.pinned(), BLOCKS as usize);
        fake.kernel(streams[1].handle, target.address + 100, &bytes(5, 500));
        assert!(streams[1].is_done());
        let mut expected = paged(place, 4);
        expected[100..600].copy_from_slice(&bytes(5, 500));
        assert!(target.read() == expected, "{kind:?}, {checksums}: the stream's work and the copies were not in their order");
        assert_eq!(end(&pulled), all("Done", BLOCKS as usize));
        assert_eq!((decode.pinned(), prefill.metrics().publish_total.get()), (0, BLOCKS));
        assert_eq!(decode.metrics().pull_total.get(), 2 * BLOCKS);
        assert_eq!(fake.get("launches") > 0, kind == Kind::Kernels);
        drop((memory, target, streams));
        drop(gpu);
        scene.close();
    }
}

/// No call asks for the end: the thread of the upkeep looks after the copies.
#[test]
fn the_upkeep_commits_what_no_caller_asks_for() {
    let scene = Scene::new(Kind::Kernels, true, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    let upkeep = scene.caches[0].serve().unwrap();
    for round in 0..3 {
        // Long enough for the thread to have nothing to do.
        std::thread::sleep(Duration::from_millis(20));
        scene.fake.set("is_stuck", 1);
        drop(publish(&scene.caches[0], round * 2..round * 2 + 2, &memory, on(&stream)));
        assert!(!scene.is_there(round * 2));
        scene.fake.set("is_stuck", 0);
        let deadline = Instant::now() + crate::bench::PATIENCE;
        while !scene.is_there(round * 2) || !scene.is_there(round * 2 + 1) {
            assert!(Instant::now() < deadline, "never committed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    drop(upkeep);
    // Without that thread, rounds of the upkeep do.
    let published = publish(&scene.caches[0], 6..7, &memory, on(&stream));
    drop(published);
    scene.caches[0].service_round().unwrap();
    assert!(scene.is_there(6));
    drop((memory, stream));
    drop(gpu);
    scene.close();
}

/// What was there, what another one writes, and what is absent, in one call.
#[test]
fn each_block_has_its_answer() {
    let scene = Scene::new(Kind::Kernels, true, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    assert_eq!(end(&publish(&scene.caches[0], 1..2, &memory, on(&stream))), ["Done"]);
    assert_eq!(end(&publish(&scene.caches[0], 0..3, &memory, on(&stream))), ["Done", "Exists", "Done"]);
    assert_eq!(end(&publish(&scene.caches[0], 0..3, &memory, on(&stream))), all("Exists", 3));
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    let pulled = pull(&scene.caches[1], 0..5, &target, OnGpu { device: 0, after: After::Nothing });
    assert_eq!(end(&pulled), ["Done", "Done", "Done", "absent", "absent"]);
    // Others ask for the same end.
    assert_eq!(end(&pulled.clone()), end(&pulled));
    // Pieces that are not as long as their block: nothing is published, and a pull is a miss.
    let short = PublishRequest { namespace: SPACE, key: key(7), parent: None, len_bytes: BLOCK_BYTES as u64 - 1 };
    // SAFETY: as above.
    let refused = unsafe { scene.caches[0].queue_publish(&[short], on(&stream), 0, |_| pieces(&memory, 7)) };
    assert!(matches!(refused.err(), Some(Error::Invalid(_))));
    assert!(!scene.is_there(7));
    // SAFETY: as above.
    let pulled = unsafe { scene.caches[1].queue_pull(SPACE, &[key(0)], on(&stream), 0, |_, _| pieces(&target, 0).into_iter().skip(1)) };
    assert_eq!(end(&pulled.unwrap()), ["length"]);
    assert_eq!(end(&publish(&scene.caches[0], 0..0, &memory, on(&stream))), all("", 0));
    scene.fake.finish();
    drop((memory, target, stream));
    drop(gpu);
    scene.close();
}

/// Where a CPU has a part in the copies the call waits for them, behind the stream's work all the same.
#[test]
fn through_buffers_the_call_waits() {
    let scene = Scene::new(Kind::Engine, true, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&bytes(1, BLOCKS as usize * BLOCK_BYTES)), gpu.stream());
    scene.fake.kernel(stream.handle, memory.address, &paged(|number| number as usize, 5));
    let published = publish(&scene.caches[0], 0..BLOCKS, &memory, on(&stream));
    assert_eq!(words(&published.poll().expect("known at once")), all("Done", BLOCKS as usize));
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    let pulled = pull(&scene.caches[1], 0..BLOCKS, &target, on(&stream));
    assert_eq!(words(&pulled.poll().expect("known at once")), all("Done", BLOCKS as usize));
    assert!(target.read() == paged(|number| number as usize, 9));
    assert!((0..BLOCKS).all(|number| scene.is_there(number)));
    assert!(scene.fake.get("pinned") > 0);
    scene.fake.finish();
    drop((memory, target, stream));
    drop(gpu);
    scene.close();
}

#[test]
fn bytes_under_way_have_a_bound() {
    let scene = Scene::new(Kind::Kernels, true, |cuda| cuda.queued_bytes = 2 * BLOCK_BYTES as u64 + 1);
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    let cache = &scene.caches[0];
    scene.fake.set("is_stuck", 1);
    let first = publish(cache, 0..2, &memory, on(&stream));
    assert!(matches!(try_publish(cache, 2..3, &memory, on(&stream), 0), Err(Error::Full { .. })));
    assert!(matches!(try_publish(cache, 2..3, &memory, on(&stream), 30), Err(Error::Full { .. })));
    // More than there ever is room for.
    assert!(matches!(try_publish(cache, 2..5, &memory, on(&stream), 60_000), Err(Error::Invalid(_))));
    // One that waits gets the room of the first, whose end it looks after itself.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            scene.fake.set("is_stuck", 0);
        });
        let second = try_publish(cache, 2..3, &memory, on(&stream), 120_000).unwrap();
        assert!(first.poll().is_some());
        assert_eq!((end(&first), end(&second)), (all("Done", 2), all("Done", 1)));
    });
    // Pulls have the same room, and a refused one keeps no pin.
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    scene.fake.set("is_stuck", 1);
    let pulled = pull(cache, 0..2, &target, on(&stream));
    assert!(matches!(try_pull(cache, 2..3, &target, on(&stream), 0), Err(Error::Full { .. })));
    assert_eq!(cache.pinned(), 2);
    scene.fake.set("is_stuck", 0);
    assert_eq!(end(&pulled), all("Done", 2));
    assert_eq!(end(&pull(cache, 2..3, &target, on(&stream))), ["Done"]);
    scene.fake.finish();
    drop((memory, target, stream));
    drop(gpu);
    scene.close();
}
