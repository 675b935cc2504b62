// SPDX-License-Identifier: Apache-2.0
//! The local tier's mutex: in memory that the processes of one machine share, and able to outlive any of them.
//!
//! A word holds the owner's tag (process index and generation in the process table), so a waiter that has waited for a while can ask
//! whether that process still exists and take the mutex over. A POSIX robust mutex would do on a real machine; this one also runs on
//! simulated hosts, because it waits through [`Platform::park`].

use crate::platform::Platform;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set in the word while a thread may be parked on it.
const WAITERS: u32 = 1 << 31;
/// How long a waiter is parked before it looks whether the owner lives, in nanoseconds.
const CHECK_OWNER_NS: u64 = 5_000_000;
/// Polls before a waiter parks.
const SPINS: u32 = 64;
/// Polls between two looks at the owner.
const SPINS_PER_CHECK: u32 = 32;

#[repr(transparent)]
#[derive(Default)]
pub(crate) struct LocalMutex(AtomicU32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Its last owner gave it back.
    Clean,
    /// Its last owner died with it: what it protects may be half done.
    FromDead,
}

/// Who asks: the tag of this process, and how to tell whether another tag's process still lives.
pub(crate) struct Asker<'a> {
    pub tag: u32,
    pub platform: &'a dyn Platform,
    pub is_alive: &'a dyn Fn(u32) -> bool,
}

impl LocalMutex {
    /// Takes the mutex if it is free.
    pub fn try_lock(&self, tag: u32) -> bool {
        self.0.compare_exchange(0, tag, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Takes the mutex, from a dead owner if need be; `None` at the deadline (on the platform's clock).
    pub fn lock(&self, asker: &Asker<'_>, deadline_ns: u64) -> Option<Acquired> {
        if self.try_lock(asker.tag) {
            return Some(Acquired::Clean);
        }
        let mut round = 0;
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word & !WAITERS == 0 {
                // Keeps the waiters bit: every other parked thread must be woken by this owner's unlock.
                if self.0.compare_exchange(word, asker.tag | (word & WAITERS), Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Some(Acquired::Clean);
                }
                continue;
            }
            // Asked now and then while spinning, and always before giving up: a dead owner is no reason for a time-out.
            let now_ns = if round < SPINS { 0 } else { asker.platform.now_ns() };
            if (round % SPINS_PER_CHECK == 0 || round >= SPINS) && !(asker.is_alive)(word & !WAITERS) {
                if self.0.compare_exchange(word, asker.tag | (word & WAITERS), Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Some(Acquired::FromDead);
                }
                continue;
            }
            if round < SPINS {
                asker.platform.relax(round);
                round += 1;
                continue;
            }
            if now_ns >= deadline_ns {
                return None;
            }
            let parked = word | WAITERS;
            if word == parked || self.0.compare_exchange(word, parked, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                asker.platform.park(&self.0, parked, CHECK_OWNER_NS.min(deadline_ns - now_ns));
            }
        }
    }

    /// Takes the mutex if it is free or its owner is dead.
    pub fn try_lock_or_inherit(&self, asker: &Asker<'_>) -> Option<Acquired> {
        if self.try_lock(asker.tag) {
            return Some(Acquired::Clean);
        }
        let word = self.0.load(Ordering::Relaxed);
        let owner = word & !WAITERS;
        let taken = if owner == 0 {
            Acquired::Clean
        } else if !(asker.is_alive)(owner) {
            Acquired::FromDead
        } else {
            return None;
        };
        self.0.compare_exchange(word, asker.tag | (word & WAITERS), Ordering::Acquire, Ordering::Relaxed).ok().map(|_| taken)
    }

    pub fn is_locked(&self) -> bool {
        self.0.load(Ordering::Acquire) & !WAITERS != 0
    }

    /// Frees the mutex of any owner. No thread uses it meanwhile.
    pub fn free(&self) {
        self.0.store(0, Ordering::Release);
    }

    pub fn unlock(&self, platform: &dyn Platform) {
        if self.0.swap(0, Ordering::Release) & WAITERS != 0 {
            // The woken one sets the bit again if it has to park once more; the others time out of their park and look.
            platform.wake(&self.0);
        }
    }
}
