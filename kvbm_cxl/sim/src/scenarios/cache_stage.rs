// SPDX-License-Identifier: Apache-2.0
//! A stage for choreographies of the prefix cache: a few hosts, each with a script; a thread can be stopped at a named point, its host be
//! taken for dead, and the thread let go again.
//!
//! Host [`WARDEN`] is the manager and directs: it waits until a thread has stopped, keeps the service of that thread's host from running
//! until the host is fenced, tells the others to go on, and lets the zombie go. What the scripts publish, pull and pin is checked as in the
//! scenario by chance ([`super::cache_ledger`]).

use super::cache_ledger::{Ledger, Name, Shared, is_fenced};
use super::directed;
use super::setup::{Cluster, join_over};
use crate::{Chances, Env, Failure, Fault, Planned, Random, SimHost, SimProcess, Stats, When};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{Cache, CacheConfig, Pinned, Pulled, Reservation, Reserved, Wish};
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::Host;
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::CellClass;
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

/// The role that directs: the manager's host.
pub const WARDEN: usize = 0;
/// Where a thread has read the first half of a block.
pub const HALF_READ: &str = "scene.half_read";
/// Where a thread has written the first half of a block.
pub const HALF_WRITTEN: &str = "scene.half_written";
/// Visited by each script that came to its end.
pub const PLAYED: &str = "scene.played";

/// Rest between two looks at the board, in nanoseconds.
const REST_NS: u64 = 100_000;

/// Which rules the play watches; a choreography that is about one of them leaves out those that would fail first.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// INV, between any two steps.
    pub ready_is_whole: bool,
    /// P2, between any two steps.
    pub pins_hold: bool,
    /// P3: one writer per cell, and no cell in two lists.
    pub one_writer: bool,
}

impl Watch {
    /// All of them.
    pub const ALL: Watch = Watch { ready_is_whole: true, pins_hold: true, one_writer: true };
    /// None: only what pulls return counts.
    pub const PULLS: Watch = Watch { ready_is_whole: false, pins_hold: false, one_writer: false };
    /// Only pins.
    pub const PINS: Watch = Watch { pins_hold: true, ..Watch::PULLS };
}

/// What a play needs.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Hosts, the warden's included.
    pub hosts: usize,
    /// Cells of the only chunk.
    pub cells: u32,
    /// The host that becomes the manager once the warden's is gone.
    pub deputy: Option<usize>,
    /// Whether payload has checksums.
    pub checksums: bool,
    /// What is watched.
    pub watch: Watch,
}

impl Shape {
    /// So many hosts over one chunk of one cell.
    pub fn of(hosts: usize) -> Self {
        Shape { hosts, cells: 1, deputy: None, checksums: false, watch: Watch::ALL }
    }
}

/// Who plays a role.
#[derive(Clone, Copy)]
struct Player {
    host: SimHost,
    process: SimProcess,
    slot: u16,
    incarnation: u32,
}

#[derive(Default)]
struct Marks {
    cues: BTreeSet<&'static str>,
    silent: BTreeSet<SimHost>,
    players: BTreeMap<usize, Player>,
    /// The point at which a role stops, and which of its host's visits that is.
    stops: BTreeMap<usize, (&'static str, u64)>,
    roles: usize,
    /// A host was fenced that the play wants alive: nothing is learned from this run.
    spoiled: bool,
}

/// What the scripts tell each other, outside of the pool.
#[derive(Clone, Default)]
pub struct Board(Rc<RefCell<Marks>>);

impl Board {
    fn borrow(&self) -> std::cell::Ref<'_, Marks> {
        self.0.borrow()
    }

    fn borrow_mut(&self) -> std::cell::RefMut<'_, Marks> {
        self.0.borrow_mut()
    }

    /// As [`Actor::say`], for other threads.
    pub fn say(&self, env: &Env, cue: &'static str) {
        env.memory().fence_all();
        env.note(cue);
        self.borrow_mut().cues.insert(cue);
    }

    /// Waits until one of the cues was given; false when the play is spoiled.
    pub fn hear(&self, env: &Env, cue: &'static str) -> bool {
        loop {
            if self.borrow().cues.contains(cue) || self.borrow().spoiled {
                return self.borrow().cues.contains(cue);
            }
            env.platform().sleep_ns(REST_NS);
        }
    }
}

type Script = Rc<dyn Fn(&Actor) -> Result<()>>;

/// The stage.
pub struct Stage {
    cluster: Cluster,
    shape: Shape,
    board: Board,
    ledger: Shared,
    len_bytes: usize,
}

