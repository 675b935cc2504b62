// SPDX-License-Identifier: Apache-2.0
//! Lists of pieces to copy, each a stretch of this process's memory and the stretch of the pool that it goes to or comes from.
//!
//! One list is one block's transfer: gather (many local pieces, one stretch of the pool), scatter (the reverse) or sparse (many, many).
//! Lists are of any length (Beluga section 6.1); pieces of no bytes are left out, and a piece that continues the one before it on both
//! sides becomes part of it.

use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Where the local ranges of a list lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalPlace {
    /// In memory of this process that its CPUs read and write.
    #[default]
    Host,
    /// On a GPU.
    Gpu(OnGpu),
}

/// Memory of a GPU, by its addresses in CUDA (`CUdeviceptr`, `Tensor.data_ptr()`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnGpu {
    /// Number of the GPU as the CUDA driver of this process counts.
    pub device: u32,
    /// What the copy comes after.
    pub after: After,
}

/// What a copy of GPU memory comes after. The handles are CUDA's own, as PyTorch gives them (`Stream.cuda_stream`, `Event.cuda_event`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum After {
    /// Nothing: the caller has seen the end of everything that uses the memory.
    #[default]
    Nothing,
    /// Everything that was given to this stream (`CUstream`; 0 is the default stream) before the copy is asked for.
    Stream(u64),
    /// The work that this event (`CUevent`) was recorded after: later work of the stream is not waited for.
    Event(u64),
}

impl LocalPlace {
    /// The GPU, where it is one.
    pub fn gpu(&self) -> Option<u32> {
        match self {
            LocalPlace::Host => None,
            LocalPlace::Gpu(on) => Some(on.device),
        }
    }

    pub(super) fn after(&self) -> After {
        match self {
            LocalPlace::Host => After::Nothing,
            LocalPlace::Gpu(on) => on.after,
        }
    }

    /// Whether an engine that reaches this GPU's memory, or with `None` the host's, may take a list; `has_slices` if slices are in it.
    pub(super) fn check(&self, reached: Option<u32>, has_slices: bool) -> Result<()> {
        let name = |gpu: Option<u32>| gpu.map_or("the host".to_owned(), |device| format!("GPU {device}"));
        if self.gpu() != reached {
            return Err(Error::Invalid(format!(
                "copying memory of {}: this engine reaches memory of {} alone: give the list to an engine of its place",
                name(self.gpu()),
                name(reached)
            )));
        }
        match has_slices && reached.is_some() {
            true => Err(Error::Invalid(format!("copying memory of {}: a slice of host memory is in the same list", name(reached)))),
            false => Ok(()),
        }
    }
}

/// A stretch of this process's memory, or of a GPU's as the list says, for callers that have addresses.
#[derive(Clone, Copy, Debug)]
pub struct LocalRange {
    /// First byte. Anything where the length is zero.
    pub address: NonNull<u8>,
    /// Length in bytes.
    pub len_bytes: usize,
}

/// One entry of a list. Offsets and lengths are as the caller gave them until [`Checked`] has looked at them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    address: usize,
    pub(super) len_bytes: usize,
}

#[derive(Clone, Copy)]
pub(super) struct ListPieces<'p> {
    pub(super) list: usize,
    pub(super) pieces: &'p [Piece],
}

impl Piece {
    /// Of host memory that was got otherwise than in a list.
    pub(super) fn in_host(offset: u64, address: usize, len_bytes: usize) -> Piece {
        Piece { offset, address, len_bytes }
    }

    /// Whether another begins in the pool, and in local memory, where this one ends.
    pub(super) fn is_before(&self, next: &Piece) -> bool {
        self.end() == next.offset && self.address.checked_add(self.len_bytes) == Some(next.address)
    }

    /// The part of this piece that begins `skip` bytes in and is `len_bytes` long. It lies inside the piece.
    pub(super) fn part(&self, skip: usize, len_bytes: usize) -> Piece {
        Piece { offset: self.offset + skip as u64, address: self.address + skip, len_bytes }
    }

    /// The local bytes of a piece of a write list.
    ///
    /// # Safety
    /// The piece is of a [`WriteList`] of host memory that is alive, or a part of one.
    pub(super) unsafe fn source<'p>(&self) -> &'p [u8] {
        // SAFETY: who filled the list promised that these bytes may be read and do not change while it is used.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.len_bytes) }
    }

