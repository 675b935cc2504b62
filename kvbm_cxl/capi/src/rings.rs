// SPDX-License-Identifier: Apache-2.0
//! Listeners, connections and traces of a handle, by number.
//!
//! The two directions of a connection are used from different threads, one call at a time each. A number is never used again, so that one
//! that was closed is refused. A call that waits looks now and then whether another thread closes what it waits for, so that a close need
//! not wait for its deadline.

use crate::numbers::Numbers;
use crate::status::{Failure, Outcome, Status};
use crate::turns::{Deadline, Turn, Turns};
use crate::types::CxlRing;
use cxl_pool::Error;
use cxl_pool::alloc::Allocator;
use cxl_pool::background::held;
use cxl_pool::host::Host;
use cxl_pool::ring::{Alive, Beating, Connection, Listener, Presence, Probe, Receiver, RingConfig, Rings, Sender, Trace};
use std::sync::{Arc, Mutex};

/// Longest wait in one piece, in milliseconds: how late a close may notice a call that waits, and that one the close.
const SLICE_MS: u64 = 20;

/// The receiving direction, and the message that was too long for its caller.
struct Incoming {
    receiver: Receiver,
    message: Vec<u8>,
    is_waiting: bool,
}

#[derive(Clone)]
enum RingEntry {
    Listener(Arc<Turns<Listener>>),
    /// With the length of its longest message, in bytes.
    Connection(Arc<Turns<Sender>>, Arc<Turns<Incoming>>, Probe, u64),
    Trace(Trace),
}

pub struct RingTable {
    host: Host,
    allocator: Arc<Allocator>,
    rings: Mutex<Option<(Rings, Beating)>>,
    open: Numbers<RingEntry>,
}

fn closed_error(number: CxlRing) -> Failure {
    Failure::new(Status::E_CLOSED, format!("{number} is no open listener, connection or trace of this pool handle (was it closed?)"))
}

fn is_other(number: CxlRing, wanted: &str) -> Failure {
    Failure::invalid(format!("{number} is not a {wanted}"))
}

fn turn<'t, T>(turns: &'t Turns<T>, number: CxlRing, deadline: Deadline) -> Outcome<Turn<'t, T>> {
    turns.wait(deadline).ok_or_else(|| Failure::new(Status::E_TIMEOUT, format!("another call on {number} did not end in time")))
}

/// Repeats `attempt`, which waits for at most so many milliseconds, until the deadline, or until `turn` is to end for a close.
fn wait<T, R>(
    turn: &mut Turn<'_, T>,
    number: CxlRing,
    deadline: Deadline,
    mut attempt: impl FnMut(&mut T, u64) -> Result<R, Error>,
) -> Outcome<R> {
    loop {
        let open = turn.get().ok_or_else(|| closed_error(number))?;
        match attempt(open, deadline.left_ms().min(SLICE_MS)) {
            // Computes the remaining time again: an attempt that needs a lock of the pool may take longer than its share.
            Err(Error::Timeout { .. }) if deadline.left_ms() > 0 => {}
            Err(Error::Timeout { what, .. }) => return Err(Error::Timeout { what, timeout_ms: deadline.timeout_ms() }.into()),
            other => return Ok(other?),
        }
    }
}

impl RingTable {
    pub fn new(host: &Host, allocator: &Arc<Allocator>) -> Self {
        RingTable { host: host.clone(), allocator: allocator.clone(), rings: Mutex::default(), open: Numbers::new() }
    }

    fn rings(&self) -> Outcome<Rings> {
        let mut rings = held(&self.rings);
        if let Some((rings, _)) = &*rings {
            return Ok(rings.clone());
        }
        let config = RingConfig {
            beat_ms: self.host.config().heartbeat_ms.max(1),
            peer_timeout_ms: self.host.config().suspect_ms.saturating_mul(2).max(2),
            ..RingConfig::default()
        };
        let made = Rings::new(&self.host, self.allocator.clone(), config)?;
        // Its own thread, for the others of this process may wait for a lock whose holder died.
        let beating = made.serve()?;
        *rings = Some((made.clone(), beating));
        Ok(made)
    }

    fn enter_connection(&self, connection: Connection) -> CxlRing {
        let probe = connection.probe();
        let (sender, receiver) = connection.split();
        let max_message_bytes = sender.max_message_bytes();
        let incoming = Incoming { receiver, message: Vec::new(), is_waiting: false };
        self.open.add(RingEntry::Connection(Arc::new(Turns::of(sender)), Arc::new(Turns::of(incoming)), probe, max_message_bytes))
    }

    fn find(&self, number: CxlRing) -> Outcome<RingEntry> {
        self.open.get(number).ok_or_else(|| closed_error(number))
    }

    pub fn listen(&self, name: &[u8]) -> Outcome<CxlRing> {
        let listener = self.rings()?.listen(name)?;
        Ok(self.open.add(RingEntry::Listener(Arc::new(Turns::of(listener)))))
    }

    pub fn accept(&self, number: CxlRing, timeout_ms: u64) -> Outcome<CxlRing> {
        match self.find(number)? {
            RingEntry::Listener(listener) => {
                let deadline = Deadline::within(timeout_ms);
                let mut turn = turn(&listener, number, deadline)?;
                Ok(self.enter_connection(wait(&mut turn, number, deadline, |listener, ms| listener.accept(ms))?))
            }
            RingEntry::Connection(..) | RingEntry::Trace(_) => Err(is_other(number, "listener")),
        }
    }

