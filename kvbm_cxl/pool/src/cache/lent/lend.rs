// SPDX-License-Identifier: Apache-2.0
//! Lending and taking back (LENT.md section 3).
//!
//! A block that is lent is in the memory before its line says LENT, and its line says LENT before its reference can be seen. A block
//! that is taken back has a line that says HELD before the engine's first store. A reader that finds LENT in the line after a copy has
//! therefore copied bytes that were not written to.

use super::super::cells::{FoundBlock, OwnedCellState as CellState};
use super::super::publish::Form;
use super::super::{BlockKey, Namespace, PublishRequest, Reservation, Reserved};
use super::lines::Reference;
use super::{LentRegion, held_line};
use crate::copy::Running;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::media::{Descriptor, REFERENCE_BYTES};

/// Bytes that are summed at a time.
const SUMMED_BYTES: usize = 16 << 10;

/// A block to be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lend {
    /// The block of the region.
    pub block: u32,
    /// Namespace of its key.
    pub namespace: Namespace,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in its chain, as in [`PublishRequest`].
    pub parent: Option<BlockKey>,
}

/// What became of a block that was to be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// Every host can pull it. Its memory must not be written until it is taken back.
    Lent,
    /// A block of the key is there, this one or another. Where it is this one it stays lent.
    Exists,
    /// A block of the key is there and may be about to go.
    Busy,
    /// There is no cell for the reference, and none could be evicted.
    NoCell,
    /// The hint table has no place for this key.
    NoHint,
    /// The namespace has used up its quota.
    OverQuota,
    /// It was taken back while it was being lent.
    TakenBack,
}

/// A reference in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    namespace: Namespace,
    key: BlockKey,
    cell: u64,
}

/// How a block stands, in this process's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LentBlockState {
    /// The engine's.
    Held,
    /// Being pulled into.
    Filling,
    /// Being lent by the call of this number.
    Lending(u64),
    /// Lent.
    Lent {
        generation: u64,
        checksum: Option<u64>,
        listed: Listed,
        /// Its reference was committed.
        is_listed: bool,
    },
}

/// How all of them stand.
pub(super) struct States {
    pub of: Box<[LentBlockState]>,
    /// Number of the last call that lends.
    calls: u64,
    generation: u64,
    /// References to blocks that were taken back.
    stale: Vec<Listed>,
}

impl States {
    pub fn new(blocks: u32) -> Self {
        States { of: vec![LentBlockState::Held; blocks as usize].into(), calls: 0, generation: 0, stale: Vec::new() }
    }

    pub fn get(&self, block: u32) -> LentBlockState {
        self.of.get(block as usize).copied().unwrap_or(LentBlockState::Held)
    }

    pub fn set(&mut self, block: u32, state: LentBlockState) {
        if let Some(of) = self.of.get_mut(block as usize) {
            *of = state;
        }
    }
}

/// Blocks that this process has promised not to write to until they are taken back, and has not lent yet.
///
/// One that is dropped leaves them as they are: take them back to offer them again.
#[derive(Debug)]
pub struct Offer {
    requests: Vec<Lend>,
    call: u64,
    /// What each was lent as before: only its reference may have gone since.
    before: Vec<Option<LentBlockState>>,
}

/// A block on its way to being lent.
struct Begun {
    index: usize,
    reservation: Reservation,
    /// What it was lent as before, when only its reference has gone.
    again: Option<(u64, Option<u64>)>,
    checksum: Option<u64>,
    generation: u64,
}

impl LentRegion {
    /// Lends several blocks, with shared fences; one answer for each request, in order. As [`LentRegion::offer`] and [`LentRegion::lend`].
    ///
    /// # Errors
    /// Those of the two.
    pub fn lend_all(&self, requests: &[Lend]) -> Result<Vec<Lending>> {
        self.lend(self.offer(requests)?)
    }

