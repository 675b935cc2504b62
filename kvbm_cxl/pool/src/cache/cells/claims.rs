// SPDX-License-Identifier: Apache-2.0
//! Which host has which cell chunk: claim lines, one writer each, changed under the lock of the claims (CACHE.md D5 and section 7).
//!
//! A claim of a host that is not fenced beats every claim of one that is. Claims outlive their hosts: who adopts a chunk leaves the bits of
//! the others where they are, because they tell whose late lines may still turn up on it.

use crate::cache::cells::local::attachment;
use crate::cache::cells::{residue, store::CellStore};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::line::if_whole;
use crate::lock::{LOCK_CELLS, LockGuard};
use crate::media::{CHUNKS_PER_CELL_CLAIM, CellClaim, Descriptor, Region};
use bytemuck::Zeroable;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

pub(in crate::cache) struct CellClaimRow {
    pub line: u64,
    claims: Vec<Claimed>,
}

#[derive(Clone, Copy)]
enum Claimed {
    Read(CellClaim),
    /// The line does not verify, perhaps because its writer stopped in the middle of it: it counts as a claim of everything in it, by
    /// whatever incarnation has its slot now.
    Unreadable(u32),
}

impl Claimed {
    fn has(&self, bit: usize) -> bool {
        match self {
            Claimed::Read(claim) => claim.has(bit),
            Claimed::Unreadable(_) if mutant!("cache.torn_claim_claims_nothing") => false,
            // A slot that was never bound has claimed nothing.
            Claimed::Unreadable(incarnation) => *incarnation != 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct CellClaimant {
    pub slot: u16,
    pub incarnation: u32,
    /// Its claim can be read. Otherwise it may as well be of an earlier incarnation, and is no stamp to trust a cell by.
    pub is_certain: bool,
}

impl CellClaimRow {
    /// Chunk number of bit 0.
    pub fn first(&self) -> u64 {
        self.line * CHUNKS_PER_CELL_CLAIM as u64
    }

    /// All hosts but `except` that claim the chunk.
    pub fn claimants(&self, bit: usize, except: u16) -> impl Iterator<Item = CellClaimant> + '_ {
        let slots = self.claims.iter().enumerate().filter(move |&(slot, _)| slot != usize::from(except));
        slots.filter(move |(_, claim)| claim.has(bit)).map(|(slot, claim)| {
            let (incarnation, is_certain) = match *claim {
                Claimed::Read(claim) => (claim.incarnation, true),
                Claimed::Unreadable(incarnation) => (incarnation, false),
            };
            CellClaimant { slot: slot as u16, incarnation, is_certain }
        })
    }

    fn is_claimed(&self, bit: usize) -> bool {
        self.claims.iter().any(|claim| claim.has(bit))
    }
}

/// Where claimants stand, each looked up once.
pub(in crate::cache) struct FenceJudge<'a> {
    host: &'a Host,
    known: HashMap<(u16, u32), (bool, bool)>,
}

impl<'a> FenceJudge<'a> {
    pub fn new(host: &'a Host) -> Self {
        FenceJudge { host, known: HashMap::new() }
    }

    fn look_up(&mut self, claimant: CellClaimant) -> Result<(bool, bool)> {
        let CellClaimant { slot, incarnation, .. } = claimant;
        if let Some(&known) = self.known.get(&(slot, incarnation)) {
            return Ok(known);
        }
        let known = (self.host.is_fenced(slot, incarnation)?, self.host.has_ended(slot, incarnation)?);
        self.known.insert((slot, incarnation), known);
        Ok(known)
    }

    /// Every operation of it has ended: nothing of it turns up any more.
    pub fn has_ended(&mut self, claimant: CellClaimant) -> Result<bool> {
        Ok(self.look_up(claimant)?.1)
    }

