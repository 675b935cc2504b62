// SPDX-License-Identifier: Apache-2.0
//! The lists of one call on their way: cut, given to the GPU, and with the steps of order that the memory needs on either side.

use super::driver::Address;
use super::gpu::Entered;
use super::lane::{Ended, Lane, Move};
use super::registered::Registered;
use crate::coherence::Coherence;
use crate::copy::checksum::Running;
use crate::copy::cpu::write_pieces;
use crate::copy::list::Piece;
use crate::copy::order::Order;
use crate::copy::place::After;
use crate::copy::{Checksum, Outcome};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::borrow::Cow;
use std::ptr::NonNull;
use std::time::Instant;

/// Bytes that are copied out and summed in turn, while they are in the first-level cache.
const SUMMED_BYTES: usize = 16 << 10;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToPool,
    FromPool,
}

/// One list. Its answer is an error as soon as there is one, and nothing more is done for it.
struct List<'t> {
    pieces: Cow<'t, [Piece]>,
    after: After,
    error: Option<Error>,
    /// Whether the GPU was given any of it.
    is_given: bool,
    sum: Option<Running>,
}

/// A part of a piece that goes through a buffer, `at` bytes in.
#[derive(Clone, Copy)]
struct Part {
    list: usize,
    piece: Piece,
    at: usize,
}

/// What goes through a buffer at a time.
type Window = Vec<Part>;

/// The lists of one call.
pub(super) struct Transfer<'t> {
    memory: &'t dyn Coherence,
    direction: Direction,
    order: Order,
    checksum: Checksum,
    lists: Vec<List<'t>>,
}

