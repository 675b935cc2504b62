// SPDX-License-Identifier: Apache-2.0
//! Which host has which chunk: claim lines, one writer each, changed under the chunk lock (CACHE.md D5 and section 7, strict adoption).
//!
//! A claim is published, then the own fences are checked, and only then is the chunk used. So either a holder that comes later sees the
//! claim, or the claimant sees its fence and keeps off. What a fenced claimant has is left alone until every other claimant is *proven*
//! dead, because its payload writes are not checked.

use super::Allocator;
use super::content::{self, Content};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::if_whole;
use crate::lock::{LOCK_CHUNKS, LockGuard};
use crate::media::{CHUNKS_PER_CLAIM, Claim, Region};
use bytemuck::Zeroable;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

type Bits = [u8; CHUNKS_PER_CLAIM / 8];

pub(super) fn has(bits: &Bits, bit: usize) -> bool {
    bits[bit / 8] >> (bit % 8) & 1 != 0
}

fn set(bits: &mut Bits, bit: usize, value: bool) {
    let mask = 1 << (bit % 8);
    bits[bit / 8] = if value { bits[bit / 8] | mask } else { bits[bit / 8] & !mask };
}

/// Claim line `line` of every slot, as fetched; `None` where it does not verify, which counts as a claim of everything in it.
pub(super) struct ClaimRow {
    line: u64,
    claims: Vec<Option<Claim>>,
}

impl ClaimRow {
    /// Chunk number of bit 0.
    fn first(&self) -> u64 {
        self.line * CHUNKS_PER_CLAIM as u64
    }

    fn is_claimed_by(&self, slot: usize, bit: usize) -> bool {
        let unreadable = !mutant!("alloc.torn_claim_claims_nothing");
        self.claims.get(slot).is_some_and(|claim| claim.map_or(unreadable, |claim| has(&claim.bits, bit)))
    }

    /// (slot, incarnation) of all but `except` that claim the chunk. An unreadable claimant has an incarnation that cannot be proven.
    fn claimants(&self, bit: usize, except: usize) -> impl Iterator<Item = (u16, u32)> + '_ {
        let slots = (0..self.claims.len()).filter(move |&slot| slot != except && self.is_claimed_by(slot, bit));
        slots.map(|slot| (slot as u16, self.claims[slot].map_or(u32::MAX, |claim| claim.incarnation)))
    }
}

/// Fences and proofs of death, each looked up once.
pub(super) struct DeathJudge<'a> {
    allocator: &'a Allocator,
    known: HashMap<(u16, u32), (bool, bool)>,
}

impl<'a> DeathJudge<'a> {
    pub fn new(allocator: &'a Allocator) -> Self {
        DeathJudge { allocator, known: HashMap::new() }
    }

    fn look_up(&mut self, slot: u16, incarnation: u32) -> Result<(bool, bool)> {
        if let Some(&known) = self.known.get(&(slot, incarnation)) {
            return Ok(known);
        }
        let host = &self.allocator.host;
        let fenced = host.is_fenced(slot, incarnation)?;
        let proven = if mutant!("alloc.adopt_on_fence") { fenced } else { host.is_proven_dead(slot, incarnation)? };
        self.known.insert((slot, incarnation), (fenced, proven));
        Ok((fenced, proven))
    }

    pub fn is_proven_dead(&mut self, slot: u16, incarnation: u32) -> Result<bool> {
        Ok(self.look_up(slot, incarnation)?.1)
    }

    fn are_proven_dead(&mut self, claimants: impl Iterator<Item = (u16, u32)>) -> Result<bool> {
        let mut dead = false;
        for (slot, incarnation) in claimants {
            dead = self.is_proven_dead(slot, incarnation)?;
            if !dead || mutant!("alloc.one_dead_claimant_is_enough") {
                break;
            }
        }
        Ok(dead)
    }

    /// It is neither fenced nor over: what it claims is its own.
    pub fn is_live(&mut self, slot: u16, incarnation: u32) -> Result<bool> {
        let (fenced, proven) = self.look_up(slot, incarnation)?;
        Ok(!fenced && !proven)
    }
}

impl Allocator {
    fn me(&self) -> usize {
        usize::from(self.host.slot())
    }

