// SPDX-License-Identifier: Apache-2.0
//! Freeing blocks of chunks that another process or host owns.
//!
//! Within the host such a block goes through the local area. To another host it goes in FREEBOX\[me\]\[owner\], up to
//! [`BLOCKS_PER_FREE_BOX`] at a time, and the next message waits for FREEACK\[owner\]\[me\]. One process of a host at a time works with its
//! boxes. Nothing is freed twice: a block leaves the local area before it is freed or sent, and each block of a message is ticked off
//! before it is freed. So a process that dies between the two loses that free, and the block stays kept until it is freed again.
//!
//! A receiver that died with a message not acknowledged: the process that loads its chunks applies the message first (`load`), so the
//! sender only waits until that has happened. Therefore no process gets a block of a message before the acknowledgement has arrived: it
//! might keep the block, and a replay of the message would free it. A block of this process is free in the pool before the acknowledgement,
//! and allocated only after it; other processes get their frees after it.

use super::claims::{ClaimRow, DeathJudge};
use super::freeing::Begun;
use super::load::is_acknowledged;
use super::{Allocator, ChunkUse, local};
use crate::background::held;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::host::local_mutex::Asker;
use crate::limits::MAX_NUMBER;
use crate::line::if_whole;
use crate::media::{BLOCKS_PER_FREE_BOX, CHUNKS_PER_CLAIM, ChunkHead, FreeAck, FreeBox};
use std::collections::BTreeMap;

/// Numbers that are skipped after the last message that was taken, where the numbers of later ones cannot be read.
pub(crate) const LOST_NUMBERS: u32 = 16;

struct Parcel {
    receiver: u32,
    offsets: Vec<u64>,
}

impl Allocator {
    /// Hands a block to the owner of its chunk; false when it is on its way there already.
    pub(super) fn free_elsewhere(&self, offset: u64) -> bool {
        if self.local.pending().any(|pending| pending == offset) {
            return false;
        }
        if !self.local.push(offset, local::FROM_CALLERS) {
            held(&self.backlog).push(offset);
        }
        true
    }

    /// Hands a block that another host wants freed to the process of this host that has its chunk.
    pub(super) fn accept_from_host(&self, offset: u64) {
        if !self.local.push(offset, local::FROM_HOSTS) {
            held(&self.backlog).push(offset);
        }
    }

    /// One round: own blocks out of the local area, then the host's boxes unless another process is at it.
    pub(super) fn post(&self) -> Result<()> {
        let mut backlog = std::mem::take(&mut *held(&self.backlog));
        backlog.retain(|&offset| !self.local.push(offset, local::FROM_CALLERS));
        held(&self.backlog).append(&mut backlog);
        self.take_pending()?;
        let op = self.work()?;
        let inner = &self.host.inner;
        let is_alive = |tag| inner.is_tag_alive(tag);
        let asker = Asker { tag: inner.tag, platform: &*inner.platform, is_alive: &is_alive };
        if self.local.post().try_lock_or_inherit(&asker).is_none() {
            return Ok(());
        }
        let result = self.receive(&op).and_then(|()| self.send(&op));
        self.local.post().unlock(&*inner.platform);
        result
    }

    /// Frees those waiting blocks that lie in this process's chunks.
    fn take_pending(&self) -> Result<()> {
        let waiting: Vec<u64> = self.local.pending().collect();
        for offset in waiting {
            let Some(chunk) = self.layout().chunk_of(offset) else {
                // No process of this build puts such a thing there; it must not take up the place for ever.
                if self.local.pull(offset) {
                    self.local.count_rejected(1);
                }
                continue;
            };
            if self.place(chunk) != ChunkUse::None && self.local.pull(offset) {
                self.count_refusal(offset, self.free_here(chunk, offset))?;
            }
        }
        Ok(())
    }

    /// What became of a free of a block of this process that another process asked for; a wrong request only counts.
    fn count_refusal(&self, offset: u64, freed: Result<bool>) -> Result<()> {
        match freed {
            Ok(true) => Ok(()),
            Ok(false) | Err(Error::NotFound(_)) => {
                self.local.count_rejected(1);
                Ok(())
            }
            Err(error) => {
                // Fenced for now: it waits for the next round.
                held(&self.backlog).push(offset);
                Err(error)
            }
        }
    }

