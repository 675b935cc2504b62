// SPDX-License-Identifier: Apache-2.0
//! The direction from this end to the other: writes slots, and reads how far the other end is when it thinks that the ring is full.

use super::lines::{RingSlot, SLOT_BYTES};
use super::link::Link;
use super::peer::{PeerStatus, PeerWatch};
use super::{Probe, deadline_ns, max_message_bytes, wait_until};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use std::sync::Arc;

/// Sends messages. They arrive whole, once, in order.
pub struct Sender {
    link: Arc<Link>,
    watch: PeerWatch,
    next: u64,
    place: u64,
    /// Lines that the other end had read when last looked at.
    read: u64,
    /// Lines were written that no fence orders yet.
    is_unfenced: bool,
    /// The line that says that nothing follows was sent.
    is_ended: bool,
    staging: Vec<u8>,
}

impl Sender {
    pub(super) fn new(link: Arc<Link>) -> Sender {
        let staging = Vec::with_capacity(4 * SLOT_BYTES);
        Sender { link, watch: PeerWatch::default(), next: 0, place: 0, read: 0, is_unfenced: false, is_ended: false, staging }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Looks whether the other end is alive.
    pub fn probe(&self) -> Probe {
        Probe::new(Arc::downgrade(&self.link))
    }

    /// Longest message, in bytes.
    pub fn max_message_bytes(&self) -> u64 {
        max_message_bytes(self.link.own().slots())
    }

    /// Sends a message, waiting for room.
    ///
    /// # Errors
    /// Those of [`Sender::push`], but [`Error::Timeout`] instead of [`Error::Full`].
    pub fn send(&mut self, message: &[u8], timeout_ms: u64) -> Result<()> {
        if !self.try_push(&[message])? {
            let link = self.link.clone();
            let platform = link.rings().platform();
            let sent = wait_until(platform, deadline_ns(platform, timeout_ms), || Ok(self.try_push(&[message])?.then_some(())))?;
            sent.ok_or_else(|| Error::Timeout { what: format!("room in the ring to {}", link.peer()), timeout_ms })?;
        }
        self.flush();
        Ok(())
    }

    /// Writes a message, given in parts, without a fence: [`Sender::flush`] ends a group of them, on the same thread.
    ///
    /// # Errors
    /// [`Error::Full`] when the ring has no room, and nothing is written; [`Error::TooLarge`]; [`Error::PeerClosed`] and
    /// [`Error::PeerGone`], which are noticed at times only: that a message was sent does not say that the peer receives it.
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<()> {
        if self.try_push(parts)? {
            return Ok(());
        }
        Err(Error::Full {
            what: "the ring of a connection",
            limit: self.link.own().slots(),
            advice: "wait until the other end has received",
        })
    }

    /// [`Sender::push`]; false when the ring has no room.
    pub fn try_push(&mut self, parts: &[&[u8]]) -> Result<bool> {
        let len_bytes: usize = parts.iter().map(|part| part.len()).sum();
        let max_bytes = self.max_message_bytes();
        if len_bytes as u64 > max_bytes {
            return Err(Error::TooLarge { len_bytes: len_bytes as u64, max_bytes });
        }
        if self.is_ended {
            return Err(Error::Closed);
        }
        let lines = len_bytes.div_ceil(SLOT_BYTES).max(1) as u64;
        if !self.has_room(lines)? {
            return Ok(false);
        }
        self.staging.clear();
        parts.iter().for_each(|part| self.staging.extend_from_slice(part));
        // The first line last: who finds it finds the rest of the message, more often than not.
        for line in (0..lines).rev() {
            let begin = line as usize * SLOT_BYTES;
            let piece = self.staging.get(begin..len_bytes.min(begin + SLOT_BYTES)).unwrap_or_default();
            let kind = if line == 0 { RingSlot::FIRST } else { RingSlot::MORE };
            self.write(line, kind, (len_bytes - begin) as u16, piece)?;
            point!("ring.slot");
        }
        self.advance(lines);
        Ok(true)
    }

    /// Writes the line that comes `ahead` lines after the next one.
    fn write(&self, ahead: u64, kind: u16, rest_bytes: u16, piece: &[u8]) -> Result<()> {
        let half = self.link.own();
        let place = self.place + ahead;
        let place = if place >= half.slots() { place - half.slots() } else { place };
        let number = self.next + ahead;
        let mut payload = [0; SLOT_BYTES];
        payload[..piece.len()].copy_from_slice(piece);
        let slot = RingSlot { crc: 0, sequence: number as u32, connection: half.connection, rest_bytes, kind, payload };
        self.link.lines().write_in(half.seal, number, half.slot_at(place), slot)
    }

    fn advance(&mut self, lines: u64) {
        let slots = self.link.own().slots();
        self.next += lines;
        self.place = (self.place + lines) % slots;
        self.is_unfenced = true;
        self.link.set_sent(self.next);
    }

    /// Makes everything pushed so far visible to the other end.
    pub fn flush(&mut self) {
        if self.is_unfenced {
            self.link.lines().fence_published();
            self.is_unfenced = false;
        }
    }

    /// Whether so many lines fit; reads the other end's progress only when it seems that they do not.
    fn has_room(&mut self, lines: u64) -> Result<bool> {
        let slots = self.link.own().slots();
        if self.next + lines - self.read <= slots || mutant!("ring.no_full_check") {
            return Ok(true);
        }
        // An end that waits for the other must not have withheld what that one waits for.
        self.flush();
        self.look_at_progress()?;
        if self.next + lines - self.read <= slots {
            return Ok(true);
        }
        match self.watch.look(self.link.rings(), self.link.peer(), Some(self.link.other()))? {
            PeerStatus::Open => Ok(false),
            PeerStatus::Closed(_) => Err(self.link.peer().closed_error()),
        }
    }

    fn look_at_progress(&mut self) -> Result<()> {
        let Some(read) = self.link.other().progress(self.link.lines())? else { return Ok(()) };
        if read > self.next || read < self.read {
            return Err(self.link.broken("it says that it received what was not sent, or forgets what it received"));
        }
        if read != self.read {
            self.read = read;
            self.watch.note_life();
        }
        Ok(())
    }

    /// Continues closing in good order; true once the other end has received everything, the line that says so included.
    pub(super) fn finish(&mut self) -> Result<bool> {
        if !self.is_ended {
            if !self.has_room(1)? {
                return Ok(false);
            }
            self.write(0, RingSlot::END, 0, &[])?;
            self.advance(1);
            self.is_ended = true;
            self.flush();
        }
        point!("ring.ended");
        self.look_at_progress()?;
        if self.read == self.next || mutant!("ring.ended_is_received") {
            return Ok(true);
        }
        match self.watch.look(self.link.rings(), self.link.peer(), Some(self.link.other()))? {
            PeerStatus::Open => Ok(false),
            // It may have received everything before it closed, or not.
            PeerStatus::Closed(_) => {
                self.look_at_progress()?;
                if self.read == self.next || mutant!("ring.closed_is_received") {
                    Ok(true)
                } else {
                    Err(self.link.peer().gone_error("it closed before it received everything"))
                }
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // Before any thread frees the memory that these lines are written to, on whatever thread.
        if !mutant!("ring.drop_unfenced") {
            self.flush();
        }
    }
}
