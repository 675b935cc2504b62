// SPDX-License-Identifier: Apache-2.0
//! Asynchronous copies of blocks between a GPU and the pool, in the order of a stream of the caller's (docs/internals/gpu.md).
//!
//! [`Cache::queue_publish`] and [`Cache::queue_pull`] return once the GPU has been given the copies. When these have ended, the upkeep
//! ([`Cache::serve`], [`Cache::service_round`]) continues the request, or a caller that asks for the end does. A block that is published is
//! committed then, and not before; one that is pulled is looked at again then, as every pull is.

mod start;
mod watcher;

use super::tier::Answer;
use super::{Cache, Few, Pinned, Pulled, Reservation};
use crate::background::held;
use crate::copy::Outcome;
use crate::copy::cuda::{GpuCopy, QueueRoom};
use crate::error::Result;
use crate::fault::mutant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Pauses between two looks: the first, and the longest. They grow.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(500)];

/// The end of blocks that were queued, for all who ask.
#[derive(Clone)]
pub struct Queued {
    flight: Arc<Flight>,
}

pub(super) struct Flight {
    state: Mutex<FlightState>,
    /// The cache is being closed: nothing of it is committed.
    is_cancelled: AtomicBool,
}

enum FlightState {
    UnderWay(UnderWay),
    Ended(Arc<[Answer]>),
}

struct UnderWay {
    answers: Vec<Answer>,
    parts: Vec<Part>,
    room: QueueRoom,
    begun: Instant,
    /// On the clock of the host.
    begun_ns: u64,
}

impl UnderWay {
    fn copies(&self) -> impl Iterator<Item = &GpuCopy> {
        self.parts.iter().map(|part| &part.copy)
    }
}

/// The copy of some of the blocks, with a list for each; `places` are those of their answers.
struct Part {
    copy: GpuCopy,
    places: Vec<usize>,
    blocks: Blocks,
}

enum Blocks {
    /// Cells that are filled.
    Published(Vec<Reservation>),
    /// Blocks that are copied, all of them with a look at their checksums or none.
    Pulled(Vec<Pinned>, bool),
}

#[derive(Default)]
pub(super) struct Flights {
    under_way: Mutex<Vec<Arc<Flight>>>,
    watcher: Mutex<watcher::Watcher>,
}

impl Queued {
    fn ended(answers: Vec<Answer>) -> Queued {
        Queued { flight: Arc::new(Flight::new(FlightState::Ended(answers.into()))) }
    }

    /// The answers, one for each block in its order, once all copies have ended; continues them without waiting.
    ///
    /// Of a publish: [`Answer::Done`], [`Answer::Exists`], [`Answer::Refused`]; of a pull: [`Answer::Done`], [`Answer::Missed`]. Of both
    /// [`Answer::Failed`], and [`Answer::Dropped`] where the cache was closed before. Only after `Done` is what a pull's memory held right,
    /// for whatever the caller's stream did with it meanwhile, too.
    pub fn poll(&self) -> Option<Arc<[Answer]>> {
        self.flight.advance()
    }

    /// As [`Queued::poll`], and waits for the end, at most `timeout_ms`.
    pub fn wait(&self, timeout_ms: u64) -> Option<Arc<[Answer]>> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let [mut pause, longest] = PAUSES;
        loop {
            let answers = self.poll();
            let left = deadline.saturating_duration_since(Instant::now());
            if answers.is_some() || left.is_zero() {
                return answers;
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(longest);
        }
    }

    /// Orders a stream (`CUstream`) after the copies: its later work finds them made. So a caller may let the stream overwrite the memory
    /// of a publish before the copies have ended.
    ///
    /// # Safety
    /// The stream is there.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::error::Error::Gpu): the stream does not come after them.
    pub unsafe fn hold(&self, stream: u64) -> Result<()> {
        match &*held(&self.flight.state) {
            // SAFETY: as this function demands.
            FlightState::UnderWay(under_way) => under_way.copies().try_for_each(|copy| unsafe { copy.hold(stream) }),
            FlightState::Ended(_) => Ok(()),
        }
    }
}

impl Flight {
    fn of(under_way: UnderWay) -> Flight {
        Flight::new(FlightState::UnderWay(under_way))
    }

    fn new(state: FlightState) -> Flight {
        Flight { state: Mutex::new(state), is_cancelled: AtomicBool::new(false) }
    }

