// SPDX-License-Identifier: Apache-2.0
//! Memory that goes from one host to another while stores to it are still in a cache of the first, or while a free of it is under way, as
//! choreographies (CACHE.md 12.6): each holds on every seed, and fails with the rule dropped that it is about.

use super::Scenario;
use super::setup::{CHUNK_BYTES, Cluster, join};
use crate::{Env, Failure, Fault, Planned, SimHost, SimProcess, Stats, When};
use cxl_pool::alloc::{AllocConfig, Allocator, Block, LocalArea, block_of};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::media::{Claim, MediaLine};
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("m1_host_of_a_dead_process_leaves", host_leaves),
    ("m2_machine_of_a_dead_process_joins_again", machine_joins_again),
    ("m3_host_is_gone_before_it_tells_of_a_free", block_freed_here),
    ("m4_host_is_gone_before_it_tells_of_a_free_passed_on", block_passed_on),
    ("m5_host_of_a_process_that_died_is_gone_before_it_tells_of_a_free", block_of_the_dead),
    ("m6_line_of_claims_is_damaged", line_of_claims),
];
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
    Cluster::with_chunks(seed, 2, None, CHUNKS)
}

fn until(env: &Env, is_so: impl Fn() -> bool) {
    while !is_so() {
        env.platform().sleep_ns(20_000);
    }
}

fn allocator(host: &Host) -> Result<Allocator> {
    Allocator::attach(host, LocalArea::of(host)?, AllocConfig { lock_timeout_ms: Some(TIMEOUT_MS), spare_chunks: 0 })
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

/// Gets the memory, writes to it past its caches, and sees whether another process does.
fn next_owner(env: &Env, config: &HostConfig, progress: &Progress) -> Result<()> {
    let host = join(env, config)?;
    let allocator = allocator(&host)?;
    progress.set(progress.get() + 1);
    until(env, || progress.get() >= ENDED);
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
                env.fail(format!("P3: another process wrote to {offset:#x}, which is this process's"));
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
            until(&env, || of.get() >= READY);
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
            until(&env, || of.get() >= STORED);
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
                until(&env, || of.get() >= READY);
                store_everywhere(&env, &host)?;
                of.set(STORED);
                env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: Some(100_000) });
                until(&env, || false);
            }
            // It says of its former life that it has ended, and does not look after its memory.
            let _host = join(&env, &with)?;
            of.set(ENDED);
            until(&env, || of.get() >= LOOKED);
            Ok(())
        });
    });
    cluster.world.run()
}

/// M3 to M5: a host frees a block that another one sent, and its machine is gone for good before it has said so. The host that adopts its
/// chunks frees the blocks sent to it: by then the block must not have been given to another process.
///
/// M3: the process that has the chunk works the message off itself.
fn block_freed_here(seed: u64) -> std::result::Result<Stats, Failure> {
    untold(seed, Fault::PauseThread { for_ns: u64::MAX }, |env, host, scene| {
        if scene.kept.get().is_some() {
            return Ok(());
        }
        let allocator = Rc::new(allocator(host)?);
        let block = keep_first(host, &allocator, scene)?;
        let upkeep = Rc::clone(&allocator);
        env.spawn_daemon("upkeep", move |env| serve(&env, &upkeep));
        keep_again(env, &allocator, block, scene, || Ok(()))
    })
}

/// M4: it is another process of the host that does.
fn block_passed_on(seed: u64) -> std::result::Result<Stats, Failure> {
    untold(seed, Fault::PauseThread { for_ns: u64::MAX }, |env, host, scene| {
        let allocator = allocator(host)?;
        if scene.kept.get().is_some() {
            return serve(env, &allocator);
        }
        let block = keep_first(host, &allocator, scene)?;
        until(env, || scene.is_taken.get());
        keep_again(env, &allocator, block, scene, || allocator.service_round())
    })
}

/// M5: the process dies over it, and another one of the host takes its chunks over.
fn block_of_the_dead(seed: u64) -> std::result::Result<Stats, Failure> {
    untold(seed, Fault::CrashProcess { restart_after_ns: None }, |env, host, scene| {
        let Some((_, _, block)) = scene.kept.get() else {
            let allocator = allocator(host)?;
            keep_first(host, &allocator, scene)?;
            return serve(env, &allocator);
        };
        until(env, || scene.is_taken.get());
        keep_again(env, &allocator(host)?, block, scene, || Ok(()))
    })
}

/// Two processes of a host make `owner` after each other, the second when the first has kept a block; another host sends the block to be
/// freed. `fault` strikes who has worked the message off and not said so.
fn untold(seed: u64, fault: Fault, owner: fn(&Env, &Host, &Rc<Scene>) -> Result<()>) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let (hosts, config, scene) = (cluster.hosts.clone(), cluster.host_config.clone(), Rc::new(Scene::default()));
    cluster.world.plan(Planned { when: When::Point(TAKEN, 1), host: Some(hosts[1]), fault });
    let (of, with, other) = (Rc::clone(&scene), config.clone(), hosts[1]);
    cluster.world.start(hosts[0], move |env| {
        let (of, with) = (Rc::clone(&of), with.clone());
        env.spawn("sender", move |env| send_and_adopt(&env, &with, &of, other));
    });
    for (name, comes_second) in [("owner", false), ("sibling", true)] {
        let (of, with) = (Rc::clone(&scene), config.clone());
        cluster.world.start(hosts[1], move |env| {
            let (of, with) = (Rc::clone(&of), with.clone());
            env.spawn(name, move |env| {
                let host = join(&env, &with)?;
                until(&env, || !comes_second || of.kept.get().is_some());
                owner(&env, &host, &of)
            });
        });
    }
    cluster.world.run()
}

