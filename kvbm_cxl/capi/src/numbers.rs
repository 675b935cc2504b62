// SPDX-License-Identifier: Apache-2.0
//! Things that C cannot own, each under a number of its own.

use crate::status::{Failure, Outcome, Status};
use cxl_pool::background::{forks, held};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A number that means nothing else in this process, ever: not to another handle, nor after a pool was left and joined again.
pub fn fresh_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
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
        held(&self.0).insert(number, value);
    }

    pub fn get(&self, number: u64) -> Option<T>
    where
        T: Clone,
    {
        held(&self.0).get(&number).cloned()
    }

    pub fn has(&self, number: u64) -> bool {
        held(&self.0).contains_key(&number)
    }

    pub fn remove(&self, number: u64) -> Option<T> {
        held(&self.0).remove(&number)
    }

    pub fn take_all(&self) -> impl Iterator<Item = T> {
        std::mem::take(&mut *held(&self.0)).into_values()
    }
}

/// Objects of a kind that do not outlive a fork, by number.
pub struct Handles<T> {
    /// What messages call one.
    what: &'static str,
    /// Each with [`forks`] when it was added.
    entries: Numbers<(usize, Arc<T>)>,
}

impl<T> Handles<T> {
    pub const fn new(what: &'static str) -> Self {
        Handles { what, entries: Numbers::new() }
    }

    pub fn add(&self, value: T) -> u64 {
        self.entries.add((forks(), Arc::new(value)))
    }

    pub fn find(&self, number: u64) -> Outcome<Arc<T>> {
        let what = self.what;
        match self.entries.get(number) {
            Some((born, value)) if born == forks() => Ok(value),
            Some(_) => {
                Err(Failure::new(Status::E_FORKED, format!("{what} {number} is the parent process's: a GPU does not outlive a fork")))
            }
            None => Err(Failure::new(Status::E_CLOSED, format!("{number} is no {what} (was it closed?)"))),
        }
    }

    pub fn remove(&self, number: u64) -> Option<Arc<T>> {
        self.entries.remove(number).map(|(_, value)| value)
    }
}
