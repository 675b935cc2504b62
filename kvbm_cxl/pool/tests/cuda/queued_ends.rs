// SPDX-License-Identifier: Apache-2.0
//! What becomes of queued blocks when their copies fail or do not end, when the cache is closed or a host is fenced, and when a pulled
//! block was not what it was.

use crate::bench::{PATIENCE, SPACE, bytes, key};
use crate::device::Gpu;
use crate::fake::Kind;
use crate::paged::{BLOCK_BYTES, BLOCKS, Scene, WAYS, all, end, on, paged, publish, pull, try_publish, try_pull};
use cxl_pool::Error;
use std::time::{Duration, Instant};

#[test]
fn closing_commits_nothing_and_keeps_no_pin() {
    for (kind, checksums) in WAYS {
        let scene = Scene::new(kind, checksums, |_| ());
        let gpu = Gpu::open(scene.fake.path(), 0);
        let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
        assert_eq!(end(&publish(&scene.caches[0], 0..2, &memory, on(&stream))), all("Done", 2));
        let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
        scene.fake.set("is_stuck", 1);
        let published = publish(&scene.caches[0], 2..4, &memory, on(&stream));
        let pulled = pull(&scene.caches[0], 0..2, &target, on(&stream));
        let Scene { fake, caches: [cache, other], hosts, services, bench, .. } = scene;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                fake.set("is_stuck", 0);
            });
            cache.close().unwrap();
        });
        assert_eq!((end(&published), end(&pulled)), (all("Dropped", 2), all("Done", 2)));
        for number in 2..4 {
            assert!(other.lookup(SPACE, key(number)).unwrap().is_none(), "committed by a cache that was being closed");
        }
        // Neither pins nor cells of it are in the way: the host leaves, and the other one evicts and publishes the same.
        hosts[0].leave().unwrap();
        assert_eq!(end(&publish(&other, 2..4, &memory, on(&stream))), all("Done", 2));
        other.close().unwrap();
        fake.finish();
        drop((memory, target, stream));
        drop((gpu, services, hosts, bench));
        fake.assert_left_clean();
    }
}

#[test]
fn copies_that_do_not_end_are_given_up() {
    let scene = Scene::new(Kind::Engine, false, |cuda| cuda.timeout_ms = 60);
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    let cache = &scene.caches[0];
    assert_eq!(end(&publish(cache, 0..2, &memory, on(&stream))), all("Done", 2));
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    // The work that they come after does not end.
    scene.fake.hold(stream.handle, true);
    scene.fake.kernel(stream.handle, memory.address, &bytes(1, 64));
    let (published, pulled) = (publish(cache, 2..4, &memory, on(&stream)), pull(cache, 0..2, &target, on(&stream)));
    assert_eq!((end(&published), end(&pulled)), (all("timeout", 2), all("timeout", 2)));
    assert_eq!(cache.pinned(), 0);
    assert!(!cache.copy_engine().is_settled(0) && !scene.is_there(2));
    // What they hold of the bound is free, their cells are not.
    let free = cache.usage().free;
    scene.fake.hold(stream.handle, false);
    assert!(cache.copy_engine().is_settled(60_000));
    assert_eq!((cache.usage().free, scene.is_there(2)), (free, false));
    assert_eq!(end(&publish(cache, 4..6, &memory, on(&stream))), all("Done", 2));
}

#[test]
fn copies_that_fail_commit_nothing_and_give_their_cells_back() {
    for (kind, checksums) in WAYS {
        let scene = Scene::new(kind, checksums, |_| ());
        let gpu = Gpu::open(scene.fake.path(), 0);
        let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
        let cache = &scene.caches[0];
        assert_eq!(end(&publish(cache, 0..2, &memory, on(&stream))), all("Done", 2));
        let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
        let free = cache.usage().free;
        scene.fake.set("copy_error", 719);
        let (published, pulled) = (publish(cache, 2..4, &memory, on(&stream)), pull(cache, 0..2, &target, on(&stream)));
        assert_eq!((end(&published), end(&pulled)), (all("device", 2), all("device", 2)), "{kind:?}, {checksums}");
        scene.fake.set("copy_error", 0);
        assert_eq!((cache.usage().free, cache.pinned(), scene.is_there(2)), (free, 0, false));
        // The key is free again, too.
        assert_eq!(end(&publish(cache, 2..4, &memory, on(&stream))), all("Done", 2));
        assert!(scene.is_there(2) && scene.is_there(3));
        scene.fake.finish();
        drop((memory, target, stream));
        drop(gpu);
        scene.close();
    }
}