    /// Promises that no thread writes to these blocks from now on until they are taken back. Nothing in the pool changes: the code that
    /// decides to lend does this, and hands the rest to another thread. Taking a block back ends the promise, whatever that thread is at.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such block, the parts were not told, or a block is lent or offered already, but for one that is
    /// lent under the same key.
    pub fn offer(&self, requests: &[Lend]) -> Result<Offer> {
        requests.iter().try_for_each(|request| self.check_block(request.block))?;
        self.shape()?;
        // What this thread has stored past the caches is in no cache that the thread which lends could flush.
        if !mutant!("lent.offered_unfenced") {
            self.lines().memory().fence_stores();
        }
        let mut states = self.states();
        states.calls += 1;
        let call = states.calls;
        let mut before = Vec::with_capacity(requests.len());
        for request in requests {
            match states.get(request.block) {
                LentBlockState::Held => {
                    states.set(request.block, LentBlockState::Lending(call));
                    before.push(None);
                }
                lent @ LentBlockState::Lent { listed, .. } if (listed.namespace, listed.key) == (request.namespace, request.key) => {
                    before.push(Some(lent));
                }
                _ => {
                    drop(states);
                    self.settle(requests, call);
                    return Err(Error::Invalid(format!(
                        "block {} is lent already, about to be, or being filled: take it back first",
                        request.block
                    )));
                }
            }
        }
        Ok(Offer { requests: requests.to_vec(), call, before })
    }

    /// Lends what was offered, but for blocks that were taken back since; one answer for each, in order. Blocks that are not lent are the
    /// engine's again.
    ///
    /// # Errors
    /// Those of [`super::super::Cache::reserve_all`]. Then each of them may be lent or not: take them back.
    pub fn lend(&self, offer: Offer) -> Result<Vec<Lending>> {
        // A reference to what was taken back would be in the way of the same key.
        let result = self.tidy().and_then(|_| self.lend_offered(&offer));
        self.settle(&offer.requests, offer.call);
        result
    }

    /// Blocks that a call has not lent are the engine's again.
    fn settle(&self, requests: &[Lend], call: u64) {
        let mut states = self.states();
        for request in requests {
            if states.get(request.block) == LentBlockState::Lending(call) {
                states.set(request.block, LentBlockState::Held);
            }
        }
    }

    fn lend_offered(&self, offer: &Offer) -> Result<Vec<Lending>> {
        let Offer { requests, call, before } = offer;
        let block_bytes = self.block_bytes();
        let asked: Vec<PublishRequest> = requests
            .iter()
            .map(|request| PublishRequest {
                namespace: request.namespace,
                key: request.key,
                parent: request.parent,
                len_bytes: block_bytes,
            })
            .collect();
        let mut answers = vec![Lending::TakenBack; requests.len()];
        let mut begun = Vec::with_capacity(requests.len());
        for (index, reserved) in self.cache.reserve_as(&asked, Form::Reference)?.into_iter().enumerate() {
            answers[index] = match reserved {
                Reserved::Cell(reservation) => {
                    let again = match before.get(index) {
                        Some(Some(LentBlockState::Lent { generation, checksum, .. })) => Some((*generation, *checksum)),
                        _ => None,
                    };
                    begun.push(Begun { index, reservation, again, checksum: None, generation: 0 });
                    Lending::Lent
                }
                Reserved::Exists => Lending::Exists,
                Reserved::Busy => Lending::Busy,
                Reserved::NoCell => Lending::NoCell,
                Reserved::NoHint => Lending::NoHint,
                Reserved::OverQuota => Lending::OverQuota,
            };
        }
        self.write_back(requests, &mut begun)?;
        let begun = self.publish_lent(requests, *call, begun, &mut answers)?;
        self.list(requests, begun)?;
        Ok(answers)
    }

