// SPDX-License-Identifier: Apache-2.0
//! Taking chunks over: those of this host's earlier incarnations and dead processes, and those adopted from dead hosts.
//!
//! A chunk is loaded under the chunk lock by the process that is going to own it, from what the pool says: kept blocks stay, everything
//! else is free. Frees that were on their way to the former owner are applied *before* the first allocation, where doing one of them a
//! second time is harmless; afterwards it would free another owner's block.

use super::content::{self, Content};
use super::heap::{BlockSet, HeapChunk};
use super::{Allocator, ChunkUse, Run};
use crate::background::held;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::lock::LockGuard;
use crate::media::{BLOCKS_PER_KEEP, CHUNKS_PER_CLAIM, ChunkHead, FreeAck, FreeBox, KeepMap};
use std::collections::HashMap;
use std::sync::atomic::Ordering;

impl Allocator {
    pub(super) fn publish_head(&self, op: &Op<'_>, chunk: u64, state: u32, block_bytes: u64, run: u64) -> Result<()> {
        let (slot, incarnation) = (self.host.slot().into(), op.incarnation());
        self.lines().publish(chunk, ChunkHead { slot, incarnation, state, block_bytes, run, ..ChunkHead::default() })
    }

    pub(super) fn publish_keep(&self, op: &Op<'_>, chunk: u64, line: usize, bits: [u8; BLOCKS_PER_KEEP / 8]) -> Result<()> {
        let index = chunk * self.layout().geometry().keep_lines() + line as u64;
        self.lines().publish(index, KeepMap { crc: 0, incarnation: op.incarnation(), bits })
    }

    /// Makes a chunk that this host claims one of this process's. The caller holds the chunk lock.
    pub(super) fn load(&self, guard: &LockGuard<'_>, chunk: u64) -> Result<()> {
        // A chunk that this process has already, alone or as part of a block, is never taken in a second time, whatever the claims say.
        if self.place(chunk) != ChunkUse::None {
            return Ok(());
        }
        let op = guard.op();
        let (content, head) = content::read(self.lines(), &self.classes, chunk)?;
        point!("alloc.load");
        match content {
            Content::Nothing => self.load_nothing(op, chunk, &head)?,
            Content::Blocks { class, mut kept } => {
                let before = kept.clone();
                let late = self.late_frees(chunk, &head)?;
                for offset in late.into_iter().filter(|_| !mutant!("alloc.late_frees_are_dropped")) {
                    if let Some(block) = self.block_at(class, chunk, offset) {
                        kept.remove(block);
                    }
                }
                let blocks = self.blocks_per_chunk(class);
                for line in (0..(blocks as usize).div_ceil(BLOCKS_PER_KEEP)).filter(|&line| before.line(line) != kept.line(line)) {
                    self.publish_keep(op, chunk, line, kept.line(line))?;
                    point!("alloc.load_freed");
                }
                if kept.count() == 0 {
                    self.load_nothing(op, chunk, &head)?;
                } else {
                    self.publish_head(op, chunk, ChunkHead::BLOCKS, head.block_bytes, 0)?;
                    let mut heap = held(&self.heaps[class]);
                    let place = heap.add(HeapChunk::rebuilt(chunk, blocks, kept));
                    self.set_place(chunk, ChunkUse::Heap { class, place });
                }
            }
            Content::Run(count) => self.load_run(guard, chunk, count, &head)?,
            // It comes with the run's first chunk.
            Content::Inside(_) => return Ok(()),
            Content::Bad(reason) => {
                held(&self.other).bad.insert(chunk, reason);
                self.set_place(chunk, ChunkUse::Other);
            }
        }
        self.local.set_owner(chunk, self.tag());
        point!("alloc.loaded");
        Ok(())
    }

    fn load_nothing(&self, op: &Op<'_>, chunk: u64, head: &ChunkHead) -> Result<()> {
        self.take_waiting(chunk);
        if head.state != ChunkHead::UNCUT {
            self.publish_head(op, chunk, ChunkHead::UNCUT, 0, 0)?;
        }
        self.set_place(chunk, ChunkUse::Other);
        held(&self.other).spare.push(chunk);
        Ok(())
    }

