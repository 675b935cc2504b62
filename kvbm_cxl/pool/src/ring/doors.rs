// SPDX-License-Identifier: Apache-2.0
//! The doors: one block in a pool with a line for each process that can be joined to it.
//!
//! It is the one block of the rings that is written by many, each its own lines, so no process may ever free it: a process that was stopped
//! in the middle of a write may resume at any time. It is kept, bound to a name, and used again by all later processes.

use super::lines::{Bell, Door, DoorsHead};
use crate::alloc::Allocator;
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::Host;
use crate::limits::{LINE_BYTES, MAX_PROCESSES};
use crate::line::{Lines, Seal};
use crate::objects::{Object, Objects};

/// The name that the doors are bound to.
pub const NAME: &[u8] = b"cxl.ring.doors";
/// First of the numbers that make the seals of doors.
const SEAL: u64 = 0x6472;
/// How often another process's doors may be destroyed right after they were made.
const ATTEMPTS: usize = 8;

/// Where the doors of a pool lie.
#[derive(Clone, Copy, Debug)]
pub struct Doors {
    offset: u64,
    slots: u64,
    /// Tells these doors from others that a pool may have had.
    pub nonce: u64,
    seal: Seal,
}

fn lines_of(slots: u64) -> u64 {
    1 + slots + slots * MAX_PROCESSES as u64
}

impl Doors {
    /// The doors of the pool, made if there are none.
    pub fn find_or_make(host: &Host, allocator: &Allocator, objects: &Objects, timeout_ms: u64) -> Result<Doors> {
        for _ in 0..ATTEMPTS {
            match objects.get(NAME, timeout_ms) {
                Ok(found) => return Doors::open(host, &found),
                Err(Error::NotFound(_)) => Doors::make(host, allocator, objects, timeout_ms)?,
                Err(error) => return Err(error),
            }
        }
        Err(Error::NotFound("the doors just made: something keeps destroying cxl.ring.doors; they".into()))
    }

    fn open(host: &Host, found: &Object) -> Result<Doors> {
        let (lines, slots) = (host.lines(), u64::from(host.lines().layout().geometry().slots));
        let damaged =
            |reason| Error::Invalid(format!("object cxl.ring.doors is not usable ({reason}): stop all users of rings and destroy it"));
        super::check_place(lines.layout(), found.offset, lines_of(slots)).map_err(damaged)?;
        let head: DoorsHead = lines.fetch_in(lines.seal_of(&[SEAL]), 0, found.offset)?.map_err(damaged)?;
        if head.version != DoorsHead::VERSION || u64::from(head.slots) != slots || head.processes as usize != MAX_PROCESSES {
            return Err(damaged("made by another version of this program"));
        }
        Ok(Doors { offset: found.offset, slots, nonce: head.nonce, seal: lines.seal_of(&[SEAL, head.nonce]) })
    }

    fn make(host: &Host, allocator: &Allocator, objects: &Objects, timeout_ms: u64) -> Result<()> {
        let slots = u64::from(host.lines().layout().geometry().slots);
        let len_bytes = lines_of(slots) * LINE_BYTES as u64;
        let block = allocator.alloc(len_bytes)?;
        let lines = host.lines();
        let head = DoorsHead {
            version: DoorsHead::VERSION,
            nonce: host.platform().random(),
            slots: slots as u32,
            processes: MAX_PROCESSES as u32,
            ..DoorsHead::default()
        };
        let bound =
            lines.publish_in(lines.seal_of(&[SEAL]), 0, block.offset, head).and_then(|()| allocator.keep(block.offset)).and_then(|()| {
                point!("ring.doors_kept");
                objects.put(NAME, block.offset, len_bytes, timeout_ms)
            });
        let Err(error) = bound else { return Ok(()) };
        // Another process was faster, or the outcome is unknown. Freed only if it is certain that no process finds this block.
        let is_ours = match objects.get(NAME, timeout_ms) {
            Ok(found) => found.offset == block.offset,
            Err(Error::NotFound(_)) => false,
            Err(_) => return Err(error),
        };
        if is_ours {
            return Ok(());
        }
        // Should this fail as well, one block leaks that has no name.
        let _ = allocator.free(block.offset);
        match error {
            Error::Exists(_) => Ok(()),
            other => Err(other),
        }
    }

    pub fn slots(&self) -> u64 {
        self.slots
    }

    pub fn number(&self, slot: u16, process: usize) -> Result<u64> {
        if u64::from(slot) >= self.slots || process >= MAX_PROCESSES {
            return Err(Error::Invalid(format!("process {process} of host slot {slot} has no door")));
        }
        Ok(u64::from(slot) * MAX_PROCESSES as u64 + process as u64)
    }

    pub fn slot_of(number: u64) -> u64 {
        number / MAX_PROCESSES as u64
    }

    /// All of them.
    pub fn count(&self) -> u64 {
        self.slots * MAX_PROCESSES as u64
    }

    /// Place of a door's line in the block.
    fn place(&self, number: u64) -> u64 {
        1 + self.slots + number
    }

    fn at(&self, place: u64) -> u64 {
        self.offset + place * LINE_BYTES as u64
    }

    pub fn door_at(&self, number: u64) -> u64 {
        self.at(self.place(number))
    }

    pub fn bell_at(&self, slot: u64) -> u64 {
        self.at(1 + slot)
    }

    /// Publishes a door. The caller is its process and has entered an operation of its host.
    pub fn write(&self, lines: &Lines, number: u64, door: Door) -> Result<()> {
        lines.publish_in(self.seal, self.place(number), self.door_at(number), door)
    }

    /// What a door's line says, if it verifies.
    pub fn read(&self, lines: &Lines, number: u64) -> Result<Option<Door>> {
        Ok(lines.fetch_in(self.seal, self.place(number), self.door_at(number))?.ok())
    }

    /// What the bytes of a door say, if they verify.
    pub fn open_door(&self, lines: &Lines, number: u64, line: &crate::line::Line) -> Option<Door> {
        lines.open_in(self.seal, self.place(number), line).ok()
    }

    /// Makes listeners look at the doors of a host. All processes of the host write this line; any of their writes does.
    pub fn ring_bell(&self, lines: &Lines, slot: u64, ring: u64) -> Result<()> {
        lines.publish_in(self.seal, 1 + slot, self.bell_at(slot), Bell { ring, ..Bell::default() })
    }

    /// What a bell says, if it verifies.
    pub fn open_bell(&self, lines: &Lines, slot: u64, line: &crate::line::Line) -> Option<u64> {
        lines.open_in(self.seal, 1 + slot, line).ok().map(|bell: Bell| bell.ring)
    }
}
