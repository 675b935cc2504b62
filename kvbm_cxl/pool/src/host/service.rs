// SPDX-License-Identifier: Apache-2.0
//! The host's service: heartbeat, recalls of sticky locks, fences and the re-join after one, proofs stated on this machine.
//!
//! Every process of a host may run it; a mutex in the local segment lets one of them work at a time, so that the host's heartbeat does not
//! depend on a single process.

use super::hooks::Work;
use super::local_mutex::{Acquired, Asker};
use super::segment::{flag, state};
use super::{Host, Inner};
use crate::background::{Background, FailedRound, FailedRounds, held};
use crate::cpus::ThreadKind;
use crate::error::{Error, Result, escaped};
use crate::fault::{mutant, point};
use crate::line::{FETCHED_TOGETHER, Line, if_whole};
use crate::media::{Grant, GrantLine, Identity, LOCKS_PER_GRANT, LOCKS_PER_REQUEST, MediaLine, RequestLine, Summary, VERSIONS_PER_SUMMARY};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Rest between two rounds while a lock changes hands, in nanoseconds.
const BUSY_REST_NS: u64 = 20_000;
/// Looks at a lock within the time after which it is given back unused.
const IDLE_LOOKS: u64 = 16;

/// After so many rounds in a row that found nothing, the thread rests twice as long: what a host costs that does nothing is how often it
/// wakes.
const QUIET_ROUNDS: u32 = 256;

/// Once nothing is held or wanted that a look could find in time, so many looks within a heartbeat are left: for fences, and for the first
/// request after a while.
const LOOKS_AT_REST: u64 = 2;

/// After a lock changed hands the thread looks so many times as often for so many rounds: where one went another will go soon, and each
/// waits for a round here.
const BRISK_FACTOR: u64 = 4;
const BRISK_ROUNDS: u32 = 40;

