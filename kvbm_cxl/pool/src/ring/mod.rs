// SPDX-License-Identifier: Apache-2.0
//! Messages and calls between two processes of any hosts, through rings of 64-byte slots in the pool (Beluga section 6.2). The lines, the
//! steps and why they are right: protocols/RINGS.md.
//!
//! | module | what it does |
//! |---|---|
//! | `lines` | the form of every line |
//! | `doors` | one line per process, through which it is found alive and asks for connections |
//! | `listen`, `link` | listening, connecting, accepting; the memory of a connection |
//! | `peer`, `probe` | whether the other end is still there: for those who wait, and for those who must know now |
//! | `sender`, `receiver` | one direction of a connection |
//! | [`rpc`] | calls: requests and responses by number, with deadlines |
//!
//! A connection has two *halves*, one for each end: a block with the ring that this end writes and the line in which it says how far it
//! has read the other ring. **Only its owner writes to a half, and only its owner frees it.** It is a scratch block, so it
//! goes with its process. Who reads a half that is gone finds lines that do not verify, and that is all that happens.

mod doors;
mod lines;
mod link;
mod listen;
mod peer;
mod probe;
mod receiver;
pub mod rpc;
mod sender;

pub use listen::{Listener, Presence};
pub use probe::{Alive, Probe, Trace};
pub use receiver::Receiver;
pub use sender::Sender;

use crate::alloc::Allocator;
use crate::background::Background;
use crate::cpus::ThreadKind;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::limits::LINE_BYTES;
use crate::line::Lines;
use crate::media::Layout;
use crate::objects::Objects;
use crate::platform::Platform;
use doors::Doors;
use lines::{Door, HEAD_LINES, SLOT_BYTES};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// Fewest and most slots of a ring.
const SLOTS: std::ops::RangeInclusive<u64> = 8..=1 << 16;
/// Longest message whatever the size of the ring, in bytes.
const MAX_MESSAGE_BYTES: u64 = u16::MAX as u64;

/// Attempts between two looks at the clock.
const LOOKS: usize = 4;
/// Messages that a closing end drops at a time.
const DROPPED_TOGETHER: usize = 256;

/// How connections behave. Times are counted on this host's own clock.
#[derive(Clone, Debug)]
pub struct RingConfig {
    /// Size of the block that each end of a connection allocates, in bytes. A message fills at most half of its ring.
    pub ring_bytes: u64,
    /// Period in which this process says that it is alive, in milliseconds.
    pub beat_ms: u64,
    /// A process that was not seen alive for this long counts as gone, in milliseconds: a multiple of the others' `beat_ms`.
    pub peer_timeout_ms: u64,
    /// Period in which a waiting end looks whether the other end is still there, in milliseconds.
    pub check_ms: u64,
    /// Longest wait for the table of names, in milliseconds.
    pub names_timeout_ms: u64,
}

impl Default for RingConfig {
    fn default() -> Self {
        RingConfig { ring_bytes: 64 << 10, beat_ms: 50, peer_timeout_ms: 2_000, check_ms: 5, names_timeout_ms: 10_000 }
    }
}

/// The rings of one process. Cheap to clone; every clone is the same.
///
/// Whatever waits or polls here says that this process is alive. A process that may do something else for as long as
/// [`RingConfig::peer_timeout_ms`] runs [`Rings::serve`] besides.
#[derive(Clone)]
pub struct Rings {
    shared: Arc<Shared>,
}

struct Shared {
    host: Host,
    allocator: Arc<Allocator>,
    objects: Objects,
    config: RingConfig,
    doors: Doors,
    /// This process's door as last written, and its number.
    door: Mutex<Door>,
    number: u64,
    instance: u64,
    /// Held while a connection is asked for: there is one place for that in the door.
    connecting: Mutex<()>,
    beat_at_ns: AtomicU64,
}

/// One end of a connection.
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

fn hold<'m, T>(mutex: &'m Mutex<T>, platform: &dyn Platform, deadline_ns: u64) -> Option<MutexGuard<'m, T>> {
    let mut round = 0;
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if platform.now_ns() >= deadline_ns => return None,
            Err(TryLockError::WouldBlock) => platform.relax(round),
        }
        round = round.saturating_add(1);
    }
}

fn deadline_ns(platform: &dyn Platform, timeout_ms: u64) -> u64 {
    platform.now_ns().saturating_add(timeout_ms.saturating_mul(1_000_000))
}

