// SPDX-License-Identifier: Apache-2.0
//! Litmus tests of the production publish and fetch: what they promise holds on every seed, and the loss of any one step is noticed.

use cxl_pool::line::Lines;
use cxl_pool::media::{RECORD_BYTES, Record};
use cxl_pool::{Error, Result};
use cxl_sim::{Failure, Scenario, Stats, World, WorldConfig, WritePath, explore, mutation_table, run_mutant};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const ROUNDS: u32 = 12;

fn record(version: u32) -> Record {
    Record { crc: 0, grant: 1, version, incarnation: 1, reserved: 0, data: [version as u8; RECORD_BYTES] }
}

/// Fetches a line's version. A writer that is switched away in the middle of a line on the path of stores and a flush leaves it torn for
/// as long as it likes, so a line that does not verify is asked for again.
fn version(lines: &Lines, index: u64) -> Result<u32> {
    loop {
        match lines.fetch::<Record>(index) {
            Ok(record) => return Ok(record.version),
            Err(Error::BadLine { .. }) => {}
            Err(other) => return Err(other),
        }
    }
}

fn world(seed: u64, write_path: WritePath) -> World {
    World::formatted(seed, WorldConfig { write_path, max_steps: 100_000, max_time_ns: 10_000_000_000, ..WorldConfig::default() })
}

/// One host publishes A then B; a host that fetches B then A never finds A behind B, nor either of them going back.
fn message_passing(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::OneUnit);
    let writer = world.add_host();
    world.spawn(writer, "writer", |env| {
        let lines = env.lines();
        for round in 1..=ROUNDS {
            lines.publish(0, record(round))?;
            lines.publish(1, record(round))?;
        }
        Ok(())
    });
    for _ in 0..2 {
        let reader = world.add_host();
        world.spawn(reader, "reader", |env| {
            let lines = env.lines();
            let (mut last_a, mut last_b) = (0, 0);
            for _ in 0..3 * ROUNDS {
                let b = version(&lines, 1)?;
                let a = version(&lines, 0)?;
                assert!(a >= b, "A is {a} after B was {b}");
                assert!(a >= last_a && b >= last_b, "went back from {last_a}, {last_b} to {a}, {b}");
                (last_a, last_b) = (a, b);
            }
            Ok(())
        });
    }
    world.run()
}

/// Two hosts publish their own line, then fetch the other's: at least one sees the other (write, then check).
fn store_buffering(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::BySeed);
    let seen = [Rc::new(Cell::new([false; ROUNDS as usize])), Rc::new(Cell::new([false; ROUNDS as usize]))];
    for me in 0..2 {
        let host = world.add_host();
        let seen = Rc::clone(&seen[me]);
        world.spawn(host, "host", move |env| {
            let lines = env.lines();
            // Both lines are in the cache, as after a long time of polling.
            for index in 0..2 * u64::from(ROUNDS) {
                version(&lines, index)?;
            }
            for round in 0..ROUNDS as usize {
                lines.publish((2 * round + me) as u64, record(1))?;
                let other = version(&lines, (2 * round + 1 - me) as u64)?;
                let mut all = seen.get();
                all[round] = other == 1;
                seen.set(all);
            }
            Ok(())
        });
    }
    let stats = world.run()?;
    let [first, second] = seen.map(|of| of.get());
    match (0..ROUNDS as usize).find(|&round| !first[round] && !second[round]) {
        Some(round) => Err(world.failure(format!("round {round}: neither host saw the other"))),
        None => Ok(stats),
    }
}

/// A poll sees what was published before it, however long it had the old line in its cache.
fn stale_poll(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::OneUnit);
    let (asking, answering) = (world.add_host(), world.add_host());
    world.spawn(asking, "asks", |env| {
        let (lines, platform) = (env.lines(), env.platform());
        for round in 1..=ROUNDS {
            lines.publish(0, record(round))?;
            let mut polls = 0;
            while version(&lines, 1)? != round {
                platform.relax(polls);
                polls += 1;
                assert!(polls < 2000, "no answer to {round}");
            }
        }
        Ok(())
    });
    world.spawn(answering, "answers", |env| {
        let (lines, platform) = (env.lines(), env.platform());
        let mut done = 0;
        let mut polls = 0;
        while done < ROUNDS {
            let asked = version(&lines, 0)?;
            assert!(asked == done || asked == done + 1, "asked {asked} after {done}");
            if asked > done {
                lines.publish(1, record(asked))?;
                done = asked;
            }
            platform.relax(polls);
            polls += 1;
            assert!(polls < 20_000, "no thread asks for {done}");
        }
        Ok(())
    });
    world.run()
}

