// SPDX-License-Identifier: Apache-2.0
//! Bindings of slots, seats and fences as choreographies: each holds on every seed, and fails with the rule dropped that it is about.
//! Host 0 joins first, so it has slot 0 and manages.

use super::Scenario;
use super::directed::{MS, at};
use super::setup::{Cluster, join, until};
use crate::{Env, Failure, Fault, SimHost, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::HostConfig;
use cxl_pool::media::{DeathLine, FenceLine, MediaLine, Region, Seat};
use std::cell::Cell;
use std::rc::Rc;

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("b1_lines_of_two_seats_are_lost_at_once", lines_of_two_seats),
    ("b2_fence_row_is_lost_with_its_writer", fence_row),
    ("b3_slot_of_a_dead_host_that_had_a_seat", proof_of_seat),
    ("b4_number_is_stated_dead_before_it_is_bound", number_stated_before),
    ("b5_slot_beside_damaged_rows", damaged_rows),
    ("b6_host_comes_back_after_its_silence", comes_back),
    ("b7_owner_before_has_left", former_owner_left),
];
/// Visited by each run that came to its end.
pub const PLAYED: &str = "seat_scene.played";

/// Suspicion plays no part.
const NEVER_MS: u64 = 1_000_000;
/// Longer than anything that must not happen takes to happen, in nanoseconds.
const LONG_NS: u64 = 50 * MS;
/// Longest wait for anything that has to happen.
const MAX_NS: u64 = 200 * MS;
/// An incarnation that an operator states dead before any host had its slot.
const STATED: u32 = 3;

/// Events so far.
#[derive(Default)]
struct Scene {
    joined: Cell<usize>,
    /// Slot and incarnation of the host that dies.
    dying: Cell<(u16, u32)>,
    is_ready: Cell<bool>,
    is_over: Cell<bool>,
}

type Shared = Rc<Scene>;

/// `hosts` machines without faults by chance over a pool of `slots` slots and two seats, of which host 0 has the first.
fn cluster(seed: u64, hosts: usize, slots: usize, suspect_ms: Option<u64>) -> Cluster {
    let mut cluster = Cluster::new(seed, hosts, slots, |config, _| {
        config.chances = Default::default();
        config.write_path = WritePath::OneUnit;
        config.geometry.seats = 2;
    });
    cluster.host_config.seats.truncate(1);
    cluster.host_config.suspect_ms = suspect_ms.unwrap_or(cluster.host_config.suspect_ms);
    cluster
}

/// Starts `body` in a process of its own; it runs again when the process is started again.
fn play(cluster: &mut Cluster, host: SimHost, scene: &Shared, body: fn(&Env, &HostConfig, &Scene) -> Result<()>) {
    let (scene, config) = (Rc::clone(scene), cluster.host_config.clone());
    cluster.world.start(host, move |env| {
        let (scene, config) = (Rc::clone(&scene), config.clone());
        env.spawn("main", move |env| body(&env, &config, &scene));
    });
}

fn count(scene: &Scene) {
    scene.joined.set(scene.joined.get() + 1);
}

fn ends(env: &Env, scene: &Scene) {
    scene.is_over.set(true);
    env.point(PLAYED);
}

/// Fails as `complaint` says if `is_so` does not become true.
fn must(env: &Env, complaint: &str, is_so: impl Fn() -> bool) {
    let begun_ns = env.global_ns();
    until(env, || is_so() || env.global_ns() - begun_ns > MAX_NS);
    if !is_so() {
        env.fail(complaint);
    }
}

/// Whether the line verifies in the memory and is as `is_so` says.
fn reads<T: MediaLine>(env: &Env, index: u64, is_so: impl Fn(T) -> bool) -> bool {
    let lines = env.lines();
    env.view(|view| {
        let offset = view.layout().line_offset(T::REGION, index);
        offset.and_then(|offset| lines.open::<T>(index, &view.line(offset))).is_ok_and(is_so)
    })
}

fn lose(env: &Env, region: Region, index: u64) -> Result<()> {
    let offset = env.lines().layout().line_offset(region, index)?;
    env.inflict(env.host(), Fault::LoseLine { offset });
    Ok(())
}

fn stops_at(cluster: &mut Cluster, host: SimHost, point: &'static str, visit: u64) {
    cluster.world.plan(at(point, visit, Some(host), Fault::PauseHost { for_ns: u64::MAX }));
}

fn visits(env: &Env, host: usize, point: &'static str) -> u64 {
    env.view(|view| view.visits_by(SimHost(host), point))
}

