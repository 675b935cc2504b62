// SPDX-License-Identifier: Apache-2.0
//! The upkeep on a thread of its own: frees asked for by other processes and hosts, chunks of those that died, counters.

use crate::pool::Member;
use crate::status::{Failure, Outcome, Status};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Rest between two rounds: how long a block that another host frees takes to become free.
const REST: Duration = Duration::from_millis(20);
/// How often hosts that died are looked for.
const ADOPTION: Duration = Duration::from_millis(500);

/// How often this process hands over what it counted.
const PUBLISHING: Duration = Duration::from_millis(100);

/// Runs the upkeep until it is dropped.
pub struct Upkeep {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Upkeep {
    /// Starts the upkeep of a member, which it does not keep alive.
    pub fn start(member: &Arc<Member>) -> Outcome<Upkeep> {
        let member: Weak<Member> = Arc::downgrade(member);
        let (stop, stopped) = channel();
        let work = move || {
            let (mut adopted, mut published) = (Instant::now(), Instant::now());
            if let Some(member) = member.upgrade() {
                member.host.bind_upkeep("binding the upkeep thread to its CPUs");
            }
            while stopped.recv_timeout(REST) == Err(RecvTimeoutError::Timeout) {
                let Some(member) = member.upgrade() else { return };
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
            }
        };
        let thread = std::thread::Builder::new()
            .name("cxl-upkeep".into())
            .spawn(work)
            .map_err(|error| Failure::new(Status::E_OS, format!("starting the upkeep thread: {error}")))?;
        Ok(Upkeep { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there is a bug of ours; it has been printed, and there is no caller to hand it to.
            let _ = thread.join();
        }
    }
}