/// A call of the driver that orders copies and streams fails: nothing goes on without its order.
#[test]
fn copies_that_cannot_be_ordered_are_not_made_or_waited_for() {
    let scene = Scene::new(Kind::Engine, false, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    let cache = &scene.caches[0];
    assert_eq!(end(&publish(cache, 0..2, &memory, on(&stream))), all("Done", 2));
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    for call in ["cuEventRecord", "cuStreamWaitEvent"] {
        // Behind the caller's work.
        scene.fake.fail(call, 0, 1, 1);
        assert!(matches!(try_publish(cache, 2..4, &memory, on(&stream), 0), Err(Error::Gpu { .. })), "{call}");
        scene.fake.fail(call, 0, 1, 1);
        assert!(
            matches!(try_pull(cache, 0..2, &target, on(&stream), 0).map(|pulled| end(&pulled)), Ok(answers) if answers == all("device", 2))
        );
        assert_eq!((cache.pinned(), scene.is_there(2)), (0, false));
        assert!(cache.copy_engine().is_settled(60_000));
    }
    // The copies after their flush.
    for (call, after) in [("cuLaunchHostFunc", 0), ("cuEventRecord", 1), ("cuStreamWaitEvent", 1)] {
        scene.fake.fail(call, after, 1, 1);
        assert_eq!(end(&pull(cache, 0..2, &target, on(&stream))), all("device", 2), "{call}");
        assert!(cache.pinned() == 0 && cache.copy_engine().is_settled(60_000));
    }
    // The caller's work behind them: the call waits for the copies.
    for call in ["cuEventRecord", "cuStreamWaitEvent"] {
        target.write(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
        scene.fake.fail(call, 2, 1, 1);
        let pulled = pull(cache, 0..2, &target, on(&stream));
        // Work that is not ordered otherwise comes behind them, too.
        scene.fake.kernel(stream.handle, target.address, &bytes(3, 64));
        assert!(stream.is_done());
        assert_eq!(end(&pulled), all("Done", 2));
        assert!(target.read()[..64] == bytes(3, 64), "{call}");
        scene.fake.forgive();
    }
    scene.fake.finish();
    drop((memory, target, stream));
    drop(gpu);
    scene.close();
}

/// What the caller's work has read meanwhile may be anything: the answer says so.
#[test]
fn a_pull_that_is_wrong_is_a_miss_behind_its_copies() {
    let scene = Scene::new(Kind::Kernels, true, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    assert_eq!(end(&publish(&scene.caches[0], 0..4, &memory, on(&stream))), all("Done", 4));
    let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
    // A byte of block 1 changes while its copy waits for the stream.
    let pins = scene.caches[0].pin_chain(SPACE, &[key(0), key(1)]).unwrap();
    scene.fake.hold(stream.handle, true);
    scene.fake.kernel(stream.handle, target.address, &bytes(1, 64));
    let pulled = pull(&scene.caches[1], 0..4, &target, on(&stream));
    let lines = scene.hosts[0].lines().memory();
    lines.copy_in(pins[1].offset() + 700, &[bytes(1, BLOCK_BYTES)[700] ^ 1]).unwrap();
    lines.fence_stores();
    drop(pins);
    scene.fake.hold(stream.handle, false);
    assert_eq!(end(&pulled), ["Done", "checksum", "Done", "Done"]);
    assert_eq!(scene.caches[1].pinned(), 0);
    scene.fake.finish();
    drop((memory, target, stream));
    drop(gpu);
    scene.close();
}

/// The host whose blocks are under way is fenced: what it publishes is never seen, and what others pull of it is a miss.
#[test]
fn blocks_of_a_host_that_is_fenced_meanwhile_are_misses() {
    for (kind, checksums) in WAYS {
        let mut scene = Scene::new(kind, checksums, |_| ());
        let gpu = Gpu::open(scene.fake.path(), 0);
        let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
        assert_eq!(end(&publish(&scene.caches[0], 0..2, &memory, on(&stream))), all("Done", 2));
        let target = gpu.memory(&bytes(9, BLOCKS as usize * BLOCK_BYTES));
        scene.fake.set("is_stuck", 1);
        let published = publish(&scene.caches[0], 2..4, &memory, on(&stream));
        let pulled = pull(&scene.caches[1], 0..2, &target, on(&stream));
        let (slot, incarnation) = (scene.hosts[0].slot(), scene.hosts[0].incarnation());
        // Its heart stops.
        scene.services[0] = None;
        let deadline = Instant::now() + PATIENCE;
        while !scene.hosts[1].is_fenced(slot, incarnation).unwrap() {
            assert!(Instant::now() < deadline, "a silent host was not fenced");
            std::thread::sleep(Duration::from_millis(5));
        }
        scene.fake.set("is_stuck", 0);
        assert_eq!(end(&pulled), all("fenced_during", 2), "{kind:?}, {checksums}");
        assert_eq!(end(&published), all("fenced", 2), "{kind:?}, {checksums}");
        assert!((0..4).all(|number| !scene.is_there(number)));
        assert_eq!((scene.caches[1].pinned(), scene.caches[0].pinned()), (0, 0));
    }
}
