// SPDX-License-Identifier: Apache-2.0
//! The lists of one call, and what became of each.

use super::Direction;
use super::driver::Address;
use super::lane::Move;
use crate::copy::checksum::Running;
use crate::copy::list::{After, Piece};
use crate::error::Error;
use crate::limits::LINE_BYTES;
use std::borrow::Cow;

/// What the memory of the GPU is copied to or from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The pool: the offsets of the pieces are the pool's.
    Pool,
    /// Other memory of this process: the offsets of the pieces are its addresses.
    Process,
}

/// One list. Its answer is an error as soon as there is one, and nothing more is done for it.
pub(super) struct List<'t> {
    pub(super) pieces: Cow<'t, [Piece]>,
    pub(super) side: Side,
    pub(super) after: After,
    pub(super) error: Option<Error>,
    /// Whether the GPU was given any of it.
    pub(super) is_given: bool,
    pub(super) sum: Option<Running>,
    /// Its checksum, where a kernel took it.
    pub(super) summed: Option<u64>,
}

impl<'t> List<'t> {
    pub(super) fn new(pieces: Cow<'t, [Piece]>, side: Side, after: After, sum: Option<Running>) -> Self {
        List { pieces, side, after, error: None, is_given: false, sum, summed: None }
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len_bytes as u64))
    }

    /// Pieces that follow one another in the pool, together: mostly the one stretch of a block, of however many pieces on the GPU.
    pub(super) fn runs(&self) -> impl Iterator<Item = &[Piece]> {
        self.pieces.chunk_by(|piece, next| piece.end() == next.offset)
    }

    /// Offset and length of each run.
    pub(super) fn stretches(&self) -> impl Iterator<Item = (u64, u64)> {
        self.runs().filter_map(|run| Some((run.first()?.offset, run.last()?.end() - run.first()?.offset)))
    }

    /// An offset in each line of the pool that the pieces touch only in part: between them, the pieces of a run write every byte.
    pub(super) fn edges(&self) -> Vec<u64> {
        let line = LINE_BYTES as u64;
        let mut offsets: Vec<u64> = Vec::new();
        for (start, len_bytes) in self.stretches() {
            let end = start + len_bytes;
            let ends = [(!start.is_multiple_of(line)).then_some(start), (!end.is_multiple_of(line)).then(|| end - 1)];
            for offset in ends.into_iter().flatten() {
                if offsets.last().is_none_or(|known| known / line != offset / line) {
                    offsets.push(offset);
                }
            }
        }
        offsets
    }

    pub(super) fn is_well(&self) -> bool {
        self.error.is_none()
    }

    pub(super) fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }
}

/// A copy of a piece of a list, whose place in memory of the host is `host`.
pub(super) fn to_move(direction: Direction, list: usize, piece: &Piece, host: Address) -> Move {
    let (gpu, len_bytes) = (piece.address() as Address, piece.len_bytes);
    match direction {
        Direction::ToHost => Move { list, destination: host, source: gpu, mapped: 0, offset: piece.offset, len_bytes },
        Direction::FromHost => Move { list, destination: gpu, source: host, mapped: 0, offset: piece.offset, len_bytes },
    }
}