impl<'t> Transfer<'t> {
    /// Of lists as they were found when they were checked, each with what it comes after.
    pub(super) fn new(
        memory: &'t dyn Coherence,
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
            List { pieces, after, error, is_given: false, sum: checksum.start() }
        };
        Transfer { memory, direction, order, checksum, lists: checked.map(list).collect() }
    }

    /// Whether there is a byte to be copied.
    pub(super) fn has_work(&self) -> bool {
        self.lists.iter().any(|list| !list.pieces.is_empty())
    }

    /// Whether the GPU may reach all of it in the pool itself.
    pub(super) fn is_reached(&self, registered: &Registered, entered: &Entered<'_>) -> bool {
        let is_reached = |piece: &Piece| {
            // Memory that is known to be bad is left to the CPU, which says what is wrong with it.
            self.memory.address(piece.offset, piece.len_bytes as u64).is_some()
                && registered.reach(entered, piece.offset, piece.len_bytes as u64)
        };
        !self.checksum.is_on() && registered.is_of(self.memory) && self.pieces().all(is_reached)
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.lists.iter().flat_map(|list| list.pieces.iter())
    }

    /// Pool offsets and lengths that a GPU which reaches the pool itself may write.
    pub(super) fn written(&self) -> Vec<(u64, u64)> {
        match self.direction {
            Direction::ToPool => self.pieces().map(|piece| (piece.offset, piece.len_bytes as u64)).collect(),
            Direction::FromPool => Vec::new(),
        }
    }

    fn fail(&mut self, list: usize, error: Error) {
        if let Some(list) = self.lists.get_mut(list) {
            list.error.get_or_insert(error);
        }
    }

    /// Whether lists of the GPU are what is written.
    pub(super) fn is_from_pool(&self) -> bool {
        self.direction == Direction::FromPool
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
            if !known.contains(&after) {
                known.push(after);
                // SAFETY: as this function demands.
                unsafe { lane.come_after(entered, after) }?;
            }
        }
        Ok(())
    }

    /// Has the GPU reach the pool itself.
    ///
    /// # Safety
    /// The lists name memory of the GPU that may be used until the lane's end was seen, and all of the pool's is registered.
    pub(super) unsafe fn direct(&mut self, lane: &mut Lane, entered: &Entered<'_>, registered: &Registered, deadline: Instant) -> Ended {
        let (memory, order, direction) = (self.memory, self.order, self.direction);
        let mut moves = Vec::new();
        for (index, list) in self.lists.iter_mut().enumerate().filter(|(_, list)| list.error.is_none()) {
            let prepare = |piece: &Piece| match direction {
                Direction::ToPool => edges(piece).try_for_each(|offset| order.flush_edge(memory, offset)),
                Direction::FromPool => order.flush(memory, piece.offset, piece.len_bytes as u64),
            };
            if let Err(error) = list.pieces.iter().try_for_each(prepare) {
                list.error = Some(error);
                continue;
            }
            list.is_given = true;
            for piece in list.pieces.iter() {
                let mut done = 0;
                while done < piece.len_bytes {
                    let room = registered.until_border(piece.offset + done as u64);
                    let part = piece.part(done, (piece.len_bytes - done).min(usize::try_from(room).unwrap_or(usize::MAX)));
                    moves.push(to_move(direction, index, &part, registered.address(part.offset)));
                    done += part.len_bytes;
                }
            }
        }
        order.flushed(memory);
        // SAFETY: as this function demands.
        let refused = unsafe { lane.give(entered, &moves) };
        lane.mark(entered, 0);
        refused.into_iter().for_each(|(list, error)| self.fail(list, error));
        lane.wait(entered, 0, deadline)
    }

    /// Behind copies to the pool that the GPU has ended, whatever became of them: what it wrote leaves this host's caches. Behind copies
    /// from the pool: whether the memory was there all the time.
    pub(super) fn leave(&mut self) {
        let (memory, order, direction) = (self.memory, self.order, self.direction);
        for list in self.lists.iter_mut().filter(|list| list.is_given) {
            for piece in list.pieces.iter() {
                let len_bytes = piece.len_bytes as u64;
                let left = match direction {
                    Direction::ToPool => order.flush_moved(memory, piece.offset, len_bytes),
                    Direction::FromPool if memory.address(piece.offset, len_bytes).is_some() => Ok(()),
                    // It is known to be bad by now: this says how.
                    Direction::FromPool => memory.flush_range(piece.offset, len_bytes),
                };
                if let Err(error) = left {
                    list.error.get_or_insert(error);
                }
            }
        }
    }

    /// Copies through the lane's buffers.
    ///
    /// # Safety
    /// The lists name memory of the GPU that may be used until the lane's end was seen.
    pub(super) unsafe fn bounce(
        &mut self,
        lane: &mut Lane,
        entered: &Entered<'_>,
        buffer_bytes: usize,
        deadline: Instant,
    ) -> Result<Ended> {
        let windows = self.windows(buffer_bytes);
        match self.direction {
            // SAFETY: as this function demands.
            Direction::ToPool => unsafe { self.bounce_in(&windows, lane, entered, buffer_bytes, deadline) },
            // SAFETY: as this function demands.
            Direction::FromPool => unsafe { self.bounce_out(&windows, lane, entered, buffer_bytes, deadline) },
        }
    }

    /// Cuts the lists into what a buffer holds; pieces are cut where a line of the pool begins, so that no line is written twice.
    fn windows(&self, buffer_bytes: usize) -> Vec<Window> {
        let mut windows: Vec<Window> = Vec::new();
        let (mut window, mut filled) = (Window::new(), 0);
        for (list, pieces) in self.lists.iter().enumerate().map(|(index, list)| (index, &list.pieces)) {
            for piece in pieces.iter() {
                let mut done = 0;
                while done < piece.len_bytes {
                    let (offset, left, room) = (piece.offset + done as u64, piece.len_bytes - done, buffer_bytes - filled);
                    let behind = (offset + room as u64) % LINE_BYTES as u64;
                    let taken = if left <= room { left } else { room.saturating_sub(behind as usize) };
                    if taken > 0 {
                        window.push(Part { list, piece: piece.part(done, taken), at: filled });
                        (filled, done) = (filled + taken, done + taken);
                    }
                    if done < piece.len_bytes {
                        windows.push(std::mem::take(&mut window));
                        filled = 0;
                    }
                }
            }
        }
        if !window.is_empty() {
            windows.push(window);
        }
        windows
    }

    /// Gives the GPU the copies between a window's parts and a buffer.
    ///
    /// # Safety
    /// As [`Transfer::bounce`], and the buffer is the lane's.
    unsafe fn give(&mut self, window: &Window, slot: usize, buffer: NonNull<u8>, lane: &mut Lane, entered: &Entered<'_>) {
        let start = buffer.as_ptr().expose_provenance() as Address;
        let mut moves = Vec::with_capacity(window.len());
        for part in window {
            if let Some(list) = self.lists.get_mut(part.list).filter(|list| list.error.is_none()) {
                list.is_given = true;
                moves.push(to_move(self.direction, part.list, &part.piece, start + part.at as Address));
            }
        }
        // SAFETY: as this function demands.
        let refused = unsafe { lane.give(entered, &moves) };
        lane.mark(entered, slot);
        refused.into_iter().for_each(|(list, error)| self.fail(list, error));
    }

    /// # Safety
    /// As [`Transfer::bounce`].
    unsafe fn bounce_in(
        &mut self,
        windows: &[Window],
        lane: &mut Lane,
        entered: &Entered<'_>,
        buffer_bytes: usize,
        deadline: Instant,
    ) -> Result<Ended> {
        for slot in 0..=windows.len() {
            if let Some(window) = windows.get(slot) {
                let buffer = lane.buffer(entered, slot, buffer_bytes)?;
                // SAFETY: as this function demands.
                unsafe { self.give(window, slot, buffer, lane, entered) };
            }
            // While the GPU fills this buffer, the one before it is emptied.
            let Some((before, window)) = slot.checked_sub(1).and_then(|before| Some((before, windows.get(before)?))) else { continue };
            match lane.wait(entered, before, deadline) {
                Ended::Done => self.empty(window, lane.buffer(entered, before, buffer_bytes)?),
                other => return Ok(other),
            }
        }
        Ok(Ended::Done)
    }

    /// Writes a window's bytes from its buffer to the pool.
    fn empty(&mut self, window: &Window, buffer: NonNull<u8>) {
        let start = buffer.as_ptr().expose_provenance();
        for run in window.chunk_by(|one, other| one.list == other.list) {
            let Some(list) = run.first().and_then(|part| self.lists.get_mut(part.list)) else { continue };
            if list.error.is_some() {
                continue;
            }
            // One behind the other in the buffer: neighbours in the pool are one piece.
            let mut pieces: Vec<Piece> = Vec::with_capacity(run.len());
            for part in run {
                let piece = Piece::in_host(part.piece.offset, start + part.at, part.piece.len_bytes);
                match pieces.last_mut() {
                    Some(last) if last.is_before(&piece) => last.len_bytes += piece.len_bytes,
                    _ => pieces.push(piece),
                }
            }
            list.error = write_pieces(self.memory, &pieces, list.sum.as_mut()).err();
        }
    }

    /// # Safety
    /// As [`Transfer::bounce`].
    unsafe fn bounce_out(
        &mut self,
        windows: &[Window],
        lane: &mut Lane,
        entered: &Entered<'_>,
        buffer_bytes: usize,
        deadline: Instant,
    ) -> Result<Ended> {
        if let Some(first) = windows.first() {
            self.flush(first);
        }
        for (slot, window) in windows.iter().enumerate() {
            self.order.flushed(self.memory);
            if let Some(next) = windows.get(slot + 1) {
                self.flush(next);
            }
            // The buffer was the GPU's two windows ago.
            if let Some(before) = slot.checked_sub(2) {
                match lane.wait(entered, before, deadline) {
                    Ended::Done => {}
                    other => return Ok(other),
                }
            }
            let buffer = lane.buffer(entered, slot, buffer_bytes)?;
            self.fill(window, buffer);
            // SAFETY: as this function demands.
            unsafe { self.give(window, slot, buffer, lane, entered) };
        }
        match windows.len().checked_sub(1) {
            Some(last) => Ok(lane.wait(entered, last, deadline)),
            None => Ok(Ended::Done),
        }
    }

    fn flush(&mut self, window: &Window) {
        let (memory, order) = (self.memory, self.order);
        for part in window {
            if let Some(list) = self.lists.get_mut(part.list).filter(|list| list.error.is_none()) {
                list.error = order.flush(memory, part.piece.offset, part.piece.len_bytes as u64).err();
            }
        }
    }

    /// Reads a window's bytes from the pool into its buffer.
    fn fill(&mut self, window: &Window, buffer: NonNull<u8>) {
        for part in window {
            let Some(list) = self.lists.get_mut(part.list).filter(|list| list.error.is_none()) else { continue };
            // SAFETY: the part lies in the buffer, which the GPU has ended with and nobody else uses.
            let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().add(part.at), part.piece.len_bytes) };
            let mut offset = part.piece.offset;
            for chunk in bytes.chunks_mut(SUMMED_BYTES) {
                if let Err(error) = self.memory.copy_out(offset, chunk) {
                    list.error = Some(error);
                    break;
                }
                if let Some(sum) = list.sum.as_mut() {
                    sum.add(chunk);
                }
                offset += chunk.len() as u64;
            }
        }
    }

    /// What became of each list.
    pub(super) fn finish(self) -> Vec<Outcome> {
        let outcome = |list: List<'_>| match list.error {
            Some(error) => Err(error),
            None => Ok(list.sum.map(|sum| sum.finish())),
        };
        self.lists.into_iter().map(outcome).collect()
    }
}

fn to_move(direction: Direction, list: usize, piece: &Piece, host: Address) -> Move {
    let (gpu, len_bytes) = (piece.address() as Address, piece.len_bytes);
    match direction {
        Direction::ToPool => Move { list, destination: host, source: gpu, len_bytes },
        Direction::FromPool => Move { list, destination: gpu, source: host, len_bytes },
    }
}

/// An offset in each line that a piece touches only in part.
fn edges(piece: &Piece) -> impl Iterator<Item = u64> {
    let line = LINE_BYTES as u64;
    let (start, end) = (piece.offset, piece.offset + piece.len_bytes as u64);
    let first = (!start.is_multiple_of(line)).then_some(start);
    let last = (!end.is_multiple_of(line)).then(|| end - 1).filter(|last| first.is_none_or(|first| first / line != last / line));
    first.into_iter().chain(last)
}
