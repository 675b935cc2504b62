// SPDX-License-Identifier: Apache-2.0
//! Blocks that are published layer by layer: each part is copied behind the work that computed it, beside that of the next one, and the
//! block is committed when all of them have arrived.

use super::start::cell_of;
use super::{Blocks, Flight, Part, Queued, UnderWay};
use crate::cache::tier::Answer;
use crate::cache::{Cache, PublishRequest, Reservation};
use crate::copy::cuda::{GpuCopy, QueueRoom};
use crate::copy::{Checksum, LocalPlace, LocalRange, OnGpu, WriteList};
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::LINE_BYTES;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Blocks of a GPU whose parts are copied one after the other ([`Cache::queue_layers`]).
///
/// Dropped before [`QueuedLayers::finish`] it gives its cells up, once the GPU has ended with them. As long as it lives the cache cannot be
/// closed.
pub struct QueuedLayers {
    /// `None` once it is finished or given up.
    open: Option<OpenLayers>,
}

struct OpenLayers {
    cache: Cache,
    answers: Vec<Answer>,
    places: Vec<usize>,
    reservations: Vec<Reservation>,
    copies: Vec<GpuCopy>,
    /// Bytes of each block that were given so far.
    filled: Vec<u64>,
    room: QueueRoom,
    begun_ns: u64,
}

impl Cache {
    /// Reserves cells for blocks of GPU `device` that [`QueuedLayers::queue`] fills part by part. Blocks that are filled so have no
    /// checksum. Room and waits as of [`Cache::queue_publish`].
    ///
    /// # Errors
    /// As [`Cache::queue_publish`]; then nothing is reserved.
    pub fn queue_layers(&self, requests: &[PublishRequest], device: u32, wait_ms: u64) -> Result<QueuedLayers> {
        let len_bytes = requests.iter().fold(0, |sum: u64, request| sum.saturating_add(request.len_bytes));
        let room = self.inner.queue_room(device, len_bytes, wait_ms)?;
        let begun_ns = self.inner.host.platform().now_ns();
        let mut answers = vec![Answer::Dropped; requests.len()];
        let (mut places, mut reservations) = (Vec::new(), Vec::new());
        for (place, reserved) in self.reserve_all(requests)?.into_iter().enumerate() {
            if let Some(reservation) = cell_of(reserved, &mut answers[place]) {
                places.push(place);
                reservations.push(reservation);
            }
        }
        let filled = vec![0; places.len()];
        let open = OpenLayers { cache: self.clone(), answers, places, reservations, copies: Vec::new(), filled, room, begun_ns };
        Ok(QueuedLayers { open: Some(open) })
    }
}

impl QueuedLayers {
    /// Copies the next part of each block, behind what `on` names, and returns at once. `pieces` gets the place of a request and says what
    /// its part consists of; it is not asked for blocks that got no cell. Parts are multiples of 64 bytes, but for the last one. Where a
    /// CPU has a part in the copies, this waits for them.
    ///
    /// # Safety
    /// As [`Cache::queue_publish`]; the answer is that of [`QueuedLayers::finish`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a part that is too long, or of another length than can be; [`Error::Gpu`]. Drop it then: nothing of it is
    /// committed.
    pub unsafe fn queue<P: IntoIterator<Item = LocalRange>>(&mut self, on: OnGpu, mut pieces: impl FnMut(usize) -> P) -> Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        if open.reservations.is_empty() {
            return Ok(());
        }
        let mut lists = Vec::with_capacity(open.reservations.len());
        let mut ends = Vec::with_capacity(open.reservations.len());
        for ((&place, reservation), &filled) in open.places.iter().zip(&open.reservations).zip(&open.filled) {
            // SAFETY: as this function demands; the same below.
            let (mut list, start) = (unsafe { WriteList::lying_on(LocalPlace::Gpu(on)) }, reservation.offset() + filled);
            let mut at = start;
            for piece in pieces(place) {
                // SAFETY: as above.
                unsafe { list.push_raw(at, piece) };
                at = at.saturating_add(piece.len_bytes as u64);
            }
            let (end, len_bytes) = (filled.saturating_add(at - start), reservation.len_bytes());
            if end > len_bytes || end < len_bytes && !end.is_multiple_of(LINE_BYTES as u64) {
                return Err(Error::Invalid(format!(
                    "a part that ends {end} bytes into a block of {len_bytes}: parts lie in the block and, but for the last one, have a \
                     multiple of {LINE_BYTES} bytes"
                )));
            }
            lists.push(list);
            ends.push(end);
        }
        // SAFETY: as above; the reservations are kept until the end of the copies is known.
        match unsafe { open.room.publish(&lists, Checksum::Off) }? {
            Some(copy) => open.copies.push(copy),
            None => {
                let inner = &open.cache.inner;
                let outcomes = inner.copier.publish_each(&lists, Checksum::Off);
                let mut copied = Ok(());
                // Every one of them is noted.
                for (reservation, outcome) in open.reservations.iter_mut().zip(outcomes) {
                    copied = copied.and(reservation.note_filled(outcome));
                }
                copied?;
            }
        }
        open.filled = ends;
        Ok(())
    }

    /// Whether all parts of every block were queued.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a part is missing.
    pub fn check_whole(&self) -> Result<()> {
        let blocks = self.open.iter().flat_map(|open| open.reservations.iter().zip(&open.filled));
        for (reservation, &filled) in blocks {
            if filled != reservation.len_bytes() && !mutant!("stream.part_missing") {
                return Err(Error::Invalid(format!("a block of {} bytes has {filled}: queue all of its parts", reservation.len_bytes())));
            }
        }
        Ok(())
    }

    /// Has the blocks committed when all of their parts have arrived.
    ///
    /// # Errors
    /// Those of [`QueuedLayers::check_whole`]: nothing is committed, and the cells are given up.
    pub fn finish(mut self) -> Result<Queued> {
        self.check_whole().map(|()| self.end(false))
    }

    /// Gives the blocks up, as dropping this does; their end says when the GPU uses their memory no more.
    pub fn give_up(mut self) -> Queued {
        self.end(true)
    }

    /// Leaves the rest to the upkeep, which commits, or waits for the GPU and gives the cells up.
    fn end(&mut self, is_given_up: bool) -> Queued {
        let Some(open) = self.open.take() else { return Queued::ended(Vec::new()) };
        let OpenLayers { cache, answers, places, reservations, copies, room, begun_ns, .. } = open;
        if reservations.is_empty() {
            return Queued::ended(answers);
        }
        let parts = vec![Part { copies, places, blocks: Blocks::Published(reservations) }];
        // The time for the end of the copies begins when the last of them was queued: the caller computes in between, as long as it takes.
        let flight = Flight::of(UnderWay { answers, parts, room, begun: Instant::now(), begun_ns });
        flight.is_cancelled.store(is_given_up, Ordering::Release);
        cache.look_after(flight)
    }
}

impl Drop for QueuedLayers {
    fn drop(&mut self) {
        if self.open.is_some() {
            // The first look: without anything under way the cells are free at once.
            self.end(true).poll();
        }
    }
}
