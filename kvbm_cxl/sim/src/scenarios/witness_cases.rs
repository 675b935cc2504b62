// SPDX-License-Identifier: Apache-2.0
//! Containers of one machine whose end its kernel certifies, as choreographies (LOCKS.md 12.19): each holds on every seed, and fails with
//! the rule dropped that it is about. Machine 0 has the manager's seat and gets the memory; the containers are on machine 1.

use super::Scenario;
use super::setup::{CHUNK_BYTES, Cluster, REST_NS, join, until};
use crate::{Env, Failure, Fault, Planned, SimHost, Stats, When};
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::media::{DeathLine, MediaLine, Region};
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("w1_container_that_crashed_is_released", released),
    ("w2_pool_full_of_containers_that_crashed", succeeded),
    ("w3_container_comes_back_without_its_memory", comes_back),
    ("w4_silent_host_under_another_kernel", elsewhere),
    ("w5_process_attaches_while_the_last_one_dies", attaches),
    ("w6_twin_under_one_kernel", twin),
    ("w7_rows_of_a_vacant_seat_are_damaged", beside_damaged_rows),
    ("w8_reported_beside_damaged_rows", reported_beside_damaged_rows),
    ("w9_joiner_with_the_only_seat_stands_still_elsewhere", joins_elsewhere),
    ("w10_joiners_die_with_the_only_seat", joiners_die),
    ("w11_death_is_known_before_the_silence_is_long", before_the_fence),
];
/// Visited by each run that came to its end.
pub const PLAYED: &str = "witness_scene.played";

/// Chunks of the pool.
const CHUNKS: u64 = 3;
/// Deadline of locks, in milliseconds.
const TIMEOUT_MS: u64 = 500_000;
/// Longer than a silent host is waited for, in nanoseconds.
const LONG_NS: u64 = 200_000_000;

/// Events so far.
#[derive(Default)]
struct Scene {
    joined: Cell<u32>,
    has_stored: Cell<bool>,
    /// Slot and incarnation of the container that stores.
    storing: Cell<(u16, u32)>,
    has_ended: Cell<bool>,
    has_looked: Cell<bool>,
}

type Shared = Rc<Scene>;

/// Two machines, and `containers` more hosts on the second one.
fn cluster(seed: u64, slots: usize, containers: usize) -> (Cluster, Vec<SimHost>, HostConfig) {
    cluster_with_seats(seed, slots, containers, None)
}

/// The same over a pool with so many seats.
fn cluster_with_seats(seed: u64, slots: usize, containers: usize, seats: Option<u32>) -> (Cluster, Vec<SimHost>, HostConfig) {
    let mut cluster = Cluster::with_chunks(seed, slots, seats, CHUNKS);
    let mut hosts = cluster.hosts.clone();
    hosts.extend((0..containers).map(|_| cluster.world.add_container(cluster.hosts[1])));
    let config = cluster.host_config.clone();
    (cluster, hosts, config)
}

/// Starts `body` as the only thread of a process, once.
fn play(cluster: &mut Cluster, host: SimHost, scene: &Shared, body: impl Fn(&Env, &Scene) -> Result<()> + 'static) {
    let scene = Rc::clone(scene);
    cluster.world.spawn(host, "main", move |env| body(&env, &scene));
}

fn count(scene: &Scene) {
    scene.joined.set(scene.joined.get() + 1);
}

fn allocator(host: &Host) -> Result<Allocator> {
    Allocator::attach(host, LocalArea::of(host)?, AllocConfig { lock_timeout_ms: Some(TIMEOUT_MS), spare_chunks: 0 })
}

