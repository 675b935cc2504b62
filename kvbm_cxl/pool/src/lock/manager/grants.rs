// SPDX-License-Identifier: Apache-2.0
//! Serving the locks: S1 to S4.

use super::Active;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Inner;
use crate::limits::MAX_NUMBER;
use crate::line::if_whole;
use crate::lock::{LockId, LockMode, mode_of, seat};
use crate::media::{Grant, Identity, LOCKS_PER_GRANT, Request};

/// How the holder named by the last grant of a lock stands.
enum Holder {
    Held,
    Over { repair: bool },
}

impl Inner {
    /// Looks at every lock that has waiters; true while any of them has a waiter left.
    pub(super) fn serve_locks(&self, active: &mut Active) -> Result<bool> {
        let mut waiting = false;
        for lock in 0..self.geometry().locks {
            if !active.queues[lock as usize].is_empty() {
                waiting |= self.serve_lock(active, lock)?;
            }
        }
        Ok(waiting)
    }

    fn serve_lock(&self, active: &mut Active, lock: LockId) -> Result<bool> {
        let (line, place) = (lock as usize / LOCKS_PER_GRANT, lock as usize % LOCKS_PER_GRANT);
        // A blocked line is not served: a damaged copy may hide a grant that a host accepted.
        let Some(mut copy) = active.grants[line] else { return Ok(false) };
        let last = copy.grants[place];
        active.forget_void_waiters(lock, &last);
        let Some(&next) = active.queues[lock as usize].front() else { return Ok(false) };
        let grant = match self.holder(active, lock, &last)? {
            Holder::Held => {
                if last.flags & Grant::RECALL != 0 || mutant!("no_recall") {
                    return Ok(true);
                }
                // S4
                Grant { flags: last.flags | Grant::RECALL, ..last }
            }
            Holder::Over { repair } => {
                // S3
                let (incarnation, request) = active.hosts[next as usize].request(lock);
                if last.number >= MAX_NUMBER - 1 {
                    return Err(Error::Full { what: "grant numbers of a lock", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
                }
                active.queues[lock as usize].pop_front();
                let recall = !active.queues[lock as usize].is_empty() && !mutant!("no_recall");
                let flags = if repair { Grant::REPAIR } else { 0 } | if recall { Grant::RECALL } else { 0 };
                Grant { number: last.number + 1, incarnation, request: request.number as u16, slot: next as u8, flags }
            }
        };
        copy.grants[place] = grant;
        copy.tag = active.epoch;
        point!("manager.before_grant");
        // Before it is published: from here a line that does not verify any more is written again.
        active.grants[line] = Some(copy);
        self.lines.publish(seat::copy_of(active.seat) * self.geometry().grant_lines() + line as u64, copy)?;
        point!("manager.granted");
        Ok(!active.queues[lock as usize].is_empty())
    }

    /// S1 and S2: whether the holder of `last` is over, and how it ended.
    fn holder(&self, active: &Active, lock: LockId, last: &Grant) -> Result<Holder> {
        if last.number == 0 {
            return Ok(Holder::Over { repair: false });
        }
        if active.ended[lock as usize] == last.number {
            return Ok(Holder::Over { repair: false });
        }
        let holder = u32::from(last.slot);
        let Some(view) = active.hosts.get(holder as usize) else {
            return Ok(Holder::Over { repair: true });
        };
        let (incarnation, request) = view.request(lock);
        let repair_was_due = last.flags & Grant::REPAIR != 0;
        if incarnation > last.incarnation && !mutant!("no_incarnation") {
            return Ok(Holder::Over { repair: true });
        }
        if incarnation == last.incarnation || mutant!("no_incarnation") {
            // Numbers in grants are cut to 16 bits; one request is open per lock and host, so the distance is small.
            let ahead = (request.number as u16).wrapping_sub(last.request) as i16;
            let dirty = request.flags & Request::DIRTY != 0;
            let gave_back = request.flags & Request::WANT == 0;
            if mutant!("no_reqno") {
                if gave_back {
                    return Ok(Holder::Over { repair: dirty || (repair_was_due && request.flags & Request::CLEAN == 0) });
                }
            } else if ahead > 0 {
                return Ok(Holder::Over { repair: dirty || repair_was_due });
            } else if ahead == 0 && gave_back {
                return Ok(Holder::Over { repair: dirty || (repair_was_due && request.flags & Request::CLEAN == 0) });
            }
        }
        let fenced = active.standings[holder as usize].fenced >= last.incarnation;
        if fenced {
            let passes = match mode_of(self.geometry(), lock) {
                LockMode::Timed => true,
                LockMode::Safe => self.has_stopped(active, holder, last.incarnation)?,
            };
            if passes {
                point!("manager.passes_on");
                return Ok(Holder::Over { repair: true });
            }
        }
        Ok(Holder::Held)
    }

    /// The proof that mode S waits for (LOCKS.md section 6): the holder says so itself, its machine joined again, or an operator stated it.
    fn has_stopped(&self, active: &Active, slot: u32, incarnation: u32) -> Result<bool> {
        if mutant!("suspicion_is_proof") || active.standings[slot as usize].dead >= incarnation {
            return Ok(true);
        }
        // A re-binding was only granted on a proof.
        if active.bound(slot).is_some_and(|bound| bound > incarnation) {
            return Ok(true);
        }
        let says_so = |identity: Identity| {
            identity.acknowledged >= incarnation || (identity.state == Identity::LEFT && identity.incarnation >= incarnation)
        };
        Ok(if_whole(self.lines.fetch(slot.into()))?.is_some_and(says_so))
    }
}

impl Active {
    /// Drops waiters from the front of the queue that nothing can be granted to.
    fn forget_void_waiters(&mut self, lock: LockId, last: &Grant) {
        while let Some(&slot) = self.queues[lock as usize].front() {
            let (incarnation, request) = self.hosts[slot as usize].request(lock);
            let wants = request.flags & Request::WANT != 0
                && self.bound(slot) == Some(incarnation)
                && self.standings[slot as usize].fenced < incarnation;
            let has_it = last.number != 0
                && u32::from(last.slot) == slot
                && last.incarnation == incarnation
                && last.request == request.number as u16
                && !mutant!("no_reqno");
            if wants && !has_it {
                return;
            }
            self.queues[lock as usize].pop_front();
        }
    }
}
