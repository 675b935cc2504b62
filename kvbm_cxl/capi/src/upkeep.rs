// SPDX-License-Identifier: Apache-2.0
//! The upkeep on a thread of its own: frees asked for by other processes and hosts, chunks of those that died, counters.

use crate::pool::Member;
use crate::status::Outcome;
use cxl_pool::background::Background;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Rest between two rounds: how long a block that another host frees takes to become free.
const REST: Duration = Duration::from_millis(20);
/// How often hosts that died are looked for.
const ADOPTION: Duration = Duration::from_millis(500);
/// How often this process hands over what it counted.
const PUBLISHING: Duration = Duration::from_millis(100);

/// Starts the upkeep of a member, which it does not keep alive.
pub fn start(member: &Arc<Member>) -> Outcome<Background> {
    let member: Weak<Member> = Arc::downgrade(member);
    let (mut adopted, mut published, mut is_bound) = (Instant::now(), Instant::now(), false);
    let round = move || {
        let member = member.upgrade()?;
        if !std::mem::replace(&mut is_bound, true) {
            member.host.bind_upkeep("binding the upkeep thread to its CPUs");
        }
        // A round that fails (this host is fenced, a device is gone) is made up for by a later one.
        let record = |what, outcome: cxl_pool::Result<()>| {
            if let Err(error) = outcome {
                member.host.failed_rounds().record(what, &error);
            }
        };
        record("the upkeep of the allocator", member.allocator.service_round().map(drop));
        if published.elapsed() >= PUBLISHING {
            record("publishing counters", member.counts.publish(&member.host));
            published = Instant::now();
        }
        if adopted.elapsed() >= ADOPTION {
            record("adopting chunks of hosts that died", member.allocator.adopt_dead().map(drop));
            adopted = Instant::now();
        }
        Some(REST)
    };
    Ok(Background::start("cxl-upkeep", "starting the upkeep thread", None, round)?)
}
