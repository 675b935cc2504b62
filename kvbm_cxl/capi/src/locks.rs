// SPDX-License-Identifier: Apache-2.0
//! Locks held across calls of a handle.
//!
//! A guard of the pool borrows its host, but C acquires in one call and releases in another. A held lock is therefore one value that owns
//! both, and stands in a table until its thread gives it back. Only that thread may: what it wrote past its caches is ordered by its own
//! fences, so a release from elsewhere could overtake it.

use crate::status::{Failure, Outcome, Status};
use cxl_pool::background;
use cxl_pool::host::Host;
use cxl_pool::lock::{LockGuard, LockId};
use cxl_pool::media::Geometry;
use self_cell::self_cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

self_cell! {
    struct Held {
        owner: Host,

        #[covariant]
        dependent: LockGuard,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// What it protects has to be repaired before use.
    pub recovered: bool,
    pub grant: u32,
}

#[derive(Default)]
struct LockPlace {
    /// Number of the thread that holds the lock; 0 = none of this handle's.
    holder: AtomicU64,
    held: Mutex<Option<Held>>,
}

pub struct Locks {
    places: Box<[LockPlace]>,
    /// The first lock that users may take.
    first: LockId,
}

fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

impl Locks {
    pub fn new(geometry: &Geometry) -> Self {
        Locks { places: (0..geometry.locks).map(|_| LockPlace::default()).collect(), first: geometry.first_user_lock() }
    }

    fn place(&self, lock: LockId) -> Outcome<&LockPlace> {
        let place = self.places.get(lock as usize).filter(|_| lock >= self.first);
        place.ok_or_else(|| {
            let last = self.places.len().saturating_sub(1);
            Failure::invalid(format!("lock {lock} is not one of the locks {} to {last} that can be allocated", self.first))
        })
    }

    fn mine(&self, lock: LockId) -> Outcome<&LockPlace> {
        let place = self.place(lock)?;
        match place.holder.load(Ordering::Relaxed) {
            holder if holder == this_thread() => Ok(place),
            0 => Err(Failure::new(Status::E_NOT_HELD, format!("lock {lock} is not held"))),
            _ => Err(Failure::new(Status::E_NOT_HELD, format!("lock {lock} is held by another thread: that one has to release it"))),
        }
    }

    /// Acquires a lock. One that needs a repair is only held afterwards if the caller takes it so.
    pub fn acquire(&self, host: &Host, lock: LockId, timeout_ms: u64, take_damaged: bool) -> Outcome<Acquired> {
        let place = self.place(lock)?;
        if place.holder.load(Ordering::Relaxed) == this_thread() {
            return Err(Failure::new(Status::E_DEADLOCK, format!("this thread holds lock {lock} already")));
        }
        let held = Held::try_new(host.clone(), |host| host.acquire(lock, timeout_ms))?;
        let guard = held.borrow_dependent();
        let acquired = Acquired { recovered: guard.needs_repair(), grant: guard.grant() };
        if acquired.recovered && !take_damaged {
            return Err(Failure::new(
                Status::E_RECOVERED,
                format!(
                    "the last holder of lock {lock} may not have ended its section: acquire it with cxl_shm_acquire_lock_ex, repair, and \
                     call cxl_shm_lock_repaired"
                ),
            ));
        }
        *background::held(&place.held) = Some(held);
        place.holder.store(this_thread(), Ordering::Relaxed);
        Ok(acquired)
    }

    pub fn release(&self, lock: LockId) -> Outcome<()> {
        let place = self.mine(lock)?;
        let held = background::held(&place.held).take();
        // Before the guard goes: the next thread to acquire finds its place empty.
        place.holder.store(0, Ordering::Relaxed);
        if held.is_some_and(|held| held.borrow_dependent().is_live()) {
            return Ok(());
        }
        Err(Failure::new(
            Status::E_FENCED,
            format!("this host was fenced while it held lock {lock}: it is released, and the next holder must repair"),
        ))
    }

    /// States whether what a lock of the calling thread protects is whole.
    pub fn set_repaired(&self, lock: LockId, repaired: bool) -> Outcome<()> {
        let place = self.mine(lock)?;
        if let Some(held) = &mut *background::held(&place.held) {
            held.with_dependent_mut(|_, guard| if repaired { guard.repaired() } else { guard.damaged() });
        }
        Ok(())
    }

    /// Whether a thread holds the lock through this handle.
    pub fn is_held(&self, lock: LockId) -> Outcome<bool> {
        Ok(self.place(lock)?.holder.load(Ordering::Relaxed) != 0)
    }

    pub fn count_held(&self) -> usize {
        self.places.iter().filter(|place| place.holder.load(Ordering::Relaxed) != 0).count()
    }
}
