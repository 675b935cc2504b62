// SPDX-License-Identifier: Apache-2.0
//! The resources of one call of the engine: a stream of its own, events, two pinned buffers, and memory for tables of kernels.

use super::driver::{Address, Handle, SUCCESS, is_lasting};
use super::flush::QueuedFlush;
use super::gpu::{Entered, Gpu, Progress};
use super::kernel::Kernels;
use super::table::{Entries, ListResult};
use crate::copy::list::After;
use crate::error::{Error, Result};
use crate::fault::mutant;
use std::ffi::c_int;
use std::ptr::{NonNull, copy_nonoverlapping, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A copy of a block takes some tens of microseconds, a sleep at least that: so long a wait looks without one.
const SPIN: Duration = Duration::from_micros(100);
/// Pauses between two looks at copies under way after that: the first, and the longest. They grow, so that a long copy costs nothing.
const PAUSES: [Duration; 2] = [Duration::from_micros(20), Duration::from_micros(200)];

/// A copy to be made by the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    /// The list that it is a part of.
    pub(super) list: usize,
    pub(super) destination: Address,
    pub(super) source: Address,
    /// The one of them that lies on the host, as kernels reach it; not used by copies.
    pub(super) mapped: Address,
    /// The same as an offset in the pool, where it lies there.
    pub(super) offset: u64,
    pub(super) len_bytes: usize,
}

impl Move {
    /// Destination and source, as kernels reach them.
    pub(super) fn ends(&self, is_to_host: bool) -> (Address, Address) {
        if is_to_host { (self.mapped, self.source) } else { (self.destination, self.mapped) }
    }

    /// The rest of it after its first bytes.
    pub(super) fn without(&self, taken: usize) -> Move {
        let by = taken as Address;
        Move {
            destination: self.destination + by,
            source: self.source + by,
            mapped: self.mapped.wrapping_add(by),
            offset: self.offset + by,
            len_bytes: self.len_bytes - taken,
            ..*self
        }
    }
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
    /// A second stream, for the checksums of the bytes that the first has moved; null until they are asked for.
    folds: Handle,
    /// A third one, for the flushes before reads; null until they are asked for.
    flushes: Handle,
    /// Recorded on streams of callers.
    mark: Handle,
    slots: Vec<LaneSlot>,
    /// Those whose kernels it has launched: they stay loaded.
    kernels: Option<Arc<Kernels>>,
}

/// Memory for the tables of a launch, as much as was needed so far, in bytes.
#[derive(Default)]
struct TableMemory {
    host: Option<(NonNull<u8>, usize)>,
    gpu: Option<(Address, usize)>,
    /// Where the results lie in the host's, of how many lists, and the mark of the first.
    results: (usize, usize, u64),
}

struct LaneSlot {
    event: Handle,
    /// Recorded after the moves whose checksums are then folded; null until that is needed.
    moved: Handle,
    /// Recorded after the flush of the lines that a pull reads; null until a pull needs it.
    flushed: Handle,
    /// Whether the last that it was given, and that has no mark yet, is the folding of checksums.
    is_folded: bool,
    buffer: Option<NonNull<u8>>,
    tables: TableMemory,
    /// False while the event stands for nothing that was given: then the end is that of the stream.
    is_recorded: bool,
}

// SAFETY: handles and buffers are used by the lane's holder, on any thread.
unsafe impl Send for Lane {}

impl Lane {
    pub(super) fn new(gpu: &Arc<Gpu>, entered: &Entered<'_>) -> Result<Lane> {
        // Made one by one, so that those already made are given back when the next one fails.
        let mut lane = Lane {
            gpu: gpu.clone(),
            stream: null_mut(),
            folds: null_mut(),
            flushes: null_mut(),
            mark: null_mut(),
            slots: Vec::new(),
            kernels: None,
        };
        lane.stream = entered.make_stream()?;
        lane.mark = entered.make_event()?;
        lane.reserve_slots(entered, 2)?;
        Ok(lane)
    }

    /// Makes room for so many steps at a time.
    pub(super) fn reserve_slots(&mut self, entered: &Entered<'_>, count: usize) -> Result<()> {
        while self.slots.len() < count {
            let event = entered.make_event()?;
            self.slots.push(LaneSlot {
                event,
                moved: null_mut(),
                flushed: null_mut(),
                is_folded: false,
                buffer: None,
                tables: TableMemory::default(),
                is_recorded: false,
            });
        }
        Ok(())
    }

