// SPDX-License-Identifier: Apache-2.0
//! Who may take a chunk over, and what the claims of hosts that are gone are still good for (CACHE.md C14, C15, C21, C22, C23).

use super::super::cache_stage::{Actor, HALF_WRITTEN, Shape, Stage, WARDEN, Watch, is_refused};
use super::strays::{adopter, catch_zombie, zombie};
use super::{A, K, L, M, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;

/// Time after which a process starts again, in nanoseconds.
const RESTART_NS: u64 = 2_000_000;

/// Evicts the zombie's block, and stops in the middle of the payload of its own.
fn half_a_block(me: &Actor) -> Result<()> {
    adopter(me)?;
    let draft = me.reserve(L)?;
    me.expect(draft.is_some(), "the cell is free")?;
    me.stop_at(HALF_WRITTEN);
    draft.map_or(Ok(()), |mut draft| draft.fill())?;
    me.expect(false, "A dies in the middle of its copy")
}

/// Takes the chunk over and offers what it found.
fn next_owner(me: &Actor) -> Result<()> {
    me.adopt()?;
    me.pull(K)?;
    me.say("the next owner is there");
    me.pull(K).map(drop)
}

/// C14: the stray of one dead host hides that the other was writing.
pub(super) fn stray_among_two_claimants(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    stage.role(Z, |me| {
        zombie(me)?;
        me.hear("never")
    });
    stage.role(A, half_a_block);
    stage.role(R, |me| {
        me.hear("both are gone")?;
        next_owner(me)
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.await_stop(A)?;
        me.kill(A, None)?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.kill(Z, None)?;
        me.bury(Z)?;
        me.bury(A)?;
        me.say("both are gone");
        me.hear("the next owner is there")
    });
    stage.run()
}

/// C15: another process of the same host looks for a chunk.
pub(super) fn chunk_of_another_process(seed: u64) -> std::result::Result<Stats, Failure> {
    let by_bytes = seed.is_multiple_of(2);
    let watch = if by_bytes { Watch { one_writer: false, ..Watch::ALL } } else { Watch::ALL };
    let mut stage = Stage::new(seed, Shape { watch, ..Shape::of(2) });
    stage.role_on(Z, 1, |me| {
        let draft = me.reserve(K)?;
        me.expect(draft.is_some(), "there is a cell")?;
        me.say("K is reserved");
        me.hear("A has tried")?;
        draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))?;
        me.pull(K).map(drop)
    });
    stage.role_on(A, 1, |me| {
        me.hear("K is reserved")?;
        let draft = me.reserve(L)?;
        if let Some(mut draft) = draft {
            draft.fill()?;
            draft.commit()?;
        }
        me.say("A has tried");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("A has tried"));
    stage.run()
}

/// C21: another manager takes over. What the one before fenced stays fenced, because the chunk has another owner by now.
pub(super) fn manager_changes(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 2, deputy: Some(R), ..Shape::of(4) });
    stage.role(Z, |me| {
        me.publish(K)?;
        me.stop_at("cache.reserve");
        let refused = is_refused(me.reserve(M).map(drop))?;
        me.say("Z is done");
        me.expect(refused, "a fenced host's reservation is refused")
    });
    stage.role(A, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        let draft = me.reserve(L)?;
        me.expect(draft.is_some(), "the free cell is adopted as free")?;
        me.say("A has a cell");
        me.hear("Z is done")?;
        draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))
    });
    stage.role(R, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("A has a cell")?;
        // Who fences the warden's host is the manager now; Z's service asks who that is, and looks at its rows.
        me.kill(WARDEN, None)?;
        me.revive(Z);
        me.env.platform().sleep_ns(10_000_000);
        me.let_go(Z);
        me.hear("Z is done")
    });
    stage.role(WARDEN, |me| me.hear("never"));
    stage.run()
}