/// A batch is at least as new as everything fetched before it, and what is fetched after it at least as new as the batch.
fn batch(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::OneUnit);
    let (writer, reader) = (world.add_host(), world.add_host());
    world.spawn(writer, "writer", |env| {
        let lines = env.lines();
        for round in 1..=ROUNDS {
            for index in 0..3 {
                lines.publish(index, record(round))?;
            }
        }
        Ok(())
    });
    world.spawn(reader, "reader", |env| {
        let lines = env.lines();
        let mut out = Vec::new();
        for _ in 0..2 * ROUNDS {
            let last = version(&lines, 2)?;
            lines.fetch_many::<Record>(&[0, 1], &mut out)?;
            let [Ok(first), Ok(second)] = out[..] else { panic!("a line does not verify") };
            assert!(first.version >= last && second.version >= last, "{} and {} after {last}", first.version, second.version);
            let after = version(&lines, 0)?;
            assert!(after >= second.version, "{after} after {}", second.version);
        }
        Ok(())
    });
    world.run()
}

static TORN: AtomicU64 = AtomicU64::new(0);

/// On the path of stores and a flush a line can be seen half written; it is never taken for a whole one.
fn torn_line(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::StoresAndFlush);
    let (writer, reader) = (world.add_host(), world.add_host());
    world.spawn(writer, "writer", |env| {
        let lines = env.lines();
        (1..=ROUNDS).try_for_each(|round| lines.publish(0, record(round)))
    });
    world.spawn(reader, "reader", |env| {
        let lines = env.lines();
        for _ in 0..2 * ROUNDS {
            match lines.fetch::<Record>(0) {
                Ok(got) => assert_eq!(got.data, [got.version as u8; RECORD_BYTES], "a mix was accepted"),
                Err(Error::BadLine { .. }) => {}
                Err(other) => return Err(other),
            }
            let raw = lines.fetch_raw(lines.layout().line_offset(cxl_pool::media::Region::Record, 0)?)?;
            if lines.open::<Record>(0, &raw).is_err() {
                TORN.fetch_add(1, SeqCst);
            }
        }
        Ok(())
    });
    world.run()
}

static TORN_COPIES: AtomicU64 = AtomicU64::new(0);

/// A block is copied in before its flag says so; a copy between two equal flags is the block that the flag names.
fn payload(seed: u64) -> std::result::Result<Stats, Failure> {
    const BYTES: usize = 300;
    let mut world = world(seed, WritePath::BySeed);
    let (writer, reader) = (world.add_host(), world.add_host());
    let at = world.layout().chunk_offset(1).expect("there is a second chunk") + 20;
    world.spawn(writer, "writer", move |env| {
        let (lines, memory) = (env.lines(), env.memory());
        for round in 1..=ROUNDS {
            lines.publish(0, record(2 * round - 1))?;
            memory.copy_in(at, &[round as u8; BYTES])?;
            memory.fence_stores();
            lines.publish(0, record(2 * round))?;
        }
        Ok(())
    });
    world.spawn(reader, "reader", move |env| {
        let (lines, memory) = (env.lines(), env.memory());
        for _ in 0..3 * ROUNDS {
            let Ok(before) = version(&lines, 0) else { continue };
            memory.flush_range(at, BYTES as u64)?;
            memory.fence_all();
            let mut block = [0; BYTES];
            memory.copy_out(at, &mut block)?;
            memory.fence_loads();
            let whole = block.iter().all(|&byte| byte == block[0]);
            TORN_COPIES.fetch_add(u64::from(!whole), SeqCst);
            if before % 2 == 0 && version(&lines, 0).is_ok_and(|after| after == before) {
                assert!(whole && block[0] as u32 == before / 2, "the block of {before} holds {} (whole: {whole})", block[0]);
            }
        }
        Ok(())
    });
    world.run()
}

/// A host sees its own writes at once and its reads of one line never go back, whatever fence is left out.
fn coherent_with_itself(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::BySeed);
    let (writer, reader) = (world.add_host(), world.add_host());
    world.spawn(writer, "writer", |env| {
        let (lines, memory) = (env.lines(), env.memory());
        let at = lines.layout().line_offset(cxl_pool::media::Region::Record, 0)?;
        for round in 1..=ROUNDS {
            lines.write(0, record(round))?;
            for _ in 0..3 {
                let own: Record = lines.open(0, &memory.load_line(at)?)?;
                assert_eq!(own.version, round, "the host does not see its own write");
            }
            if round % 3 == 0 {
                memory.fence_all();
            }
            memory.copy_in(at + 64 + 10, &[round as u8; 20])?;
            let mut own = [0; 20];
            memory.copy_out(at + 64 + 10, &mut own)?;
            assert_eq!(own, [round as u8; 20], "the host does not see its own bytes");
        }
        Ok(())
    });
    world.spawn(reader, "reader", |env| {
        let lines = env.lines();
        let mut last = 0;
        for _ in 0..3 * ROUNDS {
            let now = version(&lines, 0)?;
            assert!(now >= last, "went back from {last} to {now}");
            last = now;
        }
        Ok(())
    });
    world.run()
}

