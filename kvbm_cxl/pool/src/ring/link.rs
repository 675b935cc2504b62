// SPDX-License-Identifier: Apache-2.0
//! The memory of a connection: two halves, each in a block of its owner.

use super::lines::{Control, HEAD_LINES, Progress};
use super::peer::Peer;
use super::{Connection, Receiver, Rings, Sender, check_place, slots_of};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::limits::LINE_BYTES;
use crate::line::{Lines, Seal};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// First of the numbers that make the seals of halves.
const SEAL: u64 = 0x6861;
/// Index of the two lines before the slots in their seals.
const HEAD: u64 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Who asked for the connection.
    Connector,
    /// Who accepted it.
    Listener,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Connector => Side::Listener,
            Side::Listener => Side::Connector,
        }
    }
}

/// Where a half lies and how its lines are sealed.
#[derive(Clone, Copy, Debug)]
pub struct Half {
    offset: u64,
    slots: u64,
    /// Seal of every line of the half.
    pub seal: Seal,
    /// Low half of the connection's nonce, as in every slot.
    pub connection: u32,
}

impl Half {
    fn new(lines: &Lines, nonce: u64, side: Side, offset: u64, slots: u64) -> Half {
        // Without the nonce a line of a former connection in the same memory verifies.
        let nonce = if mutant!("ring.no_nonce") { 0 } else { nonce };
        let seal = lines.seal_of(&[SEAL, nonce, if side == Side::Connector { 0 } else { 1 }]);
        Half { offset, slots, seal, connection: nonce as u32 }
    }

    pub fn slots(&self) -> u64 {
        self.slots
    }

    pub fn slot_at(&self, slot: u64) -> u64 {
        self.offset + (HEAD_LINES + slot) * LINE_BYTES as u64
    }

    pub fn progress_at(&self) -> u64 {
        self.offset + LINE_BYTES as u64
    }

    /// What its first line says, if it verifies.
    pub fn control(&self, lines: &Lines) -> Result<Option<Control>> {
        Ok(lines.fetch_in(self.seal, HEAD, self.offset)?.ok())
    }

    /// How far its owner has read, if the line verifies.
    pub fn progress(&self, lines: &Lines) -> Result<Option<u64>> {
        let line = lines.fetch_in(self.seal, HEAD, self.progress_at())?.ok();
        Ok(line.map(|line: Progress| line.read))
    }

    pub fn publish_progress(&self, lines: &Lines, read: u64) -> Result<()> {
        lines.publish_in(self.seal, HEAD, self.progress_at(), Progress { read, ..Progress::default() })
    }
}

/// A half of this process; dropping it closes and frees it.
pub struct Own {
    rings: Rings,
    nonce: u64,
    half: Half,
    sent: AtomicU64,
}

impl Own {
    /// Allocates a half and publishes its first lines. Waits for a chunk no longer than `timeout_ms`, or than the allocator does.
    pub fn make(rings: &Rings, nonce: u64, side: Side, timeout_ms: Option<u64>) -> Result<Own> {
        let shared = &rings.shared;
        let slots = slots_of(shared.config.ring_bytes)?;
        let len_bytes = (HEAD_LINES + slots) * LINE_BYTES as u64;
        let block = match timeout_ms {
            Some(timeout_ms) => shared.allocator.alloc_within(len_bytes, timeout_ms)?,
            None => shared.allocator.alloc(len_bytes)?,
        };
        let half = Half::new(rings.lines(), nonce, side, block.offset, slots);
        let own = Own { rings: rings.clone(), nonce, half, sent: AtomicU64::new(0) };
        point!("ring.half");
        half.publish_progress(rings.lines(), 0)?;
        own.publish_control(Control::OPEN)?;
        Ok(own)
    }

    /// Where it lies.
    pub fn offset(&self) -> u64 {
        self.half.offset
    }

    pub fn slots(&self) -> u64 {
        self.half.slots
    }

    fn publish_control(&self, state: u32) -> Result<()> {
        let end = self.sent.load(Ordering::Acquire);
        let control = Control { state, nonce: self.nonce, slots: self.half.slots, end, ..Control::default() };
        if mutant!("ring.free_unfenced") {
            return self.rings.lines().write_in(self.half.seal, HEAD, self.half.offset, control);
        }
        self.rings.lines().publish_in(self.half.seal, HEAD, self.half.offset, control)
    }

    /// Makes a connection of this half and that of the other end, which lies where `offset` and `slots` say.
    ///
    /// # Errors
    /// The reason why there can be no such half.
    pub fn join(self, side: Side, offset: u64, slots: u64, peer: Peer) -> Result<std::result::Result<Connection, &'static str>> {
        let lines = self.rings.lines();
        if !super::SLOTS.contains(&slots) {
            return Ok(Err("a ring of fewer or more slots than a ring may have"));
        }
        if let Err(reason) = check_place(lines.layout(), offset, HEAD_LINES + slots) {
            return Ok(Err(reason));
        }
        let other = Half::new(lines, self.nonce, side.other(), offset, slots);
        match other.control(lines)? {
            Some(control) if control.nonce == self.nonce && control.slots == slots && control.state == Control::OPEN => {}
            _ => return Ok(Err("its half is not there (any more)")),
        }
        let link = Arc::new(Link { own: self, other, peer });
        Ok(Ok(Connection { sender: Sender::new(link.clone()), receiver: Receiver::new(link) }))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // Tells the other end, and orders every line of ours before whatever the next owner of the memory writes. An error of the memory is
        // one that the next call meets as well.
        let _ = self.publish_control(Control::CLOSED);
        point!("ring.closed");
        // Scratch blocks are only known to this process: an error can only be a bug, which the allocator counts.
        let _ = self.rings.shared.allocator.free(self.half.offset);
    }
}

pub struct Link {
    own: Own,
    other: Half,
    peer: Peer,
}

impl Link {
    pub fn rings(&self) -> &Rings {
        &self.own.rings
    }

    pub fn lines(&self) -> &Lines {
        self.own.rings.lines()
    }

    pub fn own(&self) -> &Half {
        &self.own.half
    }

    pub fn other(&self) -> &Half {
        &self.other
    }

    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    pub fn set_sent(&self, sent: u64) {
        self.own.sent.store(sent, Ordering::Release);
    }

    /// The other end did what cannot be.
    pub fn broken(&self, reason: &'static str) -> Error {
        Error::Protocol { peer: self.peer.to_string(), reason }
    }
}
