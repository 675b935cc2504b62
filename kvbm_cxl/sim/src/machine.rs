// SPDX-License-Identifier: Apache-2.0
//! Machines and their processes: clocks, machine locks, local memory; how they crash, pause and start again.

use crate::config::{Fault, SimHost, When};
use crate::engine::{Engine, Wait};
use crate::trace::Op;
use cxl_pool::platform::MachineLock;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// 64 bytes of a machine's own memory.
#[repr(align(64))]
struct Block([AtomicU64; 8]);

/// Memory that the processes of one machine share.
pub(crate) struct Local(Vec<Block>);

impl Local {
    pub(crate) fn new(len_bytes: usize) -> Self {
        Local((0..len_bytes.div_ceil(64)).map(|_| Block([const { AtomicU64::new(0) }; 8])).collect())
    }

    pub(crate) fn start(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.0.len() * 64
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        self.0.iter().flat_map(|block| &block.0)
    }
}

/// A held machine lock.
pub(crate) struct HeldLock {
    pub(crate) id: u64,
    pub(crate) process: usize,
    pub(crate) lock: MachineLock,
    pub(crate) exclusive: bool,
}

/// One machine, or one container of a machine: a host to the pool.
pub(crate) struct Host {
    pub(crate) is_up: bool,
    /// Number of the host whose caches and kernel it uses: its own, or that of the machine that the container runs on.
    pub(crate) machine: usize,
    /// Number in its machine id: its own, or that of the host whose twin it is.
    pub(crate) identity: usize,
    /// Processes that are marked with the kernel, each by the number of its mark.
    pub(crate) marks: Vec<(u64, usize)>,
    /// Number and process of the hold on the kernel's place.
    pub(crate) place_lock: Option<(u64, usize)>,
    /// Offset of its clock.
    pub(crate) clock_start_ns: u64,
    /// Speed of its clock in thousandths.
    pub(crate) clock_rate: u64,
    pub(crate) locks: Vec<HeldLock>,
    pub(crate) local: Option<Arc<Local>>,
    pub(crate) may_crash: bool,
    pub(crate) may_pause: bool,
}

/// What a process does when it starts.
pub(crate) type Start = Rc<dyn Fn(&crate::world::Env)>;

/// One start of a process.
pub(crate) struct Process {
    pub(crate) host: usize,
    pub(crate) is_alive: bool,
    /// How often this process was started before.
    pub(crate) generation: u32,
    pub(crate) start: Option<Start>,
    /// What its machine's memory held when it was killed, until its threads are unwound.
    pub(crate) local_at_death: Option<Vec<u64>>,
}

impl Engine {
    pub(crate) fn add_host(&mut self) -> usize {
        let (clock_start_ns, clock_rate) = self.draw_clock();
        let (machine, identity) = (self.hosts.len(), self.hosts.len());
        self.hosts.push(Host {
            is_up: true,
            machine,
            identity,
            marks: Vec::new(),
            place_lock: None,
            clock_start_ns,
            clock_rate,
            locks: Vec::new(),
            local: None,
            may_crash: true,
            may_pause: true,
        });
        self.memory.add_host();
        self.hosts.len() - 1
    }

    /// Adds a container of the machine of `of`: a host of its own to the pool, or one with the identity of `of`.
    pub(crate) fn add_container(&mut self, of: usize, is_twin: bool) -> usize {
        let host = self.add_host();
        self.hosts[host].machine = self.hosts[of].machine;
        if is_twin {
            self.hosts[host].identity = self.hosts[of].identity;
        }
        host
    }

    fn draw_clock(&mut self) -> (u64, u64) {
        let rate = if self.config.skewed_clocks { self.random.pick(&[1000, 1000, 999, 1001, 800, 1250]) } else { 1000 };
        (self.random.spread(1, 1 << 50), rate)
    }

    pub(crate) fn add_process(&mut self, host: usize, generation: u32, start: Option<Start>) -> usize {
        self.processes.push(Process { host, is_alive: true, generation, start, local_at_death: None });
        self.processes.len() - 1
    }

