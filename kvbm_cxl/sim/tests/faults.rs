// SPDX-License-Identifier: Apache-2.0
//! What a crash, a pause and a restart do to a simulated host, and what they leave alone.

use cxl_pool::line::Lines;
use cxl_pool::media::{RECORD_BYTES, Record, Region};
use cxl_pool::platform::{MachineLock, ProcessId};
use cxl_sim::{Chances, Failure, Fault, Planned, SimHost, Stats, When, World, WorldConfig, WritePath, explore, strike_points};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

const CRASH: Fault = Fault::CrashMachine { restart_after_ns: None };

fn record(version: u32) -> Record {
    Record { crc: 0, grant: 1, version, incarnation: 1, reserved: 0, data: [version as u8; RECORD_BYTES] }
}

fn world(seed: u64, write_path: WritePath) -> World {
    World::formatted(seed, WorldConfig { write_path, max_steps: 200_000, max_time_ns: 60_000_000_000, ..WorldConfig::default() })
}

fn version(lines: &Lines, index: u64) -> u32 {
    lines.fetch::<Record>(index).map_or(u32::MAX, |record| record.version)
}

/// A word of the machine's local memory.
fn word(memory: &cxl_pool::platform::LocalMemory, index: usize) -> &AtomicU32 {
    assert!(index * 4 < memory.len_bytes);
    // SAFETY: the word lies inside the memory, which `memory.owner` keeps, is aligned, and is only used as this atomic.
    unsafe { memory.start.cast::<AtomicU32>().add(index).as_ref() }
}

#[test]
fn what_a_crash_loses_respects_the_fences() {
    let seen = Mutex::new(BTreeSet::new());
    explore("crash_order", 2000, |seed| {
        let mut world = world(seed, WritePath::OneUnit);
        let host = world.add_host();
        world.plan(Planned { when: When::Step(1 + seed % 9), host: Some(host), fault: CRASH });
        world.spawn(host, "writer", |env| {
            let lines = env.lines();
            lines.publish(0, record(1))?;
            lines.publish(1, record(1))?;
            lines.write(2, record(1))?;
            lines.write(3, record(1))?;
            for _ in 0..4 {
                env.yield_now()?;
            }
            Ok(())
        });
        let stats = world.run()?;
        let lines = world.inspector();
        let left: Vec<u32> = (0..4).map(|index| version(&lines, index)).collect();
        let ordered = left[0] >= left[1] && left[1] >= left[2].max(left[3]);
        seen.lock().expect("no other run failed").insert(left.clone());
        if ordered { Ok(stats) } else { Err(world.failure(format!("against the order of the fences: {left:?}"))) }
    });
    // Nothing, each prefix, and the two unfenced writes in either order.
    let expected: [[u32; 4]; 6] = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]];
    let seen = seen.into_inner().expect("no run failed");
    assert!(expected.iter().all(|outcome| seen.contains(outcome.as_slice())), "only {seen:?}");
}

#[test]
fn a_crash_can_leave_a_line_torn_on_the_path_of_stores() {
    let outcomes = Mutex::new(BTreeSet::new());
    explore("crash_torn", 1000, |seed| {
        let mut world = world(seed, WritePath::StoresAndFlush);
        let host = world.add_host();
        world.plan(Planned { when: When::Step(1 + seed % 5), host: Some(host), fault: CRASH });
        world.spawn(host, "writer", |env| {
            env.lines().publish(0, record(1))?;
            (0..4).try_for_each(|_| env.yield_now())
        });
        let stats = world.run()?;
        outcomes.lock().expect("no other run failed").insert(version(&world.inspector(), 0));
        Ok(stats)
    });
    assert_eq!(outcomes.into_inner().expect("no run failed"), BTreeSet::from([0, 1, u32::MAX]), "old, new and torn");
}

#[test]
fn a_crash_loses_some_of_the_dirty_lines_that_the_host_itself_has_seen() {
    let outcomes = Mutex::new(BTreeSet::new());
    explore("crash_dirty", 1000, |seed| {
        let mut world = world(seed, WritePath::StoresAndFlush);
        let host = world.add_host();
        let at = world.layout().line_offset(Region::Record, 0).expect("it exists");
        world.plan(Planned { when: When::Point("seen", 1), host: Some(host), fault: CRASH });
        let seen = Rc::new(Cell::new(false));
        let sees = Rc::clone(&seen);
        world.start(host, move |env| {
            let sees = Rc::clone(&sees);
            env.spawn("writer", |env| {
                env.lines().write(0, record(1))?;
                (0..20).try_for_each(|_| env.yield_now())
            });
            env.spawn("sibling", move |env| {
                for _ in 0..20 {
                    let line = env.memory().load_line(at)?;
                    if env.lines().open::<Record>(0, &line).is_ok_and(|record| record.version == 1) {
                        sees.set(true);
                        env.point("seen");
                    }
                }
                Ok(())
            });
        });
        let stats = world.run()?;
        if seen.get() {
            outcomes.lock().expect("no other run failed").insert(version(&world.inspector(), 0));
        }
        Ok(stats)
    });
    let outcomes = outcomes.into_inner().expect("no run failed");
    assert!(outcomes.contains(&0) && outcomes.contains(&1), "lost and kept, not {outcomes:?}");
}

