// SPDX-License-Identifier: Apache-2.0
//! The pool's memory as the GPUs of this process reach it: registered with the driver, a granule at a time, when a copy first needs it or
//! ahead of that (`ahead.rs`).
//!
//! A granule is registered once in a process, however many engines use it, because a second registration of the same range fails; it is
//! unregistered when the last of them is dropped. Threads register different granules at the same time; one that needs a granule that
//! another thread is at waits for it. An engine keeps the memory mapped for as long as it has granules: the driver would keep copying to
//! the old pages of a range that was unmapped and mapped again.

use super::driver::{
    Address, ERROR_ALREADY_REGISTERED, ERROR_OUT_OF_MEMORY, HOST_PORTABLE, REGISTER_DEVICE_MAP, REGISTER_IO_MEMORY, SUCCESS,
};
use super::gpu::{Entered, Gpu};
use super::refusal;
use crate::background::held;
use crate::coherence::Coherence;
use std::collections::HashMap;
use std::ptr::with_exposed_provenance_mut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A registered range of this process. The GPU is the one whose context it was registered in, which lives as long as the range is used.
struct Range {
    gpu: Arc<Gpu>,
    users: usize,
    /// A thread is at it: it may turn out that it cannot be registered.
    is_pending: bool,
}

/// The registered ranges of this process, by driver and first address.
static RANGES: Mutex<Option<HashMap<(usize, usize), Range>>> = Mutex::new(None);
/// Told when a range is not pending any more.
static RANGES_CHANGED: Condvar = Condvar::new();

#[derive(Clone, Copy, PartialEq, Eq)]
enum Granule {
    Unknown,
    /// A thread is at it.
    Pending,
    /// With its address for kernels on this engine's GPU, where they reach it.
    Registered(Option<Address>),
    /// Cannot be, and is not tried again.
    Refused,
}

/// The granules of one pool, for one engine.
pub(super) struct Registered {
    gpu: Arc<Gpu>,
    memory: Arc<dyn Coherence>,
    base: usize,
    granule_bytes: u64,
    granules: Mutex<Vec<Granule>>,
    /// Told when a granule is not pending any more.
    changed: Condvar,
    /// Why the first granule that could not be registered could not.
    refusal: Mutex<Option<String>>,
}

fn wait<'m, T>(changed: &Condvar, guard: MutexGuard<'m, T>) -> MutexGuard<'m, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

impl Registered {
    /// Of the pool that `memory` is; `None` where this process does not map it.
    pub(super) fn new(gpu: Arc<Gpu>, memory: Arc<dyn Coherence>, granule_bytes: u64) -> Option<Self> {
        let base = memory.device_address(0, 1)?.as_ptr().expose_provenance();
        let count = usize::try_from(memory.len_bytes().div_ceil(granule_bytes)).ok()?;
        let granules = Mutex::new(vec![Granule::Unknown; count]);
        Some(Registered { gpu, memory, base, granule_bytes, granules, changed: Condvar::new(), refusal: Mutex::new(None) })
    }

    /// Whether `memory` is the pool that this is of.
    pub(super) fn is_of(&self, memory: &dyn Coherence) -> bool {
        std::ptr::addr_eq(memory, Arc::as_ptr(&self.memory))
    }

    /// Registers what of a range is not, and says whether all of it is. The range lies in the pool.
    pub(super) fn reach(&self, entered: &Entered<'_>, offset: u64, len_bytes: u64) -> bool {
        let (first, end) = (offset / self.granule_bytes, (offset + len_bytes).div_ceil(self.granule_bytes));
        (first..end).all(|index| self.reach_granule(entered, index))
    }

    /// Registers a granule if it is not, and says whether it is.
    pub(super) fn reach_granule(&self, entered: &Entered<'_>, index: u64) -> bool {
        let mut granules = held(&self.granules);
        loop {
            match granules.get_mut(index as usize) {
                None | Some(Granule::Refused) => return false,
                Some(Granule::Registered(_)) => return true,
                Some(Granule::Pending) => granules = wait(&self.changed, granules),
                Some(unknown) => {
                    *unknown = Granule::Pending;
                    break;
                }
            }
        }
        drop(granules);
        let found = self.register(entered, index);
        if let Some(granule) = held(&self.granules).get_mut(index as usize) {
            *granule = found;
        }
        self.changed.notify_all();
        found != Granule::Refused
    }

    /// How many granules the first bytes of the pool are.
    pub(super) fn granules_of(&self, len_bytes: u64) -> u64 {
        len_bytes.min(self.memory.len_bytes()).div_ceil(self.granule_bytes)
    }

