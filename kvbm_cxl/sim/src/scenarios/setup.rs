// SPDX-License-Identifier: Apache-2.0
//! What the scenarios have in common: their hosts, timings and faults.

use super::directed;
use crate::{Chances, Env, Failure, Random, SimHost, Stats, World, WorldConfig, WritePath};
use cxl_pool::Result;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::media::{CellClass, Geometry, Layout};
use cxl_pool::platform::MachineId;
use std::cell::Cell;

/// Bytes of a chunk in a [`Cluster::with_chunks`].
pub(super) const CHUNK_BYTES: u64 = 4096;
/// A rest between two looks, in nanoseconds.
pub(super) const REST_NS: u64 = 20_000;

/// Hosts of a world under test, and their instructions.
pub struct Cluster {
    /// The world.
    pub world: World,
    /// The machines.
    pub hosts: Vec<SimHost>,
    /// What every host joins with.
    pub host_config: HostConfig,
    /// For choices before the run.
    pub random: Random,
}

/// Hosts that found a pool with slots' seats by themselves in every run.
const MOST_FOUNDERS: usize = 4;

thread_local! {
    static SLOT_SEATS: Cell<bool> = const { Cell::new(false) };
}

/// One run of a scenario over a pool in which every slot has a manager seat and the superblock reserves none.
pub fn over_slot_seats(scenario: impl Fn(u64) -> std::result::Result<Stats, Failure>, seed: u64) -> std::result::Result<Stats, Failure> {
    SLOT_SEATS.set(true);
    let result = scenario(seed);
    SLOT_SEATS.set(false);
    result
}

/// The machines that seats are reserved for: those; in a run of `hosts` by [`over_slot_seats`] none, or the first where hosts are many.
pub fn reserved(machines: Vec<MachineId>, hosts: usize) -> Vec<MachineId> {
    if !SLOT_SEATS.get() {
        return machines;
    }
    // Many machines that found a pool at one moment may lose every place of a small one to each other.
    machines.into_iter().take(usize::from(hosts > MOST_FOUNDERS)).collect()
}

/// Faults of a scenario, from none to many, decided by the seed.
pub fn chances(random: &mut Random, hosts: usize) -> Chances {
    let rate = random.pick(&[0, 20, 100, 400]);
    Chances {
        crash_machine: rate / 2,
        crash_process: rate / 2,
        pause_host: rate,
        pause_thread: rate * 2,
        jump: rate / 2,
        max_crashes: hosts as u64,
        max_pauses: 3 * hosts as u64,
        longest_ns: random.pick(&[100_000, 5_000_000, 50_000_000]),
        for_steps: random.pick(&[5_000, 30_000, 150_000]),
        restart_within_ns: Some(random.pick(&[10_000, 5_000_000, 50_000_000])),
    }
}

/// Keeps machines from leaving a line half written for ever, as [`directed::write_path`] says, where faults come by chance.
pub fn no_line_half_done(config: &mut WorldConfig, seed: u64) {
    config.write_path = directed::write_path(seed);
    if config.write_path == WritePath::StoresAndFlush {
        config.chances.crash_machine = 0;
    }
}

