// SPDX-License-Identifier: Apache-2.0
//! The direction from the other end to this one: polls the slots that come next, and says now and then how far it is.

use super::lines::{RingSlot, SLOT_BYTES};
use super::link::Link;
use super::peer::{PeerStatus, PeerWatch};
use super::{deadline_ns, max_message_bytes, wait_until};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::Line;
use std::sync::Arc;

/// Most lines fetched together.
const WINDOW: usize = 16;
/// Polls in vain between two looks at the clock, as a power of two.
const POLLS: u32 = 8;

/// Receives messages, whole, once, in order.
pub struct Receiver {
    link: Arc<Link>,
    watch: PeerWatch,
    next: u64,
    place: u64,
    /// Lines that this end has acknowledged to the other.
    told: u64,
    /// Lines fetched together, of which those from `at` to `until` were not looked at yet.
    window: [Line; WINDOW],
    at: usize,
    until: usize,
    width: usize,
    /// Lines of the message received last: as many are expected next.
    usual: usize,
    message: Vec<u8>,
    missing_bytes: usize,
    in_message: bool,
    idle: u32,
    is_ended: bool,
}

impl Receiver {
    pub(super) fn new(link: Arc<Link>) -> Receiver {
        Receiver {
            link,
            watch: PeerWatch::default(),
            next: 0,
            place: 0,
            told: 0,
            window: [Line::ZERO; WINDOW],
            at: 0,
            until: 0,
            width: 1,
            usual: 1,
            message: Vec::new(),
            missing_bytes: 0,
            in_message: false,
            idle: 0,
            is_ended: false,
        }
    }

    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Lines have been fetched that were not looked at yet.
    pub(super) fn has_fetched(&self) -> bool {
        self.at < self.until
    }

    /// More can come.
    pub(super) fn is_open(&self) -> bool {
        !self.is_ended
    }

    /// Receives a message into `message`, whose former content is lost.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::PeerClosed`] once everything sent before a close in good order is received; [`Error::PeerGone`] when
    /// the last messages may be lost; [`Error::Protocol`].
    pub fn recv(&mut self, message: &mut Vec<u8>, timeout_ms: u64) -> Result<()> {
        if self.try_recv(message)? {
            return Ok(());
        }
        let link = self.link.clone();
        let platform = link.rings().platform();
        let got = wait_until(platform, deadline_ns(platform, timeout_ms), || Ok(self.try_recv(message)?.then_some(())))?;
        got.ok_or_else(|| Error::Timeout { what: format!("a message from {}", link.peer()), timeout_ms })
    }

    /// Receives a message if one has arrived. Errors as [`Receiver::recv`], except that nothing is waited for.
    pub fn try_recv(&mut self, message: &mut Vec<u8>) -> Result<bool> {
        loop {
            if self.is_ended {
                return Err(self.link.peer().closed_error());
            }
            match self.next_slot()? {
                None if self.is_due() => return self.look(),
                None => return Ok(false),
                Some(slot) if self.take(&slot)? => {
                    std::mem::swap(message, &mut self.message);
                    return Ok(true);
                }
                Some(_) => {}
            }
        }
    }

    /// The next line, if it is there.
    fn next_slot(&mut self) -> Result<Option<RingSlot>> {
        if self.at == self.until {
            self.fetch()?;
        }
        let Some(slot) = self.open(&self.window[self.at]) else {
            // The lines fetched together with it are as old: they are fetched again.
            if self.at == 0 {
                self.width = self.usual;
            }
            (self.at, self.until) = (0, 0);
            return Ok(None);
        };
        self.at += 1;
        if self.at == self.until {
            // All of them were there: more may be.
            self.width = (self.width * 2).min(WINDOW);
        }
        Ok(Some(slot))
    }

    fn fetch(&mut self) -> Result<()> {
        let half = *self.link.other();
        let count = self.width.min(half.slots() as usize);
        let place = self.place;
        let offsets = (0..count as u64).map(|ahead| {
            let place = place + ahead;
            half.slot_at(if place >= half.slots() { place - half.slots() } else { place })
        });
        self.link.lines().fetch_raw_many(offsets, &mut self.window[..count])?;
        (self.at, self.until) = (0, count);
        Ok(())
    }