/// Threads of one host see each other's ordinary stores in program order, fenced or not.
fn sibling_stores(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut world = world(seed, WritePath::StoresAndFlush);
    let host = world.add_host();
    let at = |index| world.layout().line_offset(cxl_pool::media::Region::Record, index).expect("it exists");
    let (first, second) = (at(0), at(1));
    world.start(host, move |env| {
        env.spawn("writer", |env| {
            let lines = env.lines();
            (1..=ROUNDS).try_for_each(|round| {
                lines.write(0, record(round))?;
                lines.write(1, record(round))
            })
        });
        env.spawn("reader", move |env| {
            let memory = env.memory();
            for _ in 0..3 * ROUNDS {
                // One byte of the version: never torn.
                let version = |at| memory.load_line(at).map(|line| line.0[8]);
                let last = version(second)?;
                let before = version(first)?;
                assert!(before >= last, "{before} before {last}");
            }
            Ok(())
        });
    });
    world.run()
}

#[test]
fn siblings_see_stores_in_order() {
    explore("sibling_stores", 3000, sibling_stores);
}

const STEPS: [&str; 4] = ["publish.no_store_fence", "fetch.no_flush", "fetch.no_full_fence", "fetch.no_load_fence"];

#[test]
fn a_host_is_coherent_with_itself_even_without_fences() {
    explore("coherent_with_itself", 2000, coherent_with_itself);
    // Without flushes and fences the torn lines of the other path stay in the cache, so that only the version of whole lines counts.
    for step in ["publish.no_store_fence", "fetch.no_load_fence"] {
        assert!(run_mutant(step, &[("coherent_with_itself", coherent_with_itself)], 2000).is_none(), "{step}");
    }
}

const ALL: &[(&str, Scenario)] = &[
    ("message_passing", message_passing),
    ("store_buffering", store_buffering),
    ("stale_poll", stale_poll),
    ("batch", batch),
    ("torn_line", torn_line),
    ("payload", payload),
];

#[test]
fn message_passing_holds() {
    explore("message_passing", 3000, message_passing);
}

#[test]
fn store_buffering_holds() {
    explore("store_buffering", 3000, store_buffering);
}

#[test]
fn stale_poll_holds() {
    explore("stale_poll", 2000, stale_poll);
}

#[test]
fn batch_holds() {
    explore("batch", 2000, batch);
}

#[test]
fn torn_lines_are_never_accepted() {
    explore("torn_line", 2000, torn_line);
    assert!(TORN.load(SeqCst) > 100, "the simulator hardly tears lines: {}", TORN.load(SeqCst));
}

#[test]
fn payload_comes_before_its_flag() {
    explore("payload", 2000, payload);
    assert!(TORN_COPIES.load(SeqCst) > 100, "the simulator hardly tears copies: {}", TORN_COPIES.load(SeqCst));
}

#[test]
fn every_step_of_publish_and_fetch_is_needed() {
    let names = cxl_sim::names::of_pool().expect("the sources of the pool lie beside this crate");
    assert!(STEPS.iter().all(|step| names.mutants.contains(step)), "a mutant of the line recipes was renamed: {:?}", names.mutants);
    assert_eq!(mutation_table(&STEPS, ALL, 4000), Vec::<&str>::new(), "these mutants survived");
}

#[test]
fn every_litmus_test_notices_the_loss_of_what_it_is_about() {
    for (mutant, scenario) in [
        ("publish.no_store_fence", "message_passing"),
        ("publish.no_store_fence", "payload"),
        ("publish.no_store_fence", "batch"),
        ("fetch.no_flush", "stale_poll"),
        ("fetch.no_flush", "store_buffering"),
        ("fetch.no_full_fence", "store_buffering"),
        ("fetch.no_full_fence", "batch"),
        ("fetch.no_load_fence", "message_passing"),
        ("fetch.no_load_fence", "batch"),
    ] {
        let only: Vec<_> = ALL.iter().copied().filter(|of| of.0 == scenario).collect();
        assert!(run_mutant(mutant, &only, 8000).is_some(), "{scenario} does not notice {mutant}");
    }
}
