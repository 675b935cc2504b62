// SPDX-License-Identifier: Apache-2.0
//! A key whose window of the hint table is full of live blocks (CACHE.md section 3): one of them goes, and none that a host has pinned.

use super::super::cache_ledger::Name;
use super::super::cache_stage::{Actor, Shape, Stage, WARDEN, Watch};
use super::{A, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;
use cxl_pool::limits::HINT_WINDOW;
use cxl_pool::media::HINTS_PER_LINE;

/// The publisher of the blocks that fill the window.
const OWNER: usize = Z;
/// Another host.
const OTHER: usize = A;
/// Places of a window.
const PLACES: usize = HINT_WINDOW as usize * HINTS_PER_LINE;
/// Cells of a chunk: more than a window has places, so that it is the hint table that is full.
const CELLS: u32 = 56;
/// Tries of a publish until an owner that was asked has made room.
const TRIES: usize = 200;

/// Blocks whose probes begin in one line: as many as fill its window, and one more.
fn crowd(me: &Actor) -> Vec<Name> {
    let look = me.cache().look();
    let window = |name: &Name| look.window(name.namespace(), name.key());
    let first = window(&Name(0, 0));
    (0..u16::MAX).map(|number| Name(0, number)).filter(|name| window(name) == first).take(PLACES + 1).collect()
}

/// The blocks of the crowd that are there.
fn there(me: &Actor, crowd: &[Name]) -> Result<usize> {
    crowd.iter().try_fold(0, |there, name| Ok(there + usize::from(me.has(*name)?)))
}

/// The blocks are the publisher's own. A reader has pinned the first, and used all others since.
pub(super) fn of_own_blocks(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: CELLS, watch: Watch::PINS, ..Shape::of(3) });
    stage.role(OWNER, |me| {
        let crowd = crowd(me);
        crowd[..PLACES].iter().try_for_each(|name| me.publish(*name))?;
        me.say("the window is full");
        me.hear("the reader has used all")?;
        let refused = me.reserve_unless_refused(crowd[PLACES])?.map(|mut draft| draft.fill().and_then(|()| draft.commit()));
        match refused {
            Some(published) => published?,
            None => me.env.fail("P5: a block was refused although others of its window can go"),
        }
        if there(me, &crowd)? != PLACES || !me.has(crowd[0])? || !me.has(crowd[PLACES])? {
            me.env.fail("P5: more went than one block that no host has pinned");
        }
        me.say("one more is there");
        Ok(())
    });
    stage.role(OTHER, |me| {
        me.hear("the window is full")?;
        let crowd = crowd(me);
        let pin = me.pin(crowd[0])?;
        me.expect(pin.is_some(), "the first block can be pinned")?;
        me.expect(there(me, &crowd[..PLACES])? == PLACES, "all blocks are there")?;
        me.say("the reader has used all");
        me.hear("one more is there")?;
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| me.hear("one more is there"));
    stage.run()
}

/// The blocks are another host's, which is asked to let one go.
pub(super) fn of_another_host(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: CELLS, chunks: 2, watch: Watch::PULLS, ..Shape::of(3) });
    stage.role(OWNER, |me| {
        let crowd = crowd(me);
        crowd[..PLACES].iter().try_for_each(|name| me.publish(*name))?;
        me.say("the window is full");
        while !me.has_heard("the other is done") {
            me.upkeep(1)?;
        }
        Ok(())
    });
    stage.role(OTHER, |me| {
        me.hear("the window is full")?;
        let crowd = crowd(me);
        for _ in 0..TRIES {
            if let Some(mut draft) = me.reserve_unless_refused(crowd[PLACES])? {
                draft.fill()?;
                draft.commit()?;
                break;
            }
            me.upkeep(1)?;
        }
        if !me.has(crowd[PLACES])? || there(me, &crowd)? != PLACES {
            me.env.fail("P5: no owner of a block in a full window has let one go");
        }
        me.say("the other is done");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("the other is done"));
    stage.run()
}