    fn load_run(&self, guard: &LockGuard<'_>, first: u64, count: u64, head: &ChunkHead) -> Result<()> {
        let offset = self.layout().chunk_offset(first)?;
        if self.late_frees(first, head)?.contains(&offset) {
            self.publish_keep(guard.op(), first, 0, BlockSet::new(1).line(0))?;
            point!("alloc.load_run_freed");
            return self.load_nothing(guard.op(), first, head);
        }
        // Two blocks must not share a chunk: what both of them free would then be given out twice.
        if let Some(reason) = self.broken_run(first, count)? {
            held(&self.other).bad.insert(first, reason);
            self.set_place(first, ChunkUse::Other);
            return Ok(());
        }
        // A crash in the middle of an adoption may have left the rest of it with the dead host.
        if !self.complete_run(guard, first, count)? {
            held(&self.other).bad.insert(first, "another host claims a part of this block");
            self.set_place(first, ChunkUse::Other);
            return Ok(());
        }
        self.publish_head(guard.op(), first, ChunkHead::RUN, head.block_bytes, count)?;
        held(&self.other).runs.insert(first, Run { count, kept: true });
        for chunk in first..first + count {
            self.set_place(chunk, ChunkUse::Other);
            self.local.set_owner(chunk, self.tag());
        }
        Ok(())
    }

