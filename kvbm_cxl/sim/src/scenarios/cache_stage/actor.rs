// SPDX-License-Identifier: Apache-2.0
//! A process with a role: what its script can do, and how others direct it.

use super::super::cache_ledger::{Name, Shared, is_fenced};
use super::super::directed;
use super::{Board, JOINED_AGAIN, Marks, PLAYED, Player, REST_NS, SPOILED, Script, Shape};
use crate::{Env, Fault, Planned, SimHost, SimProcess, When};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{Cache, CacheConfig, Pinned, Presence, PublishRequest, Pulled, Reservation, Reserved};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::Host;
use cxl_pool::media::Descriptor;
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::rc::Rc;

/// A process with a role.
pub struct Actor {
    /// Its machine.
    pub env: Env,
    pub(super) role: usize,
    pub(super) host: Host,
    pub(super) cache: RefCell<Option<Cache>>,
    pub(super) board: Board,
    pub(super) ledger: Shared,
    pub(super) shape: Shape,
    pub(super) len_bytes: usize,
}

impl Actor {
    pub(super) fn perform(&self, script: &Script) -> Result<()> {
        let player = Player { host: self.env.host(), slot: self.host.slot(), incarnation: self.host.incarnation() };
        self.board.borrow_mut().players.insert(self.role, player);
        if self.generation() > 0 {
            self.env.memory().fence_all();
            self.env.point(JOINED_AGAIN);
        }
        let result = self.open().and_then(|()| self.wait(|marks| marks.players.len() == marks.roles)).and_then(|()| script(self));
        if self.end(result)? {
            self.env.point(PLAYED);
        }
        Ok(())
    }

