// SPDX-License-Identifier: Apache-2.0
//! Blocks that a reader waits for: they come, are given up, or their writer is fenced (CACHE.md section 5, `Cache::presence`).

use super::super::cache_stage::{Actor, Shape, Stage, WARDEN};
use super::{K, L, M, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;
use cxl_pool::cache::Presence;

/// How often a reader looks, and how long it rests in between, in nanoseconds: longer than a reader may believe old fences.
const LOOKS: usize = 400;
const REST_NS: u64 = 200_000;

/// Looks until a block is what it is to be.
fn await_presence(me: &Actor, name: super::Name, wanted: Presence, what: &str) -> Result<()> {
    for _ in 0..LOOKS {
        if me.presence(name)? == wanted {
            return Ok(());
        }
        me.env.platform().sleep_ns(REST_NS);
    }
    // The reader's answer is the subject here, so a dropped rule counts.
    me.env.fail(format!("P4: {name:?}: {what}"));
    Ok(())
}

/// One block comes, one is given up, and one's writer is fenced: the reader waits for each, and for none of them in vain.
pub(super) fn awaited(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 4, ..Shape::of(4) });
    stage.role(Z, |me| {
        let mut drafts = Vec::new();
        for name in [K, L, M] {
            let draft = me.reserve(name)?;
            me.expect(draft.is_some(), "there is a cell")?;
            drafts.extend(draft);
        }
        me.say("they are on their way");
        me.hear("R waits")?;
        let mut drafts = drafts.into_iter();
        if let Some(mut k) = drafts.next() {
            k.fill()?;
            k.commit()?;
        }
        drafts.next().map_or(Ok(()), |l| l.abort())?;
        // M stays as it is.
        std::mem::forget(drafts.next());
        me.say("K is there, L never comes");
        me.hear("R has seen")
    });
    stage.role(R, |me| {
        me.hear("they are on their way")?;
        for name in [K, L, M] {
            await_presence(me, name, Presence::Coming, "a block that is being written is on its way")?;
        }
        me.say("R waits");
        me.hear("K is there, L never comes")?;
        await_presence(me, K, Presence::There, "a block that was committed is there")?;
        me.must_find(K)?;
        await_presence(me, L, Presence::Absent, "a block that was given up is not awaited")?;
        me.expect(me.presence(M)? == Presence::Coming, "a block whose writer lives is awaited")?;
        me.say("M is awaited");
        me.hear("Z is fenced")?;
        await_presence(me, M, Presence::Absent, "a block of a fenced host is not awaited")?;
        me.say("R has seen");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.hear("M is awaited")?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("R has seen")
    });
    stage.run()
}
