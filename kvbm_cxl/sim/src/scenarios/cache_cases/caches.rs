// SPDX-License-Identifier: Apache-2.0
//! Stores that are still in a machine's caches when their cell goes to another host (CACHE.md 12.6, C25 to C29). The process that made them
//! gives the cell up, or dies; its dirty lines are written back onto the block that the next owner has published there.

use super::super::cache_stage::{Actor, Draft, JOINED_AGAIN, Shape, Stage, WARDEN, Watch};
use super::{A, K, L, R, Z};
use crate::{Failure, SimProcess, Stats};
use cxl_pool::Result;
use std::cell::Cell;
use std::rc::Rc;

/// Time after which a process starts again, in nanoseconds.
const RESTART_NS: u64 = 2_000_000;
/// How often the last one looks, and how long it rests in between, in nanoseconds.
const LOOKS: usize = 40;
const REST_NS: u64 = 200_000;

/// The process that dies.
type Dying = Rc<Cell<Option<SimProcess>>>;

/// Stores K into a cell, and leaves it in the cache.
fn store_k(me: &Actor) -> Result<Option<Draft<'_>>> {
    let draft = me.reserve(K)?;
    me.expect(draft.is_some(), "there is a cell")?;
    draft.as_ref().map_or(Ok(()), |draft| draft.store_in_place())?;
    Ok(draft)
}

/// Stores K, and dies.
fn dies_with_stores(me: &Actor, dying: &Dying) -> Result<()> {
    dying.set(Some(me.env.process()));
    // Nothing of a process that dies is given back.
    std::mem::forget(store_k(me)?);
    me.say("K is stored");
    me.env.exit()
}

/// Waits for the death of the process that has stored K; the host's service does not notice it.
fn witness(me: &Actor, dying: &Dying) -> Result<()> {
    me.hear("K is stored")?;
    me.fall_silent();
    dying.get().map_or(Ok(()), |process| me.await_death(process))
}

/// Publishes L in the cell, once no other host may write it.
fn next_publisher(me: &Actor) -> Result<()> {
    me.adopt()?;
    while me.cache().usage().quarantined > 0 {
        me.upkeep(1)?;
    }
    me.publish(L)?;
    me.say("L is there");
    Ok(())
}

/// Looks at L for a while.
fn look(me: &Actor) -> Result<()> {
    me.hear("L is there")?;
    for _ in 0..LOOKS {
        me.pull(L)?;
        me.env.platform().sleep_ns(REST_NS);
    }
    me.say("L was pulled");
    Ok(())
}

/// Blocks of more lines than a cache writes back by itself before the next host has the cell.
fn stage(seed: u64, hosts: usize) -> Stage {
    Stage::new(seed, Shape { cell_bytes: 2048, watch: Watch { one_writer: false, ..Watch::ALL }, ..Shape::of(hosts) })
}

/// Stores in place are committed, and pulled elsewhere.
pub(super) fn committed_in_place(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = stage(seed, 2);
    stage.role(Z, |me| {
        let draft = store_k(me)?;
        draft.map_or(Ok(()), |draft| draft.commit())?;
        me.say("K is there");
        me.hear("K was pulled")
    });
    stage.role(WARDEN, |me| {
        me.hear("K is there")?;
        let found = me.has(K)?;
        me.say("K was pulled");
        me.expect(found, "K is found")
    });
    stage.run()
}

/// C25: who stored gives the cell up, and its host is fenced.
pub(super) fn given_up(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = stage(seed, 3);
    stage.role(Z, |me| {
        let draft = store_k(me)?;
        draft.map_or(Ok(()), |draft| draft.abort())?;
        me.say("Z has given up");
        me.hear("L was pulled")
    });
    stage.role(A, next_publisher);
    stage.role(WARDEN, |me| {
        me.hear("Z has given up")?;
        me.fence(Z)?;
        look(me)
    });
    stage.run()
}

/// C26: who stored dies, its host is fenced, and acknowledges that by another process of its machine.
pub(super) fn host_goes_on(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut stage, dying) = (stage(seed, 3), Dying::default());
    let (died, seen) = (Rc::clone(&dying), dying);
    stage.role_on(Z, 1, move |me| dies_with_stores(me, &died));
    stage.role_on(R, 1, move |me| {
        witness(me, &seen)?;
        me.say("K has no owner");
        me.hear("L was pulled")
    });
    stage.role_on(A, 2, next_publisher);
    stage.role(WARDEN, |me| {
        me.hear("K has no owner")?;
        me.fence(R)?;
        me.env.platform().sleep_ns(5_000_000);
        me.revive(R);
        look(me)
    });
    stage.run()
}

/// C27: who stored dies, another process of its host takes its cells over, and the host is fenced.
pub(super) fn taken_over(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut stage, dying) = (stage(seed, 3), Dying::default());
    let (died, seen) = (Rc::clone(&dying), dying);
    stage.role_on(Z, 1, move |me| dies_with_stores(me, &died));
    stage.role_on(R, 1, move |me| {
        witness(me, &seen)?;
        me.adopt()?;
        me.say("R has the cell");
        me.hear("L was pulled")
    });
    stage.role_on(A, 2, |me| {
        me.hear("R is fenced")?;
        next_publisher(me)
    });
    stage.role(WARDEN, |me| {
        me.hear("R has the cell")?;
        me.fence(R)?;
        me.say("R is fenced");
        look(me)
    });
    stage.run()
}

/// C28: who stored dies, as the last process of its host, which is fenced; the machine joins again.
pub(super) fn joined_again(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = stage(seed, 3);
    stage.role(Z, |me| {
        if me.generation() == 0 {
            std::mem::forget(store_k(me)?);
            me.say("K is stored");
            me.hear("never")?;
        }
        me.hear("L was pulled")
    });
    stage.role(A, |me| {
        me.hear("K has no owner")?;
        me.adopt()?;
        me.say("A has adopted");
        next_publisher(me)
    });
    stage.role(WARDEN, |me| {
        me.hear("K is stored")?;
        me.fence(Z)?;
        me.say("K has no owner");
        me.hear("A has adopted")?;
        me.kill(Z, Some(RESTART_NS))?;
        // All know that the incarnation before has ended, and the cache is not open yet, which would come upon the cell.
        me.stop_other_at(Z, JOINED_AGAIN);
        me.await_stop(Z)?;
        look(me)?;
        me.let_go_and_notice(Z);
        Ok(())
    });
    stage.run()
}

/// C29: who stored dies, and the last process of its host leaves the pool.
pub(super) fn left(seed: u64) -> std::result::Result<Stats, Failure> {
    let (mut stage, dying) = (stage(seed, 3), Dying::default());
    let (died, seen) = (Rc::clone(&dying), dying);
    stage.role_on(Z, 1, move |me| dies_with_stores(me, &died));
    stage.role_on(R, 1, move |me| {
        witness(me, &seen)?;
        me.leave()?;
        me.say("R has left");
        Ok(())
    });
    stage.role_on(A, 2, |me| {
        me.hear("R has left")?;
        next_publisher(me)
    });
    stage.role(WARDEN, look);
    stage.run()
}