/// Repeats `attempt` until it gives something or the deadline passes; `None` then.
fn wait_until<T>(platform: &dyn Platform, deadline_ns: u64, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<Option<T>> {
    let mut round = 0u32;
    loop {
        // A look at a line is a pause by itself; the clock and the pause between would only make an answer late.
        for _ in 0..LOOKS {
            if let Some(found) = attempt()? {
                return Ok(Some(found));
            }
        }
        if platform.now_ns() >= deadline_ns {
            return Ok(None);
        }
        platform.relax(round);
        round = round.saturating_add(1);
    }
}

/// Slots of a half of `ring_bytes`.
fn slots_of(ring_bytes: u64) -> Result<u64> {
    let slots = (ring_bytes / LINE_BYTES as u64).saturating_sub(HEAD_LINES);
    if SLOTS.contains(&slots) {
        return Ok(slots);
    }
    let size = |slots: &u64| (slots + HEAD_LINES) * LINE_BYTES as u64;
    Err(Error::Invalid(format!("a ring of {ring_bytes} bytes: {} to {} can be", size(SLOTS.start()), size(SLOTS.end()))))
}

/// Longest message through a ring of so many slots, in bytes. With half of the ring the receiver's progress can come in larger steps.
fn max_message_bytes(slots: u64) -> u64 {
    (slots / 2 * SLOT_BYTES as u64).min(MAX_MESSAGE_BYTES)
}

/// Checks what a line of another process says about where lines lie.
fn check_place(layout: &Layout, offset: u64, lines: u64) -> std::result::Result<(), &'static str> {
    let len_bytes = lines.checked_mul(LINE_BYTES as u64).ok_or("more lines than can be")?;
    let last = offset.checked_add(len_bytes).and_then(|end| end.checked_sub(1)).ok_or("lines that end beyond all numbers")?;
    if !offset.is_multiple_of(LINE_BYTES as u64) || layout.chunk_of(offset).is_none() || layout.chunk_of(last).is_none() {
        return Err("lines outside the blocks of the pool");
    }
    Ok(())
}

impl Rings {
    /// The rings of this process. The allocator outlives all connections, since each of them holds on to it.
    ///
    /// # Errors
    /// [`Error::Exists`] when this membership has rings already; [`Error::Full`], [`Error::Fenced`] and [`Error::Timeout`] where the doors,
    /// one block in a pool, had to be made and could not be.
    pub fn new(host: &Host, allocator: Arc<Allocator>, config: RingConfig) -> Result<Rings> {
        slots_of(config.ring_bytes)?;
        if config.peer_timeout_ms / 2 < config.beat_ms || config.beat_ms == 0 {
            return Err(Error::Invalid(format!(
                "peer_timeout_ms ({}) has to be a multiple of beat_ms ({}), or live processes would count as gone",
                config.peer_timeout_ms, config.beat_ms
            )));
        }
        let objects = Objects::new(host);
        let doors = Doors::find_or_make(host, &allocator, &objects, config.names_timeout_ms)?;
        let number = doors.number(host.slot(), host.process_index())?;
        if host.inner.has_door.swap(true, Ordering::AcqRel) {
            return Err(Error::Exists("the rings of this membership (clone them instead)".into()));
        }
        let process = host.platform().process();
        // Zero would be no process.
        let instance = host.platform().random() | 1;
        let door = Mutex::new(Door { instance, pid: process.pid, start: process.start, ..Door::default() });
        let shared = Shared {
            host: host.clone(),
            allocator,
            objects,
            config,
            doors,
            door,
            number,
            instance,
            connecting: Mutex::new(()),
            beat_at_ns: AtomicU64::new(0),
        };
        let rings = Rings { shared: Arc::new(shared) };
        rings.beat()?;
        Ok(rings)
    }

    fn lines(&self) -> &Lines {
        self.shared.host.lines()
    }

    fn platform(&self) -> &dyn Platform {
        &**self.shared.host.platform()
    }

    /// How connections behave.
    pub fn config(&self) -> &RingConfig {
        &self.shared.config
    }

