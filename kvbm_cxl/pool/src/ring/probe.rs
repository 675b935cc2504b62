// SPDX-License-Identifier: Apache-2.0
//! Whether the other end of a connection is alive now, for those who have used memory that it owns and must know whose it was meanwhile.
//!
//! [`PeerWatch`](super::peer::PeerWatch) is for those who wait: it looks now and then, patient in doubt.
//! Here doubt is an error.

use super::Rings;
use super::lines::{Control, Door};
use super::link::{Half, Link};
use super::peer::Peer;
use crate::error::{Error, Result};
use std::sync::Weak;

/// How often a line that does not verify is fetched again: it may be in the middle of a write.
const ATTEMPTS: u32 = 64;

/// Looks at the other end of a connection, from any thread, whatever the two directions are doing. Does not keep the connection open.
#[derive(Clone)]
pub struct Probe {
    link: Weak<Link>,
}

/// What a look at an end that was not found gone is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alive {
    /// It is a process of this host, and runs: everything that it owned before is still its own.
    Seen,
    /// It is on another host, and nothing says that it has ended. A process there may have ended all the same a moment ago, and its memory
    /// be in other hands: only a message that it sent afterwards proves more.
    Believed,
}

impl Probe {
    pub(super) fn new(link: Weak<Link>) -> Probe {
        Probe { link }
    }

    /// The other end, to be asked about when this end has closed.
    ///
    /// # Errors
    /// [`Error::Closed`] when it has closed already.
    pub fn trace(&self) -> Result<Trace> {
        let link = self.link.upgrade().ok_or(Error::Closed)?;
        Ok(Trace { peer: *link.peer(), other: *link.other() })
    }

    /// Looks now. What this host loaded from the pool before is ordered before the look.
    ///
    /// # Errors
    /// [`Error::PeerClosed`] when the other end has closed; [`Error::PeerGone`] when its process has ended, another one is in its place,
    /// its host was fenced or has left, or its lines cannot be read; [`Error::Closed`] when this end has closed.
    pub fn check(&self) -> Result<Alive> {
        let link = self.link.upgrade().ok_or(Error::Closed)?;
        let (rings, peer) = (link.rings(), link.peer());
        let (host, lines) = (&rings.shared.host, link.lines());
        // The loads of a caller's copy come before those here.
        lines.memory().fence_loads();
        let control = settle(&link, "its half of the connection is used for something else", || link.other().control(lines))?;
        if control.state == Control::CLOSED {
            return Err(peer.closed_error());
        }
        let door: Door = settle(&link, "its door cannot be read", || rings.shared.doors.read(lines, peer.door()))?;
        if !peer.is_behind(&door) {
            return Err(peer.gone_error("another process is in its place"));
        }
        let fenced = settle(&link, "whether its host is fenced cannot be read", || host.seems_fenced(peer.slot(), peer.incarnation()))?;
        if fenced {
            return Err(peer.gone_error("its host was taken for dead"));
        }
        let dead = settle(&link, "whether its host is dead cannot be read", || host.seems_dead(peer.slot(), peer.incarnation()))?;
        if dead {
            return Err(peer.gone_error("its host has left the pool"));
        }
        if peer.slot() != host.slot() {
            return Ok(Alive::Believed);
        }
        if !host.platform().is_alive(peer.process()) {
            return Err(peer.gone_error("its process has ended"));
        }
        Ok(Alive::Seen)
    }
}

/// The other end of a connection, remembered by a process that has given the connection up and has to know when nothing of that end can use
/// any more what it was lent.
#[derive(Clone, Copy, Debug)]
pub struct Trace {
    peer: Peer,
    other: Half,
}

impl Trace {
    /// Whether the other end is certain to have let go of the connection: it has closed its half, which a stopped process does not do, or
    /// its process has ended, or its host was fenced or has left the pool. In doubt it says no.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn has_let_go(&self, rings: &Rings) -> Result<bool> {
        let (host, lines, peer) = (&rings.shared.host, rings.lines(), &self.peer);
        // A half that stays unreadable is being closed, or has another owner. No process writes its first line in between.
        let mut control = None;
        for round in 0..ATTEMPTS {
            control = self.other.control(lines)?;
            if control.is_some() {
                break;
            }
            rings.platform().relax(round);
        }
        if control.is_none_or(|control| control.state == Control::CLOSED) {
            return Ok(true);
        }
        if rings.shared.doors.read(lines, peer.door())?.is_some_and(|door| !peer.is_behind(&door)) {
            return Ok(true);
        }
        if peer.slot() == host.slot() && !host.platform().is_alive(peer.process()) {
            return Ok(true);
        }
        let fenced = host.seems_fenced(peer.slot(), peer.incarnation())?;
        let dead = host.seems_dead(peer.slot(), peer.incarnation())?;
        Ok(fenced == Some(true) || dead == Some(true))
    }
}

/// Repeats a look until it gives something; the other end is gone for the `reason` given if it never does.
fn settle<T>(link: &Link, reason: &'static str, look: impl Fn() -> Result<Option<T>>) -> Result<T> {
    for round in 0..ATTEMPTS {
        if let Some(found) = look()? {
            return Ok(found);
        }
        link.rings().platform().relax(round);
    }
    Err(link.peer().gone_error(reason))
}
