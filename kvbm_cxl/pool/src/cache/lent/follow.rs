// SPDX-License-Identifier: Apache-2.0
//! Pulls of lent blocks (LENT.md section 4): the reference says where a block lies; the line of the block, looked at after the copy,
//! whether the bytes were its bytes all the while.
//!
//! A reference, once read from the memory, says that the block was in the memory before. So a flush behind that look gets bytes that are at
//! least as new, and what is left to know is that they are no newer.

use super::super::{BlockKey, Few, Inner, Namespace, Pinned};
use super::lines::{LentLine, Reference};
use super::shape::Shape;
use crate::copy::{Outcome, ReadList, checksum_of};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::line::Line;
use crate::media::{Descriptor, REFERENCE_BYTES};
use crate::metrics::MissReason;
use std::sync::Arc;

/// A lent block that a reader is about to copy.
struct Followed {
    shape: Arc<Shape>,
    reference: Reference,
    /// The line of the block as long as it is lent.
    lent: LentLine,
}

impl Inner {
    /// Copies lent blocks as the lists say, which take their bytes from the cells; `None`, or why it is a miss. The lists are used up.
    pub(in super::super) fn copy_lent(&self, blocks: &[&Pinned], lists: &mut [ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        match self.copy_lent_together(blocks, lists) {
            // One of them: each by itself then.
            Err(Error::Poisoned { .. }) if blocks.len() > 1 => {
                let mut answers = Few::with_capacity(blocks.len());
                for (block, list) in blocks.iter().zip(lists) {
                    answers.extend(self.copy_lent(&[block], std::slice::from_mut(list))?);
                }
                Ok(answers)
            }
            Err(Error::Poisoned { .. }) => Ok(Few::from([Some(MissReason::Device)])),
            other => other,
        }
    }

    fn copy_lent_together(&self, blocks: &[&Pinned], lists: &[ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        let mut answers = Few::from_elem(Some(MissReason::TakenBack), blocks.len());
        let mut followed = Vec::with_capacity(blocks.len());
        for (place, found) in self.follow_all(blocks)?.into_iter().enumerate() {
            match found {
                Ok(found) => followed.push((place, found)),
                Err(miss) => answers[place] = Some(miss),
            }
        }
        // Only to save copies.
        let lent = self.are_lent(&followed)?;
        let mut lent = lent.into_iter();
        followed.retain(|_| lent.next() == Some(true));
        let sums: Vec<Option<u64>> = followed
            .iter()
            .map(|(place, found)| {
                let whole = lists[*place].len_bytes() == blocks[*place].len_bytes() && lists[*place].is_one_stretch();
                found.checksum().filter(|_| whole && self.config.checksums)
            })
            .collect();
        let mut moved: Vec<ReadList<'_>> =
            followed.iter().map(|(place, found)| found.list(blocks[*place].offset(), &lists[*place])).collect();
        let checked: Vec<bool> = sums.iter().map(Option::is_some).collect();
        let lens: Vec<u64> = moved.iter().map(ReadList::len_bytes).collect();
        let outcomes = self.pull_lists(&mut moved, &checked);
        point!("lent.copied");
        let still = if mutant!("lent.not_looked_at_again") { vec![true; followed.len()] } else { self.are_lent(&followed)? };
        for (index, ((place, _), outcome)) in followed.iter().zip(outcomes).enumerate() {
            answers[*place] = verdict(outcome, still[index], sums[index])?;
            if answers[*place].is_none() {
                self.metrics.lent_pulled_total.inc();
                self.metrics.lent_pulled_bytes_total.add(lens[index]);
            }
        }
        Ok(answers)
    }

    /// Reads the references in cells that a reader has pinned.
    fn follow_all(&self, blocks: &[&Pinned]) -> Result<Vec<std::result::Result<Followed, MissReason>>> {
        let mut references = vec![Line::ZERO; blocks.len()];
        self.lines().fetch_raw_many(blocks.iter().map(|block| block.offset()), &mut references)?;
        point!("lent.reference_read");
        blocks.iter().zip(references).map(|(block, line)| self.follow_one(block.descriptor(), &line)).collect()
    }

    fn follow_one(&self, found: &Descriptor, line: &Line) -> Result<std::result::Result<Followed, MissReason>> {
        if checksum_of(&line.0) != found.checksum {
            // The cell has another content by now, or is damaged.
            return Ok(Err(MissReason::Changed));
        }
        let reference: Reference = bytemuck::cast(*line);
        if reference.magic != Reference::MAGIC {
            return Ok(Err(MissReason::BadLine));
        }
        let Ok(shape) = self.shapes.of(self.lines(), reference.region, reference.nonce)? else { return Ok(Err(MissReason::TakenBack)) };
        if reference.block >= shape.place.blocks || shape.block_bytes() != u64::from(found.len_bytes) {
            return Ok(Err(MissReason::BadLine));
        }
        let lent = reference.lent(Namespace(found.namespace), BlockKey(found.key));
        Ok(Ok(Followed { shape, reference, lent }))
    }

    /// Whether each of the blocks has been lent, as its reference says, up to now. Behind a copy: then its bytes are the block's.
    fn are_lent(&self, followed: &[(usize, Followed)]) -> Result<Vec<bool>> {
        let mut standings = vec![Line::ZERO; followed.len()];
        let offsets = followed.iter().map(|(_, of)| of.shape.place.standing(of.reference.block));
        self.lines().fetch_raw_many(offsets, &mut standings)?;
        let is_lent = |((_, of), line): (&(usize, Followed), &Line)| {
            let lines = self.lines();
            let found = match lines.open_in::<LentLine>(of.shape.place.seal(lines), of.reference.block.into(), line) {
                Ok(found) => Some(found),
                // Perhaps in the middle of being written.
                Err(_) => of.shape.standing(lines, of.reference.block)?,
            };
            Ok(found.is_some_and(|found| of.is_of(&found)))
        };
        followed.iter().zip(&standings).map(is_lent).collect()
    }
}

impl Followed {
    /// The list that takes the bytes from where they lie, for one that takes them from a cell at `offset`.
    fn list<'m>(&self, offset: u64, list: &ReadList<'m>) -> ReadList<'m> {
        list.moved(|at, len_bytes| self.shape.stretches(self.reference.block, at - offset, len_bytes))
    }

    /// The checksum of the whole block, if its lender summed it.
    fn checksum(&self) -> Option<u64> {
        (self.reference.has_checksum == 1).then_some(self.reference.checksum)
    }

    /// Whether a line says that the block is lent as the reference says.
    fn is_of(&self, found: &LentLine) -> bool {
        let (one, other) = (found, &self.lent);
        if mutant!("lent.generation_not_compared") {
            return (one.state, one.key, one.namespace) == (other.state, other.key, other.namespace);
        }
        if mutant!("lent.key_not_compared") {
            return one.state == other.state;
        }
        LentLine { crc: 0, ..*found } == self.lent
    }
}

/// What became of one copy.
fn verdict(outcome: Outcome, is_lent: bool, sum: Option<u64>) -> Result<Option<MissReason>> {
    match outcome {
        Err(Error::Poisoned { .. }) => Ok(Some(MissReason::Device)),
        Err(error) => Err(error),
        Ok(_) if !is_lent => Ok(Some(MissReason::TakenBack)),
        Ok(found) => Ok((sum.is_some() && found != sum).then_some(MissReason::Checksum)),
    }
}

const _: () = assert!(REFERENCE_BYTES as usize == size_of::<Line>());
