// SPDX-License-Identifier: Apache-2.0
//! The scheduler ends every run and says why; waits, clocks and siblings behave; seeds and names are found.

use cxl_pool::media::{RECORD_BYTES, Record};
use cxl_sim::{Failure, Stats, World, WorldConfig, explore, mutation_table, names, run_mutant, search};
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

fn record(version: u32) -> Record {
    Record { crc: 0, grant: 1, version, incarnation: 1, reserved: 0, data: [version as u8; RECORD_BYTES] }
}

fn world(seed: u64) -> World {
    World::formatted(seed, WorldConfig { max_steps: 20_000, max_time_ns: 10_000_000_000, ..WorldConfig::default() })
}

fn reason(result: Result<Stats, Failure>) -> String {
    result.expect_err("the run fails").reason
}

#[test]
fn a_deadlock_is_named() {
    let mut world = world(1);
    let host = world.add_host();
    world.spawn(host, "waits", |env| {
        env.sleep_until(u64::MAX)?;
        Ok(())
    });
    assert_eq!(reason(world.run()), "deadlock: h0.0/waits wait without a deadline");
}

#[test]
fn a_livelock_ends_at_the_step_budget_and_an_endless_wait_at_the_time_budget() {
    let mut busy = world(2);
    let host = busy.add_host();
    busy.spawn(host, "spins", |env| {
        loop {
            env.lines().fetch::<Record>(0)?;
        }
    });
    assert!(reason(busy.run()).contains("no end after 20000 steps"));
    drop(busy);
    let mut waiting = world(2);
    let host = waiting.add_host();
    waiting.spawn(host, "sleeps", |env| {
        loop {
            env.platform().sleep_ns(1_000_000_000);
        }
    });
    assert!(reason(waiting.run()).contains("of virtual time"));
}

#[test]
fn an_assertion_and_an_error_of_a_thread_fail_the_run_with_a_trace() {
    for panics in [true, false] {
        let mut world = world(3);
        let host = world.add_host();
        world.spawn(host, "fails", move |env| {
            env.lines().publish(5, record(3))?;
            assert!(!panics, "as told");
            env.lines().fetch::<Record>(1 << 40).map(drop)
        });
        let failure = world.run().expect_err("it fails");
        let expected = if panics { "panic: as told" } else { "metadata line" };
        assert!(failure.reason.contains(expected), "{failure}");
        assert!(failure.trace.iter().any(|line| line.contains("h0.0/fails") && line.contains("Write Record[5]")), "{:#?}", failure.trace);
    }
}

#[test]
fn a_violated_invariant_ends_the_run_at_its_step() {
    let mut world = world(4);
    let host = world.add_host();
    world.check_always(|view| if view.peek::<Record>(0).version < 3 { Ok(()) } else { Err("three".into()) });
    world.spawn(host, "writes", |env| (1..100).try_for_each(|round| env.lines().publish(0, record(round))));
    let failure = world.run().expect_err("the invariant breaks");
    assert_eq!(failure.reason, "invariant violated: three");
    assert!(world.view(|view| view.peek::<Record>(0).version) == 3);
}

#[test]
fn the_run_does_not_wait_for_daemons() {
    let mut world = world(5);
    let host = world.add_host();
    world.start(host, |env| {
        env.spawn_daemon("service", |env| {
            loop {
                env.platform().sleep_ns(1000);
            }
        });
        env.spawn("work", |env| (0..10).try_for_each(|_| env.yield_now()));
    });
    world.run().expect("it ends with the work");
}

