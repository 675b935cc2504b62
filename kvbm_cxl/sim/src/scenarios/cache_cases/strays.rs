// SPDX-License-Identifier: Apache-2.0
//! A stray: an owner was about to take an eviction back, because a host had pinned the block, and is fenced there. Its READY lands when
//! the cell is another host's and holds something else (CACHE.md C2, C2a, C2b, C12).

use super::super::cache_stage::{Actor, HALF_READ, Shape, Stage, WARDEN, Watch};
use super::{A, K, L, M, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;

/// The owner of the stray: publishes K, and stops on the way back from EVICTING because A has pinned it.
pub(super) fn zombie(me: &Actor) -> Result<()> {
    me.publish(K)?;
    me.say("K is there");
    me.hear("K is pinned")?;
    me.stop_at("cache.evict_decided");
    me.cache().evict(K.namespace(), K.key()).map(drop).or_else(refused)?;
    me.say("the stray is there");
    Ok(())
}

/// After its stray write a zombie learns that it was fenced, or never does.
fn refused(error: cxl_pool::Error) -> Result<()> {
    if error.is_fenced() { Ok(()) } else { Err(error) }
}

/// The other host: its pin is why the owner turns back. Then it takes the chunk over and evicts K.
pub(super) fn adopter(me: &Actor) -> Result<()> {
    me.hear("K is there")?;
    let pin = me.pin(K)?;
    me.expect(pin.is_some(), "K can be pinned")?;
    me.say("K is pinned");
    me.hear("Z turns back")?;
    pin.into_iter().for_each(|pin| pin.release());
    me.hear("Z is fenced")?;
    me.adopt()?;
    me.expect(me.evict(K)?, "K is not pinned any more")
}

/// The warden's part until the zombie is fenced on its way back.
pub(super) fn catch_zombie(me: &Actor) -> Result<()> {
    me.await_stop(Z)?;
    me.say("Z turns back");
    me.fence(Z)?;
    me.say("Z is fenced");
    Ok(())
}

/// C2: a reader that knew the key looks at the cell when the stray is there.
pub(super) fn names_new_bytes(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(4) });
    stage.role(Z, zombie);
    stage.role(A, |me| {
        me.hear("R waits")?;
        adopter(me)?;
        me.publish(L)?;
        me.say("L is there");
        Ok(())
    });
    stage.role(R, reader);
    stage.role(WARDEN, |me| {
        me.await_stop(R)?;
        me.say("R waits");
        catch_zombie(me)?;
        me.hear("L is there")?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.let_go(R);
        me.hear("R is done")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// Finds K and stops before it pins.
fn reader(me: &Actor) -> Result<()> {
    me.hear("K is there")?;
    me.stop_at("cache.pin");
    me.pull(K)?;
    me.say("R is done");
    Ok(())
}

/// C2a: the stray restores, to the byte, the line that a reader has confirmed; the reader's host is fenced as well.
pub(super) fn restores_the_line(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(4) });
    let place = stage.random().pick(&["cache.copying", HALF_READ]);
    stage.role(Z, zombie);
    stage.role(A, |me| {
        me.hear("R is fenced")?;
        me.adopt()?;
        me.expect(me.evict(K)?, "a fenced reader's pin counts for nothing")?;
        me.publish(L)?;
        me.say("L is there");
        Ok(())
    });
    stage.role(R, move |me| {
        me.hear("K is there")?;
        me.stop_at(place);
        me.pull(K)?;
        me.say("R is done");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(R)?;
        me.say("K is pinned");
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.fence(R)?;
        me.say("R is fenced");
        me.hear("L is there")?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.let_go(R);
        me.hear("R is done")?;
        me.revive(Z);
        me.revive(R);
        Ok(())
    });
    stage.run()
}

/// C2b: a reader pins after the new owner's scan, and confirms the pin on the stray that lies on EVICTING.
pub(super) fn confirmed_on_a_stray(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PINS, ..Shape::of(4) });
    stage.role(Z, zombie);
    stage.role(A, |me| {
        me.hear("R waits")?;
        adopter(me)?;
        me.publish(L)?;
        me.stop_at("cache.evict_scanned");
        me.evict(L)?;
        me.publish(M)?;
        me.say("M is there");
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("K is there")?;
        me.stop_at("cache.pin");
        let pin = me.pin(K)?;
        me.say("R is done");
        me.hear("M is there")?;
        pin.into_iter().for_each(|pin| pin.release());
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(R)?;
        me.say("R waits");
        catch_zombie(me)?;
        me.await_stop(A)?;
        me.let_go(Z);
        me.hear("the stray is there")?;
        me.let_go(R);
        me.hear("R is done")?;
        me.let_go(A);
        me.hear("M is there")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// C12: the stray lies on the owner's own line when it evicts, and its block is pinned, so that it writes the line back.
pub(super) fn on_a_line_of_the_owner(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(4));
    stage.role(Z, zombie);
    stage.role(A, |me| {
        adopter(me)?;
        me.publish(L)?;
        me.say("L is there");
        me.hear("the stray is there")?;
        me.expect(!me.evict(L)?, "L is pinned")?;
        me.say("L stays");
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("L is there")?;
        let pin = me.pin(L)?;
        me.expect(pin.is_some(), "L can be pinned")?;
        me.say("L is pinned");
        me.hear("L stays")?;
        me.pull(K)?;
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| {
        catch_zombie(me)?;
        me.hear("L is pinned")?;
        me.let_go(Z);
        me.hear("L stays")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}
