// SPDX-License-Identifier: Apache-2.0
//! What one call of the engine has for itself: a stream beside the caller's, events, and two pinned buffers.

use super::driver::{Address, Handle, SUCCESS, is_lasting};
use super::gpu::{Entered, Gpu, Progress};
use crate::copy::list::After;
use crate::error::{Error, Result};
use std::ffi::c_int;
use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pauses between two looks at what is under way: the first, and the longest. They grow, so that a short copy is not slept over and a long
/// one costs nothing.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];

/// A copy to be made by the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    /// The list that it is a part of.
    pub(super) list: usize,
    pub(super) destination: Address,
    pub(super) source: Address,
    pub(super) len_bytes: usize,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    /// The copies were not all made, and the GPU does nothing more of them.
    Failed(c_int),
    /// The time is over, and the GPU may still do all of it.
    Late,
}

/// A stream with what belongs to it. It has nothing under way when it is dropped: one that has is forgotten instead.
pub(super) struct Lane {
    gpu: Arc<Gpu>,
    stream: Handle,
    /// Recorded on streams of callers.
    mark: Handle,
    slots: [LaneSlot; 2],
}

struct LaneSlot {
    event: Handle,
    buffer: Option<NonNull<u8>>,
    /// False while the event stands for nothing that was given: then the end is that of the stream.
    is_recorded: bool,
}

// SAFETY: handles and buffers are used by the lane's holder, on any thread.
unsafe impl Send for Lane {}

impl Lane {
    pub(super) fn new(gpu: &Arc<Gpu>, entered: &Entered<'_>) -> Result<Lane> {
        let slot = || LaneSlot { event: null_mut(), buffer: None, is_recorded: false };
        // Made one by one, so that what was made is given back when the next one fails.
        let mut lane = Lane { gpu: gpu.clone(), stream: null_mut(), mark: null_mut(), slots: [slot(), slot()] };
        lane.stream = entered.make_stream()?;
        lane.mark = entered.make_event()?;
        for slot in &mut lane.slots {
            slot.event = entered.make_event()?;
        }
        Ok(lane)
    }

    /// The pinned buffer of a slot, made when it is first asked for.
    pub(super) fn buffer(&mut self, entered: &Entered<'_>, slot: usize, len_bytes: usize) -> Result<NonNull<u8>> {
        let slot = &mut self.slots[slot % 2];
        match slot.buffer {
            Some(buffer) => Ok(buffer),
            None => Ok(*slot.buffer.insert(entered.make_buffer(len_bytes)?)),
        }
    }

    /// What is given from here on comes after this.
    ///
    /// # Safety
    /// The stream or event is there.
    pub(super) unsafe fn come_after(&self, entered: &Entered<'_>, after: After) -> Result<()> {
        let handle = |number: u64| with_exposed_provenance_mut(number as usize);
        // SAFETY: as this function demands; the lane's own are there as long as it is.
        unsafe {
            match after {
                After::Nothing => Ok(()),
                After::Event(event) => entered.wait(self.stream, handle(event)),
                After::Stream(stream) => {
                    entered.answer(entered.record(self.mark, handle(stream)), "recording an event")?;
                    entered.wait(self.stream, self.mark)
                }
            }
        }
    }

    /// Gives the GPU copies, all in one batch where the driver has that. Those that it refuses, by their lists: the others are under way.
    ///
    /// # Safety
    /// What lies at the addresses may be read and written until the lane's end was seen.
    pub(super) unsafe fn give(&mut self, entered: &Entered<'_>, moves: &[Move]) -> Vec<(usize, Error)> {
        if moves.len() > 1 {
            let mut destinations: Vec<Address> = moves.iter().map(|part| part.destination).collect();
            let mut sources: Vec<Address> = moves.iter().map(|part| part.source).collect();
            let mut lens_bytes: Vec<usize> = moves.iter().map(|part| part.len_bytes).collect();
            // SAFETY: as this function demands.
            match unsafe { entered.copy_batch(&mut destinations, &mut sources, &mut lens_bytes, self.stream) } {
                Some(SUCCESS) => return Vec::new(),
                Some(code) if is_lasting(code) => {
                    let lists = moves.chunk_by(|one, other| one.list == other.list).filter_map(|run| run.first());
                    let refused =
                        |first: &Move| (first.list, self.gpu.failed(format_args!("copying a batch of {} pieces", moves.len()), code));
                    return lists.map(refused).collect();
                }
                _ => {}
            }
        }
        // One by one: the driver has no batches, not for this device, or not of these. Which copies of a refused batch are under way is not
        // known; to make one twice does no harm.
        let mut refused: Vec<(usize, Error)> = Vec::new();
        for part in moves {
            if refused.last().is_some_and(|(list, _)| *list == part.list) {
                continue;
            }
            // SAFETY: as this function demands.
            if let Err(error) = unsafe { entered.copy(part.destination, part.source, part.len_bytes, self.stream) } {
                refused.push((part.list, error));
            }
        }
        refused
    }

    /// Marks the end of what was given so far as that of a slot.
    ///
    /// # Errors
    /// An error of the driver that stays. After another one the end of the whole stream stands for that of the slot.
    pub(super) fn mark(&mut self, entered: &Entered<'_>, slot: usize) -> std::result::Result<(), c_int> {
        let slot = &mut self.slots[slot % 2];
        // SAFETY: both are of this lane.
        let code = unsafe { entered.record(slot.event, self.stream) };
        slot.is_recorded = code == SUCCESS;
        if is_lasting(code) { Err(code) } else { Ok(()) }
    }

    /// How far the GPU is with what was given up to the mark of a slot.
    pub(super) fn progress(&self, entered: &Entered<'_>, slot: usize) -> Progress {
        let slot = &self.slots[slot % 2];
        // SAFETY: both are of this lane.
        unsafe { if slot.is_recorded { entered.event_progress(slot.event) } else { entered.stream_progress(self.stream) } }
    }

    /// How far the GPU is with all that the lane was given.
    pub(super) fn progress_of_all(&self, entered: &Entered<'_>) -> Progress {
        // SAFETY: of this lane.
        unsafe { entered.stream_progress(self.stream) }
    }

    /// Waits until what was given up to the mark of a slot has ended.
    pub(super) fn wait(&self, entered: &Entered<'_>, slot: usize, deadline: Instant) -> Ended {
        until(deadline, || self.progress(entered, slot))
    }

    /// Waits until the GPU is done with all that the lane was given.
    pub(super) fn drain(&self, entered: &Entered<'_>, deadline: Instant) -> Ended {
        until(deadline, || self.progress_of_all(entered))
    }
}

/// Looks at progress until it ends or the time is over. Looks at least once.
fn until(deadline: Instant, look: impl Fn() -> Progress) -> Ended {
    let [mut pause, longest] = PAUSES;
    loop {
        match look() {
            Progress::Done => return Ended::Done,
            Progress::Failed(code) => return Ended::Failed(code),
            Progress::UnderWay => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ended::Late;
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(longest);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Without the context the handles cannot be given back; a context that is gone took them along.
        let Ok(entered) = self.gpu.enter() else { return };
        // SAFETY: all of this lane, which has nothing under way. What was not made is null.
        unsafe {
            for slot in &mut self.slots {
                if !slot.event.is_null() {
                    entered.destroy_event(slot.event);
                }
                if let Some(buffer) = slot.buffer {
                    entered.free_buffer(buffer);
                }
            }
            if !self.mark.is_null() {
                entered.destroy_event(self.mark);
            }
            if !self.stream.is_null() {
                entered.destroy_stream(self.stream);
            }
        }
    }
}
