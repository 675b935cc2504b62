// SPDX-License-Identifier: Apache-2.0
//! Copies that streams order: given to the GPU in one go, after the earlier work of the caller's stream, and without a look at how far the
//! GPU is. So the call does not wait, and the caller's stream can be ordered after the copies. What the GPU reads is flushed by a thread of
//! the driver's, in the order of a stream of its own (`QueuedFlush`).

use super::plan::Plan;
use super::started::{Asked, Work};
use super::transfer::Transfer;
use super::{CudaEngine, Direction, GpuCopy};
use crate::copy::list::{After, Piece};
use crate::copy::order::Order;
use crate::copy::{Checksum, ReadList, WriteList};
use crate::error::{Error, Result};
use crate::fault::mutant;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes that copies may have under way on a GPU, for as long as this lives: until the end of the copies that it starts is known.
pub struct QueueRoom {
    engine: Arc<CudaEngine>,
    len_bytes: u64,
}

/// What copies are of: each list as it was found when it was checked, and what it comes after.
type CheckedLists = Vec<(Result<Cow<'static, [Piece]>>, After)>;

fn owned(checked: Result<Cow<'_, [Piece]>>) -> Result<Cow<'static, [Piece]>> {
    checked.map(|pieces| Cow::Owned(pieces.into_owned()))
}

impl CudaEngine {
    /// Room for copies of so many bytes among those under way ([`super::CudaConfig::queued_bytes`]). A call that is larger by itself has it
    /// once no other is under way.
    ///
    /// # Errors
    /// [`Error::Full`] while others have it.
    pub fn queue_room(self: &Arc<Self>, len_bytes: u64) -> Result<QueueRoom> {
        let limit = self.config.queued_bytes;
        let more = |queued: u64| queued.checked_add(len_bytes).filter(|sum| queued == 0 || *sum <= limit || mutant!("stream.unbounded"));
        match self.queued_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(QueueRoom { engine: self.clone(), len_bytes }),
            Err(_) => {
                let advice = "wait for the end of earlier ones";
                Err(Error::Full { what: "the room for bytes of copies that streams order", limit, advice })
            }
        }
    }

    /// Bytes of copies that streams order and that have not ended.
    pub fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Acquire)
    }
}

impl QueueRoom {
    /// Longest time for the copies and what they come after, in milliseconds.
    pub fn timeout_ms(&self) -> u64 {
        self.engine.config.timeout_ms
    }

    /// Starts lists that go to the pool; `None` where a CPU would have a part in that, and nothing was started.
    ///
    /// # Safety
    /// What the lists name stays as they promise until the end of the copies is known; of copies that are given up until the engine is
    /// settled.
    ///
    /// # Errors
    /// [`Error::Gpu`]: nothing was started.
    pub unsafe fn publish(&self, lists: &[WriteList<'_>], checksum: Checksum) -> Result<Option<GpuCopy>> {
        let (gpu, pool_bytes) = (Some(self.engine.device()), self.engine.memory.len_bytes());
        let checked = lists.iter().map(|list| (owned(list.check_on(gpu, pool_bytes, checksum.is_on())), list.place().after()));
        let lens_bytes = lists.iter().map(WriteList::len_bytes).collect();
        // SAFETY: as this function demands.
        unsafe { self.start(Direction::ToHost, checked.collect(), lens_bytes, checksum, None) }
    }

    /// As [`QueueRoom::publish`], of lists that come from the pool. `held` is a stream (`CUstream`) that comes after the copies: what it is
    /// given from here on finds them made.
    ///
    /// # Safety
    /// As there, and the stream is there.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn pull(&self, lists: &[ReadList<'_>], checksum: Checksum, held: Option<u64>) -> Result<Option<GpuCopy>> {
        let (gpu, pool_bytes) = (Some(self.engine.device()), self.engine.memory.len_bytes());
        let checked = lists.iter().map(|list| (owned(list.check_on(gpu, pool_bytes, checksum.is_on())), list.place().after()));
        let lens_bytes = lists.iter().map(ReadList::len_bytes).collect();
        // SAFETY: as this function demands.
        unsafe { self.start(Direction::FromHost, checked.collect(), lens_bytes, checksum, held) }
    }

    /// # Safety
    /// As [`QueueRoom::pull`].
    unsafe fn start(
        &self,
        direction: Direction,
        checked: CheckedLists,
        lens_bytes: Vec<u64>,
        checksum: Checksum,
        held: Option<u64>,
    ) -> Result<Option<GpuCopy>> {
        let engine = &self.engine;
        let mut transfer = Transfer::new(direction, Order::around(engine.config.dma), checksum, checked.into_iter());
        let started = |work| GpuCopy::new(engine.clone(), direction, Asked::Lists(lens_bytes), work);
        let (entered, memory) = (engine.gpu.enter()?, &*engine.memory);
        let plan = Plan::of(&transfer, memory, engine.means(), &entered);
        if transfer.has_work() && !plan.is_direct() {
            return Ok(None);
        }
        let mut lane = engine.take_lane(&entered)?;
        // SAFETY: the lists name events and streams that are there.
        let ready = unsafe { transfer.come_after(&lane, &entered) };
        // The GPU has all steps at a time: the caller's stream can only come after those that were given.
        let begun = ready
            .and_then(|()| transfer.begin(memory, &mut lane, &entered, &plan, engine.config.part_bytes))
            .and_then(|()| transfer.give_all(&mut lane, &entered))
            .and_then(|()| transfer.queue_flushes(&engine.memory, &engine.flusher, &mut lane, &entered));
        if let Err(error) = begun {
            // It may already wait for the caller's stream.
            engine.keep_late(lane, &transfer);
            return Err(error);
        }
        // SAFETY: as this function demands.
        let work = match unsafe { transfer.give_steps(memory, &engine.flusher, &mut lane, &entered) } {
            Err(code) => Work::Draining(transfer, lane, engine.gpu.failed("copying", code)),
            Ok(()) => {
                // SAFETY: the caller's stream is there.
                let held = held.zip(transfer.last_given()).map_or(Ok(()), |(stream, step)| unsafe { lane.hold(&entered, step, stream) });
                let copy = started(Work::Running(transfer, lane));
                if let Err(error) = held {
                    // Then the end is waited for: whatever the stream is given comes after it.
                    log::warn!("{error}: this call waits for its copies");
                    if copy.wait(engine.config.timeout_ms).is_none() {
                        copy.give_up(engine.config.timeout_ms);
                    }
                }
                return Ok(Some(copy));
            }
        };
        Ok(Some(started(work)))
    }
}

impl Drop for QueueRoom {
    fn drop(&mut self) {
        self.engine.queued_bytes.fetch_sub(self.len_bytes, Ordering::AcqRel);
    }
}
