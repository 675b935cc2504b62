// SPDX-License-Identifier: Apache-2.0
//! The two recipes below everything else: who fetches what was published second, then what was published first, finds both.
//!
//! Checked: I2 and I3 (protocols/CACHE.md): program order of publishes is the order that other hosts see, and a fetch is never older than
//! one before it.

use crate::{Env, Failure, Random, Stats, World, WorldConfig, WritePath};
use cxl_pool::media::Summary;
use cxl_pool::{Error, Result};

/// Rounds of the writer.
const ROUNDS: u64 = 12;

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
    for _ in 0..sizes.between(1, 2) {
        let reader = world.add_host();
        world.spawn(reader, "reader", |env| read(&env));
    }
    world.run()
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