#[test]
fn a_parked_thread_wakes_when_woken_or_at_its_deadline() {
    explore("park", 300, |seed| {
        let mut world = world(seed);
        let host = world.add_host();
        let word = Arc::new(AtomicU32::new(0));
        world.start(host, move |env| {
            let (parked, waking) = (Arc::clone(&word), Arc::clone(&word));
            env.spawn("parks", move |env| {
                let platform = env.platform();
                let begin = env.global_ns();
                while parked.load(SeqCst) == 0 {
                    platform.park(&parked, 0, 3_600_000_000_000);
                }
                assert!(env.global_ns() - begin < 1_000_000_000, "slept through the wake");
                let (begin, alone) = (platform.now_ns(), AtomicU32::new(0));
                for _ in 0..100 {
                    platform.park(&alone, 0, 1_000);
                }
                assert!(platform.now_ns() - begin >= 50_000, "did not wait");
                Ok(())
            });
            env.spawn("wakes", move |env| {
                env.platform().sleep_ns(10_000);
                waking.store(1, SeqCst);
                env.platform().wake(&waking);
                Ok(())
            });
        });
        world.run()
    });
}

#[test]
fn hosts_agree_neither_on_the_time_nor_on_its_speed() {
    let (mut offsets, mut speeds) = (0, 0);
    for seed in 0..50 {
        let mut world = world(seed);
        let clocks: [Rc<Cell<(u64, u64)>>; 2] = Default::default();
        for clock in &clocks {
            let host = world.add_host();
            let clock = Rc::clone(clock);
            world.spawn(host, "clock", move |env| {
                let platform = env.platform();
                let begin = platform.now_ns();
                env.sleep_until(1_000_000_000)?;
                clock.set((begin, platform.now_ns() - begin));
                Ok(())
            });
        }
        world.run().expect("clocks run");
        let [first, second] = clocks.map(|clock| clock.get());
        offsets += u32::from(first.0.abs_diff(second.0) > 1_000_000_000);
        speeds += u32::from(first.1.abs_diff(second.1) > 100_000_000);
    }
    assert!(offsets > 20 && speeds > 5, "{offsets} offsets, {speeds} speeds");
}

/// One thread publishes and tells its sibling through local memory, which publishes: a host that sees the second sees the first.
fn siblings(seed: u64) -> Result<Stats, Failure> {
    let mut world = world(seed);
    let (host, reader) = (world.add_host(), world.add_host());
    world.start(host, |env| {
        let told = Arc::new(AtomicU32::new(0));
        let hears = Arc::clone(&told);
        env.spawn("first", move |env| {
            env.lines().publish(0, record(1))?;
            told.store(1, SeqCst);
            (0..20).try_for_each(|_| env.yield_now())
        });
        env.spawn("second", move |env| {
            while hears.load(SeqCst) == 0 {
                env.platform().relax(0);
            }
            env.lines().publish(1, record(1))
        });
    });
    world.spawn(reader, "reader", |env| {
        let lines = env.lines();
        for _ in 0..40 {
            let second = lines.fetch::<Record>(1)?.version;
            assert!(lines.fetch::<Record>(0)?.version >= second, "the second without the first");
        }
        Ok(())
    });
    world.run()
}

#[test]
fn what_a_sibling_is_told_has_happened() {
    explore("siblings", 2000, siblings);
    assert!(run_mutant("publish.no_store_fence", &[("siblings", siblings)], 4000).is_some(), "and not without the fence");
}

#[test]
fn the_lowest_seed_that_fails_is_reported_and_a_mutant_of_nothing_survives() {
    let scenario = |seed| {
        let mut world = world(seed);
        let host = world.add_host();
        world.spawn(host, "counts", move |_| {
            assert!(seed % 50 != 37, "seed {seed}");
            Ok(())
        });
        world.run()
    };
    assert_eq!(search(0..1000, None, &scenario).expect_err("37 fails").seed, 37);
    assert_eq!(search(0..37, None, &scenario).expect("none fails").runs, 37);
    assert_eq!(mutation_table(&["no.such.rule"], &[("siblings", siblings)], 100), ["no.such.rule"]);
}

#[test]
fn names_are_found_in_code_and_not_in_comments() {
    let pool = names::of_pool().expect("the sources lie beside this crate");
    assert!(pool.mutants.contains(&"fetch.no_flush") && !pool.mutants.contains(&"H3.skip"), "{pool:?}");
    let missing = names::in_sources(Path::new("/nonexistent"));
    assert!(missing.is_err());
}