    /// The local bytes of a piece of a read list.
    ///
    /// # Safety
    /// The piece is of a [`ReadList`] of host memory that is alive and borrowed mutably, or a part of one, and no other reference to these
    /// bytes exists.
    pub(super) unsafe fn destination<'p>(&self) -> &'p mut [u8] {
        // SAFETY: who filled the list promised that these bytes may be written and have no other user while it is used; the list was found
        // not to name a byte twice.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.address), self.len_bytes) }
    }

    pub(super) fn address(&self) -> usize {
        self.address
    }

    pub(super) fn end(&self) -> u64 {
        self.offset.saturating_add(self.len_bytes as u64)
    }
}

/// What flash reads at a time, in bytes.
const FLASH_PAGE_BYTES: u64 = 4096;

/// Mostly one, which then costs no allocation.
type Pieces = SmallVec<[Piece; 1]>;

fn append(pieces: &mut Pieces, offset: u64, address: usize, len_bytes: usize) {
    if len_bytes == 0 {
        return;
    }
    if let Some(last) = pieces.last_mut()
        && last.offset.checked_add(last.len_bytes as u64) == Some(offset)
        && last.address.checked_add(last.len_bytes) == Some(address)
        && let Some(together) = last.len_bytes.checked_add(len_bytes)
    {
        last.len_bytes = together;
        return;
    }
    pieces.push(Piece { offset, address, len_bytes });
}

/// Local memory to be copied into the pool.
///
/// The stretches of the pool may come in any order but must not overlap: such a list is refused before a byte moves, because who wins
/// would depend on how the work is divided.
#[derive(Debug, Default)]
pub struct WriteList<'m> {
    pieces: Pieces,
    place: LocalPlace,
    /// Whether any piece is a slice, which lies in the host's memory.
    has_slices: bool,
    memory: PhantomData<&'m [u8]>,
}

impl<'m> WriteList<'m> {
    /// A list of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A list of nothing, whose pieces will be addresses in `place`: [`WriteList::push_raw`] alone can fill it.
    ///
    /// # Safety
    /// A stream or event that `place` names is there until the last use of the list.
    pub unsafe fn lying_on(place: LocalPlace) -> Self {
        WriteList { place, ..Self::default() }
    }

    /// Where the local ranges lie.
    pub fn place(&self) -> LocalPlace {
        self.place
    }

    /// Many local pieces into the stretch of the pool that begins at `offset`, one after the other.
    pub fn gather(offset: u64, sources: impl IntoIterator<Item = &'m [u8]>) -> Self {
        let (mut list, mut at) = (Self::new(), offset);
        for source in sources {
            list.push(at, source);
            // An end beyond all offsets is out of range, which is found when the list is used.
            at = at.saturating_add(source.len() as u64);
        }
        list
    }

    /// Adds bytes that go to the pool offset `offset`.
    pub fn push(&mut self, offset: u64, source: &'m [u8]) {
        self.has_slices = true;
        append(&mut self.pieces, offset, source.as_ptr().expose_provenance(), source.len());
    }

    /// Adds bytes that go to the pool offset `offset`, by address.
    ///
    /// # Safety
    /// Until the last use of this list the range may be read, no thread writes to it, and it is not memory of the pool. Ranges that
    /// adjoin may be read as one. It lies where [`WriteList::place`] says, and after a [`Error::Timeout`] this holds until
    /// [`super::CopyEngine::is_settled`].
    pub unsafe fn push_raw(&mut self, offset: u64, source: LocalRange) {
        append(&mut self.pieces, offset, source.address.as_ptr().expose_provenance(), source.len_bytes);
    }