    /// Says that this process is alive, if that is due.
    ///
    /// # Errors
    /// Those of the memory; [`Error::Fenced`] while this host is fenced, and [`Error::Closed`] once it has left.
    pub fn beat(&self) -> Result<()> {
        let now_ns = self.platform().now_ns();
        if now_ns < self.shared.beat_at_ns.load(Ordering::Relaxed) {
            return Ok(());
        }
        // The door's owner writes it, and that is a beat.
        let Ok(mut door) = self.shared.door.try_lock() else { return Ok(()) };
        self.shared.beat_at_ns.store(now_ns + self.shared.config.beat_ms * 1_000_000, Ordering::Relaxed);
        self.write_door(&mut door)
    }

    /// As [`Rings::beat`] for those who wait for something else: a fence shows in what they wait for.
    fn tick(&self) -> Result<()> {
        match self.beat() {
            Err(Error::Fenced { .. } | Error::Closed) => Ok(()),
            other => other,
        }
    }

    fn write_door(&self, door: &mut Door) -> Result<()> {
        // A host that has left may find its slot in other hands: it says so only after every operation that began before.
        let op = self.shared.host.enter()?;
        door.beat = door.beat.wrapping_add(1);
        door.incarnation = op.incarnation();
        self.shared.doors.write(self.lines(), self.shared.number, *door)
    }

    /// Beats on a thread of its own until the result is dropped.
    pub fn serve(&self) -> Result<Beating> {
        let rings = self.clone();
        let rest = Duration::from_millis(self.shared.config.beat_ms.div_ceil(2));
        let round = move || {
            // A beat that fails is made up for by a later one; the calls of this process meet the same error and report it.
            let _ = rings.beat();
            Some(rest)
        };
        let cpus = self.shared.host.config().cpus.set_of(ThreadKind::Upkeep);
        Ok(Beating { _thread: Background::start("cxl-rings", "starting the thread of the rings", cpus, round)? })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.host.inner.has_door.store(false, Ordering::Release);
    }
}

/// A thread that says that this process is alive; dropping it stops the thread.
pub struct Beating {
    _thread: Background,
}

impl Connection {
    /// The two directions, for two threads. The connection lasts until both are dropped.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// Both directions of one connection together again.
    ///
    /// # Errors
    /// [`Error::Invalid`] when they are not those of one connection; both are dropped.
    pub fn of(sender: Sender, receiver: Receiver) -> Result<Connection> {
        if std::ptr::eq(sender.link(), receiver.link()) {
            return Ok(Connection { sender, receiver });
        }
        Err(Error::Invalid("the two directions belong to different connections".into()))
    }

    /// The direction to the other end.
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.sender
    }

    /// The direction from the other end.
    pub fn receiver(&mut self) -> &mut Receiver {
        &mut self.receiver
    }

    /// Looks whether the other end is alive, whatever the two directions are doing.
    pub fn probe(&self) -> Probe {
        self.sender.probe()
    }

    /// [`Sender::send`].
    pub fn send(&mut self, message: &[u8], timeout_ms: u64) -> Result<()> {
        self.sender.send(message, timeout_ms)
    }

    /// [`Receiver::recv`].
    pub fn recv(&mut self, message: &mut Vec<u8>, timeout_ms: u64) -> Result<()> {
        self.receiver.recv(message, timeout_ms)
    }

    /// Closes in good order: waits until the other end has received everything. What still comes from there is dropped.
    ///
    /// Without it, as when a connection is dropped, the other end may lose messages that it has not received yet, and learns that.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::PeerGone`]: the connection is closed all the same, and the last messages may not have been received.
    pub fn close(mut self, timeout_ms: u64) -> Result<()> {
        let rings = self.sender.link().rings().clone();
        let platform = rings.platform();
        let deadline_ns = deadline_ns(platform, timeout_ms);
        let mut dropped = Vec::new();
        let done = wait_until(platform, deadline_ns, || {
            // The other end may be about to send, and wait for room, before it receives.
            for _ in 0..DROPPED_TOGETHER {
                if !self.receiver.is_open() || !matches!(self.receiver.try_recv(&mut dropped), Ok(true)) {
                    break;
                }
            }
            match self.sender.finish() {
                // It has ended as well and gone: what it did not receive it did not want.
                Err(Error::PeerGone { .. } | Error::PeerClosed { .. }) if !self.receiver.is_open() => Ok(Some(())),
                other => Ok(other?.then_some(())),
            }
        })?;
        done.ok_or_else(|| Error::Timeout { what: format!("{} to receive everything", self.sender.link().peer()), timeout_ms })
    }
}

#[cfg(test)]
mod tests;
