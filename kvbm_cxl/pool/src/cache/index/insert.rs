// SPDX-License-Identifier: Apache-2.0
//! The hints of a batch (CACHE.md section 4): as far as this host has the locks of their stripes, all their home lines are fetched after
//! one fence, and all hints written before one.
//!
//! Several locks are only held together where none of them is waited for, so that no order among them has to be kept, and a call that waits
//! for a host that is gone keeps no other out. The others are asked for together.

use crate::cache::Inner;
use crate::cache::index::{Home, Index, Inserted, has_empty, or_tombs};
use crate::cache::publish::Reserved;
use crate::cache::publish::reservation::Reservation;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::line::FETCHED_TOGETHER;
use crate::media::HintLine;
use arrayvec::ArrayVec;

/// Hints that are inserted together: enough for their misses to overlap, few enough that no call waits long for a lock.
const TOGETHER: usize = 32;

const _: () = assert!(TOGETHER < FETCHED_TOGETHER);

/// A reservation that is to be announced, with its place in the batch and where its key is looked for.
struct Draft<'a> {
    home: &'a Home,
    index: usize,
    begun: &'a Reservation,
}

/// A batch while its hints are inserted.
struct Batch<'a> {
    drafts: &'a [Draft<'a>],
    /// The work it is part of, until its cells say WRITING and it was seen not to be fenced.
    unannounced: Option<&'a Op<'a>>,
    /// Places of what cannot be, and why.
    refused: Vec<(usize, Reserved)>,
    /// Places of those whose stripe's lock is blocked by a damaged line: a block that went would make no room for them.
    blocked: Vec<usize>,
}

impl Index {
    /// Fetches home lines; together with this host's own fence words, if `op` is given, which fails if its incarnation is fenced.
    fn home_lines(&self, numbers: &[u64], op: Option<&Op<'_>>, mut each: impl FnMut(HintLine)) -> Result<()> {
        let each = |line: Option<&HintLine>| each(or_tombs(line.copied()));
        match op {
            Some(op) => self.fences.fetch_unfenced(numbers, op, each),
            None => self.fences.fetch_with_fences(numbers, std::iter::empty(), each).map(drop),
        }
    }
}

impl Inner {
    /// Publishes WRITING of the reservations among these answers and inserts their hints; `homes` has one of each answer. Returns the
    /// places of those that cannot be, with their answers. A stripe that a damaged line blocks costs a list the blocks of that stripe, and
    /// is the error of a single block.
    ///
    /// X is part of it: after WRITING is visible to all hosts, before the first byte of payload, `op` is seen not to be fenced, after the
    /// same full fence as the first hint lines. That fence is also the one after WRITING, so that both round trips to the memory overlap;
    /// locks are taken before, because their instructions would wait for the pending stores.
    pub(in crate::cache) fn announce(
        &self,
        answers: &[Reserved],
        homes: &[Home],
        op: &Op<'_>,
        is_list: bool,
    ) -> Result<Vec<(usize, Reserved)>> {
        let mut drafts = Vec::with_capacity(answers.len());
        drafts.extend(answers.iter().zip(homes).enumerate().filter_map(|(index, (answer, home))| match answer {
            Reserved::Cell(begun) => Some(Draft { home, index, begun }),
            _ => None,
        }));
        drafts.sort_by_key(|draft| draft.home.stripe);
        let mut batch = Batch { drafts: &drafts, unannounced: Some(op), refused: Vec::new(), blocked: Vec::new() };
        for part in drafts.chunks(TOGETHER) {
            let (mut guards, mut here, mut elsewhere) = (ArrayVec::<_, TOGETHER>::new(), ArrayVec::<_, TOGETHER>::new(), Vec::new());
            for of_stripe in part.chunk_by(|one, other| one.home.stripe == other.home.stripe) {
                match self.index.lock_stripe_if_here(of_stripe[0].home)? {
                    Some(guard) => {
                        guards.push(guard);
                        here.extend(of_stripe);
                    }
                    None => elsewhere.push(of_stripe),
                }
            }
            if !here.is_empty() {
                self.hint_locked(&mut batch, &here)?;
            }
            // Not moved, as a list of that many is: this is on the path of every publish.
            guards.clear();
            if elsewhere.is_empty() {
                continue;
            }
            let (mut left, mut is_blocked) = (vec![true; elsewhere.len()], true);
            let locked = self.index.lock_stripes(elsewhere.iter().map(|of_stripe| of_stripe[0].home), |place| {
                left[place] = false;
                let hinted = self.hint_locked(&mut batch, &elsewhere[place].iter().collect::<ArrayVec<_, TOGETHER>>());
                // What fails under a lock fails the batch.
                is_blocked = hinted.is_ok();
                hinted
            });
            match locked {
                // One of the stripes cannot be locked. Each of the others by itself, so that the damage costs that stripe alone.
                Err(Error::BadLine { .. }) if is_blocked && is_list => {
                    let left = elsewhere.into_iter().zip(left).filter(|(_, is_left)| *is_left);
                    left.map(|(of_stripe, _)| of_stripe).try_for_each(|of_stripe| self.hint_unless_damaged(&mut batch, of_stripe))?;
                }
                locked => locked?,
            }
        }
        let mut refused: Vec<_> = batch.blocked.into_iter().map(|index| (index, Reserved::NoHint)).collect();
        for (index, refusal) in batch.refused {
            let draft = drafts.iter().find(|draft| draft.index == index).filter(|_| matches!(refusal, Reserved::NoHint));
            let refusal = match draft {
                Some(Draft { home, begun, .. }) if self.has_made_room(home)? => match self.hint_again(home, begun) {
                    Err(Error::BadLine { .. }) => Some(refusal),
                    hinted => hinted?,
                },
                _ => Some(refusal),
            };
            refused.extend(refusal.map(|refusal| (index, refusal)));
        }
        Ok(refused)
    }

