// SPDX-License-Identifier: Apache-2.0
//! [`Platform`] of one process of a simulated machine.

use crate::engine::{Engine, Wait, gone, step, unwinding, wait, with, with_if_any};
use crate::machine::{HeldLock, Local};
use crate::outcome::abort;
use crate::trace::Op;
use cxl_pool::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use cxl_pool::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Calls of a process that is being unwound before it counts as hanging in a destructor.
const UNWINDING_CALLS: u32 = 1_000_000;

/// The machine under one process.
pub(crate) struct SimPlatform {
    pub(crate) host: usize,
    pub(crate) process: usize,
}

/// Releases the machine lock of its number.
struct Guard {
    host: usize,
    id: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        with_if_any(|engine| engine.hosts[self.host].locks.retain(|held| held.id != self.id));
    }
}

/// Takes the mark of its number away.
struct Mark {
    host: usize,
    id: u64,
}

impl Drop for Mark {
    fn drop(&mut self) {
        with_if_any(|engine| engine.hosts[self.host].marks.retain(|mark| mark.0 != self.id));
    }
}

/// Lets go of the kernel's place.
struct PlaceLock {
    host: usize,
    id: u64,
}

impl Drop for PlaceLock {
    fn drop(&mut self) {
        with_if_any(|engine| {
            let held = &mut engine.hosts[self.host].place_lock;
            *held = held.filter(|lock| lock.0 != self.id);
        });
    }
}

/// Whether the kernel of `machine` has a mark of a process of that identity.
fn is_marked(engine: &Engine, machine: usize, identity: usize) -> bool {
    engine.hosts.iter().any(|host| (host.machine, host.identity) == (machine, identity) && !host.marks.is_empty())
}

