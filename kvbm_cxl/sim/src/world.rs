// SPDX-License-Identifier: Apache-2.0
//! The world as a scenario builds and runs it.

use crate::config::{Fault, Planned, SimHost, SimProcess, WorldConfig};
use crate::engine::{self, Body, Engine, Next, enter_coroutine, install, step, suspend, uninstall, wait, with};
use crate::hardware::{RawMemory, SimMemory};
use crate::outcome::{Failure, Stats, take_panic};
use crate::platform::{SimPlatform, machine_id};
use crate::trace::Op;
use crate::view::View;
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult};
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Lines;
use cxl_pool::media::{Geometry, Layout};
use cxl_pool::platform::{MachineId, Platform};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

/// Stack of a simulated thread; only the pages that it touches cost memory.
const STACK_BYTES: usize = 512 << 10;
/// The UUID of every simulated pool.
pub const POOL_UUID: [u8; 16] = *b"simulated pool 1";
/// The incarnation of every simulated pool that is not formatted again.
pub const POOL_INCARNATION: u64 = 1;

type Thread = Coroutine<(), (), Result<()>>;

thread_local! {
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Hosts over one memory, on this OS thread. There is one world per OS thread at a time.
pub struct World {
    layout: Arc<Layout>,
    len_bytes: u64,
    coroutines: Vec<Option<Thread>>,
    /// The handles only work on the thread that holds the world.
    _confined: std::marker::PhantomData<*const ()>,
}

/// What code on a simulated host can reach. Cheap to clone; usable in that process only.
#[derive(Clone)]
pub struct Env {
    host: usize,
    process: usize,
    layout: Arc<Layout>,
    len_bytes: u64,
}

impl Env {
    /// The machine.
    pub fn host(&self) -> SimHost {
        SimHost(self.host)
    }

    /// This start of the process.
    pub fn process(&self) -> SimProcess {
        SimProcess(self.process)
    }

    /// How often this process was started before (0 on the first start).
    pub fn generation(&self) -> u32 {
        with(|engine| engine.processes[self.process].generation)
    }

    /// Pool memory as this host sees it.
    pub fn memory(&self) -> Arc<dyn Coherence> {
        Arc::new(SimMemory { process: self.process, len_bytes: self.len_bytes })
    }

    /// Stores to pool memory as an engine does that has it mapped: plain stores, into this host's cache.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; when this process is gone.
    pub fn store(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        SimMemory { process: self.process, len_bytes: self.len_bytes }.store(offset, bytes)
    }

    /// The pool's lines as this host sees them.
    pub fn lines(&self) -> Lines {
        Lines::new(self.memory(), Arc::clone(&self.layout), &POOL_UUID, POOL_INCARNATION)
    }

    /// The machine under this process.
    pub fn platform(&self) -> Arc<dyn Platform> {
        Arc::new(SimPlatform { host: self.host, process: self.process })
    }

    /// Starts a thread in this process. The run lasts until all such threads have returned; an error that one returns fails the run.
    pub fn spawn(&self, name: &str, body: impl FnOnce(Env) -> Result<()> + 'static) {
        self.start_thread(name, false, body);
    }

    /// Starts a thread that the end of the run does not wait for: a service loop.
    pub fn spawn_daemon(&self, name: &str, body: impl FnOnce(Env) -> Result<()> + 'static) {
        self.start_thread(name, true, body);
    }

    fn start_thread(&self, name: &str, daemon: bool, body: impl FnOnce(Env) -> Result<()> + 'static) {
        let env = self.clone();
        let body: Body = Box::new(move || body(env));
        with(|engine| {
            // A process that was killed since starts nothing.
            if engine.processes[self.process].is_alive {
                engine.add_thread(self.process, name, daemon, body);
            }
        });
    }

    /// A scheduling point: anything may happen here, as at any access to the memory.
    pub fn yield_now(&self) -> Result<()> {
        step(self.process)?;
        with(|engine| engine.record(Op::Yield, 0, 0, None));
        Ok(())
    }

    /// Sleeps until the global clock shows `at_ns`.
    pub fn sleep_until(&self, at_ns: u64) -> Result<()> {
        step(self.process)?;
        wait(engine::Wait::Until(at_ns));
        Ok(())
    }

    /// A number below `limit` for the scenario's own choices.
    pub fn below(&self, limit: usize) -> usize {
        with(|engine| engine.random.below(limit))
    }

    /// Global virtual time in nanoseconds, for checkers; no host's clock shows it.
    pub fn global_ns(&self) -> u64 {
        with(|engine| engine.now_ns)
    }

    /// Steps of the world so far: the order of events.
    pub fn step(&self) -> u64 {
        with(|engine| engine.step)
    }

    /// Looks at the world without a scheduling point.
    pub fn view<R>(&self, look: impl FnOnce(&View<'_>) -> R) -> R {
        with(|engine| look(&View::new(engine)))
    }

    /// Passes a named point of the scenario's own; planned faults strike there as at those of the production code.
    pub fn point(&self, name: &'static str) {
        visit_point(name);
    }

    /// Adds a line to the trace.
    pub fn note(&self, text: impl Into<String>) {
        with(|engine| engine.record(Op::Yield, 0, 0, Some(text.into())));
    }

    /// Ends the run as failed.
    pub fn fail(&self, reason: impl Into<String>) {
        with(|engine| engine.fail(reason.into()));
    }

    /// Ends this process at once, as `_exit` does; it never returns.
    pub fn exit(&self) -> ! {
        with(|engine| engine.exit_process(self.process));
        loop {
            suspend();
        }
    }

    /// Does a fault to a host. If it is this one's, the fault strikes before the call returns.
    pub fn inflict(&self, host: SimHost, fault: Fault) {
        with(|engine| {
            let thread = engine.running();
            engine.inflict(fault, Some(host), thread);
        });
        suspend();
    }

    /// Ends every pause of a host.
    pub fn resume(&self, host: SimHost) {
        with(|engine| engine.resume(host.0));
    }

    /// Orders a fault while the world runs.
    pub fn plan(&self, planned: Planned) {
        with(|engine| engine.add_plan(planned));
    }
}

impl World {
    /// An empty world: a zeroed memory, no hosts.
    ///
    /// # Panics
    /// If the geometry is impossible, or this OS thread has a world already.
    pub fn new(seed: u64, config: WorldConfig) -> Self {
        crate::outcome::install_panic_hook();
        let layout = Arc::new(Layout::new(config.geometry).expect("the scenario's geometry is possible"));
        let engine = Engine::new(seed, config, Arc::clone(&layout));
        let len_bytes = engine.memory.lines() as u64 * 64;
        install(engine);
        cxl_pool::fault::on_point(Some(Rc::new(visit_point)));
        World { layout, len_bytes, coroutines: Vec::new(), _confined: std::marker::PhantomData }
    }

    /// A world with a formatted pool.
    pub fn formatted(seed: u64, config: WorldConfig) -> Self {
        let world = World::new(seed, config);
        crate::format::format(&world.inspector());
        world
    }

    /// The geometry.
    pub fn geometry(&self) -> &Geometry {
        self.layout.geometry()
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The lines in the memory itself: no caches, no time passes. For formatting, and for looking at what a run left.
    pub fn inspector(&self) -> Lines {
        Lines::new(Arc::new(RawMemory { len_bytes: self.len_bytes }), Arc::clone(&self.layout), &POOL_UUID, POOL_INCARNATION)
    }

    /// Adds a machine.
    pub fn add_host(&mut self) -> SimHost {
        SimHost(with(Engine::add_host))
    }

    /// Adds a container on the machine of `of`: a host of its own to the pool, under the same kernel and over the same caches.
    pub fn add_container(&mut self, of: SimHost) -> SimHost {
        SimHost(with(|engine| engine.add_container(of.0, false)))
    }

    /// Adds a container with the identity of `of`, on the same machine, and with memory and locks of its own.
    pub fn add_twin(&mut self, of: SimHost) -> SimHost {
        SimHost(with(|engine| engine.add_container(of.0, true)))
    }

    /// The identity that a machine's platform reports.
    pub fn machine_id(&self, host: SimHost) -> MachineId {
        machine_id(with(|engine| engine.hosts[host.0].identity))
    }

    /// Starts a process on a machine; `start` runs now, spawns its threads, and runs again whenever the process is started again.
    pub fn start(&mut self, host: SimHost, start: impl Fn(&Env) + 'static) -> SimProcess {
        let start: crate::machine::Start = Rc::new(start);
        let process = with(|engine| engine.add_process(host.0, 0, Some(Rc::clone(&start))));
        start(&self.env(process));
        SimProcess(process)
    }

    /// Starts a process of one thread that is never started again.
    pub fn spawn(&mut self, host: SimHost, name: &str, body: impl FnOnce(Env) -> Result<()> + 'static) -> SimProcess {
        let process = with(|engine| engine.add_process(host.0, 0, None));
        self.env(process).spawn(name, body);
        SimProcess(process)
    }

    fn env(&self, process: usize) -> Env {
        let host = with(|engine| engine.processes[process].host);
        Env { host, process, layout: Arc::clone(&self.layout), len_bytes: self.len_bytes }
    }

    /// Orders a fault.
    pub fn plan(&mut self, planned: Planned) {
        with(|engine| engine.add_plan(planned));
    }

    /// Exempts a host from crashes, and from pauses, by chance.
    pub fn protect(&mut self, host: SimHost, from_crashes: bool, from_pauses: bool) {
        with(|engine| {
            engine.hosts[host.0].may_crash = !from_crashes;
            engine.hosts[host.0].may_pause = !from_pauses;
        });
    }

    /// Changes the chances of faults from here on; a scenario ends the faults this way before it asks for progress.
    pub fn set_chances(&mut self, chances: crate::config::Chances) {
        with(|engine| engine.config.chances = chances);
    }

    /// Gives the run another limit of steps than its configuration.
    pub fn set_max_steps(&mut self, max_steps: u64) {
        with(|engine| engine.config.max_steps = max_steps);
    }

    /// Adds an invariant that holds between any two steps.
    pub fn check_always(&mut self, checker: impl FnMut(&View<'_>) -> std::result::Result<(), String> + 'static) {
        with(|engine| engine.checkers.push(Box::new(checker)));
    }

    /// Crashes a machine between two runs.
    pub fn crash(&mut self, host: SimHost, restart_after_ns: Option<u64>) {
        with(|engine| engine.crash_machine(host.0, restart_after_ns));
        self.unwind_doomed();
    }

    /// Ends every pause of a host.
    pub fn resume(&mut self, host: SimHost) {
        with(|engine| engine.resume(host.0));
    }

    /// Looks at the world.
    pub fn view<R>(&self, look: impl FnOnce(&View<'_>) -> R) -> R {
        with(|engine| look(&View::new(engine)))
    }

    /// Runs until every thread but the daemons has returned, crashed, or is paused for ever.
    ///
    /// # Errors
    /// A violated invariant, a failed assertion or an error of a thread, a deadlock, too many steps, too much time.
    pub fn run(&mut self) -> std::result::Result<Stats, Failure> {
        loop {
            self.adopt_newborn();
            match with(Engine::choose) {
                Next::Run(thread) => self.resume_thread(thread),
                Next::Restart => {
                    for (process, start) in with(Engine::due_restarts) {
                        start(&self.env(process));
                    }
                }
                Next::End => break,
            }
            self.unwind_doomed();
        }
        with(|engine| {
            engine.current = None;
            engine.check();
            match engine.stop.take() {
                Some(stop) => Err(Failure::new(engine, stop.0)),
                None => Ok(Stats::new(engine)),
            }
        })
    }

    /// A failure that the scenario finds in what the hosts recorded; it carries the trace of this world.
    pub fn failure(&self, reason: impl Into<String>) -> Failure {
        with(|engine| Failure::new(engine, reason.into()))
    }

    fn adopt_newborn(&mut self) {
        for (thread, body) in with(|engine| std::mem::take(&mut engine.newborn)) {
            let stack = STACKS.with_borrow_mut(Vec::pop);
            let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for the stack of a simulated thread"));
            let coroutine = Coroutine::with_stack(stack, move |yielder, ()| {
                enter_coroutine(yielder);
                body()
            });
            self.coroutines.resize_with(self.coroutines.len().max(thread + 1), || None);
            self.coroutines[thread] = Some(coroutine);
        }
    }

    fn resume_thread(&mut self, thread: usize) {
        let Some(coroutine) = &mut self.coroutines[thread] else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| coroutine.resume(())));
        with(|engine| engine.current = None);
        let result = match outcome {
            Ok(CoroutineResult::Yield(())) => return,
            Ok(CoroutineResult::Return(result)) => result,
            Err(_) => Err(Error::Invalid(format!("panic: {}", take_panic()))),
        };
        with(|engine| {
            engine.finish(thread);
            if let Err(error) = result {
                let name = engine.thread_name(thread);
                engine.fail(format!("{name}: {error}"));
            }
        });
        if let Some(coroutine) = self.coroutines[thread].take().filter(Coroutine::done) {
            STACKS.with_borrow_mut(|stacks| stacks.push(coroutine.into_stack()));
        }
    }

    /// Unwinds the threads of processes that crashed, so that what they own in this OS process is given back. While they are unwound,
    /// every call of their memory and platform does nothing and fails.
    fn unwind_doomed(&mut self) {
        let doomed = with(|engine| std::mem::take(&mut engine.doomed));
        if doomed.is_empty() {
            return;
        }
        self.adopt_newborn();
        let mut processes = BTreeSet::new();
        for thread in doomed {
            self.unwind(thread);
            processes.insert(with(|engine| engine.threads[thread].process));
        }
        processes.into_iter().for_each(|process| with(|engine| engine.bury(process)));
    }

    fn unwind(&mut self, thread: usize) {
        if let Some(mut coroutine) = self.coroutines.get_mut(thread).and_then(Option::take) {
            engine::discard(|| coroutine.force_unwind());
            STACKS.with_borrow_mut(|stacks| stacks.push(coroutine.into_stack()));
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let newborn = with(|engine| std::mem::take(&mut engine.newborn));
        for thread in 0..self.coroutines.len() {
            self.unwind(thread);
        }
        engine::discard(|| drop(newborn));
        cxl_pool::fault::on_point(None);
        let engine = uninstall();
        // Dropped after the place is free: what it owns must not look for a world.
        drop(engine);
    }
}

fn visit_point(name: &'static str) {
    // Points also lie on the way of the inspector and of threads that are being unwound.
    if engine::unwinding() || with(|engine| engine.current.is_none()) {
        return;
    }
    let (process, struck) = with(|engine| {
        let thread = engine.running();
        (engine.threads[thread].process, engine.visit(thread, name))
    });
    if struck {
        suspend();
    } else {
        // Nothing can fail here: a thread that is gone never comes back from the step.
        let _ = step(process);
    }
}