    /// Inserts the hints of one stripe; where its lock is blocked by a damaged line they are refused.
    fn hint_unless_damaged(&self, batch: &mut Batch<'_>, of_stripe: &[Draft<'_>]) -> Result<()> {
        let guard = match self.index.lock_stripe(of_stripe[0].home) {
            Ok(guard) => guard,
            Err(Error::BadLine { .. }) => {
                batch.blocked.extend(of_stripe.iter().map(|draft| draft.index));
                return Ok(());
            }
            Err(other) => return Err(other),
        };
        let hinted = self.hint_locked(batch, &of_stripe.iter().collect::<ArrayVec<_, TOGETHER>>());
        drop(guard);
        hinted
    }

    /// The hint of a reservation that found no place before, and for which a block has gone since.
    fn hint_again(&self, home: &Home, begun: &Reservation) -> Result<Option<Reserved>> {
        let guard = self.index.lock_stripe(home)?;
        let inserted = self.index.insert(home, begun.namespace(), begun.key(), begun.cell);
        drop(guard);
        inserted.map(refusal_of)
    }

    fn hint_locked(&self, batch: &mut Batch<'_>, drafts: &[&Draft<'_>]) -> Result<()> {
        let inserted = self.write_hints(batch, drafts);
        // Before the locks are given back, also when only some hints were written.
        self.lines().fence_published();
        inserted
    }

    fn write_hints(&self, batch: &mut Batch<'_>, drafts: &[&Draft<'_>]) -> Result<()> {
        let mut lines = ArrayVec::<HintLine, TOGETHER>::new();
        let unannounced = batch.unannounced.take();
        if unannounced.is_some() {
            for Draft { begun, .. } in batch.drafts {
                self.lines().write(begun.cell, begun.descriptor)?;
            }
            point!("cache.writing");
        }
        // Advice, of whatever becomes of these hints: early, so that its misses overlap with those of the lines.
        for Draft { home, begun, .. } in drafts {
            self.index.locations.put(home, begun.cell);
        }
        let unchecked = unannounced.filter(|_| !mutant!("cache.no_fence_check_before_payloads"));
        let numbers: ArrayVec<u64, TOGETHER> = drafts.iter().map(|draft| draft.home.first_line).collect();
        self.index.home_lines(&numbers, unchecked, |line| lines.push(line))?;
        let mut written = ArrayVec::<u64, TOGETHER>::new();
        for (Draft { home, index, begun }, line) in drafts.iter().zip(&lines) {
            let mut first = *line;
            let is_rewritten = written.contains(&home.first_line);
            if is_rewritten || !has_empty(&first) {
                // Lines of this window are fetched once more, with the stores to them.
                self.lines().fence_published();
            }
            if is_rewritten {
                first = self.index.home_line(home)?;
            }
            let inserted = self.index.write_hint(home, begun.namespace(), begun.key(), begun.cell, first)?;
            if let Inserted::Done { line } = inserted {
                written.push(line);
            }
            batch.refused.extend(refusal_of(inserted).map(|refusal| (*index, refusal)));
        }
        Ok(())
    }
}

fn refusal_of(inserted: Inserted) -> Option<Reserved> {
    match inserted {
        Inserted::Done { .. } => None,
        Inserted::Exists => Some(Reserved::Exists),
        Inserted::Busy => Some(Reserved::Busy),
        Inserted::Full => Some(Reserved::NoHint),
    }
}
