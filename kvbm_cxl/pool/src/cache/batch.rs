// SPDX-License-Identifier: Apache-2.0
//! Several blocks at once, chained or not: lookups, pins, copies and looks of a batch share their fences, so that their misses overlap
//! (Beluga section 6.1: lists of any length).

use super::index::Index;
use super::{BlockInfo, BlockKey, Cache, Inner, Namespace, Pinned, Pulled, Reservation};
use crate::copy::{LocalPlace, LocalRange, WriteList};
use crate::error::{Error, Result};
use crate::metrics::MissReason;
use std::sync::Arc;

/// Blocks that are pinned and copied together: enough for their misses to overlap, few enough that no eviction waits for long.
const GROUP: usize = 64;

impl Cache {
    /// Which of several blocks are there; one answer for each key, in order. Advice, as [`Cache::lookup`].
    ///
    /// # Errors
    /// Those of the memory.
    pub fn lookup_all(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Option<BlockInfo>>> {
        let found = self.inner.index.found_of(namespace, keys)?;
        let hits = found.iter().flatten().count();
        self.inner.metrics.hits_total.add(hits as u64);
        self.inner.metrics.misses_total.of(MissReason::Absent).add((found.len() - hits) as u64);
        Ok(found)
    }

    /// Pins several blocks, chained or not; one answer for each key, in order.
    ///
    /// # Errors
    /// As [`Cache::pin`]; then none of them is pinned.
    pub fn pin_all(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<std::result::Result<Pinned, MissReason>>> {
        let answers = self.inner.pin_each(namespace, keys)?;
        for answer in &answers {
            match answer {
                Ok(_) => self.inner.metrics.hits_total.inc(),
                Err(reason) => self.inner.metrics.misses_total.of(*reason).inc(),
            }
        }
        Ok(answers)
    }

    /// Copies several blocks into pieces by address, all of which lie in `local`; one answer for each key, in order. `pieces` gets the
    /// place of a key and the length of its block, and says where the block goes; pieces that are not as long as the block make it a miss
    /// ([`MissReason::Length`]).
    ///
    /// # Safety
    /// Until this returns each range may be written, no other thread uses it, it is named once, and it is not memory of the pool; a
    /// stream or event that `local` names is there. After [`Error::Timeout`] this holds until
    /// [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    ///
    /// # Errors
    /// As [`Cache::pull`], and [`Error::Gpu`]; then any of the destinations may hold anything.
    pub unsafe fn pull_all_raw<P: IntoIterator<Item = LocalRange>>(
        &self,
        namespace: Namespace,
        keys: &[BlockKey],
        local: LocalPlace,
        mut pieces: impl FnMut(usize, u64) -> P,
    ) -> Result<Vec<Pulled>> {
        let mut answers = Vec::with_capacity(keys.len());
        for group in keys.chunks(GROUP) {
            let start_ns = self.inner.host.platform().now_ns();
            let first = answers.len();
            // SAFETY: as this function demands.
            let pulled = unsafe { self.inner.pull_group(namespace, group, local, |place, len_bytes| pieces(first + place, len_bytes)) };
            match &pulled {
                Ok(pulled) => pulled.iter().for_each(|pulled| self.count_pulled(pulled)),
                Err(error) => self.count_failed(error, group.len() as u64),
            }
            self.inner.metrics.pull_seconds.observe(self.inner.host.platform().now_ns().saturating_sub(start_ns));
            answers.extend(pulled?);
        }
        Ok(answers)
    }
}

impl Index {
    pub(super) fn found_of(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Option<BlockInfo>>> {
        let mut found = Vec::with_capacity(keys.len());
        self.look_up_all(namespace, keys, |block| {
            found.push(block);
            true
        })?;
        Ok(found)
    }
}

impl Inner {
    pub(super) fn pin_each(
        self: &Arc<Self>,
        namespace: Namespace,
        keys: &[BlockKey],
    ) -> Result<Vec<std::result::Result<Pinned, MissReason>>> {
        let mut answers = Vec::with_capacity(keys.len());
        for group in keys.chunks(GROUP) {
            answers.extend(self.pin_group(namespace, group)?);
        }
        Ok(answers)
    }

    fn pin_group(self: &Arc<Self>, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<std::result::Result<Pinned, MissReason>>> {
        let found = self.index.found_of(namespace, keys)?;
        let there = |(&key, found): (&BlockKey, &Option<BlockInfo>)| found.map(|found| (key, found.cell));
        let (named, cells): (Vec<BlockKey>, Vec<u64>) = keys.iter().zip(&found).filter_map(there).unzip();
        let mut pinned = self.confirm(namespace, &named, &cells, found.iter().flatten().map(|found| found.owner))?.into_iter();
        let mut answers = Vec::with_capacity(keys.len());
        for (&key, found) in keys.iter().zip(&found) {
            answers.push(match found.and_then(|_| pinned.next()) {
                None => Err(MissReason::Absent),
                // Its next owner may have stamped it again, or it is in another cell by now.
                Some(Err(MissReason::Changed)) => self.pin_block(namespace, key)?,
                Some(answer) => answer,
            });
        }
        Ok(answers)
    }

    /// Pulls a few blocks together.
    ///
    /// # Safety
    /// As [`Cache::pull_all_raw`].
    unsafe fn pull_group<P: IntoIterator<Item = LocalRange>>(
        self: &Arc<Self>,
        namespace: Namespace,
        keys: &[BlockKey],
        local: LocalPlace,
        mut pieces: impl FnMut(usize, u64) -> P,
    ) -> Result<Vec<Pulled>> {
        // SAFETY: as this function demands.
        let mut list_of = |place: usize, block: &Pinned| unsafe { block.scatter_in(local, pieces(place, block.len_bytes())) };
        let mut answers = Vec::with_capacity(keys.len());
        let (mut places, mut blocks, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        for (place, pinned) in self.pin_group(namespace, keys)?.into_iter().enumerate() {
            answers.push(match pinned {
                Err(reason) => Pulled::Miss(reason),
                Ok(block) => match list_of(place, &block) {
                    Ok(list) => {
                        let hit = Pulled::Hit { len_bytes: block.len_bytes() };
                        places.push(place);
                        blocks.push(block);
                        lists.push(list);
                        hit
                    }
                    Err(Error::Invalid(_)) => Pulled::Miss(MissReason::Length),
                    Err(other) => return Err(other),
                },
            });
        }
        let verdicts = self.copier.copy_each(&blocks.iter().collect::<Vec<_>>(), &mut lists)?;
        Pinned::release_all(blocks);
        for (place, verdict) in places.into_iter().zip(verdicts) {
            answers[place] = match verdict {
                None => continue,
                Some(MissReason::Changed) => self.pull_block(namespace, keys[place], |block| list_of(place, block))?,
                Some(reason) => Pulled::Miss(reason),
            };
        }
        Ok(answers)
    }
}

impl Reservation {
    /// Fills several whole blocks of one cache with one store fence after all of them; `pieces` gets the place of a reservation and says
    /// what its block consists of, in memory of `local`.
    ///
    /// # Safety
    /// Until this returns each range may be read, no thread writes to it, and it is not memory of the pool; a stream or
    /// event that `local` names is there. After [`Error::Timeout`] this holds until
    /// [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    ///
    /// # Errors
    /// As [`Reservation::fill`], the first of any; then none of them may be committed.
    pub unsafe fn fill_all_raw<P: IntoIterator<Item = LocalRange>>(
        reservations: &mut [Reservation],
        local: LocalPlace,
        mut pieces: impl FnMut(usize) -> P,
    ) -> Result<()> {
        let lists = reservations.iter().enumerate().map(|(place, reservation)| {
            // SAFETY: as this function demands.
            let (mut list, mut at) = (unsafe { WriteList::lying_on(local) }, reservation.offset());
            for piece in pieces(place) {
                // SAFETY: as this function demands.
                unsafe { list.push_raw(at, piece) };
                at = at.saturating_add(piece.len_bytes as u64);
            }
            list
        });
        let lists: Vec<WriteList<'_>> = lists.collect();
        Reservation::fill_each(reservations, &lists)
    }
}
