// SPDX-License-Identifier: Apache-2.0
//! Things that C cannot own, each under a number of its own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A number that means nothing else in this process, ever: not to another handle, nor after a pool was left and joined again.
pub fn fresh_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Locks a mutex that is only ever held for steps in ordinary memory. A panic elsewhere leaves its data whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Numbers<T>(Mutex<BTreeMap<u64, T>>);

impl<T> Numbers<T> {
    /// None yet.
    pub const fn new() -> Self {
        Numbers(Mutex::new(BTreeMap::new()))
    }

    pub fn add(&self, value: T) -> u64 {
        let number = fresh_number();
        self.insert(number, value);
        number
    }

    pub fn insert(&self, number: u64, value: T) {
        lock(&self.0).insert(number, value);
    }

    pub fn get(&self, number: u64) -> Option<T>
    where
        T: Clone,
    {
        lock(&self.0).get(&number).cloned()
    }

    pub fn has(&self, number: u64) -> bool {
        lock(&self.0).contains_key(&number)
    }

    pub fn remove(&self, number: u64) -> Option<T> {
        lock(&self.0).remove(&number)
    }

    pub fn take_all(&self) -> impl Iterator<Item = T> {
        std::mem::take(&mut *lock(&self.0)).into_values()
    }
}
