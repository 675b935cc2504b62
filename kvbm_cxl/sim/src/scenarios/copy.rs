// SPDX-License-Identifier: Apache-2.0
//! Payload with the line that names it, with the production copy engine: a reader that finds the line unchanged around its pull has the
//! bytes of that publication.
//!
//! Checked: I4 and I5 (protocols/CACHE.md C18, C19). One host publishes again and again in the same place, as an owner does that evicts and
//! reserves: the line says WRITING (odd) before the first byte and READY (even) after the last one. Nothing else protects the payload
//! here, no pin and no checksum, so that every step of the copies is needed. Some readers have told the device of the place before, and
//! some tell it at any time: what such a prefetch brought into their caches is as old as it likes.

use crate::{Env, Failure, Random, Stats, World, WorldConfig, WritePath};
use cxl_pool::copy::{AheadEngine, Checksum, CopyConfig, CopyEngine, CpuEngine, ReadAhead, ReadList, WriteList, checksum_of};
use cxl_pool::media::Summary;
use cxl_pool::{Error, Result};
use std::sync::Arc;

/// Publications.
const ROUNDS: u64 = 8;

/// What one run copies, and how.
#[derive(Clone, Copy)]
struct Plan {
    /// Distance of the payload from the start of the data area, in bytes: also such that it begins inside of a line.
    skew: u64,
    len_bytes: usize,
    /// Pieces of the writer's list; the reader cuts elsewhere.
    piece_bytes: usize,
    config: CopyConfig,
    checksum: Checksum,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed ^ 0x0c09_1e5e_ed00_0001);
    let plan = Plan {
        skew: sizes.pick(&[0, 0, 40, 63]),
        len_bytes: sizes.pick(&[64, 200, 600, 600, 6000]),
        piece_bytes: sizes.pick(&[33, 160, 2000, 8000]),
        config: CopyConfig { workers: 0, window_bytes: 4096, stream_from_bytes: sizes.pick(&[0, u64::MAX]), ..CopyConfig::alone() },
        checksum: sizes.pick(&[Checksum::Off, Checksum::Xxh3]),
    };
    let mut ahead = Random::new(seed ^ 0x0a5e_ad0f_0c09_1e5e);
    let read_ahead = ahead.pick(&[ReadAhead::Off, ReadAhead::Off, ReadAhead::Blocks(1)]);
    let plan = Plan { config: CopyConfig { read_ahead, ..plan.config }, ..plan };
    let config = WorldConfig { write_path: WritePath::BySeed, ..WorldConfig::default() };
    let mut world = World::formatted(seed, config);
    let writer = world.add_host();
    world.spawn(writer, "writer", move |env| write(&env, plan));
    for _ in 0..sizes.between(1, 2) {
        let reader = world.add_host();
        world.spawn(reader, "reader", move |env| read(&env, plan));
    }
    world.run()
}

/// The payload of one publication: no two bytes at one place are the same in two of them.
fn payload(round: u64, len_bytes: usize) -> Vec<u8> {
    (0..len_bytes).map(|index| (round as usize * 29 + index * 7 + index / 64) as u8).collect()
}

fn write(env: &Env, plan: Plan) -> Result<()> {
    let (lines, memory, engine) = (env.lines(), env.memory(), CpuEngine::new(plan.config));
    let at = lines.layout().data_offset() + plan.skew;
    for round in 1..=ROUNDS {
        lines.publish(0, Summary { heartbeat: 2 * round - 1, ..Summary::default() })?;
        let bytes = payload(round, plan.len_bytes);
        let sum = engine.publish(&*memory, &WriteList::gather(at, bytes.chunks(plan.piece_bytes)), plan.checksum)?;
        if sum.is_some_and(|sum| sum != checksum_of(&bytes)) {
            env.fail(format!("I4: publication {round} has another checksum than its bytes"));
        }
        lines.publish(0, Summary { heartbeat: 2 * round, ..Summary::default() })?;
        env.platform().sleep_ns(1 + env.below(20_000) as u64);
    }
    Ok(())
}

/// The line's number, asked for again while it is half written.
fn number(env: &Env) -> Result<u64> {
    for round in 0.. {
        match env.lines().fetch::<Summary>(0) {
            Err(Error::BadLine { .. }) => env.platform().relax(round),
            other => return Ok(other?.heartbeat),
        }
    }
    Err(Error::Invalid("the line was never whole".into()))
}

fn read(env: &Env, plan: Plan) -> Result<()> {
    let (layout, memory) = (env.lines().layout().clone(), env.memory());
    let engine = AheadEngine::over(Arc::new(CpuEngine::new(plan.config)), memory.clone(), &plan.config, None);
    let tells = plan.config.read_ahead != ReadAhead::Off;
    let at = layout.data_offset() + plan.skew;
    let mut last = 0;
    while last < 2 * ROUNDS {
        let before = number(env)?;
        if before == 0 || before % 2 == 1 || before == last {
            if tells && env.below(2) == 0 {
                // Of a publication that is not there yet, as who walks a chain may.
                memory.prefetch_lines(&[at / 64 * 64])?;
            }
            env.platform().sleep_ns(1 + env.below(2_000) as u64);
            continue;
        }
        let mut bytes = vec![0; plan.len_bytes];
        let mut list = ReadList::scatter(at, bytes.chunks_mut(plan.piece_bytes + 17));
        let sum = engine.pull(&*memory, &mut list, plan.checksum)?;
        if sum.is_some_and(|sum| sum != checksum_of(&bytes)) {
            env.fail("I5: the checksum of a pull is not that of the bytes it delivered");
        }
        if number(env)? != before {
            continue;
        }
        let expected = payload(before / 2, plan.len_bytes);
        if let Some(wrong) = bytes.iter().zip(&expected).position(|(byte, expected)| byte != expected) {
            env.fail(format!("I5: byte {wrong} of publication {} is another one's, the line unchanged", before / 2));
        }
        last = before;
    }
    Ok(())
}