    pub fn connect(&self, name: &[u8], timeout_ms: u64) -> Outcome<CxlRing> {
        let connection = self.rings()?.connect(name, timeout_ms)?;
        Ok(self.enter_connection(connection))
    }

    pub fn presence(&self, name: &[u8]) -> Outcome<()> {
        match self.rings()?.presence(name)? {
            Presence::Listens => Ok(()),
            Presence::Ended(reason) => Err(Failure::new(Status::E_PEER_GONE, format!("the listener has ended: {reason}"))),
            Presence::InDoubt(reason) => Err(Failure::new(Status::E_TIMEOUT, format!("whether the listener lives is not known: {reason}"))),
        }
    }

    pub fn send(&self, number: CxlRing, message: &[u8], timeout_ms: u64) -> Outcome<()> {
        let RingEntry::Connection(sender, ..) = self.find(number)? else { return Err(is_other(number, "connection")) };
        let deadline = Deadline::within(timeout_ms);
        let mut turn = turn(&sender, number, deadline)?;
        wait(&mut turn, number, deadline, |sender, ms| sender.send(message, ms))
    }

    pub fn max_message_bytes(&self, number: CxlRing) -> Outcome<u64> {
        match self.find(number)? {
            RingEntry::Connection(.., max_message_bytes) => Ok(max_message_bytes),
            RingEntry::Listener(_) | RingEntry::Trace(_) => Err(is_other(number, "connection")),
        }
    }

    /// Receives a message of at most `room` bytes; a longer one stays, and its length is the error.
    pub fn recv<T>(&self, number: CxlRing, room: usize, timeout_ms: u64, take: impl FnOnce(&[u8]) -> T) -> Outcome<Result<T, usize>> {
        let RingEntry::Connection(_, incoming, ..) = self.find(number)? else { return Err(is_other(number, "connection")) };
        let deadline = Deadline::within(timeout_ms);
        let mut turn = turn(&incoming, number, deadline)?;
        let Incoming { receiver, message, is_waiting } = turn.get().ok_or_else(|| closed_error(number))?;
        // One look, and few words: a polling caller comes here all the time.
        if !*is_waiting && !receiver.try_recv(message)? {
            if timeout_ms == 0 {
                return Err(Failure::new(Status::E_TIMEOUT, "no message has arrived"));
            }
            wait(&mut turn, number, deadline, |incoming, ms| incoming.receiver.recv(&mut incoming.message, ms))?;
        }
        let Incoming { message, is_waiting, .. } = turn.get().ok_or_else(|| closed_error(number))?;
        *is_waiting = message.len() > room;
        Ok(if *is_waiting { Err(message.len()) } else { Ok(take(message)) })
    }

    /// Checks whether the other end of a connection is alive now; other threads may call meanwhile.
    pub fn check(&self, number: CxlRing) -> Outcome<Alive> {
        match self.find(number)? {
            RingEntry::Connection(_, _, probe, _) => Ok(probe.check()?),
            RingEntry::Listener(_) | RingEntry::Trace(_) => Err(is_other(number, "connection")),
        }
    }

    pub fn trace(&self, number: CxlRing) -> Outcome<CxlRing> {
        match self.find(number)? {
            RingEntry::Connection(_, _, probe, _) => Ok(self.open.add(RingEntry::Trace(probe.trace()?))),
            RingEntry::Listener(_) | RingEntry::Trace(_) => Err(is_other(number, "connection")),
        }
    }

    pub fn has_let_go(&self, number: CxlRing) -> Outcome<bool> {
        match self.find(number)? {
            RingEntry::Trace(trace) => Ok(trace.has_let_go(&self.rings()?)?),
            RingEntry::Listener(_) | RingEntry::Connection(..) => Err(is_other(number, "trace")),
        }
    }

    /// Closes a listener or a connection, or forgets a trace; without time a connection is dropped.
    pub fn close(&self, number: CxlRing, timeout_ms: u64) -> Outcome<()> {
        let entry = self.open.remove(number).ok_or_else(|| closed_error(number))?;
        match entry {
            RingEntry::Trace(_) => Ok(()),
            // Calls on other threads end first.
            RingEntry::Listener(listener) => match listener.close() {
                Some(listener) => Ok(listener.close()?),
                None => Err(closed_error(number)),
            },
            RingEntry::Connection(sender, incoming, ..) => match (sender.close(), incoming.close()) {
                (Some(sender), Some(incoming)) if timeout_ms > 0 => Ok(Connection::of(sender, incoming.receiver)?.close(timeout_ms)?),
                (Some(_), Some(_)) => Ok(()),
                _ => Err(closed_error(number)),
            },
        }
    }

    /// Closes everything without waiting: the membership ends.
    pub fn end(self) {
        for entry in self.open.take_all() {
            if let RingEntry::Listener(listener) = entry
                && let Some(listener) = listener.close()
            {
                // The next listener takes a name over that is left.
                let _ = listener.close();
            }
        }
    }
}

#[cfg(test)]
mod tests;
