// SPDX-License-Identifier: Apache-2.0
//! Rules of blocks that a stream orders (cache/queued), with a driver that is faked: the loss of any of them is noticed.

#[path = "../../pool/tests/cache/bench.rs"]
#[allow(dead_code)] // The tests of the pool use the rest; the same below.
mod bench;
#[path = "../../pool/tests/cuda/device.rs"]
#[allow(dead_code)]
mod device;
#[path = "../../pool/tests/cuda/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../pool/tests/common/load.rs"]
mod load;
#[path = "../../pool/tests/cuda/paged.rs"]
#[allow(dead_code)]
mod paged;

use bench::{SPACE, bytes, key};
use cxl_pool::fault::drop_rule;
use device::Gpu;
use fake::Kind;
use paged::{BLOCK_BYTES, BLOCKS, Scene, WAYS, all, end, on, paged, publish, pull, try_publish};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A publish behind work that computes its blocks and before work that writes their memory anew, and a pull behind work that writes its
/// memory and before work that writes a part of it. The calls are made without `rule`.
fn there_and_back(scene: &Scene, rule: Option<&'static str>, is_stream_first: bool) {
    let (fake, [prefill, decode]) = (&scene.fake, &scene.caches);
    let gpu = Gpu::open(fake.path(), 0);
    let place = |number: u64| number as usize;
    let (memory, streams) = (gpu.memory(&bytes(1, BLOCKS as usize * BLOCK_BYTES)), [gpu.stream(), gpu.stream()]);
    fake.kernel(streams[0].handle, memory.address, &paged(place, 77));
    drop_rule(rule);
    let published = publish(prefill, 0..BLOCKS, &memory, on(&streams[0]));
    // SAFETY: the stream is there.
    unsafe { published.hold(streams[0].handle) }.unwrap();
    drop_rule(None);
    fake.kernel(streams[0].handle, memory.address, &bytes(2, BLOCKS as usize * BLOCK_BYTES));
    assert!(decode.lookup(SPACE, key(0)).unwrap().is_none(), "committed before the end of its copy");
    let looked = |rule| {
        drop_rule(rule);
        let ended = published.poll().is_some();
        drop_rule(None);
        ended
    };
    fake.set("is_stuck", 1);
    assert!(!looked(rule) && !scene.is_there(0), "ended before its copies");
    fake.set("is_stuck", 0);
    // The stream first: what it has to come behind is made on its way.
    assert!(streams[0].is_done());
    assert_eq!(end(&published), all("Done", BLOCKS as usize));
    assert!((0..BLOCKS).all(|number| scene.is_there(number)), "a block is not what the stream computed");

    let target = gpu.memory(&bytes(3, BLOCKS as usize * BLOCK_BYTES));
    fake.kernel(streams[1].handle, target.address, &bytes(4, BLOCKS as usize * BLOCK_BYTES));
    drop_rule(rule);
    let pulled = pull(decode, 0..BLOCKS, &target, on(&streams[1]));
    drop_rule(None);
    fake.kernel(streams[1].handle, target.address + 100, &bytes(5, 500));
    let mut expected = paged(place, 4);
    expected[100..600].copy_from_slice(&bytes(5, 500));
    // One of the two is looked at first: the order is right in both cases.
    if is_stream_first {
        assert!(streams[1].is_done());
    }
    assert_eq!(end(&pulled), all("Done", BLOCKS as usize));
    assert!(streams[1].is_done());
    assert!(target.read() == expected, "the stream's work and the copies are not in their order");
    fake.finish();
}

fn is_noticed(kind: Kind, checksums: bool, rule: Option<&'static str>) -> bool {
    [false, true].into_iter().any(|is_stream_first| {
        let scene = Scene::new(kind, checksums, |_| ());
        let tried = catch_unwind(AssertUnwindSafe(|| there_and_back(&scene, rule, is_stream_first)));
        drop_rule(None);
        scene.fake.set("is_stuck", 0);
        scene.fake.finish();
        tried.is_err()
    })
}

#[test]
fn the_loss_of_an_order_is_noticed() {
    for (kind, checksums) in WAYS {
        assert!(!is_noticed(kind, checksums, None), "{kind:?}, {checksums}");
        for rule in [
            "stream.callers_work_unrecorded",
            "stream.callers_work_unawaited",
            "stream.caller_goes_on",
            "stream.part_read_first",
            "stream.committed_early",
            "copy.dma_unawaited",
        ] {
            assert!(is_noticed(kind, checksums, Some(rule)), "{rule}, {kind:?}, {checksums}: nothing noticed its loss");
        }
    }
}

/// Two calls of which the bound has room for one.
fn is_bounded(rule: Option<&'static str>) -> bool {
    let scene = Scene::new(Kind::Engine, false, |cuda| cuda.queued_bytes = BLOCK_BYTES as u64);
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    scene.fake.set("is_stuck", 1);
    let first = publish(&scene.caches[0], 0..1, &memory, on(&stream));
    drop_rule(rule);
    let second = try_publish(&scene.caches[0], 1..2, &memory, on(&stream), 0);
    drop_rule(None);
    scene.fake.set("is_stuck", 0);
    assert_eq!(end(&first), ["Done"]);
    second.is_err()
}

/// A cache that is closed while copies are under way; whether a block of theirs is there afterwards.
fn is_committed_by_a_close(rule: Option<&'static str>) -> bool {
    let scene = Scene::new(Kind::Engine, false, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&paged(|number| number as usize, 5)), gpu.stream());
    let published = publish(&scene.caches[0], 0..1, &memory, on(&stream));
    let Scene { caches: [cache, other], .. } = scene;
    drop_rule(rule);
    cache.close().unwrap();
    drop_rule(None);
    assert_eq!(end(&published).len(), 1);
    other.lookup(SPACE, key(0)).unwrap().is_some()
}

#[test]
fn the_loss_of_a_bound_and_of_the_end_of_a_cache_is_noticed() {
    assert!(is_bounded(None) && !is_bounded(Some("stream.unbounded")));
    assert!(!is_committed_by_a_close(None) && is_committed_by_a_close(Some("stream.committed_at_the_end")));
}