impl Inner {
    /// [`Host::service_round`].
    pub fn service_round(&self) -> Result<u64> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed);
        }
        self.look_at_files();
        let is_alive = |tag| self.is_tag_alive(tag);
        let asker = Asker { tag: self.tag, platform: &*self.platform, is_alive: &is_alive };
        let service = &self.segment.header().upkeep.service;
        let mut served = Ok(false);
        if service.try_lock_or_inherit(&asker).is_some() {
            served = self.serve_host();
            service.unlock(&*self.platform);
        }
        if let stopped @ (state::REPLACED | state::UNROOTED) = self.state() {
            return Err(self.not_live(stopped));
        }
        // Also after an error above: a damaged line may be one that this machine's seat writes again.
        let managed = self.manage();
        self.look_at_damage()?;
        let busy = served? | managed?;
        Ok(if busy { BUSY_REST_NS } else { self.config.poll_us * 1_000 })
    }

    /// Once per heartbeat, in every process: are the pool's files still where they were opened?
    fn look_at_files(&self) {
        let now_ns = self.platform.now_ns();
        if now_ns.saturating_sub(self.looked_at_files_ns.load(Ordering::Relaxed)) < self.config.heartbeat_ms * 1_000_000 {
            return;
        }
        self.looked_at_files_ns.store(now_ns, Ordering::Relaxed);
        let moved = self.platform.moved_files();
        if self.moved_files.swap(moved.len() as u64, Ordering::Relaxed) < moved.len() as u64 {
            // No call fails for it, so that no error would tell.
            eprintln!(
                "cxl-pool: {} was removed or replaced while hosts use it. They go on with the memory that they have mapped; hosts that \
                 come from now on are in another pool, or in none. Put the file back, or end all processes of the pool and start them \
                 again",
                escaped(&moved.join(", "))
            );
        }
    }

    /// What only one process at a time does for the host; true when a lock is about to change hands.
    fn serve_host(&self) -> Result<bool> {
        match self.state() {
            state::LIVE => {
                self.beat()?;
                self.check_fences_of_service()?;
                self.serve_recalls()
            }
            state::FENCED => {
                self.join_again()?;
                Ok(true)
            }
            state::REPLACED => self.leave_void_pool().map(|()| false),
            _ => Ok(false),
        }
    }

    /// The pool is being formatted again. While its superblocks are void, this host's lines are still its own: they say that it lives as
    /// long as an operation runs, and then that it has left, for which a format that evicts hosts waits. Once a superblock is there they
    /// are another pool's.
    fn leave_void_pool(&self) -> Result<()> {
        let (header, incarnation) = (self.segment.header(), self.incarnation());
        let has_said_so = header.upkeep.drained.load(Ordering::Acquire) >= incarnation;
        if has_said_so || super::join::superblock_lines(&self.lines)?.iter().any(|line| *line != Line::ZERO) {
            return Ok(());
        }
        let gone = self.segment.dead_tags(|process| self.platform.is_alive(process));
        self.segment.forget(&gone);
        if self.segment.operations() > 0 && !mutant!("evict.left_at_work") {
            header.upkeep.heartbeat.fetch_add(1, Ordering::Relaxed);
            return self.publish_summary(0);
        }
        // Nothing of this host may come out of its machine's caches over the blocks of the new pool.
        self.flush_residue(self.slot() as u16, Work::Void)?;
        header.upkeep.drained.store(incarnation, Ordering::Release);
        self.publish_identity(Identity::LEFT, incarnation)
    }

    fn beat(&self) -> Result<()> {
        let header = self.segment.header();
        let now_ns = self.platform.now_ns();
        // A time to come can only be something that was left there: it must not keep the heart from beating.
        let since_ns = now_ns.checked_sub(header.upkeep.heartbeat_at_ns.load(Ordering::Relaxed));
        if since_ns.is_some_and(|since_ns| since_ns < self.config.heartbeat_ms * 1_000_000) {
            return Ok(());
        }
        header.upkeep.heartbeat_at_ns.store(now_ns, Ordering::Relaxed);
        if let Err(error) = self.platform.check_local() {
            let _ = header.state.compare_exchange(state::LIVE, state::UNROOTED, Ordering::SeqCst, Ordering::SeqCst);
            return Err(error);
        }
        // Before anything is published: after a re-format our lines are another pool's.
        if super::join::superblock_lines(&self.lines)? != self.superblocks {
            let _ = header.state.compare_exchange(state::LIVE, state::REPLACED, Ordering::SeqCst, Ordering::SeqCst);
            return Err(self.not_live(state::REPLACED));
        }
        header.upkeep.heartbeat.fetch_add(1, Ordering::Relaxed);
        self.publish_summary(0)?;
        if self.reap()? > 0 {
            self.recover_locks_of_the_dead()?;
        }
        self.look_for_manager();
        self.report()?;
        // Two machines with one identity cannot be kept apart, but they can be noticed: another machine writes our line.
        let Some(identity) = if_whole(self.lines.fetch::<Identity>(self.slot().into()))? else {
            // Another machine that writes it does so again, and is seen then.
            self.publish_identity(Identity::LIVE, self.incarnation() - 1)?;
            self.damage.healed();
            return self.mend_requests();
        };
        if identity.nonce != self.nonce() && identity.incarnation >= self.incarnation() {
            let _ = header.state.compare_exchange(state::LIVE, state::FOREIGN, Ordering::SeqCst, Ordering::SeqCst);
            return Err(self.not_live(state::FOREIGN));
        }
        self.mend_requests()
    }

    /// Looks at some of this host's request and summary lines in turn, and publishes those again that do not verify.
    fn mend_requests(&self) -> Result<()> {
        let geometry = *self.geometry();
        let Ok(_incarnation) = self.begin_operation() else { return Ok(()) };
        let mended = self.mend_some::<RequestLine>(geometry.request_lines(), |line| {
            self.publish_request_line(line)?;
            self.publish_summary(line / VERSIONS_PER_SUMMARY as u64)
        });
        let mended = mended.and_then(|()| self.mend_some::<Summary>(geometry.summary_lines(), |line| self.publish_summary(line)));
        self.end_operation();
        mended
    }

    fn mend_some<T: MediaLine>(&self, per_slot: u64, publish: impl Fn(u64) -> Result<()>) -> Result<()> {
        let beat = self.segment.header().upkeep.heartbeat.load(Ordering::Relaxed);
        let count = per_slot.min(FETCHED_TOGETHER as u64);
        let lines: Vec<u64> = (0..count).map(|step| (beat.wrapping_mul(FETCHED_TOGETHER as u64) + step) % per_slot).collect();
        let indexes: Vec<u64> = lines.iter().map(|line| u64::from(self.slot()) * per_slot + line).collect();
        let mut fetched: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut fetched)?;
        for (line, found) in lines.into_iter().zip(fetched) {
            if if_whole(found)?.is_none() {
                publish(line)?;
                self.damage.healed();
            }
        }
        Ok(())
    }

    /// A machine without a seat has no row for its statements: its identity line tells the manager, one statement after the other.
    fn report(&self) -> Result<()> {
        let header = self.segment.header();
        let stated = |slot: &u32| header.declared_dead[*slot as usize].load(Ordering::Acquire);
        if (0..self.geometry().slots).all(|slot| stated(&slot) == 0) {
            return Ok(());
        }
        // A death that only a damaged row tells of is reported once more: the manager states it in a row of its own.
        let standings = self.standings()?;
        if mutant!("witness.report_waits_for_all_rows") && if_whole(super::fence::standings(&self.lines))?.is_none() {
            return Ok(());
        }
        let unpublished = (0..self.geometry().slots).find(|slot| standings[*slot as usize].0.dead < stated(slot));
        let Some(report) = unpublished.and_then(|slot| Identity::report_of(slot, stated(&slot))) else { return Ok(()) };
        if header.upkeep.report.swap(report, Ordering::AcqRel) != report {
            self.publish_identity(Identity::LIVE, self.incarnation() - 1)?;
        }
        Ok(())
    }

    /// Notices a fence. A row that does not verify is not waited for: the heartbeat would stand still meanwhile.
    fn check_fences_of_service(&self) -> Result<()> {
        let incarnation = self.incarnation();
        if if_whole(self.own_fence())?.is_some_and(|fenced| fenced >= incarnation) {
            self.note_fenced(incarnation);
        }
        Ok(())
    }

    /// Gives back the locks that the manager recalls, and those unused here for long.
    fn serve_recalls(&self) -> Result<bool> {
        let held: Vec<u32> = self.held_locks().collect();
        if held.is_empty() {
            return Ok(false);
        }
        let seat = u64::from(self.segment.header().manager_seat.load(Ordering::Relaxed));
        let first = seat * self.geometry().grant_lines();
        let mut indexes: Vec<u64> = held.iter().map(|lock| first + u64::from(*lock) / LOCKS_PER_GRANT as u64).collect();
        indexes.dedup();
        let mut fetched: Vec<Result<GrantLine>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut fetched)?;
        let (mut busy, looks_at_idle) = (false, self.looks_at_idle());
        for lock in held {
            let at = first + u64::from(lock) / LOCKS_PER_GRANT as u64;
            let Some(Ok(line)) = indexes.iter().position(|index| *index == at).map(|position| &fetched[position]) else { continue };
            let grant = &line.grants[lock as usize % LOCKS_PER_GRANT];
            let local = self.segment.lock(lock);
            let recalled = grant.flags & Grant::RECALL != 0
                && grant.number == local.grant.load(Ordering::Acquire)
                && u32::from(grant.slot) == self.slot()
                && grant.incarnation == self.incarnation();
            if recalled {
                local.flags.fetch_or(flag::RECALL, Ordering::AcqRel);
                busy = true;
            }
            if recalled || looks_at_idle && self.is_idle(lock) {
                self.give_back_if_unused(lock)?;
            }
        }
        Ok(busy)
    }

    pub(crate) fn held_locks(&self) -> impl Iterator<Item = u32> + '_ {
        self.segment.request_lines().iter().enumerate().flat_map(|(line, local)| {
            let held = local.held.load(Ordering::Acquire);
            (0..LOCKS_PER_REQUEST as u32)
                .filter(move |bit| held & 1 << bit != 0)
                .map(move |bit| line as u32 * LOCKS_PER_REQUEST as u32 + bit)
                .filter(|lock| *lock < self.geometry().locks)
        })
    }

    /// Whether it is time to look for unused locks: seldom, since each look takes their lines out of the caches of those who do.
    fn looks_at_idle(&self) -> bool {
        let (at_ns, now_ns) = (&self.segment.header().upkeep.idle_looked_at_ns, self.platform.now_ns());
        let is_time = now_ns.abs_diff(at_ns.load(Ordering::Relaxed)) >= self.config.idle_release_ms * 1_000_000 / IDLE_LOOKS;
        if is_time {
            at_ns.store(now_ns, Ordering::Relaxed);
        }
        is_time
    }

    fn is_idle(&self, lock: u32) -> bool {
        let local = self.segment.lock(lock);
        let (uses, now_ns) = (local.uses.load(Ordering::Relaxed), self.platform.now_ns());
        if local.seen_uses.swap(uses, Ordering::Relaxed) != uses {
            local.seen_at_ns.store(now_ns, Ordering::Relaxed);
            return false;
        }
        now_ns.saturating_sub(local.seen_at_ns.load(Ordering::Relaxed)) > self.config.idle_release_ms * 1_000_000
    }

    fn give_back_if_unused(&self, lock: u32) -> Result<()> {
        let Ok(_incarnation) = self.begin_operation() else { return Ok(()) };
        let local = self.segment.lock(lock);
        let mut result = Ok(());
        let is_alive = |tag| self.is_tag_alive(tag);
        if let Some(taken) = local.mutex.try_lock_or_inherit(&Asker { tag: self.tag, platform: &*self.platform, is_alive: &is_alive }) {
            self.note_inherited(lock, taken);
            if local.flags.load(Ordering::Acquire) & flag::GRANTED != 0 {
                result = self.give_back(lock);
            }
            local.mutex.unlock(&*self.platform);
        }
        self.end_operation();
        result
    }

    /// Forgets processes of this host that no longer exist, and tells how many those were. From here on their work counts as ended, so
    /// what they left in this machine's caches comes out before.
    fn reap(&self) -> Result<usize> {
        let gone = self.segment.dead_tags(|process| self.platform.is_alive(process));
        if !gone.is_empty() {
            let is_gone = |tag| gone.contains(&tag) || self.segment.process_of(tag).is_none();
            self.flush_residue(self.slot() as u16, Work::Processes(&is_gone))?;
            self.segment.forget(&gone);
        }
        Ok(gone.len())
    }

    /// A process of this host died: what it asked for is cancelled, what it held is marked for repair, and what it may have changed in the
    /// segment without publishing is published.
    fn recover_locks_of_the_dead(&self) -> Result<()> {
        let Ok(_incarnation) = self.begin_operation() else { return Ok(()) };
        let is_alive = |tag| self.is_tag_alive(tag);
        let asker = Asker { tag: self.tag, platform: &*self.platform, is_alive: &is_alive };
        for (lock, local) in self.segment.all_locks().iter().enumerate() {
            if local.mutex.is_locked()
                && let Some(taken) = local.mutex.try_lock_or_inherit(&asker)
            {
                self.note_inherited(lock as u32, taken);
                local.mutex.unlock(&*self.platform);
            }
        }
        let lines = 0..self.geometry().request_lines();
        let result = lines
            .map(|line| self.publish_request_line(line))
            .chain((0..self.geometry().summary_lines()).map(|line| self.publish_summary(line)))
            .collect();
        self.end_operation();
        result
    }

    /// The local mutex of `lock` came from a dead process: its critical section was cut short, or its request has no waiter.
    pub(crate) fn note_inherited(&self, lock: u32, taken: Acquired) {
        if taken == Acquired::Clean {
            return;
        }
        let flags = &self.segment.lock(lock).flags;
        let found = flags.load(Ordering::Acquire);
        if found & flag::GRANTED != 0 {
            flags.fetch_or(flag::REPAIR | flag::DIRTY, Ordering::AcqRel);
        } else {
            flags.store(found & (flag::DIRTY | flag::CLEAN), Ordering::Release);
        }
    }

    /// FENCED: once no operation runs any more, acknowledge (mode S may now hand our locks over) and join again.
    fn join_again(&self) -> Result<()> {
        self.reap()?;
        if self.segment.operations() > 0 {
            return Ok(());
        }
        point!("fenced.quiet");
        self.publish_identity(Identity::LIVE, self.incarnation())?;
        point!("fenced.acknowledged");
        self.segment.reset_locks();
        let deadline_ns = self.platform.now_ns() + self.config.join_timeout_ms() * 1_000_000;
        match self.take_slot(Some(self.slot()), false, deadline_ns) {
            // No other host can have the slot before our death is proven, so the next round asks again.
            Err(Error::Timeout { .. } | Error::SlotInUse { .. }) => Ok(()),
            other => other,
        }
    }

    pub(crate) fn publish_summary(&self, line: u64) -> Result<()> {
        let header = self.segment.header();
        self.with_mutex(&header.upkeep.summary, || {
            let mut summary = Summary {
                incarnation: self.incarnation(),
                heartbeat: header.upkeep.heartbeat.load(Ordering::Acquire),
                ..Summary::default()
            };
            let first = line as usize * VERSIONS_PER_SUMMARY;
            for (version, local) in summary.versions.iter_mut().zip(self.segment.request_lines().iter().skip(first)) {
                *version = local.version.load(Ordering::Acquire);
            }
            self.lines.publish(u64::from(self.slot()) * self.geometry().summary_lines() + line, summary)
        })
    }
}

