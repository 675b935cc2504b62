// SPDX-License-Identifier: Apache-2.0
//! The process-wide SIGBUS handler: keeps the process alive when the memory of a mapping goes bad, and records the fault.
//!
//! A fault inside a registered mapping is noted in its [`Damage`], then ordinary zero pages are mapped over the 2 MiB around it, so that
//! the faulting instruction completes, in any thread. Its data does not count: the guarded operations check the note
//! afterwards and return an error. Any other SIGBUS goes to the handler before.
//!
//! The handler takes no lock, allocates nothing and calls nothing but `mmap`, `sigaction` and `raise`. What it reads is allocated when a
//! mapping is registered and freed only when no handler runs.

use super::mapping::Segment;
use crate::error::{Error, Result};
use crate::limits::MAX_DEVICES;
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The unit in which memory is marked bad: what the kernel unmaps of devdax around a poisoned byte.
pub const GRANULE_BYTES: u64 = 2 << 20;
/// Most mappings guarded at a time in one process: two for each pool that it has joined.
pub const MAX_MAPPINGS: usize = 128;

const BUS_ADRALN: c_int = 1;
const BUS_MCEERR_AR: c_int = 4;
const BUS_MCEERR_AO: c_int = 5;

/// The damage of one mapping. Written by the handler, read by every guarded operation.
pub(super) struct Damage {
    base: usize,
    len_bytes: u64,
    segments: Box<[Segment]>,
    /// Whether anything below is set: the one word that the fast path reads.
    any: AtomicBool,
    lost: AtomicU32,
    codes: [AtomicI32; MAX_DEVICES],
    poisoned: Box<[AtomicU64]>,
    /// This is the memory that a machine's processes share: the pool whose metadata is composed from it, which is closed first.
    closes: *const Damage,
    /// The memory that this pool's metadata is composed from is lost: nothing may be read or written any more.
    is_closed: AtomicBool,
}

