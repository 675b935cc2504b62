// SPDX-License-Identifier: Apache-2.0
//! What a checker sees between two steps: the memory itself, the time, who is up. Looking changes nothing.

use crate::config::{SimHost, SimProcess};
use crate::engine::Engine;
use cxl_pool::line::Line;
use cxl_pool::media::{Layout, MediaLine};

/// An invariant; an error ends the run as failed.
pub(crate) type Checker = Box<dyn FnMut(&View<'_>) -> Result<(), String>>;

/// The world between two steps.
pub struct View<'e> {
    engine: &'e Engine,
}

impl<'e> View<'e> {
    pub(crate) fn new(engine: &'e Engine) -> Self {
        View { engine }
    }

    /// The pool's layout.
    pub fn layout(&self) -> &Layout {
        &self.engine.layout
    }

    /// What the memory holds at a pool offset; caches and pending writes do not count.
    pub fn line(&self, offset: u64) -> Line {
        Line(*self.engine.memory.raw((offset / 64) as u32))
    }

    /// What the memory holds as line `index` of `T`'s region. The checksum is not looked at.
    ///
    /// # Panics
    /// If there is no such line.
    pub fn peek<T: MediaLine>(&self, index: u64) -> T {
        let offset = self.engine.layout.line_offset(T::REGION, index).expect("a checker names lines that exist");
        bytemuck::cast(self.line(offset))
    }

    /// One bit for each host that ever changed the line in memory.
    pub fn writers(&self, offset: u64) -> u32 {
        self.engine.memory.writers((offset / 64) as u32)
    }

    /// Whether the host's cache holds a copy of the line that differs from the memory.
    pub fn is_stale(&self, host: SimHost, offset: u64) -> bool {
        self.engine.memory.is_stale(self.engine.hosts[host.0].machine, (offset / 64) as u32)
    }

    /// Steps so far.
    pub fn step(&self) -> u64 {
        self.engine.step
    }

    /// Global virtual time, which no host knows.
    pub fn now_ns(&self) -> u64 {
        self.engine.now_ns
    }

    /// Whether the machine is up (paused ones are).
    pub fn is_up(&self, host: SimHost) -> bool {
        self.engine.is_live_host(host)
    }

    /// Whether a process runs (paused ones do).
    pub fn is_alive(&self, process: SimProcess) -> bool {
        self.engine.processes.get(process.0).is_some_and(|process| process.is_alive)
    }

    /// How often a named point was visited, by all hosts together.
    pub fn visits(&self, point: &str) -> u64 {
        self.engine.points.get(point).copied().unwrap_or(0)
    }

    /// How often a host visited a named point.
    pub fn visits_by(&self, host: SimHost, point: &'static str) -> u64 {
        self.engine.host_points.get(&(host.0, point)).copied().unwrap_or(0)
    }
}