impl Inner {
    /// Ends a long rest of this process's service thread: something is held or wanted from now on.
    pub(crate) fn wake_service(&self) {
        if let Some(thread) = held(&self.resting).take() {
            thread.unpark();
        }
    }

    /// Whether the calling thread, the service's, may rest for long: nothing is recalled from a host that holds nothing, and a manager has
    /// no host to notify of requests. A thread that changes that afterwards wakes this one.
    fn may_rest(&self) -> bool {
        // Before the look: a change that the look misses comes later, and finds the thread here.
        *held(&self.resting) = Some(std::thread::current());
        let is_quiet = self.state() == state::LIVE && self.damage.counts().remembered_lines == 0;
        let rests = is_quiet && self.held_locks().next().is_none() && self.manages_nothing();
        if !rests {
            held(&self.resting).take();
        }
        rests
    }
}

/// How long the thread rests, of the `rest_ns` that a round asked for, after so many rounds in a row that found nothing.
fn rest_after(rest_ns: u64, quiet_rounds: u32) -> u64 {
    match quiet_rounds {
        0 => rest_ns,
        1..=BRISK_ROUNDS => rest_ns / BRISK_FACTOR,
        rounds if rounds > QUIET_ROUNDS => rest_ns * 2,
        _ => rest_ns,
    }
}

