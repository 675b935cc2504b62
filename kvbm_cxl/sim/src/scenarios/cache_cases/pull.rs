// SPDX-License-Identifier: Apache-2.0
//! The checks of a pull after its copy (CACHE.md C1, C5). The reader's host is taken for dead, so its pin counts for nothing.

use super::super::cache_stage::{Actor, HALF_READ, Shape, Stage, WARDEN, Watch};
use super::{K, L, M, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;
use cxl_pool::cache::Pulled;

/// The publisher.
const OWNER: usize = 2;

/// C1: the cell holds another block when the copy ends.
pub(super) fn republished_in_mid_copy(seed: u64) -> std::result::Result<Stats, Failure> {
    republish(seed, |me| {
        me.expect(me.evict(K)?, "a fenced reader's pin counts for nothing")?;
        me.publish(L)
    })
}

/// C5: the cell holds the same key again, with other bytes.
pub(super) fn same_key_in_the_same_cell(seed: u64) -> std::result::Result<Stats, Failure> {
    republish(seed, |me| {
        me.expect(me.evict(K)?, "a fenced reader's pin counts for nothing")?;
        me.publish(K)
    })
}

/// C31: the owner copies the block that is next to go, without a pin, and another thread of it evicts the block and fills the cell.
pub(super) fn cold_copy_of_a_cell_that_goes(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(2) });
    let place = stage.random().pick(&["cache.cold_chosen", "cache.copying", HALF_READ, HALF_READ]);
    let other = stage.random().pick(&[K, M]);
    stage.role(WARDEN, |me| me.hear("copied"));
    stage.role(1, move |me| {
        me.publish(L)?;
        // There is one cell: after the eviction, only another eviction frees a cell.
        me.publish(K)?;
        me.beside("evictor", move |me| {
            me.await_stop(1)?;
            me.expect(me.evict(K)?, "the block is not pinned")?;
            me.publish(other)?;
            me.let_go(1);
            Ok(())
        });
        me.stop_at(place);
        let copied = me.copy_coldest(K)?;
        me.expect(matches!(copied, Pulled::Miss(_)), "the block went meanwhile")?;
        me.say("copied");
        Ok(())
    });
    stage.run()
}

/// A reader is stopped before or in the middle of its copy and fenced; the owner does `work` meanwhile.
fn republish(seed: u64, work: fn(&Actor) -> Result<()>) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch { pins_hold: true, ..Watch::PULLS }, ..Shape::of(3) });
    let place = stage.random().pick(&["cache.copying", HALF_READ, HALF_READ]);
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("reader fenced");
        me.hear("published again")?;
        me.let_go(Z);
        me.hear("pulled")?;
        me.revive(Z);
        Ok(())
    });
    stage.role(OWNER, move |me| {
        me.publish(K)?;
        me.say("published");
        me.hear("reader fenced")?;
        work(me)?;
        me.say("published again");
        Ok(())
    });
    stage.role(Z, move |me| {
        me.hear("published")?;
        me.stop_at(place);
        me.pull(K)?;
        me.say("pulled");
        Ok(())
    });
    stage.run()
}
