// SPDX-License-Identifier: Apache-2.0
//! A stage for choreographies of the prefix cache: a few hosts, each with a script; a thread can be stopped at a named point, its host be
//! taken for dead, and the thread let go again.
//!
//! Host [`WARDEN`] is the manager and directs: it waits until a thread has stopped, keeps the service of that thread's host from running
//! until the host is fenced, tells the others to continue, and releases the zombie. What the scripts publish, pull and pin is checked as in
//! the scenario by chance ([`super::cache_ledger`]).

mod actor;
pub(super) mod halting;

pub use actor::{Actor, Draft, Hold, is_refused};

use super::cache_ledger::{Ledger, Shared};
use super::directed;
use super::setup::{Cluster, join_over};
use crate::{Chances, Failure, Random, SimHost, Stats};
use cxl_pool::Result;
use cxl_pool::line::Lines;
use cxl_pool::media::CellClass;
use halting::Halting;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// The role that directs: the manager's host.
pub const WARDEN: usize = 0;
/// Where a thread has read the first half of a block.
pub const HALF_READ: &str = "scene.half_read";
/// Where a thread has written the first half of a block.
pub const HALF_WRITTEN: &str = "scene.half_written";
/// Where a process that was started again has joined, and has not opened its cache.
pub const JOINED_AGAIN: &str = "scene.joined_again";
/// Visited by each script that came to its end.
pub const PLAYED: &str = "scene.played";
/// Visited by each script that found its host fenced by chance.
pub const SPOILED: &str = "scene.spoiled";

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
    /// Cells of a chunk.
    pub cells: u32,
    /// Bytes of a cell.
    pub cell_bytes: u64,
    /// Chunks.
    pub chunks: u64,
    /// The host that becomes the manager once the warden's is gone.
    pub deputy: Option<usize>,
    /// Whether payload has checksums.
    pub checksums: bool,
    /// The observed state.
    pub watch: Watch,
}

impl Shape {
    /// So many hosts over one chunk of one cell.
    pub fn of(hosts: usize) -> Self {
        Shape { hosts, cells: 1, cell_bytes: 256, chunks: 1, deputy: None, checksums: false, watch: Watch::ALL }
    }
}

/// Who plays a role.
#[derive(Clone, Copy)]
struct Player {
    host: SimHost,
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
type Board = Rc<RefCell<Marks>>;

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
            geometry.cells[0] = CellClass { cell_bytes: shape.cell_bytes, chunks: shape.chunks };
            len_bytes = shape.cell_bytes as usize - random.pick(&[0, 56, 64, 126]);
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
        let (board, ledger) = (Rc::clone(&self.board), Rc::clone(&self.ledger));
        let (config, shape, len_bytes) = (self.cluster.host_config.clone(), self.shape, self.len_bytes);
        board.borrow_mut().roles += 1;
        self.cluster.world.start(self.cluster.hosts[host], move |env| {
            let (board, ledger, script, config) = (Rc::clone(&board), Rc::clone(&ledger), Rc::clone(&script), config.clone());
            env.spawn("main", move |env| {
                let silent = Rc::clone(&board);
                let on = env.host();
                let memory = Arc::new(Halting { memory: env.memory(), env: env.clone() });
                let lines = Lines::new(memory, env.lines().layout().clone(), &crate::POOL_UUID, crate::POOL_INCARNATION);
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
