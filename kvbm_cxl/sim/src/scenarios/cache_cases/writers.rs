// SPDX-License-Identifier: Apache-2.0
//! Who may write a cell's payload: a zombie in the middle of a copy, one about to begin, a device without a waiter (CACHE.md C3, C6,
//! C8, C20).

use super::super::cache_stage::{Actor, Draft, HALF_WRITTEN, Shape, Stage, WARDEN, Watch, is_refused};
use super::{A, K, L, M, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;
use cxl_pool::cache::Pulled;
use cxl_pool::metrics::MissReason;

/// Two in three seeds find out by the bytes, the others by the list of writers.
fn watch(seed: u64) -> Watch {
    if seed.is_multiple_of(3) { Watch::ALL } else { Watch { one_writer: false, ..Watch::ALL } }
}

/// Reserves K, and is stopped in the middle of its payload.
fn zombie(me: &Actor) -> Result<()> {
    let draft = me.reserve(K)?;
    me.expect(draft.is_some(), "there is a cell")?;
    let Some(mut draft) = draft else { return Ok(()) };
    me.stop_at(HALF_WRITTEN);
    draft.fill()?;
    me.say("Z has written");
    me.hear("L was pulled")?;
    // Refused if the host has noticed its fence by then; a READY that it still publishes is void.
    is_refused(draft.commit())?;
    me.say("Z is done");
    Ok(())
}

/// Takes the chunk over, and publishes L where the zombie still writes, if it is let.
fn adopter(me: &Actor) -> Result<()> {
    me.hear("Z is fenced")?;
    me.adopt()?;
    let draft = me.reserve(L)?;
    let Some(mut draft) = draft else {
        me.say("A has no cell");
        return Ok(());
    };
    draft.fill()?;
    draft.commit()?;
    me.say("L is there");
    Ok(())
}

/// C3, C8: the cell of a zombie that is in the middle of its copy, which is not proven to have ended.
pub(super) fn zombie_goes_on_copying(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: watch(seed), ..Shape::of(3) });
    stage.role(Z, zombie);
    stage.role(A, |me| {
        adopter(me)?;
        me.hear("Z is done")?;
        // Once Z says itself that it has ended, its cell comes out of quarantine.
        me.hear("Z joins again")?;
        while me.cache().usage().quarantined > 0 {
            me.upkeep(1)?;
        }
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear_one_of(&["A has no cell", "L is there"])?;
        me.let_go(Z);
        me.hear("Z has written")?;
        me.pull(L)?;
        me.say("L was pulled");
        me.hear("Z is done")?;
        me.revive(Z);
        me.say("Z joins again");
        Ok(())
    });
    stage.run()
}

/// C8, stability: a confirmed pin on the block published where the zombie writes. That no rule but the proof was broken shows in that a
/// checksum keeps every pull right and cannot keep the block.
pub(super) fn pinned_under_a_false_proof(seed: u64) -> std::result::Result<Stats, Failure> {
    under_a_false_proof(seed, Shape { watch: Watch::PINS, checksums: true, ..Shape::of(4) })
}

/// C8, with a checksum: whatever the zombie wrote, a pull gives right bytes or misses.
pub fn pull_with_checksum_under_a_false_proof(seed: u64) -> std::result::Result<Stats, Failure> {
    under_a_false_proof(seed, Shape { watch: Watch::PULLS, checksums: true, ..Shape::of(4) })
}

fn under_a_false_proof(seed: u64, shape: Shape) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape);
    stage.role(Z, zombie);
    stage.role(A, adopter);
    stage.role(R, |me| {
        me.hear_one_of(&["A has no cell", "L is there"])?;
        let pin = me.pin(L)?;
        me.say("R is ready");
        me.hear("Z has written")?;
        if me.pull(L)? == Pulled::Miss(MissReason::Checksum) {
            me.env.point("scene.checksum_differs");
        }
        pin.into_iter().for_each(|pin| pin.release());
        me.say("L was pulled");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("R is ready")?;
        me.let_go(Z);
        me.hear("Z is done")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// C6: a zombie that has a free cell in hand, and has not said so when the cell is adopted as free.
pub(super) fn zombie_reserves_what_was_adopted(seed: u64) -> std::result::Result<Stats, Failure> {
    zombie_reserves(seed, |me| me.reserve(K))
}

/// C6 with the call for several blocks, which takes another way.
pub(super) fn zombie_reserves_a_batch(seed: u64) -> std::result::Result<Stats, Failure> {
    zombie_reserves(seed, |me| me.reserve_in_batch(K))
}

fn zombie_reserves(seed: u64, reserve: fn(&Actor) -> Result<Option<Draft<'_>>>) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 2, watch: watch(seed), ..Shape::of(3) });
    stage.role(Z, move |me| {
        // It has the stripe's lock from here on, and keeps it.
        me.publish(M)?;
        me.stop_at("cache.reserve");
        let mut reserved = None;
        let refused = is_refused(reserve(me).map(|draft| reserved = draft))?;
        me.say("Z has passed the check");
        if let Some(mut draft) = reserved {
            me.hear("L is there")?;
            draft.fill()?;
            is_refused(draft.commit())?;
        }
        me.say("Z is done");
        me.expect(refused, "a fenced host's reservation is refused")
    });
    stage.role(A, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        let draft = me.reserve(L)?;
        me.expect(draft.is_some(), "the free cell is adopted as free")?;
        me.say("A has a cell");
        me.hear("Z has passed the check")?;
        draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))?;
        me.say("L is there");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("A has a cell")?;
        me.let_go_and_notice(Z);
        me.hear("Z is done")?;
        me.hear("L is there")?;
        me.pull(L).map(drop)
    });
    stage.run()
}

/// C20: the contract of a reservation that a device fills. The caller that gives it up waits for the device.
pub(super) fn abort_after_the_device(seed: u64) -> std::result::Result<Stats, Failure> {
    device(seed, true)
}

/// C20 as a caller that breaks the contract: the device continues to write after the cell was given up.
pub fn abort_before_the_device_is_done(seed: u64) -> std::result::Result<Stats, Failure> {
    device(seed, false)
}

fn device(seed: u64, waits: bool) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch { one_writer: false, ..Watch::ALL }, ..Shape::of(2) });
    stage.role(A - 1, move |me| {
        let draft = me.reserve(K)?;
        me.expect(draft.is_some(), "there is a cell")?;
        let Some(draft) = draft else { return Ok(()) };
        let (at, bytes) = (draft.reservation.offset(), draft.bytes.to_vec());
        me.beside("device", move |device| {
            let (first, second) = bytes.split_at(64);
            device.env.memory().copy_in(at, first)?;
            device.say("the device has begun");
            if !waits {
                device.hear("L is there")?;
            }
            device.env.memory().copy_in(at + 64, second)?;
            device.say("the device is done");
            Ok(())
        });
        me.hear("the device has begun")?;
        if waits {
            me.hear("the device is done")?;
        }
        draft.abort()?;
        me.publish(L)?;
        me.say("L is there");
        me.hear("the device is done")?;
        me.pull(L)?;
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.hear("the device is done")?;
        me.pull(L).map(drop)
    });
    stage.run()
}
