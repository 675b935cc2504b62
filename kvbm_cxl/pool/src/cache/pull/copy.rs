// SPDX-License-Identifier: Apache-2.0
//! Copies of blocks: into reserved cells, and out of pinned ones with the look that verifies them (CACHE.md section 5, steps 3 to 6).

use crate::cache::pull::fences::{FenceView, is_void};
use crate::cache::{Few, Pinned};
use crate::copy::{Checksum, CopyEngine, Outcome, ReadList, WriteList};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::media::Descriptor;
use crate::metrics::MissReason;
use std::sync::Arc;

pub(in crate::cache) struct Copier {
    pub host: Host,
    pub fences: FenceView,
    pub engine: Arc<dyn CopyEngine>,
    pub checksums: bool,
}

impl Copier {
    /// Steps 4 and 5 for several blocks: each descriptor as it was, each owner not fenced.
    pub fn verify_unchanged(&self, blocks: &[&Pinned]) -> Result<Few<Option<MissReason>>> {
        let cells: Few<u64> = blocks.iter().map(|block| block.cell).collect();
        point!("cache.copied");
        let (found, fences) = self.fences.descriptors_and_fences(&cells, blocks.iter().map(|block| block.descriptor.owner))?;
        point!("cache.fetched_again");
        let void = |block: &Pinned| is_void(fences.of(block.descriptor.owner, block.descriptor.incarnation));
        Ok(blocks.iter().zip(found).map(|(block, found)| verdict(block, found, void(block))).collect())
    }

    /// Steps 3 to 6 for several blocks: copies each as its list says, and looks whether it was itself all the while; `None`, or why it is
    /// a miss. A checksum is looked at where the list takes the whole block.
    pub fn copy_each(&self, blocks: &[&Pinned], lists: &mut [ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        blocks.iter().zip(lists.iter()).try_for_each(|(block, list)| is_inside(block, list))?;
        let checked: Few<bool> = blocks.iter().zip(lists.iter()).map(|(block, list)| self.is_checked(block, list)).collect();
        point!("cache.copying");
        let outcomes = self.pull_lists(lists, &checked);
        let verdicts = self.verify_unchanged(blocks)?;
        let answers = blocks.iter().zip(checked).zip(outcomes).zip(verdicts);
        answers.map(|(((block, checked), outcome), verdict)| answer(block, checked, outcome, verdict)).collect()
    }

    /// Whether the checksum of a block can be looked at while it is copied as `list` says.
    pub fn is_checked(&self, block: &Pinned, list: &ReadList<'_>) -> bool {
        let whole = list.len_bytes() == block.len_bytes() && list.is_one_stretch();
        whole && block.descriptor.kind == Descriptor::XXH3 && self.checksums
    }

    /// Copies lists, those with a checksum apart from those without: a call of the engine is of one kind.
    pub fn pull_lists(&self, lists: &mut [ReadList<'_>], checked: &[bool]) -> Few<Outcome> {
        let memory = &**self.host.lines().memory();
        let count = checked.iter().filter(|checked| **checked).count();
        if count == 0 || count == checked.len() {
            return self.engine.pull_each(memory, lists, kind_of(count > 0)).into();
        }
        let mut outcomes: Few<Outcome> = checked.iter().map(|_| Ok(None)).collect();
        for kind in [true, false] {
            let taken = lists.iter_mut().zip(checked).filter(|(_, checked)| **checked == kind).map(|(list, _)| std::mem::take(list));
            let mut taken: Vec<ReadList<'_>> = taken.collect();
            let places = checked.iter().enumerate().filter(|(_, checked)| **checked == kind).map(|(place, _)| place);
            let pulled = self.engine.pull_each(memory, &mut taken, kind_of(kind));
            places.zip(pulled).for_each(|(place, outcome)| outcomes[place] = outcome);
        }
        outcomes
    }

    /// Writes one block as its list says.
    pub fn publish(&self, list: &WriteList<'_>, checksum: Checksum) -> Outcome {
        self.engine.publish(&**self.host.lines().memory(), list, checksum)
    }

    /// Writes several blocks, each as its list says.
    pub fn publish_each(&self, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        self.engine.publish_each(&**self.host.lines().memory(), lists, checksum)
    }

    /// The checksum that is computed of the payload of blocks that are filled in one go.
    pub fn payload_checksum(&self) -> Checksum {
        if self.checksums { Checksum::Xxh3 } else { Checksum::Off }
    }
}

/// Refuses a list with parts outside of the block.
fn is_inside(block: &Pinned, list: &ReadList<'_>) -> Result<()> {
    match list.outside(block.offset, block.len_bytes()) {
        None => Ok(()),
        Some((offset, len_bytes)) => {
            Err(Error::OutOfRange { what: "part of a pinned block", offset, len_bytes, limit_bytes: block.len_bytes() })
        }
    }
}

fn kind_of(checked: bool) -> Checksum {
    if checked { Checksum::Xxh3 } else { Checksum::Off }
}

/// What the second look at a block says: its descriptor as it was, its owner not fenced.
fn verdict(block: &Pinned, found: Option<Descriptor>, void: bool) -> Option<MissReason> {
    if found.is_none_or(|found| !is_same(&found, &block.descriptor)) && !mutant!("cache.no_refetch") {
        Some(MissReason::Changed)
    } else if void && !mutant!("cache.no_void_check_after_copy") {
        Some(MissReason::FencedDuring)
    } else {
        None
    }
}

pub fn answer(block: &Pinned, checked: bool, outcome: Outcome, verdict: Option<MissReason>) -> Result<Option<MissReason>> {
    match outcome {
        Err(Error::Poisoned { .. }) => Ok(Some(MissReason::Device)),
        Err(error) => Err(error),
        Ok(found) => Ok(verdict.or((checked && found != Some(block.descriptor.checksum)).then_some(MissReason::Checksum))),
    }
}

/// Every byte alike: key, length and the stamp. An owner that looks for pins of the block says EVICTING meanwhile, and
/// touches the payload only under another stamp.
fn is_same(found: &Descriptor, before: &Descriptor) -> bool {
    let found = match found.state {
        Descriptor::EVICTING => Descriptor { state: before.state, crc: before.crc, ..*found },
        _ => *found,
    };
    if mutant!("cache.stamp_not_compared") {
        return (found.state, found.key, found.namespace) == (before.state, before.key, before.namespace);
    }
    found == *before
}
