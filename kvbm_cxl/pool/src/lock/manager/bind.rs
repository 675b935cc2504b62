// SPDX-License-Identifier: Apache-2.0
//! Binding slots to machines that ask for one (J3's other half).

use super::Active;
use super::hosts::{HostView, MAX_LENIENCY};
use super::watch::Pulse;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Inner;
use crate::limits::{JOINBOXES, MAX_NUMBER};
use crate::line::if_whole;
use crate::lock::seat;
use crate::media::{Binding, Identity, JoinBox};

impl Inner {
    /// Reads the join boxes and binds what may be bound.
    pub(super) fn serve_join_boxes(&self, active: &mut Active, now_ns: u64) -> Result<()> {
        let indexes: Vec<u64> = (0..JOINBOXES as u64).collect();
        let mut boxes: Vec<Result<JoinBox>> = Vec::with_capacity(JOINBOXES);
        self.lines.fetch_many(&indexes, &mut boxes)?;
        // Every machine may write a join box, so a damaged one is nothing but a request that has to be repeated.
        for ask in boxes.into_iter().flatten() {
            if ask.machine != [0; 16] && ask.nonce != [0; 16] && ask.slot < self.geometry().slots {
                self.serve_join_box(active, &ask, now_ns)?;
            }
        }
        Ok(())
    }

    fn serve_join_box(&self, active: &mut Active, ask: &JoinBox, now_ns: u64) -> Result<()> {
        let Some(bound) = active.bindings[ask.slot as usize] else { return Ok(()) };
        if ask.nonce == bound.nonce {
            return Ok(());
        }
        // Equality of nonces, not of numbers: an undecided binding of a stale manager may have used the same incarnation number.
        let names_it = if mutant!("join.prev_is_number") {
            self.number_of(ask.slot, &ask.previous)? == bound.incarnation
        } else {
            ask.previous == bound.nonce || mutant!("join.no_prev_match")
        };
        if !names_it || !self.is_free_for(active, ask, &bound)? {
            return Ok(());
        }
        let has_other_owner = bound.incarnation != 0 && bound.machine != ask.machine;
        if has_other_owner && !mutant!("bind.proof_of_seat_is_lost") && !self.keep_proof_of_seat(ask.slot)? {
            return Ok(());
        }
        let standing = active.standings[ask.slot as usize];
        if !active.is_whole[ask.slot as usize] && !mutant!("bind.beside_damaged_rows") {
            // A row that cannot be read may hold the next incarnation for dead already.
            return Ok(());
        }
        // All three verified, so none is above the limit and this cannot wrap.
        let stated = if mutant!("bind.number_was_stated") { 0 } else { standing.fenced.max(standing.dead) };
        let incarnation = bound.incarnation.max(stated).saturating_add(1);
        if incarnation >= MAX_NUMBER {
            return Err(Error::Full { what: "incarnations of a slot", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        let has_survived =
            ask.machine == bound.machine && standing.fenced >= bound.incarnation && self.has_survived_fence(ask.slot, bound.incarnation)?;
        point!("manager.before_bind");
        self.bind(active, ask.slot as usize, Binding { incarnation, machine: ask.machine, nonce: ask.nonce, ..Binding::default() })?;
        point!("manager.bound");
        let view = &mut active.hosts[ask.slot as usize];
        // A host that starts again after an end begins with the usual patience.
        let leniency = if has_survived || mutant!("patience_with_the_dead") { (view.leniency + 1).min(MAX_LENIENCY) } else { 0 };
        let pulse = if mutant!("bind.silence_of_former_life") { view.pulse } else { Pulse::since(now_ns) };
        *view = HostView::new(self.geometry(), pulse);
        view.leniency = leniency;
        Ok(())
    }

    /// Whether an incarnation was suspected wrongly: it lived to say that it had noticed its fence.
    fn has_survived_fence(&self, slot: u32, incarnation: u32) -> Result<bool> {
        let identity = if_whole(self.lines.fetch::<Identity>(slot.into()))?;
        Ok(identity.is_some_and(|identity| identity.acknowledged >= incarnation))
    }

    fn is_free_for(&self, active: &Active, ask: &JoinBox, bound: &Binding) -> Result<bool> {
        // The machine itself vouches through its local lock (J1) that its previous incarnation has stopped.
        if bound.incarnation == 0 || ask.machine == bound.machine {
            return Ok(true);
        }
        // Another machine vouches by the word of the kernel that both run, or ran, under; the nonce that it names is the one bound.
        if ask.vouches() {
            return Ok(true);
        }
        let standing = active.standings[ask.slot as usize];
        if standing.dead >= bound.incarnation || (mutant!("join.suspicion_is_proof") && standing.fenced >= bound.incarnation) {
            return Ok(true);
        }
        let has_left = |found: Identity| {
            let is_its = (found.incarnation, found.nonce) == (bound.incarnation, bound.nonce) || mutant!("join.any_departure_is_proof");
            found.state == Identity::LEFT && is_its
        };
        Ok(if_whole(self.lines.fetch(ask.slot.into()))?.is_some_and(has_left))
    }

    /// The incarnation number that a nonce stands for in any seat's copy (only where numbers are compared against the rule).
    fn number_of(&self, slot: u32, nonce: &[u8; 16]) -> Result<u32> {
        let geometry = self.geometry();
        for seat in 0..geometry.all_seats() {
            let copy: Binding = self.lines.fetch(seat * geometry.bindings() + u64::from(slot))?;
            if copy.nonce == *nonce {
                return Ok(copy.incarnation);
            }
        }
        Ok(u32::MAX)
    }

    fn bind(&self, active: &mut Active, index: usize, binding: Binding) -> Result<()> {
        let binding = Binding { tag: active.epoch, ..binding };
        // Before it is published: from here a line that does not verify any more is written again.
        active.bindings[index] = Some(binding);
        self.lines.publish(seat::copy_of(active.seat) * self.geometry().bindings() + index as u64, binding)
    }
}