/// Takes all memory that there is, stores to it, leaves that in the caches, and dies.
fn stores_and_dies(env: &Env, config: &HostConfig, scene: &Scene, others: u32) -> Result<()> {
    let host = join(env, config)?;
    scene.storing.set((host.slot(), host.incarnation()));
    count(scene);
    until(env, || scene.joined.get() > others);
    let allocator = allocator(&host)?;
    for _ in 0..CHUNKS {
        let block = allocator.alloc(CHUNK_BYTES)?;
        env.store(block.offset, &vec![0x66; CHUNK_BYTES as usize])?;
    }
    env.memory().fence_all();
    // A process that dies gives nothing back.
    std::mem::forget(allocator);
    scene.has_stored.set(true);
    env.exit()
}

/// Gets the memory, writes to it past its caches, and sees whether any other host does.
fn next_owner(env: &Env, host: &Host, scene: &Scene) -> Result<()> {
    let allocator = allocator(host)?;
    let mut blocks = Vec::new();
    while blocks.is_empty() {
        allocator.adopt_dead()?;
        match allocator.alloc(CHUNK_BYTES) {
            Ok(block) => blocks.push(block),
            Err(Error::Full { .. }) => env.platform().sleep_ns(10 * REST_NS),
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
                env.fail(format!("P3: another host wrote to {offset:#x}, which is this process's"));
            }
        }
        env.platform().sleep_ns(REST_NS);
    }
    scene.has_looked.set(true);
    env.point(PLAYED);
    Ok(())
}

/// Joins, and takes released slots.
fn takes_over(env: &Env, config: &HostConfig, scene: &Scene) -> Result<()> {
    let host = join(env, config)?;
    count(scene);
    until(env, || scene.has_stored.get());
    next_owner(env, &host, scene)
}

/// Joins, and asks its kernel for the end of others.
fn looks_for_the_dead(env: &Env, config: &HostConfig, scene: &Scene) -> Result<()> {
    let host = join(env, config)?;
    count(scene);
    look_for_the_dead(env, &host, scene)
}

fn look_for_the_dead(env: &Env, host: &Host, scene: &Scene) -> Result<()> {
    while !scene.has_looked.get() {
        match host.witness_round() {
            Ok(_) | Err(Error::BadLine { .. } | Error::Timeout { .. }) => {}
            Err(error) => return Err(error),
        }
        env.platform().sleep_ns(10 * REST_NS);
    }
    Ok(())
}

/// W1: a container crashed. Another one on its machine states its end, through a seat of its own or the manager's.
fn released(seed: u64) -> std::result::Result<Stats, Failure> {
    released_after(seed, None)
}

/// `suspect_ms`: that of all hosts, where it is not the usual one.
fn released_after(seed: u64, suspect_ms: Option<u64>) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, mut config) = cluster(seed, 3, 1);
    config.suspect_ms = suspect_ms.unwrap_or(config.suspect_ms);
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| takes_over(env, &with, scene));
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| stores_and_dies(env, &with, scene, 2));
    play(&mut cluster, hosts[2], &scene, move |env, scene| looks_for_the_dead(env, &config, scene));
    cluster.world.run()
}

/// W1 with a sibling of the requesting container, while `planned` strikes at the host that it is about: it starts again, and continues.
pub fn run_with(seed: u64, planned: Planned) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster(seed, 3, 1);
    cluster.world.plan(planned);
    let scene = Shared::default();
    let again = |cluster: &mut Cluster, host: SimHost, body: fn(&Env, &HostConfig, &Scene) -> Result<()>| {
        let (scene, config) = (Rc::clone(&scene), config.clone());
        cluster.world.start(host, move |env| {
            let (scene, config) = (Rc::clone(&scene), config.clone());
            env.spawn("main", move |env| {
                loop {
                    match body(&env, &config, &scene) {
                        // A host that stood still for longer than its lease: it joins again, and continues.
                        Err(Error::Fenced { .. }) => {}
                        other => return other,
                    }
                }
            });
        });
    };
    again(&mut cluster, hosts[0], takes_over);
    again(&mut cluster, hosts[2], looks_for_the_dead);
    again(&mut cluster, hosts[2], |env, config, scene| {
        until(env, || scene.joined.get() >= 3);
        let _host = join(env, config)?;
        until(env, || scene.has_looked.get());
        Ok(())
    });
    again(&mut cluster, hosts[1], |env, config, scene| stores_and_dies(env, config, scene, 2));
    cluster.world.run()
}

