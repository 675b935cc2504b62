// SPDX-License-Identifier: Apache-2.0
//! Room in the hint table: a key whose window is full of live hints of other keys has its publisher evict one of the blocks that they name
//! (CACHE.md section 3). Only the owner of a block can: a block of this process goes at once, for another's its owner is asked.

use crate::cache::cells::FoundBlock;
use crate::cache::cells::adopt::Use;
use crate::cache::cells::evict::Reason;
use crate::cache::index::{Home, Index, tombs_if_bad};
use crate::cache::{BlockKey, Inner, Namespace};
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::HINT_WINDOW;
use crate::media::{Ask, Descriptor, HINTS_PER_LINE, Hint, HintLine};
use arrayvec::ArrayVec;

/// Rest between two requests of one process for a place in the hint table, in nanoseconds.
const HINT_PERIOD_NS: u64 = 50_000_000;

type Named = ArrayVec<u64, { HINT_WINDOW as usize * HINTS_PER_LINE }>;

impl Index {
    fn named_in_window(&self, home: &Home, named: &mut Named) -> Result<()> {
        let indexes: ArrayVec<u64, { HINT_WINDOW as usize }> = (0..HINT_WINDOW).map(|step| self.hint_line(home, step)).collect();
        let mut fetched: Vec<Result<HintLine>> = Vec::with_capacity(indexes.len());
        self.host.lines().fetch_many(&indexes, &mut fetched)?;
        for line in fetched {
            for hint in tombs_if_bad(line)?.iter() {
                if let Hint::Cell { cell, .. } = hint
                    && cell < self.cell_count
                {
                    named.push(cell);
                }
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Has a block go whose hint lies in the window of a key: that of this process that no host has used for longest. True if one went.
    ///
    /// The caller has no lock of a stripe: the eviction takes one.
    pub(in crate::cache) fn make_hint_room(&self, home: &Home) -> Result<bool> {
        let mut named = Named::new();
        self.index.named_in_window(home, &mut named)?;
        let own: Vec<FoundBlock> = {
            let cells = self.store.cells();
            named.iter().filter_map(|&cell| cells.ready(cell).map(|found| FoundBlock::new(cell, &found))).collect()
        };
        let cells: Vec<u64> = own.iter().map(|found| found.cell).collect();
        let uses = self.store.uses(&cells)?;
        let spares = |seen: &Use| seen.pinned && !mutant!("cache.hint_room_of_the_pinned");
        let unused = own.into_iter().zip(&uses).filter(|(_, seen)| !spares(seen));
        let Some((victim, _)) = unused.min_by_key(|(_, seen)| self.store.youngest(seen)) else {
            self.ask_for_hint_room(&named)?;
            return Ok(false);
        };
        let op = self.store.work()?;
        self.host.check_fences(&op)?;
        let victims = self.store.take(&[victim]);
        Ok(self.retire(&op, victims, Reason::Room)? > 0)
    }

    /// Asks the owner of one of these blocks to evict it, unless this process has asked for another one just now.
    fn ask_for_hint_room(&self, named: &[u64]) -> Result<()> {
        let now_ns = self.host.platform().now_ns();
        if mutant!("cache.hint_room_not_asked_for") || named.is_empty() || !self.index.hint_requests.is_time(now_ns, HINT_PERIOD_NS) {
            return Ok(());
        }
        let uses = self.store.uses(named)?;
        let unused = named.iter().zip(&uses).filter(|(_, seen)| !seen.pinned);
        let Some((&cell, _)) = unused.min_by_key(|(_, seen)| self.store.youngest(seen)) else { return Ok(()) };
        match self.index.descriptor(cell)? {
            Some(found) if found.state == Descriptor::READY => self.ask(Ask::EVICT, 0, BlockKey(found.key), Namespace(found.namespace)),
            _ => Ok(()),
        }
    }

    /// Whether a publish that found no place for its hint is to try once more: a block has gone for it.
    pub(in crate::cache) fn has_made_room(&self, home: &Home) -> Result<bool> {
        if mutant!("cache.no_hint_room") {
            return Ok(false);
        }
        match self.make_hint_room(home) {
            // Then it is refused, as before.
            Err(Error::Timeout { .. } | Error::BadLine { .. }) => Ok(false),
            made => made,
        }
    }
}
