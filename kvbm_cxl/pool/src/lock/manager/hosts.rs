// SPDX-License-Identifier: Apache-2.0
//! What the manager knows of the hosts: heartbeats, requests, suspicion.

use super::Active;
use super::watch::Pulse;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Inner;
use crate::limits::MAX_NUMBER;
use crate::media::{Geometry, Grant, Identity, LOCKS_PER_GRANT, LOCKS_PER_REQUEST, Request, RequestLine, Summary, VERSIONS_PER_SUMMARY};
use std::sync::atomic::Ordering;

/// Most doublings of the patience with one host. Without them a host that is too slow for the time-out would be fenced for ever.
pub(super) const MAX_LENIENCY: u32 = 6;
/// Heartbeats after which one doubling is taken back.
const BEATS_TO_FORGIVE: u64 = 1024;

/// One slot, as the manager last saw it.
pub(super) struct HostView {
    /// Its heartbeat, and how long that has not moved.
    pub pulse: Pulse,
    /// Doublings of the patience with this host: it was suspected wrongly before, so it is slow and not dead.
    pub leniency: u32,
    /// Heartbeats seen to move.
    beats: u64,
    /// Per request line: the version announced, `None` before the first look.
    versions: Vec<Option<(u32, u16)>>,
    /// Per request line: the incarnation in it.
    incarnations: Vec<u32>,
    /// Per lock.
    requests: Vec<Request>,
    /// The next request line that is looked at although nothing announced news: versions may wrap while a manager is paused.
    next_check: u64,
}

impl HostView {
    pub fn new(geometry: &Geometry, pulse: Pulse) -> Self {
        HostView {
            pulse,
            leniency: 0,
            beats: 0,
            versions: vec![None; geometry.request_lines() as usize],
            incarnations: vec![0; geometry.request_lines() as usize],
            requests: vec![Request::default(); geometry.locks as usize],
            next_check: 0,
        }
    }

    /// The request of `lock` and the incarnation that made it.
    pub fn request(&self, lock: u32) -> (u32, Request) {
        (self.incarnations[lock as usize / LOCKS_PER_REQUEST], self.requests[lock as usize])
    }
}

impl Inner {
    /// One summary fetch per bound slot; request lines with news are fetched and their waiters queued. True when there was news.
    pub(super) fn look_at_hosts(&self, active: &mut Active, now_ns: u64) -> Result<bool> {
        let geometry = *self.geometry();
        let bound: Vec<u32> = (0..geometry.slots).filter(|slot| active.bound(*slot).is_some()).collect();
        let mut news = false;
        for part in 0..geometry.summary_lines() {
            let indexes: Vec<u64> = bound.iter().map(|slot| u64::from(*slot) * geometry.summary_lines() + part).collect();
            let mut summaries: Vec<Result<Summary>> = Vec::with_capacity(indexes.len());
            self.lines.fetch_many(&indexes, &mut summaries)?;
            for (slot, summary) in bound.iter().zip(summaries) {
                match summary {
                    Ok(summary) => news |= self.look_at_host(active, *slot, part, &summary, now_ns)?,
                    // A damaged summary hides the heartbeat: the host is suspected in time.
                    Err(Error::BadLine { .. }) => {}
                    Err(other) => return Err(other),
                }
            }
        }
        Ok(news)
    }

    fn look_at_host(&self, active: &mut Active, slot: u32, part: u64, summary: &Summary, now_ns: u64) -> Result<bool> {
        let geometry = *self.geometry();
        let view = &mut active.hosts[slot as usize];
        let mut check = None;
        if part == 0 && view.pulse.note(summary, now_ns) {
            view.beats += 1;
            if view.beats.is_multiple_of(BEATS_TO_FORGIVE) {
                view.leniency = view.leniency.saturating_sub(1);
            }
            check = Some(view.next_check);
            view.next_check = (view.next_check + 1) % geometry.request_lines();
        }
        let mut changed = Vec::new();
        let first = part * VERSIONS_PER_SUMMARY as u64;
        for (line, version) in (first..geometry.request_lines()).zip(summary.versions) {
            let announced = Some((summary.incarnation, version));
            if view.versions[line as usize] != announced {
                view.versions[line as usize] = announced;
                changed.push(line);
            }
        }
        let mut news = false;
        let announced = changed.len();
        changed.extend(check.filter(|line| !changed.contains(line)));
        for (place, line) in changed.into_iter().enumerate() {
            match self.lines.fetch::<RequestLine>(u64::from(slot) * geometry.request_lines() + line) {
                Ok(requests) => {
                    news |= place < announced;
                    active.note_requests(slot, line, &requests);
                }
                // Looked at again until its host, or a sibling that still runs, has written it whole.
                Err(Error::BadLine { .. }) => active.hosts[slot as usize].versions[line as usize] = None,
                Err(other) => return Err(other),
            }
        }
        Ok(news)
    }