/// B1: two hosts have just taken the seats of their slots, and the device loses both lines. Each session knows the epoch of its own line,
/// and does not need the other one.
fn lines_of_two_seats(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 3, 3, |config, _| {
        config.chances = Default::default();
        config.write_path = WritePath::OneUnit;
        (config.geometry.seats, config.geometry.slot_seats) = (1, true);
    });
    cluster.host_config.seats.clear();
    cluster.host_config.suspect_ms = NEVER_MS;
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    for &host in &hosts[1..] {
        stops_at(&mut cluster, host, "manager.seated", 1);
        play(&mut cluster, host, &scene, |env, config, scene| {
            until(env, || scene.joined.get() > 0);
            let _host = join(env, config)?;
            until(env, || scene.is_over.get());
            Ok(())
        });
    }
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let host = join(env, config)?;
        let seat_of = |slot| host.lines().layout().geometry().seat_of(slot).unwrap_or_default();
        count(scene);
        let are_whole = || (1..3).all(|slot| reads::<Seat>(env, seat_of(slot), |line| line.generation != 0));
        until(env, || (1..3).all(|host| visits(env, host, "manager.seated") == 1) && are_whole());
        for slot in 1..3 {
            lose(env, Region::Seat, seat_of(slot))?;
        }
        (1..3).for_each(|host| env.resume(SimHost(host)));
        must(env, "V9: the line of a seat is not written again although its owner runs", are_whole);
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}

/// B2: the process that manages fences a host and dies, and the device loses that row. A sibling writes it again from the machine's
/// memory: the fence stays.
fn fence_row(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed, 2, 2, None);
    let (lines, mut fenced) = (cluster.world.inspector(), 0);
    cluster.world.check_always(move |view| {
        let offset = view.layout().line_offset(Region::Fence, 0).map_err(|error| error.to_string())?;
        let Ok(row) = lines.open::<FenceLine>(0, &view.line(offset)) else { return Ok(()) };
        if row.fenced[1] < fenced {
            return Err(format!("V2: incarnation {fenced} of slot 1 was fenced and is not any more"));
        }
        fenced = row.fenced[1];
        Ok(())
    });
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let _host = join(env, config)?;
        count(scene);
        until(env, || reads::<FenceLine>(env, 0, |row| row.fenced[1] != 0));
        lose(env, Region::Fence, 0)?;
        env.exit()
    });
    play(&mut cluster, hosts[1], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 1);
        let _host = join(env, config)?;
        count(scene);
        until(env, || scene.joined.get() == 3);
        env.inflict(env.host(), Fault::PauseHost { for_ns: u64::MAX });
        Ok(())
    });
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 2);
        let _host = join(env, config)?;
        count(scene);
        must(env, "V9: no sibling took the role", || env.view(|view| view.visits("manager.adopted") > 1));
        must(env, "V9: a row is not written again", || reads::<FenceLine>(env, 0, |row| row.fenced[1] != 0));
        env.resume(SimHost(1));
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}

/// B3: a host with a seat dies, and an operator says so. Its slot goes to another machine, and the seat does, too.
fn proof_of_seat(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed, 3, 2, None);
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    let has_seat = |env: &Env| {
        let machine = env.platform().machine().0;
        reads::<Seat>(env, 1, |line| line.machine == machine)
    };
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let host = join(env, config)?;
        count(scene);
        until(env, || scene.is_ready.get());
        let (slot, incarnation) = scene.dying.get();
        host.declare_dead(slot, incarnation)?;
        until(env, || scene.is_over.get());
        Ok(())
    });
    cluster.world.spawn(hosts[1], "main", {
        let (scene, config) = (Rc::clone(&scene), cluster.host_config.clone());
        move |env| {
            until(&env, || scene.joined.get() == 1);
            let host = join(&env, &config)?;
            until(&env, || has_seat(&env));
            scene.dying.set((host.slot(), host.incarnation()));
            scene.is_ready.set(true);
            env.exit()
        }
    });
    cluster.world.spawn(hosts[2], "main", {
        let (scene, config) = (Rc::clone(&scene), cluster.host_config.clone());
        move |env| {
            until(&env, || scene.is_ready.get());
            let _host = join(&env, &config)?;
            must(&env, "V9: the seat of a dead host goes to no other machine", || has_seat(&env));
            ends(&env, &scene);
            Ok(())
        }
    });
    cluster.world.run()
}

/// Fails where a host began its life as one that was stated dead.
fn must_be_above(env: &Env, incarnation: u32) {
    if incarnation <= STATED {
        env.fail(format!("V8: incarnation {incarnation} was stated dead before it began"));
    }
}

