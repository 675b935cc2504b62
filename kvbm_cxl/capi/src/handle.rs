// SPDX-License-Identifier: Apache-2.0
//! Open pools by number, the default pool, and which pool an address lies in.
//!
//! A `cxl_pool_t*` is never followed: its value is a place in a fixed table and a generation, so that a handle that is wrong, or closed,
//! is refused. Lookups take no lock and touch no counter shared between threads.

use crate::pool::OpenPool;
use crate::status::{Failure, Outcome, Status};
use crate::types::{CxlPool, MAX_POOLS, Options};
use arc_swap::{ArcSwapOption, Guard};
use bytemuck::Zeroable;
use cxl_pool::background::{forks, held};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Bits of a handle that hold the place.
const PLACE_BITS: u32 = 8;

struct HandleEntry {
    handle: usize,
    /// [`forks`] when it was opened.
    forks: usize,
    open: OpenPool,
}

static ENTRIES: [ArcSwapOption<HandleEntry>; MAX_POOLS] = [const { ArcSwapOption::const_empty() }; MAX_POOLS];
static USED: AtomicUsize = AtomicUsize::new(0);
/// Handle of the default pool; 0 = not open.
static DEFAULT: AtomicUsize = AtomicUsize::new(0);
/// Held while the table changes.
static CHANGING: Mutex<usize> = Mutex::new(0);
/// Held while the default pool is opened or closed.
static OPENING_DEFAULT: Mutex<()> = Mutex::new(());

fn enter(open: OpenPool) -> Outcome<usize> {
    let mut generation = held(&CHANGING);
    let Some(place) = ENTRIES.iter().position(|entry| entry.load().is_none()) else {
        return Err(Failure::new(Status::E_FULL, format!("this process has {MAX_POOLS} pools open: close one")));
    };
    *generation += 1;
    let handle = *generation << PLACE_BITS | (place + 1);
    ENTRIES[place].store(Some(Arc::new(HandleEntry { handle, forks: forks(), open })));
    USED.fetch_max(place + 1, Ordering::Release);
    Ok(handle)
}

fn wrong() -> Failure {
    Failure::new(Status::E_CLOSED, "this is not the handle of an open pool (was it closed?)")
}

fn find(handle: usize) -> Outcome<Guard<Option<Arc<HandleEntry>>>> {
    let place = (handle & ((1 << PLACE_BITS) - 1)).checked_sub(1);
    let found = place.and_then(|place| ENTRIES.get(place)).ok_or_else(wrong)?.load();
    match &*found {
        Some(entry) if entry.handle == handle => check_fork(entry)?,
        _ => return Err(wrong()),
    }
    Ok(found)
}

pub fn is_in_pool(address: usize) -> bool {
    let used = &ENTRIES[..USED.load(Ordering::Acquire).min(MAX_POOLS)];
    used.iter().any(|entry| entry.load().as_ref().is_some_and(|entry| entry.open.offset_of(address).is_some()))
}

fn check_fork(entry: &HandleEntry) -> Outcome<()> {
    if entry.forks == forks() {
        return Ok(());
    }
    Err(Failure::new(Status::E_FORKED, "this pool was opened by the parent process: open it again in this one"))
}

pub fn open(spec: Option<&str>, options: &Options) -> Outcome<*mut CxlPool> {
    let handle = enter(OpenPool::open(spec, options)?)?;
    Ok(std::ptr::without_provenance_mut(handle))
}

pub fn open_default(spec: Option<&str>, options: &Options) -> Outcome<()> {
    let _turn = held(&OPENING_DEFAULT);
    if usable_default().is_some() {
        return Err(Failure::new(Status::E_EXISTS, "the default pool is open already: close it with cxl_shm_fini"));
    }
    DEFAULT.store(open(spec, options)?.addr(), Ordering::Release);
    Ok(())
}

fn usable_default() -> Option<usize> {
    let handle = DEFAULT.load(Ordering::Acquire);
    find(handle).is_ok().then_some(handle)
}

fn default_handle() -> Outcome<usize> {
    if let Some(handle) = usable_default() {
        return Ok(handle);
    }
    let _turn = held(&OPENING_DEFAULT);
    if let Some(handle) = usable_default() {
        return Ok(handle);
    }
    let handle = open(None, &Options::zeroed())?.addr();
    DEFAULT.store(handle, Ordering::Release);
    Ok(handle)
}

/// Runs `work` on a pool; null is the default one.
pub fn with<T>(pool: *mut CxlPool, work: impl FnOnce(&OpenPool) -> Outcome<T>) -> Outcome<T> {
    with_handle(pool, |_, pool| work(pool))
}

/// As [`with`]; `work` also gets the handle, by which [`with`] finds the same pool later.
pub fn with_handle<T>(pool: *mut CxlPool, work: impl FnOnce(usize, &OpenPool) -> Outcome<T>) -> Outcome<T> {
    let handle = if pool.is_null() { default_handle()? } else { pool.addr() };
    match &*find(handle)? {
        Some(entry) => work(handle, &entry.open),
        None => Err(wrong()),
    }
}

/// Leaves and closes a pool; null is the default one, and does nothing if that is not open.
pub fn close(pool: *mut CxlPool) -> Outcome<()> {
    let _turn = pool.is_null().then(|| held(&OPENING_DEFAULT));
    let handle = if pool.is_null() { usable_default().unwrap_or(0) } else { pool.addr() };
    if handle == 0 {
        return Ok(());
    }
    match &*find(handle)? {
        Some(entry) => entry.open.leave()?,
        None => return Err(wrong()),
    }
    let _changing = held(&CHANGING);
    // Another thread may have been faster; then the place is another pool's, or empty.
    if find(handle).is_ok()
        && let Some(entry) = ENTRIES.get((handle & ((1 << PLACE_BITS) - 1)).wrapping_sub(1))
    {
        entry.store(None);
    }
    Ok(())
}

/// Runs `work` on the pool whose blocks hold `len_bytes` from `address` on, with the offset of the first.
pub fn with_address<T>(address: usize, len_bytes: usize, work: impl FnOnce(&OpenPool, u64) -> Outcome<T>) -> Outcome<T> {
    for entry in &ENTRIES[..USED.load(Ordering::Acquire).min(MAX_POOLS)] {
        if let Some(entry) = &*entry.load()
            && let Some(offset) = entry.open.offset_of(address)
        {
            check_fork(entry)?;
            entry.open.check_range(offset, len_bytes)?;
            return work(&entry.open, offset);
        }
    }
    Err(Failure::new(Status::E_NOT_IN_POOL, format!("{address:#x} does not lie in an open pool")))
}
