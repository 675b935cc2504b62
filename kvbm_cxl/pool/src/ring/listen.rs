// SPDX-License-Identifier: Apache-2.0
//! Listening under a name, connecting to it, accepting.
//!
//! Who connects puts its half and the connection's nonce into its door and rings the bell of its host. The listener finds that, makes a
//! half of its own, and puts it into the line of its block that belongs to that door. Each writes only its own lines.

use super::lines::{ConnectAnswer, Door, Listening};
use super::link::{Own, Side};
use super::peer::{Peer, PeerWatch};
use super::{Connection, Rings, check_place, deadline_ns, hold, wait_until};
use crate::alloc::Block;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::limits::{LINE_BYTES, MAX_OBJECT_NAME_BYTES, MAX_PROCESSES};
use crate::line::{Line, Seal};
use crate::objects::Object;

/// First of the numbers that make the seal of a listener's answers; its first line is sealed with this alone.
pub(super) const SEAL: u64 = 0x6c69;
/// Period in which a listener looks at the doors of one more host whose bell did not ring, in nanoseconds: a process may have died between
/// its door and the bell. One host at a time, since all doors of a pool together are thousands of lines.
const SCAN_NS: u64 = 5_000_000;
/// Period in which a listener looks whether its name still means it, in nanoseconds.
const NAME_NS: u64 = 1_000_000_000;
/// Doors that are fetched together.
const TOGETHER: usize = 16;
const _: () = assert!(MAX_PROCESSES.is_multiple_of(TOGETHER));

fn quote(name: &[u8]) -> String {
    format!("listener {:?}", String::from_utf8_lossy(name))
}

fn too_long() -> Error {
    Error::Invalid(format!("the name of a listener has at most {MAX_OBJECT_NAME_BYTES} bytes"))
}

struct FoundListener {
    /// Pool offset of its block.
    offset: u64,
    nonce: u64,
    peer: Peer,
}