    fn receive(&self, op: &Op<'_>) -> Result<()> {
        let (slots, me) = (u64::from(self.layout().geometry().slots), u64::from(self.host.slot()));
        let (boxes, acks) = self.mail(me, slots)?;
        for (sender, (message, ack)) in boxes.into_iter().zip(acks).enumerate() {
            let Some(message) = self.to_be_taken(op, sender as u64, message, ack)? else {
                self.sender_knows(sender as u16);
                continue;
            };
            point!("alloc.box_seen");
            let Some(of_others) = self.work_off(sender as u16, &message)? else { continue };
            point!("alloc.box_taken");
            self.acknowledge(op, sender as u64, &message)?;
            point!("alloc.box_acknowledged");
            self.sender_knows(sender as u16);
            of_others.into_iter().for_each(|offset| self.accept_from_host(offset));
        }
        Ok(())
    }

    /// Gives blocks that were freed for a host free to be allocated: it has no message here that is not acknowledged.
    fn sender_knows(&self, sender: u16) {
        self.local.set_told(sender);
        let told: Vec<(u16, Begun)> = held(&self.untold).extract_if(.., |(of, _)| *of == sender).collect();
        told.into_iter().for_each(|(_, begun)| self.finish_free(begun));
    }

    /// A message to this host, unless by what this host says in `ack` it was taken.
    ///
    /// It rewrites a line of its own that does not verify, as if it had taken the message. That is right where its writer stopped in the
    /// middle, because the writer frees before it writes the line. Where the line was damaged otherwise, blocks of the message may stay
    /// kept that were to be freed; freed a second time, they might be another process's by now.
    pub(super) fn to_be_taken(&self, op: &Op<'_>, sender: u64, message: Result<FreeBox>, ack: Result<FreeAck>) -> Result<Option<FreeBox>> {
        // The sender of an unreadable message is writing it, or sends it again.
        let message = message.ok();
        let Some(ack) = if_whole(ack)? else {
            self.acknowledge(op, sender, &message.unwrap_or_default())?;
            return Ok(None);
        };
        Ok(message.filter(|message| !is_acknowledged(message, Some(&ack))))
    }

