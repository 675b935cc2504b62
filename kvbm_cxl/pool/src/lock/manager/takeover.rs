// SPDX-License-Identifier: Apache-2.0
//! Claim, collect, adopt (M1 to M4): Disk Paxos with one disk, each grant or binding line one register.

use super::Active;
use super::hosts::HostView;
use super::watch::{ManagerWatch, Pulse};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::{FenceStatus, Inner};
use crate::limits::{MAX_NUMBER, MAX_SEATS};
use crate::lock::seat;
use crate::media::{Binding, GrantLine, LOCKS_PER_GRANT, MediaLine};
use arrayvec::ArrayVec;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// A register line: has a tag that orders its copies.
pub(super) trait Tagged: MediaLine {
    fn tag(&self) -> u32;
    fn with_tag(self, tag: u32) -> Self;
    /// Highest number in it, for the rule that must not be used to choose a copy.
    fn number(&self) -> u32;
}

impl Tagged for GrantLine {
    fn tag(&self) -> u32 {
        self.tag
    }
    fn with_tag(self, tag: u32) -> Self {
        GrantLine { tag, ..self }
    }
    fn number(&self) -> u32 {
        self.grants.iter().map(|grant| grant.number).max().unwrap_or(0)
    }
}

impl Tagged for Binding {
    fn tag(&self) -> u32 {
        self.tag
    }
    fn with_tag(self, tag: u32) -> Self {
        Binding { tag, ..self }
    }
    fn number(&self) -> u32 {
        self.incarnation
    }
}