    /// The end of a script: a fence of a host that was not meant to be fenced spoils the play, and true when none did.
    fn end(&self, result: Result<()>) -> Result<bool> {
        match result {
            Err(Error::Fenced { .. }) => {
                self.board.borrow_mut().spoiled = true;
                self.env.point(SPOILED);
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    fn open(&self) -> Result<()> {
        let config = CacheConfig {
            policy: PolicyKind::Lru,
            checksums: self.shape.checksums,
            low_water_percent: 0,
            high_water_percent: 0,
            lock_timeout_ms: Some(directed::LONG_MS),
            service_ms: 1,
            upkeep_ms: 1,
            remembered_keys: 64,
            copy: Some(CopyConfig { window_bytes: 4096, ..CopyConfig::alone() }),
            ..CacheConfig::default()
        };
        let cache = Cache::open(&self.host, config)?;
        self.ledger.borrow_mut().opened(self.env.process(), cache.look());
        *self.cache.borrow_mut() = Some(cache);
        Ok(())
    }

    /// The cache of this process.
    pub fn cache(&self) -> Cache {
        self.cache.borrow().clone().expect("a script runs once the cache is open")
    }

    /// The slot of its host.
    pub fn slot(&self) -> u16 {
        self.host.slot()
    }

    /// How often this role's process was started before.
    pub fn generation(&self) -> u32 {
        self.env.generation()
    }

    fn wait(&self, is_so: impl Fn(&Marks) -> bool) -> Result<()> {
        loop {
            {
                let marks = self.board.borrow();
                if is_so(&marks) {
                    return Ok(());
                }
                if marks.spoiled {
                    return Err(Error::Fenced { slot: self.host.slot(), incarnation: self.host.incarnation() });
                }
            }
            self.env.platform().sleep_ns(REST_NS);
        }
    }

    /// Tells all threads. What this thread wrote before is in the memory when others hear it.
    pub fn say(&self, cue: &'static str) {
        self.env.memory().fence_all();
        self.env.note(cue);
        self.board.borrow_mut().cues.insert(cue);
    }

    /// Starts another thread of this process with a script of its own.
    pub fn beside(&self, name: &str, script: impl FnOnce(&Actor) -> Result<()> + 'static) {
        let (host, cache) = (self.host.clone(), RefCell::new(Some(self.cache())));
        let (role, board, ledger) = (self.role, Rc::clone(&self.board), Rc::clone(&self.ledger));
        let (shape, len_bytes) = (self.shape, self.len_bytes);
        self.env.spawn(name, move |env| {
            let sibling = Actor { env, role, host, cache, board, ledger, shape, len_bytes };
            sibling.end(script(&sibling)).map(drop)
        });
    }

    /// Waits for a cue.
    pub fn hear(&self, cue: &'static str) -> Result<()> {
        self.hear_one_of(&[cue])
    }

    /// Whether a cue was said.
    pub fn has_heard(&self, cue: &'static str) -> bool {
        self.board.borrow().cues.contains(cue)
    }

    /// Waits for any of the cues.
    pub fn hear_one_of(&self, cues: &[&str]) -> Result<()> {
        self.wait(|marks| cues.iter().any(|cue| marks.cues.contains(cue)))
    }

    /// This thread stands still at its next visit to the point, until [`Actor::let_go`].
    pub fn stop_at(&self, point: &'static str) {
        self.stop_role_at(self.role, self.env.host(), point);
    }

    /// The thread of a role's host that comes to the point next stands still there, until [`Actor::let_go`].
    pub fn stop_other_at(&self, role: usize, point: &'static str) {
        self.stop_role_at(role, self.player(role).host, point);
    }

    fn stop_role_at(&self, role: usize, host: SimHost, point: &'static str) {
        let visit = 1 + self.env.view(|view| view.visits_by(host, point));
        self.board.borrow_mut().stops.insert(role, (point, visit));
        let fault = Fault::PauseThread { for_ns: u64::MAX };
        self.env.plan(Planned { when: When::Point(point, visit), host: Some(host), fault });
    }

    /// This process dies at its host's next visit to the point.
    pub fn die_at(&self, point: &'static str) {
        let host = self.env.host();
        let visit = 1 + self.env.view(|view| view.visits_by(host, point));
        let fault = Fault::CrashProcess { restart_after_ns: None };
        self.env.plan(Planned { when: When::Point(point, visit), host: Some(host), fault });
    }

    /// Waits until a role has come to the point at which it stops.
    pub fn await_stop(&self, role: usize) -> Result<()> {
        self.wait(|marks| {
            let (Some(player), Some((point, visit))) = (marks.players.get(&role), marks.stops.get(&role)) else { return false };
            self.env.view(|view| view.visits_by(player.host, point)) >= *visit
        })
    }

    /// A stopped role resumes.
    pub fn let_go(&self, role: usize) {
        let host = self.player(role).host;
        self.board.borrow_mut().stops.remove(&role);
        self.env.note(format!("role {role} resumes"));
        self.env.resume(host);
    }

    fn player(&self, role: usize) -> Player {
        *self.board.borrow().players.get(&role).expect("every role is cast before the play begins")
    }

    /// Keeps the service of a role's host from running until the manager has fenced it; its other threads continue.
    pub fn fence(&self, role: usize) -> Result<()> {
        let Player { host, slot, incarnation, .. } = self.player(role);
        self.board.borrow_mut().silent.insert(host);
        self.wait(|_| self.env.view(|view| is_fenced(view, slot, incarnation)))
    }

    /// Keeps the service of this role's host from running.
    pub fn fall_silent(&self) {
        self.board.borrow_mut().silent.insert(self.env.host());
    }

    /// Ends this process's part in the pool.
    pub fn leave(&self) -> Result<()> {
        if let Some(cache) = self.cache.borrow_mut().take() {
            cache.close()?;
        }
        self.host.leave()
    }

    /// Waits until a process of this role's host has ended.
    pub fn await_death(&self, process: SimProcess) -> Result<()> {
        self.wait(|_| !self.env.view(|view| view.is_alive(process)))
    }

    /// The service of a role's host runs again, so that a fenced one joins again.
    pub fn revive(&self, role: usize) {
        let host = self.player(role).host;
        self.board.borrow_mut().silent.remove(&host);
    }

    /// As [`Actor::let_go`] for a host that is fenced; a while later its service runs again and notices, if nothing else has.
    pub fn let_go_and_notice(&self, role: usize) {
        self.let_go(role);
        self.env.platform().sleep_ns(20_000_000);
        self.revive(role);
    }

    /// Kills the process of a role, which starts again after some time or never, and waits until its host is fenced.
    pub fn kill(&self, role: usize, restart_after_ns: Option<u64>) -> Result<()> {
        let Player { host, slot, incarnation, .. } = self.player(role);
        self.board.borrow_mut().stops.remove(&role);
        self.env.inflict(host, Fault::CrashProcess { restart_after_ns });
        if restart_after_ns.is_none() {
            self.wait(|_| self.env.view(|view| is_fenced(view, slot, incarnation)))?;
        }
        Ok(())
    }

    /// States as an operator that a role's host is gone for good, and waits until that is known.
    pub fn bury(&self, role: usize) -> Result<()> {
        let Player { slot, incarnation, .. } = self.player(role);
        self.host.declare_dead(slot, incarnation)?;
        while !self.host.is_proven_dead(slot, incarnation)? {
            self.env.platform().sleep_ns(REST_NS);
        }
        Ok(())
    }

    /// Turns what cannot be unless the choreography is wrong into an error that no mutant counts as.
    pub fn expect(&self, is_so: bool, what: &str) -> Result<()> {
        if is_so { Ok(()) } else { Err(Error::Invalid(format!("the play went another way: {what}"))) }
    }

    /// Runs the upkeep until this process has the chunk.
    pub fn adopt(&self) -> Result<()> {
        let cache = self.cache();
        while cache.usage().owned == 0 {
            self.wait(|_| true)?;
            cache.service_round()?;
            self.env.platform().sleep_ns(1_000_000);
        }
        Ok(())
    }

    /// Runs the upkeep a few times.
    pub fn upkeep(&self, rounds: usize) -> Result<()> {
        for _ in 0..rounds {
            self.cache().service_round()?;
            self.env.platform().sleep_ns(2_000_000);
        }
        Ok(())
    }

    /// Reserves a cell for a new publication of a block; `None` when there is no cell.
    pub fn reserve(&self, name: Name) -> Result<Option<Draft<'_>>> {
        self.reserve_by(name, |request| self.cache().reserve(request))
    }

    /// As [`Actor::reserve`], where the hint table may have no place for the block: `None` then as well.
    pub fn reserve_unless_refused(&self, name: Name) -> Result<Option<Draft<'_>>> {
        self.reserve_by(name, |request| {
            Ok(match self.cache().reserve(request)? {
                Reserved::NoHint => Reserved::NoCell,
                answer => answer,
            })
        })
    }

    /// As [`Actor::reserve`], with the call for several blocks.
    pub fn reserve_in_batch(&self, name: Name) -> Result<Option<Draft<'_>>> {
        self.reserve_by(name, |request| Ok(self.cache().reserve_all(&[*request])?.pop().unwrap_or(Reserved::NoCell)))
    }