impl Stage {
    /// Sets the stage; the seed decides schedules, caches, the length of blocks and how lines are written.
    pub fn new(seed: u64, shape: Shape) -> Self {
        let mut len_bytes = 0;
        let mut cluster = Cluster::new(seed, shape.hosts, shape.hosts, |config, random| {
            config.write_path = directed::write_path(seed);
            let geometry = &mut config.geometry;
            (geometry.seats, geometry.locks, geometry.objects) = (1 + u32::from(shape.deputy.is_some()), 12, 1);
            (geometry.stripes, geometry.cells_per_chunk) = (1, shape.cells);
            geometry.cells[0] = CellClass { cell_bytes: 256, chunks: 1 };
            len_bytes = random.pick(&[256, 200, 192, 130]);
            config.chances = Chances::default();
            config.max_steps = 1_500_000;
            config.max_time_ns = 4_000_000_000;
        });
        let seated = std::iter::once(WARDEN).chain(shape.deputy);
        cluster.host_config.seats = seated.map(|host| cluster.world.machine_id(cluster.hosts[host])).collect();
        cluster.host_config.suspect_ms = 20;
        cluster.host_config.poll_us = 500;
        cluster.host_config.idle_release_ms = 500;
        let ledger: Shared = Rc::new(RefCell::new(Ledger::default()));
        let (watched, lines) = (Rc::clone(&ledger), cluster.world.inspector());
        cluster.world.check_always(move |view| {
            let mut ledger = watched.borrow_mut();
            if shape.watch.pins_hold {
                ledger.pins_hold(view, &lines)?;
            }
            if shape.watch.ready_is_whole {
                ledger.ready_is_whole(view, &lines)?;
            }
            if shape.watch.one_writer { ledger.one_owner(view) } else { Ok(()) }
        });
        Stage { cluster, shape, board: Board::default(), ledger, len_bytes }
    }

    /// For choices before the play.
    pub fn random(&mut self) -> &mut Random {
        &mut self.cluster.random
    }

    /// Gives a role to a process of the host of the same number.
    pub fn role(&mut self, role: usize, script: impl Fn(&Actor) -> Result<()> + 'static) {
        self.role_on(role, role, script);
    }

    /// Gives a role to a process of a host.
    pub fn role_on(&mut self, role: usize, host: usize, script: impl Fn(&Actor) -> Result<()> + 'static) {
        let script: Script = Rc::new(script);
        let (board, ledger) = (self.board.clone(), Rc::clone(&self.ledger));
        let (config, shape, len_bytes) = (self.cluster.host_config.clone(), self.shape, self.len_bytes);
        board.borrow_mut().roles += 1;
        self.cluster.world.start(self.cluster.hosts[host], move |env| {
            let (board, ledger, script, config) = (board.clone(), Rc::clone(&ledger), Rc::clone(&script), config.clone());
            env.spawn("main", move |env| {
                let silent = board.clone();
                let on = env.host();
                let memory = Arc::new(Halting { memory: env.memory(), env: env.clone() });
                let lines = Lines::new(memory, env.lines().layout().clone(), &crate::POOL_UUID);
                let host = join_over(&env, lines, &config, move || silent.borrow().silent.contains(&on))?;
                let actor = Actor { env, role, host, cache: RefCell::new(None), board, ledger, shape, len_bytes };
                actor.perform(&script)
            });
        });
    }

    /// Plays.
    pub fn run(mut self) -> std::result::Result<Stats, Failure> {
        self.cluster.world.run()
    }
}

/// A process with a role.
pub struct Actor {
    /// Its machine.
    pub env: Env,
    role: usize,
    host: Host,
    cache: RefCell<Option<Cache>>,
    board: Board,
    ledger: Shared,
    shape: Shape,
    len_bytes: usize,
}