enum Judged {
    /// It was there when its process was last seen.
    Listens(FoundListener),
    /// It is gone, and why.
    Left(&'static str),
    /// Its process's door cannot be read: half written, perhaps.
    Unclear,
    /// The name is no listener's as far as is known, and why.
    Other(&'static str),
}

/// Whether the listener of a name is there, as far as is known without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Nothing says that it has ended. A process of another host may have been killed all the same.
    Listens,
    /// It is certain that it does not listen under this name any more, and why: it gave the name back, its process has ended, or its host
    /// is proven dead or has left.
    Ended(&'static str),
    /// It is unknown, and why: its host was taken for dead and may come back, or a line cannot be read.
    InDoubt(&'static str),
}

/// Accepts connections under a name.
pub struct Listener {
    rings: Rings,
    name: Vec<u8>,
    block: Block,
    nonce: u64,
    seal: Seal,
    /// The connection last taken from each door.
    taken: Vec<u64>,
    bells: Vec<(u64, bool)>,
    /// The host whose doors are looked at next, bell or not, and when.
    scan: usize,
    scan_ns: u64,
    name_ns: u64,
}

impl Rings {
    /// Listens under a name of the pool's objects. A name whose listener is gone is taken over; where there is no room for the name, those
    /// of other listeners that are gone are unbound first.
    ///
    /// # Errors
    /// [`Error::Exists`] when a living listener has the name; those of [`crate::objects::Objects::put`] and
    /// [`Allocator::alloc`](crate::alloc::Allocator::alloc).
    pub fn listen(&self, name: &[u8]) -> Result<Listener> {
        let shared = &self.shared;
        let doors = shared.doors.count();
        let block = shared.allocator.alloc((1 + doors) * LINE_BYTES as u64)?;
        let nonce = self.platform().random() | 1;
        let bells = vec![(0, true); shared.doors.slots() as usize];
        let seal = self.lines().seal_of(&[SEAL, nonce]);
        let taken = vec![0; doors as usize];
        let listener =
            Listener { rings: self.clone(), name: name.to_vec(), block, nonce, seal, taken, bells, scan: 0, scan_ns: 0, name_ns: 0 };
        let (door, instance, doors) = (shared.number as u32, shared.instance, shared.doors.nonce);
        let mut listening = Listening { door, nonce, instance, doors, name_len: name.len() as u32, ..Listening::default() };
        listening.name.get_mut(..name.len()).ok_or_else(too_long)?.copy_from_slice(name);
        self.lines().publish_in(self.lines().seal_of(&[SEAL]), block.offset, block.offset, listening)?;
        point!("ring.listening");
        self.bind(name, block)?;
        Ok(listener)
    }

    fn bind(&self, name: &[u8], block: Block) -> Result<()> {
        let shared = &self.shared;
        let timeout_ms = shared.config.names_timeout_ms;
        let ours = Object { name: name.to_vec(), offset: block.offset, len_bytes: LINE_BYTES as u64, is_listener: true };
        let put = || shared.objects.bind(&ours, timeout_ms, |_| Ok(false));
        let bound = match put() {
            Err(full @ Error::Full { .. }) => match self.forget_gone() {
                Ok(0) | Err(_) => Err(full),
                Ok(_) => put(),
            },
            other => other,
        };
        match bound {
            Err(Error::Exists(_)) => {}
            other => return other,
        }
        let judge = |object: &Object| match object.offset == block.offset {
            // A leftover of the memory's owner before.
            true if object.is_listener => Ok(Judged::Left("its memory is ours")),
            true => Ok(Judged::Other("its memory is ours")),
            false => self.judge(object),
        };
        // Longer than it takes to tell a living process from one that is gone.
        let mut watch = PeerWatch::default();
        let patience_ms = shared.config.peer_timeout_ms.saturating_mul(2);
        let deadline_ns = deadline_ns(self.platform(), patience_ms);
        let taken = wait_until(self.platform(), deadline_ns, || {
            let taken_over = match shared.objects.get(name, timeout_ms) {
                Err(Error::NotFound(_)) => put(),
                other => {
                    let object = other?;
                    let gone = match judge(&object)? {
                        Judged::Left(_) => None,
                        Judged::Listens(found) => match watch.look(self, &found.peer, None) {
                            Err(Error::PeerGone { .. }) => Some(found.nonce),
                            Err(error) => return Err(error),
                            Ok(_) => return Ok(watch.is_alive().then_some(false)),
                        },
                        Judged::Unclear => return Ok(None),
                        Judged::Other(_) => return Ok(Some(false)),
                    };
                    point!("ring.taking_over");
                    // Not from one that has bound the name meanwhile, be it the same process.
                    shared.objects.bind(&ours, timeout_ms, |bound| {
                        Ok(match judge(bound)? {
                            _ if mutant!("ring.take_over_any") => true,
                            Judged::Left(_) => true,
                            Judged::Listens(found) => gone == Some(found.nonce),
                            Judged::Unclear | Judged::Other(_) => false,
                        })
                    })
                }
            };
            match taken_over {
                Ok(()) => Ok(Some(true)),
                Err(Error::Exists(_)) => Ok(None),
                Err(error) => Err(error),
            }
        });
        match taken? {
            Some(true) => Ok(()),
            _ => Err(Error::Exists(quote(name))),
        }
    }

    /// Unbinds the names of listeners that are gone, and returns how many those were: a process that is killed leaves its name, and a name
    /// has few cells of the table to go to.
    fn forget_gone(&self) -> Result<usize> {
        let (objects, timeout_ms) = (&self.shared.objects, self.shared.config.names_timeout_ms);
        let mut gone = 0;
        for object in objects.list(timeout_ms)? {
            if !self.is_left(&object) {
                continue;
            }
            point!("ring.forgetting");
            // Once more when no process can bind it again: its process may have begun to listen under it again, with the same memory.
            let is_left = |bound: &Object| Ok(self.is_left(bound) || mutant!("ring.forget_any"));
            if objects.destroy_if(&object.name, timeout_ms, is_left).is_ok() {
                gone += 1;
            }
        }
        Ok(gone)
    }

    fn is_left(&self, object: &Object) -> bool {
        match self.judge(object) {
            Ok(Judged::Left(_)) => true,
            Ok(Judged::Listens(found)) => matches!(PeerWatch::default().look(self, &found.peer, None), Err(Error::PeerGone { .. })),
            Ok(Judged::Unclear | Judged::Other(_)) | Err(_) => false,
        }
    }

    fn find(&self, name: &[u8], timeout_ms: u64) -> Result<FoundListener> {
        let object = match self.shared.objects.get(name, timeout_ms) {
            Err(Error::NotFound(_)) => return Err(Error::NotFound(quote(name))),
            other => other?,
        };
        let gone = |reason| Err(Error::PeerGone { peer: quote(name), reason });
        match self.judge(&object)? {
            Judged::Listens(found) => Ok(found),
            Judged::Left(reason) | Judged::Other(reason) => gone(reason),
            Judged::Unclear => gone("its door cannot be read"),
        }
    }

    /// Whether the listener of a name is there. Looks once, and waits for nothing.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn presence(&self, name: &[u8]) -> Result<Presence> {
        let object = match self.shared.objects.get(name, 0) {
            Err(Error::NotFound(_)) => return Ok(Presence::Ended("it has stopped listening")),
            Err(Error::Fenced { .. } | Error::Timeout { .. } | Error::BadLine { .. }) => {
                return Ok(Presence::InDoubt("its name cannot be read"));
            }
            other => other?,
        };
        let peer = match self.judge(&object)? {
            Judged::Left(reason) => return Ok(Presence::Ended(reason)),
            Judged::Other(reason) => return Ok(Presence::InDoubt(reason)),
            Judged::Unclear => return Ok(Presence::InDoubt("its door cannot be read")),
            Judged::Listens(found) => found.peer,
        };
        let host = &self.shared.host;
        if peer.slot() == host.slot() {
            let is_alive = host.platform().is_alive(peer.process());
            return Ok(if is_alive { Presence::Listens } else { Presence::Ended("its process has ended") });
        }
        if host.seems_dead(peer.slot(), peer.incarnation())? == Some(true) {
            return Ok(Presence::Ended("its host has left the pool"));
        }
        // A host that was only too slow joins again, and its processes keep running: no proof.
        if host.seems_fenced(peer.slot(), peer.incarnation())? == Some(true) {
            return Ok(Presence::InDoubt("its host was taken for dead"));
        }
        Ok(Presence::Listens)
    }

    /// What an object says of the listener that has bound it. A listener's first line is there for as long as it has its name, so memory
    /// that tells of none says that it is gone - of a name that is marked as a listener's. Any other may have any owner, unless that line
    /// names it: before names were marked, listeners bound them so as well.
    fn judge(&self, object: &Object) -> Result<Judged> {
        let (shared, lines) = (&self.shared, self.lines());
        let no_line = |reason| if object.is_listener { Judged::Left(reason) } else { Judged::Other(reason) };
        if let Err(reason) = check_place(lines.layout(), object.offset, 1 + shared.doors.count()) {
            return Ok(no_line(reason));
        }
        let line = lines.fetch_in::<Listening>(lines.seal_of(&[SEAL]), object.offset, object.offset)?;
        let Ok(listening) = line else { return Ok(no_line("its memory is used for something else")) };
        if listening.name.get(..listening.name_len as usize) != Some(&object.name[..]) {
            return Ok(no_line("its memory is another listener's"));
        }
        if u64::from(listening.door) >= shared.doors.count() || listening.doors != shared.doors.nonce {
            return Ok(Judged::Left("it looks at doors that are not these"));
        }
        let number = listening.door.into();
        Ok(match shared.doors.read(lines, number)? {
            Some(door) if door.instance == listening.instance => {
                Judged::Listens(FoundListener { offset: object.offset, nonce: listening.nonce, peer: Peer::behind(number, &door) })
            }
            Some(_) => Judged::Left("another process is in its place"),
            None => Judged::Unclear,
        })
    }

    /// Connects to a listener.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the name is not bound; [`Error::PeerGone`] when the listener is gone; [`Error::Timeout`] when it did not
    /// accept in time, or the lock of the chunks did not come in time where memory for this end needs one; [`Error::Fenced`] while this
    /// host is fenced.
    pub fn connect(&self, name: &[u8], timeout_ms: u64) -> Result<Connection> {
        let deadline_ns = deadline_ns(self.platform(), timeout_ms);
        let late = || Error::Timeout { what: format!("{} to accept", quote(name)), timeout_ms };
        let _turn = hold(&self.shared.connecting, self.platform(), deadline_ns).ok_or_else(late)?;
        let left_ms = || deadline_ns.saturating_sub(self.platform().now_ns()) / 1_000_000;
        let found = self.find(name, left_ms().min(self.shared.config.names_timeout_ms))?;
        let nonce = self.platform().random() | 1;
        let own = Own::make(self, nonce, Side::Connector, Some(left_ms()))?;
        let offer = Door { listener: found.nonce, nonce, half: own.offset(), slots: own.slots() as u32, ..Door::default() };
        let answer = self.offer(offer).and_then(|()| self.await_answer(&found, nonce, deadline_ns));
        // The offer is for this once. Should this fail, the listener finds a half that is closed, or no half.
        let withdrawn = self.offer(Door::default());
        let answer = answer?.ok_or_else(late)?;
        withdrawn?;
        point!("ring.connected");
        own.join(Side::Connector, answer.half, answer.slots, found.peer)?.map_err(|reason| found.peer.gone_error(reason))
    }

    fn offer(&self, offer: Door) -> Result<()> {
        let shared = &self.shared;
        {
            // Held for one write at a time; a thread that has it for longer is stopped.
            let timeout_ms = shared.config.names_timeout_ms;
            let stuck = || Error::Timeout { what: "this process's own door (is a thread of it stopped?)".into(), timeout_ms };
            let mut door = hold(&shared.door, self.platform(), deadline_ns(self.platform(), timeout_ms)).ok_or_else(stuck)?;
            let own = *door;
            *door = Door { beat: own.beat, instance: own.instance, incarnation: own.incarnation, pid: own.pid, start: own.start, ..offer };
            self.write_door(&mut door)?;
        }
        point!("ring.offered");
        if offer.listener == 0 {
            return Ok(());
        }
        let _op = shared.host.enter()?;
        shared.doors.ring_bell(self.lines(), shared.host.slot().into(), self.platform().random())
    }

    fn await_answer(&self, found: &FoundListener, nonce: u64, deadline_ns: u64) -> Result<Option<ConnectAnswer>> {
        let place = 1 + self.shared.number;
        let seal = self.lines().seal_of(&[SEAL, found.nonce]);
        let mut watch = PeerWatch::default();
        wait_until(self.platform(), deadline_ns, || {
            let answer = self.lines().fetch_in::<ConnectAnswer>(seal, place, found.offset + place * LINE_BYTES as u64)?;
            if let Ok(answer) = answer
                && (answer.nonce == nonce || mutant!("ring.any_answer"))
            {
                return Ok(Some(answer));
            }
            watch.look(self, &found.peer, None)?;
            Ok(None)
        })
    }
}

impl Listener {
    /// Waits for a connection.
    ///
    /// # Errors
    /// [`Error::Timeout`], and those of [`Listener::try_accept`].
    pub fn accept(&mut self, timeout_ms: u64) -> Result<Connection> {
        let rings = self.rings.clone();
        let platform = rings.platform();
        let accepted = wait_until(platform, deadline_ns(platform, timeout_ms), || self.try_accept())?;
        accepted.ok_or_else(|| Error::Timeout { what: format!("a connection to {}", quote(&self.name)), timeout_ms })
    }

    /// Accepts a connection if one is asked for.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the name does not mean this listener any more; those of
    /// [`Allocator::alloc`](crate::alloc::Allocator::alloc).
    pub fn try_accept(&mut self) -> Result<Option<Connection>> {
        self.rings.tick()?;
        let now_ns = self.rings.platform().now_ns();
        self.check_name(now_ns)?;
        self.listen_to_bells(now_ns)?;
        for slot in 0..self.bells.len() {
            if !self.bells[slot].1 {
                continue;
            }
            // Left to be looked at again if there is one: another may wait after it.
            if let Some(connection) = self.look_at_doors(slot as u64)? {
                return Ok(Some(connection));
            }
            self.bells[slot].1 = false;
        }
        Ok(None)
    }

    /// Stops listening: gives the name and the memory back. Dropping a listener leaves its name, which the next one takes over.
    pub fn close(self) -> Result<()> {
        let shared = &self.rings.shared;
        let timeout_ms = shared.config.names_timeout_ms;
        // Without a lock at first: a name that is another's by now is nothing to wait for.
        match shared.objects.get(&self.name, timeout_ms) {
            Ok(object) if self.is_ours(&object) => {}
            Ok(_) | Err(Error::NotFound(_)) => return Ok(()),
            Err(error) => return Err(error),
        }
        point!("ring.unlistening");
        let is_ours = |bound: &Object| Ok(self.is_ours(bound) || mutant!("ring.close_any"));
        match shared.objects.destroy_if(&self.name, timeout_ms, is_ours) {
            Err(Error::NotFound(_)) => Ok(()),
            other => other,
        }
    }

    fn is_ours(&self, object: &Object) -> bool {
        object.offset == self.block.offset
    }

    fn check_name(&mut self, now_ns: u64) -> Result<()> {
        if now_ns < self.name_ns {
            return Ok(());
        }
        self.name_ns = now_ns + NAME_NS;
        let shared = &self.rings.shared;
        // Those who need a name settle the doubt after a writer's death: who accepts has others to serve.
        match shared.objects.get(&self.name, 0) {
            Ok(object) if self.is_ours(&object) => Ok(()),
            Ok(_) | Err(Error::NotFound(_)) => {
                Err(Error::NotFound(format!("{} (destroyed, or another one has taken its name): it", quote(&self.name))))
            }
            // In doubt for now: asked again later.
            Err(Error::Fenced { .. } | Error::Timeout { .. } | Error::BadLine { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn listen_to_bells(&mut self, now_ns: u64) -> Result<()> {
        let (lines, doors) = (self.rings.lines().clone(), self.rings.shared.doors);
        if now_ns >= self.scan_ns {
            self.scan_ns = now_ns + SCAN_NS;
            self.bells[self.scan].1 = true;
            self.scan = (self.scan + 1) % self.bells.len();
        }
        let mut fetched = [Line::ZERO; TOGETHER];
        for (group, bells) in self.bells.chunks_mut(TOGETHER).enumerate() {
            let first = (group * TOGETHER) as u64;
            let fetched = &mut fetched[..bells.len()];
            lines.fetch_raw_many((first..).map(|slot| doors.bell_at(slot)), fetched)?;
            for ((slot, bell), line) in (first..).zip(bells).zip(fetched) {
                if let Some(ring) = doors.open_bell(&lines, slot, line).filter(|ring| *ring != bell.0) {
                    *bell = (ring, true);
                }
            }
        }
        Ok(())
    }

    fn look_at_doors(&mut self, slot: u64) -> Result<Option<Connection>> {
        let (lines, doors) = (self.rings.lines().clone(), self.rings.shared.doors);
        let mut fetched = [Line::ZERO; TOGETHER];
        let first = slot * MAX_PROCESSES as u64;
        for first in (first..first + MAX_PROCESSES as u64).step_by(TOGETHER) {
            lines.fetch_raw_many((first..).map(|number| doors.door_at(number)), &mut fetched)?;
            for (number, line) in (first..).zip(&fetched) {
                let Some(door) = doors.open_door(&lines, number, line) else { continue };
                let is_new = self.taken.get(number as usize).is_some_and(|taken| *taken != door.nonce);
                if door.listener == self.nonce && door.nonce != 0 && (is_new || mutant!("ring.accept_again")) {
                    let connection = self.admit(number, &door)?;
                    if connection.is_some() {
                        return Ok(connection);
                    }
                }
            }
        }
        Ok(None)
    }

    /// Answers a door. `None` when what it offers is not there: its process has given up since.
    fn admit(&mut self, number: u64, door: &Door) -> Result<Option<Connection>> {
        let own = Own::make(&self.rings, door.nonce, Side::Listener, None)?;
        let answer = ConnectAnswer { nonce: door.nonce, half: own.offset(), slots: own.slots(), ..ConnectAnswer::default() };
        let joined = own.join(Side::Listener, door.half, door.slots.into(), Peer::behind(number, door))?;
        let Ok(connection) = joined else { return Ok(None) };
        if let Some(taken) = self.taken.get_mut(number as usize) {
            *taken = door.nonce;
        }
        point!("ring.accepting");
        let (lines, place) = (self.rings.lines(), 1 + number);
        lines.publish_in(self.seal, place, self.block.offset + place * LINE_BYTES as u64, answer)?;
        point!("ring.accepted");
        Ok(Some(connection))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // A line that is left there must not pass for a listener's. What fails here fails for the next caller as well.
        let _ = self.rings.lines().memory().write_line(self.block.offset, &Line::ZERO);
        self.rings.lines().fence_published();
        let _ = self.rings.shared.allocator.free(self.block.offset);
    }
}
