// SPDX-License-Identifier: Apache-2.0
//! The state of the one world of this OS thread, and the step that every call of a simulated host goes through.
//!
//! The handles that the production code holds (memory, platform) carry numbers only; the state lies in a thread-local. It is borrowed
//! for the length of one effect and never across a switch.

use crate::config::{Mood, Planned, Schedule, SimHost, WorldConfig};
use crate::machine::{Host, Process};
use crate::memory::Memory;
use crate::random::Random;
use crate::trace::{Event, Op, Trace};
use crate::view::{Checker, View};
use corosensei::Yielder;
use cxl_pool::media::Layout;
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a new thread runs.
pub(crate) type Body = Box<dyn FnOnce() -> Result<()>>;

/// Why a thread does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Nothing,
    Until(u64),
    Parked { word: usize, until: u64 },
}

impl Wait {
    /// The moment at which the thread is due by itself.
    pub(crate) fn due_ns(self) -> u64 {
        match self {
            Wait::Nothing => 0,
            Wait::Until(due) | Wait::Parked { until: due, .. } => due,
        }
    }
}

/// One coroutine.
pub(crate) struct Thread {
    pub(crate) name: String,
    pub(crate) host: usize,
    pub(crate) process: usize,
    pub(crate) daemon: bool,
    pub(crate) wait: Wait,
    pub(crate) paused_until: u64,
    pub(crate) done: bool,
    /// Rank under [`Schedule::Priorities`]: the highest runs.
    pub(crate) priority: i64,
    /// Weight under [`Schedule::Weighted`].
    pub(crate) weight: u32,
    /// Steps since it was last switched to.
    pub(crate) streak: u32,
}

/// What the scheduler does next.
pub(crate) enum Next {
    /// Runs a thread.
    Run(usize),
    /// Starts processes again.
    Restart,
    /// Ends the run.
    End,
}

/// Why a run ended before its end.
#[derive(Debug)]
pub(crate) struct Stop(pub(crate) String);

