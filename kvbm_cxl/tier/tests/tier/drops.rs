// SPDX-License-Identifier: Apache-2.0
//! Calls whose future is dropped: the blocks of the layout are the caller's again, at once.

use crate::bench::*;
use cxl_tier::Outcome;
use cxl_tier::blocks::Answers;
use cxl_tier::counts::{Counts, Operation};
use futures::FutureExt;
use futures::future::BoxFuture;
use kvbm_engine::object::ObjectBlockOps;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::runtime::Runtime;

type Call = BoxFuture<'static, Answers>;

/// A runtime whose threads stop where they pass the named point for the first time, say so, and go on when they are told.
fn stopping_at(point: &'static str) -> (Runtime, Receiver<()>, Sender<()>) {
    let (arrived, arrivals) = channel();
    let (go_on, told) = channel::<()>();
    let stop = Arc::new(Mutex::new(Some((arrived, told))));
    let watch = move || {
        let stop = stop.clone();
        cxl_pool::fault::on_point(Some(Rc::new(move |passed| {
            let first = if passed == point { stop.lock().unwrap().take() } else { None };
            if let Some((arrived, told)) = first {
                arrived.send(()).unwrap();
                told.recv().unwrap();
            }
        })));
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).on_thread_start(watch).build().unwrap();
    (runtime, arrivals, go_on)
}

/// Begins a call, waits until it has arrived at the point, drops it, and lets it go on once the drop waits.
fn drop_at_point(mut call: Call, runtime: &Runtime, arrivals: &Receiver<()>, go_on: &Sender<()>) {
    let context = runtime.enter();
    assert!((&mut call).now_or_never().is_none());
    drop(context);
    arrivals.recv().unwrap();
    let (tell, told) = channel();
    let dropping = std::thread::spawn(move || {
        tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        drop(call);
    });
    let stat = std::path::Path::new("/proc").join(told.recv().unwrap()).join("stat");
    let is_asleep = || std::fs::read_to_string(&stat).is_ok_and(|text| text.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')));
    while !is_asleep() {
        assert!(!dropping.is_finished(), "the drop did not wait for the turn that runs");
        std::thread::yield_now();
    }
    go_on.send(()).unwrap();
    dropping.join().unwrap();
}

fn await_count(counts: &Counts, operation: Operation, blocks: u64) {
    let deadline = Instant::now() + PATIENCE;
    while counts.all(operation) < blocks {
        assert!(Instant::now() < deadline, "the call did not end");
        std::thread::yield_now();
    }
}

#[test]
fn a_dropped_get_writes_to_no_block_that_was_given_away() {
    let bench = Bench::new(512);
    let member = bench.member(1);
    let keys = chain(200, 1);
    assert_eq!(put(&member.blocks(), &keys, 1), all(Outcome::Done, 200));
    // At both ends of the copy of the first 64 blocks.
    for point in ["cache.copying", "cache.copied"] {
        let blocks = member.blocks();
        let (runtime, arrivals, go_on) = stopping_at(point);
        let destination = layout(200);
        let call = blocks.get_blocks_with_layout(keys.clone(), destination.clone(), (0..200).collect());
        drop_at_point(call, &runtime, &arrivals, &go_on);
        // From here on all blocks are the caller's: another sequence fills them.
        assert!((64..200).all(|id| is_untouched(&destination, id)), "{point}: the call went on");
        (0..200).for_each(|id| fill(&destination, id, 2, id));
        await_count(blocks.counts(), Operation::Get, 200);
        assert!((0..200).all(|id| holds(&destination, id, 2, id)), "{point}: a block was written to after it was given away");
        assert_eq!(blocks.counts().of(Operation::Get, Outcome::Done), 64);
        assert_eq!(blocks.counts().of(Operation::Get, Outcome::Dropped), 136);
    }
}

#[test]
fn a_dropped_put_stores_no_bytes_that_came_later() {
    let bench = Bench::new(512);
    let member = bench.member(1);
    for (seed, point) in (1..).zip(["cache.may_write", "cache.filled", "cache.ready"]) {
        let blocks = member.blocks();
        let (runtime, arrivals, go_on) = stopping_at(point);
        let keys = chain(150, seed);
        let source = layout(150);
        (0..150).for_each(|id| fill(&source, id, seed, id));
        let call = blocks.put_blocks_with_layout(keys.clone(), source.clone(), (0..150).collect());
        drop_at_point(call, &runtime, &arrivals, &go_on);
        // Another sequence has the blocks now.
        (0..150).for_each(|id| fill(&source, id, 99, id));
        await_count(blocks.counts(), Operation::Put, 150);
        let outcomes = get(&blocks, &keys, seed);
        assert_eq!(outcomes, [all(Outcome::Done, 64), all(Outcome::Absent, 86)].concat(), "{point}");
    }
}

#[test]
fn a_call_that_was_never_waited_for_does_nothing() {
    let bench = Bench::new(64);
    let member = bench.member(1);
    let blocks = member.blocks();
    let keys = chain(3, 1);
    drop(blocks.put_blocks_with_layout(keys.clone(), layout(3), vec![0, 1, 2]));
    assert_eq!(blocks.has(&keys), all(Outcome::Absent, 3));
    assert_eq!(blocks.counts().all(Operation::Put), 0);
}