/// A message was processed, and its sender is about to learn of it.
const TAKEN: &str = "alloc.box_taken";

/// What both sides know.
#[derive(Default)]
struct Scene {
    /// Slot and incarnation of the block's owner, and the block, once it is kept.
    kept: Cell<Option<(u16, u32, Block)>>,
    /// Whether the block was sent to be freed, so long ago that a process has it in hand.
    is_taken: Cell<bool>,
    /// Whether its owner allocated and retained it again.
    is_kept_again: Cell<bool>,
}

fn serve(env: &Env, allocator: &Allocator) -> Result<()> {
    loop {
        allocator.service_round()?;
        env.platform().sleep_ns(50_000);
    }
}

fn keep_first(host: &Host, allocator: &Allocator, scene: &Scene) -> Result<Block> {
    let block = allocator.alloc(LINE_BYTES as u64)?;
    allocator.keep(block.offset)?;
    scene.kept.set(Some((host.slot(), host.incarnation(), block)));
    Ok(block)
}

/// Tries to get the block again once it was sent to be freed, keeps it, and is gone.
fn keep_again(env: &Env, allocator: &Allocator, block: Block, scene: &Scene, mut between: impl FnMut() -> Result<()>) -> Result<()> {
    let mut rounds_left = 100;
    while rounds_left > 0 {
        rounds_left -= u32::from(scene.is_taken.get());
        between()?;
        let found = allocator.alloc(LINE_BYTES as u64)?;
        if found == block {
            allocator.keep(block.offset)?;
            scene.is_kept_again.set(true);
            break;
        }
        allocator.free(found.offset)?;
        env.platform().sleep_ns(20_000);
    }
    env.inflict(env.host(), Fault::CrashMachine { restart_after_ns: None });
    env.exit()
}

/// Sends the block to be freed, and adopts what its owner leaves.
fn send_and_adopt(env: &Env, config: &HostConfig, scene: &Scene, owner: SimHost) -> Result<()> {
    let host = join(env, config)?;
    let allocator = allocator(&host)?;
    until(env, || scene.kept.get().is_some());
    let Some((slot, incarnation, block)) = scene.kept.get() else { return Ok(()) };
    allocator.free(block.offset)?;
    let mut rounds = 0;
    while env.view(|view| view.is_up(owner)) {
        allocator.service_round()?;
        rounds += u32::from(allocator.usage().pending_frees == 0);
        scene.is_taken.set(rounds > 100);
        env.platform().sleep_ns(20_000);
    }
    while allocator.adopt_dead()? == 0 {
        host.declare_dead(slot, incarnation)?;
        env.platform().sleep_ns(200_000);
    }
    let (is_kept, was_kept_again) = (block_of(&env.lines(), block.offset)?.is_some(), scene.is_kept_again.get());
    if is_kept != was_kept_again {
        env.fail(format!("{block:?} is kept: {is_kept}, and its owner had it again: {was_kept_again}"));
    }
    env.point(PLAYED);
    Ok(())
}

/// M6: the device loses the line with the claims of a running host. It may say anything, so it counts as a claim of every chunk.
fn line_of_claims(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let (hosts, config, progress) = (cluster.hosts.clone(), cluster.host_config.clone(), Progress::default());
    let (of, with) = (Rc::clone(&progress), config.clone());
    cluster.world.spawn(hosts[0], "another", move |env| {
        let host = join(&env, &with)?;
        let allocator = allocator(&host)?;
        until(&env, || of.get() >= STORED);
        allocator.adopt_dead()?;
        match allocator.alloc(CHUNK_BYTES) {
            Err(Error::Full { .. }) => {}
            Err(error) => return Err(error),
            Ok(block) => env.fail(format!("V7: {block:?} is another host's, whose claims cannot be read")),
        }
        of.set(LOOKED);
        env.point(PLAYED);
        Ok(())
    });
    let (of, with) = (progress, config);
    cluster.world.spawn(hosts[1], "owner", move |env| {
        let host = join(&env, &with)?;
        let allocator = allocator(&host)?;
        for _ in 0..CHUNKS {
            allocator.alloc(CHUNK_BYTES)?;
        }
        let layout = env.lines().layout().clone();
        let offset = layout.line_offset(Claim::REGION, u64::from(host.slot()) * layout.claim_lines())?;
        env.inflict(env.host(), Fault::LoseLine { offset });
        of.set(STORED);
        until(&env, || of.get() >= LOOKED);
        Ok(())
    });
    cluster.world.run()
}
