// SPDX-License-Identifier: Apache-2.0
//! What the processes of one host share about the host's chunks, in ordinary coherent memory of that machine.
//!
//! The claim lines in the pool say which chunks the *host* has; the table here says which of its *processes* has each of them, so that the
//! chunks of a process that died can be taken over. It also holds frees on their way to another process or host, and how far each message
//! of another host was worked off. Only atomics live in it; all zero is the empty state.

use super::remains::HOOKS;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::host::local_mutex::LocalMutex;
use crate::limits::{LOCAL_BYTES_ABOVE_HOST, LOCAL_BYTES_PER_CHUNK, MAX_SLOTS};
use crate::media::{BLOCKS_PER_FREE_BOX, Layout};
use crate::platform::LocalMemory;
use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Version of the structure: processes of different builds must not share an area that they lay out differently.
const VERSION: u32 = 3;
/// Frees under way that the area holds.
const PENDING: usize = 1024;
/// The places for what callers free.
pub(super) const FROM_CALLERS: Range<usize> = 0..PENDING / 2;
/// The places for what other hosts send; only the owner of the post mutex, or of the chunk lock at the attach, fills them.
pub(super) const FROM_HOSTS: Range<usize> = PENDING / 2..PENDING;
/// All bits of a message, which are more than it has blocks: its sender has the acknowledgement that it is done.
const TOLD: u64 = 0xff;
const _: () = assert!(BLOCKS_PER_FREE_BOX < TOLD.count_ones() as usize);
// At most one message per other slot is under way.
const _: () = assert!(PENDING / 2 >= (MAX_SLOTS - 1) * BLOCKS_PER_FREE_BOX);

#[repr(C, align(64))]
struct AllocHeader {
    version: AtomicU32,
    post: LocalMutex,
    /// (slot + 1) << 32 | incarnation under which this host's claim lines were last published; 0 = never.
    attached: AtomicU64,
    rejected: AtomicU64,
    /// Message of each sender that is being worked off: (own slot + 1) << 40 | sequence << 8 | one bit for each block that is done, or
    /// [`TOLD`] once it is acknowledged.
    progress: [AtomicU64; MAX_SLOTS],
    pending: [AtomicU64; PENDING],
}

/// The host-local area of the allocator, as mapped by this process. Clones are the same area.
#[derive(Clone)]
pub struct LocalArea {
    start: NonNull<u8>,
    chunks: u64,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the area is only used through atomics, and `_owner` keeps it mapped.
unsafe impl Send for LocalArea {}
// SAFETY: as above.
unsafe impl Sync for LocalArea {}

/// The slot counts as well: a machine that left may come back in another one, under an incarnation number it had before.
fn attachment(slot: u16, incarnation: u32) -> u64 {
    (u64::from(slot) + 1) << 32 | u64::from(incarnation)
}

/// A message as [`LocalArea::begin_block`] counts it, and which of its blocks are done, by the word that was found for its sender.
fn progress_of(found: u64, own: u16, sequence: u32) -> (u64, u64) {
    let message = (u64::from(own) + 1) << 40 | u64::from(sequence) << 8;
    (message, if found & !TOLD == message { found & TOLD } else { 0 })
}

/// Whether the message was begun, and its sender not told.
fn is_untold(found: u64) -> bool {
    !matches!(found & TOLD, 0 | TOLD)
}

/// Bytes of a host's local memory that the allocator takes; a multiple of 64.
pub(super) fn local_bytes(layout: &Layout) -> usize {
    (LOCAL_BYTES_ABOVE_HOST + LOCAL_BYTES_PER_CHUNK * layout.chunks() as usize).next_multiple_of(64) - 64
}

// The header and the rounding up to whole lines fit into what every host has for the layers above.
const _: () = assert!(size_of::<AllocHeader>() + 64 <= LOCAL_BYTES_ABOVE_HOST && size_of::<AtomicU32>() <= LOCAL_BYTES_PER_CHUNK);

impl LocalArea {
    /// The area of `host`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another build laid it out.
    pub fn of(host: &Host) -> Result<Self> {
        let chunks = host.lines().layout().chunks();
        let LocalMemory { start, len_bytes, owner } = host.local_part(&HOOKS)?;
        if len_bytes < Self::len_bytes(chunks) {
            return Err(Error::Invalid("the local memory has no room for the allocator: stop the older processes of this machine".into()));
        }
        // SAFETY: aligned to 64 as the segment is, long enough, mapped while `owner` lives, and nothing else uses that memory.
        unsafe { Self::at(start, chunks, owner) }
    }

    /// Bytes that the area of a pool with `chunks` chunks takes; its start is aligned to 64.
    pub const fn len_bytes(chunks: u64) -> usize {
        (size_of::<AllocHeader>() + chunks as usize * size_of::<AtomicU32>()).next_multiple_of(64)
    }

    /// The area at `start`, which is all zero or an area already; `owner` keeps it mapped.
    ///
    /// # Safety
    /// `start` is aligned to 64 and valid for reads and writes of [`LocalArea::len_bytes`] bytes for as long as `owner` lives, and
    /// every process of this host, and no other, uses those bytes in this way.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another build laid it out.
    pub unsafe fn at(start: NonNull<u8>, chunks: u64, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let area = LocalArea { start, chunks, _owner: owner };
        match area.header().version.compare_exchange(0, VERSION, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(VERSION) => Ok(area),
            Err(found) => Err(Error::Invalid(format!(
                "the allocator's local area has version {found}, this build {VERSION}: stop the older processes of this machine first"
            ))),
        }
    }

