// SPDX-License-Identifier: Apache-2.0
//! A handle that is open until it is closed or dropped, or the process is a fork of the one that opened it.
//!
//! A call takes hold of what it works with; closing only takes it away from later calls. The end itself is the drop of the last hold, on
//! whichever thread that is, and the caller that closes waits for it. So calls that are under way come to their end, and objects may be
//! collected in any order.

use crate::failure::{Failure, Outcome};
use cxl_pool::Error;
use cxl_pool::background::forks;
pub use cxl_pool::background::held;
use pyo3::prelude::*;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Clone, Copy)]
pub struct Birth(usize);

impl Birth {
    pub fn now() -> Self {
        Birth(forks())
    }

    /// Whether this is still that process. In a child nothing of its parent's may be touched: neither the pool, where it would act as its
    /// parent, nor a mutex, which a thread that is not there may hold.
    pub fn is_here(self) -> bool {
        self.0 == forks()
    }
}

/// A value that is dropped in its own process only; a child of a fork leaves it as it is.
pub struct Native<T> {
    birth: Birth,
    value: Option<T>,
}

impl<T> Native<T> {
    pub fn new(value: T) -> Self {
        Native { birth: Birth::now(), value: Some(value) }
    }

    pub fn get(&self, what: &str) -> Outcome<&T> {
        match &self.value {
            Some(value) if self.birth.is_here() => Ok(value),
            _ => Err(Failure::forked(what)),
        }
    }

    /// Takes the value out for good, if it is of this process.
    pub fn take(&mut self) -> Option<T> {
        let value = self.value.take();
        if self.birth.is_here() {
            return value;
        }
        std::mem::forget(value);
        None
    }
}

impl<T> Drop for Native<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// Drops what may have to wait for the pool without the interpreter's lock, so that other threads can run.
pub fn drop_detached<T: Send>(value: T) {
    let mut value = Some(value);
    // Not attached when the interpreter ends: then no other thread waits.
    Python::try_attach(|py| py.detach(|| drop(value.take())));
    drop(value);
}

/// Something that calls take hold of, until it is closed.
pub struct OpenHandle<T> {
    what: &'static str,
    live: Native<Mutex<Option<Arc<T>>>>,
}

impl<T> OpenHandle<T> {
    /// Open; `what` is what messages call it.
    pub fn new(what: &'static str, value: T) -> Self {
        OpenHandle { what, live: Native::new(Mutex::new(Some(Arc::new(value)))) }
    }

    pub fn hold(&self) -> Outcome<Arc<T>> {
        held(self.live.get(self.what)?).clone().ok_or_else(|| Failure::closed(self.what))
    }

    /// Refuses every process but the one that opened it.
    pub fn check_here(&self) -> Outcome<()> {
        self.live.get(self.what).map(drop)
    }

    pub fn is_open(&self) -> bool {
        self.hold().is_ok()
    }

    /// Closes it for calls to come. `None` when it was closed before, or is of another process.
    pub fn take(&self) -> Option<Arc<T>> {
        held(self.live.get(self.what).ok()?).take()
    }
}

/// Tells the caller that closed something that its last hold is gone, and how its end went.
#[derive(Default)]
pub struct End {
    result: Mutex<Option<Result<(), Error>>>,
    told: Condvar,
}

impl End {
    pub fn tell(&self, result: Result<(), Error>) {
        *held(&self.result) = Some(result);
        self.told.notify_all();
    }

    /// Waits for it.
    ///
    /// # Errors
    /// The reason for which the end did not go well; [`Error::Timeout`] when calls are still under way after `timeout_ms`: it ends with
    /// the last of them.
    pub fn wait(&self, what: &str, timeout_ms: u64) -> Outcome<()> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let mut result = held(&self.result);
        loop {
            if let Some(result) = result.take() {
                return Ok(result?);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(
                    Error::Timeout { what: format!("the calls under way on {what} to end; it closes with the last"), timeout_ms }.into()
                );
            }
            result = self.told.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
