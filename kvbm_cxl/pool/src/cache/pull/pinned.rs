// SPDX-License-Identifier: Apache-2.0
//! A block that this process has pinned, and how it is used: copied, or read where it lies.

use crate::cache::{BlockKey, Inner, Namespace};
use crate::copy::{LocalPlace, LocalRange, ReadList};
use crate::error::{Error, Result};
use crate::media::Descriptor;
use crate::metrics::MissReason;
use std::ptr::NonNull;
use std::sync::Arc;

/// A block that stays: its cell is neither freed nor written until this is dropped, as long as this host is not fenced.
///
/// Bytes are right only if [`Pinned::is_unchanged`] says so after their use; the methods that copy do that themselves.
pub struct Pinned {
    pub(in crate::cache) inner: Arc<Inner>,
    pub(in crate::cache) cell: u64,
    pub(in crate::cache) offset: u64,
    pub(in crate::cache) descriptor: Descriptor,
    /// Incarnation of this host under which the pin was published.
    pub(in crate::cache) incarnation: u32,
    pub(in crate::cache) held: bool,
}

impl Pinned {
    /// Gives several pins back, as dropping them one by one does, but publishes each line of pins once.
    pub fn release_all(blocks: impl IntoIterator<Item = Pinned>) {
        let mut blocks: Vec<Pinned> = blocks.into_iter().collect();
        for of_one in blocks.chunk_by_mut(|one, other| Arc::ptr_eq(&one.inner, &other.inner)) {
            let cells: Vec<u64> = of_one.iter_mut().map(Pinned::let_go).collect();
            of_one[0].inner.pins.unpin(&cells);
        }
    }

    /// Leaves it to the caller to give the pin of the cell back.
    fn let_go(&mut self) -> u64 {
        self.held = false;
        self.cell
    }

    /// Length of the block in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.descriptor.len_bytes.into()
    }

    /// Its key.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    /// Its namespace.
    pub fn namespace(&self) -> Namespace {
        Namespace(self.descriptor.namespace)
    }

    /// The cell.
    pub fn cell(&self) -> u64 {
        self.cell
    }

    /// Pool offset of the first byte.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Incarnation of this host that the pin is of: once it is fenced the block may go.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Slot of the host that owns the cell.
    pub fn owner(&self) -> u16 {
        self.descriptor.owner
    }

    /// Where this process maps the block, for use in place; `None` where there is no mapping. Drop what this host's caches
    /// may hold of it first ([`Pinned::invalidate`]), and believe the result only if [`Pinned::is_unchanged`] afterwards.
    pub fn address(&self) -> Option<NonNull<u8>> {
        self.inner.lines().memory().address(self.offset, self.len_bytes())
    }

    /// Drops the block's lines from this host's caches, so that the next read comes from the memory.
    pub fn invalidate(&self) -> Result<()> {
        let memory = self.inner.lines().memory();
        memory.flush_range(self.offset, self.len_bytes())?;
        memory.fence_all();
        Ok(())
    }

    /// Whether the block is unchanged since it was pinned. Ask after every use in place: only a yes makes the bytes that were read right.
    pub fn is_unchanged(&self) -> Result<bool> {
        self.inner.lines().memory().fence_loads();
        Ok(self.inner.copier.verify_unchanged(&[self])?.iter().all(Option::is_none))
    }

    /// Copies the block into `destination`, which may be longer than the block; `None`, or why it is a miss.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the destination is too short; the errors of the host and of the memory, except damage of the block itself.
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<Option<MissReason>> {
        let len_bytes = destination.len();
        match destination.get_mut(..self.len_bytes() as usize) {
            Some(destination) => self.copy(&mut ReadList::scatter(self.offset, [destination])),
            None => Err(self.too_short(len_bytes)),
        }
    }

    /// A list that scatters the block over pieces by address, in order, which lie in `local`; for [`Pinned::copy`].
    ///
    /// # Safety
    /// Until the last use of the list each range may be written, no other thread uses it, it is not memory of the pool, and a stream or
    /// event that `local` names is there.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pieces are not as long as the block.
    pub unsafe fn scatter_in(&self, local: LocalPlace, pieces: impl IntoIterator<Item = LocalRange>) -> Result<ReadList<'static>> {
        // SAFETY: as this function demands.
        let (mut list, mut at) = (unsafe { ReadList::lying_on(local) }, self.offset);
        for piece in pieces {
            // SAFETY: as this function demands.
            unsafe { list.push_raw(at, piece) };
            at = at.saturating_add(piece.len_bytes as u64);
        }
        if list.len_bytes() != self.len_bytes() { Err(self.too_short(list.len_bytes() as usize)) } else { Ok(list) }
    }

    fn too_short(&self, len_bytes: usize) -> Error {
        Error::Invalid(format!("the destination has {len_bytes} bytes, the block {}: give room for all of it", self.len_bytes()))
    }

    /// Copies parts of the block as `list` says, whose offsets lie inside it; `None`, or why it is a miss. The checksum is looked at when
    /// the list takes the whole block.
    ///
    /// # Errors
    /// As [`Pinned::copy_to`], and [`Error::OutOfRange`] for parts outside of the block.
    pub fn copy(&self, list: &mut ReadList<'_>) -> Result<Option<MissReason>> {
        Ok(self.inner.copier.copy_each(&[self], std::slice::from_mut(list))?.pop().flatten())
    }

    /// Lets `use_bytes` read the block where it lies, and gives its result if the block did not change meanwhile. Without a mapping it
    /// reads a copy.
    ///
    /// Until the check the bytes may be anything, if this host is fenced meanwhile: `use_bytes` must survive any bytes, and nothing of
    /// what it does besides its result may count.
    pub fn read<T>(&self, use_bytes: impl FnOnce(&[u8]) -> T) -> Result<std::result::Result<T, MissReason>> {
        let Some(address) = self.address() else {
            let mut copy = vec![0; self.len_bytes() as usize];
            return Ok(match self.copy_to(&mut copy)? {
                None => Ok(use_bytes(&copy)),
                Some(miss) => Err(miss),
            });
        };
        self.invalidate()?;
        // SAFETY: the range lies inside the mapping, which lives as long as `self.inner`; the pin keeps every owner from writing to it, and
        // a write by a host that disregards this is what the documentation warns of.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), self.len_bytes() as usize) };
        let result = use_bytes(bytes);
        Ok(if self.is_unchanged()? { Ok(result) } else { Err(MissReason::Changed) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.held {
            self.inner.pins.unpin(&[self.cell]);
        }
    }
}