/// B4: an operator states incarnations of a slot dead that no host had. The first host there gets one above them.
fn number_stated_before(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed, 2, 2, None);
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let host = join(env, config)?;
        host.declare_dead(1, STATED)?;
        until(env, || reads::<DeathLine>(env, 0, |row| row.dead[1] == STATED));
        count(scene);
        until(env, || scene.is_over.get());
        Ok(())
    });
    play(&mut cluster, hosts[1], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 1);
        must_be_above(env, join(env, config)?.incarnation());
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}

/// B5: the same, where the rows that say so are lost, and their owner stands still. The slot goes to no host before they are whole.
fn damaged_rows(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed, 3, 3, Some(NEVER_MS));
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    cluster.host_config.seats.push(cluster.world.machine_id(hosts[1]));
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let _host = join(env, config)?;
        count(scene);
        until(env, || scene.joined.get() == 2);
        env.inflict(SimHost(1), Fault::PauseHost { for_ns: u64::MAX });
        lose(env, Region::Fence, 1)?;
        lose(env, Region::Death, 1)?;
        scene.is_ready.set(true);
        until(env, || visits(env, 2, "join.asked") > 0);
        env.platform().sleep_ns(LONG_NS);
        env.resume(SimHost(1));
        until(env, || scene.is_over.get());
        Ok(())
    });
    play(&mut cluster, hosts[1], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 1);
        let host = join(env, config)?;
        host.declare_dead(2, STATED)?;
        until(env, || reads::<DeathLine>(env, 1, |row| row.dead[2] == STATED));
        count(scene);
        until(env, || scene.is_over.get());
        Ok(())
    });
    play(&mut cluster, hosts[2], &scene, |env, config, scene| {
        until(env, || scene.is_ready.get());
        must_be_above(env, join(env, config)?.incarnation());
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}

/// B6: a host dies, is fenced, and comes back. The manager waits for its first heartbeat as for that of any host.
fn comes_back(seed: u64) -> std::result::Result<Stats, Failure> {
    const SUSPECT_MS: u64 = 100;
    let mut cluster = cluster(seed, 2, 2, Some(SUSPECT_MS));
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    cluster.world.plan(at("join.accepted", 2, Some(hosts[1]), Fault::PauseHost { for_ns: SUSPECT_MS * MS / 4 }));
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let _host = join(env, config)?;
        count(scene);
        until(env, || scene.is_over.get());
        Ok(())
    });
    play(&mut cluster, hosts[1], &scene, |env, config, scene| {
        if env.generation() == 0 {
            until(env, || scene.joined.get() == 1);
        }
        let _host = join(env, config)?;
        if env.generation() == 0 {
            // For its heart to be heard.
            env.platform().sleep_ns(10 * MS);
            env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: Some(2 * SUSPECT_MS * MS) });
            return env.yield_now();
        }
        env.platform().sleep_ns(10 * MS);
        let fences = env.view(|view| view.visits("manager.fenced"));
        if fences > 1 {
            env.fail("V9: a host is fenced for the silence of its former life");
        }
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}

/// B7: a host leaves, the next owner of its slot stands still before it writes a line there, and a third host comes. That the first one
/// left proves nothing of the second.
fn former_owner_left(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed, 4, 2, Some(NEVER_MS));
    let (scene, hosts) = (Shared::default(), cluster.hosts.clone());
    stops_at(&mut cluster, hosts[2], "join.accepted", 1);
    play(&mut cluster, hosts[0], &scene, |env, config, scene| {
        let _host = join(env, config)?;
        count(scene);
        until(env, || visits(env, 2, "join.accepted") == 1);
        scene.is_ready.set(true);
        env.platform().sleep_ns(LONG_NS);
        if visits(env, 3, "join.accepted") > 0 {
            env.fail("V8: a slot is bound again while its incarnation lives");
        }
        env.resume(SimHost(2));
        until(env, || scene.is_over.get());
        Ok(())
    });
    play(&mut cluster, hosts[1], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 1);
        let host = join(env, config)?;
        host.leave()?;
        count(scene);
        Ok(())
    });
    play(&mut cluster, hosts[2], &scene, |env, config, scene| {
        until(env, || scene.joined.get() == 2);
        join(env, config)?.leave()
    });
    play(&mut cluster, hosts[3], &scene, |env, config, scene| {
        until(env, || scene.is_ready.get());
        let _host = join(env, config)?;
        ends(env, scene);
        Ok(())
    });
    cluster.world.run()
}
