// SPDX-License-Identifier: Apache-2.0
//! Pins of living readers on cells whose owners are gone (CACHE.md C11, C13).

use super::super::cache_stage::{Actor, Shape, Stage, WARDEN};
use super::{A, K, L, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;

/// Wants a cell for L, which is not available while K is pinned.
fn wants_a_cell(me: &Actor) -> Result<()> {
    me.evict(K)?;
    if let Some(mut draft) = me.reserve(L)? {
        draft.fill()?;
        draft.commit()?;
    }
    me.say("A has tried");
    Ok(())
}

/// C11: the owner was about to look for pins, and a host has one.
pub(super) fn evicting_of_a_dead_host(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    let crashes = stage.random().one_in(2);
    stage.role(Z, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("K is pinned")?;
        me.stop_at("cache.evicting");
        let refused = super::super::cache_stage::is_refused(me.evict(K))?;
        me.expect(refused, "a fenced host's eviction is refused")
    });
    stage.role(A, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        wants_a_cell(me)
    });
    stage.role(R, |me| {
        me.hear("K is there")?;
        let pin = me.pin(K)?;
        me.expect(pin.is_some(), "K can be pinned")?;
        me.say("K is pinned");
        me.hear("A has tried")?;
        // The block has a new stamp: the copy is a miss, and the next pull a hit.
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))?;
        me.pull(K).map(drop)
    });
    stage.role(WARDEN, move |me| {
        me.await_stop(Z)?;
        if crashes {
            me.kill(Z, None)?;
        } else {
            me.fence(Z)?;
        }
        me.say("Z is fenced");
        me.hear("A has tried")?;
        me.let_go(Z);
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// C13: two claimants are gone, so everything is quarantined; blocks that leave quarantine may be pinned.
pub(super) fn pinned_in_quarantine(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    stage.role(Z, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("never")
    });
    stage.role(A, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        me.say("A has adopted");
        me.hear("never")
    });
    stage.role(R, |me| {
        me.hear("A is fenced")?;
        me.adopt()?;
        wants_a_cell(me)?;
        me.hear("K is free")?;
        while me.cache().usage().quarantined > 0 {
            me.upkeep(1)?;
        }
        me.publish(L)
    });
    stage.role(WARDEN, |me| {
        me.hear("K is there")?;
        let pin = me.pin(K)?;
        me.expect(pin.is_some(), "K can be pinned")?;
        me.kill(Z, None)?;
        me.bury(Z)?;
        me.say("Z is fenced");
        me.hear("A has adopted")?;
        me.kill(A, None)?;
        me.bury(A)?;
        me.say("A is fenced");
        me.hear("A has tried")?;
        pin.into_iter().for_each(|pin| pin.release());
        me.say("K is free");
        Ok(())
    });
    stage.run()
}
