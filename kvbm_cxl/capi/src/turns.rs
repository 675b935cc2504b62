// SPDX-License-Identifier: Apache-2.0
//! Something that calls use one at a time, each with its deadline, until it is closed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

const REST: Duration = Duration::from_micros(200);

#[derive(Clone, Copy)]
pub struct Deadline {
    timeout_ms: u64,
    /// `None`: now, or beyond all times.
    at: Option<Instant>,
}

impl Deadline {
    pub fn within(timeout_ms: u64) -> Deadline {
        // A polling caller does not ask for the time.
        let at = if timeout_ms == 0 { None } else { Instant::now().checked_add(Duration::from_millis(timeout_ms)) };
        Deadline { timeout_ms, at }
    }

    pub fn timeout_ms(&self) -> u64 {
        self.timeout_ms
    }

    pub fn left_ms(&self) -> u64 {
        match self.at {
            Some(at) => at.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000) as u64,
            None => self.timeout_ms,
        }
    }
}

/// The object used in turns; `None` once it was closed.
pub struct Turns<T> {
    used: Mutex<Option<T>>,
    is_closing: AtomicBool,
}

pub struct Turn<'t, T> {
    used: MutexGuard<'t, Option<T>>,
    is_closing: &'t AtomicBool,
}

impl<T> Turns<T> {
    /// Open, and no call has the turn.
    pub fn of(used: T) -> Self {
        Turns { used: Mutex::new(Some(used)), is_closing: AtomicBool::new(false) }
    }

    /// Waits until no other call has the turn; `None` if that takes too long.
    pub fn wait(&self, deadline: Deadline) -> Option<Turn<'_, T>> {
        loop {
            match self.used.try_lock() {
                Ok(used) => return Some(Turn { used, is_closing: &self.is_closing }),
                Err(TryLockError::Poisoned(used)) => return Some(Turn { used: used.into_inner(), is_closing: &self.is_closing }),
                Err(TryLockError::WouldBlock) if deadline.left_ms() == 0 => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(REST),
            }
        }
    }

    /// Takes it out once the call whose turn it is has noticed and ended; `None` if another call has.
    pub fn close(&self) -> Option<T> {
        self.is_closing.store(true, Ordering::Release);
        self.used.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> Turn<'_, T> {
    /// What this turn is for; `None` once it was closed, or is to be.
    pub fn get(&mut self) -> Option<&mut T> {
        if self.is_closing.load(Ordering::Acquire) { None } else { self.used.as_mut() }
    }
}