    /// Brings blocks out of this host's caches, and sums them before; the fence comes with their lines.
    fn write_back(&self, requests: &[Lend], begun: &mut [Begun]) -> Result<()> {
        let (shape, memory) = (self.shape()?, self.lines().memory());
        for one in begun.iter_mut().filter(|one| one.again.is_none()) {
            let block = requests[one.index].block;
            if self.cache.config().checksums {
                one.checksum = Some(self.checksum_of(block)?);
            }
            if !mutant!("lent.lent_unflushed") {
                shape.ranges(block).try_for_each(|(offset, len_bytes)| memory.flush_range(offset, len_bytes))?;
            }
        }
        point!("lent.written_back");
        Ok(())
    }

    /// The checksum of a block as this host sees it.
    fn checksum_of(&self, block: u32) -> Result<u64> {
        let (memory, mut sum) = (self.lines().memory(), Running::new());
        let mut bounce = vec![0; SUMMED_BYTES.min(self.block_bytes() as usize)];
        for (offset, len_bytes) in self.shape()?.ranges(block) {
            let mut done = 0;
            while done < len_bytes {
                let room = bounce.len().min((len_bytes - done) as usize);
                let Some(part) = bounce.get_mut(..room) else { break };
                memory.copy_out(offset + done, part)?;
                sum.add(part);
                done += room as u64;
            }
        }
        Ok(sum.finish())
    }

    /// Publishes the lines of the blocks that were not taken back since; the reservations of the others go.
    fn publish_lent(&self, requests: &[Lend], call: u64, begun: Vec<Begun>, answers: &mut [Lending]) -> Result<Vec<Begun>> {
        let (lines, seal) = (self.lines(), self.place().seal(self.lines()));
        let mut lent = Vec::with_capacity(begun.len());
        let mut gone = Vec::new();
        {
            let mut states = self.states();
            for mut one in begun {
                let Lend { block, namespace, key, .. } = requests[one.index];
                let listed = Listed { namespace, key, cell: one.reservation.cell() };
                match (states.get(block), one.again) {
                    (LentBlockState::Lending(of), None) if of == call => {
                        states.generation += 1;
                        one.generation = states.generation;
                        let line = Reference { block, nonce: self.place().nonce, generation: one.generation, ..Reference::default() };
                        lines.write_in(seal, block.into(), self.place().standing(block), line.lent(namespace, key))?;
                    }
                    (LentBlockState::Lent { generation, .. }, Some((of, checksum))) if of == generation => {
                        (one.generation, one.checksum) = (of, checksum);
                    }
                    _ => {
                        answers[one.index] = Lending::TakenBack;
                        gone.push(one);
                        continue;
                    }
                }
                let (generation, checksum) = (one.generation, one.checksum);
                states.set(block, LentBlockState::Lent { generation, checksum, listed, is_listed: false });
                lent.push(one);
            }
            // Behind the blocks, in front of the references, and before another thread of this process may take one of them back.
            if !mutant!("lent.lent_unfenced") {
                lines.fence_published();
            }
            point!("lent.lent");
        }
        drop(gone);
        Ok(lent)
    }

    /// Publishes the references. A block that is taken back meanwhile leaves one that is stale.
    fn list(&self, requests: &[Lend], begun: Vec<Begun>) -> Result<()> {
        let mut reservations = Vec::with_capacity(begun.len());
        let mut done = Vec::with_capacity(begun.len());
        for Begun { index, mut reservation, checksum, generation, .. } in begun {
            let Lend { block, namespace, key, .. } = requests[index];
            let reference = Reference {
                magic: Reference::MAGIC,
                block,
                region: self.place().region,
                nonce: self.place().nonce,
                generation,
                checksum: checksum.unwrap_or(0),
                has_checksum: checksum.is_some().into(),
                reserved: [0; 5],
            };
            reservation.refer(&bytemuck::cast::<Reference, [u8; REFERENCE_BYTES as usize]>(reference))?;
            done.push((block, generation, Listed { namespace, key, cell: reservation.cell() }));
            reservations.push(reservation);
        }
        point!("lent.referred");
        let lent = reservations.len() as u64;
        self.cache.commit_all(reservations)?;
        let metrics = self.cache.metrics();
        metrics.lent_total.add(lent);
        metrics.lent_bytes_total.add(lent * self.block_bytes());
        let mut states = self.states();
        for (block, generation, listed) in done {
            match states.get(block) {
                LentBlockState::Lent { generation: now, checksum, .. } if now == generation => {
                    states.set(block, LentBlockState::Lent { generation, checksum, listed, is_listed: true });
                }
                _ => states.stale.push(listed),
            }
        }
        Ok(())
    }

