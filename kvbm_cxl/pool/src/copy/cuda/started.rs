// SPDX-License-Identifier: Apache-2.0
//! Lists of asynchronous copies that their caller polls: for callers that have no thread to wait with.

use super::gpu::{Entered, Progress};
use super::lane::Lane;
use super::plan::Plan;
use super::transfer::Transfer;
use super::{CudaEngine, Direction};
use crate::background::held;
use crate::copy::Outcome;
use crate::copy::cpu::count;
use crate::copy::list::Piece;
use crate::copy::order::Order;
use crate::error::{Error, Result};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Pauses between two looks of a caller that waits: the first, and the longest. They grow.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];

/// Memory of the host, at one end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostPlace {
    /// In the pool that the engine was opened with, by its offset.
    Pool(u64),
    /// Elsewhere in this process, by its address. It goes through pinned buffers.
    Process(usize),
}

/// One stretch to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuPiece {
    /// Address of the first byte in the memory of the GPU.
    pub gpu: u64,
    /// The first byte in memory of the host.
    pub host: HostPlace,
    /// Length in bytes; 0 = nothing is done.
    pub len_bytes: usize,
}

/// How copies ended; for all that ask the same.
pub type Ending = std::result::Result<(), Arc<Error>>;

/// Started copies, which advance without a thread as long as [`GpuCopy::poll`] is called.
///
/// Their memory is in use until `poll` has said how they ended. If this is dropped before, nothing more of them is begun, but the work that
/// the GPU already has continues: then the memory is in use until the engine is settled
/// ([`CopyEngine::is_settled`](crate::copy::CopyEngine)).
pub struct GpuCopy {
    engine: Arc<CudaEngine>,
    direction: Direction,
    asked: Asked,
    work: Mutex<Work>,
    /// What became of each list, once that is known and until it is taken.
    outcomes: Mutex<Vec<Outcome>>,
}

/// The request, with its length in bytes.
pub(super) enum Asked {
    /// One answer for all.
    Pieces(u64),
    /// One for each list.
    Lists(Vec<u64>),
}

