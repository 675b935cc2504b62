// SPDX-License-Identifier: Apache-2.0
//! The global tier on the host's side: H1 to H3, release and cancel (LOCKS.md section 3).

use super::{LockId, seat};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Inner;
use crate::host::segment::{LocalLock, flag, state};
use crate::limits::MAX_NUMBER;
use crate::line::if_whole;
use crate::media::{Grant, GrantLine, LOCKS_PER_GRANT, LOCKS_PER_REQUEST, RequestLine, VERSIONS_PER_SUMMARY};
use std::sync::atomic::Ordering;

/// Polls of one manager's grant line before the host asks again who the manager is.
const POLLS_PER_SEAT: u32 = 100;

/// A grant that was seen and not yet accepted.
struct Seen {
    seat: u64,
    tag: u32,
    grant: Grant,
}

/// A wait for grants, which may last for several of them.
pub(super) struct Wait {
    deadline_ns: u64,
    timeout_ms: u64,
    polls: u32,
}

impl Wait {
    pub fn new(deadline_ns: u64, timeout_ms: u64) -> Self {
        Wait { deadline_ns, timeout_ms, polls: 0 }
    }
}

impl Inner {
    /// Makes the lock this host's, whose local mutex the caller holds within an operation of `incarnation`; returns the grant number.
    pub(super) fn obtain(&self, lock: LockId, incarnation: u32, wait: impl FnOnce() -> Wait) -> Result<u32> {
        match self.ask(lock)? {
            Some(grant) => Ok(grant),
            None => self.await_any(&[lock], incarnation, &mut wait()).map(|(_, grant)| grant),
        }
    }

    /// Asks for a lock, unless it is here; then returns the grant number. The caller holds the local mutex within an operation.
    pub(super) fn ask(&self, lock: LockId) -> Result<Option<u32>> {
        if let Some(grant) = self.granted(lock) {
            return Ok(Some(grant));
        }
        let local = self.segment.lock(lock);
        if local.flags.load(Ordering::Acquire) & flag::GRANTED != 0 {
            self.give_back(lock)?;
        }
        self.request(lock, local)?;
        point!("lock.requested");
        Ok(None)
    }

    /// Waits until one of the locks that were asked for is granted; returns its place and the grant number. After an error none of them is
    /// asked for any more. The caller holds their local mutexes within an operation of `incarnation`.
    pub(super) fn await_any(&self, asked: &[LockId], incarnation: u32, wait: &mut Wait) -> Result<(usize, u32)> {
        let awaited = self.await_grant(asked, incarnation, wait);
        if awaited.is_err() {
            self.cancel_all(asked)?;
        }
        awaited
    }

    /// Takes back the requests that are not granted yet. A host that is not live writes nothing: no manager grants it anything any more.
    pub(super) fn cancel_all(&self, asked: &[LockId]) -> Result<()> {
        if self.state() != state::LIVE {
            return Ok(());
        }
        asked.iter().try_for_each(|&lock| self.cancel(lock, self.segment.lock(lock)))
    }

    fn await_grant(&self, asked: &[LockId], incarnation: u32, wait: &mut Wait) -> Result<(usize, u32)> {
        let mut damaged = None;
        loop {
            if self.state() != state::LIVE {
                return Err(self.not_live(self.state()));
            }
            if self.platform.now_ns() >= wait.deadline_ns {
                let first = asked.first().copied().unwrap_or_default();
                let timeout = || Error::Timeout { what: format!("lock {first}"), timeout_ms: wait.timeout_ms };
                return Err(damaged.unwrap_or_else(timeout));
            }
            damaged = None;
            for (place, &lock) in asked.iter().enumerate() {
                let local = self.segment.lock(lock);
                match self.poll(lock, local, incarnation) {
                    Ok(Some(seen)) => {
                        self.take(lock, local, &seen);
                        point!("lock.accepted");
                        return Ok((place, seen.grant.number));
                    }
                    Ok(None) => {}
                    // A writer may be stopped in the middle of the line.
                    Err(error) => damaged = Some(self.wait_for_whole(error, self.config.damage_ms)?),
                }
            }
            wait.polls += 1;
            if wait.polls.is_multiple_of(POLLS_PER_SEAT) {
                self.look_for_manager();
                for &lock in asked {
                    if let Some(error) = if_whole(self.blocked_grant(u64::from(lock) / LOCKS_PER_GRANT as u64))?.flatten() {
                        damaged = Some(self.wait_for_whole(error, self.config.damage_ms)?);
                    }
                }
            }
            self.platform.relax(wait.polls);
        }
    }