    /// It is neither fenced nor over: what it claims is its own.
    pub fn is_live(&mut self, claimant: CellClaimant) -> Result<bool> {
        let (fenced, ended) = self.look_up(claimant)?;
        Ok(!fenced && !ended)
    }
}

impl CellStore {
    /// Takes the lock of the claims and follows a re-join of this host.
    ///
    /// Nothing is to be repaired after an unclean end: claims are host-owned, and a late one of a fenced host is beaten by any other.
    pub(in crate::cache) fn lock_claims(&self) -> Result<LockGuard<'_>> {
        let mut guard = self.locks.acquire(LOCK_CELLS)?;
        if guard.needs_repair() {
            guard.repaired();
        }
        self.follow(&guard)?;
        Ok(guard)
    }

    pub(in crate::cache) fn fetch_row(&self, line: u64) -> Result<CellClaimRow> {
        let lines = self.host.geometry().cell_claim_lines();
        let indexes: Vec<u64> = (0..u64::from(self.host.geometry().slots)).map(|slot| slot * lines + line).collect();
        let mut fetched: Vec<Result<CellClaim>> = Vec::with_capacity(indexes.len());
        self.host.lines().fetch_many(&indexes, &mut fetched)?;
        let claims = fetched.into_iter().zip(0..).map(|(claim, slot)| match if_whole(claim)? {
            Some(claim) => Ok(Claimed::Read(claim)),
            // Looked up after the line: the host that was writing the line had joined before.
            None => Ok(Claimed::Unreadable(self.incarnation_of(slot)?)),
        });
        Ok(CellClaimRow { line, claims: claims.collect::<Result<_>>()? })
    }

    pub(in crate::cache) fn row_of(&self, chunk: u64) -> Result<(CellClaimRow, usize)> {
        let per_line = CHUNKS_PER_CELL_CLAIM as u64;
        Ok((self.fetch_row(chunk / per_line)?, (chunk % per_line) as usize))
    }

    fn own_line(&self, line: u64) -> u64 {
        u64::from(self.host.slot()) * self.host.geometry().cell_claim_lines() + line
    }

    pub(super) fn fetch_own(&self, line: u64) -> Result<CellClaim> {
        self.host.lines().fetch(self.own_line(line))
    }