impl Actor {
    fn perform(&self, script: &Script) -> Result<()> {
        let player =
            Player { host: self.env.host(), process: self.env.process(), slot: self.host.slot(), incarnation: self.host.incarnation() };
        self.board.borrow_mut().players.insert(self.role, player);
        let result = self.open().and_then(|()| self.wait(|marks| marks.players.len() == marks.roles)).and_then(|()| script(self));
        match result {
            Err(Error::Fenced { .. }) => {
                self.env.note("the play is spoiled: this host was not meant to be fenced");
                self.board.borrow_mut().spoiled = true;
            }
            Ok(()) => self.env.point(PLAYED),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn open(&self) -> Result<()> {
        let config = CacheConfig {
            policy: PolicyKind::Lru,
            checksums: self.shape.checksums,
            low_water_percent: 0,
            high_water_percent: 0,
            lock_timeout_ms: directed::LONG_MS,
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

    /// Tells everybody. What this thread wrote before is in the memory when others hear it.
    pub fn say(&self, cue: &'static str) {
        self.board.say(&self.env, cue);
    }

    /// For other threads of this process.
    pub fn board(&self) -> Board {
        self.board.clone()
    }

    /// Waits for a cue.
    pub fn hear(&self, cue: &'static str) -> Result<()> {
        self.hear_one_of(&[cue])
    }

    /// Waits for any of the cues.
    pub fn hear_one_of(&self, cues: &[&str]) -> Result<()> {
        self.wait(|marks| cues.iter().any(|cue| marks.cues.contains(cue)))
    }

    /// Whether somebody has said it.
    pub fn was_said(&self, cue: &'static str) -> bool {
        self.board.borrow().cues.contains(cue)
    }

    /// This thread stands still at its next visit to the point, until [`Actor::let_go`].
    pub fn stop_at(&self, point: &'static str) {
        let visit = 1 + self.env.view(|view| view.visits_by(self.env.host(), point));
        self.board.borrow_mut().stops.insert(self.role, (point, visit));
        let fault = Fault::PauseThread { for_ns: u64::MAX };
        self.env.plan(Planned { when: When::Point(point, visit), host: Some(self.env.host()), fault });
    }

    /// Waits until a role has come to the point at which it stops. False when it says `otherwise` instead.
    pub fn await_stop(&self, role: usize, otherwise: Option<&'static str>) -> Result<bool> {
        let stopped = |marks: &Marks| {
            let (Some(player), Some((point, visit))) = (marks.players.get(&role), marks.stops.get(&role)) else { return false };
            self.env.view(|view| view.visits_by(player.host, point)) >= *visit
        };
        self.wait(|marks| stopped(marks) || otherwise.is_some_and(|cue| marks.cues.contains(cue)))?;
        Ok(stopped(&self.board.borrow()))
    }

    /// A role that stands still goes on.
    pub fn let_go(&self, role: usize) {
        let host = self.player(role).host;
        self.board.borrow_mut().stops.remove(&role);
        self.env.note(format!("role {role} goes on"));
        self.env.resume(host);
    }

    fn player(&self, role: usize) -> Player {
        *self.board.borrow().players.get(&role).expect("every role is cast before the play begins")
    }

    /// Keeps the service of a role's host from running until the manager has fenced it; its other threads go on.
    pub fn fence(&self, role: usize) -> Result<()> {
        let Player { host, slot, incarnation, .. } = self.player(role);
        self.board.borrow_mut().silent.insert(host);
        self.wait(|_| self.env.view(|view| is_fenced(view, slot, incarnation)))
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
        let (number, bytes) = self.ledger.borrow_mut().publication(name, self.len_bytes);
        let wish = Wish { namespace: name.namespace(), key: name.key(), parent: None, len_bytes: bytes.len() as u64 };
        match self.cache().reserve(&wish)? {
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

    /// Publishes a new version of a block.
    pub fn publish(&self, name: Name) -> Result<()> {
        let draft = self.reserve(name)?;
        self.expect(draft.is_some(), "there is a cell")?;
        draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))
    }

    /// Evicts a block of this process; false when somebody has pinned it.
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

    /// Pins a block, and watches it from then on; `None` when that is a miss.
    pub fn pin(&self, name: Name) -> Result<Option<Hold<'_>>> {
        let Ok(pinned) = self.cache().pin(name.namespace(), name.key())? else { return Ok(None) };
        let (cell, offset, len_bytes) = (pinned.cell(), pinned.offset(), pinned.len_bytes());
        let (slot, incarnation) = (self.host.slot(), self.host.incarnation());
        let watched = self.shape.watch.pins_hold;
        let mut ledger = self.ledger.borrow_mut();
        let ticket = if watched { ledger.pinned(&self.env, name, cell, offset, len_bytes, slot, incarnation) } else { 0 };
        drop(ledger);
        Ok(Some(Hold { actor: self, name, pinned, ticket }))
    }
}

/// A block that is being filled.
pub struct Draft<'a> {
    actor: &'a Actor,
    /// The reservation.
    pub reservation: Reservation,
    number: usize,
    /// What is to be in it.
    pub bytes: Rc<[u8]>,
}

impl Draft<'_> {
    /// Fills it.
    pub fn fill(&mut self) -> Result<()> {
        self.reservation.fill([&self.bytes[..]])
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

/// Memory whose copies of a block pass a point in the middle, where a choreography can stop them.
struct Halting {
    memory: Arc<dyn Coherence>,
    env: Env,
}

impl Halting {
    /// Bytes of the first half of a copy: whole lines.
    fn half(len_bytes: usize) -> usize {
        (len_bytes / 2).next_multiple_of(64).min(len_bytes)
    }
}

impl Coherence for Halting {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.memory.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.memory.write_line(offset, line)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.memory.flush_line(offset)
    }

    fn fence_stores(&self) {
        self.memory.fence_stores();
    }

    fn fence_all(&self) {
        self.memory.fence_all();
    }

    fn fence_loads(&self) {
        self.memory.fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.memory.flush_range(offset, len_bytes)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        let (first, second) = source.split_at(Self::half(source.len()));
        self.memory.copy_in(offset, first)?;
        self.env.point(HALF_WRITTEN);
        self.memory.copy_in(offset + first.len() as u64, second)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let (first, second) = destination.split_at_mut(Self::half(destination.len()));
        self.memory.copy_out(offset, first)?;
        self.env.point(HALF_READ);
        self.memory.copy_out(offset + first.len() as u64, second)
    }

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.memory.address(offset, len_bytes)
    }
}