/// W2: a container crashed, and the pool has no other slot. One that comes vouches for its end, and gets the slot.
fn succeeded(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster(seed, 2, 1);
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| takes_over(env, &with, scene));
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| stores_and_dies(env, &with, scene, 1));
    play(&mut cluster, hosts[2], &scene, move |env, scene| {
        until(env, || scene.has_stored.get());
        let _host = join(env, &config)?;
        until(env, || scene.has_looked.get());
        Ok(())
    });
    cluster.world.run()
}

/// W3: a container crashed, and comes back under its identity with a new state directory: nothing there tells what it left.
fn comes_back(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster(seed, 3, 0);
    let twin = cluster.world.add_twin(hosts[1]);
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| takes_over(env, &with, scene));
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| stores_and_dies(env, &with, scene, 1));
    play(&mut cluster, twin, &scene, move |env, scene| {
        until(env, || scene.has_stored.get());
        let _host = join(env, &config)?;
        until(env, || scene.has_looked.get());
        Ok(())
    });
    cluster.world.run()
}

/// Fails if a living host, which continues as `host`, is stated dead.
fn must_not_be_dead(env: &Env, host: &Host) {
    let (slot, incarnation) = (usize::from(host.slot()), host.incarnation());
    let lines = env.lines();
    let dead = env.view(|view| {
        let rows = (0..view.layout().geometry().all_seats()).map(|seat| {
            let index = seat * view.layout().geometry().fence_lines();
            let offset = view.layout().line_offset(DeathLine::REGION, index).ok()?;
            lines.open::<DeathLine>(index, &view.line(offset)).ok().map(|row| row.dead[slot])
        });
        rows.flatten().max().unwrap_or(0)
    });
    if dead >= incarnation {
        env.fail(format!("V8: slot {slot} incarnation {incarnation} lives and is stated dead"));
    }
}

/// W4: a host under another kernel falls silent and is fenced. No other kernel knows what became of it.
fn elsewhere(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, _, config) = cluster(seed, 3, 0);
    let far = cluster.world.add_host();
    let hosts = cluster.hosts.clone();
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| {
        let _host = join(env, &with)?;
        count(scene);
        until(env, || scene.has_looked.get());
        Ok(())
    });
    let with = config.clone();
    play(&mut cluster, far, &scene, move |env, scene| {
        // Without a service, so that nothing beats.
        let host = cxl_pool::pool::join(env.lines(), env.platform(), with.clone())?;
        count(scene);
        let begun_ns = env.platform().now_ns();
        while env.platform().now_ns() - begun_ns < LONG_NS {
            must_not_be_dead(env, &host);
            env.platform().sleep_ns(10 * REST_NS);
        }
        scene.has_looked.set(true);
        env.point(PLAYED);
        Ok(())
    });
    play(&mut cluster, hosts[1], &scene, move |env, scene| looks_for_the_dead(env, &config, scene));
    cluster.world.run()
}

