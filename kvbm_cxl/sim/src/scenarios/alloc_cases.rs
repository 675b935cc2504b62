// SPDX-License-Identifier: Apache-2.0
//! Memory that goes from one host to another while stores to it are still in a cache of the first, as choreographies (CACHE.md 12.6): each
//! holds on every seed, and fails with the rule dropped that it is about.

use super::Scenario;
use super::lent::{CHUNK_BYTES, stage};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, SimProcess, Stats};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] =
    &[("m1_host_of_a_dead_process_leaves", host_leaves), ("m2_machine_of_a_dead_process_joins_again", machine_joins_again)];
/// Visited by each run in which memory of one host went to the other.
pub const PLAYED: &str = "alloc_scene.played";

/// Chunks of the pool.
const CHUNKS: u64 = 3;
/// Deadline of locks, in milliseconds.
const TIMEOUT_MS: u64 = 500_000;
/// How far the play is: all have joined, the process has stored, its host has ended, the next owner is through.
type Progress = Rc<Cell<u32>>;
const READY: u32 = 2;
const STORED: u32 = 3;
const ENDED: u32 = 4;
const LOOKED: u32 = 5;

/// The machine that stays is the first.
fn cluster(seed: u64) -> Cluster {
    stage(seed, 2, (1, 1), CHUNKS)
}

fn until(env: &Env, progress: &Progress, least: u32) {
    while progress.get() < least {
        env.platform().sleep_ns(20_000);
    }
}

fn allocator(host: &Host) -> Result<Allocator> {
    Allocator::attach(host, LocalArea::of(host)?, AllocConfig { lock_timeout_ms: TIMEOUT_MS, spare_chunks: 0 })
}

/// Takes all memory that there is, stores to it, and leaves that in the cache.
fn store_everywhere(env: &Env, host: &Host) -> Result<()> {
    let allocator = allocator(host)?;
    for _ in 0..CHUNKS {
        let block = allocator.alloc(CHUNK_BYTES)?;
        env.store(block.offset, &vec![0x66; CHUNK_BYTES as usize])?;
    }
    env.memory().fence_all();
    // A process that dies gives nothing back.
    std::mem::forget(allocator);
    Ok(())
}

/// Gets the memory, writes to it past its caches, and sees whether anybody else does.
fn next_owner(env: &Env, config: &HostConfig, progress: &Progress) -> Result<()> {
    let host = join(env, config)?;
    let allocator = allocator(&host)?;
    progress.set(progress.get() + 1);
    until(env, progress, ENDED);
    let mut blocks = Vec::new();
    while blocks.is_empty() {
        allocator.adopt_dead()?;
        match allocator.alloc(CHUNK_BYTES) {
            Ok(block) => blocks.push(block),
            Err(Error::Full { .. }) => env.platform().sleep_ns(200_000),
            Err(error) => return Err(error),
        }
    }
    while let Ok(block) = allocator.alloc(CHUNK_BYTES) {
        blocks.push(block);
    }
    blocks.iter().try_for_each(|block| env.memory().copy_in(block.offset, &vec![0x99; CHUNK_BYTES as usize]))?;
    env.memory().fence_all();
    for _ in 0..100 {
        for offset in blocks.iter().flat_map(|block| (block.offset..block.offset + CHUNK_BYTES).step_by(LINE_BYTES)) {
            if env.view(|view| view.line(offset).0 != [0x99; LINE_BYTES]) {
                env.fail(format!("P3: somebody wrote to {offset:#x}, which is this process's"));
            }
        }
        env.platform().sleep_ns(20_000);
    }
    progress.set(LOOKED);
    env.point(PLAYED);
    Ok(())
}

/// M1: a process dies, and the last one of its host leaves the pool.
fn host_leaves(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let (progress, dying) = (Progress::default(), Rc::new(Cell::new(None::<SimProcess>)));
    let (hosts, config) = (cluster.hosts.clone(), cluster.host_config.clone());
    let (of, with) = (Rc::clone(&progress), config.clone());
    cluster.world.start(hosts[0], move |env| {
        let (of, with) = (Rc::clone(&of), with.clone());
        env.spawn("next owner", move |env| next_owner(&env, &with, &of));
    });
    let (of, with, died) = (Rc::clone(&progress), config.clone(), Rc::clone(&dying));
    cluster.world.start(hosts[1], move |env| {
        let (of, with, died) = (Rc::clone(&of), with.clone(), Rc::clone(&died));
        env.spawn("main", move |env| {
            died.set(Some(env.process()));
            let host = join(&env, &with)?;
            until(&env, &of, READY);
            store_everywhere(&env, &host)?;
            of.set(STORED);
            env.exit()
        });
    });
    let (of, with) = (Rc::clone(&progress), config);
    cluster.world.start(hosts[1], move |env| {
        let (of, with, dying) = (Rc::clone(&of), with.clone(), Rc::clone(&dying));
        env.spawn("sibling", move |env| {
            let host = join(&env, &with)?;
            of.set(of.get() + 1);
            until(&env, &of, STORED);
            while dying.get().is_some_and(|dying| env.view(|view| view.is_alive(dying))) {
                env.yield_now()?;
            }
            host.leave()?;
            of.set(ENDED);
            Ok(())
        });
    });
    cluster.world.run()
}

/// M2: the only process of a host dies, and its machine joins again.
fn machine_joins_again(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let progress = Progress::default();
    let (hosts, config) = (cluster.hosts.clone(), cluster.host_config.clone());
    let (of, with) = (Rc::clone(&progress), config.clone());
    cluster.world.start(hosts[0], move |env| {
        let (of, with) = (Rc::clone(&of), with.clone());
        env.spawn("next owner", move |env| next_owner(&env, &with, &of));
    });
    let (of, with) = (Rc::clone(&progress), config);
    cluster.world.start(hosts[1], move |env| {
        let (of, with) = (Rc::clone(&of), with.clone());
        env.spawn("main", move |env| {
            if env.generation() == 0 {
                let host = join(&env, &with)?;
                of.set(of.get() + 1);
                until(&env, &of, READY);
                store_everywhere(&env, &host)?;
                of.set(STORED);
                env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: Some(100_000) });
                until(&env, &of, u32::MAX);
            }
            // It says of its former life that it has ended, and does not look after its memory.
            let _host = join(&env, &with)?;
            of.set(ENDED);
            until(&env, &of, LOOKED);
            Ok(())
        });
    });
    cluster.world.run()
}