    /// Takes blocks back, so that the engine may write to them as soon as this returns: one line each and one fence, whatever readers do.
    /// Blocks that are not lent stay as they are. The references go later, with [`LentRegion::tidy`]. Returns how many were lent.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such block; those of the memory: then the blocks may not be written.
    pub fn take_back(&self, blocks: &[u32]) -> Result<usize> {
        blocks.iter().try_for_each(|&block| self.check_block(block))?;
        self.take_back_of(blocks.iter().copied())
    }

    /// Takes all blocks back; returns how many were lent.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn take_back_all(&self) -> Result<usize> {
        self.take_back_of(0..self.place().blocks)
    }

    fn take_back_of(&self, blocks: impl Iterator<Item = u32>) -> Result<usize> {
        let (lines, seal) = (self.lines(), self.place().seal(self.lines()));
        let mut states = self.states();
        let mut taken = Vec::new();
        for block in blocks {
            match states.get(block) {
                LentBlockState::Held | LentBlockState::Filling => {}
                // The call that lends it finds that out before its line says LENT.
                LentBlockState::Lending(_) => states.set(block, LentBlockState::Held),
                LentBlockState::Lent { generation, listed, is_listed, .. } => {
                    if !mutant!("lent.not_taken_back") {
                        let line = held_line(self.place().nonce, block, generation);
                        lines.write_in(seal, block.into(), self.place().standing(block), line)?;
                    }
                    taken.push((block, is_listed.then_some(listed)));
                }
            }
        }
        if taken.is_empty() {
            return Ok(0);
        }
        if !mutant!("lent.taken_back_unfenced") {
            lines.fence_published();
        }
        point!("lent.taken_back");
        for (block, listed) in &taken {
            states.set(*block, LentBlockState::Held);
            states.stale.extend(listed);
        }
        self.cache.metrics().taken_back_total.add(taken.len() as u64);
        Ok(taken.len())
    }

    /// Removes the references to blocks that were taken back, which are misses to the readers that follow them; returns how many went. To
    /// be called now and then. One that is pinned stays for the next time.
    ///
    /// # Errors
    /// [`Error::Fenced`], those of the memory.
    pub fn tidy(&self) -> Result<usize> {
        let stale = std::mem::take(&mut self.states().stale);
        if stale.is_empty() {
            return Ok(0);
        }
        let inner = &self.cache.inner;
        let find = |listed: &Listed| {
            let found = inner.store.cells().ready(listed.cell);
            found
                .filter(|found| (found.key, found.namespace, found.kind) == (listed.key.0, listed.namespace.0, Descriptor::REFERENCE))
                .map(|found| FoundBlock::new(listed.cell, &found))
        };
        let removed = inner.remove_found(stale.iter().filter_map(find).collect());
        let (mut told, mut left) = (Ok(()), Vec::new());
        for listed in stale {
            let state = inner.store.cells().state(listed.cell);
            let stays = match state {
                Some(state) => state == CellState::Busy || find(&listed).is_some(),
                // A cell of which another process is the owner by now: it is asked, once.
                None if removed.is_ok() && told.is_ok() => {
                    told = inner.ask(crate::media::Ask::EVICT, 0, listed.key, listed.namespace);
                    told.is_err()
                }
                None => true,
            };
            left.extend(stays.then_some(listed));
        }
        self.states().stale.extend(left);
        told.and(removed)
    }
}