pub(super) enum Work {
    Running(Transfer<'static>, Lane),
    /// The GPU has failed, and may still be at what it was given before.
    Draining(Transfer<'static>, Lane, Error),
    Ended(Ending),
}

impl CudaEngine {
    /// Starts a list of copies between this GPU and memory of the host, in no order among them, and returns at once. They come after
    /// nothing: the caller has seen the end of what uses the memory. Where two pieces have one byte as their destination, it is of one of
    /// them.
    ///
    /// The GPU reaches the pool itself where all pieces lie there and it can be registered; `is_buffered` keeps it from that, so that
    /// memory of the host is not touched any more after [`GpuCopy::cancel`], whatever the GPU does.
    ///
    /// # Safety
    /// Memory of the GPU and of this process that the pieces name is there, and used by no other, until the end of the copies is known.
    ///
    /// # Errors
    /// Nothing is under way then: [`Error::Invalid`] and [`Error::OutOfRange`] for pieces that cannot be meant, [`Error::Gpu`].
    pub unsafe fn start(self: &Arc<Self>, direction: Direction, pieces: &[GpuPiece], is_buffered: bool) -> Result<GpuCopy> {
        let (pool, process) = self.sorted(pieces)?;
        let len_bytes = pool.iter().chain(&process).fold(0, |sum: u64, piece| sum.saturating_add(piece.len_bytes as u64));
        let started = |work| GpuCopy::new(self.clone(), direction, Asked::Pieces(len_bytes), work);
        let mut transfer = Transfer::of_pieces(direction, Order::around(self.config.dma), pool, process);
        if !transfer.has_work() {
            return Ok(started(Work::Ended(Ok(()))));
        }
        let entered = self.gpu.enter()?;
        let mut lane = self.take_lane(&entered)?;
        let memory = &*self.memory;
        let plan = match is_buffered {
            true => Plan::Buffers(self.config.buffer_bytes),
            false => Plan::of(&transfer, memory, self.means(), &entered),
        };
        transfer.begin(memory, &mut lane, &entered, &plan, self.config.part_bytes)?;
        let copy = started(Work::Running(transfer, lane));
        copy.advance(&mut held(&copy.work), &entered);
        Ok(copy)
    }

    /// The pieces in the order of the pool and of addresses, joined where they are contiguous, after a look whether they can be meant.
    fn sorted(&self, pieces: &[GpuPiece]) -> Result<(Vec<Piece>, Vec<Piece>)> {
        let (mut pool, mut process) = (Vec::new(), Vec::new());
        for piece in pieces.iter().filter(|piece| piece.len_bytes > 0) {
            let len_bytes = piece.len_bytes as u64;
            let (list, offset, limit_bytes) = match piece.host {
                HostPlace::Pool(offset) => (&mut pool, offset, self.memory.len_bytes()),
                HostPlace::Process(address) => (&mut process, address as u64, isize::MAX as u64),
            };
            let ends_by = |start: u64, limit: u64| start.checked_add(len_bytes).is_some_and(|end| end <= limit);
            if !ends_by(piece.gpu, u64::MAX) || offset == 0 && matches!(piece.host, HostPlace::Process(_)) {
                let (gpu, number) = (piece.gpu, self.device());
                return Err(Error::Invalid(format!("{len_bytes} bytes at {gpu:#x} of GPU {number} and at {offset:#x} cannot be copied")));
            }
            if !ends_by(offset, limit_bytes) {
                return Err(Error::OutOfRange { what: "piece of a copy of a GPU", offset, len_bytes, limit_bytes });
            }
            list.push(Piece::in_host(offset, piece.gpu as usize, piece.len_bytes));
        }
        Ok((joined(pool), joined(process)))
    }

    /// Refuses a range that is not memory of this GPU, as far as the driver knows.
    ///
    /// # Errors
    /// [`Error::Invalid`]; [`Error::Gpu`] when the GPU cannot be used.
    pub fn check_memory(&self, address: u64, len_bytes: u64) -> Result<()> {
        let entered = self.gpu.enter()?;
        let last = len_bytes.checked_sub(1).and_then(|behind| address.checked_add(behind));
        match last.is_some_and(|last| entered.is_own(address) && entered.is_own(last)) {
            true => Ok(()),
            false => Err(Error::Invalid(format!("{len_bytes} bytes at {address:#x} are not memory of GPU {}", self.device()))),
        }
    }
}

fn joined(mut pieces: Vec<Piece>) -> Vec<Piece> {
    if !pieces.is_sorted_by_key(|piece| piece.offset) {
        pieces.sort_by_key(|piece| piece.offset);
    }
    pieces.dedup_by(|next, last| {
        let goes_on = last.is_before(next);
        if goes_on {
            last.len_bytes += next.len_bytes;
        }
        goes_on
    });
    pieces
}

impl GpuCopy {
    pub(super) fn new(engine: Arc<CudaEngine>, direction: Direction, asked: Asked, work: Work) -> GpuCopy {
        GpuCopy { engine, direction, asked, work: Mutex::new(work), outcomes: Mutex::default() }
    }

    /// Continues the copies without waiting, and says how they ended once they have; from any thread.
    pub fn poll(&self) -> Option<Ending> {
        let mut work = held(&self.work);
        if let Work::Ended(ending) = &*work {
            return Some(ending.clone());
        }
        // Without its context it cannot be seen what the GPU does: as long as that is so, the memory is in use.
        let entered = self.engine.gpu.enter().ok()?;
        self.advance(&mut work, &entered)
    }

    /// As [`GpuCopy::poll`], and waits for the end, at most `timeout_ms`.
    pub fn wait(&self, timeout_ms: u64) -> Option<Ending> {
        let deadline = Instant::now() + Duration::from_millis(timeout_ms);
        let [mut pause, longest] = PAUSES;
        loop {
            let ending = self.poll();
            let left = deadline.saturating_duration_since(Instant::now());
            if ending.is_some() || left.is_zero() {
                return ending;
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(longest);
        }
    }

    /// Begins nothing more. The work that the GPU already has continues: `poll` says when it has ended. Copies that were not all made then
    /// end with [`Error::Cancelled`], and so do those through buffers that have all been made but not all been seen.
    pub fn cancel(&self) {
        if let Work::Running(transfer, _) | Work::Draining(transfer, ..) = &mut *held(&self.work) {
            transfer.stop();
        }
    }

    fn advance(&self, work: &mut Work, entered: &Entered<'_>) -> Option<Ending> {
        let memory = &*self.engine.memory;
        let taken = std::mem::replace(work, Work::Ended(Ok(())));
        let (kept, ending) = match taken {
            Work::Ended(ending) => (Work::Ended(ending.clone()), Some(ending)),
            Work::Running(mut transfer, mut lane) => {
                // SAFETY: who started the copies keeps their memory until this says how they ended, and the lane is theirs.
                match unsafe { transfer.advance(memory, &self.engine.flusher, &mut lane, entered) } {
                    Progress::UnderWay => {
                        transfer.rest(memory);
                        (Work::Running(transfer, lane), None)
                    }
                    Progress::Done => self.end(transfer, Ok(lane)),
                    Progress::Failed(code) => self.drain(transfer, lane, self.engine.gpu.failed("copying", code), entered),
                }
            }
            Work::Draining(transfer, lane, error) => self.drain(transfer, lane, error, entered),
        };
        *work = kept;
        ending
    }

    /// Whether the GPU has ended with all that it was given before it failed.
    fn drain(&self, mut transfer: Transfer<'static>, lane: Lane, error: Error, entered: &Entered<'_>) -> (Work, Option<Ending>) {
        if lane.progress_of_all(entered) == Progress::UnderWay {
            transfer.rest(&*self.engine.memory);
            return (Work::Draining(transfer, lane, error), None);
        }
        self.end(transfer, Err(error))
    }

    /// The GPU does nothing of this any more; a lane that is well is kept for others.
    fn end(&self, mut transfer: Transfer<'static>, lane: Result<Lane>) -> (Work, Option<Ending>) {
        let memory = &*self.engine.memory;
        // Also after a failure: what the GPU did write must not linger in this host's caches.
        transfer.leave(memory, &self.engine.flusher);
        transfer.fence(memory);
        self.engine.counters.unflushed(transfer.unflushed_bytes());
        let is_cut = transfer.is_cut();
        match lane {
            Ok(lane) => self.engine.give_back(lane),
            Err(error) => transfer.fail_all(|| self.engine.gpu.failed_again(&error)),
        }
        if is_cut {
            transfer.fail_all(|| Error::Cancelled(format!("copies of GPU {}", self.engine.device())));
        }
        let ending = self.note(transfer.finish());
        (Work::Ended(ending.clone()), Some(ending))
    }

    /// Counts what became of each list, and says how all of them ended; outcomes that lists are asked for are kept.
    fn note(&self, outcomes: Vec<Outcome>) -> Ending {
        let counters = &self.engine.counters;
        let moved = |bytes| match self.direction {
            Direction::ToHost => counters.published(bytes),
            Direction::FromHost => counters.pulled(bytes),
        };
        match &self.asked {
            Asked::Lists(lens_bytes) => {
                count(&outcomes, lens_bytes.iter().copied(), moved, counters);
                *held(&self.outcomes) = outcomes;
                Ok(())
            }
            // Pieces of the pool and of other memory are one thing to their caller.
            Asked::Pieces(len_bytes) => match outcomes.into_iter().find_map(Result::err) {
                None => {
                    moved(*len_bytes);
                    Ok(())
                }
                Some(error) => {
                    counters.failed(1);
                    Err(Arc::new(error))
                }
            },
        }
    }

    /// What became of each list of [`super::QueueRoom`]'s, in their order, once the copies have ended; for the first that asks.
    pub(crate) fn take_outcomes(&self) -> Vec<Outcome> {
        std::mem::take(&mut held(&self.outcomes))
    }

    /// Has a stream of the caller's come after copies that a stream orders.
    ///
    /// # Safety
    /// The stream is there.
    ///
    /// # Errors
    /// [`Error::Gpu`].
    pub(crate) unsafe fn hold(&self, stream: u64) -> Result<()> {
        match &*held(&self.work) {
            Work::Running(transfer, lane) => {
                let Some(step) = transfer.last_given() else { return Ok(()) };
                let entered = self.engine.gpu.enter()?;
                // SAFETY: as this function demands; the GPU has all steps, and the last one ends after the others.
                unsafe { lane.hold(&entered, step, stream) }
            }
            // The GPU does nothing more, or has failed and does nothing more for any stream.
            _ => Ok(()),
        }
    }

    /// Gives up copies that do not end: lists that the GPU was given end with [`Error::Timeout`]. Their memory, and the pool's, is in use
    /// until the engine is settled.
    pub(crate) fn give_up(&self, timeout_ms: u64) {
        let mut work = held(&self.work);
        let taken = std::mem::replace(&mut *work, Work::Ended(Ok(())));
        *work = match taken {
            Work::Ended(ending) => Work::Ended(ending),
            Work::Running(mut transfer, lane) | Work::Draining(mut transfer, lane, _) => {
                self.engine.keep_late(lane, &transfer);
                let what = format!("GPU {}: a copy, or the work that it comes after,", self.engine.device());
                transfer.fail_given(|| Error::Timeout { what: what.clone(), timeout_ms });
                Work::Ended(self.note(transfer.finish()))
            }
        };
    }
}

impl Drop for GpuCopy {
    fn drop(&mut self) {
        self.cancel();
        if self.poll().is_some() {
            return;
        }
        let work = std::mem::replace(&mut *held(&self.work), Work::Ended(Ok(())));
        if let Work::Running(transfer, lane) | Work::Draining(transfer, lane, _) = work {
            self.engine.keep_late(lane, &transfer);
        }
    }
}