    fn slot(&self, step: usize) -> &LaneSlot {
        &self.slots[step % self.slots.len()]
    }

    fn slot_mut(&mut self, step: usize) -> &mut LaneSlot {
        let count = self.slots.len();
        &mut self.slots[step % count]
    }

    /// The pinned buffer of a slot, made when it is first asked for.
    pub(super) fn buffer(&mut self, entered: &Entered<'_>, slot: usize, len_bytes: usize) -> Result<NonNull<u8>> {
        let slot = self.slot_mut(slot);
        match slot.buffer {
            Some(buffer) => Ok(buffer),
            None => Ok(*slot.buffer.insert(entered.make_buffer(len_bytes)?)),
        }
    }

    /// Later work of the stream comes after this.
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
                    if !mutant!("stream.callers_work_unrecorded") {
                        entered.answer(entered.record(self.mark, handle(stream)), "recording an event")?;
                    }
                    if mutant!("stream.callers_work_unawaited") { Ok(()) } else { entered.wait(self.stream, self.mark) }
                }
            }
        }
    }

    /// Has a stream of the caller's come after what the lane was given up to the mark of a slot.
    ///
    /// # Safety
    /// The stream is there.
    ///
    /// # Errors
    /// The driver's; and where the slot has no mark of its own.
    pub(super) unsafe fn hold(&self, entered: &Entered<'_>, slot: usize, stream: u64) -> Result<()> {
        let slot = self.slot(slot);
        if !slot.is_recorded {
            return Err(self.gpu.failed("recording an event after copies", SUCCESS));
        }
        if mutant!("stream.caller_goes_on") {
            return Ok(());
        }
        // SAFETY: as this function demands; the event is of this lane.
        unsafe { entered.wait(with_exposed_provenance_mut(stream as usize), slot.event) }
    }

    /// Queues the flush of what a slot reads. What the lane is given after [`Lane::come_after_flush`] comes after it.
    pub(super) fn queue_flush(&mut self, entered: &Entered<'_>, slot: usize, flush: &Arc<QueuedFlush>) -> Result<()> {
        if self.flushes.is_null() {
            self.flushes = entered.make_stream()?;
        }
        if self.slot(slot).flushed.is_null() {
            self.slot_mut(slot).flushed = entered.make_event()?;
        }
        let argument = Arc::into_raw(flush.clone()).cast_mut();
        // SAFETY: the stream is of this lane; the function takes the reference.
        if let Err(error) = unsafe { entered.call(self.flushes, QueuedFlush::run, argument.cast()) } {
            // SAFETY: the driver has not taken it.
            drop(unsafe { Arc::from_raw(argument) });
            return Err(error);
        }
        // SAFETY: both are of this lane.
        entered.answer(unsafe { entered.record(self.slot(slot).flushed, self.flushes) }, "recording an event")
    }

    /// Has what the lane is given next come after the flush that was queued for a slot.
    ///
    /// # Errors
    /// The driver's answer.
    pub(super) fn come_after_flush(&self, entered: &Entered<'_>, slot: usize) -> std::result::Result<(), c_int> {
        if mutant!("stream.part_read_first") {
            return Ok(());
        }
        // SAFETY: both are of this lane.
        match unsafe { entered.order(self.stream, self.slot(slot).flushed) } {
            SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    /// Gives the copy engine copies, one by one. Those that it refuses, by their lists: the others are under way.
    ///
    /// # Safety
    /// The memory at the addresses may be read and written until the lane's end was seen.
    pub(super) unsafe fn give(&mut self, entered: &Entered<'_>, moves: &[Move]) -> Vec<(usize, Error)> {
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

    /// As [`Lane::give`], by a kernel in one launch, which also takes the checksum of each list where `sums` asks for that: then the pieces
    /// given of a list are all of it. A kernel that cannot be launched is not tried again, and without checksums copies are made in its
    /// place.
    ///
    /// # Safety
    /// As [`Lane::give`], and for the slot: what it was given before has ended.
    pub(super) unsafe fn give_kernel(
        &mut self,
        entered: &Entered<'_>,
        slot: usize,
        kernels: &Arc<Kernels>,
        moves: &[Move],
        is_to_host: bool,
        sums: bool,
    ) -> Vec<(usize, Error)> {
        // SAFETY: as this function demands.
        let error = match unsafe { self.launch(entered, slot, kernels, moves, is_to_host, sums) } {
            Ok(SUCCESS) => return Vec::new(),
            Ok(code) => self.gpu.failed(format_args!("launching a kernel for {} pieces", moves.len()), code),
            Err(error) => error,
        };
        kernels.give_up(error.to_string());
        if !sums {
            // SAFETY: as this function demands.
            return unsafe { self.give(entered, moves) };
        }
        let lists = moves.chunk_by(|one, other| one.list == other.list).filter_map(|run| run.first());
        lists.map(|first| (first.list, self.gpu.failed_again(&error))).collect()
    }

    /// Launches a kernel; the driver's answer.
    ///
    /// # Safety
    /// As [`Lane::give_kernel`].
    pub(super) unsafe fn launch(
        &mut self,
        entered: &Entered<'_>,
        slot: usize,
        kernels: &Arc<Kernels>,
        moves: &[Move],
        is_to_host: bool,
        sums: bool,
    ) -> Result<c_int> {
        let mark = kernels.marks(moves.len());
        let entries = if sums { Entries::of_lists(moves, is_to_host, mark) } else { Entries::of_moves(moves, is_to_host) };
        self.kernels.get_or_insert_with(|| kernels.clone());
        let stream = self.stream;
        let tables = &mut self.slot_mut(slot).tables;
        let (host, gpu) = tables.room(entered, &entries)?;
        let start = host.as_ptr().expose_provenance();
        let mut at = 0;
        for part in entries.parts() {
            // SAFETY: `room` has so many bytes, which the GPU does not use any more.
            unsafe { copy_nonoverlapping(part.as_ptr(), host.as_ptr().add(at), part.len()) };
            at += part.len().next_multiple_of(64);
        }
        tables.results = (at, entries.lists_len(), mark);
        for list in 0..entries.lists_len() {
            // SAFETY: as above.
            unsafe { host.as_ptr().add(at).cast::<ListResult>().add(list).write(ListResult { checksum: 0, mark: 0 }) };
        }
        // SAFETY: as above; the two stay until the lane's end was seen.
        unsafe { entered.copy(gpu, start as Address, at, stream) }?;
        let parameter = entries.tables(gpu, (start + at) as Address);
        // SAFETY: the tables come after the copy in the stream, and name memory that may be used as this function demands.
        let code = unsafe { kernels.launch(entered, sums, &parameter, entries.chunks_len(), stream) }?;
        if !sums || code != SUCCESS {
            return Ok(code);
        }
        let folds = self.come_after_moves(entered, slot)?;
        self.slot_mut(slot).is_folded = true;
        // SAFETY: as above; the stream comes after the launch.
        unsafe { kernels.fold(entered, &parameter, entries.lists_len() as u32, folds) }
    }

    /// The stream on which checksums are folded, after what a slot has been given so far.
    fn come_after_moves(&mut self, entered: &Entered<'_>, slot: usize) -> Result<Handle> {
        if self.folds.is_null() {
            self.folds = entered.make_stream()?;
        }
        if self.slot(slot).moved.is_null() {
            self.slot_mut(slot).moved = entered.make_event()?;
        }
        let moved = self.slot(slot).moved;
        // SAFETY: all of this lane.
        unsafe {
            entered.answer(entered.record(moved, self.stream), "recording an event")?;
            if !mutant!("copy.dma_folded_first") {
                entered.wait(self.folds, moved)?;
            }
        }
        Ok(self.folds)
    }

    /// The checksums of the lists that a slot's kernel has moved, in their order; `None` where a kernel has not come to the end of a list.
    /// The slot has ended.
    pub(super) fn checksums(&self, slot: usize) -> Vec<Option<u64>> {
        let TableMemory { host, results: (at, count, first), .. } = self.slot(slot).tables;
        let Some((host, _)) = host else { return Vec::new() };
        let found = |list: usize| {
            // SAFETY: `launch` made room for so many, at a multiple of 64, and the GPU does not write there any more.
            let result = unsafe { host.as_ptr().add(at).cast::<ListResult>().add(list).read_volatile() };
            (result.mark == first + list as u64 || mutant!("copy.dma_unmarked")).then_some(result.checksum)
        };
        (0..count).map(found).collect()
    }

    /// Marks the end of the work given so far as that of a slot.
    ///
    /// # Errors
    /// An error of the driver that stays. After another one the end of the whole stream stands for that of the slot.
    pub(super) fn mark(&mut self, entered: &Entered<'_>, slot: usize) -> std::result::Result<(), c_int> {
        let (moves, folds) = (self.stream, self.folds);
        let slot = self.slot_mut(slot);
        let stream = if std::mem::take(&mut slot.is_folded) { folds } else { moves };
        // SAFETY: both are of this lane.
        let code = unsafe { entered.record(slot.event, stream) };
        slot.is_recorded = code == SUCCESS;
        if is_lasting(code) { Err(code) } else { Ok(()) }
    }

    /// How far the GPU is with the work up to the mark of a slot.
    pub(super) fn progress(&self, entered: &Entered<'_>, slot: usize) -> Progress {
        let slot = self.slot(slot);
        // SAFETY: of this lane.
        if slot.is_recorded { unsafe { entered.event_progress(slot.event) } } else { self.progress_of_all(entered) }
    }

    /// How far the GPU is with all that the lane was given.
    pub(super) fn progress_of_all(&self, entered: &Entered<'_>) -> Progress {
        let streams = [self.stream, self.folds, self.flushes].into_iter().filter(|stream| !stream.is_null());
        // SAFETY: of this lane.
        let mut unfinished = streams.map(|stream| unsafe { entered.stream_progress(stream) }).filter(|found| *found != Progress::Done);
        unfinished.next().unwrap_or(Progress::Done)
    }

    /// Waits until the work up to the mark of a slot has ended.
    pub(super) fn wait(&self, entered: &Entered<'_>, slot: usize, deadline: Instant) -> Ended {
        until(deadline, || self.progress(entered, slot))
    }

    /// Waits until the GPU is done with all that the lane was given.
    pub(super) fn drain(&self, entered: &Entered<'_>, deadline: Instant) -> Ended {
        until(deadline, || self.progress_of_all(entered))
    }
}

impl TableMemory {
    /// Memory of the host and of the GPU for entries, and on the host for results.
    fn room(&mut self, entered: &Entered<'_>, entries: &Entries) -> Result<(NonNull<u8>, Address)> {
        let results = entries.lists_len() * size_of::<ListResult>();
        let (on_host, on_gpu) = ((entries.len_bytes() + results).next_power_of_two(), entries.gpu_bytes().next_power_of_two());
        let host = match self.host {
            Some((host, len_bytes)) if len_bytes >= on_host => host,
            _ => {
                self.free_host(entered);
                let host = entered.make_buffer(on_host)?;
                self.host.insert((host, on_host)).0
            }
        };
        let gpu = match self.gpu {
            Some((gpu, len_bytes)) if len_bytes >= on_gpu => gpu,
            _ => {
                self.free_gpu(entered);
                let gpu = entered.allocate(on_gpu)?;
                self.gpu.insert((gpu, on_gpu)).0
            }
        };
        Ok((host, gpu))
    }

    fn free_host(&mut self, entered: &Entered<'_>) {
        if let Some((host, _)) = self.host.take() {
            // SAFETY: made by `room`, and the GPU has ended with it.
            unsafe { entered.free_buffer(host) };
        }
    }

    fn free_gpu(&mut self, entered: &Entered<'_>) {
        if let Some((gpu, _)) = self.gpu.take() {
            // SAFETY: as above.
            unsafe { entered.free(gpu) };
        }
    }
}

/// Looks at progress until it ends or the time is over. Looks at least once.
fn until(deadline: Instant, look: impl Fn() -> Progress) -> Ended {
    let [mut pause, longest] = PAUSES;
    let start = Instant::now();
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
        if start.elapsed() < SPIN {
            std::thread::yield_now();
            continue;
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(longest);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Without the context the handles cannot be given back; a context that is gone took them along.
        let Ok(entered) = self.gpu.enter() else { return };
        // SAFETY: all of this lane, which has nothing under way. Handles that were not made are null.
        unsafe {
            for slot in &mut self.slots {
                for event in [slot.event, slot.moved, slot.flushed].into_iter().filter(|event| !event.is_null()) {
                    entered.destroy_event(event);
                }
                if let Some(buffer) = slot.buffer {
                    entered.free_buffer(buffer);
                }
                slot.tables.free_host(&entered);
                slot.tables.free_gpu(&entered);
            }
            if !self.mark.is_null() {
                entered.destroy_event(self.mark);
            }
            for stream in [self.flushes, self.folds, self.stream].into_iter().filter(|stream| !stream.is_null()) {
                entered.destroy_stream(stream);
            }
        }
    }
}