    /// Why the chunks after `first` are not those of one block, if they are not.
    fn broken_run(&self, first: u64, count: u64) -> Result<Option<&'static str>> {
        let parts: Vec<u64> = (first + 1..first + count).collect();
        if parts.iter().any(|&part| self.place(part) != ChunkUse::None) {
            return Ok(Some("a part of this block is in use"));
        }
        let mut heads: Vec<Result<ChunkHead>> = Vec::with_capacity(parts.len());
        self.lines().fetch_many(&parts, &mut heads)?;
        for head in heads {
            match head {
                Ok(head) if head.state == ChunkHead::INSIDE && head.run == first => {}
                Ok(_) => return Ok(Some("a part of this block says that it is something else")),
                Err(Error::BadLine { reason, .. }) => return Ok(Some(reason)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    fn late_frees(&self, chunk: u64, head: &ChunkHead) -> Result<Vec<u64>> {
        let mut late = self.take_waiting(chunk);
        let former = u64::from(head.slot);
        if former != u64::from(self.host.slot())
            && !mutant!("alloc.mail_of_the_dead_is_left")
            && former < u64::from(self.layout().geometry().slots)
        {
            for message in self.unacknowledged_messages(former)? {
                late.extend(message.offsets.into_iter().filter(|&offset| self.layout().chunk_of(offset) == Some(chunk)));
            }
        }
        Ok(late)
    }

    fn take_waiting(&self, chunk: u64) -> Vec<u64> {
        let mut waiting: Vec<u64> = self.local.pending().filter(|&offset| self.layout().chunk_of(offset) == Some(chunk)).collect();
        waiting.retain(|&offset| self.local.pull(offset));
        waiting
    }

    fn unacknowledged_messages(&self, receiver: u64) -> Result<Vec<FreeBox>> {
        let slots = u64::from(self.layout().geometry().slots);
        let (boxes, acks) = self.mail(receiver, slots)?;
        let pairs = boxes.into_iter().zip(acks);
        // A message that does not verify was never readable for its receiver either; its sender still has it.
        Ok(pairs.filter_map(|(message, ack)| message.ok().filter(|message| !is_acknowledged(message, ack.ok().as_ref()))).collect())
    }

    #[allow(clippy::type_complexity)]
    pub(super) fn mail(&self, receiver: u64, slots: u64) -> Result<(Vec<Result<FreeBox>>, Vec<Result<FreeAck>>)> {
        let indexes: Vec<u64> = (0..slots).map(|sender| sender * slots + receiver).collect();
        let mut boxes = Vec::with_capacity(indexes.len());
        self.lines().fetch_many(&indexes, &mut boxes)?;
        let indexes: Vec<u64> = (0..slots).map(|sender| receiver * slots + sender).collect();
        let mut acks = Vec::with_capacity(indexes.len());
        self.lines().fetch_many(&indexes, &mut acks)?;
        Ok((boxes, acks))
    }

    pub(super) fn follow(&self, guard: &LockGuard<'_>) -> Result<()> {
        let (slot, incarnation) = (self.host.slot(), guard.op().incarnation());
        if !self.local.is_attached(slot, incarnation) {
            self.claim_again(guard)?;
            self.take_mail_of_before(guard.op())?;
            point!("alloc.attached");
            self.local.set_attached(slot, incarnation);
        }
        if self.incarnation.load(Ordering::Acquire) != incarnation {
            // What a live host claims now is lost to this process. Only a false statement of this host's death leads here.
            for chunk in (0..self.layout().chunks()).filter(|&chunk| self.place(chunk) != ChunkUse::None) {
                if !self.is_claimed_here(chunk)? {
                    self.forget(chunk);
                    self.local.set_owner(chunk, 0);
                }
            }
            self.incarnation.store(incarnation, Ordering::Release);
        }
        Ok(())
    }

    /// Moves messages to earlier incarnations of this host to where [`Allocator::load`] finds them, and acknowledges them.
    fn take_mail_of_before(&self, op: &Op<'_>) -> Result<()> {
        let (slots, me) = (u64::from(self.layout().geometry().slots), u64::from(self.host.slot()));
        let (boxes, acks) = self.mail(me, slots)?;
        for (sender, (message, ack)) in boxes.into_iter().zip(acks).enumerate() {
            let Some(message) = self.to_be_taken(op, sender as u64, message, ack)? else { continue };
            let mut ours_to_free = Vec::new();
            for (index, offset) in message.offsets.into_iter().enumerate() {
                // Chunks that are not ours any more have been loaded by a process that has seen this message.
                let ours = match self.layout().chunk_of(offset) {
                    Some(chunk) => self.is_claimed_here(chunk)?,
                    None => false,
                };
                // After a mere re-join the processes keep their chunks: the frees of this message that they have made are not made again.
                if ours && self.local.begin_block(self.host.slot(), sender as u16, message.sequence, index) {
                    ours_to_free.push(offset);
                }
            }
            self.acknowledge(op, sender as u64, &message)?;
            // After the acknowledgement, as in a round of the boxes.
            self.local.set_told(sender as u16);
            ours_to_free.into_iter().for_each(|offset| self.accept_from_host(offset));
        }
        Ok(())
    }

    /// Takes over chunks of this host that no living process has: up to `count` chunks from where the last call ended.
    pub(super) fn sweep(&self, count: u64) -> Result<()> {
        let chunks = self.layout().chunks();
        let start = self.swept.load(Ordering::Relaxed) % chunks;
        let end = chunks.min(start + count);
        let mut orphans = Vec::new();
        let mut living = HashMap::new();
        let mut line_start = start;
        while line_start < end {
            let claimed = self.claimed_from(line_start)?.into_iter().filter(|&chunk| chunk < end);
            orphans.extend(claimed.filter(|&chunk| self.is_orphan(chunk, &mut living)));
            line_start = (line_start / CHUNKS_PER_CLAIM as u64 + 1) * CHUNKS_PER_CLAIM as u64;
        }
        if !orphans.is_empty() {
            // Blocks that a dead process freed for a message can be allocated once their chunk is loaded: the sender gets the
            // acknowledgement before.
            if self.local.is_untold() && !mutant!("alloc.orphan_is_loaded_untold") {
                return Ok(());
            }
            let guard = self.lock_chunks()?;
            // A process may have died between its claim and its fence check, so the check is made here.
            self.host.check_fences(guard.op())?;
            for chunk in orphans {
                // The lock may have taken long; and a run takes its later chunks along.
                if mutant!("alloc.sweeps_by_an_early_look") || (self.is_orphan(chunk, &mut living) && self.is_claimed_here(chunk)?) {
                    self.load(&guard, chunk)?;
                }
            }
        }
        self.swept.store(end % chunks, Ordering::Relaxed);
        Ok(())
    }

    /// Whether a chunk that this host claims is in no list.
    fn is_orphan(&self, chunk: u64, living: &mut HashMap<u32, bool>) -> bool {
        let forgotten = self.local.owner(chunk) == self.tag() && self.place(chunk) == ChunkUse::None;
        forgotten || !self.has_living_owner(chunk, living)
    }

    /// Whether a living process of this host has a chunk; `living` remembers who lives.
    pub(super) fn has_living_owner(&self, chunk: u64, living: &mut HashMap<u32, bool>) -> bool {
        let owner = self.local.owner(chunk);
        // What runs this lives: no need to ask the system, a hundred times a second.
        if owner == self.tag() {
            return true;
        }
        *living.entry(owner).or_insert_with(|| owner != 0 && self.host.inner.is_tag_alive(owner))
    }
}

pub(super) fn is_acknowledged(message: &FreeBox, ack: Option<&FreeAck>) -> bool {
    message.sequence == 0 || ack.is_some_and(|ack| (ack.sender, ack.sequence) == (message.incarnation, message.sequence))
}
