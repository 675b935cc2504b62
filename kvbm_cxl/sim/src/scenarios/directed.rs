// SPDX-License-Identifier: Apache-2.0
//! Tiny clusters whose only faults strike at the moments that the protocol's rules are about.
//!
//! Faults by chance find such moments too, but seldom two or three of them in one run. Here the seed draws a few pauses and crashes and
//! pins each to a visit of a named point, with lengths around the time-outs, so that takeovers race with grants and zombies wake up late.

use super::setup::{Cluster, reserved};
use crate::{Chances, Env, Failure, Fault, Planned, Random, SimHost, Stats, When, WritePath};
use std::cell::RefCell;

/// Time-out of hosts and managers, in milliseconds.
pub const SUSPECT_MS: u64 = 3;
/// Milliseconds in nanoseconds.
pub const MS: u64 = 1_000_000;
/// A wait that only ends early if something is wrong, in milliseconds.
pub const LONG_MS: u64 = 500_000;

/// `hosts` machines, the first `seats` of them with a seat that the superblock names, without faults by chance.
pub fn cluster(seed: u64, hosts: usize, seats: usize, slots: usize, write_path: WritePath) -> Cluster {
    let mut cluster = Cluster::new(seed, hosts, slots, |config, _| {
        config.write_path = write_path;
        config.geometry.seats = seats as u32;
        // The fewest lines that hold a lock of each mode.
        config.geometry.locks = 12;
        config.geometry.objects = 1;
        config.chances = Chances::default();
        config.max_steps = 600_000;
        config.max_time_ns = 2_000 * MS;
    });
    cluster.host_config.seats = reserved(cluster.hosts.iter().take(seats).map(|host| cluster.world.machine_id(*host)).collect(), hosts);
    cluster.host_config.suspect_ms = SUSPECT_MS;
    cluster
}

/// A pause that the others take for a death, or one that is just long enough to be late.
pub fn pause_ns(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.between(MS / 10, 3 * MS),
        1 => random.between(15 * MS, 60 * MS),
        _ => random.between(4 * MS, 20 * MS),
    }
}

/// Rests between two sections, so that the locks change hands instead of staying where they are, and so that the sections spread over the
/// time in which faults show.
pub fn rest(env: &Env) {
    let longest_us = [50, 500, 2_000, 8_000][env.below(4)];
    env.platform().sleep_ns(env.below(longest_us) as u64 * 1_000 + 1);
}

/// Where a fault strikes: the n-th visit of a point, by one host or by all together.
pub fn at(point: &'static str, visit: u64, host: Option<SimHost>, fault: Fault) -> Planned {
    Planned { when: When::Point(point, visit), host, fault }
}

/// How the lines of this run are written. On the path of stores a machine that loses power may leave a line half written, and what it is
/// part of stays blocked until an operator acts; so machines lose power on the other path only.
pub fn write_path(seed: u64) -> WritePath {
    if seed.is_multiple_of(2) { WritePath::OneUnit } else { WritePath::StoresAndFlush }
}

/// The end of a process or, where that leaves every line whole, of a machine; it starts again.
pub fn crash(random: &mut Random, path: WritePath) -> Fault {
    let restart_after_ns = Some(random.spread(10_000, 20 * MS));
    match path {
        WritePath::OneUnit if random.one_in(2) => Fault::CrashMachine { restart_after_ns },
        _ => Fault::CrashProcess { restart_after_ns },
    }
}

impl Cluster {
    /// Runs, and fails under the name of `rule` if there are complaints afterwards.
    pub fn run_without(mut self, rule: &str, complaints: &RefCell<Vec<String>>) -> Result<Stats, Failure> {
        let stats = self.world.run()?;
        match complaints.borrow().as_slice() {
            [] => Ok(stats),
            complaints => Err(self.world.failure(format!("{rule}: {}", complaints.join("; ")))),
        }
    }

    /// Orders `planned` and, in every other run, a host that stands still at `point` and is fenced: some points only exist after that.
    pub fn plan_beside(&mut self, planned: Planned, point: &'static str) {
        self.world.plan(planned);
        let random = &mut self.random;
        if random.one_in(2) {
            let fault = Fault::PauseHost { for_ns: random.between(8 * MS, 20 * MS) };
            self.world.plan(at(point, random.between(1, 3), None, fault));
        }
    }

    /// Orders `count` faults at points out of `points`: mostly pauses of a host, some of a thread, few crashes.
    pub fn disturb(&mut self, path: WritePath, points: &[&'static str], count: u64) {
        for _ in 0..count {
            let random = &mut self.random;
            let fault = match random.below(16) {
                0..2 => crash(random, path),
                2..6 => Fault::PauseThread { for_ns: pause_ns(random) },
                _ => Fault::PauseHost { for_ns: pause_ns(random) },
            };
            let host = if random.one_in(2) { Some(random.pick(&self.hosts)) } else { None };
            let planned = at(random.pick(points), random.between(1, 6), host, fault);
            self.world.plan(planned);
        }
    }
}