    fn reserve_by(&self, name: Name, reserve: impl FnOnce(&PublishRequest) -> Result<Reserved>) -> Result<Option<Draft<'_>>> {
        let (number, bytes) = self.ledger.borrow_mut().publication(name, self.len_bytes);
        let request = PublishRequest { namespace: name.namespace(), key: name.key(), parent: None, len_bytes: bytes.len() as u64 };
        match reserve(&request)? {
            Reserved::Cell(reservation) => {
                if self.shape.watch.one_writer {
                    self.ledger.borrow_mut().writes(&self.env, reservation.cell(), name);
                }
                Ok(Some(Draft { actor: self, reservation, number, bytes }))
            }
            Reserved::NoCell => Ok(None),
            _ => Err(Error::Invalid(format!("the play went another way: {name:?} is there already"))),
        }
    }

    /// Bytes of a new version of a block, which others may see from here on: for calls that reserve and commit by themselves.
    pub fn draw_up(&self, name: Name) -> Rc<[u8]> {
        let mut ledger = self.ledger.borrow_mut();
        let (number, bytes) = ledger.publication(name, self.len_bytes);
        ledger.commits(number);
        bytes
    }

    /// Checks P1 of bytes that a call gave as those of a block.
    pub fn accepted(&self, name: Name, bytes: &[u8], how: &str) {
        self.ledger.borrow_mut().accepted(&self.env, name, bytes, how);
    }

    /// Bytes of a block.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Publishes a new version of a block.
    pub fn publish(&self, name: Name) -> Result<()> {
        let draft = self.reserve(name)?;
        self.expect(draft.is_some(), "there is a cell")?;
        draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))
    }

    /// Evicts a block of this process; false when a host has pinned it.
    pub fn evict(&self, name: Name) -> Result<bool> {
        self.cache().evict(name.namespace(), name.key())
    }

    /// Pulls a block, and checks P1.
    pub fn pull(&self, name: Name) -> Result<Pulled> {
        let mut buffer = vec![0; self.len_bytes];
        let pulled = self.cache().pull(name.namespace(), name.key(), &mut buffer)?;
        if let Pulled::Hit { len_bytes } = pulled {
            self.ledger.borrow_mut().accepted(&self.env, name, &buffer[..len_bytes as usize], "pull");
        }
        Ok(pulled)
    }

    /// Copies the block of this process that is next to go, without a pin, and checks P1.
    pub fn copy_coldest(&self, name: Name) -> Result<Pulled> {
        let found = self.cache().coldest(1);
        self.expect(found.first().is_some_and(|block| block.key() == name.key()), "the block is next to go")?;
        let mut buffer = vec![0; self.len_bytes];
        let copied = self.cache().copy_cold(&found[0], &mut buffer)?;
        if let Pulled::Hit { len_bytes } = copied {
            self.ledger.borrow_mut().accepted(&self.env, name, &buffer[..len_bytes as usize], "copy of a cold block");
        }
        Ok(copied)
    }

    /// Whether a block can be pulled now. Checks P1.
    pub fn has(&self, name: Name) -> Result<bool> {
        Ok(matches!(self.pull(name)?, Pulled::Hit { .. }))
    }

    /// The state of a block as seen without a pin.
    pub fn presence(&self, name: Name) -> Result<Presence> {
        Ok(self.cache().presence(name.namespace(), &[name.key()])?.pop().unwrap_or(Presence::Absent))
    }

    /// P5, in a play without faults: each of these blocks is READY, and found through its hint.
    pub fn all_reachable(&self, names: &[Name]) -> Result<()> {
        let look = self.cache().look();
        for name in names {
            let hinted = look.hinted(&self.env.lines(), name.namespace(), name.key())?;
            let holds = |cell: &u64| {
                let found: Result<Descriptor> = self.env.lines().fetch(*cell);
                found.is_ok_and(|found| (found.state, found.key) == (Descriptor::READY, name.key().0))
            };
            if !hinted.iter().any(holds) {
                self.env.fail(format!("P5: {name:?} was stored and not evicted, but a probe finds {hinted:?}"));
            }
        }
        Ok(())
    }

    /// P5, in a play without faults: this block is there, and a lookup finds it.
    pub fn must_find(&self, name: Name) -> Result<()> {
        let chain = self.cache().lookup_chain(name.namespace(), &[name.key()])?;
        if self.cache().lookup(name.namespace(), name.key())?.is_none() || chain.is_empty() {
            self.env.fail(format!("P5: {name:?} was stored and not evicted, but a lookup does not find it"));
        }
        Ok(())
    }

    /// Pins a block, and watches it from then on; `None` when that is a miss.
    pub fn pin(&self, name: Name) -> Result<Option<Hold<'_>>> {
        Ok(self.cache().pin(name.namespace(), name.key())?.ok().map(|pinned| self.hold(name, pinned)))
    }

    /// As [`Actor::pin`], with the call for several blocks.
    pub fn pin_in_chain(&self, name: Name) -> Result<Option<Hold<'_>>> {
        Ok(self.cache().pin_chain(name.namespace(), &[name.key()])?.pop().map(|pinned| self.hold(name, pinned)))
    }

    fn hold(&self, name: Name, pinned: Pinned) -> Hold<'_> {
        let (cell, offset, len_bytes) = (pinned.cell(), pinned.offset(), pinned.len_bytes());
        let (slot, incarnation) = (self.host.slot(), self.host.incarnation());
        let watched = self.shape.watch.pins_hold;
        let mut ledger = self.ledger.borrow_mut();
        let ticket = if watched { ledger.pinned(&self.env, name, cell, offset, len_bytes, slot, incarnation) } else { 0 };
        drop(ledger);
        Hold { actor: self, name, pinned, ticket }
    }
}