    /// Frees the blocks of a message that are this process's, so that no caller gets them yet, and returns those of others of this host;
    /// `None` when there is no room for those yet.
    fn work_off(&self, sender: u16, message: &FreeBox) -> Result<Option<Vec<u64>>> {
        let own_slot = self.host.slot();
        let begin = |index| self.local.begin_block(own_slot, sender, message.sequence, index);
        let begun = self.local.begun_blocks(own_slot, sender, message.sequence);
        let (mut ours, mut of_others, mut of_no_process) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &offset) in message.offsets.iter().enumerate().filter(|(index, offset)| **offset != 0 && begun >> index & 1 == 0) {
            match self.layout().chunk_of(offset) {
                Some(chunk) if self.place(chunk) != ChunkUse::None => ours.push((index, chunk, offset)),
                Some(chunk) if self.is_claimed_here(chunk)? => of_others.push(offset),
                _ => of_no_process.push(index),
            }
        }
        // One that was begun is ended: chunks of dead processes are not looked after before, and they may be what takes up the room.
        if begun == 0 && self.local.room(local::FROM_HOSTS) < of_others.len() {
            return Ok(None);
        }
        self.local.count_rejected(of_no_process.into_iter().filter(|&index| begin(index)).count() as u64);
        for (index, chunk, offset) in ours {
            if begin(index) {
                let untold = |begun| match mutant!("alloc.free_is_had_untold") {
                    true => self.finish_free(begun),
                    false => held(&self.untold).push((sender, begun)),
                };
                self.count_refusal(offset, self.begin_free(chunk, offset, untold))?;
            }
        }
        if mutant!("alloc.free_is_passed_on_untold") {
            of_others.drain(..).for_each(|offset| self.accept_from_host(offset));
        }
        Ok(Some(of_others))
    }

    /// Publishes FREEACK\[me\]\[sender\]. Arrived, not only ordered, when this returns: others of this machine may keep the blocks then.
    pub(super) fn acknowledge(&self, op: &Op<'_>, sender: u64, message: &FreeBox) -> Result<()> {
        let slots = u64::from(self.layout().geometry().slots);
        let ack = FreeAck { incarnation: op.incarnation(), sender: message.incarnation, sequence: message.sequence, ..FreeAck::default() };
        self.lines().publish(u64::from(self.host.slot()) * slots + sender, ack)?;
        self.lines().memory().fence_all();
        Ok(())
    }

    fn send(&self, op: &Op<'_>) -> Result<()> {
        let mut judge = DeathJudge::new(self);
        for (receiver, parcel) in self.pack(&mut judge)? {
            let slots = u64::from(self.layout().geometry().slots);
            let index = u64::from(self.host.slot()) * slots + u64::from(receiver);
            let Some(last) = self.last_taken(receiver, index, &mut judge)? else { continue };
            if last >= MAX_NUMBER {
                return Err(Error::Full { what: "the numbers of a free box", limit: MAX_NUMBER.into(), advice: "format the pool again" });
            }
            let mut message =
                FreeBox { incarnation: op.incarnation(), receiver: parcel.receiver, sequence: last + 1, ..FreeBox::default() };
            let pulled = parcel.offsets.into_iter().filter(|&offset| self.local.pull(offset));
            message.offsets.iter_mut().zip(pulled).for_each(|(place, offset)| *place = offset);
            point!("alloc.box_packed");
            self.lines().publish(index, message)?;
            point!("alloc.box_sent");
        }
        Ok(())
    }

    /// The number of the last message to `receiver`, in line `index`; `None` while that has to stay there.
    fn last_taken(&self, receiver: u16, index: u64, judge: &mut DeathJudge<'_>) -> Result<Option<u32>> {
        let slots = u64::from(self.layout().geometry().slots);
        // Only this host writes the line, so what it says of the last message is true.
        let last = if_whole(self.lines().fetch::<FreeBox>(index))?;
        let ack = self.lines().fetch::<FreeAck>(u64::from(receiver) * slots + u64::from(self.host.slot())).ok();
        match last {
            Some(last) if is_acknowledged(&last, ack.as_ref()) || self.is_inherited(receiver, &last, judge)? => Ok(Some(last.sequence)),
            Some(last) if mutant!("alloc.box_written_over") => Ok(Some(last.sequence)),
            Some(_) => Ok(None),
            // Its blocks may be lost, and stay kept. Its number was that of the last one that was taken, or one of the next.
            None => Ok(ack.map(|ack| ack.sequence.saturating_add(LOST_NUMBERS))),
        }
    }

    /// Sorts waiting blocks of other hosts' chunks by who has the chunk now. Those of chunks that only dead hosts claim keep waiting.
    fn pack(&self, judge: &mut DeathJudge<'_>) -> Result<BTreeMap<u16, Parcel>> {
        let mut rows: BTreeMap<u64, ClaimRow> = BTreeMap::new();
        let mut parcels: BTreeMap<u16, Parcel> = BTreeMap::new();
        let waiting: Vec<u64> = self.local.pending().collect();
        for offset in waiting {
            let Some(chunk) = self.layout().chunk_of(offset) else { continue };
            let line = chunk / CHUNKS_PER_CLAIM as u64;
            if let std::collections::btree_map::Entry::Vacant(entry) = rows.entry(line) {
                entry.insert(self.fetch_row(line)?);
            }
            match self.live_claimant(&rows[&line], chunk, judge)? {
                (Some((slot, _)), _) if slot == self.host.slot() => {}
                (Some((slot, receiver)), _) => {
                    let parcel = parcels.entry(slot).or_insert(Parcel { receiver, offsets: Vec::new() });
                    if parcel.offsets.len() < BLOCKS_PER_FREE_BOX {
                        parcel.offsets.push(offset);
                    }
                }
                (None, true) => {}
                (None, false) => {
                    if self.local.pull(offset) {
                        self.local.count_rejected(1);
                    }
                }
            }
        }
        Ok(parcels)
    }

    /// Whether the receiver of a message died before it acknowledged it, and every chunk in it has been loaded by its next owner since.
    fn is_inherited(&self, receiver: u16, message: &FreeBox, judge: &mut DeathJudge<'_>) -> Result<bool> {
        if !judge.is_proven_dead(receiver, message.receiver)? {
            return Ok(false);
        }
        for chunk in message.offsets.iter().filter_map(|&offset| self.layout().chunk_of(offset)) {
            // One that does not verify is not loaded yet.
            let Some(head) = if_whole(self.lines().fetch::<ChunkHead>(chunk))? else { return Ok(false) };
            if head.slot == u32::from(receiver) && head.incarnation <= message.receiver && head.state != ChunkHead::UNCUT {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
