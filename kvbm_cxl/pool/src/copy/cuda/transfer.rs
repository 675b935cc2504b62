// SPDX-License-Identifier: Apache-2.0
//! The lists of one call on their way: cut, given to the GPU step by step, and with the steps of order that the memory needs on either
//! side. Nothing here waits: who drives a transfer looks again, or waits for the step that is under way.

use super::Direction;
use super::driver::Address;
use super::flush::{Flusher, QueuedFlush, SHARED_FROM_BYTES};
use super::gpu::{Entered, Progress};
use super::lane::{Lane, Move};
use super::lists::{List, Side, to_move};
use super::plan::{Mover, PAGE_BYTES, Plan, Step, steps};
use super::registered::Registered;
use super::windows::{self, Window};
use crate::background::held;
use crate::coherence::Coherence;
use crate::copy::list::{After, Piece};
use crate::copy::order::Order;
use crate::copy::{Checksum, Outcome};
use crate::error::{Error, Result};
use crate::fault::mutant;
use std::borrow::Cow;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Steps that the GPU has at a time, unless a stream orders them: it makes one while the CPU is at the other.
const STEPS_UNDER_WAY: usize = 2;

/// A short call is cut into so many steps, unless they are too short to be flushed by several threads: a flush overlaps a copy there, too.
const STEPS: usize = 4;

/// The two pinned buffers of the lane.
struct Buffers([NonNull<u8>; STEPS_UNDER_WAY]);

// SAFETY: memory that the holder of the lane has to itself, on whatever thread.
unsafe impl Send for Buffers {}

/// How the bytes go.
enum Way {
    /// The GPU reaches the pool itself.
    Direct(Vec<Step>),
    /// Through buffers, a window at a step.
    Buffers(Vec<Window>, Buffers),
}

/// The lists of one call.
pub(super) struct Transfer<'t> {
    direction: Direction,
    order: Order,
    checksum: Checksum,
    lists: Vec<List<'t>>,
    way: Way,
    /// Steps that the GPU was given, and those of them that have ended.
    given: usize,
    ended: usize,
    /// Steps of a GPU that reaches the pool itself that are flushed: before it reads them, or after it wrote them.
    flushed: usize,
    /// Those of a transfer that a stream orders, one before each step.
    flushes: Vec<Arc<QueuedFlush>>,
    /// Steps that the GPU may have at a time.
    under_way: usize,
    /// Whether what the next step reads through a buffer is flushed, and the flush fenced.
    is_ready: bool,
    /// Nothing more is to be given.
    is_stopped: bool,
    /// Flushes and stores of this thread that it has not fenced.
    is_unfenced: bool,
}