/// The world.
pub(crate) struct Engine {
    pub(crate) seed: u64,
    pub(crate) random: Random,
    pub(crate) config: WorldConfig,
    pub(crate) mood: Mood,
    pub(crate) layout: Arc<Layout>,
    pub(crate) memory: Memory,
    pub(crate) hosts: Vec<Host>,
    pub(crate) processes: Vec<Process>,
    pub(crate) threads: Vec<Thread>,
    /// Threads that are not done.
    pub(crate) live: Vec<usize>,
    /// Threads whose coroutine does not exist yet.
    pub(crate) newborn: Vec<(usize, Body)>,
    /// Threads that died with their host and wait to be unwound.
    pub(crate) doomed: Vec<usize>,
    pub(crate) current: Option<usize>,
    pub(crate) step: u64,
    pub(crate) now_ns: u64,
    pub(crate) stop: Option<Stop>,
    pub(crate) plan: Vec<Planned>,
    pub(crate) restarts: Vec<(u64, usize)>,
    pub(crate) crashes: u64,
    pub(crate) pauses: u64,
    pub(crate) switches: u64,
    pub(crate) points: BTreeMap<&'static str, u64>,
    pub(crate) host_points: BTreeMap<(usize, &'static str), u64>,
    pub(crate) checkers: Vec<Checker>,
    pub(crate) trace: Trace,
    next_planned_step: u64,
    lowest_priority: i64,
    heartbeat: Arc<AtomicU64>,
}

thread_local! {
    static ENGINE: RefCell<Option<Engine>> = const { RefCell::new(None) };
    static YIELDER: Cell<*const Yielder<(), ()>> = const { Cell::new(std::ptr::null()) };
    /// Counts the steps of this OS thread for a watchdog.
    static HEARTBEAT: Arc<AtomicU64> = Arc::new(AtomicU64::new(0));
}

/// The counter that moves with every step of this OS thread's worlds.
pub(crate) fn heartbeat() -> Arc<AtomicU64> {
    HEARTBEAT.with(Arc::clone)
}

/// Makes `engine` this OS thread's world.
pub(crate) fn install(engine: Engine) {
    ENGINE.with_borrow_mut(|place| {
        assert!(place.is_none(), "an OS thread has one world at a time: drop the other one first");
        *place = Some(engine);
    });
}

/// Takes this OS thread's world away.
pub(crate) fn uninstall() -> Option<Engine> {
    ENGINE.with_borrow_mut(Option::take)
}

/// Runs `effect` on the world.
pub(crate) fn with<R>(effect: impl FnOnce(&mut Engine) -> R) -> R {
    ENGINE.with_borrow_mut(|engine| effect(engine.as_mut().expect("a handle of a simulated host outlived its world")))
}

/// Runs `effect` on the world if there still is one: for destructors, which may come late.
pub(crate) fn with_if_any(effect: impl FnOnce(&mut Engine)) {
    // A panic while the world is borrowed unwinds through destructors as well; there is nothing left to keep right then.
    let _ = ENGINE.try_with(|engine| engine.try_borrow_mut().map(|mut engine| engine.as_mut().map(effect)).is_ok());
}

/// Hands control to the scheduler, which gives it back some time later, or never.
pub(crate) fn suspend() {
    let yielder = YIELDER.get();
    assert!(!yielder.is_null(), "only a simulated thread can wait");
    // SAFETY: `enter_coroutine` and the last line of this function see to it that this is the yielder of the coroutine that runs now;
    // it lies on that coroutine's stack, which exists for as long as the coroutine runs.
    unsafe { (*yielder).suspend(()) };
    YIELDER.set(yielder);
}

/// Called first thing in every coroutine.
pub(crate) fn enter_coroutine(yielder: &Yielder<(), ()>) {
    YIELDER.set(yielder);
}

/// The error of every call of a host that is no more, which only runs to be unwound.
pub(crate) fn gone() -> Error {
    Error::DeviceLost { device: "simulated: this host has crashed".into(), offset: 0, len_bytes: 0, cause: "its process is gone".into() }
}

/// Whether the code that runs is being unwound, after a crash or a failed assertion. It must neither wait nor touch anything.
pub(crate) fn unwinding() -> bool {
    std::thread::panicking() || DISCARDING.get()
}

thread_local! {
    static DISCARDING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Ends a simulated thread. One that never ran is only dropped, with all that its body has captured: that counts as unwinding as well.
pub(crate) fn discard<T>(end: impl FnOnce() -> T) -> T {
    let before = DISCARDING.replace(true);
    let ended = end();
    DISCARDING.set(before);
    ended
}

/// Whether a simulated thread runs on this OS thread now.
pub(crate) fn is_simulated() -> bool {
    ENGINE.try_with(|engine| engine.try_borrow().is_ok_and(|engine| engine.as_ref().is_some_and(|engine| engine.current.is_some())))
        == Ok(true)
}

/// Passes a scheduling point of the running thread, which must belong to `process`.
pub(crate) fn step(process: usize) -> Result<()> {
    if unwinding() {
        return Err(gone());
    }
    let switch = with(|engine| {
        let thread = engine.current.expect("only a simulated thread may use a simulated host");
        let owner = engine.threads[thread].process;
        assert!(owner == process, "thread {} of process {owner} uses a handle of process {process}", engine.threads[thread].name);
        engine.before_step(thread)
    });
    if switch {
        suspend();
    }
    Ok(())
}

/// Waits as `wait` says, then lets the scheduler choose.
pub(crate) fn wait(wait: Wait) {
    with(|engine| {
        let thread = engine.running();
        engine.threads[thread].wait = wait;
    });
    suspend();
}

impl Engine {
    pub(crate) fn new(seed: u64, config: WorldConfig, layout: Arc<Layout>) -> Self {
        let mut random = Random::new(seed);
        let mood = Mood::draw(&config, &mut random);
        let lines = (layout.data_offset() + layout.chunks() * layout.geometry().chunk_bytes).div_ceil(64);
        let trace = Trace::new(config.trace_events);
        Engine {
            seed,
            random,
            mood,
            memory: Memory::new(lines as usize),
            layout,
            config,
            hosts: Vec::new(),
            processes: Vec::new(),
            threads: Vec::new(),
            live: Vec::new(),
            newborn: Vec::new(),
            doomed: Vec::new(),
            current: None,
            step: 0,
            now_ns: 1,
            stop: None,
            plan: Vec::new(),
            restarts: Vec::new(),
            crashes: 0,
            pauses: 0,
            switches: 0,
            points: BTreeMap::new(),
            host_points: BTreeMap::new(),
            checkers: Vec::new(),
            trace,
            next_planned_step: u64::MAX,
            lowest_priority: 0,
            heartbeat: heartbeat(),
        }
    }

    /// The thread that runs.
    pub(crate) fn running(&self) -> usize {
        self.current.expect("only a simulated thread may use a simulated host")
    }

    pub(crate) fn record(&mut self, op: Op, what: u64, value: u64, note: Option<String>) {
        let thread = self.current.unwrap_or(usize::MAX);
        self.trace.push(Event { step: self.step, now_ns: self.now_ns, thread, op, what, value, note });
    }

    /// Name of a thread with its host, for people.
    pub(crate) fn thread_name(&self, thread: usize) -> String {
        match self.threads.get(thread) {
            Some(of) => format!("h{}.{}/{}", of.host, of.process, of.name),
            None => "world".into(),
        }
    }

    /// Ends the run as failed; the first reason counts.
    pub(crate) fn fail(&mut self, reason: String) {
        if self.stop.is_none() {
            self.stop = Some(Stop(reason));
        }
    }

    /// Adds a thread; its coroutine is made when the scheduler runs next.
    pub(crate) fn add_thread(&mut self, process: usize, name: &str, daemon: bool, body: Body) -> usize {
        let host = self.processes[process].host;
        let thread = self.threads.len();
        let priority = self.random.between(0, 1 << 20) as i64;
        let weight = if self.config.fair_schedule { 1 } else { self.random.pick(&[1, 8, 64, 64, 64]) };
        self.threads.push(Thread {
            name: name.into(),
            host,
            process,
            daemon,
            wait: Wait::Nothing,
            paused_until: 0,
            done: false,
            priority,
            weight,
            streak: 0,
        });
        self.memory.add_thread(self.hosts[host].machine);
        self.live.push(thread);
        self.newborn.push((thread, body));
        thread
    }

    pub(crate) fn add_plan(&mut self, planned: Planned) {
        self.plan.push(planned);
        self.note_plan();
    }

    pub(crate) fn note_plan(&mut self) {
        let steps = self.plan.iter().filter_map(|planned| match planned.when {
            crate::config::When::Step(step) => Some(step),
            crate::config::When::Point(..) => None,
        });
        self.next_planned_step = steps.min().unwrap_or(u64::MAX);
    }

    /// Whether a planned fault is due at this step.
    pub(crate) fn step_is_planned(&self) -> bool {
        self.step >= self.next_planned_step
    }

    /// Everything that can happen between two effects of a thread. True if the scheduler has to choose again.
    fn before_step(&mut self, thread: usize) -> bool {
        self.step += 1;
        self.heartbeat.store(self.heartbeat.load(Relaxed).wrapping_add(1), Relaxed);
        self.now_ns += self.mood.step_ns;
        if self.step > self.config.max_steps {
            let steps = self.config.max_steps;
            self.fail(format!("no end after {steps} steps: a livelock, or max_steps is too small"));
            return true;
        }
        if self.now_ns > self.config.max_time_ns {
            self.fail(format!("no end after {} ns of virtual time", self.config.max_time_ns));
            return true;
        }
        if self.random.one_in(self.mood.drain_one_in) {
            let of = if self.random.one_in(2) { thread } else { self.random.below(self.threads.len()) };
            self.memory.drain(of, &mut self.random);
        }
        if self.random.one_in(self.mood.disturb_one_in) {
            let host = self.random.below(self.hosts.len());
            if self.hosts[host].is_up {
                self.memory.disturb(self.hosts[host].machine, &mut self.random);
            }
        }
        let struck = self.strike(thread);
        if !self.checkers.is_empty() {
            self.check();
        }
        struck || self.stop.is_some() || self.wants_switch(thread)
    }

    fn wants_switch(&mut self, thread: usize) -> bool {
        self.threads[thread].streak += 1;
        match self.mood.schedule {
            Schedule::Weighted { switch_one_in } => self.random.one_in(switch_one_in),
            Schedule::Priorities { demote_one_in } => {
                // A thread that polls without ever waiting would otherwise keep all others from running.
                if self.threads[thread].streak > 3000 || self.random.one_in(demote_one_in) {
                    self.demote(thread);
                    return true;
                }
                // Others may have become due.
                self.random.one_in(8)
            }
        }
    }

    /// Moves a thread to the end of the order.
    pub(crate) fn demote(&mut self, thread: usize) {
        self.lowest_priority -= 1;
        self.threads[thread].priority = self.lowest_priority;
    }

    /// Runs every checker on the memory as it is.
    pub(crate) fn check(&mut self) {
        let mut checkers = std::mem::take(&mut self.checkers);
        for checker in &mut checkers {
            if let Err(reason) = checker(&View::new(self)) {
                self.fail(format!("invariant violated: {reason}"));
                break;
            }
        }
        self.checkers = checkers;
    }

    /// Chooses the thread that runs next and lets the time pass when all wait.
    pub(crate) fn choose(&mut self) -> Next {
        loop {
            let workers = self.live.iter().any(|&thread| !self.threads[thread].daemon);
            if self.stop.is_some() || (!workers && self.restarts.is_empty()) {
                return Next::End;
            }
            if self.restarts.iter().any(|restart| restart.0 <= self.now_ns) {
                return Next::Restart;
            }
            let now = self.now_ns;
            let is_ready = |thread: &Thread| thread.wait.due_ns() <= now && thread.paused_until <= now;
            let chosen = match self.mood.schedule {
                Schedule::Priorities { .. } => {
                    let ready = self.live.iter().copied().filter(|&thread| is_ready(&self.threads[thread]));
                    ready.max_by_key(|&thread| self.threads[thread].priority)
                }
                Schedule::Weighted { .. } => {
                    let weight = |&thread: &usize| match &self.threads[thread] {
                        of if is_ready(of) => u64::from(of.weight),
                        _ => 0,
                    };
                    let total: u64 = self.live.iter().map(weight).sum();
                    (total > 0).then(|| {
                        let mut left = self.random.between(1, total);
                        let mut found = 0;
                        for thread in &self.live {
                            let share = weight(thread);
                            if left <= share && share > 0 {
                                found = *thread;
                                break;
                            }
                            left -= share;
                        }
                        found
                    })
                }
            };
            if let Some(thread) = chosen {
                self.prepare(thread);
                return Next::Run(thread);
            }
            if !self.pass_time() {
                return Next::End;
            }
        }
    }

    fn prepare(&mut self, thread: usize) {
        self.switches += 1;
        let host = self.threads[thread].host;
        // A store fence makes a thread's writes visible before anything it does later in local memory. What it did there has happened
        // for its siblings, so the writes have arrived before any sibling continues.
        for index in 0..self.live.len() {
            let other = self.live[index];
            if other != thread && self.threads[other].host == host && self.memory.queue(other).has_fence() {
                self.memory.drain_fenced(other, &mut self.random);
            }
        }
        self.threads[thread].wait = Wait::Nothing;
        self.threads[thread].streak = 0;
        self.current = Some(thread);
    }

    /// All threads wait: writes arrive, and time advances to the next event. False if there is none.
    fn pass_time(&mut self) -> bool {
        for thread in 0..self.threads.len() {
            if self.threads[thread].paused_until <= self.now_ns && !self.memory.queue(thread).is_empty() {
                self.memory.drain_all(thread, &mut self.random);
            }
        }
        let due = |&thread: &usize| self.threads[thread].wait.due_ns().max(self.threads[thread].paused_until);
        let next = self.live.iter().map(due).chain(self.restarts.iter().map(|restart| restart.0)).min().unwrap_or(u64::MAX);
        if next < u64::MAX {
            self.now_ns = self.now_ns.max(next);
            if self.now_ns > self.config.max_time_ns {
                self.fail(format!("no end after {} ns of virtual time", self.config.max_time_ns));
                return false;
            }
            return true;
        }
        let stuck: Vec<String> = self
            .live
            .iter()
            .filter(|&&thread| self.threads[thread].paused_until < u64::MAX)
            .map(|&thread| self.thread_name(thread))
            .collect();
        if !stuck.is_empty() {
            self.fail(format!("deadlock: {} wait without a deadline", stuck.join(", ")));
        }
        false
    }

    /// The thread has returned.
    pub(crate) fn finish(&mut self, thread: usize) {
        self.threads[thread].done = true;
        self.live.retain(|&live| live != thread);
        self.memory.drain_all(thread, &mut self.random);
        let process = self.threads[thread].process;
        if !self.live.iter().any(|&live| self.threads[live].process == process) {
            self.end_process(process);
        }
    }

    pub(crate) fn is_live_host(&self, host: SimHost) -> bool {
        self.hosts[host.0].is_up
    }
}
