// SPDX-License-Identifier: Apache-2.0
//! How hand-over and the manager's scan grow with the number of hosts, counted and not timed.
//!
//! N hosts in this process run the production code on real memory, driven by one thread, with an account for each. They take one lock in
//! turn, so that every acquisition is a recall and a hand-over. The time of a hand-over is *modelled*: the accesses on its path (requester,
//! then manager, then the holder that gives it back, then manager, then requester), one after the other, each at the cost of its kind. Rest
//! between polls is left out: with the default of 1 ms it is most of a real hand-over.

use super::counting::Counts;
use super::hosts::{Driver, Lab, Member};
use super::lock::{POOL_BYTES, TIMEOUT_MS};
use super::{Bench, Grid, wrong};
use crate::stats::{Estimate, median, time_text};
use cxl_pool::coherence::{Bare, Instructions};
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use cxl_pool::{Error, Result};
use std::time::Instant;

const LOCK: LockId = FIRST_USER_LOCK;
const HOSTS: [u8; 4] = [2, 4, 8, 16];

/// What an access costs, in nanoseconds.
#[derive(Clone, Copy)]
struct Costs {
    write: f64,
    /// One miss, or many that overlap.
    wait: f64,
    /// Each further line of such a group.
    line: f64,
}

/// A device behind a switch, assumed: such devices answer a load in 0.5 to 1 us.
const ASSUMED: Costs = Costs { write: 400.0, wait: 800.0, line: 40.0 };

impl Costs {
    fn of(self, counts: &Counts) -> f64 {
        let further = counts.loads.saturating_sub(counts.waits) as f64;
        counts.writes as f64 * self.write + counts.waits as f64 * self.wait + further * self.line
    }

    /// Those of this machine's own memory.
    fn measure(lab: &Lab, batches: u64) -> Result<Costs> {
        const LINES: u64 = 4096;
        let memory = lab.pool().lines().memory().clone();
        let bare = Bare::over(memory, lab.pool().layout().data_offset(), LINES, Instructions::best()?)?;
        let (mut write, mut wait, mut many) = (Vec::new(), Vec::new(), Vec::new());
        let line = bare.load(0);
        for batch in 0..batches.clamp(3, 101) {
            let indexes: Vec<u64> = (0..256).map(|step| (batch * 256 + step) * 2477).collect();
            let start = Instant::now();
            indexes.iter().for_each(|&index| bare.publish(index, &line));
            write.push(start.elapsed().as_nanos() as f64 / 256.0);
            let start = Instant::now();
            indexes.iter().for_each(|&index| _ = std::hint::black_box(bare.fetch(index)));
            wait.push(start.elapsed().as_nanos() as f64 / 256.0);
            let start = Instant::now();
            for part in indexes.chunks_exact(16) {
                part.iter().for_each(|&index| bare.flush(index));
                bare.fence_all();
                part.iter().for_each(|&index| _ = std::hint::black_box(bare.load(index)));
            }
            many.push(start.elapsed().as_nanos() as f64 / 16.0);
        }
        let wait = median(&mut wait);
        Ok(Costs { write: median(&mut write), wait, line: ((median(&mut many) - wait) / 15.0).max(0.0) })
    }
}

/// Averages over the hand-overs among `hosts` hosts.
struct Scaled {
    requester: Counts,
    manager: Counts,
    holder: Counts,
    manager_rounds: f64,
    /// One round of a manager with nothing to do.
    idle: Counts,
    idle_ns: Estimate,
    handovers: u64,
}

fn scale(hosts: u8, handovers: u64) -> Result<Scaled> {
    let lab = Lab::new(POOL_BYTES)?;
    let driver = Driver::new();
    let members: Vec<Member> = (0..hosts).map(|number| lab.join(number, Some(&driver))).collect::<Result<_>>()?;
    let result = scale_members(&members, &driver, handovers);
    driver.release();
    result
}

