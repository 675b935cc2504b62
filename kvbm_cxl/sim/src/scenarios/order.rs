// SPDX-License-Identifier: Apache-2.0
//! The two lowest-level recipes: a host that fetches the second published line, then the first, finds both.
//!
//! A sibling settles a line that a thread of its own host publishes, and another host looks whether it is in the memory.
//!
//! Checked: I2 and I3 (protocols/CACHE.md): program order of publishes is the order that other hosts see, and a fetch is never older than
//! one before it.

use crate::{Env, Failure, Random, Stats, World, WorldConfig, WritePath};
use cxl_pool::media::{MediaLine, Summary};
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Rounds of the writer.
const ROUNDS: u64 = 12;

/// The line that is settled.
const SETTLED: u64 = 2;

/// Its outcome.
#[derive(Default)]
struct Progress {
    settled: Cell<u64>,
    checked: Cell<u64>,
}

impl Progress {
    fn wait(&self, env: &Env, is_so: impl Fn(&Progress) -> bool) {
        while !is_so(self) {
            env.platform().relax(0);
        }
    }
}

type Work = fn(&Env, &Progress) -> Result<()>;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed);
    let config = WorldConfig { write_path: WritePath::BySeed, ..WorldConfig::default() };
    let mut world = World::formatted(seed, config);
    let writer = world.add_host();
    world.spawn(writer, "writer", |env| {
        let lines = env.lines();
        (1..=ROUNDS).try_for_each(|heartbeat| (0..2).try_for_each(|line| lines.publish(line, Summary { heartbeat, ..Summary::default() })))
    });
    let checker = world.add_host();
    let progress = Rc::<Progress>::default();
    for (name, host, work) in [("granter", writer, grant as Work), ("sibling", writer, settle), ("checker", checker, check_settled)] {
        let progress = Rc::clone(&progress);
        world.spawn(host, name, move |env| work(&env, &progress));
    }
    for _ in 0..sizes.between(1, 2) {
        let reader = world.add_host();
        world.spawn(reader, "reader", |env| read(&env));
    }
    world.run()
}

/// Publishes the line that is settled, again once it was looked at.
fn grant(env: &Env, progress: &Progress) -> Result<()> {
    for heartbeat in 1..=ROUNDS {
        env.lines().publish(SETTLED, Summary { heartbeat, ..Summary::default() })?;
        progress.wait(env, |progress| progress.checked.get() == heartbeat);
    }
    Ok(())
}

/// Settles what the granter, on the same host, may have written into the cache only.
fn settle(env: &Env, progress: &Progress) -> Result<()> {
    let lines = env.lines();
    while progress.settled.get() < ROUNDS {
        match lines.fetch::<Summary>(SETTLED) {
            Ok(found) if found.heartbeat > progress.settled.get() => {
                lines.settle::<Summary>(SETTLED)?;
                progress.settled.set(found.heartbeat);
            }
            // Half written so far, or not at all.
            Ok(_) | Err(Error::BadLine { .. }) => env.platform().relax(0),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Settled data is whole in memory, for every other host to fetch: it is not written again before.
fn check_settled(env: &Env, progress: &Progress) -> Result<()> {
    let lines = env.lines();
    let offset = lines.layout().line_offset(Summary::REGION, SETTLED)?;
    for heartbeat in 1..=ROUNDS {
        progress.wait(env, |progress| progress.settled.get() == heartbeat);
        let found = lines.open::<Summary>(SETTLED, &lines.fetch_raw(offset)?);
        if !matches!(&found, Ok(found) if found.heartbeat == heartbeat) {
            env.fail(format!("I3: {heartbeat} was settled, and the memory holds {found:?}"));
        }
        progress.checked.set(heartbeat);
    }
    Ok(())
}

fn read(env: &Env) -> Result<()> {
    let (lines, platform) = (env.lines(), env.platform());
    let mut last = 0;
    for round in 0.. {
        let fetched = lines.fetch::<Summary>(1).and_then(|second| Ok((second.heartbeat, lines.fetch::<Summary>(0)?.heartbeat)));
        let (second, first) = match fetched {
            Ok(fetched) => fetched,
            // Half written so far.
            Err(Error::BadLine { .. }) => {
                platform.relax(round);
                continue;
            }
            Err(error) => return Err(error),
        };
        if first < second || second < last {
            env.fail(format!("I3: {first} was published before {second}, which was fetched before it, and {last} before"));
        }
        last = second;
        if last == ROUNDS {
            break;
        }
        platform.relax(round);
    }
    Ok(())
}
