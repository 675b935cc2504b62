// SPDX-License-Identifier: Apache-2.0
//! A cell that is reserved for a block, until it is committed or given up.

use crate::cache::observe::events::Change;
use crate::cache::{BlockKey, Inner, Namespace};
use crate::copy::{Checksum, Outcome, WriteList};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::media::Descriptor;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A cell that this process may fill: visible to all as WRITING, and not served. Dropping it gives it up.
///
/// A caller that writes into it by address, or lets a device do so, must have stopped before it is committed or dropped.
pub struct Reservation {
    pub(in crate::cache) inner: Arc<Inner>,
    /// That of the host, which does not say that it has ended its work before this is dropped.
    pub(in crate::cache) incarnation: u32,
    pub(in crate::cache) cell: u64,
    pub(in crate::cache) offset: u64,
    pub(in crate::cache) descriptor: Descriptor,
    pub(in crate::cache) parent: Option<[u8; 16]>,
    /// When it was reserved, on this host's clock.
    pub(in crate::cache) since_ns: u64,
    /// Checksum of the whole payload, once it is known.
    pub(in crate::cache) checksum: Option<u64>,
    /// What its namespace was promised of its quota for it.
    pub(in crate::cache) promised_bytes: u64,
    /// A caller has its mapped address, and may have made stores there that are still in this machine's caches.
    pub(in crate::cache) is_in_place: AtomicBool,
    pub(in crate::cache) open: bool,
}

