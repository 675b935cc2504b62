// SPDX-License-Identifier: Apache-2.0
//! Whether the other end is still there.
//!
//! A wrong guess does no harm beyond the connection: an end that gives a connection up frees only its own half, and the other end, should
//! it live, finds that half closed.

use super::Rings;
use super::doors::Doors;
use super::lines::{Control, Door};
use super::link::Half;
use crate::error::{Error, Result};
use crate::failure_detector::FailureDetector;
use crate::fault::mutant;
use crate::platform::ProcessId;
use std::fmt;

#[derive(Clone, Copy, Debug)]
pub struct Peer {
    door: u64,
    instance: u64,
    incarnation: u32,
    process: ProcessId,
}

impl Peer {
    pub fn behind(number: u64, door: &Door) -> Peer {
        let process = ProcessId { pid: door.pid, start: door.start };
        Peer { door: number, instance: door.instance, incarnation: door.incarnation, process }
    }

    pub fn slot(&self) -> u16 {
        Doors::slot_of(self.door) as u16
    }

    pub fn door(&self) -> u64 {
        self.door
    }

    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// The process, as its own host knows it.
    pub fn process(&self) -> ProcessId {
        self.process
    }

    /// Whether a door is still its own.
    pub fn is_behind(&self, door: &Door) -> bool {
        door.instance == self.instance
    }

    pub fn gone_error(&self, reason: &'static str) -> Error {
        Error::PeerGone { peer: self.to_string(), reason }
    }

    pub fn closed_error(&self) -> Error {
        Error::PeerClosed { peer: self.to_string() }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let process = self.door % crate::limits::MAX_PROCESSES as u64;
        write!(f, "process {process} of host slot {} (pid {} there)", self.slot(), self.process.pid)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerStatus {
    /// It is in use, or it is not time to look.
    Open,
    /// It was closed after so many lines.
    Closed(u64),
}

/// What one direction of a connection, or a listener that waits for one, knows of the other end's life. Times are of this host's clock.
#[derive(Debug, Default)]
pub struct PeerWatch {
    next_ns: u64,
    beat: Option<u32>,
    silence: Option<FailureDetector>,
    is_alive: bool,
    /// How long its half could not be read.
    bad: Option<FailureDetector>,
}

impl PeerWatch {
    pub fn note_life(&mut self) {
        self.beat = None;
    }

    pub fn is_alive(&self) -> bool {
        self.is_alive
    }

    /// Looks at the other end, if that is due; `half` is its half, once there is one.
    ///
    /// # Errors
    /// [`Error::PeerGone`].
    pub fn look(&mut self, rings: &Rings, peer: &Peer, half: Option<&Half>) -> Result<PeerStatus> {
        let shared = &rings.shared;
        let now_ns = rings.platform().now_ns();
        if now_ns < self.next_ns || mutant!("ring.no_peer_check") {
            return Ok(PeerStatus::Open);
        }
        self.next_ns = now_ns + shared.config.check_ms * 1_000_000;
        rings.tick()?;
        if let Some(half) = half
            && let PeerStatus::Closed(end) = self.look_at_half(rings, peer, half, now_ns)?
        {
            return Ok(PeerStatus::Closed(end));
        }
        self.look_at_door(rings, peer, now_ns)?;
        let host = &shared.host;
        if peer.slot() == host.slot() && !host.platform().is_alive(peer.process) {
            return Err(peer.gone_error("its process has ended"));
        }
        // A line of the manager that cannot be read says nothing, and is not waited for: the beat decides then.
        if host.seems_fenced(peer.slot(), peer.incarnation)? == Some(true) {
            return Err(peer.gone_error("its host was taken for dead"));
        }
        if host.seems_dead(peer.slot(), peer.incarnation)? == Some(true) {
            return Err(peer.gone_error("its host has left the pool"));
        }
        Ok(PeerStatus::Open)
    }

    fn look_at_half(&mut self, rings: &Rings, peer: &Peer, half: &Half, now_ns: u64) -> Result<PeerStatus> {
        match half.control(rings.lines())? {
            Some(control) if control.state == Control::CLOSED => return Ok(PeerStatus::Closed(control.end)),
            Some(_) => self.bad = None,
            // Freed and used for something else, or half written by a process that was stopped there.
            None if is_over(&mut self.bad, rings, now_ns) && !mutant!("ring.reused_half_waits") => {
                return Err(peer.gone_error("its half of the connection is used for something else"));
            }
            None => {}
        }
        Ok(PeerStatus::Open)
    }

    fn look_at_door(&mut self, rings: &Rings, peer: &Peer, now_ns: u64) -> Result<()> {
        let beat = match rings.shared.doors.read(rings.lines(), peer.door)? {
            Some(door) if !peer.is_behind(&door) && !mutant!("ring.any_instance") => {
                return Err(peer.gone_error("another process is in its place"));
            }
            Some(door) => Some(door.beat),
            None => self.beat,
        };
        if beat.is_none() || beat != self.beat {
            self.is_alive |= self.beat.is_some() && beat.is_some();
            (self.beat, self.silence) = (beat.or(Some(0)), None);
        }
        if is_over(&mut self.silence, rings, now_ns) && !mutant!("ring.silent_for_ever") {
            return Err(peer.gone_error("it did not say that it is alive"));
        }
        Ok(())
    }
}

/// Whether a silence, which begins now if it has not before, has lasted for longer than this end waits.
fn is_over(silence: &mut Option<FailureDetector>, rings: &Rings, now_ns: u64) -> bool {
    let patience_ns = rings.shared.config.peer_timeout_ms * 1_000_000;
    silence.get_or_insert(FailureDetector::since(now_ns)).goes_on(now_ns, patience_ns) >= patience_ns
}