/// A block that is being filled.
pub struct Draft<'a> {
    actor: &'a Actor,
    /// The reservation.
    pub reservation: Reservation,
    number: usize,
    /// Its expected content.
    pub bytes: Rc<[u8]>,
}

impl Draft<'_> {
    /// Fills it.
    pub fn fill(&mut self) -> Result<()> {
        self.reservation.fill([&self.bytes[..]])
    }

    /// Fills it with plain stores, which stay in the cache.
    pub fn store_in_place(&self) -> Result<()> {
        self.reservation.address();
        self.actor.env.store(self.reservation.offset(), &self.bytes)
    }

    /// Makes it visible.
    pub fn commit(self) -> Result<()> {
        let mut ledger = self.actor.ledger.borrow_mut();
        ledger.wrote(&self.actor.env, self.reservation.cell());
        ledger.commits(self.number);
        drop(ledger);
        self.reservation.commit()
    }

    /// Gives the cell up.
    pub fn abort(self) -> Result<()> {
        self.actor.ledger.borrow_mut().wrote(&self.actor.env, self.reservation.cell());
        self.reservation.abort()
    }
}

/// A block that this process has pinned.
pub struct Hold<'a> {
    actor: &'a Actor,
    name: Name,
    pinned: Pinned,
    ticket: u64,
}

impl Hold<'_> {
    /// Copies the block out, and checks P1; false when that is a miss.
    pub fn read(&self) -> Result<bool> {
        let mut buffer = vec![0; self.pinned.len_bytes() as usize];
        let verdict = self.pinned.copy_to(&mut buffer)?;
        if verdict.is_none() {
            self.actor.ledger.borrow_mut().accepted(&self.actor.env, self.name, &buffer, "copy of a pinned block");
        }
        Ok(verdict.is_none())
    }

    /// Gives the pin back.
    pub fn release(self) {
        self.actor.ledger.borrow_mut().unpins(self.ticket);
    }
}

/// Whether a result is a fence of this host; other errors are handed on.
pub fn is_refused<T>(result: Result<T>) -> Result<bool> {
    match result {
        Err(Error::Fenced { .. }) => Ok(true),
        other => other.map(|_| false),
    }
}