impl Reservation {
    /// Length of the block in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.descriptor.len_bytes.into()
    }

    /// Pool offset of the block's first byte.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The cell.
    pub fn cell(&self) -> u64 {
        self.cell
    }

    /// Its key.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    pub(in crate::cache) fn namespace(&self) -> Namespace {
        Namespace(self.descriptor.namespace)
    }

    /// Where this process maps the block, for those who fill it in place; `None` where there is no mapping. The commit flushes the stores
    /// here, and so does every path that gives the reservation up, unless it was filled as a whole since; a device that writes past this
    /// host's caches needs neither.
    pub fn address(&self) -> Option<NonNull<u8>> {
        self.is_in_place.store(true, Ordering::Relaxed);
        self.inner.lines().memory().address_for_stores(self.offset, self.len_bytes())
    }

    /// Brings what may have been stored in place out of this machine's caches. A line that stayed there would be written back onto whatever
    /// the cell holds by then.
    pub(in crate::cache) fn flush_stores(&self) -> Result<()> {
        if self.is_in_place.load(Ordering::Relaxed) {
            let memory = self.inner.lines().memory();
            memory.flush_range(self.offset, self.len_bytes())?;
            memory.fence_all();
            self.is_in_place.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// As [`Reservation::flush_stores`], where the block is not to be.
    pub(in crate::cache) fn give_up(&self) -> Result<()> {
        if mutant!("cache.given_up_unflushed") {
            return Ok(());
        }
        match self.flush_stores() {
            // No block is ever served from there, and the key must not wait for it.
            Err(Error::Poisoned { .. }) => Ok(()),
            other => other,
        }
    }

    /// Notes a checksum of the whole block, which was written past the caches.
    fn set_filled(&mut self, checksum: Option<u64>) {
        self.checksum = checksum;
        *self.is_in_place.get_mut() = false;
    }

    /// Fills the whole block from pieces that follow one another, and computes its checksum if the cache is configured so.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pieces are not as long as the block; the errors of the memory.
    pub fn fill<'m>(&mut self, pieces: impl IntoIterator<Item = &'m [u8]>) -> Result<()> {
        let list = WriteList::gather(self.offset, pieces);
        Reservation::fill_each(std::slice::from_mut(self), &[list])
    }

    pub(in crate::cache) fn check_len(&self, list: &WriteList<'_>) -> Result<()> {
        let (given_bytes, len_bytes) = (list.len_bytes(), self.len_bytes());
        match given_bytes == len_bytes {
            true => Ok(()),
            false => Err(Error::Invalid(format!(
                "the pieces have {given_bytes} bytes together, the block {len_bytes}: give all of it, in order"
            ))),
        }
    }

    /// Fills whole blocks of one cache from one list each, with one store fence after all of them.
    pub(in crate::cache) fn fill_each(reservations: &mut [Reservation], lists: &[WriteList<'_>]) -> Result<()> {
        let Some(inner) = reservations.first().map(|first| first.inner.clone()) else { return Ok(()) };
        for (reservation, list) in reservations.iter().zip(lists) {
            if !Arc::ptr_eq(&inner, &reservation.inner) {
                return Err(Error::Invalid("the reservations are of several caches: fill those of each by themselves".into()));
            }
            reservation.check_len(list)?;
        }
        let outcomes = inner.copier.publish_each(lists, inner.copier.payload_checksum());
        let mut filled = Ok(());
        for (reservation, outcome) in reservations.iter_mut().zip(outcomes) {
            // Every one of them is noted, whatever became of those before.
            filled = filled.and(reservation.note_filled(outcome));
        }
        point!("cache.filled");
        filled
    }

    /// Fills a part of the block, `at` bytes in. A block that is filled in parts has no checksum.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when the part does not lie inside the block; the errors of the memory.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let (len_bytes, limit_bytes) = (bytes.len() as u64, self.len_bytes());
        if at.checked_add(len_bytes).is_none_or(|end| end > limit_bytes) {
            return Err(Error::OutOfRange { what: "part of a block", offset: at, len_bytes, limit_bytes });
        }
        self.checksum = None;
        let list = WriteList::gather(self.offset + at, [bytes]);
        self.copy(&list, Checksum::Off)?;
        Ok(())
    }

    fn copy(&mut self, list: &WriteList<'_>, checksum: Checksum) -> Result<Option<u64>> {
        let outcome = self.inner.copier.publish(list, checksum);
        self.note_outcome(outcome)
    }

    /// Notes what became of a copy that fills the whole block.
    pub(in crate::cache) fn note_filled(&mut self, outcome: Outcome) -> Result<()> {
        self.note_outcome(outcome).map(|checksum| self.set_filled(checksum))
    }

    fn note_outcome(&mut self, outcome: Outcome) -> Outcome {
        if matches!(outcome, Err(Error::Timeout { .. })) {
            // A device may still write to the cell. It stays reserved, and this process's work unended, until the process ends and its
            // device contexts with it: only then may the cell be used again (CACHE.md C20). Its namespace pays for it.
            self.open = false;
            self.promised_bytes = 0;
            self.inner.store.local.begin_filling(self.chunk());
            self.inner.host.inner.count_operation();
        }
        outcome
    }

    /// Makes the block visible to every host, as [`crate::cache::Cache::commit_all`] does.
    ///
    /// # Errors
    /// [`Error::Fenced`]: it is not visible, unless it was for a moment.
    pub fn commit(mut self) -> Result<()> {
        let inner = self.inner.clone();
        inner.commit(std::slice::from_mut(&mut self))
    }

    fn chunk(&self) -> u64 {
        self.cell / u64::from(self.inner.geometry().cells_per_chunk)
    }

    /// The event that listeners get once it is committed.
    pub(in crate::cache) fn stored_event(&self) -> Change {
        Change::Stored {
            key: self.key(),
            parent: self.parent.map(BlockKey),
            namespace: self.namespace(),
            cell: self.cell,
            len_bytes: self.len_bytes(),
        }
    }

    /// Gives the cell up, as dropping does, and says whether that worked.
    pub fn abort(mut self) -> Result<()> {
        self.open = false;
        self.inner.clone().abort(&self)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.open {
            // Fenced: the cell is read again after the re-join. A device that is gone: with the pool.
            let _ = self.inner.clone().abort(self);
        }
        if self.promised_bytes > 0 {
            self.inner.store.cells().usage.end_promise(&self.descriptor.namespace, self.promised_bytes);
        }
        // A fenced host too says that its work has ended once this one has.
        if self.give_up().is_ok() {
            self.inner.store.local.end_filling(self.chunk(), self.inner.host.inner.tag);
        }
        self.inner.host.inner.end_operation();
    }
}
