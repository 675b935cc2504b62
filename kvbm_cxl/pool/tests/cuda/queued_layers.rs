// SPDX-License-Identifier: Apache-2.0
//! Blocks that are published layer by layer, each layer behind the work that computes it.

use crate::bench::bytes;
use crate::device::Gpu;
use crate::fake::Kind;
use crate::paged::{LAYERED_BYTES, LAYERS, Scene, all, compute, end, layers_of, on, queue_layer};
use cxl_pool::Error;

#[test]
fn layers_are_copied_behind_what_computes_them_and_committed_together() {
    for (kind, is_registered) in [(Kind::New, true), (Kind::Kernels, true), (Kind::New, false)] {
        let scene = Scene::new(kind, false, |_| ());
        if !is_registered {
            scene.fake.fail("cuMemHostRegister_v2", 0, 1000, 2);
        }
        let gpu = Gpu::open(scene.fake.path(), 0);
        let (memory, stream) = (gpu.memory(&bytes(1, LAYERED_BYTES)), gpu.stream());
        let mut layers = layers_of(&scene.caches[0], 0..5).unwrap();
        scene.fake.set("is_stuck", is_registered.into());
        for layer in 0..LAYERS.len() {
            compute(&scene.fake, &stream, &memory, layer, 0..5);
            queue_layer(&mut layers, &memory, layer, 0, on(&stream)).unwrap();
            assert!((0..5).all(|number| !scene.is_there(number)));
        }
        let queued = layers.finish().unwrap();
        if is_registered {
            assert!(queued.poll().is_none() && !scene.is_there(0), "committed before the end of its copies");
            // The next step computes other blocks there, behind the copies.
            // SAFETY: the stream is there.
            unsafe { queued.hold(stream.handle) }.unwrap();
        }
        for layer in 0..LAYERS.len() {
            compute(&scene.fake, &stream, &memory, layer, 0..1);
            scene.fake.kernel(stream.handle, memory.address, &bytes(77, 3000));
        }
        scene.fake.set("is_stuck", 0);
        assert!(stream.is_done());
        assert_eq!(end(&queued), all("Done", 5), "{kind:?}, {is_registered}");
        assert!((0..5).all(|number| scene.is_there(number)), "{kind:?}, {is_registered}");
        assert_eq!(scene.fake.get("pinned") > 0 && kind == Kind::New, !is_registered);
        // What is there is not asked for, and the rest is published.
        let mut layers = layers_of(&scene.caches[0], 3..7).unwrap();
        for layer in 0..LAYERS.len() {
            compute(&scene.fake, &stream, &memory, layer, 5..7);
            queue_layer(&mut layers, &memory, layer, 3, on(&stream)).unwrap();
        }
        assert_eq!(end(&layers.finish().unwrap()), ["Exists", "Exists", "Done", "Done"]);
        assert!(scene.is_there(5) && scene.is_there(6));
        scene.fake.finish();
        drop((memory, stream));
        drop(gpu);
        scene.close();
    }
}

#[test]
fn blocks_that_are_not_whole_are_given_up() {
    let scene = Scene::new(Kind::New, false, |_| ());
    let gpu = Gpu::open(scene.fake.path(), 0);
    let (memory, stream) = (gpu.memory(&bytes(1, LAYERED_BYTES)), gpu.stream());
    let cache = &scene.caches[0];
    let layer = |layers: &mut _, layer| queue_layer(layers, &memory, layer, 0, on(&stream));
    // Of the cells that it then has.
    drop(layers_of(cache, 0..2).unwrap());
    let free = cache.usage().free;
    let mut layers = layers_of(cache, 0..2).unwrap();
    layer(&mut layers, 0).unwrap();
    assert!(matches!(layers.finish().err(), Some(Error::Invalid(_))));
    // Parts that would share a line, and one that is too long.
    let mut layers = layers_of(cache, 0..2).unwrap();
    assert!(matches!(layer(&mut layers, 3), Err(Error::Invalid(_))));
    drop(layers);
    let mut layers = layers_of(cache, 0..2).unwrap();
    (0..LAYERS.len()).for_each(|number| layer(&mut layers, number).unwrap());
    assert!(matches!(layer(&mut layers, 0), Err(Error::Invalid(_))));
    drop(layers);
    cache.service_round().unwrap();
    assert_eq!((cache.usage().free, scene.is_there(0)), (free, false));

    // The GPU is at a part when they are given up: their cells are free when it has ended.
    scene.fake.set("is_stuck", 1);
    let mut layers = layers_of(cache, 0..2).unwrap();
    layer(&mut layers, 0).unwrap();
    drop(layers);
    cache.service_round().unwrap();
    assert_eq!(cache.usage().free, free - 2, "a cell that the GPU writes to is given to others");
    scene.fake.set("is_stuck", 0);
    cache.service_round().unwrap();
    assert_eq!((cache.usage().free, scene.is_there(0)), (free, false));

    // A part that fails takes its blocks along.
    let mut layers = layers_of(cache, 0..2).unwrap();
    layer(&mut layers, 0).unwrap();
    scene.fake.fail("cuMemcpyBatchAsync_v2", 0, 1, 719);
    scene.fake.fail("cuMemcpyAsync", 0, 100, 719);
    (1..LAYERS.len()).for_each(|number| layer(&mut layers, number).unwrap());
    scene.fake.forgive();
    assert_eq!(end(&layers.finish().unwrap()), all("device", 2));
    assert_eq!((cache.usage().free, scene.is_there(0)), (free, false));
    scene.fake.finish();
    drop((memory, stream));
    drop(gpu);
    scene.close();
}