    fn is_claimed_here(&self, chunk: u64) -> Result<bool> {
        Ok(self.fetch_own(chunk / CHUNKS_PER_CELL_CLAIM as u64)?.has((chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize))
    }

    fn bits_in(&self, line: u64) -> usize {
        (self.host.geometry().cell_chunks() - line * CHUNKS_PER_CELL_CLAIM as u64).min(CHUNKS_PER_CELL_CLAIM as u64) as usize
    }

    pub(super) fn publish_own(&self, guard: &LockGuard<'_>, line: u64, claim: CellClaim) -> Result<()> {
        self.host.lines().publish(self.own_line(line), CellClaim { crc: 0, incarnation: guard.op().incarnation(), ..claim })
    }

    fn claim(&self, guard: &LockGuard<'_>, row: &CellClaimRow, bit: usize) -> Result<()> {
        let Some(&Claimed::Read(mut own)) = row.claims.get(usize::from(self.host.slot())) else {
            return Err(Error::BadLine { region: Region::CellClaim.name(), index: row.line, reason: "own claim line does not verify" });
        };
        own.set(bit, true);
        point!("cache.claim_chosen");
        self.publish_own(guard, row.line, own)?;
        point!("cache.claimed");
        self.host.check_fences(guard.op())?;
        self.give_chunk(row.first() + bit as u64, self.host.inner.tag)?;
        Ok(())
    }

    /// Notes that a chunk is that of the process `tag` of this host, 0 for none. What another one was filling there is brought out of this
    /// machine's caches before: no call asks for it any more afterwards.
    fn give_chunk(&self, chunk: u64, tag: u32) -> Result<()> {
        let found = self.local.chunk(chunk);
        if found.is_filled() && found.owner() != tag && !mutant!("cache.taken_unflushed") {
            residue::flush_chunk(self.host.lines(), chunk, self.host.slot())?;
        }
        self.local.set_owner(chunk, tag);
        Ok(())
    }

    /// Takes one more chunk with cells of `class`: one without a claim, else one of hosts that are fenced or gone. False when there is
    /// none.
    pub(in crate::cache) fn claim_chunk(&self, class: usize) -> Result<bool> {
        let guard = self.lock_claims()?;
        let mut judge = FenceJudge::new(&self.host);
        // Hosts begin their search in different places, so that they seldom want the same claim lines.
        let (lines, me) = (self.host.geometry().cell_claim_lines(), self.host.slot());
        let start = self.claim_hint();
        let mut adoptable = None;
        for line in (0..lines).map(|step| (start + step) % lines) {
            let row = self.fetch_row(line)?;
            let scanned = !mutant!("cache.no_claim_scan");
            for bit in 0..self.bits_in(line) {
                let chunk = row.first() + bit as u64;
                if self.host.lines().layout().cell_class(chunk) != Some(class) || self.cells().has_chunk(chunk) {
                    continue;
                }
                if !scanned || !row.is_claimed(bit) {
                    self.claim(&guard, &row, bit)?;
                    self.found_chunk_at(line);
                    self.take_over(&guard, chunk, &[], &[])?;
                    return Ok(true);
                }
                if adoptable.is_none() && row.claimants(bit, me).next().is_some() && self.may_adopt(&mut judge, &row, bit)? {
                    adoptable = Some((line, bit));
                }
            }
        }
        let Some((line, bit)) = adoptable else { return Ok(false) };
        self.adopt(&guard, &self.fetch_row(line)?, bit)?;
        Ok(true)
    }

    /// Early adoption: no unfenced host claims it, and there is one claimant, or all of them have ended.
    pub(super) fn may_adopt(&self, judge: &mut FenceJudge<'_>, row: &CellClaimRow, bit: usize) -> Result<bool> {
        let claimants: Vec<CellClaimant> = row.claimants(bit, u16::MAX).collect();
        let mut all_ended = true;
        for &claimant in &claimants {
            if claimant.slot == self.host.slot() || (judge.is_live(claimant)? && !mutant!("cache.adopts_the_living")) {
                return Ok(false);
            }
            all_ended = all_ended && judge.has_ended(claimant)?;
        }
        Ok(all_ended || claimants.len() == 1)
    }

    fn adopt(&self, guard: &LockGuard<'_>, row: &CellClaimRow, bit: usize) -> Result<()> {
        let claimants: Vec<CellClaimant> = row.claimants(bit, self.host.slot()).collect();
        self.claim(guard, row, bit)?;
        point!("cache.adopting");
        self.take_over(guard, row.first() + bit as u64, &claimants, &[])?;
        point!("cache.adopted");
        Ok(())
    }

    /// Adopts up to `limit` chunks of hosts that are fenced or gone; returns how many.
    pub(in crate::cache) fn adopt_abandoned(&self, limit: usize) -> Result<usize> {
        if !self.is_any_abandoned()? {
            return Ok(0);
        }
        let guard = self.lock_claims()?;
        let mut judge = FenceJudge::new(&self.host);
        let mut adopted = 0;
        for line in 0..self.host.geometry().cell_claim_lines() {
            let mut row = self.fetch_row(line)?;
            for bit in 0..self.bits_in(line) {
                if adopted >= limit {
                    return Ok(adopted);
                }
                if row.is_claimed(bit) && self.is_abandoned(&mut judge, &row, bit)? {
                    self.adopt(&guard, &row, bit)?;
                    adopted += 1;
                    row = self.fetch_row(line)?;
                }
            }
        }
        Ok(adopted)
    }

    /// Without the lock: whether there may be anything to adopt. Notes of which classes there are chunks without an owner.
    fn is_any_abandoned(&self) -> Result<bool> {
        let mut judge = FenceJudge::new(&self.host);
        let mut found = false;
        for line in 0..self.host.geometry().cell_claim_lines() {
            let row = self.fetch_row(line)?;
            for bit in 0..self.bits_in(line) {
                if row.is_claimed(bit) {
                    found = found || self.is_abandoned(&mut judge, &row, bit)?;
                } else if let Some(class) = self.host.lines().layout().cell_class(row.first() + bit as u64) {
                    self.has_exhausted(class, false);
                }
            }
        }
        Ok(found)
    }

    /// Follows this host into the incarnation under which `guard` was acquired: the claim lines once for the host, then this process's
    /// chunks, whose cells are all read again.
    fn follow(&self, guard: &LockGuard<'_>) -> Result<()> {
        let (slot, incarnation) = (self.host.slot(), guard.op().incarnation());
        let attachment = attachment(slot, incarnation);
        let attached = &self.local.header().attached;
        if attached.load(Ordering::Acquire) != attachment {
            self.claim_again(guard)?;
            point!("cache.claims_renewed");
            attached.store(attachment, Ordering::Release);
        }
        if self.incarnation() == incarnation {
            return Ok(());
        }
        let mut mine: Vec<u64> = self.cells().chunks().collect();
        if mutant!("cache.keeps_cells_of_before") {
            mine.clear();
        }
        for chunk in mine {
            // What this process knows of the cells is of an incarnation whose lines are void, and others may have adopted them since.
            let known = self.cells().remove_chunk(chunk);
            let followed = self.follow_chunk(guard, chunk, &known);
            self.tell_lost(&known);
            followed?;
        }
        if self.set_incarnation(incarnation) != 0 {
            self.metrics.rejoins_total.inc();
        }
        Ok(())
    }

    /// Makes a chunk that was this process's its own again, with the blocks that it knew to be there, if it still has it.
    fn follow_chunk(&self, guard: &LockGuard<'_>, chunk: u64, known: &[(u64, Descriptor)]) -> Result<()> {
        // It need not be this process's any more: another one of this host may have claimed it since others gave it back.
        if self.local.owner(chunk) != self.host.inner.tag && !mutant!("cache.follows_chunks_of_others") {
            return Ok(());
        }
        if self.is_claimed_here(chunk)? {
            return self.take_back(guard, chunk, known);
        }
        self.local.disown(chunk, self.host.inner.tag);
        Ok(())
    }

    /// Takes over a chunk that this host claims, with what it was under its former incarnation or in the hands of a process that is gone:
    /// that one is a claimant like any other, and where there are others, nothing is trusted. Listeners know of the `known` blocks.
    fn take_back(&self, guard: &LockGuard<'_>, chunk: u64, known: &[(u64, Descriptor)]) -> Result<()> {
        let (row, bit) = self.row_of(chunk)?;
        let mut claimants: Vec<CellClaimant> = row.claimants(bit, self.host.slot()).collect();
        if mutant!("cache.trusts_itself_beside_others") {
            claimants.clear();
        }
        claimants.push(CellClaimant { slot: self.host.slot(), incarnation: self.former_incarnation(guard, chunk)?, is_certain: true });
        self.give_chunk(chunk, self.host.inner.tag)?;
        self.take_over(guard, chunk, &claimants, known)
    }

    /// The incarnation of this host that last took a chunk over: that of its latest stamp.
    fn former_incarnation(&self, guard: &LockGuard<'_>, chunk: u64) -> Result<u32> {
        let mut latest = 0;
        for cell in self.cells_of(chunk) {
            if let Some(found) = if_whole(self.host.lines().fetch::<Descriptor>(cell))?.filter(|found| found.owner == self.host.slot()) {
                latest = latest.max(found.incarnation.min(guard.op().incarnation()));
            }
        }
        Ok(latest)
    }

    pub(in crate::cache) fn cells_of(&self, chunk: u64) -> std::ops::Range<u64> {
        let per_chunk = u64::from(self.host.geometry().cells_per_chunk);
        chunk * per_chunk..(chunk + 1) * per_chunk
    }

    /// Publishes this host's claims again under the incarnation of `guard`, without chunks that another live host claims.
    ///
    /// Only such a bit may go: a bit that is cleared while no live host has the chunk would hide from a later adopter that lines of this
    /// host may lie on it (CACHE.md C22). For that reason a line that cannot be read, because a process died in the middle of it, is taken
    /// for a claim of everything. Chunks that were not this host's are given back when others want them.
    fn claim_again(&self, guard: &LockGuard<'_>) -> Result<()> {
        let mut judge = FenceJudge::new(&self.host);
        let incarnation = guard.op().incarnation();
        for line in 0..self.host.geometry().cell_claim_lines() {
            let own = match if_whole(self.fetch_own(line))? {
                Some(own) if own.incarnation == incarnation || own == (CellClaim { crc: own.crc, ..CellClaim::zeroed() }) => continue,
                Some(own) => own,
                None if mutant!("cache.torn_claim_is_cleared") => CellClaim::zeroed(),
                None => self.claim_of_all(line),
            };
            let row = self.fetch_row(line)?;
            let mut claim = own;
            for bit in (0..self.bits_in(line)).filter(|&bit| own.has(bit)) {
                let mut others = row.claimants(bit, self.host.slot()).peekable();
                let clears_early = mutant!("cache.claim_cleared_early") && others.peek().is_some();
                let mut is_live = false;
                for other in others {
                    is_live = is_live || judge.is_live(other)?;
                }
                if is_live || clears_early {
                    claim.set(bit, false);
                    self.give_chunk(row.first() + bit as u64, 0)?;
                }
            }
            self.publish_own(guard, line, claim)?;
        }
        Ok(())
    }

    fn claim_of_all(&self, line: u64) -> CellClaim {
        let mut claim = CellClaim::zeroed();
        (0..self.bits_in(line)).for_each(|bit| claim.set(bit, true));
        claim
    }

    /// Takes over chunks that this host claims and none of its living processes has; at most `limit`. Returns how many.
    pub(in crate::cache) fn sweep(&self, limit: usize) -> Result<usize> {
        let mut living = HashMap::new();
        let mut orphans = Vec::new();
        for line in 0..self.host.geometry().cell_claim_lines() {
            let Some(own) = if_whole(self.fetch_own(line))? else {
                // A process of this host was killed in the middle of it.
                self.claim_again(&self.lock_claims()?)?;
                return Ok(0);
            };
            let first = line * CHUNKS_PER_CELL_CLAIM as u64;
            let claimed = (0..self.bits_in(line)).filter(|&bit| own.has(bit)).map(|bit| first + bit as u64);
            orphans.extend(claimed.filter(|&chunk| self.is_orphan(chunk, &mut living)));
        }
        orphans.truncate(limit);
        if orphans.is_empty() {
            return Ok(0);
        }
        let guard = self.lock_claims()?;
        // A process may have died between its claim and its fence check, so the check is made here.
        self.host.check_fences(guard.op())?;
        let mut taken = 0;
        for chunk in orphans {
            // The lock may have taken long.
            living.clear();
            if mutant!("cache.sweeps_by_an_early_look") || (self.is_orphan(chunk, &mut living) && self.is_claimed_here(chunk)?) {
                self.take_back(&guard, chunk, &[])?;
                point!("cache.swept");
                taken += 1;
            }
        }
        Ok(taken)
    }

    fn is_orphan(&self, chunk: u64, living: &mut HashMap<u32, bool>) -> bool {
        let owner = self.local.owner(chunk);
        if owner == self.host.inner.tag {
            return !self.cells().has_chunk(chunk);
        }
        !*living.entry(owner).or_insert_with(|| owner != 0 && self.host.inner.is_tag_alive(owner))
    }
}