fn scale_members(members: &[Member], driver: &Driver, handovers: u64) -> Result<Scaled> {
    let hosts = members.len();
    // A few rounds for whatever follows the joins, and the lock once around.
    (0..20).for_each(|_| driver.drive());
    for member in members {
        drop(member.host.acquire(LOCK, TIMEOUT_MS)?);
    }
    let mut sum = [Counts::default(); 3];
    let (mut rounds, mut last_grant) = (0, 0);
    for number in 0..handovers {
        // The manager's own host neither asks nor holds here where others can, so that its account is that of the role.
        let place = |turn: u64| if hosts > 2 { 1 + (turn % (hosts as u64 - 1)) as usize } else { (turn % 2) as usize };
        let (holder, requester) = (place(number), place(number + 1));
        if number == 0 {
            drop(members[holder].host.acquire(LOCK, TIMEOUT_MS)?);
        }
        let (before, rounds_before) = driver.accounts();
        let own_before = members[requester].counting.counts();
        let guard = members[requester].host.acquire(LOCK, TIMEOUT_MS)?;
        if guard.grant() <= last_grant {
            return Err(wrong("a lock that another host had was granted without a new grant"));
        }
        last_grant = guard.grant();
        drop(guard);
        let (after, rounds_after) = driver.accounts();
        let served = |host: usize| after[host] - before[host];
        sum[0] += members[requester].counting.counts() - own_before - served(requester);
        sum[1] += served(0);
        sum[2] += if holder == 0 { Counts::default() } else { served(holder) };
        rounds += rounds_after - rounds_before;
    }
    let manager = &members[0];
    let mut idle_ns = Vec::new();
    let mut idle = Counts::default();
    for _ in 0..handovers.max(32) {
        let before = manager.counting.counts();
        let start = Instant::now();
        manager.host.service_round()?;
        idle_ns.push(start.elapsed().as_nanos() as f64);
        idle = manager.counting.counts() - before;
    }
    let [requester, manager, holder] = sum;
    let (manager_rounds, idle_ns) = (rounds as f64 / handovers as f64, Estimate::of(idle_ns));
    Ok(Scaled { requester, manager, holder, manager_rounds, idle, idle_ns, handovers })
}

/// Counts for each number of hosts.
pub fn measure(bench: &mut Bench, batches: u64) -> Result<()> {
    let here = Costs::measure(&Lab::new(POOL_BYTES)?, batches)?;
    let handovers = batches.clamp(6, 60);
    let titles =
        ["hosts", "requester w/r", "manager w/r", "holder w/r", "rounds", "modelled here", "modelled device", "idle round: lines", "time"];
    let mut rows = vec![titles.map(String::from).to_vec()];
    let mut idle_by_hosts = Vec::new();
    let mut modelled = Vec::new();
    for hosts in HOSTS {
        let scaled = scale(hosts, handovers)?;
        let each = |counts: &Counts| {
            let share = |count: u64| count as f64 / scaled.handovers as f64;
            format!("{:.1}/{:.1}", share(counts.writes), share(counts.loads))
        };
        let mut path = scaled.requester;
        path += scaled.manager;
        path += scaled.holder;
        let time = |costs: Costs| costs.of(&path) / scaled.handovers as f64;
        rows.push(vec![
            hosts.to_string(),
            each(&scaled.requester),
            each(&scaled.manager),
            each(&scaled.holder),
            format!("{:.1}", scaled.manager_rounds),
            time_text(time(here)),
            time_text(time(ASSUMED)),
            scaled.idle.loads.to_string(),
            time_text(scaled.idle_ns.median),
        ]);
        if scaled.handovers == 0 || path.writes == 0 {
            return Err(Error::Invalid("no hand-over was counted".into()));
        }
        idle_by_hosts.push(scaled.idle_ns);
        modelled.push(time(here));
    }
    let title = format!(
        "By number of hosts: lines written/read per hand-over, {handovers} hand-overs each (counted on driven hosts; time modelled \
         from the counts: \
         {:.0} ns a write, {:.0} ns a fetch, {:.1} ns each further line of a group here; {:.0}, {:.0}, {:.0} ns assumed of a device)",
        here.write, here.wait, here.line, ASSUMED.write, ASSUMED.wait, ASSUMED.line
    );
    bench.grids.push(Grid { title, rows });
    let plain = |value: f64| Estimate { median: value, low: value, high: value };
    if let ([first, .., last], [few, .., many]) = (&idle_by_hosts[..], &modelled[..]) {
        bench.ratio("idle_manager_round_16_over_2_hosts", plain(last.median / first.median));
        bench.ratio("modelled_handover_16_over_2_hosts", plain(many / few));
    }
    Ok(())
}