    /// The number of a grant that stayed here from before and is not wanted back, for one more use of it. The caller holds the local mutex
    /// within an operation.
    pub(super) fn granted(&self, lock: LockId) -> Option<u32> {
        let local = self.segment.lock(lock);
        let stays = local.flags.load(Ordering::Acquire) & (flag::GRANTED | flag::RECALL) == flag::GRANTED;
        stays.then(|| {
            local.note_use();
            local.grant.load(Ordering::Acquire)
        })
    }

    /// H1
    fn request(&self, lock: LockId, local: &LocalLock) -> Result<()> {
        let number = local.number.load(Ordering::Acquire).saturating_add(1);
        if number >= MAX_NUMBER {
            return Err(Error::Full {
                what: "request numbers of this lock",
                limit: MAX_NUMBER.into(),
                advice: "leave the pool and join again",
            });
        }
        let dirty = local.flags.load(Ordering::Acquire) & flag::DIRTY;
        local.number.store(number, Ordering::Release);
        local.flags.store(flag::WANT | dirty, Ordering::Release);
        self.publish_request(lock)?;
        // It may be this very process that grants.
        self.wake_service();
        Ok(())
    }

    /// H2 and H3: one look at the manager's grant; `Some` when the lock is ours for every later manager too.
    fn poll(&self, lock: LockId, local: &LocalLock, incarnation: u32) -> Result<Option<Seen>> {
        let early = if mutant!("check_before_grant_read") { seat::newest(self)? } else { None };
        let seat = u64::from(self.segment.header().manager_seat.load(Ordering::Relaxed));
        let index = seat::copy_of(seat) * self.geometry().grant_lines() + u64::from(lock) / LOCKS_PER_GRANT as u64;
        let line: GrantLine = self.lines.fetch(index)?;
        let grant = line.grants[lock as usize % LOCKS_PER_GRANT];
        let mine = line.tag != 0
            && grant.number != 0
            && u32::from(grant.slot) == self.slot()
            && (grant.incarnation == incarnation || mutant!("no_incarnation"))
            && (grant.request == local.number.load(Ordering::Acquire) as u16 || mutant!("no_reqno"));
        if !mine {
            return Ok(None);
        }
        let seen = Seen { seat, tag: line.tag, grant };
        // A manager on this very host may have written the grant into our cache only, where no other manager can collect it.
        self.lines.settle::<GrantLine>(index)?;
        point!("lock.seen");
        if mutant!("accept_without_check") {
            return Ok(Some(seen));
        }
        if mutant!("check_before_grant_read") {
            return Ok(early.is_none_or(|newest| newest.epoch <= seen.tag).then_some(seen));
        }
        if mutant!("check_own_manager_only") {
            let own: crate::media::Seat = self.lines.fetch(seen.seat)?;
            return Ok((own.epoch <= seen.tag).then_some(seen));
        }
        if mutant!("manager_self_shortcut") && self.is_own_seat(seen.seat) {
            return Ok(Some(seen));
        }
        match seat::newest(self)? {
            Some(newest) if newest.epoch > seen.tag => {
                self.segment.header().manager_seat.store(newest.seat as u32, Ordering::Relaxed);
                Ok(None)
            }
            _ => Ok(Some(seen)),
        }
    }