    /// Takes the chunk lock and follows a re-join of this host.
    ///
    /// Nothing is to be repaired after an unclean end: claims are host-owned, and a late one of a fenced host is void by its own check.
    pub(super) fn lock_chunks(&self) -> Result<LockGuard<'_>> {
        self.lock_chunks_within(self.lock_timeout_ms())
    }

    /// [`Allocator::lock_chunks`] with a deadline of the caller's.
    pub(super) fn lock_chunks_until(&self, deadline_ns: u64) -> Result<LockGuard<'_>> {
        self.lock_chunks_within(deadline_ns.saturating_sub(self.host.platform().now_ns()) / 1_000_000)
    }

    fn lock_chunks_within(&self, timeout_ms: u64) -> Result<LockGuard<'_>> {
        let mut guard = self.host.acquire(LOCK_CHUNKS, timeout_ms)?;
        if guard.needs_repair() {
            guard.repaired();
        }
        self.follow(&guard)?;
        Ok(guard)
    }

    pub(super) fn fetch_row(&self, line: u64) -> Result<ClaimRow> {
        let lines = self.layout().claim_lines();
        let indexes: Vec<u64> = (0..u64::from(self.layout().geometry().slots)).map(|slot| slot * lines + line).collect();
        let mut fetched: Vec<Result<Claim>> = Vec::with_capacity(indexes.len());
        self.lines().fetch_many(&indexes, &mut fetched)?;
        Ok(ClaimRow { line, claims: fetched.into_iter().map(if_whole).collect::<Result<_>>()? })
    }

    /// [`Allocator::fetch_row`], all of which verifies.
    fn fetch_whole_row(&self, line: u64) -> Result<ClaimRow> {
        let row = self.fetch_row(line)?;
        match row.claims.iter().position(Option::is_none) {
            None => Ok(row),
            Some(slot) => {
                let index = slot as u64 * self.layout().claim_lines() + line;
                Err(Error::BadLine { region: Region::Claim.name(), index, reason: "cannot tell what this slot claims" })
            }
        }
    }

    fn fetch_own(&self, line: u64) -> Result<Claim> {
        self.lines().fetch(self.host.slot() as u64 * self.layout().claim_lines() + line)
    }

    pub(super) fn is_claimed_here(&self, chunk: u64) -> Result<bool> {
        let claim = self.fetch_own(chunk / CHUNKS_PER_CLAIM as u64)?;
        Ok(has(&claim.bits, (chunk % CHUNKS_PER_CLAIM as u64) as usize))
    }

    fn bits_in(&self, line: u64) -> usize {
        (self.layout().chunks() - line * CHUNKS_PER_CLAIM as u64).min(CHUNKS_PER_CLAIM as u64) as usize
    }

    fn publish_own(&self, guard: &LockGuard<'_>, line: u64, bits: Bits) -> Result<()> {
        let claim = Claim { crc: 0, incarnation: guard.op().incarnation(), bits };
        self.lines().publish(self.host.slot() as u64 * self.layout().claim_lines() + line, claim)
    }

    /// Adds chunks of one claim line to this host's claims. They are ours only when this returns without error.
    fn claim(&self, guard: &LockGuard<'_>, row: &ClaimRow, added: &[usize]) -> Result<()> {
        let Some(own) = row.claims.get(self.me()).copied().flatten() else {
            return Err(Error::BadLine { region: Region::Claim.name(), index: row.line, reason: "own claim line does not verify" });
        };
        let mut bits = own.bits;
        added.iter().for_each(|&bit| set(&mut bits, bit, true));
        point!("alloc.chosen");
        self.publish_own(guard, row.line, bits)?;
        point!("alloc.claimed");
        if !mutant!("alloc.claim_no_check") {
            self.host.check_fences(guard.op())?;
        }
        point!("alloc.claim_checked");
        Ok(())
    }

    /// Claims one chunk of which nothing is used. It is in no list yet.
    pub(super) fn claim_one(&self, deadline_ns: u64) -> Result<u64> {
        let guard = self.lock_chunks_until(deadline_ns)?;
        let lines = self.layout().claim_lines();
        let start = self.hint.load(Ordering::Relaxed);
        for line in (0..lines).map(|step| (start + step) % lines) {
            // Each pass claims one more chunk of the line, so this ends.
            loop {
                let row = self.fetch_row(line)?;
                let scanned = if mutant!("alloc.no_claim_scan") { self.me()..self.me() + 1 } else { 0..row.claims.len() };
                let is_free = |bit: &usize| !scanned.clone().any(|slot| row.is_claimed_by(slot, *bit));
                let Some(bit) = (0..self.bits_in(line)).find(is_free) else { break };
                self.claim(&guard, &row, &[bit])?;
                self.hint.store(line, Ordering::Relaxed);
                // A chunk without a claim holds nothing; but it is read like any other, so that a lost block is not written over.
                self.load(&guard, row.first() + bit as u64)?;
                if let Some(chunk) = self.pop_spare() {
                    return Ok(chunk);
                }
            }
        }
        self.adopt(&guard, u64::MAX, true)?;
        self.pop_spare().ok_or(Error::Full {
            what: "the pool",
            limit: self.layout().chunks() * self.layout().geometry().chunk_bytes,
            advice: "free blocks, or use a larger pool; `cxlctl hosts` lists silent hosts, `cxlctl inspect blocks` \
                     what is kept, and `cxlctl free` gives back what no process uses any more",
        })
    }

    /// Claims `count` chunks in a row without a claim and of which nothing is used; returns the first.
    pub(super) fn claim_row(&self, count: u64, deadline_ns: u64) -> Result<u64> {
        let guard = self.lock_chunks_until(deadline_ns)?;
        let mut found = 0;
        for chunk in self.unclaimed_chunks()? {
            // `found` counts how many in a row end right before `chunk`.
            found = if chunk.1 { found + 1 } else { 0 };
            if found == count {
                let first = chunk.0 + 1 - count;
                if self.complete_run(&guard, first, count)? {
                    for chunk in first..first + count {
                        self.load(&guard, chunk)?;
                    }
                    if self.take_spares(first, count) {
                        return Ok(first);
                    }
                }
                found = 0;
            }
        }
        let advice = "free blocks, use blocks of at most a chunk, or format the pool with larger chunks";
        Err(Error::Full { what: "the room for a block of several chunks in a row", limit: count, advice })
    }

    fn unclaimed_chunks(&self) -> Result<Vec<(u64, bool)>> {
        let mut chunks = Vec::with_capacity(self.layout().chunks() as usize);
        for line in 0..self.layout().claim_lines() {
            let row = self.fetch_row(line)?;
            let is_free = |bit| !(0..row.claims.len()).any(|slot| row.is_claimed_by(slot, bit));
            chunks.extend((0..self.bits_in(line)).map(|bit| (row.first() + bit as u64, is_free(bit))));
        }
        Ok(chunks)
    }

    /// Claims whatever this host does not yet claim of chunks `first` to `first + count - 1`; false, and nothing claimed, when part of it
    /// is another host's who may still write.
    pub(super) fn complete_run(&self, guard: &LockGuard<'_>, first: u64, count: u64) -> Result<bool> {
        let mut judge = DeathJudge::new(self);
        let (first_line, last_line) = (first / CHUNKS_PER_CLAIM as u64, (first + count - 1) / CHUNKS_PER_CLAIM as u64);
        let mut missing = Vec::new();
        for line in first_line..=last_line {
            let row = self.fetch_row(line)?;
            let inside = |bit: &usize| (first..first + count).contains(&(row.first() + *bit as u64));
            let bits: Vec<usize> = (0..self.bits_in(line)).filter(inside).filter(|&bit| !row.is_claimed_by(self.me(), bit)).collect();
            for &bit in &bits {
                for (slot, incarnation) in row.claimants(bit, self.me()) {
                    if !judge.is_proven_dead(slot, incarnation)? {
                        return Ok(false);
                    }
                }
            }
            missing.push((row, bits));
        }
        for (row, bits) in missing.iter().filter(|(_, bits)| !bits.is_empty()) {
            self.claim(guard, row, bits)?;
        }
        Ok(true)
    }

    /// Adopts chunks that only hosts claim whose death is proven; stops after `limit`, or with the first empty one if `until_spare`.
    pub(super) fn adopt(&self, guard: &LockGuard<'_>, limit: u64, until_spare: bool) -> Result<u64> {
        let mut judge = DeathJudge::new(self);
        let mut adopted = 0;
        for line in 0..self.layout().claim_lines() {
            let mut row = self.fetch_row(line)?;
            for bit in 0..self.bits_in(line) {
                if adopted >= limit || (until_spare && self.has_spare()) {
                    return Ok(adopted);
                }
                if row.is_claimed_by(self.me(), bit) || !judge.are_proven_dead(row.claimants(bit, self.me()))? {
                    continue;
                }
                let chunk = row.first() + bit as u64;
                let ours = match content::read(self.lines(), &self.classes, chunk)?.0 {
                    // It goes with the run's first chunk.
                    Content::Inside(_) => false,
                    Content::Run(count) => self.complete_run(guard, chunk, count)?,
                    _ => self.claim(guard, &row, &[bit]).map(|()| true)?,
                };
                if ours {
                    self.load(guard, chunk)?;
                    point!("alloc.adopted");
                    adopted += 1;
                    row = self.fetch_row(line)?;
                }
            }
        }
        Ok(adopted)
    }

    /// Whether there is a chunk that only hosts claim whose death is proven. Without the lock it may be another's by now.
    pub(super) fn may_adopt(&self) -> Result<bool> {
        let mut judge = DeathJudge::new(self);
        for line in 0..self.layout().claim_lines() {
            let row = self.fetch_row(line)?;
            for bit in (0..self.bits_in(line)).filter(|&bit| !row.is_claimed_by(self.me(), bit)) {
                if judge.are_proven_dead(row.claimants(bit, self.me()))? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Takes a chunk of which nothing is used, and which was brought out of this machine's caches, out of this host's claims.
    pub(super) fn unclaim(&self, guard: &LockGuard<'_>, chunk: u64) -> Result<()> {
        let (line, bit) = (chunk / CHUNKS_PER_CLAIM as u64, (chunk % CHUNKS_PER_CLAIM as u64) as usize);
        let mut bits = self.fetch_own(line)?.bits;
        set(&mut bits, bit, false);
        self.publish_own(guard, line, bits)?;
        point!("alloc.unclaimed");
        self.local.set_owner(chunk, 0);
        Ok(())
    }

    /// Publishes this host's claims again under incarnation `guard.op().incarnation()`, without those that are, or may be, another host's.
    ///
    /// A host that was fenced while it claimed a chunk may have left a claim that is void, so of two claimants one may be the owner and the
    /// other never was. The owner's processes have the chunk in their lists, so a host that only joined again keeps what they have. A host
    /// whose processes are new has nothing there but what the pool says, and leaves a chunk to any other claimant that is not proven dead:
    /// if that one is not the owner either, it takes the chunk over with all that is kept in it. (CACHE.md C22 forbids to clear such a bit
    /// because of strays on the chunk's lines. With strict adoption only the owner ever writes them.)
    pub(super) fn claim_again(&self, guard: &LockGuard<'_>) -> Result<()> {
        let mut judge = DeathJudge::new(self);
        let mut living = HashMap::new();
        let incarnation = guard.op().incarnation();
        for line in 0..self.layout().claim_lines() {
            let own = self.fetch_own(line)?;
            if own.incarnation == incarnation || own == (Claim { crc: own.crc, ..Claim::zeroed() }) {
                continue;
            }
            // A host that stalled while it wrote its claims, and was fenced for that, resumes and writes its line in a moment.
            let row = self.host.inner.patiently(|| self.fetch_whole_row(line))?;
            let mut bits = own.bits;
            for bit in (0..self.bits_in(line)).filter(|&bit| has(&own.bits, bit)) {
                let in_use = self.has_living_owner(row.first() + bit as u64, &mut living);
                for (slot, other) in row.claimants(bit, self.me()) {
                    let yields = if in_use || mutant!("alloc.disputed_claim") {
                        judge.is_live(slot, other)?
                    } else {
                        !judge.is_proven_dead(slot, other)?
                    };
                    if yields {
                        set(&mut bits, bit, false);
                    }
                }
            }
            self.publish_own(guard, line, bits)?;
            point!("alloc.reclaimed");
        }
        self.host.check_fences(guard.op())
    }

    pub(super) fn claimed_from(&self, first: u64) -> Result<Vec<u64>> {
        let line = first / CHUNKS_PER_CLAIM as u64;
        let own = self.fetch_own(line)?;
        let start = line * CHUNKS_PER_CLAIM as u64;
        Ok((0..self.bits_in(line))
            .filter(|&bit| has(&own.bits, bit))
            .map(|bit| start + bit as u64)
            .filter(|&chunk| chunk >= first)
            .collect())
    }

    /// The live claimant of a chunk in its row, and whether any host claims it at all.
    pub(super) fn live_claimant(&self, row: &ClaimRow, chunk: u64, judge: &mut DeathJudge<'_>) -> Result<(Option<(u16, u32)>, bool)> {
        let mut any = false;
        for (slot, incarnation) in row.claimants((chunk - row.first()) as usize, usize::MAX) {
            any = true;
            if row.claims[usize::from(slot)].is_none() {
                // Perhaps its writer is just at it. No host is taken for the owner on the word of a line that cannot be read.
                return Ok((None, true));
            }
            if judge.is_live(slot, incarnation)? {
                return Ok((Some((slot, incarnation)), true));
            }
        }
        Ok((None, any))
    }
}

#[cfg(test)]
mod tests;