#[test]
fn destructors_of_a_crashed_host_change_nothing() {
    struct Publishes(Lines, Rc<Cell<bool>>);
    impl Drop for Publishes {
        fn drop(&mut self) {
            self.1.set(self.0.publish(0, record(7)).is_err() && self.0.fetch::<Record>(0).is_err());
        }
    }
    for fault in [CRASH, Fault::CrashProcess { restart_after_ns: None }] {
        explore("inert", 50, |seed| {
            let mut world = world(seed, WritePath::BySeed);
            let host = world.add_host();
            let refused = Rc::new(Cell::new(false));
            let seen = Rc::clone(&refused);
            world.plan(Planned { when: When::Point("here", 1), host: Some(host), fault });
            world.spawn(host, "victim", move |env| {
                let _publishes = Publishes(env.lines(), seen);
                env.point("here");
                panic!("goes on after its crash");
            });
            let stats = world.run()?;
            assert!(refused.get(), "the destructor ran and was refused");
            assert_eq!(version(&world.inspector(), 0), 0);
            assert_eq!((stats.crashes, stats.points.get("here")), (1, Some(&1)));
            Ok(stats)
        });
    }
}

#[test]
fn a_killed_process_leaves_local_memory_as_it_was_and_a_dead_machine_none() {
    struct Unlocks(cxl_pool::platform::LocalMemory);
    impl Drop for Unlocks {
        fn drop(&mut self) {
            word(&self.0, 3).store(8, SeqCst);
        }
    }
    let restart_after_ns = Some(5_000);
    for (fault, found) in [(Fault::CrashMachine { restart_after_ns }, 0), (Fault::CrashProcess { restart_after_ns }, 9)] {
        explore("local_memory", 50, |seed| {
            let mut world = world(seed, WritePath::OneUnit);
            let host = world.add_host();
            world.plan(Planned { when: When::Point("locked", 1), host: None, fault });
            let log: Rc<RefCell<Vec<(u32, u32)>>> = Rc::default();
            let seen = Rc::clone(&log);
            world.start(host, move |env| {
                let seen = Rc::clone(&seen);
                env.spawn("locker", move |env| {
                    let platform = env.platform();
                    let memory = platform.local_memory(4096)?;
                    seen.borrow_mut().push((env.generation(), word(&memory, 3).load(SeqCst)));
                    let no_host_left = platform.try_lock(MachineLock::Members, true)?;
                    assert!(no_host_left.is_some(), "a lock outlives its process");
                    drop(no_host_left);
                    let guard = platform.try_lock(MachineLock::Members, false)?;
                    assert!(guard.is_some());
                    if env.generation() == 1 {
                        assert!(platform.try_lock(MachineLock::Join, true)?.is_some());
                        assert!(platform.try_lock(MachineLock::Members, true)?.is_none());
                        assert!(!platform.is_alive(ProcessId { pid: 100, start: 0 }) && platform.is_alive(platform.process()));
                    }
                    let _join = platform.try_lock(MachineLock::Join, true)?;
                    word(&memory, 3).store(9, SeqCst);
                    let _unlocks = Unlocks(memory);
                    // No destructor gives the lock back: that is the kernel's business.
                    std::mem::forget(guard);
                    env.point("locked");
                    Ok(())
                });
            });
            let stats = world.run()?;
            assert_eq!(*log.borrow(), [(0, 0), (1, found)], "{fault:?}");
            Ok(stats)
        });
    }
}

#[test]
fn machine_locks_are_shared_or_exclusive_and_end_with_their_guard() {
    let mut world = world(1, WritePath::OneUnit);
    let (host, other) = (world.add_host(), world.add_host());
    world.spawn(host, "locks", |env| {
        let platform = env.platform();
        let first = platform.try_lock(MachineLock::Members, false)?;
        let second = platform.try_lock(MachineLock::Members, false)?;
        assert!(first.is_some() && second.is_some() && platform.try_lock(MachineLock::Members, true)?.is_none());
        drop((first, second));
        let alone = platform.try_lock(MachineLock::Members, true)?;
        assert!(alone.is_some() && platform.try_lock(MachineLock::Members, false)?.is_none());
        assert!(platform.try_lock(MachineLock::Manager, true)?.is_some(), "another lock is free");
        Ok(())
    });
    world.spawn(other, "has its own", |env| {
        assert!(env.platform().try_lock(MachineLock::Members, true)?.is_some());
        Ok(())
    });
    world.run().expect("locks behave");
}