    /// The address of a pool offset.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.base as u64 + offset
    }

    /// The granule of an offset, which the driver knows as one range: where it lies in the pool, and its address for kernels; 0 where they
    /// do not reach it, or it is not registered.
    pub(super) fn granule_at(&self, offset: u64) -> (std::ops::Range<u64>, Address) {
        let index = offset / self.granule_bytes;
        let mapped = match held(&self.granules).get(index as usize) {
            Some(Granule::Registered(Some(mapped))) => *mapped,
            _ => 0,
        };
        (index * self.granule_bytes..(index + 1) * self.granule_bytes, mapped)
    }

    /// Whether kernels reach all of a range, which lies in the pool and has a byte.
    pub(super) fn is_mapped(&self, offset: u64, len_bytes: u64) -> bool {
        let granules = held(&self.granules);
        let (first, end) = ((offset / self.granule_bytes) as usize, (offset + len_bytes).div_ceil(self.granule_bytes) as usize);
        let is_mapped = |granule: &Granule| matches!(granule, Granule::Registered(Some(_)));
        granules.get(first..end).is_some_and(|granules| granules.iter().all(is_mapped))
    }

    /// Why a part of the pool could not be registered, the first time that happened.
    pub(super) fn refusal(&self) -> Option<String> {
        held(&self.refusal).clone()
    }

    /// Bytes that are registered.
    pub(super) fn len_bytes(&self) -> u64 {
        let granules = held(&self.granules);
        let registered = granules.iter().zip(0..).filter(|(granule, _)| matches!(granule, Granule::Registered(_)));
        registered.map(|(_, index)| self.bytes_of(index)).sum()
    }

    /// Length of a granule of the pool: the last one may be shorter.
    pub(super) fn bytes_of(&self, index: u64) -> u64 {
        self.granule_bytes.min(self.memory.len_bytes() - index * self.granule_bytes)
    }

    fn key(&self, index: u64) -> (usize, usize) {
        (Arc::as_ptr(self.gpu.driver()).addr(), self.address(index * self.granule_bytes) as usize)
    }

    fn register(&self, entered: &Entered<'_>, index: u64) -> Granule {
        let (key, len_bytes) = (self.key(index), self.bytes_of(index));
        let at = with_exposed_provenance_mut::<u8>(key.1);
        let mut ranges = held(&RANGES);
        loop {
            match ranges.get_or_insert_default().get_mut(&key) {
                None => break,
                Some(range) if range.is_pending => ranges = wait(&RANGES_CHANGED, ranges),
                Some(range) => {
                    range.users += 1;
                    return Granule::Registered(entered.mapped_address(at));
                }
            }
        }
        ranges.get_or_insert_default().insert(key, Range { gpu: self.gpu.clone(), users: 1, is_pending: true });
        drop(ranges);
        // SAFETY: a range of the pool's mapping, which `self.memory` keeps; `drop` unregisters it. The same below.
        let mut code = unsafe { entered.register(at, len_bytes as usize, HOST_PORTABLE | REGISTER_DEVICE_MAP) };
        if ![SUCCESS, ERROR_ALREADY_REGISTERED, ERROR_OUT_OF_MEMORY].contains(&code) {
            // A mapping of a device whose pages cannot be held, as of some DAX devices, may still be registered as I/O memory.
            // SAFETY: as above.
            let second = unsafe { entered.register(at, len_bytes as usize, HOST_PORTABLE | REGISTER_DEVICE_MAP | REGISTER_IO_MEMORY) };
            code = if second == SUCCESS { SUCCESS } else { code };
        }
        let mut ranges = held(&RANGES);
        if let (Some(range), true) = (ranges.get_or_insert_default().get_mut(&key), code == SUCCESS) {
            range.is_pending = false;
        } else {
            ranges.get_or_insert_default().remove(&key);
        }
        drop(ranges);
        RANGES_CHANGED.notify_all();
        if code == SUCCESS {
            return Granule::Registered(entered.mapped_address(at));
        }
        // Registered by other code, it could be unregistered under a copy: not relied upon.
        let what = format!("registering {len_bytes} bytes of the pool at offset {:#x}", index * self.granule_bytes);
        let advice = refusal::advice(code, self.gpu.driver().version());
        held(&self.refusal).get_or_insert_with(|| format!("{}: {advice}", self.gpu.failed(what, code)));
        Granule::Refused
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut ranges = held(&RANGES);
        let ranges = ranges.get_or_insert_default();
        for (granule, index) in held(&self.granules).iter().zip(0..) {
            if !matches!(granule, Granule::Registered(_)) {
                continue;
            }
            let key = self.key(index);
            let Some(range) = ranges.get_mut(&key) else { continue };
            range.users -= 1;
            if range.users > 0 {
                continue;
            }
            if let Ok(entered) = range.gpu.enter() {
                // SAFETY: registered by the first of its users, and the last is being dropped: no copy uses it.
                unsafe { entered.unregister(with_exposed_provenance_mut(key.1)) };
            }
            ranges.remove(&key);
        }
    }
}
