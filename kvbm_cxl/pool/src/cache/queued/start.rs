// SPDX-License-Identifier: Apache-2.0
//! The calls that queue blocks.

use super::{Blocks, Flight, PAUSES, Part, Queued, UnderWay};
use crate::cache::tier::Answer;
use crate::cache::{BlockKey, Cache, Inner, Namespace, Pinned, PublishRequest, Pulled, Reservation, Reserved};
use crate::copy::cuda::QueueRoom;
use crate::copy::{After, Checksum, LocalPlace, LocalRange, OnGpu, ReadList, WriteList};
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::metrics::{MissReason, RefusalReason};
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Cache {
    /// Publishes blocks of a GPU asynchronously, after the work that `on` names: cells are reserved, the GPU is given the copies, and this
    /// returns. The blocks are committed once the copies have ended. `pieces` gets the place of a request and says what its block consists
    /// of. Where a CPU has a part in the copies (the pool is not registered, or checksums are on and no kernel takes them), this waits for
    /// all of it.
    ///
    /// The copies of all calls have a bound ([`CudaConfig::queued_bytes`](crate::copy::CudaConfig)); a call that is above it waits for
    /// earlier ones, at most `wait_ms`.
    ///
    /// # Safety
    /// Each range is memory of that GPU, and is not written, from what `on` names on and until the answer is known, but for work of a
    /// stream that [`Queued::hold`] has ordered. The stream or event that `on` names is there. After an answer of [`Error::Timeout`] this
    /// holds until [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    ///
    /// # Errors
    /// [`Error::Full`] when the bound leaves no room, [`Error::Invalid`] for pieces that are not as long as their block; [`Error::Gpu`] and
    /// [`Error::NotFound`] of the GPU; those of [`Cache::reserve_all`]. Then nothing is under way.
    pub unsafe fn queue_publish<P: IntoIterator<Item = LocalRange>>(
        &self,
        requests: &[PublishRequest],
        on: OnGpu,
        wait_ms: u64,
        mut pieces: impl FnMut(usize) -> P,
    ) -> Result<Queued> {
        let begun = Instant::now();
        let len_bytes = requests.iter().fold(0, |sum: u64, request| sum.saturating_add(request.len_bytes));
        let room = self.inner.queue_room(on.device, len_bytes, wait_ms)?;
        let begun_ns = self.inner.host.platform().now_ns();
        let mut answers = vec![Answer::Dropped; requests.len()];
        let (mut reservations, mut places, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        for (place, reserved) in self.reserve_all(requests)?.into_iter().enumerate() {
            let Some(reservation) = cell_of(reserved, &mut answers[place]) else { continue };
            // SAFETY: as this function demands; the same below.
            let (mut list, mut at) = (unsafe { WriteList::lying_on(LocalPlace::Gpu(on)) }, reservation.offset());
            for piece in pieces(place) {
                // SAFETY: as above.
                unsafe { list.push_raw(at, piece) };
                at = at.saturating_add(piece.len_bytes as u64);
            }
            reservation.check_len(&list)?;
            reservations.push(reservation);
            places.push(place);
            lists.push(list);
        }
        if lists.is_empty() {
            return Ok(Queued::ended(answers));
        }
        // SAFETY: as above; the reservations are kept until the end of the copies is known.
        let Some(copy) = (unsafe { room.publish(&lists, self.inner.copier.payload_checksum()) })? else {
            Reservation::fill_each(&mut reservations, &lists)?;
            self.commit_all(reservations)?;
            places.into_iter().for_each(|place| answers[place] = Answer::Done);
            return Ok(Queued::ended(answers));
        };
        if mutant!("stream.committed_early") {
            self.inner.commit(&mut reservations)?;
        }
        let parts = vec![Part { copy, places, blocks: Blocks::Published(reservations) }];
        Ok(self.look_after(Flight::of(UnderWay { answers, parts, room, begun, begun_ns })))
    }

    /// Pulls blocks into memory of a GPU asynchronously, after the work that `on` names: blocks are pinned, the GPU is given the copies,
    /// and this returns. Where `on` names a stream, what that is given from here on comes after the copies, so that the caller may give it
    /// work with the blocks at once. That work finds the right bytes **if** the answer turns out to be [`Answer::Done`]: a block that was
    /// taken from under the copy, or whose checksum does not match, is a miss that is known only after the copies, and the work has read
    /// whatever was there. So nothing of such work counts before the answer is known.
    ///
    /// `pieces` gets the place of a key and the length of its block, and says where the block goes; pieces that are not as long as the
    /// block make it a miss ([`MissReason::Length`]). Where a CPU has a part in the copies, they are waited for. The bound is that of
    /// [`Cache::queue_publish`].
    ///
    /// # Safety
    /// Each range is memory of that GPU, is named once, and is used by no other than work after the copies on that stream, from what `on`
    /// names on and until the answer is known. The stream or event that `on` names is there. After an answer of [`Error::Timeout`] this
    /// holds until [`CopyEngine::is_settled`](crate::copy::CopyEngine::is_settled).
    ///
    /// # Errors
    /// As [`Cache::queue_publish`], and [`Cache::pin_all`]; then nothing is under way.
    pub unsafe fn queue_pull<P: IntoIterator<Item = LocalRange>>(
        &self,
        namespace: Namespace,
        keys: &[BlockKey],
        on: OnGpu,
        wait_ms: u64,
        mut pieces: impl FnMut(usize, u64) -> P,
    ) -> Result<Queued> {
        let (begun, begun_ns) = (Instant::now(), self.inner.host.platform().now_ns());
        let mut answers = vec![Answer::Dropped; keys.len()];
        let (mut checked, mut plain) = (Pulls::default(), Pulls::default());
        for (place, pinned) in self.inner.pin_each(namespace, keys)?.into_iter().enumerate() {
            let found = pinned.and_then(|block| {
                // SAFETY: as this function demands; the same below.
                let list = unsafe { block.scatter_in(LocalPlace::Gpu(on), pieces(place, block.len_bytes())) };
                list.map(|list| (block, list)).map_err(|_| MissReason::Length)
            });
            match found {
                Ok((block, list)) => {
                    let pulls = if self.inner.copier.is_checked(&block, &list) { &mut checked } else { &mut plain };
                    pulls.push(place, block, list);
                }
                Err(reason) => {
                    self.inner.metrics.misses_total.of(reason).inc();
                    answers[place] = Answer::Missed(reason);
                }
            }
        }
        let len_bytes = checked.len_bytes().saturating_add(plain.len_bytes());
        let room = self.inner.queue_room(on.device, len_bytes, wait_ms)?;
        let held = if let After::Stream(stream) = on.after { Some(stream) } else { None };
        let mut parts = Vec::new();
        for (is_checked, mut pulls) in [(true, checked), (false, plain)] {
            if pulls.lists.is_empty() {
                continue;
            }
            let kind = if is_checked { Checksum::Xxh3 } else { Checksum::Off };
            // SAFETY: as above; the pins are kept until the end of the copies is known.
            match unsafe { room.pull(&pulls.lists, kind, held) } {
                Ok(Some(copy)) => parts.push(Part { copy, places: pulls.places, blocks: Blocks::Pulled(pulls.blocks, is_checked) }),
                Ok(None) => self.pull_waiting(&mut pulls, &mut answers),
                // Copies that were started before continue, so this is an answer.
                Err(error) => pulls.fail(error, &mut answers),
            }
        }
        if parts.is_empty() {
            return Ok(Queued::ended(answers));
        }
        Ok(self.look_after(Flight::of(UnderWay { answers, parts, room, begun, begun_ns })))
    }

    fn pull_waiting(&self, pulls: &mut Pulls, answers: &mut [Answer]) {
        match self.inner.copier.copy_each(&pulls.blocks.iter().collect::<Vec<_>>(), &mut pulls.lists) {
            Err(error) => {
                self.count_failed(&error, pulls.places.len() as u64);
                pulls.fail(error, answers);
            }
            Ok(misses) => {
                for ((&place, block), miss) in pulls.places.iter().zip(&pulls.blocks).zip(misses) {
                    let pulled = miss.map_or(Pulled::Hit { len_bytes: block.len_bytes() }, Pulled::Miss);
                    self.count_pulled(&pulled);
                    answers[place] = miss.map_or(Answer::Done, Answer::Missed);
                }
            }
        }
    }
}

/// The cell that was reserved; otherwise why not.
fn cell_of(reserved: Reserved, answer: &mut Answer) -> Option<Reservation> {
    *answer = match reserved {
        Reserved::Cell(reservation) => return Some(reservation),
        Reserved::Exists => Answer::Exists,
        Reserved::Busy => Answer::Refused(RefusalReason::Busy),
        Reserved::NoCell => Answer::Refused(RefusalReason::PoolFull),
        Reserved::NoHint => Answer::Refused(RefusalReason::TableFull),
        Reserved::OverQuota => Answer::Refused(RefusalReason::Quota),
    };
    None
}

#[derive(Default)]
struct Pulls {
    places: Vec<usize>,
    blocks: Vec<Pinned>,
    lists: Vec<ReadList<'static>>,
}

impl Pulls {
    fn push(&mut self, place: usize, block: Pinned, list: ReadList<'static>) {
        self.places.push(place);
        self.blocks.push(block);
        self.lists.push(list);
    }

    fn len_bytes(&self) -> u64 {
        self.blocks.iter().fold(0, |sum, block| sum.saturating_add(block.len_bytes()))
    }

    fn fail(&self, error: Error, answers: &mut [Answer]) {
        let failed = Answer::Failed(Arc::new(error));
        self.places.iter().for_each(|&place| answers[place] = failed.clone());
    }
}

impl Inner {
    /// Room for copies, waited for at most `wait_ms`.
    pub(super) fn queue_room(&self, device: u32, len_bytes: u64, wait_ms: u64) -> Result<QueueRoom> {
        let deadline = Instant::now() + Duration::from_millis(wait_ms);
        loop {
            match self.copier.engine.queue_room(device, len_bytes) {
                Err(Error::Full { .. }) if Instant::now() < deadline => {
                    // Whether or not a thread watches the copies that have the room.
                    self.flights.advance();
                    std::thread::sleep(PAUSES[1]);
                }
                other => return other,
            }
        }
    }
}
