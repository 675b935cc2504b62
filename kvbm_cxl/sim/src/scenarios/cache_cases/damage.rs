// SPDX-License-Identifier: Apache-2.0
//! Lines that a device damages under hosts that work: one that cannot be read may say anything, and counts as what does least harm.

use super::super::cache_stage::{Actor, HALF_WRITTEN, Shape, Stage, WARDEN, is_refused};
use super::{A, K, L, R, Z};
use crate::{Failure, Fault, Stats};
use cxl_pool::Result;
use cxl_pool::media::{CellClaim, MediaLine, PinLine};

/// The publisher.
const OWNER: usize = Z;
/// A reader, or another publisher.
const OTHER: usize = A;

/// The device loses the first line of a kind of this host, which has `per_slot`.
fn lose<T: MediaLine>(me: &Actor, per_slot: u64) -> Result<()> {
    let offset = me.env.lines().layout().line_offset(T::REGION, u64::from(me.slot()) * per_slot)?;
    me.env.inflict(me.env.host(), Fault::LoseLine { offset });
    Ok(())
}

/// A reader has pinned a block, and the line that says so does not verify any more: every block counts as pinned.
pub(super) fn line_of_pins(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("the line is damaged")?;
        me.expect(!me.evict(K)?, "K counts as pinned")?;
        me.say("K was to go");
        Ok(())
    });
    stage.role(OTHER, |me| {
        me.hear("K is there")?;
        let pin = me.pin(K)?;
        me.expect(pin.is_some(), "K can be pinned")?;
        lose::<PinLine>(me, me.env.lines().layout().geometry().pin_lines())?;
        me.say("the line is damaged");
        me.hear("K was to go")?;
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| me.hear("K was to go"));
    stage.run()
}

/// The line that says that a chunk is its owner's does not verify any more, and another host wants one, before the owner has looked at the
/// line or after that.
fn claims(seed: u64, rounds: usize) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, move |me| {
        me.publish(K)?;
        lose::<CellClaim>(me, me.env.lines().layout().geometry().cell_claim_lines())?;
        me.upkeep(rounds)?;
        me.say("the line is damaged");
        me.hear("L was to come")
    });
    stage.role(OTHER, |me| {
        me.hear("the line is damaged")?;
        me.expect(me.reserve(L)?.is_none(), "the only chunk is the owner's")?;
        me.say("L was to come");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("L was to come"));
    stage.run()
}

/// A host that lives and has such a line claims every chunk in it.
pub(super) fn line_of_claims(seed: u64) -> std::result::Result<Stats, Failure> {
    claims(seed, 0)
}

/// The owner rewrites its claims: those of every chunk in the line, since it cannot tell which of them they were.
pub(super) fn line_of_claims_written_anew(seed: u64) -> std::result::Result<Stats, Failure> {
    claims(seed, 2)
}

/// A host that has left claims, by a line that does not verify any more, what a zombie is still writing to: the end of the one is not the
/// end of the other.
pub(super) fn line_of_claims_beside_a_zombie(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    stage.role(Z, |me| {
        me.hear("the cell is quarantined")?;
        let per_slot = me.env.lines().layout().geometry().cell_claim_lines();
        me.leave()?;
        lose::<CellClaim>(me, per_slot)?;
        me.say("the line is damaged");
        Ok(())
    });
    stage.role(A, |me| {
        let draft = me.reserve(K)?;
        me.expect(draft.is_some(), "there is a cell")?;
        me.stop_at(HALF_WRITTEN);
        let done = draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()));
        me.say("A is done");
        is_refused(done).map(drop)
    });
    stage.role(R, |me| {
        me.hear("A is fenced")?;
        me.adopt()?;
        me.expect(me.cache().usage().quarantined == 1, "the cell is quarantined")?;
        me.say("the cell is quarantined");
        me.hear("the line is damaged")?;
        me.upkeep(3)?;
        if let Some(mut draft) = me.reserve(L)? {
            draft.fill()?;
            draft.commit()?;
        }
        me.say("L was to come");
        me.hear("A is done")?;
        me.pull(L).map(drop)
    });
    stage.role(WARDEN, |me| {
        me.await_stop(A)?;
        me.fence(A)?;
        me.say("A is fenced");
        me.hear("L was to come")?;
        me.let_go(A);
        me.hear("A is done")?;
        me.revive(A);
        Ok(())
    });
    stage.run()
}