    fn advance(&self) -> Option<Arc<[Answer]>> {
        let mut state = held(&self.state);
        let under_way = match &mut *state {
            FlightState::Ended(answers) => return Some(answers.clone()),
            FlightState::UnderWay(under_way) => under_way,
        };
        let is_cancelled = self.is_cancelled.load(Ordering::Acquire) && !mutant!("stream.committed_at_the_end");
        let timeout_ms = under_way.room.timeout_ms();
        let is_over = under_way.begun.elapsed() >= Duration::from_millis(timeout_ms);
        let UnderWay { parts, answers, begun_ns, .. } = under_way;
        let mut kept = Vec::new();
        for part in std::mem::take(parts) {
            let is_done = part.copy.poll().is_some();
            if is_done || is_over {
                if !is_done {
                    part.copy.give_up(timeout_ms);
                }
                part.end(answers, is_cancelled, *begun_ns);
            } else {
                kept.push(part);
            }
        }
        *parts = kept;
        if !parts.is_empty() {
            return None;
        }
        let answers: Arc<[Answer]> = std::mem::take(answers).into();
        *state = FlightState::Ended(answers.clone());
        Some(answers)
    }
}

impl Part {
    /// After its copy has ended, whatever became of it.
    fn end(self, answers: &mut [Answer], is_cancelled: bool, begun_ns: u64) {
        let Part { copy, places, blocks } = self;
        let outcomes = copy.take_outcomes();
        let ended: Few<Answer> = match blocks {
            Blocks::Published(reservations) => commit(reservations, outcomes, is_cancelled),
            Blocks::Pulled(pinned, are_checked) => look_again(pinned, outcomes, are_checked, begun_ns),
        };
        places.into_iter().zip(ended).for_each(|(place, answer)| answers[place] = answer);
    }
}

/// Commits the cells that were filled, all with one fence, unless the cache is being closed.
fn commit(reservations: Vec<Reservation>, outcomes: Vec<Outcome>, is_cancelled: bool) -> Few<Answer> {
    let (mut answers, mut filled, mut places) = (Few::new(), Vec::new(), Vec::new());
    for (mut reservation, outcome) in reservations.into_iter().zip(outcomes) {
        // Every one of them is noted: a cell that the GPU may still write to is given to no other block.
        answers.push(match reservation.note_filled(outcome) {
            Ok(()) if is_cancelled => Answer::Dropped,
            Ok(()) => {
                places.push(answers.len());
                filled.push(reservation);
                Answer::Done
            }
            Err(error) => Answer::Failed(Arc::new(error)),
        });
    }
    if let Some(inner) = filled.first().map(|first| first.inner.clone())
        && let Err(error) = inner.commit(&mut filled)
    {
        let failed = Answer::Failed(Arc::new(error));
        places.into_iter().for_each(|place| answers[place] = failed.clone());
    }
    answers
}

/// Steps 4 and 5 of a pull (CACHE.md section 5): whether each block was itself all the while, and its bytes are those of its checksum.
fn look_again(pinned: Vec<Pinned>, outcomes: Vec<Outcome>, are_checked: bool, begun_ns: u64) -> Few<Answer> {
    let Some(inner) = pinned.first().map(|first| first.inner.clone()) else { return Few::new() };
    let cache = Cache { inner: inner.clone() };
    let verdicts = inner.copier.verify_unchanged(&pinned.iter().collect::<Few<_>>());
    let answers: Few<Answer> = match verdicts {
        Err(error) => {
            cache.count_failed(&error, pinned.len() as u64);
            let failed = Answer::Failed(Arc::new(error));
            pinned.iter().map(|_| failed.clone()).collect()
        }
        Ok(verdicts) => {
            let found = pinned.iter().zip(outcomes).zip(verdicts);
            found
                .map(|((block, outcome), verdict)| match super::pull::copy::answer(block, are_checked, outcome, verdict) {
                    Ok(miss) => {
                        let pulled = miss.map_or(Pulled::Hit { len_bytes: block.len_bytes() }, Pulled::Miss);
                        cache.count_pulled(&pulled);
                        miss.map_or(Answer::Done, Answer::Missed)
                    }
                    Err(error) => {
                        cache.count_failed(&error, 1);
                        Answer::Failed(Arc::new(error))
                    }
                })
                .collect()
        }
    };
    inner.metrics.pull_seconds.observe(inner.host.platform().now_ns().saturating_sub(begun_ns));
    Pinned::release_all(pinned);
    answers
}

impl Flights {
    /// Continues all that have not ended, and says whether there are any.
    pub(super) fn advance(&self) -> bool {
        let all = held(&self.under_way).clone();
        let ended: Vec<Arc<Flight>> = all.into_iter().filter(|flight| flight.advance().is_some()).collect();
        let mut under_way = held(&self.under_way);
        under_way.retain(|flight| !ended.iter().any(|ended| Arc::ptr_eq(ended, flight)));
        !under_way.is_empty()
    }

    /// Ends with all of them, and commits nothing more. Waits for the GPU, for as long as copies may take.
    pub(super) fn cancel(&self) {
        held(&self.under_way).iter().for_each(|flight| flight.is_cancelled.store(true, Ordering::Release));
        while self.advance() {
            std::thread::sleep(PAUSES[1]);
        }
    }
}