impl Cluster {
    /// `hosts` machines over a formatted pool of `slots` slots.
    pub fn new(seed: u64, hosts: usize, slots: usize, adjust: impl FnOnce(&mut WorldConfig, &mut Random)) -> Self {
        let mut random = Random::new(seed ^ 0x5eed_0f5c_e7a2_1015);
        let mut config = WorldConfig { write_path: WritePath::BySeed, ..WorldConfig::default() };
        config.geometry.slots = slots as u32;
        config.geometry.seats = random.pick(&[2, 3, 3, 4]);
        config.geometry.slot_seats = SLOT_SEATS.get();
        config.chances = chances(&mut random, hosts);
        // With many threads each of them is slow, and so is everything that waits for one of them.
        config.max_steps = 1_000_000 * (2 + hosts as u64);
        config.max_time_ns = config.max_steps * 2_000;
        adjust(&mut config, &mut random);
        let seats = config.geometry.seats as usize;
        let mut world = World::formatted(seed, config);
        let hosts: Vec<SimHost> = (0..hosts).map(|_| world.add_host()).collect();
        // Either the table reserves every seat, or one alone and the others are claimed while the pool runs.
        let named = if random.one_in(2) { seats.min(hosts.len()) } else { 1 };
        let seats = hosts.iter().take(named).map(|host| world.machine_id(*host)).collect::<Vec<MachineId>>();
        let host_config = HostConfig {
            slot: None,
            seats: reserved(seats, hosts.len()),
            join_timeout_ms: Some(200_000),
            heartbeat_ms: 1,
            suspect_ms: random.pick(&[3, 10]),
            // A line of a host that stands still looks damaged: the runs end when it resumes.
            damage_ms: 200_000,
            poll_us: 100,
            idle_release_ms: random.pick(&[1, 50]),
            cpus: Default::default(),
        };
        Cluster { world, hosts, host_config, random }
    }

    /// Two machines for a choreography, in which nothing fails by chance, over a pool of `slots` slots with room for so few chunks, and
    /// with so many seats where a number is given. The first machine has the only seat that is named.
    pub(super) fn with_chunks(seed: u64, slots: usize, seats: Option<u32>, chunks: u64) -> Self {
        let mut cluster = Cluster::new(seed, 2, slots, |config, _| {
            config.chances = Chances::default();
            config.write_path = if seed.is_multiple_of(2) { WritePath::OneUnit } else { WritePath::StoresAndFlush };
            let geometry = &mut config.geometry;
            geometry.seats = seats.unwrap_or(geometry.seats);
            (geometry.cells_per_chunk, geometry.stripes, geometry.chunk_bytes) = (1, 1, CHUNK_BYTES);
            geometry.cells[0] = CellClass { cell_bytes: 64, chunks: 1 };
            geometry.len_bytes = len_bytes_of(*geometry, chunks);
        });
        cluster.host_config.seats.truncate(1);
        cluster.host_config.suspect_ms = 30;
        cluster
    }
}

/// Length of the smallest pool with so many chunks.
fn len_bytes_of(mut geometry: Geometry, chunks: u64) -> u64 {
    geometry.len_bytes = DEVICE_HEADER_BYTES + CHUNK_BYTES;
    while Layout::new(geometry).map_or(0, |layout| layout.chunks()) < chunks {
        geometry.len_bytes += CHUNK_BYTES;
    }
    geometry.len_bytes
}

/// Waits until `is_so`.
pub(super) fn until(env: &Env, is_so: impl Fn() -> bool) {
    while !is_so() {
        env.platform().sleep_ns(REST_NS);
    }
}

/// Joins as this process and keeps its service running.
pub fn join(env: &Env, config: &HostConfig) -> Result<Host> {
    join_over(env, env.lines(), config, || false)
}

/// As [`join`], over `lines`, with a service that stands still while `is_silent` says so.
pub fn join_over(env: &Env, lines: Lines, config: &HostConfig, is_silent: impl Fn() -> bool + 'static) -> Result<Host> {
    let host = cxl_pool::pool::join(lines, env.platform(), config.clone())?;
    let service = host.clone();
    env.spawn_daemon("service", move |env| serve(&env, &service, is_silent));
    Ok(host)
}

fn serve(env: &Env, host: &Host, is_silent: impl Fn() -> bool) -> Result<()> {
    loop {
        if is_silent() {
            env.platform().sleep_ns(500_000);
            continue;
        }
        let rest_ns = match host.service_round() {
            Ok(rest_ns) => rest_ns,
            Err(cxl_pool::Error::Closed) => return Ok(()),
            // As the service thread does: a line may look damaged while its writer is stopped in the middle of it.
            // So may a mutex of the local segment be held by a thread that is stopped.
            Err(cxl_pool::Error::BadLine { .. } | cxl_pool::Error::Timeout { .. }) => 1_000_000,
            Err(error) => return Err(error),
        };
        env.platform().sleep_ns(rest_ns);
    }
}