impl Damage {
    pub(super) fn new(base: usize, len_bytes: u64, segments: &[Segment]) -> Self {
        Damage {
            base,
            len_bytes,
            segments: segments.into(),
            any: AtomicBool::new(false),
            lost: AtomicU32::new(0),
            codes: [const { AtomicI32::new(0) }; MAX_DEVICES],
            poisoned: (0..len_bytes.div_ceil(GRANULE_BYTES * 64)).map(|_| AtomicU64::new(0)).collect(),
            closes: null(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Of memory whose loss closes `pool`, which has to outlive the registration.
    pub(super) fn of_local(base: usize, len_bytes: u64, pool: &Damage) -> Self {
        let whole = Segment { start: 0, len_bytes, device: 0 };
        Damage { closes: pool, ..Damage::new(base, len_bytes, &[whole]) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    #[inline]
    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    pub(super) fn segments(&self, offset: u64, len_bytes: u64) -> &[Segment] {
        let first = self.segments.partition_point(|segment| segment.start + segment.len_bytes <= offset);
        let end = self.segments.partition_point(|segment| segment.start < offset.saturating_add(len_bytes));
        self.segments.get(first..end).unwrap_or(&[])
    }

    /// `si_code` of the fault that lost the device, if it is lost.
    pub(super) fn loss_code(&self, device: usize) -> Option<i32> {
        let lost = device < MAX_DEVICES && self.lost.load(Ordering::Acquire) & 1 << device != 0;
        lost.then(|| self.codes.get(device).map_or(0, |code| code.load(Ordering::Relaxed)))
    }

    pub(super) fn is_poisoned(&self, granule: u64) -> bool {
        self.poisoned.get((granule / 64) as usize).is_some_and(|word| word.load(Ordering::Acquire) & 1 << (granule % 64) != 0)
    }

    /// Marks every granule that the range touches. Async-signal-safe.
    pub(super) fn mark_poisoned(&self, offset: u64, len_bytes: u64) {
        let end = offset.saturating_add(len_bytes).min(self.len_bytes);
        for granule in offset / GRANULE_BYTES..end.div_ceil(GRANULE_BYTES) {
            if let Some(word) = self.poisoned.get((granule / 64) as usize) {
                word.fetch_or(1 << (granule % 64), Ordering::AcqRel);
            }
        }
        self.any.store(true, Ordering::Release);
    }

    fn mark_lost(&self, device: usize, code: i32) {
        if let Some(first) = self.codes.get(device) {
            let _ = first.compare_exchange(0, code, Ordering::AcqRel, Ordering::Relaxed);
            self.lost.fetch_or(1 << device, Ordering::AcqRel);
        }
        self.any.store(true, Ordering::Release);
    }

    /// Notes a fault at `offset` and makes the memory there usable. False when it cannot be.
    fn absorb(&self, offset: u64, code: c_int, lsb: u32) -> bool {
        let Some(segment) = self.segments(offset, 1).first() else { return false };
        // SAFETY: the pool's damage lives until this registration has ended.
        if let Some(pool) = unsafe { self.closes.as_ref() } {
            // Before zeros can be read: what a thread composes of them is then refused by the pool. All of it goes, so that none of this
            // host's processes sees one half of its memory.
            pool.close();
            self.any.store(true, Ordering::Release);
            return code == BUS_MCEERR_AO || self.replace(0, self.len_bytes);
        }
        if code == BUS_MCEERR_AR || code == BUS_MCEERR_AO {
            let radius = GRANULE_BYTES.max(1u64.checked_shl(lsb).unwrap_or(0));
            self.mark_poisoned(offset - offset % radius, radius);
        } else {
            self.mark_lost(segment.device, code);
        }
        if code == BUS_MCEERR_AO {
            return true; // It was not touched yet; an access comes here again.
        }
        let segment_end = segment.start + segment.len_bytes;
        let start = (offset - offset % GRANULE_BYTES).max(segment.start);
        let end = (start - start % GRANULE_BYTES).saturating_add(GRANULE_BYTES).min(segment_end);
        // A mapping of 1 GiB pages can only be replaced as a whole.
        self.replace(start, end - start) || self.replace(segment.start, segment.len_bytes)
    }

    fn replace(&self, offset: u64, len_bytes: u64) -> bool {
        let at = with_exposed_provenance_mut::<c_void>(self.base + offset as usize);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the range lies in a registered mapping, whose owner expects its pages to be replaced when they are gone; no thread holds
        // a Rust reference into it.
        unsafe { libc::mmap(at, len_bytes as usize, protection, flags, -1, 0) != libc::MAP_FAILED }
    }
}

static MAPPINGS: [AtomicPtr<Damage>; MAX_MAPPINGS] = [const { AtomicPtr::new(null_mut()) }; MAX_MAPPINGS];
/// Handlers at work, so that a mapping is not freed under one.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// Who handled the signal before; null before that is known. Never freed once the handler is there.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
static INSTALLED: Mutex<bool> = Mutex::new(false);

pub(super) struct Registration {
    slot: usize,
    damage: *mut Damage,
}

// SAFETY: the damage is made of atomics and of data that does not change; only `drop` frees it.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    pub(super) fn new(damage: Damage) -> Result<Self> {
        install()?;
        let damage = Box::into_raw(Box::new(damage));
        let free = |slot: &AtomicPtr<Damage>| slot.compare_exchange(null_mut(), damage, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        match MAPPINGS.iter().position(free) {
            Some(slot) => Ok(Registration { slot, damage }),
            None => {
                // SAFETY: it was just made from a box, and no slot took it.
                drop(unsafe { Box::from_raw(damage) });
                Err(Error::Full { what: "table of guarded mappings", limit: MAX_MAPPINGS as u64, advice: "close pools that are not used" })
            }
        }
    }

    #[inline]
    pub(super) fn damage(&self) -> &Damage {
        // SAFETY: it lives as long as the registration.
        unsafe { &*self.damage }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        MAPPINGS[self.slot].store(null_mut(), Ordering::SeqCst);
        // A handler that started before sees the old pointer; it runs for one system call. One that is stopped costs a leak, not a hang.
        for _ in 0..10_000 {
            if RUNNING.load(Ordering::SeqCst) == 0 {
                // SAFETY: it came from a box, its slot is empty and no handler that read the slot is left.
                drop(unsafe { Box::from_raw(self.damage) });
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn install() -> Result<()> {
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and is async-signal-safe.
    let set = |action: &libc::sigaction| unsafe { libc::sigaction(libc::SIGBUS, action, null_mut()) };
    install_with(&mut INSTALLED.lock().unwrap_or_else(PoisonError::into_inner), set)
}

/// Installs the handler with `set` unless it is there. One that failed is tried again for the next mapping.
fn install_with(is_installed: &mut bool, set: impl FnOnce(&libc::sigaction) -> c_int) -> Result<()> {
    if *is_installed {
        return Ok(());
    }
    // SAFETY: an all-zero sigaction is a valid one.
    let (mut previous, mut action): (libc::sigaction, libc::sigaction) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    // SAFETY: asks for the present handler into a local.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
        return Err(Error::last_os("reading the SIGBUS handler"));
    }
    let entry: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = handler;
    action.sa_sigaction = entry as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action.sa_mask = previous.sa_mask;
    // Known before the handler can run for the first time.
    let before = PREVIOUS.swap(Box::into_raw(Box::new(previous)), Ordering::SeqCst);
    if set(&action) != 0 {
        let error = Error::last_os("installing the SIGBUS handler");
        let unused = PREVIOUS.swap(before, Ordering::SeqCst);
        // SAFETY: made from a box above; no handler of ours runs that could have read it.
        drop(unsafe { Box::from_raw(unused) });
        return Err(error);
    }
    *is_installed = true;
    Ok(())
}

extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands over a valid siginfo, and errno is this thread's.
    let (code, errno) = unsafe { ((*info).si_code, *libc::__errno_location()) };
    RUNNING.fetch_add(1, Ordering::SeqCst);
    let absorbed = code > BUS_ADRALN && code <= BUS_MCEERR_AO && absorb(info, code);
    RUNNING.fetch_sub(1, Ordering::SeqCst);
    if !absorbed {
        pass_on(signal, code, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

fn absorb(info: *mut libc::siginfo_t, code: c_int) -> bool {
    // SAFETY: for these codes the kernel fills in the address; on 64-bit Linux `si_addr_lsb` is the 16 bits after it.
    let (address, lsb) = unsafe { ((*info).si_addr() as usize, info.cast::<u8>().add(24).cast::<i16>().read()) };
    MAPPINGS.iter().any(|slot| {
        let damage = slot.load(Ordering::SeqCst);
        // SAFETY: a pointer in the table is freed only while no handler runs.
        let Some(damage) = (unsafe { damage.as_ref() }) else { return false };
        let offset = address.wrapping_sub(damage.base) as u64;
        offset < damage.len_bytes && damage.absorb(offset, code, u32::from(lsb.unsigned_abs()))
    })
}

/// Does with a signal that is not ours what would have been done without us.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: null, or made from a box that lives for ever once the handler is there.
    let Some(previous) = (unsafe { PREVIOUS.load(Ordering::SeqCst).as_ref() }) else { return };
    let sent_by_a_process = code <= 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if sent_by_a_process => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: restores the default action; a faulting instruction then faults again, a sent signal is sent again.
            unsafe {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &default, null_mut());
                if sent_by_a_process {
                    libc::raise(signal);
                }
            }
        }
        entry if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler installed with SA_SIGINFO has this signature.
            let entry: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(entry) };
            entry(signal, info, context);
        }
        entry => {
            // SAFETY: a handler installed without SA_SIGINFO has this signature.
            let entry: extern "C" fn(c_int) = unsafe { std::mem::transmute(entry) };
            entry(signal);
        }
    }
}

#[cfg(test)]
mod tests;