    pub(crate) fn clock_ns(&self, host: usize) -> u64 {
        let of = &self.hosts[host];
        of.clock_start_ns + (u128::from(self.now_ns) * u128::from(of.clock_rate) / 1000) as u64
    }

    /// A duration of the host's clock in global time.
    pub(crate) fn global_ns(&self, host: usize, ns: u64) -> u64 {
        (u128::from(ns) * 1000 / u128::from(self.hosts[host].clock_rate)).min(u128::from(u64::MAX / 4)) as u64
    }

    /// A process is gone: the kernel drops its machine locks.
    pub(crate) fn end_process(&mut self, process: usize) {
        self.processes[process].is_alive = false;
        let host = self.processes[process].host;
        self.hosts[host].locks.retain(|held| held.process != process);
        self.hosts[host].marks.retain(|mark| mark.1 != process);
        self.hosts[host].place_lock = self.hosts[host].place_lock.filter(|lock| lock.1 != process);
    }

    fn kill_threads(&mut self, process: usize) {
        for thread in 0..self.threads.len() {
            if self.threads[thread].process == process && !self.threads[thread].done {
                self.threads[thread].done = true;
                self.doomed.push(thread);
            }
        }
        self.live.retain(|&thread| !self.threads[thread].done);
        self.end_process(process);
    }

    fn plan_restart(&mut self, process: usize, restart_after_ns: Option<u64>) {
        if let (Some(after), Some(_)) = (restart_after_ns, &self.processes[process].start) {
            self.restarts.push((self.now_ns.saturating_add(after.max(1)), process));
        }
    }

    /// The machine loses power, with every container on it.
    pub(crate) fn crash_machine(&mut self, host: usize, restart_after_ns: Option<u64>) {
        let machine = self.hosts[host].machine;
        for host in (0..self.hosts.len()).filter(|&host| self.hosts[host].machine == machine).collect::<Vec<_>>() {
            self.power_off(host, restart_after_ns);
        }
    }

    fn power_off(&mut self, host: usize, restart_after_ns: Option<u64>) {
        if !self.hosts[host].is_up {
            return;
        }
        self.record(Op::CrashMachine, host as u64, 0, None);
        self.crashes += 1;
        self.hosts[host].is_up = false;
        for process in 0..self.processes.len() {
            if self.processes[process].host == host && self.processes[process].is_alive {
                self.kill_threads(process);
                self.plan_restart(process, restart_after_ns);
            }
        }
        for thread in 0..self.threads.len() {
            if self.threads[thread].host == host {
                self.memory.lose_queue(thread, &mut self.random);
            }
        }
        self.memory.lose_cache(self.hosts[host].machine, &mut self.random);
        let of = &mut self.hosts[host];
        of.locks.clear();
        of.local = None;
    }

    /// The process is killed; the machine and its memory stay.
    pub(crate) fn crash_process(&mut self, process: usize, restart_after_ns: Option<u64>) {
        if self.processes[process].is_alive {
            self.record(Op::CrashProcess, process as u64, 0, None);
            self.crashes += 1;
            self.kill_process(process);
            self.plan_restart(process, restart_after_ns);
        }
    }

    /// The process ends itself where it stands.
    pub(crate) fn exit_process(&mut self, process: usize) {
        self.record(Op::Exit, process as u64, 0, None);
        self.kill_process(process);
    }

    fn kill_process(&mut self, process: usize) {
        let host = self.processes[process].host;
        // Unwinding its threads runs destructors, which may change the shared local memory. A killed process runs none.
        self.processes[process].local_at_death =
            self.hosts[host].local.as_ref().map(|local| local.words().map(|word| word.load(SeqCst)).collect());
        // The CPU continues, and the kernel's own work between the kill and the release of the process's locks empties its buffers.
        for thread in 0..self.threads.len() {
            if self.threads[thread].process == process {
                self.memory.drain_all(thread, &mut self.random);
            }
        }
        self.kill_threads(process);
    }

