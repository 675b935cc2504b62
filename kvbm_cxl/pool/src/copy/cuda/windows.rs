// SPDX-License-Identifier: Apache-2.0
//! The parts that go through a pinned buffer at a time: how lists are cut for that, and the CPU's side of each cut.

use super::lists::{List, Side};
use crate::coherence::Coherence;
use crate::copy::cpu::write_pieces;
use crate::copy::list::Piece;
use crate::limits::LINE_BYTES;
use std::ptr::{NonNull, copy_nonoverlapping, with_exposed_provenance, with_exposed_provenance_mut};

/// Bytes that are copied out and summed in turn, while they are in the first-level cache.
const SUMMED_BYTES: usize = 16 << 10;

/// A part of a piece that goes through a buffer, `at` bytes in.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) list: usize,
    pub(super) piece: Piece,
    pub(super) at: usize,
}

/// The pieces that go through a buffer at a time.
pub(super) type Window = Vec<Part>;

/// Cuts the lists into what a buffer holds; pieces are cut where a line of the pool begins, so that no line is written twice.
pub(super) fn cut(lists: &[List<'_>], buffer_bytes: usize) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    let (mut window, mut filled) = (Window::new(), 0);
    for (list, pieces) in lists.iter().enumerate().map(|(index, list)| (index, &list.pieces)) {
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

/// Moves a window's bytes from its buffer to where they belong.
///
/// # Safety
/// The GPU has filled the buffer and no other thread uses it; pieces of ordinary memory may be written.
pub(super) unsafe fn empty(lists: &mut [List<'_>], window: &[Part], memory: &dyn Coherence, buffer: NonNull<u8>) {
    let start = buffer.as_ptr().expose_provenance();
    for run in window.chunk_by(|one, other| one.list == other.list) {
        let Some(list) = run.first().and_then(|part| lists.get_mut(part.list)).filter(|list| list.is_well()) else { continue };
        if list.side == Side::Process {
            for part in run {
                let to = with_exposed_provenance_mut::<u8>(part.piece.offset as usize);
                // SAFETY: the part lies in the buffer, and its place may be written, as this function demands.
                unsafe { copy_nonoverlapping(with_exposed_provenance(start + part.at), to, part.piece.len_bytes) };
            }
            continue;
        }
        // One after the other in the buffer: neighbours in the pool are one piece.
        let mut pieces: Vec<Piece> = Vec::with_capacity(run.len());
        for part in run {
            let piece = Piece::in_host(part.piece.offset, start + part.at, part.piece.len_bytes);
            match pieces.last_mut() {
                Some(last) if last.is_before(&piece) => last.len_bytes += piece.len_bytes,
                _ => pieces.push(piece),
            }
        }
        if let Err(error) = write_pieces(memory, &pieces, list.sum.as_mut()) {
            list.fail(error);
        }
    }
}

/// Moves a window's bytes from where they are into its buffer.
///
/// # Safety
/// The GPU has ended with the buffer and no other thread uses it; pieces of ordinary memory may be read.
pub(super) unsafe fn fill(lists: &mut [List<'_>], window: &[Part], memory: &dyn Coherence, buffer: NonNull<u8>) {
    for part in window {
        let Some(list) = lists.get_mut(part.list).filter(|list| list.is_well()) else { continue };
        // SAFETY: the part lies in the buffer, which the GPU has ended with and no other thread uses.
        let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.as_ptr().add(part.at), part.piece.len_bytes) };
        if list.side == Side::Process {
            let from = with_exposed_provenance::<u8>(part.piece.offset as usize);
            // SAFETY: the part's memory may be read, as this function demands; the buffer is memory of its own.
            unsafe { copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
            continue;
        }
        let mut offset = part.piece.offset;
        for chunk in bytes.chunks_mut(SUMMED_BYTES) {
            if let Err(error) = memory.copy_out(offset, chunk) {
                list.fail(error);
                break;
            }
            if let Some(sum) = &mut list.sum {
                sum.add(chunk);
            }
            offset += chunk.len() as u64;
        }
    }
}