    /// An area of its own, for a host with a single process or for tests that share it by cloning.
    pub fn private(chunks: u64) -> Result<Self> {
        #[repr(align(64))]
        #[derive(Default)]
        struct Unit {
            _words: [AtomicU64; 8],
        }
        let units: Arc<[Unit]> = (0..Self::len_bytes(chunks).div_ceil(64)).map(|_| Unit::default()).collect();
        let start = NonNull::from(&*units).cast::<u8>();
        // SAFETY: the slice is aligned to 64, long enough, made of atomics, and lives with `units`, which becomes the owner.
        unsafe { Self::at(start, chunks, Arc::new(units)) }
    }

    fn header(&self) -> &AllocHeader {
        // SAFETY: `at` demands size and alignment; Header is atomics only, valid for any bytes.
        unsafe { self.start.cast::<AllocHeader>().as_ref() }
    }

    fn owners(&self) -> &[AtomicU32] {
        // SAFETY: `at` demands room for the array after the header; AtomicU32 is valid for any bytes.
        unsafe {
            std::slice::from_raw_parts(self.start.byte_add(size_of::<AllocHeader>()).cast::<AtomicU32>().as_ptr(), self.chunks as usize)
        }
    }

    /// Tag of the process that has a chunk; 0 = none. Meaningless unless the host claims the chunk.
    pub(super) fn owner(&self, chunk: u64) -> u32 {
        self.owners().get(chunk as usize).map_or(0, |owner| owner.load(Ordering::Acquire))
    }

    /// Gives a chunk to the process `tag`. The caller holds the chunk lock.
    pub(super) fn set_owner(&self, chunk: u64, tag: u32) {
        if let Some(owner) = self.owners().get(chunk as usize) {
            owner.store(tag, Ordering::Release);
        }
    }

    pub(super) fn is_attached(&self, slot: u16, incarnation: u32) -> bool {
        self.header().attached.load(Ordering::Acquire) == attachment(slot, incarnation)
    }

    /// States that they are. The caller holds the chunk lock.
    pub(super) fn set_attached(&self, slot: u16, incarnation: u32) {
        self.header().attached.store(attachment(slot, incarnation), Ordering::Release);
    }

    pub(super) fn post(&self) -> &LocalMutex {
        &self.header().post
    }

    /// Adds a block that is to be freed by another process or host; false when there is no room in `places`.
    pub(super) fn push(&self, offset: u64, places: Range<usize>) -> bool {
        self.header().pending[places].iter().any(|place| {
            place.load(Ordering::Relaxed) == 0 && place.compare_exchange(0, offset, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    pub(super) fn room(&self, places: Range<usize>) -> usize {
        self.header().pending[places].iter().filter(|place| place.load(Ordering::Relaxed) == 0).count()
    }

    pub(super) fn pending(&self) -> impl Iterator<Item = u64> + '_ {
        self.header().pending.iter().map(|place| place.load(Ordering::Acquire)).filter(|&offset| offset != 0)
    }

    /// Takes one waiting entry for `offset` out; false when another thread was faster.
    pub(super) fn pull(&self, offset: u64) -> bool {
        self.header().pending.iter().any(|place| {
            place.load(Ordering::Relaxed) == offset && place.compare_exchange(offset, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })
    }

    /// Marks block `index` of message `sequence` of `sender` to this host in slot `own` as done; false when it was already. Senders number
    /// their messages to each slot by themselves, so a machine that comes back in another one starts over.
    pub(super) fn begin_block(&self, own: u16, sender: u16, sequence: u32, index: usize) -> bool {
        let progress = &self.header().progress[usize::from(sender)];
        let begin = |found: u64| {
            let (message, done) = progress_of(found, own, sequence);
            (done >> index & 1 == 0).then_some(message | done | 1 << index)
        };
        progress.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin).is_ok()
    }

    /// The blocks of a message that [`LocalArea::begin_block`] recorded, one bit for each.
    pub(super) fn begun_blocks(&self, own: u16, sender: u16, sequence: u32) -> u64 {
        let found = self.header().progress[usize::from(sender)].load(Ordering::Acquire);
        progress_of(found, own, sequence).1
    }

    /// States that no message of a sender is here that is not acknowledged. For those who may work one off.
    pub(super) fn set_told(&self, sender: u16) {
        let progress = &self.header().progress[usize::from(sender)];
        let told = |found| is_untold(found).then_some(found | TOLD);
        // None under way is the usual case.
        let _ = progress.fetch_update(Ordering::AcqRel, Ordering::Acquire, told);
    }

    /// Whether blocks of a message were freed, and it is not acknowledged.
    pub(super) fn is_untold(&self) -> bool {
        self.header().progress.iter().any(|progress| is_untold(progress.load(Ordering::Acquire)))
    }

    pub(super) fn count_rejected(&self, count: u64) {
        self.header().rejected.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn count_rejected_frees(&self) -> u64 {
        self.header().rejected.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
