// SPDX-License-Identifier: Apache-2.0
//! Chunks that go back to the pool, with the claims of hosts that are gone still on them (CACHE.md 12.7).
//!
//! A claim is cleared by its own slot alone, and a slot whose machine never comes back keeps its claims. So a chunk that was adopted once
//! may stay claimed for good, and has to go round all the same: else the hosts that adopt end up with chunks that they cannot give away.
//! Such a chunk is given back with the stamps of its last owner on every line, which the next one trusts as little as a chunk without a
//! claim.

use crate::background::held;
use crate::cache::cells::OwnedCellState;
use crate::cache::cells::claims::{CellClaimRow, CellClaimant, FenceJudge};
use crate::cache::cells::store::CellStore;
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::line::if_whole;
use crate::lock::LockGuard;
use crate::media::Descriptor;

impl CellStore {
    /// Whether another host that claims a chunk may still write lines of it.
    pub(in crate::cache) fn is_beside_others(&self, chunk: u64) -> Result<bool> {
        let (row, bit) = self.row_of(chunk)?;
        Ok(!self.have_others_ended(&mut FenceJudge::new(&self.host), &row, bit)?)
    }

    fn have_others_ended(&self, judge: &mut FenceJudge<'_>, row: &CellClaimRow, bit: usize) -> Result<bool> {
        for other in row.claimants(bit, self.host.slot()) {
            if !judge.has_ended(other)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Gives a chunk back to the pool, if all of its cells are free and no other host that claims it may still write there; true when that
    /// is done.
    pub(in crate::cache) fn give_back(&self, chunk: u64) -> Result<bool> {
        let guard = self.lock_claims()?;
        let (row, bit) = self.row_of(chunk)?;
        // Late lines of another claimant are for the next owner to know of.
        if !self.have_others_ended(&mut FenceJudge::new(&self.host), &row, bit)? && !mutant!("cache.given_back_beside_others") {
            return Ok(false);
        }
        let mut cells = self.cells();
        if !cells.is_all_free(chunk) || self.cells_of(chunk).any(|cell| cells.state(cell) != Some(OwnedCellState::Free)) {
            return Ok(false);
        }
        cells.remove_chunk(chunk);
        drop(cells);
        if row.claimants(bit, self.host.slot()).next().is_some() {
            self.stamp_free(&guard, chunk)?;
        }
        let mut own = self.fetch_own(row.line)?;
        own.set(bit, false);
        self.local.set_owner(chunk, 0);
        self.publish_own(&guard, row.line, own)?;
        point!("cache.given_back");
        Ok(true)
    }

    /// Rewrites every line of a chunk. A late line of a claimant may lie on it from before that one ended, and is taken for true where that
    /// is the only claimant left. After an error the claim stays, and the sweep comes back to the chunk.
    fn stamp_free(&self, guard: &LockGuard<'_>, chunk: u64) -> Result<()> {
        if mutant!("cache.given_back_unstamped") {
            return Ok(());
        }
        for cell in self.cells_of(chunk) {
            self.host.lines().write(cell, self.stamp(guard.op().incarnation(), Descriptor::FREE, Descriptor::default()))?;
        }
        self.host.lines().fence_published();
        point!("cache.stamped_free");
        Ok(())
    }

    /// Whether a claimed chunk is to be taken over for its contents. One in which there is nothing, and in which all claimants have ended,
    /// waits for a process that needs cells, as chunks without a claim do.
    pub(super) fn is_abandoned(&self, judge: &mut FenceJudge<'_>, row: &CellClaimRow, bit: usize) -> Result<bool> {
        if !self.may_adopt(judge, row, bit)? {
            return Ok(false);
        }
        let claimants: Vec<CellClaimant> = row.claimants(bit, self.host.slot()).collect();
        for &claimant in &claimants {
            if !judge.has_ended(claimant)? {
                return Ok(true);
            }
        }
        let chunk = row.first() + bit as u64;
        if !self.is_left_empty(chunk, claimants)? {
            return Ok(true);
        }
        if let Some(class) = self.host.lines().layout().cell_class(chunk) {
            self.has_exhausted(class, false);
        }
        Ok(false)
    }

    fn is_left_empty(&self, chunk: u64, claimants: Vec<CellClaimant>) -> Result<bool> {
        if held(&self.left_empty).get(&chunk) == Some(&claimants) {
            return Ok(true);
        }
        let cells: Vec<u64> = self.cells_of(chunk).collect();
        let mut fetched: Vec<Result<Descriptor>> = Vec::with_capacity(cells.len());
        self.host.lines().fetch_many(&cells, &mut fetched)?;
        for found in fetched {
            if if_whole(found)?.is_none_or(|found| found.state != Descriptor::FREE) {
                return Ok(false);
            }
        }
        held(&self.left_empty).insert(chunk, claimants);
        Ok(true)
    }
}