/// W5: a process of a container attaches at the moment in which the last other one dies; in between, the end of both is all that is seen.
fn attaches(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster(seed, 3, 1);
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| {
        let _host = join(env, &with)?;
        count(scene);
        until(env, || scene.has_looked.get());
        Ok(())
    });
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| {
        let _host = cxl_pool::pool::join(env.lines(), env.platform(), with.clone())?;
        count(scene);
        // Long enough for the sibling to come as far as the mark, and short enough for it to find this one there before.
        until(env, || scene.has_stored.get());
        env.platform().sleep_ns(env.below(4_000_000) as u64);
        env.exit()
    });
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| {
        until(env, || scene.joined.get() >= 3);
        scene.has_stored.set(true);
        env.plan(Planned { when: When::Point("join.beside", 1), host: Some(env.host()), fault: Fault::PauseThread { for_ns: LONG_NS } });
        env.platform().sleep_ns(env.below(2_000_000) as u64);
        let host = cxl_pool::pool::join(env.lines(), env.platform(), with.clone())?;
        for _ in 0..100 {
            must_not_be_dead(env, &host);
            env.platform().sleep_ns(REST_NS);
        }
        scene.has_looked.set(true);
        env.point(PLAYED);
        Ok(())
    });
    play(&mut cluster, hosts[2], &scene, move |env, scene| looks_for_the_dead(env, &config, scene));
    cluster.world.run()
}

/// W6: two containers of one machine with one identity, and a state directory each. The second is refused; the first stays what it is.
fn twin(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster(seed, 3, 0);
    let twin = cluster.world.add_twin(hosts[1]);
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| {
        let _host = join(env, &with)?;
        count(scene);
        until(env, || scene.has_looked.get());
        Ok(())
    });
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| {
        let host = join(env, &with)?;
        let nonce = host.nonce();
        count(scene);
        until(env, || scene.has_ended.get());
        if host.nonce() == nonce && host.check_membership().is_err() {
            env.fail("V8: the first holder of an identity is put out of its slot by the second");
        }
        scene.has_looked.set(true);
        env.point(PLAYED);
        Ok(())
    });
    play(&mut cluster, twin, &scene, move |env, scene| {
        until(env, || scene.joined.get() >= 2);
        match cxl_pool::pool::join(env.lines(), env.platform(), config.clone()) {
            Err(Error::Twin { slot: None, .. }) => {}
            Err(error) => return Err(error),
            Ok(_) => env.fail("V8: two hosts with one identity have joined"),
        }
        scene.has_ended.set(true);
        Ok(())
    });
    cluster.world.run()
}

/// Loses the rows of the last seat, or one of them.
fn lose_rows_of_last_seat(env: &Env) -> Result<()> {
    let lines = env.lines();
    let layout = lines.layout();
    let (seats, each) = (layout.geometry().all_seats(), layout.geometry().fence_lines());
    let regions: &[Region] = [&[Region::Fence][..], &[Region::Death], &[Region::Fence, Region::Death]][env.below(3)];
    for region in regions {
        for line in (seats - 1) * each..seats * each {
            env.inflict(env.host(), Fault::LoseLine { offset: layout.line_offset(*region, line)? });
        }
    }
    Ok(())
}

/// W7: W1 in a pool with a seat that no host has claimed, of which the device has lost rows: no death was ever stated there, and no host
/// writes them again. Of four seats one is reserved, and each container claims one at most.
fn beside_damaged_rows(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, config) = cluster_with_seats(seed, 3, 1, Some(4));
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| takes_over(env, &with, scene));
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| stores_and_dies(env, &with, scene, 2));
    play(&mut cluster, hosts[2], &scene, move |env, scene| {
        let host = join(env, &config)?;
        lose_rows_of_last_seat(env)?;
        count(scene);
        look_for_the_dead(env, &host, scene)
    });
    cluster.world.run()
}

/// W8: the same where the container that asks has no seat yet, so that it reports to the manager what it states. An operator asks for the
/// fence.
fn reported_beside_damaged_rows(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, hosts, mut config) = cluster_with_seats(seed, 3, 1, Some(3));
    // A host without a seat waits for a part of this before it claims one.
    config.suspect_ms = 1_000_000;
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, hosts[0], &scene, move |env, scene| {
        let host = join(env, &with)?;
        count(scene);
        until(env, || scene.has_stored.get());
        let (slot, incarnation) = scene.storing.get();
        host.suspect(slot, incarnation)?;
        next_owner(env, &host, scene)
    });
    let with = config.clone();
    play(&mut cluster, hosts[1], &scene, move |env, scene| stores_and_dies(env, &with, scene, 2));
    play(&mut cluster, hosts[2], &scene, move |env, scene| {
        let host = join(env, &config)?;
        lose_rows_of_last_seat(env)?;
        count(scene);
        look_for_the_dead(env, &host, scene)
    });
    cluster.world.run()
}