    /// Forgets all pieces and keeps the room, for the next block.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.has_slices = false;
    }

    /// Pieces left after joining neighbours.
    pub fn pieces_len(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes in all, `u64::MAX` where that is more.
    pub fn len_bytes(&self) -> u64 {
        total(&self.pieces)
    }

    /// Checks a list of host memory against a pool of `pool_bytes`, and puts it in the order of the pool where `whole` asks for one
    /// stretch.
    pub(super) fn check(&self, pool_bytes: u64, whole: bool) -> Result<Cow<'_, [Piece]>> {
        self.check_on(None, pool_bytes, whole)
    }

    /// As [`WriteList::check`], for an engine that reaches the memory of one GPU.
    pub(super) fn check_on(&self, gpu: Option<u32>, pool_bytes: u64, whole: bool) -> Result<Cow<'_, [Piece]>> {
        self.place.check(gpu, self.has_slices)?;
        in_range(&self.pieces, pool_bytes)?;
        let pieces = in_pool_order(&self.pieces);
        if let Some([one, other]) = pairs(&pieces).find(|[one, other]| one.end() > other.offset) {
            return Err(Error::Invalid(format!(
                "copying into the pool: the pieces at {:#x} (+{} bytes) and {:#x} overlap: give every byte of the pool once",
                one.offset, one.len_bytes, other.offset
            )));
        }
        if whole {
            one_stretch(&pieces)?;
        }
        Ok(pieces)
    }
}

/// Stretches of the pool to be copied to local memory.
///
/// The stretches of the pool may come in any order and repeat. Two pieces to the same local byte, which only [`ReadList::push_raw`] can
/// name, are refused before a byte moves.
#[derive(Debug, Default)]
pub struct ReadList<'m> {
    pieces: Pieces,
    /// Whether any piece came by address, so that overlaps are possible.
    has_raw: bool,
    place: LocalPlace,
    /// Whether any piece is a slice, which lies in the host's memory.
    has_slices: bool,
    memory: PhantomData<&'m mut [u8]>,
}

impl<'m> ReadList<'m> {
    /// A list of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A list of nothing, whose pieces will be addresses in `place`: [`ReadList::push_raw`] alone can fill it.
    ///
    /// # Safety
    /// A stream or event that `place` names is there until the last use of the list.
    pub unsafe fn lying_on(place: LocalPlace) -> Self {
        ReadList { place, ..Self::default() }
    }

    /// Where the local ranges lie.
    pub fn place(&self) -> LocalPlace {
        self.place
    }

    /// The stretch of the pool that begins at `offset` into many local pieces, one after the other.
    pub fn scatter(offset: u64, destinations: impl IntoIterator<Item = &'m mut [u8]>) -> Self {
        let (mut list, mut at) = (Self::new(), offset);
        for destination in destinations {
            let len_bytes = destination.len() as u64;
            list.push(at, destination);
            at = at.saturating_add(len_bytes);
        }
        list
    }

    /// Adds room for bytes that come from the pool offset `offset`.
    pub fn push(&mut self, offset: u64, destination: &'m mut [u8]) {
        self.has_slices = true;
        append(&mut self.pieces, offset, destination.as_mut_ptr().expose_provenance(), destination.len());
    }

    /// Adds room for bytes that come from the pool offset `offset`, by address.
    ///
    /// # Safety
    /// Until the last use of this list the range may be written, no other thread reads or writes it, no other list used in the same call
    /// names it, and it is not memory of the pool. Ranges that adjoin may be written as one. It lies where
    /// [`ReadList::place`] says, and after a [`Error::Timeout`] this holds until [`super::CopyEngine::is_settled`].
    pub unsafe fn push_raw(&mut self, offset: u64, destination: LocalRange) {
        self.has_raw |= destination.len_bytes > 0;
        append(&mut self.pieces, offset, destination.address.as_ptr().expose_provenance(), destination.len_bytes);
    }

