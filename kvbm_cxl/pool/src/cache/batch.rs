// SPDX-License-Identifier: Apache-2.0
//! Payload of several blocks in one call of the copy engine: fences that are shared on a CPU, one batched copy on a GPU.

use super::pull::Pinned;
use super::{Cache, Reservation};
use crate::copy::{Checksum, LocalPlace, LocalRange, ReadList, WriteList};
use crate::error::{Error, Result};
use crate::metrics::MissReason;

impl Cache {
    /// Fills reservations, each whole from pieces in `place` that follow one another, and computes their checksums if the cache is
    /// configured so. One answer for each, in order: those of [`Reservation::fill`].
    ///
    /// # Safety
    /// Until this returns each range may be read, nobody writes to it, and it is not memory of the pool itself; what `place` names is
    /// there. After an [`Error::Timeout`] this holds until [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    pub unsafe fn fill_all(&self, place: LocalPlace, fills: &mut [(&mut Reservation, &[LocalRange])]) -> Vec<Result<()>> {
        let (mut lists, mut answers) = (Vec::with_capacity(fills.len()), Vec::with_capacity(fills.len()));
        for (reservation, pieces) in fills.iter() {
            // SAFETY: as this function demands.
            let list = unsafe { gathered(place, reservation.offset(), pieces.iter().copied()) };
            answers.push(reservation.check_length(&list));
            if answers.last().is_some_and(Result::is_ok) {
                lists.push(list);
            }
        }
        let checksum = if self.inner.config.checksums { Checksum::Xxh3 } else { Checksum::Off };
        let outcomes = self.inner.engine.publish_each(&**self.inner.lines().memory(), &lists, checksum);
        let open = fills.iter_mut().zip(&mut answers).filter(|(_, answer)| answer.is_ok());
        for (((reservation, _), answer), outcome) in open.zip(outcomes) {
            *answer = reservation.filled(outcome);
        }
        answers
    }

    /// Copies pinned blocks, each whole into pieces in `place` that follow one another. One answer for each, in order: those of
    /// [`Pinned::copy`].
    ///
    /// # Safety
    /// Until this returns each range may be written, nobody else uses it, no two blocks have a byte in common there, and it is not memory
    /// of the pool itself; what `place` names is there. After an [`Error::Timeout`] this holds until
    /// [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    ///
    /// # Errors
    /// Those of the memory, in which the descriptors are.
    pub unsafe fn copy_all(&self, place: LocalPlace, pulls: &[(&Pinned, &[LocalRange])]) -> Result<Vec<Result<Option<MissReason>>>> {
        let (mut lists, mut blocks, mut answers) = (Vec::new(), Vec::new(), Vec::with_capacity(pulls.len()));
        let mut checksum = Checksum::Off;
        for (block, pieces) in pulls {
            // SAFETY: as this function demands.
            let list = unsafe { scattered(place, block.offset(), pieces.iter().copied()) };
            match list.len_bytes() == block.len_bytes() {
                true => {
                    if block.is_summed() {
                        checksum = Checksum::Xxh3;
                    }
                    lists.push(list);
                    blocks.push(*block);
                    answers.push(Ok(None));
                }
                false => answers.push(Err(block.too_short(list.len_bytes() as usize))),
            }
        }
        self.inner.begin_copy();
        let outcomes = self.inner.engine.pull_each(&**self.inner.lines().memory(), &mut lists, checksum);
        let verdicts = self.inner.unchanged(&blocks)?;
        let open = answers.iter_mut().filter(|answer| answer.is_ok());
        for (answer, ((block, outcome), verdict)) in open.zip(blocks.iter().zip(outcomes).zip(verdicts)) {
            *answer = match outcome {
                Err(Error::Poisoned { .. }) => Ok(Some(MissReason::Device)),
                Err(error) => Err(error),
                Ok(_) if verdict.is_some() => Ok(verdict),
                Ok(sum) => Ok(block.has_wrong(sum).then_some(MissReason::Checksum)),
            };
        }
        Ok(answers)
    }
}

/// # Safety
/// As [`WriteList::lying_on`] and [`WriteList::push_raw`].
pub(super) unsafe fn gathered(place: LocalPlace, offset: u64, pieces: impl IntoIterator<Item = LocalRange>) -> WriteList<'static> {
    // SAFETY: as this function demands.
    let (mut list, mut at) = (unsafe { WriteList::lying_on(place) }, offset);
    for piece in pieces {
        // SAFETY: as this function demands.
        unsafe { list.push_raw(at, piece) };
        at = at.saturating_add(piece.len_bytes as u64);
    }
    list
}

/// # Safety
/// As [`ReadList::lying_on`] and [`ReadList::push_raw`].
pub(super) unsafe fn scattered(place: LocalPlace, offset: u64, pieces: impl IntoIterator<Item = LocalRange>) -> ReadList<'static> {
    // SAFETY: as this function demands.
    let (mut list, mut at) = (unsafe { ReadList::lying_on(place) }, offset);
    for piece in pieces {
        // SAFETY: as this function demands.
        unsafe { list.push_raw(at, piece) };
        at = at.saturating_add(piece.len_bytes as u64);
    }
    list
}
