// SPDX-License-Identifier: Apache-2.0
//! Lists of blocks as a storage tier asks for them: has, put and get, with one answer for each block, in the order of the list.
//!
//! A tier's caller believes four things. `Done` of a put means that every host can get the block; `Exists`, that it was there after this
//! put had stored the rest of its turn; `Done` of a get, that the bytes were copied and verified; and after a call was dropped, no byte of
//! the caller's memory is read or written any more.
//!
//! The last one is what turns are for. Futures of such callers own nothing of the memory that they name. If one is dropped while a thread
//! copies, that thread would write to memory that is another block's by then, or publish its bytes under a key that is not theirs. So a
//! call works in turns of a bounded number of blocks. Dropping it waits for the turn that runs, and no other begins.

use super::{BlockKey, Cache, Namespace, PublishRequest, Pulled, Reservation, Reserved};
use crate::background::held;
use crate::copy::{LocalPlace, LocalRange};
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::metrics::{MissReason, RefusalReason};
use crate::platform::Platform;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

/// Blocks in a turn: their misses overlap, and a caller that drops the call waits for no more.
const BLOCKS_PER_TURN: usize = 64;

/// A block of a list that is to be put or got.
#[derive(Clone, Debug)]
pub struct TierBlock {
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before it in its chain, if that is known.
    pub parent: Option<BlockKey>,
    /// Where its bytes lie, or go to; together as long as a block of the tier.
    pub pieces: Vec<LocalRange>,
}

/// What became of a block of a list.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Has: it is there for every rank. Put: every host can get it. Get: copied and verified.
    Done,
    /// Put: it was there already, as long as the blocks of this tier.
    Exists,
    /// Has: a rank lacks it.
    Absent,
    /// The block in the pool has another length.
    Length,
    /// Put: it got no cell.
    Refused(RefusalReason),
    /// Get: it is unavailable.
    Missed(MissReason),
    /// Get: another block of the list goes to the same memory.
    Twice,
    /// The pool failed, for all blocks of the turn that had no answer yet.
    Failed(Arc<Error>),
    /// The call was dropped before it came to this block.
    Dropped,
}

/// The blocks of one worker in the pool. All of them have the same length.
#[derive(Clone)]
pub struct TierBlocks {
    cache: Cache,
    ranks: Vec<Namespace>,
    own: Namespace,
    len_bytes: u64,
    blocks_per_turn: usize,
}

impl TierBlocks {
    /// Blocks of `len_bytes` in namespace `own`. A block is there if it is in every one of `ranks`.
    pub fn new(cache: &Cache, ranks: Vec<Namespace>, own: Namespace, len_bytes: u64) -> TierBlocks {
        TierBlocks { cache: cache.clone(), ranks, own, len_bytes, blocks_per_turn: BLOCKS_PER_TURN }
    }

    /// The same in turns of so many blocks.
    pub fn in_turns_of(self, blocks: usize) -> TierBlocks {
        TierBlocks { blocks_per_turn: blocks.max(1), ..self }
    }

    /// Their cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// A call that has not begun.
    pub fn call(&self) -> Call {
        Call { turns: Arc::new(Turns { state: Mutex::default(), platform: self.cache.host().platform().clone() }) }
    }

    /// Whether each block is there for every rank. Advice: it may go right afterwards.
    pub fn has(&self, keys: &[BlockKey]) -> Vec<Answer> {
        let mut answers = vec![Answer::Done; keys.len()];
        let asks_all = !mutant!("tier.own_rank_is_all");
        for &namespace in self.ranks.iter().filter(|&&namespace| asks_all || namespace == self.own) {
            // Blocks that one rank lacks are not asked of the others.
            let asked: Vec<usize> = (0..keys.len()).filter(|&place| matches!(answers[place], Answer::Done)).collect();
            let names: Vec<BlockKey> = asked.iter().map(|&place| keys[place]).collect();
            match self.cache.lookup_all(namespace, &names) {
                Ok(found) => {
                    for (place, found) in asked.into_iter().zip(found) {
                        answers[place] = match found {
                            None => Answer::Absent,
                            Some(block) if self.is_of_length(block.len_bytes) => Answer::Done,
                            Some(_) => Answer::Length,
                        };
                    }
                }
                Err(error) => {
                    let failed = Answer::Failed(Arc::new(error));
                    asked.into_iter().for_each(|place| answers[place] = failed.clone());
                }
            }
        }
        answers
    }

    /// A block of another length has the key of a block of this tier, and none of its bytes.
    fn is_of_length(&self, len_bytes: u64) -> bool {
        len_bytes == self.len_bytes || mutant!("tier.any_length")
    }

    /// Stores blocks.
    ///
    /// # Safety
    /// Until this returns, or the call of `turns` has been dropped, each range may be read, no other thread writes to it, and it is no
    /// memory of the pool.
    pub unsafe fn put(&self, blocks: &[TierBlock], turns: &Turns) -> Vec<Answer> {
        let mut answers = vec![Answer::Dropped; blocks.len()];
        for (blocks, answers) in blocks.chunks(self.blocks_per_turn).zip(answers.chunks_mut(self.blocks_per_turn)) {
            let Some(_turn) = turns.take() else { break };
            // SAFETY: dropping the call waits for this turn; else as this function demands.
            if let Err(error) = unsafe { self.put_in_turn(blocks, answers) } {
                let failed = Answer::Failed(Arc::new(error));
                answers.iter_mut().filter(|answer| matches!(answer, Answer::Dropped)).for_each(|answer| *answer = failed.clone());
            }
        }
        answers
    }