    /// Forgets all pieces and keeps the room, for the next block.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.has_raw = false;
        self.has_slices = false;
    }

    /// Pieces left after joining neighbours.
    pub fn pieces_len(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes in all, `u64::MAX` where that is more.
    pub fn len_bytes(&self) -> u64 {
        total(&self.pieces)
    }

    /// Offset and length of a piece that does not lie within `len_bytes` from pool offset `offset` on, if there is one.
    pub(crate) fn outside(&self, offset: u64, len_bytes: u64) -> Option<(u64, u64)> {
        let end = offset.saturating_add(len_bytes);
        let found = self.pieces.iter().find(|piece| piece.offset < offset || piece.end() > end)?;
        Some((found.offset, found.len_bytes as u64))
    }

    /// One line in each stretch of `page_bytes` (a multiple of 4096) that the pieces touch, as far as they lie within a pool of
    /// `pool_bytes`. Stretches begin where pieces do that follow each other, at the page of flash there.
    pub(super) fn lines_by_page(&self, page_bytes: u64, pool_bytes: u64) -> Vec<u64> {
        let mut lines = Vec::new();
        // Where the last stretch begins and ends.
        let (mut start, mut end) = (0, 0);
        for piece in self.pieces.iter().filter(|piece| piece.len_bytes > 0 && piece.end() <= pool_bytes) {
            if !(start..=end).contains(&piece.offset) {
                end = piece.offset / FLASH_PAGE_BYTES * FLASH_PAGE_BYTES;
            }
            while end < piece.end() {
                (start, end) = (end, end + page_bytes);
                lines.push(start.max(piece.offset / LINE_BYTES as u64 * LINE_BYTES as u64));
            }
        }
        lines
    }

    pub(crate) fn is_one_stretch(&self) -> bool {
        pairs(&self.pieces).all(|[one, other]| one.end() == other.offset)
    }

    /// Checks a list of host memory against a pool of `pool_bytes`, and puts it in the order of the pool where `whole` asks for one
    /// stretch.
    pub(super) fn check(&self, pool_bytes: u64, whole: bool) -> Result<Cow<'_, [Piece]>> {
        self.check_on(None, pool_bytes, whole)
    }

    /// As [`ReadList::check`], for an engine that reaches the memory of one GPU.
    pub(super) fn check_on(&self, gpu: Option<u32>, pool_bytes: u64, whole: bool) -> Result<Cow<'_, [Piece]>> {
        self.place.check(gpu, self.has_slices)?;
        in_range(&self.pieces, pool_bytes)?;
        if self.has_raw {
            let mut places: Vec<(usize, usize)> = Vec::new();
            if !self.pieces.is_sorted_by_key(|piece| piece.address) {
                // Stable, because that sort is fast on partly sorted input, as lists that go layer by layer are.
                places.extend(self.pieces.iter().map(|piece| (piece.address, piece.len_bytes)));
                places.sort_by_key(|place| place.0);
            }
            let overlaps = |one: (usize, usize), other: (usize, usize)| one.0.saturating_add(one.1) > other.0;
            let twice = match places.is_empty() {
                true => pairs(&self.pieces).any(|[one, other]| overlaps((one.address, one.len_bytes), (other.address, 0))),
                false => places.windows(2).any(|pair| matches!(pair, &[one, other] if overlaps(one, other))),
            };
            if twice {
                return Err(Error::Invalid(
                    "copying from the pool: two pieces have the same local byte as destination: give every local byte once".into(),
                ));
            }
        }
        if !whole {
            return Ok(Cow::Borrowed(&self.pieces));
        }
        let pieces = in_pool_order(&self.pieces);
        one_stretch(&pieces)?;
        Ok(pieces)
    }
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len_bytes as u64))
}

fn pairs(pieces: &[Piece]) -> impl Iterator<Item = [&Piece; 2]> {
    pieces.iter().zip(pieces.iter().skip(1)).map(|(one, other)| [one, other])
}

fn in_range(pieces: &[Piece], limit_bytes: u64) -> Result<()> {
    let is_in = |piece: &Piece| {
        let len_bytes = piece.len_bytes as u64;
        len_bytes <= limit_bytes && piece.offset <= limit_bytes - len_bytes
    };
    match pieces.iter().find(|piece| !is_in(piece)) {
        Some(piece) => {
            let (offset, len_bytes) = (piece.offset, piece.len_bytes as u64);
            Err(Error::OutOfRange { what: "piece of a copy list", offset, len_bytes, limit_bytes })
        }
        None => Ok(()),
    }
}

fn in_pool_order(pieces: &[Piece]) -> Cow<'_, [Piece]> {
    if pieces.is_sorted_by_key(|piece| piece.offset) {
        return Cow::Borrowed(pieces);
    }
    let mut sorted = pieces.to_vec();
    sorted.sort_by_key(|piece| piece.offset);
    Cow::Owned(sorted)
}

/// A checksum is of one stretch of the pool, in its order, however the list was cut.
fn one_stretch(pieces: &[Piece]) -> Result<()> {
    match pairs(pieces).find(|[one, other]| one.end() != other.offset) {
        Some([one, other]) => Err(Error::Invalid(format!(
            "checksum of a copy: the pieces at {:#x} (+{} bytes) and {:#x} do not adjoin: a checksum is of one stretch of the pool",
            one.offset, one.len_bytes, other.offset
        ))),
        None => Ok(()),
    }
}
