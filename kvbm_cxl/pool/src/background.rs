// SPDX-License-Identifier: Apache-2.0
//! What the parts of a process that work in the background are made of: a thread that ends with its owner, and the lock of what it shares.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Locks a mutex that is only ever held for steps in ordinary memory. A panic elsewhere leaves its data whole.
pub(crate) fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex that is held for longer, if nobody holds it.
pub(crate) fn try_held<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A thread that does something again and again; dropping this ends it.
pub(crate) struct Background {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread `name`. Each `round` says how long to rest before the next, or `None` when there is no more to do. `what` is what
    /// could not be done when no thread can be had ([`Error::Os`]).
    pub fn start(name: &str, what: &str, mut round: impl FnMut() -> Option<Duration> + Send + 'static) -> Result<Background> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let run = move || {
            while !stopped.load(Ordering::Acquire) {
                let Some(rest) = round() else { return };
                std::thread::park_timeout(rest);
            }
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(run).map_err(|source| Error::Os { what: what.into(), source })?;
        Ok(Background { stop, thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A panic there is a bug of ours; it has been printed, and there is nobody to hand it to in a drop.
            let _ = thread.join();
        }
    }
}