impl Inner {
    /// Claims the role for `seat`; `None` when another seat claimed a higher epoch meanwhile. The observations of `watch` stay valid: the
    /// silence of a host that died with the manager is over by now.
    pub(super) fn take_over(&self, seat: u64, watch: &ManagerWatch) -> Result<Option<Active>> {
        let geometry = *self.geometry();
        // M1
        let (mut seen, mut own_before) = (0, None);
        for (number, line) in (0..).zip(seat::each(&self.lines)?) {
            let found = match line {
                Err(Error::BadLine { .. }) if number == seat => self.highest_own_epoch(seat)?,
                Err(Error::BadLine { .. }) if self.is_vacant(number)? => 0,
                line => {
                    let epoch = line?.epoch;
                    own_before = if number == seat { Some(epoch) } else { own_before };
                    epoch
                }
            };
            seen = found.max(seen);
        }
        let epoch = seat::next_epoch(seat, geometry.all_seats(), seen);
        if epoch >= MAX_NUMBER.into() {
            return Err(Error::Full { what: "manager epochs", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        let epoch = epoch as u32;
        let early = if mutant!("collect_before_claim") {
            Some((
                self.collect::<GrantLine>(seat, own_before, geometry.grant_lines())?,
                self.collect::<Binding>(seat, own_before, geometry.bindings())?,
            ))
        } else {
            None
        };
        // M2
        point!("manager.before_claim");
        self.segment.header().seat_epoch.fetch_max(epoch, Ordering::AcqRel);
        let (beat, beat_at_ns) = (1, self.platform.now_ns());
        self.lines.publish(seat, self.seat_line(seat, epoch, beat))?;
        point!("manager.claimed");
        // M3, strictly after M2
        let (grants, bindings) = match early {
            Some(early) => early,
            None => (self.collect(seat, own_before, geometry.grant_lines())?, self.collect(seat, own_before, geometry.bindings())?),
        };
        point!("manager.collected");
        // M4
        let grants = self.adopt(seat, epoch, grants)?;
        let bindings = self.adopt(seat, epoch, bindings)?;
        point!("manager.adopted");
        let now_ns = self.platform.now_ns();
        let (fences, deaths) = self.own_rows(seat)?;
        let hosts = (0..).zip(&bindings).map(|(slot, bound)| {
            let incarnation = bound.as_ref().map_or(0, |bound| bound.incarnation);
            HostView::new(&geometry, watch.pulse_of(slot, incarnation, now_ns))
        });
        let hosts = hosts.collect();
        let mut active = Active {
            seat,
            epoch,
            beat,
            beat_at_ns,
            grants,
            bindings,
            fences,
            deaths,
            standings: vec![FenceStatus::default(); geometry.slots as usize],
            is_whole: vec![true; geometry.slots as usize],
            hosts,
            ended: vec![0; geometry.locks as usize],
            queues: vec![VecDeque::new(); geometry.locks as usize],
            boxes_at_ns: 0,
            mended: 0,
            own_before,
            late_fences: Vec::new(),
        };
        self.rebuild_queues(&mut active, now_ns)?;
        Ok(Some(active))
    }

    /// M3: for each register the copy with the highest tag; `None` where a damaged copy may hide a higher one.
    fn collect<T: Tagged>(&self, own_seat: u64, own_before: Option<u32>, per_seat: u64) -> Result<Vec<Option<T>>> {
        (0..per_seat).map(|line| self.collect_line(own_seat, own_before, per_seat, line)).collect()
    }

    fn collect_line<T: Tagged>(&self, own_seat: u64, own_before: Option<u32>, per_seat: u64, line: u64) -> Result<Option<T>> {
        let seats = self.geometry().all_seats();
        let indexes: Vec<u64> = if mutant!("no_collect") {
            vec![own_seat * per_seat + line]
        } else {
            (0..seats).map(|seat| seat::copy_of(seat) * per_seat + line).collect()
        };
        let mut copies: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut copies)?;
        let mut best: Option<T> = None;
        let mut hidden = ArrayVec::<u64, MAX_SEATS>::new();
        for (&index, copy) in indexes.iter().zip(copies) {
            let copy = match copy {
                Ok(copy) => copy,
                Err(Error::BadLine { .. }) => {
                    hidden.push(index / per_seat);
                    continue;
                }
                Err(other) => return Err(other),
            };
            let better = best
                .as_ref()
                .is_none_or(|best| if mutant!("adopt_by_grant_number") { copy.number() > best.number() } else { copy.tag() > best.tag() });
            if better {
                best = Some(copy);
            }
        }
        let tag = best.map_or(0, |best| best.tag());
        for seat in hidden {
            if self.may_hide_more(own_seat, own_before, seat, tag)? {
                return Ok(None);
            }
        }
        Ok(best)
    }

    /// M3 and M4 again for the registers that a damaged copy blocks: its writer may only have been stopped in the middle of it.
    pub(super) fn adopt_blocked(&self, active: &mut Active, now_ns: u64) -> Result<()> {
        let (seat, epoch, own_before) = (active.seat, active.epoch, active.own_before);
        for line in 0..active.grants.len() {
            if active.grants[line].is_none() {
                active.grants[line] = self.adopt_line(seat, epoch, own_before, active.grants.len() as u64, line as u64)?;
            }
        }
        for line in 0..active.bindings.len() {
            if active.bindings[line].is_none() {
                active.bindings[line] = self.adopt_line(seat, epoch, own_before, active.bindings.len() as u64, line as u64)?;
                // This host was not watched yet.
                if let Some(view) = active.hosts.get_mut(line) {
                    *view = HostView::new(self.geometry(), Pulse::since(now_ns));
                }
            }
        }
        Ok(())
    }

    fn adopt_line<T: Tagged>(&self, seat: u64, epoch: u32, own_before: Option<u32>, per_seat: u64, line: u64) -> Result<Option<T>> {
        let value = self.collect_line::<T>(seat, own_before, per_seat, line)?.map(|value| value.with_tag(epoch));
        if let Some(value) = value {
            self.lines.publish(seat::copy_of(seat) * per_seat + line, value)?;
        }
        Ok(value)
    }

    /// M4: publishes every collected register as this seat's own copy under its epoch.
    fn adopt<T: Tagged>(&self, seat: u64, epoch: u32, collected: Vec<Option<T>>) -> Result<Vec<Option<T>>> {
        let per_seat = collected.len() as u64;
        let mut own = Vec::with_capacity(collected.len());
        for (line, value) in collected.into_iter().enumerate() {
            let value = value.map(|value| value.with_tag(epoch));
            if let Some(value) = value {
                self.lines.publish(seat::copy_of(seat) * per_seat + line as u64, value)?;
            }
            own.push(value);
        }
        Ok(own)
    }

    /// Publishes the grant copies of `seat` empty: what a restarted seat machine must not do (only with that rule dropped).
    pub(super) fn clear_rows(&self, seat: u64) -> Result<()> {
        let per_seat = self.geometry().grant_lines();
        (0..per_seat).try_for_each(|line| self.lines.publish(seat * per_seat + line, GrantLine::default()))
    }

    /// After a takeover: every request of every bound slot is looked at, and waiters queue in slot order after the last holder.
    fn rebuild_queues(&self, active: &mut Active, now_ns: u64) -> Result<()> {
        self.look_at_hosts(active, now_ns)?;
        let slots = self.geometry().slots;
        for (lock, queue) in active.queues.iter_mut().enumerate() {
            let holder = active.grants[lock / LOCKS_PER_GRANT].map_or(0, |line| u32::from(line.grants[lock % LOCKS_PER_GRANT].slot));
            queue.make_contiguous().sort_by_key(|slot| (slot + 2 * slots - holder % slots - 1) % slots);
        }
        Ok(())
    }
}
