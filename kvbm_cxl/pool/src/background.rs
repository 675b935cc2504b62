// SPDX-License-Identifier: Apache-2.0
//! What the parts of a process that work in the background are made of: a thread that ends with its owner, and the lock of what it shares.

use crate::cpus::CpuSet;
use crate::error::{ERROR_CLASSES, Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Locks a mutex that is only ever held for steps in ordinary memory. A panic elsewhere leaves its data whole.
pub fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex that is held for longer, if it is free.
pub(crate) fn try_held<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

static FORKS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How often this process was forked since this was first called. A child process must not act under its parent's identity.
pub fn forks() -> usize {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only adds to an atomic, which is safe after a fork. Without memory for it, forks stay unnoticed.
        unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// An error that repeats is logged again after this time.
const LOG_AGAIN: Duration = Duration::from_secs(60);
/// Errors of which the time of their last line in the log is remembered.
const REMEMBERED: usize = 64;

/// A round of a background thread that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedRound {
    /// The work of the thread.
    pub what: &'static str,
    /// The error's class, as [`Error::class`] has it.
    pub class: &'static str,
    /// The error in words.
    pub message: String,
}

/// Failed rounds of the background threads of one host in this process: logged, counted by class, the last one kept. The threads stay.
#[derive(Default)]
pub struct FailedRounds {
    counts: [AtomicU64; ERROR_CLASSES.len()],
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    last: Option<FailedRound>,
    logged: Vec<(FailedRound, Instant)>,
}

impl FailedRounds {
    /// Counts a round that failed with `error`, and logs it; one that repeats is logged once a minute.
    pub fn record(&self, what: &'static str, error: &Error) {
        let class = error.class();
        if let Some(place) = ERROR_CLASSES.iter().position(|known| *known == class) {
            self.counts[place].fetch_add(1, Ordering::Relaxed);
        }
        let failed = FailedRound { what, class, message: error.to_string() };
        let mut seen = held(&self.seen);
        seen.logged.retain(|(_, at)| at.elapsed() < LOG_AGAIN);
        if !seen.logged.iter().any(|(logged, _)| *logged == failed) {
            log::warn!("{what}: {}", failed.message);
            if seen.logged.len() == REMEMBERED {
                seen.logged.remove(0);
            }
            seen.logged.push((failed.clone(), Instant::now()));
        }
        seen.last = Some(failed);
    }

    /// How many rounds failed, by class in the order of [`ERROR_CLASSES`].
    pub fn counts(&self) -> [u64; ERROR_CLASSES.len()] {
        std::array::from_fn(|place| self.counts[place].load(Ordering::Relaxed))
    }

    /// The round that failed last.
    pub fn last(&self) -> Option<FailedRound> {
        held(&self.seen).last.clone()
    }
}

/// A thread that does something again and again; dropping this ends it.
pub struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread `name`. Each `round` says how long to rest before the next, or `None` when there is no more to do. `what` names
    /// the work in the error when no thread can start. The thread runs on `cpus`, where they are given.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread starts, or its CPUs are refused.
    pub fn start(
        name: &str,
        what: &str,
        cpus: Option<&CpuSet>,
        mut round: impl FnMut() -> Option<Duration> + Send + 'static,
    ) -> Result<Background> {
        let (cpus, (bound, is_bound)) = (cpus.cloned(), std::sync::mpsc::sync_channel(1));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let run = move || {
            let outcome = cpus.map_or(Ok(()), |cpus| cpus.bind_current_thread());
            let is_refused = outcome.is_err();
            // The one who starts it waits for this.
            if bound.send(outcome).is_err() || is_refused {
                return;
            }
            while !stopped.load(Ordering::Acquire) {
                let Some(rest) = round() else { return };
                std::thread::park_timeout(rest);
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(run).map_err(|source| Error::Os { what: what.into(), source })?;
        let background = Background { stop, thread: Some(thread) };
        is_bound.recv().unwrap_or(Err(Error::Closed))?;
        Ok(background)
    }

    /// Ends its rest.
    pub fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there is a bug of ours; it has been printed, and there is no caller to hand it to in a drop.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