/// The service on threads of its own; dropping it stops them.
pub struct Service {
    _thread: Background,
    _witness: Background,
    failed_rounds: Arc<FailedRounds>,
}

impl Service {
    pub(super) fn start(host: &Host) -> Result<Service> {
        let (host, watched, failed_rounds) = (host.clone(), host.clone(), host.failed_rounds().clone());
        let cpus = host.config().cpus.set_of(ThreadKind::Upkeep).cloned();
        let mut quiet_rounds = BRISK_ROUNDS;
        let round = move || match host.service_round() {
            Ok(rest_ns) => {
                quiet_rounds = if rest_ns == BUSY_REST_NS { 0 } else { quiet_rounds.saturating_add(1) };
                let rest_ns = rest_after(rest_ns, quiet_rounds);
                let is_long = quiet_rounds > QUIET_ROUNDS && host.inner.may_rest();
                let long_ns = host.config().heartbeat_ms * 1_000_000 / LOOKS_AT_REST;
                Some(Duration::from_nanos(if is_long { rest_ns.max(long_ns) } else { rest_ns }))
            }
            Err(Error::Closed) => None,
            // Whatever it is (a device that went away, a damaged line): the calls of this host meet it too.
            Err(error) => {
                host.failed_rounds().record("the service", &error);
                Some(Duration::from_nanos(host.config().heartbeat_ms * 1_000_000))
            }
        };
        let thread = Background::start("cxl-service", "start the service thread", cpus.as_ref(), round)?;
        let witness = move || match watched.witness_round() {
            Ok(rest_ns) => Some(Duration::from_nanos(rest_ns)),
            Err(Error::Closed) => None,
            // Nothing is stated meanwhile.
            Err(error) => {
                watched.failed_rounds().record("looking for hosts that have ended", &error);
                Some(Duration::from_millis(watched.config().suspect_ms))
            }
        };
        let witness = Background::start("cxl-witness", "start the thread that looks for ended hosts", cpus.as_ref(), witness)?;
        Ok(Service { _thread: thread, _witness: witness, failed_rounds })
    }

    /// The latest round that failed of this process's background threads on this host; a later round that went well does not clear it.
    pub fn last_error(&self) -> Option<FailedRound> {
        self.failed_rounds.last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_is_brisk_after_work_and_slow_after_none() {
        let rests = [0, 1, BRISK_ROUNDS, BRISK_ROUNDS + 1, QUIET_ROUNDS, QUIET_ROUNDS + 1, u32::MAX].map(|rounds| rest_after(1000, rounds));
        assert_eq!(rests, [1000, 250, 250, 1000, 1000, 2000, 2000]);
    }
}