impl<'t> Transfer<'t> {
    /// Of lists as they were found when they were checked, each with what it comes after.
    pub(super) fn new(
        direction: Direction,
        order: Order,
        checksum: Checksum,
        checked: impl Iterator<Item = (Result<Cow<'t, [Piece]>>, After)>,
    ) -> Self {
        let list = |(checked, after): (Result<Cow<'t, [Piece]>>, After)| {
            let (pieces, error) = match checked {
                Ok(pieces) => (pieces, None),
                Err(error) => (Cow::Borrowed(&[][..]), Some(error)),
            };
            List { error, ..List::new(pieces, Side::Pool, after, checksum.start()) }
        };
        Self::of(direction, order, checksum, checked.map(list).collect())
    }

    /// Of pieces of the pool and of other memory of this process.
    pub(super) fn of_pieces(direction: Direction, order: Order, pool: Vec<Piece>, process: Vec<Piece>) -> Self {
        let list = |(pieces, side): (Vec<Piece>, Side)| List::new(Cow::Owned(pieces), side, After::Nothing, None);
        let lists = [(pool, Side::Pool), (process, Side::Process)].into_iter().filter(|(pieces, _)| !pieces.is_empty());
        Self::of(direction, order, Checksum::Off, lists.map(list).collect())
    }

    fn of(direction: Direction, order: Order, checksum: Checksum, lists: Vec<List<'t>>) -> Self {
        let way = Way::Direct(Vec::new());
        Transfer {
            direction,
            order,
            checksum,
            lists,
            way,
            given: 0,
            ended: 0,
            flushed: 0,
            flushes: Vec::new(),
            under_way: STEPS_UNDER_WAY,
            is_ready: false,
            is_stopped: false,
            is_unfenced: false,
        }
    }

    /// Whether there is a byte to be copied.
    pub(super) fn has_work(&self) -> bool {
        self.lists.iter().any(|list| !list.pieces.is_empty())
    }

    /// Whether the GPU may reach all of it in the pool itself.
    pub(super) fn is_reached(&self, memory: &dyn Coherence, registered: &Registered, entered: &Entered<'_>) -> bool {
        let is_reached = |(offset, len_bytes): (u64, u64)| {
            // Memory that is known to be bad is left to the CPU, which reports the fault.
            memory.address(offset, len_bytes).is_some() && registered.reach(entered, offset, len_bytes)
        };
        let is_in_pool = self.lists.iter().all(|list| list.side == Side::Pool);
        is_in_pool && registered.is_of(memory) && self.stretches().all(is_reached)
    }

    /// Whether the checksum of each list is asked for.
    pub(super) fn has_checksums(&self) -> bool {
        self.checksum.is_on()
    }

    /// How long each list is, in bytes.
    pub(super) fn lists_len_bytes(&self) -> impl Iterator<Item = u64> {
        self.lists.iter().map(List::len_bytes)
    }

    /// Offset and length of each stretch of the pool, if the lists are of it.
    pub(super) fn stretches(&self) -> impl Iterator<Item = (u64, u64)> {
        self.lists.iter().flat_map(|list| list.stretches())
    }

    /// Pool offsets and lengths that the GPU may write itself.
    pub(super) fn written(&self) -> Vec<(u64, u64)> {
        match (self.direction, &self.way) {
            (Direction::ToHost, Way::Direct(_)) => self.stretches().collect(),
            _ => Vec::new(),
        }
    }

    fn fail(&mut self, list: usize, error: Error) {
        if let Some(list) = self.lists.get_mut(list) {
            list.fail(error);
        }
    }

    /// Whether lists of the GPU are the destination.
    pub(super) fn is_from_host(&self) -> bool {
        self.direction == Direction::FromHost
    }

    /// Every list that has no other answer ends like this.
    pub(super) fn fail_all(&mut self, error: impl Fn() -> Error) {
        for list in self.lists.iter_mut().filter(|list| list.error.is_none()) {
            list.error = Some(error());
        }
    }

    /// As [`Transfer::fail_all`]; so do lists that have another answer, if the GPU was given any of them and may still be at it.
    pub(super) fn fail_given(&mut self, error: impl Fn() -> Error) {
        for list in self.lists.iter_mut().filter(|list| list.is_given || list.error.is_none()) {
            list.error = Some(error());
        }
    }

    /// Has what the lane is given come after what the lists name.
    ///
    /// # Safety
    /// Their streams and events are there.
    pub(super) unsafe fn come_after(&self, lane: &Lane, entered: &Entered<'_>) -> Result<()> {
        let mut known = Vec::new();
        for after in self.lists.iter().filter(|list| list.error.is_none()).map(|list| list.after) {
            let is_first_enough = !known.is_empty() && mutant!("copy.dma_after_one_stream");
            if !known.contains(&after) && !is_first_enough && !mutant!("copy.dma_before_callers_work") {
                known.push(after);
                // SAFETY: as this function demands.
                unsafe { lane.come_after(entered, after) }?;
            }
        }
        Ok(())
    }

    /// Makes everything ready for a plan that is this transfer's. The GPU is given nothing.
    ///
    /// # Errors
    /// No memory for the buffers.
    pub(super) fn begin(
        &mut self,
        memory: &dyn Coherence,
        lane: &mut Lane,
        entered: &Entered<'_>,
        plan: &Plan<'_>,
        part_bytes: usize,
    ) -> Result<()> {
        let buffer_bytes = match plan {
            Plan::Direct(registered, mover) => {
                let step_bytes = (self.lists_len_bytes().sum::<u64>() as usize).div_ceil(STEPS).next_multiple_of(PAGE_BYTES);
                let step_bytes = step_bytes.max(SHARED_FROM_BYTES as usize).min(part_bytes);
                self.way = Way::Direct(steps(self.moves(memory, registered), mover, step_bytes));
                return Ok(());
            }
            Plan::Buffers(buffer_bytes) => *buffer_bytes,
        };
        let windows = windows::cut(&self.lists, buffer_bytes);
        let first = lane.buffer(entered, 0, buffer_bytes)?;
        let second = if windows.len() > 1 { lane.buffer(entered, 1, buffer_bytes)? } else { first };
        self.way = Way::Buffers(windows, Buffers([first, second]));
        self.flush(memory, 0);
        Ok(())
    }

    /// The copies of a GPU that reaches the pool itself. Lines that they write in part are out of this host's caches.
    fn moves(&mut self, memory: &dyn Coherence, registered: &Registered) -> Vec<Move> {
        let (order, direction) = (self.order, self.direction);
        let mut moves = Vec::new();
        for (index, list) in self.lists.iter_mut().enumerate().filter(|(_, list)| list.error.is_none()) {
            if direction == Direction::ToHost
                && let Err(error) = list.edges().into_iter().try_for_each(|offset| order.flush_edge(memory, offset))
            {
                list.error = Some(error);
                continue;
            }
            for run in list.runs() {
                let mut granule = 0..0;
                let mut mapped = 0;
                for piece in run {
                    let mut done = 0;
                    while done < piece.len_bytes {
                        let at = piece.offset + done as u64;
                        if at >= granule.end {
                            (granule, mapped) = registered.granule_at(at);
                        }
                        let room = usize::try_from(granule.end - at).unwrap_or(usize::MAX);
                        let part = piece.part(done, (piece.len_bytes - done).min(room));
                        let mapped = mapped + (at - granule.start);
                        moves.push(Move { mapped, ..to_move(direction, index, &part, registered.address(at)) });
                        done += part.len_bytes;
                    }
                }
            }
        }
        if direction == Direction::ToHost {
            order.flushed(memory);
        }
        moves
    }

    /// Flushes the next step that is not, by several threads.
    fn flush_next(&mut self, memory: &dyn Coherence, flusher: &Flusher) {
        let Way::Direct(steps) = &self.way else { return };
        let Some(step) = steps.get(self.flushed) else { return };
        self.flushed += 1;
        if mutant!("copy.dma_end_unflushed") && self.flushed == steps.len() {
            return;
        }
        for (list, error) in flusher.flush(memory, self.order, self.direction, &step.runs) {
            self.fail(list, error);
        }
    }

    /// Whether what the next step reads in the pool itself is still to be flushed.
    fn is_read_unflushed(&self) -> bool {
        self.is_from_host() && matches!(self.way, Way::Direct(_)) && self.flushed == self.given && !mutant!("copy.dma_part_read_first")
    }

    /// Lets the GPU have all steps at a time: a stream orders the later work after them.
    pub(super) fn give_all(&mut self, lane: &mut Lane, entered: &Entered<'_>) -> Result<()> {
        self.under_way = self.steps().max(1);
        lane.reserve_slots(entered, self.under_way)
    }

    /// Queues the flush of all that the GPU will read in the pool itself, step by step, so that no call waits for it.
    ///
    /// # Errors
    /// [`Error::Gpu`]. Some flushes may be under way.
    pub(super) fn queue_flushes(
        &mut self,
        memory: &Arc<dyn Coherence>,
        flusher: &Arc<Flusher>,
        lane: &mut Lane,
        entered: &Entered<'_>,
    ) -> Result<()> {
        let (Way::Direct(steps), Direction::FromHost, true) = (&self.way, self.direction, self.order.is_dma_flushed()) else {
            return Ok(());
        };
        for (slot, step) in steps.iter().enumerate() {
            let (memory, flusher, order) = (memory.clone(), flusher.clone(), self.order);
            let flush = Arc::new(QueuedFlush { memory, flusher, order, runs: step.runs.clone(), failed: Mutex::default() });
            lane.queue_flush(entered, slot, &flush)?;
            self.flushes.push(flush);
        }
        self.flushed = steps.len();
        Ok(())
    }

    /// After a step that has ended: whether what it read had been flushed.
    fn take_flush(&mut self) {
        let Some(flush) = self.flushes.get(self.ended).cloned() else { return };
        match held(&flush.failed).take() {
            Some(failed) => failed.into_iter().for_each(|(list, error)| self.fail(list, error)),
            None => flush.runs.iter().for_each(|(list, _)| {
                self.fail(*list, Error::Invalid("the GPU read a block before its flush: report this as a bug of kvbm-cxl".into()));
            }),
        }
    }

    /// Steps in all.
    fn steps(&self) -> usize {
        match &self.way {
            Way::Direct(steps) => steps.len(),
            Way::Buffers(windows, _) => windows.len(),
        }
    }

    /// Drops what this host's caches hold of the pool that a step will read.
    fn flush(&mut self, memory: &dyn Coherence, step: usize) {
        let Way::Buffers(windows, _) = &self.way else { return };
        if self.direction == Direction::ToHost {
            return;
        }
        for part in windows.get(step).into_iter().flatten() {
            if let Some(list) = self.lists.get_mut(part.list).filter(|list| list.is_well() && list.side == Side::Pool) {
                self.is_unfenced = true;
                list.error = self.order.flush(memory, part.piece.offset, part.piece.len_bytes as u64).err();
            }
        }
    }

    /// Gives the GPU as many steps as it may have, and says how far it is with them. `Done` = with all that will be.
    ///
    /// # Safety
    /// The lists name memory of the GPU, and ordinary memory of this process, that may be used until this is `Done` or the lane is drained;
    /// the lane is that of [`Transfer::begin`].
    pub(super) unsafe fn advance(&mut self, memory: &dyn Coherence, flusher: &Flusher, lane: &mut Lane, entered: &Entered<'_>) -> Progress {
        loop {
            // SAFETY: as this function demands.
            if let Err(code) = unsafe { self.give_steps(memory, flusher, lane, entered) } {
                return Progress::Failed(code);
            }
            // While the GPU makes the steps after it.
            if !self.is_from_host() && self.flushed < self.ended && matches!(self.way, Way::Direct(_)) {
                self.flush_next(memory, flusher);
                continue;
            }
            if self.ended == self.given {
                return Progress::Done;
            }
            let is_unawaited = mutant!("copy.dma_unawaited");
            match if is_unawaited { Progress::Done } else { lane.progress(entered, self.ended) } {
                // SAFETY: as this function demands.
                Progress::Done => unsafe { self.take_step(memory, lane) },
                other => return other,
            }
        }
    }

    /// The last step that the GPU was given.
    pub(super) fn last_given(&self) -> Option<usize> {
        self.given.checked_sub(1)
    }

    /// The step whose end is awaited.
    pub(super) fn awaited(&self) -> usize {
        self.ended
    }

    /// Gives the GPU as many steps as it may have, without a look at how far it is.
    ///
    /// # Safety
    /// As [`Transfer::advance`].
    ///
    /// # Errors
    /// An error of the driver that stays.
    pub(super) unsafe fn give_steps(
        &mut self,
        memory: &dyn Coherence,
        flusher: &Flusher,
        lane: &mut Lane,
        entered: &Entered<'_>,
    ) -> std::result::Result<(), c_int> {
        while self.given < self.steps() && !self.is_stopped && self.lists.iter().any(List::is_well) {
            if !std::mem::replace(&mut self.is_ready, true) && matches!(self.way, Way::Buffers(..)) && self.is_from_host() {
                self.order.flushed(memory);
                self.is_unfenced = false;
                // While the GPU is at what it has.
                self.flush(memory, self.given + 1);
            }
            if self.is_read_unflushed() {
                self.flush_next(memory, flusher);
            }
            if self.given == self.ended + self.under_way {
                break;
            }
            if !self.flushes.is_empty() {
                lane.come_after_flush(entered, self.given)?;
            }
            let mut mover = Mover::Engines;
            let moves = match &mut self.way {
                Way::Direct(steps) => {
                    let Some(step) = steps.get_mut(self.given) else { break };
                    mover = step.mover.clone();
                    let lists = &self.lists;
                    step.moves.retain(|part| lists.get(part.list).is_some_and(List::is_well));
                    Cow::Borrowed(&step.moves)
                }
                Way::Buffers(windows, buffers) => {
                    let Some(window) = windows.get(self.given) else { break };
                    let buffer = buffers.0[self.given % STEPS_UNDER_WAY];
                    if self.direction == Direction::FromHost {
                        // SAFETY: the buffer was the GPU's two steps ago, and memory may be read as this function demands.
                        unsafe { windows::fill(&mut self.lists, window, memory, buffer) };
                    }
                    let start = buffer.as_ptr().expose_provenance() as Address;
                    let to = |part: &windows::Part| to_move(self.direction, part.list, &part.piece, start + part.at as Address);
                    Cow::Owned(window.iter().filter(|part| self.lists.get(part.list).is_some_and(List::is_well)).map(to).collect())
                }
            };
            for run in moves.chunk_by(|one, other| one.list == other.list) {
                if let Some(list) = run.first().and_then(|part| self.lists.get_mut(part.list)) {
                    list.is_given = true;
                }
            }
            let (slot, is_to_host) = (self.given, self.direction == Direction::ToHost);
            // SAFETY: as this function demands; the slot's last step but one has ended.
            let refused = unsafe {
                match &mover {
                    _ if moves.is_empty() => Vec::new(),
                    Mover::Engines => lane.give(entered, &moves),
                    Mover::Kernel(kernels) => lane.give_kernel(entered, slot, kernels, &moves, is_to_host, false),
                    Mover::SummingKernel(kernels) => lane.give_kernel(entered, slot, kernels, &moves, is_to_host, true),
                }
            };
            (self.given, self.is_ready) = (self.given + 1, false);
            refused.into_iter().for_each(|(list, error)| self.fail(list, error));
            lane.mark(entered, slot)?;
        }
        Ok(())
    }

    /// After a step that has ended: moves the bytes in its buffer to their place, and the sums of its kernel to its lists.
    ///
    /// # Safety
    /// As [`Transfer::advance`].
    unsafe fn take_step(&mut self, memory: &dyn Coherence, lane: &Lane) {
        self.take_flush();
        if let Way::Direct(steps) = &self.way
            && let Some(Step { moves, mover: Mover::SummingKernel(kernels), .. }) = steps.get(self.ended)
        {
            let lists = moves.chunk_by(|one, other| one.list == other.list).filter_map(|run| run.first()).map(|first| first.list);
            for (list, checksum) in lists.zip(lane.checksums(self.ended)) {
                let Some(list) = self.lists.get_mut(list) else { continue };
                list.summed = checksum;
                if checksum.is_none() && list.is_well() {
                    list.fail(kernels.unfinished());
                }
            }
        }
        if let (Way::Buffers(windows, buffers), Direction::ToHost, false) = (&self.way, self.direction, self.is_stopped)
            && let Some(window) = windows.get(self.ended)
        {
            // SAFETY: the GPU has ended with the buffer, and memory may be written as this function demands.
            unsafe { windows::empty(&mut self.lists, window, memory, buffers.0[self.ended % STEPS_UNDER_WAY]) };
            self.is_unfenced = true;
        }
        self.ended += 1;
    }

    /// Another thread may continue from here: this one's flushes and stores are complete.
    pub(super) fn rest(&mut self, memory: &dyn Coherence) {
        if std::mem::take(&mut self.is_unfenced) {
            memory.fence_all();
        }
    }

    /// Has no further step given, and no buffer emptied.
    pub(super) fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Whether [`Transfer::stop`] came before the end. Through buffers it is not told what of it was still made.
    pub(super) fn is_cut(&self) -> bool {
        self.is_stopped && (matches!(self.way, Way::Buffers(..)) || self.given < self.steps())
    }

    /// After copies that the GPU has ended, whatever became of them. Its own writes to the pool leave this host's caches; of its own reads
    /// there: whether the memory was there all the time.
    pub(super) fn leave(&mut self, memory: &dyn Coherence, flusher: &Flusher) {
        if !self.is_from_host() {
            while self.flushed < self.given && matches!(self.way, Way::Direct(_)) {
                self.flush_next(memory, flusher);
            }
            return;
        }
        let Way::Direct(steps) = &self.way else { return };
        for (list, run) in steps.iter().take(self.given).flat_map(|step| &step.runs) {
            let len_bytes = run.len_bytes as u64;
            if memory.address(run.offset, len_bytes).is_none()
                // It is known to be bad by now: this says how.
                && let Err(error) = memory.flush_range(run.offset, len_bytes)
                && let Some(list) = self.lists.get_mut(*list)
            {
                list.fail(error);
            }
        }
    }

    /// Bytes that the GPU copied to or from the pool itself and that nothing flushes, because this host's platform needs no flush.
    pub(super) fn unflushed_bytes(&self) -> u64 {
        if self.order.is_dma_flushed() || !matches!(self.way, Way::Direct(_)) {
            return 0;
        }
        let well = self.lists.iter().filter(|list| list.is_given && list.is_well());
        well.map(List::len_bytes).sum()
    }

    /// The fence after everything, [`Transfer::leave`] included.
    pub(super) fn fence(&self, memory: &dyn Coherence) {
        match self.direction {
            Direction::ToHost => self.order.published(memory),
            Direction::FromHost => self.order.pulled(memory, false),
        }
    }

    /// What became of each list.
    pub(super) fn finish(self) -> Vec<Outcome> {
        let is_direct = matches!(self.way, Way::Direct(_));
        let outcome = |list: List<'_>| match list.error {
            Some(error) => Err(error),
            None if list.summed.is_some() => Ok(list.summed),
            // The CPU has summed no byte of it.
            None if is_direct && list.sum.is_some() && !list.pieces.is_empty() => {
                Err(Error::Invalid("a list that no kernel was given has no checksum".into()))
            }
            None => Ok(list.sum.map(|sum| sum.finish())),
        };
        self.lists.into_iter().map(outcome).collect()
    }
}