    /// The blocks of one turn; an error is that of the blocks without an answer.
    ///
    /// # Safety
    /// As [`TierBlocks::put`].
    unsafe fn put_in_turn(&self, blocks: &[TierBlock], answers: &mut [Answer]) -> Result<()> {
        let request =
            |block: &TierBlock| PublishRequest { namespace: self.own, key: block.key, parent: block.parent, len_bytes: self.len_bytes };
        let requests: Vec<PublishRequest> = blocks.iter().map(request).collect();
        let (mut cells, mut filled, mut there) = (Vec::new(), Vec::new(), Vec::new());
        for (place, reserved) in self.cache.reserve_all(&requests)?.into_iter().enumerate() {
            match reserved {
                Reserved::Cell(cell) => {
                    cells.push(cell);
                    filled.push(place);
                }
                Reserved::Exists => there.push(place),
                Reserved::Busy => answers[place] = Answer::Refused(RefusalReason::Busy),
                Reserved::NoCell => answers[place] = Answer::Refused(RefusalReason::PoolFull),
                Reserved::NoHint => answers[place] = Answer::Refused(RefusalReason::TableFull),
                Reserved::OverQuota => answers[place] = Answer::Refused(RefusalReason::Quota),
            }
        }
        // SAFETY: as this function demands; the ranges lie in memory of the host.
        unsafe { Reservation::fill_all_raw(&mut cells, LocalPlace::Host, |index| blocks[filled[index]].pieces.iter().copied()) }?;
        if mutant!("tier.told_before_commit") {
            filled.iter().for_each(|&place| answers[place] = Answer::Done);
        }
        self.cache.commit_all(cells)?;
        filled.into_iter().for_each(|place| answers[place] = Answer::Done);
        // A key that is there may only be reserved, by a process that gives it up or dies before it commits, or be gone by now.
        let names: Vec<BlockKey> = there.iter().map(|&place| blocks[place].key).collect();
        for (place, found) in there.into_iter().zip(self.cache.lookup_all(self.own, &names)?) {
            answers[place] = match found {
                Some(found) if self.is_of_length(found.len_bytes) => Answer::Exists,
                Some(_) => Answer::Length,
                None if mutant!("tier.reserved_is_there") => Answer::Exists,
                None => Answer::Refused(RefusalReason::Busy),
            };
        }
        Ok(())
    }

    /// Copies blocks. What the memory of a block holds whose answer is not [`Answer::Done`] is not defined.
    ///
    /// # Safety
    /// Until this returns, or the call of `turns` has been dropped, each range may be written, no other thread uses it, and it is no memory
    /// of the pool.
    pub unsafe fn get(&self, blocks: &[TierBlock], turns: &Turns) -> Vec<Answer> {
        let mut answers = vec![Answer::Dropped; blocks.len()];
        // Two blocks in one place would be neither.
        let mut destinations = HashSet::new();
        let is_first = |block: &TierBlock| block.pieces.first().is_none_or(|piece| destinations.insert(piece.address));
        let firsts: Vec<bool> = blocks.iter().map(is_first).collect();
        let (places, again): (Vec<usize>, Vec<usize>) =
            (0..blocks.len()).partition(|&place| firsts[place] || mutant!("tier.same_memory_twice"));
        again.into_iter().for_each(|place| answers[place] = Answer::Twice);
        for group in places.chunks(self.blocks_per_turn) {
            let Some(_turn) = turns.take() else { break };
            let names: Vec<BlockKey> = group.iter().map(|&place| blocks[place].key).collect();
            let pieces = |index: usize, _| blocks[group[index]].pieces.iter().copied();
            // SAFETY: dropping the call waits for this turn; each range is in the list once; else as this function demands.
            match unsafe { self.cache.pull_all_raw(self.own, &names, LocalPlace::Host, pieces) } {
                Ok(pulled) => group.iter().zip(pulled).for_each(|(&place, pulled)| answers[place] = got(pulled)),
                Err(error) => {
                    let failed = Answer::Failed(Arc::new(error));
                    group.iter().for_each(|&place| answers[place] = failed.clone());
                }
            }
        }
        answers
    }
}

fn got(pulled: Pulled) -> Answer {
    match pulled {
        Pulled::Hit { .. } => Answer::Done,
        Pulled::Miss(_) if mutant!("tier.miss_is_got") => Answer::Done,
        Pulled::Miss(reason) => Answer::Missed(reason),
    }
}

#[derive(Default)]
struct CallState {
    is_dropped: bool,
    is_running: bool,
}

/// The turns of one call, for the thread that does its work.
pub struct Turns {
    state: Mutex<CallState>,
    platform: Arc<dyn Platform>,
}

impl Turns {
    /// The next turn, as long as the caller waits for the call.
    fn take(&self) -> Option<Turn<'_>> {
        let mut state = held(&self.state);
        if state.is_dropped && !mutant!("tier.turn_after_drop") {
            return None;
        }
        state.is_running = true;
        Some(Turn(self))
    }
}

struct Turn<'t>(&'t Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        held(&self.0.state).is_running = false;
    }
}

/// The caller's end of a call. Once it is dropped, its memory is the caller's alone.
pub struct Call {
    turns: Arc<Turns>,
}

impl Call {
    /// The other end, for one [`TierBlocks::put`] or [`TierBlocks::get`].
    pub fn turns(&self) -> Arc<Turns> {
        self.turns.clone()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        held(&self.turns.state).is_dropped = true;
        let mut round = 0;
        while held(&self.turns.state).is_running && !mutant!("tier.drop_does_not_wait") {
            self.turns.platform.relax(round);
            round = round.saturating_add(1);
        }
    }
}