#[test]
fn a_paused_host_goes_on_as_a_zombie() {
    explore("zombie", 300, |seed| {
        let mut world = world(seed, WritePath::OneUnit);
        let (zombie, other) = (world.add_host(), world.add_host());
        world.plan(Planned { when: When::Point("checked", 1), host: Some(zombie), fault: Fault::PauseHost { for_ns: 1_000_000_000 } });
        let done = Rc::new(Cell::new(0));
        let resumed = Rc::clone(&done);
        world.spawn(zombie, "zombie", move |env| {
            env.point("checked");
            resumed.set(env.global_ns());
            env.lines().publish(0, record(1))
        });
        world.spawn(other, "other", |env| {
            env.lines().publish(20, record(1))?;
            env.platform().sleep_ns(1_000_000);
            assert_eq!(version(&env.lines(), 0), 0, "the zombie stands still");
            Ok(())
        });
        let stats = world.run()?;
        assert!(done.get() >= 1_000_000_000, "resumed at {}", done.get());
        assert_eq!(version(&world.inspector(), 0), 1, "the zombie's write lands");
        Ok(stats)
    });
}

#[test]
fn a_host_that_is_paused_for_ever_does_not_keep_the_run_from_ending() {
    let mut world = world(3, WritePath::OneUnit);
    let host = world.add_host();
    world.plan(Planned { when: When::Step(2), host: Some(host), fault: Fault::PauseHost { for_ns: u64::MAX } });
    world.spawn(host, "sleeper", |env| (0..5).try_for_each(|_| env.yield_now()));
    assert!(world.run().expect("it ends").steps < 5);
    world.resume(host);
    assert_eq!(world.run().expect("it goes on").steps, 5);
}

/// Everything at once: crashes, pauses, jumps, two threads per process, restarts.
fn storm(seed: u64) -> Result<Stats, Failure> {
    let chances = Chances {
        crash_machine: 200,
        crash_process: 200,
        pause_host: 500,
        pause_thread: 500,
        jump: 200,
        max_crashes: 4,
        max_pauses: 10,
        longest_ns: 1_000_000_000,
        restart_within_ns: Some(10_000_000),
        for_steps: 0,
    };
    let config = WorldConfig { chances, write_path: WritePath::BySeed, ..WorldConfig::default() };
    let mut world = World::formatted(seed, config);
    for number in 0..4 {
        let host = world.add_host();
        assert_eq!(host, SimHost(number));
        world.start(host, move |env| {
            for thread in 0..2 {
                env.spawn("worker", move |env| {
                    let lines = env.lines();
                    for round in 0..40 {
                        lines.publish((number * 2 + thread) as u64, record(round))?;
                        let other = env.below(8) as u64;
                        let _ = lines.fetch::<Record>(other);
                        env.platform().sleep_ns(10_000);
                    }
                    Ok(())
                });
            }
        });
    }
    world.check_always(move |view| {
        let writers = |index| view.writers(view.layout().line_offset(Region::Record, index).unwrap_or(0));
        match (0..8).find(|&index| writers(index) & !(1 << (index / 2)) != 0) {
            Some(index) => Err(format!("record {index} was written by {:b}", writers(index))),
            None => Ok(()),
        }
    });
    world.run()
}

#[test]
fn a_seed_runs_the_same_way_twice_and_seeds_differ() {
    let mut digests = BTreeSet::new();
    let (mut crashes, mut pauses) = (0, 0);
    for seed in 0..100 {
        let first = storm(seed).expect("no fault breaks one writer per line");
        assert_eq!(first, storm(seed).expect("the same again"), "seed {seed}");
        digests.insert(first.digest);
        crashes += first.crashes;
        pauses += first.pauses;
    }
    assert_eq!(digests.len(), 100);
    assert!(crashes > 20 && pauses > 50, "{crashes} crashes, {pauses} pauses");
}

#[test]
fn a_faulty_storm_on_many_seeds() {
    explore("storm", 400, storm);
}

#[test]
fn every_fault_strikes_at_every_point() {
    let restart_after_ns = Some(1000);
    let faults = [CRASH, Fault::CrashProcess { restart_after_ns }, Fault::PauseThread { for_ns: 1_000_000 }];
    let struck = Mutex::new((0, 0));
    let unvisited = strike_points(&["before", "after", "nowhere"], &faults, 20, |seed, planned| {
        let mut world = world(seed, WritePath::OneUnit);
        let host = world.add_host();
        world.plan(planned);
        world.start(host, |env| {
            env.spawn("writer", |env| {
                for round in 1..=4 {
                    env.point("before");
                    env.lines().publish(0, record(round))?;
                    env.point("after");
                }
                Ok(())
            });
        });
        let stats = world.run()?;
        let mut struck = struck.lock().expect("no other run failed");
        *struck = (struck.0 + stats.crashes, struck.1 + stats.pauses);
        Ok(stats)
    });
    assert_eq!(unvisited, ["nowhere"]);
    assert_eq!(struck.into_inner().expect("no run failed"), (80, 40), "one in each run that has the point");
}