    /// The threads of a killed process are unwound: undoes what their destructors did to the machine's memory.
    pub(crate) fn bury(&mut self, process: usize) {
        let host = self.processes[process].host;
        if let (Some(before), Some(local)) = (self.processes[process].local_at_death.take(), &self.hosts[host].local) {
            local.words().zip(before).for_each(|(word, value)| word.store(value, SeqCst));
        }
    }

    pub(crate) fn pause_thread(&mut self, thread: usize, for_ns: u64) {
        self.record(Op::Pause, thread as u64, for_ns, None);
        let until = self.now_ns.saturating_add(for_ns);
        self.threads[thread].paused_until = self.threads[thread].paused_until.max(until);
    }

    pub(crate) fn pause_host(&mut self, host: usize, for_ns: u64) {
        for thread in 0..self.threads.len() {
            if self.threads[thread].host == host && !self.threads[thread].done {
                self.pause_thread(thread, for_ns);
            }
        }
    }

    pub(crate) fn resume(&mut self, host: usize) {
        for thread in self.threads.iter_mut().filter(|thread| thread.host == host) {
            thread.paused_until = 0;
        }
    }

    /// The restarts that are due, removed from the list: (process, start function).
    pub(crate) fn due_restarts(&mut self) -> Vec<(usize, Start)> {
        let mut due = Vec::new();
        let now = self.now_ns;
        for index in (0..self.restarts.len()).rev() {
            if self.restarts[index].0 > now {
                continue;
            }
            let old = self.restarts.remove(index).1;
            let (host, generation) = (self.processes[old].host, self.processes[old].generation + 1);
            if !self.hosts[host].is_up {
                self.hosts[host].is_up = true;
                (self.hosts[host].clock_start_ns, self.hosts[host].clock_rate) = self.draw_clock();
            }
            if let Some(start) = self.processes[old].start.clone() {
                let process = self.add_process(host, generation, Some(start.clone()));
                self.current = None;
                self.record(Op::Restart, process as u64, host as u64, None);
                due.push((process, start));
            }
        }
        due
    }

    /// Lets planned and random faults strike at a step of `thread`. True when something did.
    pub(crate) fn strike(&mut self, thread: usize) -> bool {
        let mut struck = false;
        if self.step_is_planned() {
            let step = self.step;
            let due: Vec<_> = self.plan.iter().copied().filter(|planned| matches!(planned.when, When::Step(at) if at <= step)).collect();
            self.plan.retain(|planned| !matches!(planned.when, When::Step(at) if at <= step));
            self.note_plan();
            for planned in due {
                self.inflict(planned.fault, planned.host, thread);
            }
            struck = true;
        }
        struck | self.strike_by_chance(thread)
    }

    fn strike_by_chance(&mut self, thread: usize) -> bool {
        let chances = self.config.chances;
        if chances.for_steps != 0 && self.step > chances.for_steps {
            return false;
        }
        let total = chances.crash_machine + chances.crash_process + chances.pause_host + chances.pause_thread + chances.jump;
        if !self.random.per_million(total) {
            return false;
        }
        let mut left = self.random.between(1, total);
        let mut falls_to = |share: u64| {
            let hit = left > 0 && left <= share;
            left = left.saturating_sub(share);
            hit
        };
        let (machine, process, pause_host) =
            (falls_to(chances.crash_machine), falls_to(chances.crash_process), falls_to(chances.pause_host));
        let pause_thread = falls_to(chances.pause_thread);
        let for_ns = self.random.spread(1000, chances.longest_ns.max(1000));
        let host = self.random.below(self.hosts.len());
        if machine || process {
            if self.crashes >= chances.max_crashes || !self.hosts[host].may_crash {
                return false;
            }
            let restart_after_ns = chances.restart_within_ns.map(|within| self.random.spread(1000, within.max(1000)));
            let fault = if machine { Fault::CrashMachine { restart_after_ns } } else { Fault::CrashProcess { restart_after_ns } };
            self.inflict(fault, Some(SimHost(host)), thread);
        } else if pause_host || pause_thread {
            if self.pauses >= chances.max_pauses || !self.hosts[host].may_pause {
                return false;
            }
            let fault = if pause_host { Fault::PauseHost { for_ns } } else { Fault::PauseThread { for_ns } };
            self.inflict(fault, Some(SimHost(host)), thread);
        } else {
            self.record(Op::Jump, for_ns, 0, None);
            self.now_ns += for_ns;
        }
        true
    }