    /// Whether a process on this machine asked for the fence of this incarnation.
    fn is_suspected(&self, slot: u32, incarnation: u32) -> bool {
        let suspected = self.segment.header().suspected.get(slot as usize);
        suspected.is_some_and(|up_to| (incarnation..MAX_NUMBER).contains(&up_to.load(Ordering::Acquire)))
    }

    /// Fences every host whose heartbeat stands still for too long on this manager's clock, or that a process on this machine suspects.
    pub(super) fn suspect_hosts(&self, active: &mut Active, now_ns: u64) -> Result<()> {
        if mutant!("no_suspicion") {
            return Ok(());
        }
        for slot in 0..self.geometry().slots {
            let Some(incarnation) = active.bound(slot) else { continue };
            let view = &mut active.hosts[slot as usize];
            let patience_ns = (self.config.suspect_ms * 1_000_000) << view.leniency;
            let is_suspected = view.pulse.silence.goes_on(now_ns, patience_ns) > patience_ns || self.is_suspected(slot, incarnation);
            if !is_suspected || active.standings[slot as usize].fenced >= incarnation {
                continue;
            }
            let identity: Identity = match self.lines.fetch(slot.into()) {
                Ok(identity) => identity,
                Err(Error::BadLine { .. }) => Identity::default(),
                Err(other) => return Err(other),
            };
            if identity.state == Identity::LEFT && identity.incarnation >= incarnation {
                continue;
            }
            point!("manager.suspects");
            if mutant!("grant_before_fence") {
                active.standings[slot as usize].fenced = incarnation;
                active.late_fences.push((slot, incarnation));
            } else {
                self.publish_fence(active, slot, incarnation)?;
            }
            point!("manager.fenced");
        }
        Ok(())
    }
}

impl Active {
    /// The incarnation bound to `slot` in this manager's own copy.
    pub(super) fn bound(&self, slot: u32) -> Option<u32> {
        self.bindings[slot as usize].as_ref().map(|binding| binding.incarnation).filter(|incarnation| *incarnation != 0)
    }

    /// Whether no lock is held or wanted.
    pub(super) fn is_idle(&self) -> bool {
        (0..self.queues.len()).all(|lock| self.queues[lock].is_empty() && !self.is_held(lock))
    }

    fn is_held(&self, lock: usize) -> bool {
        let grant = self.grants[lock / LOCKS_PER_GRANT].map_or(Grant::default(), |line| line.grants[lock % LOCKS_PER_GRANT]);
        let Some(view) = self.hosts.get(usize::from(grant.slot)).filter(|_| grant.number != 0) else { return false };
        let (incarnation, request) = view.request(lock as u32);
        let is_wanted = request.flags & Request::WANT != 0 && (incarnation, request.number as u16) == (grant.incarnation, grant.request);
        is_wanted && self.standings[usize::from(grant.slot)].fenced < incarnation
    }

    fn note_requests(&mut self, slot: u32, line: u64, fetched: &RequestLine) {
        let view = &mut self.hosts[slot as usize];
        view.incarnations[line as usize] = fetched.incarnation;
        let first = line as usize * LOCKS_PER_REQUEST;
        for (lock, request) in (first..view.requests.len()).zip(fetched.requests) {
            view.requests[lock] = request;
            let grant = self.grants[lock / LOCKS_PER_GRANT].map_or(Grant::default(), |line| line.grants[lock % LOCKS_PER_GRANT]);
            let answers = (u32::from(grant.slot), grant.incarnation, grant.request) == (slot, fetched.incarnation, request.number as u16);
            if answers && request.flags & (Request::WANT | Request::CLEAN | Request::DIRTY) == Request::CLEAN {
                self.ended[lock] = grant.number;
            }
            if request.flags & Request::WANT != 0 && !self.queues[lock].contains(&slot) {
                self.queues[lock].push_back(slot);
            }
        }
    }
}
