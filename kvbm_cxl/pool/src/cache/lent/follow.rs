// SPDX-License-Identifier: Apache-2.0
//! A pull of a lent block (LENT.md section 4): the reference says where it lies; the line of the block, looked at after the copy, whether
//! the bytes were its bytes all the while.
//!
//! The reference alone, once read from the memory, says that the block was in the memory before. So a flush behind that look gets bytes that
//! are at least as new, and what is left to know is that they are no newer.

use super::super::{BlockKey, Inner, Namespace};
use super::lines::{Reference, Standing};
use super::shape::Shape;
use crate::copy::{ReadList, checksum_of};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::Line;
use crate::media::{Descriptor, REFERENCE_BYTES};
use crate::metrics::MissReason;
use std::sync::Arc;

/// A lent block that a reader is about to copy.
pub(crate) struct Followed {
    shape: Arc<Shape>,
    reference: Reference,
    /// The line of the block as long as it is lent.
    lent: Standing,
}

impl Inner {
    /// Reads the reference in a cell that a reader has pinned, and looks whether the block is still lent.
    pub(crate) fn follow_reference(&self, found: &Descriptor, offset: u64) -> Result<std::result::Result<Followed, MissReason>> {
        let lines = self.lines();
        let bytes: Line = match lines.fetch_raw(offset) {
            Ok(line) => line,
            Err(Error::Poisoned { .. }) => return Ok(Err(MissReason::Device)),
            Err(error) => return Err(error),
        };
        point!("lent.reference_read");
        if checksum_of(&bytes.0) != found.checksum {
            // The cell has another content by now, or is damaged.
            return Ok(Err(MissReason::Changed));
        }
        let reference: Reference = bytemuck::cast(bytes);
        if reference.magic != Reference::MAGIC {
            return Ok(Err(MissReason::BadLine));
        }
        let Ok(shape) = self.shapes.of(lines, reference.region, reference.nonce)? else { return Ok(Err(MissReason::TakenBack)) };
        if reference.block >= shape.place.blocks || shape.block_bytes() != u64::from(found.len_bytes) {
            return Ok(Err(MissReason::BadLine));
        }
        let lent = reference.lent(Namespace(found.namespace), BlockKey(found.key));
        let followed = Followed { shape, reference, lent };
        // Only to save the copy.
        Ok(if followed.is_lent(self)? { Ok(followed) } else { Err(MissReason::TakenBack) })
    }
}

impl Followed {
    /// The list that takes the bytes from where they lie, for one that takes them from a cell at `offset`.
    pub fn list<'m>(&self, offset: u64, list: &ReadList<'m>) -> ReadList<'m> {
        list.moved(|at, len_bytes| self.shape.stretches(self.reference.block, at - offset, len_bytes))
    }

    /// The checksum of the whole block, if its lender summed it.
    pub fn checksum(&self) -> Option<u64> {
        (self.reference.has_checksum == 1).then_some(self.reference.checksum)
    }

    /// Whether the block has been lent, as the reference says, up to now. Behind a copy: then its bytes are the block's.
    pub fn is_lent(&self, inner: &Inner) -> Result<bool> {
        let found = match self.shape.standing(inner.lines(), self.reference.block) {
            Err(Error::Poisoned { .. }) => None,
            other => other?,
        };
        if mutant!("lent.generation_not_compared") {
            return Ok(found
                .is_some_and(|found| (found.state, found.key, found.namespace) == (self.lent.state, self.lent.key, self.lent.namespace)));
        }
        if mutant!("lent.key_not_compared") {
            return Ok(found.is_some_and(|found| found.state == self.lent.state));
        }
        Ok(found.is_some_and(|found| Standing { crc: 0, ..found } == self.lent))
    }
}

const _: () = assert!(REFERENCE_BYTES as usize == size_of::<Line>());