/// A pool that no host has joined, with one seat for those that come, and one for each slot.
fn empty_pool(seed: u64, hosts: usize) -> (Cluster, HostConfig) {
    let mut cluster = Cluster::new(seed, hosts, hosts + 2, |config, _| {
        config.chances = Default::default();
        config.write_path = crate::WritePath::OneUnit;
        (config.geometry.seats, config.geometry.slot_seats) = (1, true);
    });
    cluster.host_config.seats.clear();
    let config = cluster.host_config.clone();
    (cluster, config)
}

/// W9: a host stands still in its join, as the owner of the only seat that can be claimed. No other kernel knows what became of it.
fn joins_elsewhere(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut cluster, config) = empty_pool(seed, 2);
    let (still, other) = (cluster.hosts[0], cluster.hosts[1]);
    let point = cluster.random.pick(&["claim.accepted", "manager.seated", "manager.claimed", "manager.adopted"]);
    cluster.world.plan(Planned { when: When::Point(point, 1), host: Some(still), fault: Fault::PauseHost { for_ns: LONG_NS } });
    let scene = Shared::default();
    let with = config.clone();
    play(&mut cluster, still, &scene, move |env, scene| {
        let _host = join(env, &with)?;
        count(scene);
        until(env, || scene.has_looked.get());
        Ok(())
    });
    play(&mut cluster, other, &scene, move |env, scene| {
        env.platform().sleep_ns(LONG_NS / 20);
        let _host = join(env, &config)?;
        let (stood_still, served) = env.view(|view| (view.visits_by(still, point) > 0, view.visits_by(still, "manager.bound") > 0));
        if stood_still && !served {
            env.fail("V8: the seat of a host that lives went to another machine");
        }
        until(env, || scene.joined.get() > 0);
        scene.has_looked.set(true);
        env.point(PLAYED);
        Ok(())
    });
    cluster.world.run()
}

/// W10: containers of one kernel die in the middle of their joins, one after the other, each with the only seat that can be claimed.
fn joiners_die(seed: u64) -> std::result::Result<Stats, Failure> {
    run_among_joiners(seed, None)
}

/// W10 with one fault more.
pub fn run_among_joiners(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let (mut cluster, config) = empty_pool(seed, 1);
    let mut hosts = vec![cluster.hosts[0]];
    hosts.extend((0..6).map(|_| cluster.world.add_container(cluster.hosts[0])));
    planned.into_iter().for_each(|planned| cluster.world.plan(planned));
    let scene = Shared::default();
    for (number, &host) in hosts.iter().enumerate() {
        let is_last = number + 1 == hosts.len();
        if !is_last {
            let point = cluster.random.pick(&["claim.published", "claim.accepted", "manager.seated", "manager.claimed", "manager.adopted"]);
            cluster.world.plan(Planned {
                when: When::Point(point, 1),
                host: Some(host),
                fault: Fault::CrashProcess { restart_after_ns: None },
            });
        }
        let config = config.clone();
        play(&mut cluster, host, &scene, move |env, _| {
            env.platform().sleep_ns(number as u64 * LONG_NS / 4 + 1);
            let _host = join(env, &config)?;
            if !is_last {
                env.exit();
            }
            env.point(PLAYED);
            Ok(())
        });
    }
    cluster.world.run()
}

/// W11: a container is killed where the wait for a silent host exceeds the run. Its slot and its lock pass to another all the same.
fn before_the_fence(seed: u64) -> std::result::Result<Stats, Failure> {
    released_after(seed, Some(1_000_000))
}