thread_local! {
    static CALLS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
    /// What unwound processes have waited for, on their own clock.
    static WAITED_NS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Shortest wait of a process that is unwound, so that its deadlines come soon.
const UNWINDING_WAIT_NS: u64 = 10_000_000_000;

/// A destructor that waits for something while its process is unwound waits in vain, because no other thread runs: it meets its deadline,
/// or would wait for ever.
fn unwinding_call() {
    WAITED_NS.set(WAITED_NS.get() + UNWINDING_WAIT_NS);
    CALLS.set(CALLS.get() + 1);
    if CALLS.get() > UNWINDING_CALLS {
        abort("a destructor of the production code waits while a crashed host is unwound (see the docs of cxl-sim)");
    }
}

/// The machine's number in its id.
pub(crate) fn machine_id(host: usize) -> MachineId {
    let mut id = [0x5a; 16];
    id[0] = host as u8 + 1;
    MachineId(id)
}

impl SimPlatform {
    fn wait_for(&self, ns: u64, op: Op) {
        if unwinding() {
            return unwinding_call();
        }
        if step(self.process).is_err() {
            return;
        }
        let until = with(|engine| {
            engine.record(op, ns, 0, None);
            let thread = engine.running();
            engine.demote(thread);
            // Timers are late, sometimes very late.
            let late = if engine.random.one_in(16) { ns } else { ns / 16 };
            let late = engine.random.between(0, late);
            engine.now_ns.saturating_add(engine.global_ns(self.host, ns.saturating_add(late)))
        });
        wait(Wait::Until(until));
    }
}

impl Platform for SimPlatform {
    fn machine(&self) -> MachineId {
        machine_id(with(|engine| engine.hosts[self.host].identity))
    }

    fn witness(&self) -> u64 {
        with(|engine| engine.hosts[self.host].machine as u64 + 1)
    }

    fn mark(&self, alone: bool) -> Result<Option<(MachineLockGuard, bool)>> {
        step(self.process)?;
        Ok(with(|engine| {
            let of = &engine.hosts[self.host];
            let is_marked = is_marked(engine, of.machine, of.identity);
            if alone && is_marked {
                return None;
            }
            let id = engine.random.next();
            engine.hosts[self.host].marks.push((id, self.process));
            Some((Box::new(Mark { host: self.host, id }) as MachineLockGuard, is_marked))
        }))
    }

    fn lock_place(&self) -> Result<Option<MachineLockGuard>> {
        step(self.process)?;
        Ok(with(|engine| {
            let machine = engine.hosts[self.host].machine;
            if engine.hosts.iter().any(|host| host.machine == machine && host.place_lock.is_some()) {
                return None;
            }
            let id = engine.random.next();
            engine.hosts[self.host].place_lock = Some((id, self.process));
            Some(Box::new(PlaceLock { host: self.host, id }) as MachineLockGuard)
        }))
    }

    fn is_marked(&self, machine: MachineId) -> Result<bool> {
        step(self.process)?;
        Ok(with(|engine| {
            let identity = usize::from(machine.0[0]).wrapping_sub(1);
            is_marked(engine, engine.hosts[self.host].machine, identity)
        }))
    }

    fn process(&self) -> ProcessId {
        ProcessId { pid: self.process as u32 + 100, start: self.process as u32 + 1 }
    }

    fn is_alive(&self, process: ProcessId) -> bool {
        with(|engine| {
            let number = process.pid.wrapping_sub(100) as usize;
            let found = engine.processes.get(number);
            process.start as usize == number + 1 && found.is_some_and(|of| of.host == self.host && of.is_alive)
        })
    }

    fn now_ns(&self) -> u64 {
        with(|engine| {
            // Looking at the clock takes a little time, so that a loop that does nothing else ends.
            if unwinding() {
                return engine.clock_ns(self.host) + WAITED_NS.get();
            }
            engine.now_ns += engine.mood.step_ns;
            engine.clock_ns(self.host)
        })
    }

    fn sleep_ns(&self, ns: u64) {
        self.wait_for(ns, Op::Sleep);
    }

    fn relax(&self, round: u32) {
        let ns = match round {
            0..8 => 0,
            8..64 => 1_000,
            _ => 20_000,
        };
        self.wait_for(ns, Op::Relax);
    }

    fn park(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        if unwinding() {
            return unwinding_call();
        }
        if step(self.process).is_err() || word.load(SeqCst) != expected {
            return;
        }
        let until = with(|engine| {
            engine.record(Op::Park, timeout_ns, 0, None);
            let spurious = engine.random.one_in(16);
            let span = engine.global_ns(self.host, timeout_ns);
            let span = if spurious { engine.random.between(0, span) } else { span };
            engine.now_ns.saturating_add(span)
        });
        wait(Wait::Parked { word: std::ptr::from_ref(word).addr(), until });
    }

    fn wake(&self, word: &AtomicU32) {
        if step(self.process).is_ok() {
            with(|engine| {
                engine.record(Op::Wake, 0, 0, None);
                engine.wake(self.host, std::ptr::from_ref(word).addr());
            });
        }
    }

    fn random(&self) -> u64 {
        with(|engine| engine.random.next())
    }

    fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>> {
        step(self.process)?;
        Ok(with(|engine| {
            let id = engine.random.next();
            let locks = &mut engine.hosts[self.host].locks;
            let free = !locks.iter().any(|held| held.lock == lock && (exclusive || held.exclusive));
            if free {
                locks.push(HeldLock { id, process: self.process, lock, exclusive });
            }
            engine.record(Op::Lock, u64::from(free), 0, Some(format!("{lock:?}")));
            free.then(|| Box::new(Guard { host: self.host, id }) as MachineLockGuard)
        }))
    }

    fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory> {
        if unwinding() {
            return Err(gone());
        }
        let local = with(|engine| Arc::clone(engine.hosts[self.host].local.get_or_insert_with(|| Arc::new(Local::new(len_bytes)))));
        if local.len_bytes() < len_bytes {
            return Err(Error::Invalid(format!("the local memory has {} bytes, not {len_bytes}", local.len_bytes())));
        }
        let start = NonNull::new(local.start()).ok_or_else(|| Error::Invalid("local memory of no bytes".into()))?;
        Ok(LocalMemory { start, len_bytes, owner: local })
    }
}