/// C22: one claimant was proven and has started again, the other is a zombie whose stray lies where the first was writing.
pub(super) fn claim_of_a_proven_host(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    stage.role(Z, zombie);
    stage.role(A, |me| {
        if me.generation() == 0 {
            return half_a_block(me);
        }
        me.say("A is there again");
        me.hear("the stray is there")?;
        me.upkeep(3)?;
        me.say("A is done");
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("the stray is there")?;
        me.upkeep(3)?;
        me.pull(K)?;
        me.say("R is done");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.await_stop(A)?;
        me.kill(A, Some(RESTART_NS))?;
        me.hear("A is there again")?;
        me.let_go(Z);
        me.hear("R is done")?;
        me.hear("A is done")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// C23: who releases a quarantined cell dies before the cell is free, and is the only claimant then.
pub(super) fn releaser_dies(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(4) });
    stage.role(Z, |me| {
        if me.generation() > 0 {
            me.say("Z is there again");
            return me.hear("the next owner is there");
        }
        let draft = me.reserve(K)?;
        me.expect(draft.is_some(), "there is a cell")?;
        me.stop_at(HALF_WRITTEN);
        draft.map_or(Ok(()), |mut draft| draft.fill())?;
        me.expect(false, "Z dies in the middle of its copy")
    });
    stage.role(A, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        me.expect(me.cache().usage().quarantined == 1, "the cell is quarantined")?;
        me.say("A has adopted");
        me.hear("Z is there again")?;
        me.stop_at("cache.retiring");
        me.upkeep(100)?;
        me.expect(false, "A dies while it releases the cell")
    });
    stage.role(R, |me| {
        me.hear("A is fenced")?;
        next_owner(me)
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("A has adopted")?;
        me.revive(Z);
        me.kill(Z, Some(RESTART_NS))?;
        me.await_stop(A)?;
        me.kill(A, None)?;
        me.say("A is fenced");
        me.hear("the next owner is there")
    });
    stage.run()
}

/// C14 for a host that joins again: another one had the chunk meanwhile and may still write to it, and its own stray lies there.
pub(super) fn own_stray_beside_another_claimant(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(3) });
    stage.role(Z, |me| {
        zombie(me)?;
        while is_refused(me.upkeep(1))? {
            me.env.platform().sleep_ns(1_000_000);
        }
        me.upkeep(3)?;
        me.pull(K)?;
        me.say("Z is done");
        Ok(())
    });
    stage.role(A, |me| {
        adopter(me)?;
        me.publish(L)?;
        me.say("L is there");
        me.hear("Z is done")
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.hear("L is there")?;
        me.fence(A)?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.revive(Z);
        me.hear("Z is done")
    });
    stage.run()
}

/// Waits until the host has joined again, and looks what of its chunks is left.
fn follow(me: &Actor) -> Result<()> {
    while is_refused(me.reserve(M).map(drop))? {
        me.env.platform().sleep_ns(1_000_000);
    }
    Ok(())
}

/// C15 after a fence: the chunk comes back to the host by another process of it than had it before, which hears of that later.
pub(super) fn comes_back_to_another_process(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role_on(Z, 1, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("L is there")?;
        follow(me)?;
        me.pull(L)?;
        me.say("Z is done");
        Ok(())
    });
    stage.role_on(R, 1, |me| {
        me.hear("A has adopted")?;
        follow(me)?;
        me.say("R has followed");
        me.hear("A has left")?;
        me.upkeep(2)?;
        me.publish(L)?;
        me.say("L is there");
        me.hear("Z is done")
    });
    stage.role_on(A, 2, |me| {
        me.hear("Z is fenced")?;
        me.adopt()?;
        me.say("A has adopted");
        me.hear("R has followed")?;
        me.expect(me.evict(K)?, "no host has pinned K")?;
        me.leave()?;
        me.say("A has left");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.hear("K is there")?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("A has adopted")?;
        me.revive(Z);
        me.hear("Z is done")
    });
    stage.run()
}

/// C22: a host that had the chunk leaves, and the only other claimant is a zombie, whose stray lies where there were other bytes since.
pub(super) fn given_back_beside_a_zombie(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(4) });
    stage.role(Z, |me| {
        zombie(me)?;
        me.hear("R is done")
    });
    stage.role(A, |me| {
        adopter(me)?;
        me.publish(L)?;
        me.expect(me.evict(L)?, "no host has pinned L")?;
        me.leave()?;
        me.say("A has left");
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("the stray is there")?;
        me.upkeep(5)?;
        me.pull(K)?;
        me.say("R is done");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.hear("A has left")?;
        me.let_go(Z);
        me.hear("R is done")
    });
    stage.run()
}

/// C30: the only other claimant was a zombie, whose stray lies where there were other bytes since, and has ended. The chunk goes back with
/// its claim, and is of use to the next host.
pub(super) fn given_back_after_a_zombie(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(4) });
    stage.role(Z, |me| {
        zombie(me)?;
        me.hear("never")
    });
    stage.role(A, |me| {
        adopter(me)?;
        me.publish(L)?;
        me.expect(me.evict(L)?, "no host has pinned L")?;
        me.say("A needs it no more");
        me.hear("Z has ended")?;
        me.leave()?;
        me.say("A has left");
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("A has left")?;
        me.upkeep(5)?;
        me.pull(K)?;
        me.publish(M)?;
        me.must_find(M)?;
        me.say("R is done");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.hear("A needs it no more")?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.kill(Z, None)?;
        me.bury(Z)?;
        me.say("Z has ended");
        me.hear("R is done")
    });
    stage.run()
}