    fn take(&self, lock: LockId, local: &LocalLock, seen: &Seen) {
        let mut flags = local.flags.load(Ordering::Acquire) & flag::DIRTY | flag::WANT | flag::GRANTED;
        if seen.grant.flags & Grant::REPAIR != 0 {
            flags = flags & !flag::DIRTY | flag::REPAIR;
        }
        if seen.grant.flags & Grant::RECALL != 0 {
            flags |= flag::RECALL;
        }
        local.grant.store(seen.grant.number, Ordering::Release);
        // In front of the flag, or the service takes the new grant for one that has been idle since the use before.
        local.note_use();
        // Last, so that who inherits the mutex from a dead process finds a complete grant or none.
        local.flags.store(flags, Ordering::Release);
        self.mark_held(lock, true);
    }

    /// RELEASE of the global tier. The caller holds the local mutex within an operation.
    pub(crate) fn give_back(&self, lock: LockId) -> Result<()> {
        let local = self.segment.lock(lock);
        let flags = local.flags.load(Ordering::Acquire);
        let after = if flags & flag::REPAIR == 0 { flag::CLEAN } else { flags & flag::DIRTY };
        local.flags.store(after, Ordering::Release);
        self.mark_held(lock, false);
        point!("lock.released");
        self.publish_request(lock)
    }

    /// CANCEL: a grant that still arrives for this request is void.
    fn cancel(&self, lock: LockId, local: &LocalLock) -> Result<()> {
        let dirty = local.flags.load(Ordering::Acquire) & flag::DIRTY;
        let clean = if mutant!("cancel_counts_as_repaired") { flag::CLEAN } else { 0 };
        local.flags.store(dirty | clean, Ordering::Release);
        point!("lock.cancelled");
        self.publish_request(lock)
    }

    /// Gives every held lock back; the host is leaving and no operation runs.
    pub(crate) fn give_all_back(&self) -> Result<()> {
        let held: Vec<LockId> = self.held_locks().collect();
        held.into_iter().try_for_each(|lock| self.give_back(lock))
    }

    fn mark_held(&self, lock: LockId, held: bool) {
        let line = &self.segment.request_lines()[lock as usize / LOCKS_PER_REQUEST];
        let bit = 1 << (lock as usize % LOCKS_PER_REQUEST);
        if held {
            line.held.fetch_or(bit, Ordering::AcqRel);
            // It looks for recalls from now on.
            self.wake_service();
        } else {
            line.held.fetch_and(!bit, Ordering::AcqRel);
        }
    }

    /// Asks who the manager is. Without an answer the old one stays: a poll of its lines tells soon enough.
    pub(crate) fn look_for_manager(&self) {
        if let Ok(Some(newest)) = seat::newest(self) {
            self.segment.header().manager_seat.store(newest.seat as u32, Ordering::Relaxed);
        }
    }

    /// Publishes the request line of `lock`, then the summary that announces it.
    fn publish_request(&self, lock: LockId) -> Result<()> {
        let line = u64::from(lock) / LOCKS_PER_REQUEST as u64;
        self.publish_request_line(line)?;
        point!("lock.request_published");
        self.publish_summary(line / VERSIONS_PER_SUMMARY as u64)
    }

    /// Publishes request line `line` of this host from the segment.
    pub(crate) fn publish_request_line(&self, line: u64) -> Result<()> {
        let shared = &self.segment.request_lines()[line as usize];
        self.with_mutex(&shared.mutex, || {
            let witness = if line == 0 { self.segment.header().witness.load(Ordering::Acquire) } else { 0 };
            let mut published = RequestLine { incarnation: self.incarnation(), witness, ..RequestLine::default() };
            let first = line as usize * LOCKS_PER_REQUEST;
            for (request, local) in published.requests.iter_mut().zip(self.segment.all_locks().iter().skip(first)) {
                request.number = local.number.load(Ordering::Acquire);
                request.flags = local.flags.load(Ordering::Acquire) & flag::PUBLISHED;
            }
            self.lines.publish(u64::from(self.slot()) * self.geometry().request_lines() + line, published)?;
            shared.version.fetch_add(1, Ordering::AcqRel);
            Ok(())
        })
    }
}