    /// Reads a line as the next one, if it is that.
    fn open(&self, line: &Line) -> Option<RingSlot> {
        let half = self.link.other();
        if mutant!("ring.no_sequence") {
            let number = self.sequence_of(line);
            return self.link.lines().open_in(half.seal, number, line).ok();
        }
        let slot: RingSlot = self.link.lines().open_in(half.seal, self.next, line).ok()?;
        (slot.sequence == self.next as u32 && slot.connection == half.connection).then_some(slot)
    }

    /// The number that a line claims to have, for the test that does not check it.
    fn sequence_of(&self, line: &Line) -> u64 {
        let words: [u64; 8] = bytemuck::cast(*line);
        words[0] >> 32
    }

    /// Takes a line; true when it completes a message.
    fn take(&mut self, slot: &RingSlot) -> Result<bool> {
        if slot.kind == RingSlot::END {
            self.is_ended = true;
            self.advance()?;
            self.tell()?;
            return if self.in_message { Err(self.link.broken("it ended inside a message")) } else { Ok(false) };
        }
        let rest_bytes = usize::from(slot.rest_bytes);
        if slot.kind == RingSlot::FIRST {
            if self.in_message {
                return Err(self.link.broken("a message began inside another"));
            }
            if rest_bytes as u64 > max_message_bytes(self.link.other().slots()) {
                return Err(self.link.broken("a message longer than its ring allows"));
            }
            self.message.clear();
            self.usual = rest_bytes.div_ceil(SLOT_BYTES).clamp(1, WINDOW / 4);
        } else if !self.in_message || rest_bytes != self.missing_bytes {
            return Err(self.link.broken("the lines of a message do not belong together"));
        }
        let piece = rest_bytes.min(SLOT_BYTES);
        self.message.extend_from_slice(&slot.payload[..piece]);
        self.missing_bytes = rest_bytes - piece;
        self.in_message = self.missing_bytes > 0;
        self.advance()?;
        Ok(!self.in_message)
    }

    fn advance(&mut self) -> Result<()> {
        self.next += 1;
        self.place += 1;
        if self.place == self.link.other().slots() {
            self.place = 0;
        }
        self.idle = 0;
        // The other end waits for room only when the ring is nearly full, so a quarter of it at a time is soon enough.
        if self.next - self.told >= self.link.other().slots().div_ceil(4) {
            self.tell()?;
            self.watch.note_life();
            self.link.rings().tick()?;
        }
        Ok(())
    }

    /// Says how far this end is. The received lines are copied out of the ring by now.
    fn tell(&mut self) -> Result<()> {
        point!("ring.read");
        let ahead = if mutant!("ring.told_before_read") { (self.until - self.at) as u64 + self.link.other().slots() / 4 } else { 0 };
        self.link.own().publish_progress(self.link.lines(), self.next + ahead)?;
        point!("ring.told");
        self.told = self.next;
        Ok(())
    }

    /// Whether it is time to think of the clock and the other end's life.
    fn is_due(&mut self) -> bool {
        self.idle = self.idle.wrapping_add(1);
        self.idle.is_multiple_of(POLLS)
    }

    /// Nothing came for a while.
    fn look(&mut self) -> Result<bool> {
        if self.idle == POLLS {
            // Since the last look something came.
            self.watch.note_life();
        }
        point!("ring.looking");
        match self.watch.look(self.link.rings(), self.link.peer(), Some(self.link.other()))? {
            PeerStatus::Open => Ok(false),
            // Lines that were published before the other end closed are found by the next poll, if their memory still holds them.
            PeerStatus::Closed(end) if end == self.next && !self.in_message => Err(self.link.peer().closed_error()),
            PeerStatus::Closed(_) if !mutant!("ring.closed_means_empty") && self.next_slot_is_there()? => Ok(false),
            PeerStatus::Closed(_) if mutant!("ring.lost_is_closed") => Err(self.link.peer().closed_error()),
            PeerStatus::Closed(_) => Err(self.link.peer().gone_error("it closed before everything was received")),
        }
    }

    fn next_slot_is_there(&mut self) -> Result<bool> {
        self.fetch()?;
        let is_there = self.open(&self.window[0]).is_some();
        (self.at, self.until) = (0, 0);
        Ok(is_there)
    }
}