    /// Does a fault to a host; without a host, to the one of `thread`.
    pub(crate) fn inflict(&mut self, fault: Fault, host: Option<SimHost>, thread: usize) {
        let host = host.map_or(self.threads[thread].host, |host| host.0);
        let running = (self.threads[thread].host == host).then_some(thread);
        match fault {
            Fault::CrashMachine { restart_after_ns } => self.crash_machine(host, restart_after_ns),
            Fault::CrashProcess { restart_after_ns } => {
                let alive: Vec<usize> =
                    (0..self.processes.len()).filter(|&of| self.processes[of].host == host && self.processes[of].is_alive).collect();
                let chosen = match running {
                    Some(thread) => Some(self.threads[thread].process),
                    None if alive.is_empty() => None,
                    None => Some(alive[self.random.below(alive.len())]),
                };
                if let Some(process) = chosen {
                    self.crash_process(process, restart_after_ns);
                }
            }
            Fault::PauseHost { for_ns } => {
                self.pauses += 1;
                self.pause_host(host, for_ns);
            }
            Fault::LoseLine { offset } => self.lose_line(offset),
            Fault::PauseThread { for_ns } => {
                let of_host: Vec<usize> = self.live.iter().copied().filter(|&live| self.threads[live].host == host).collect();
                let chosen = running.or_else(|| (!of_host.is_empty()).then(|| of_host[self.random.below(of_host.len())]));
                if let Some(thread) = chosen {
                    self.pauses += 1;
                    self.pause_thread(thread, for_ns);
                }
            }
        }
    }

    /// What the line said stays in it, so that checkers see it; only no host can verify it.
    fn lose_line(&mut self, offset: u64) {
        let line = (offset / 64) as u32;
        let mut bytes = *self.memory.raw(line);
        bytes[..4].iter_mut().for_each(|byte| *byte ^= 0xff);
        self.memory.set_raw(line, &bytes);
        self.record(Op::Lose, offset, 0, None);
    }

    /// A named point of the production code is passed. True when a planned fault struck.
    pub(crate) fn visit(&mut self, thread: usize, name: &'static str) -> bool {
        let host = self.threads[thread].host;
        self.record(Op::Point, 0, 0, Some(name.into()));
        let all = self.points.entry(name).or_default();
        *all += 1;
        let all = *all;
        let own = self.host_points.entry((host, name)).or_default();
        *own += 1;
        let own = *own;
        let is_due = |planned: &crate::config::Planned| match planned.when {
            When::Point(point, visit) if point == name => match planned.host {
                Some(of) => of.0 == host && visit == own,
                None => visit == all,
            },
            _ => false,
        };
        let due: Vec<_> = self.plan.iter().copied().filter(is_due).collect();
        self.plan.retain(|planned| !is_due(planned));
        for planned in &due {
            self.inflict(planned.fault, planned.host, thread);
        }
        !due.is_empty()
    }

    /// Wakes one thread of the host that is parked on the word.
    pub(crate) fn wake(&mut self, host: usize, word: usize) {
        let parked: Vec<usize> = self
            .live
            .iter()
            .copied()
            .filter(|&thread| self.threads[thread].host == host)
            .filter(|&thread| matches!(self.threads[thread].wait, Wait::Parked { word: of, .. } if of == word))
            .collect();
        if !parked.is_empty() {
            let woken = parked[self.random.below(parked.len())];
            self.threads[woken].wait = Wait::Nothing;
        }
    }
}
