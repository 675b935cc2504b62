// SPDX-License-Identifier: Apache-2.0
//! The hints of a batch (CACHE.md section 4): as far as this host has the locks of their stripes, all their home lines are fetched behind
//! one fence, and all hints written in front of one.
//!
//! Several locks are only held together where none of them is waited for, so that no order among them has to be kept, and whoever waits
//! for a host that is gone keeps nobody else out. The others are asked for together.

use super::Inner;
use super::index::{Home, Inserted, has_empty, or_tombs};
use super::publish::Reserved;
use super::reservation::Reservation;
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::limits::MAX_SEATS;
use crate::line::FETCHED_TOGETHER;
use crate::media::HintLine;
use arrayvec::ArrayVec;

/// Hints that are inserted together: enough for their misses to overlap, few enough that nobody waits long for a lock.
const TOGETHER: usize = 32;

const _: () = assert!(TOGETHER + MAX_SEATS <= FETCHED_TOGETHER);

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
}

impl Inner {
    /// Publishes WRITING of the reservations among these answers and inserts their hints; `homes` has one of each answer. Returns the
    /// places of those that cannot be, with their answers.
    ///
    /// X is part of it: after WRITING is there for everybody, before the first byte of payload, `op` is seen not to be fenced, behind the
    /// same full fence as the first hint lines. That fence is also the one behind WRITING, so that both ways to the memory overlap; locks
    /// are taken before, because their instructions would wait for what is written.
    pub(super) fn announce(&self, answers: &[Reserved], homes: &[Home], op: &Op<'_>) -> Result<Vec<(usize, Reserved)>> {
        let mut drafts = Vec::with_capacity(answers.len());
        drafts.extend(answers.iter().zip(homes).enumerate().filter_map(|(index, (answer, home))| match answer {
            Reserved::Cell(begun) => Some(Draft { home, index, begun }),
            _ => None,
        }));
        drafts.sort_by_key(|draft| draft.home.stripe);
        let mut batch = Batch { drafts: &drafts, unannounced: Some(op), refused: Vec::new() };
        for part in drafts.chunks(TOGETHER) {
            let (mut guards, mut here, mut elsewhere) = (ArrayVec::<_, TOGETHER>::new(), ArrayVec::<_, TOGETHER>::new(), Vec::new());
            for of_stripe in part.chunk_by(|one, other| one.home.stripe == other.home.stripe) {
                match self.lock_stripe_if_here(of_stripe[0].home)? {
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
            self.lock_stripes(elsewhere.iter().map(|of_stripe| of_stripe[0].home), |place| {
                self.hint_locked(&mut batch, &elsewhere[place].iter().collect::<ArrayVec<_, TOGETHER>>())
            })?;
        }
        Ok(batch.refused)
    }

    /// As [`Inner::announce`] for one block; `None`, or why it cannot be.
    pub(super) fn announce_one(&self, home: &Home, begun: &Reservation, op: &Op<'_>) -> Result<Option<Reserved>> {
        let guard = match self.lock_stripe_if_here(home)? {
            Some(guard) => Some(guard),
            None => self.lock_stripe(home)?,
        };
        let inserted = self.hint_one(home, begun, op);
        // Before the lock is given back, also when no hint was written.
        self.lines().fence_published();
        drop(guard);
        inserted
    }

    fn hint_one(&self, home: &Home, begun: &Reservation, op: &Op<'_>) -> Result<Option<Reserved>> {
        self.lines().write(begun.cell, begun.descriptor)?;
        after_writing();
        self.guesses.put(home, begun.cell);
        let mut first = None;
        let unchecked = Some(op).filter(|_| !mutant!("cache.no_fence_check_before_payload"));
        self.home_lines(&[home.first_line], unchecked, |line| first = Some(line))?;
        let Some(first) = first else { return Ok(Some(Reserved::NoHint)) };
        self.write_hint(home, begun.namespace(), begun.key(), begun.cell, first).map(refusal_of)
    }

    /// Inserts hints whose stripes' locks the caller holds.
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
            after_writing();
        }
        // Advice, of whatever becomes of these hints: early, so that its misses overlap with those of the lines.
        for Draft { home, begun, .. } in drafts {
            self.guesses.put(home, begun.cell);
        }
        let unchecked = unannounced.filter(|_| !mutant!("cache.no_fence_check_before_payloads"));
        let numbers: ArrayVec<u64, TOGETHER> = drafts.iter().map(|draft| draft.home.first_line).collect();
        self.home_lines(&numbers, unchecked, |line| lines.push(line))?;
        let mut written = ArrayVec::<u64, TOGETHER>::new();
        for (Draft { home, index, begun }, line) in drafts.iter().zip(&lines) {
            let mut first = *line;
            let is_rewritten = written.contains(&home.first_line);
            if is_rewritten || !has_empty(&first) {
                // Lines of this window are fetched once more: with what was written to them.
                self.lines().fence_published();
            }
            if is_rewritten {
                first = self.home_line(home)?;
            }
            let inserted = self.write_hint(home, begun.namespace(), begun.key(), begun.cell, first)?;
            if let Inserted::Done { line } = inserted {
                written.push(line);
            }
            batch.refused.extend(refusal_of(inserted).map(|refusal| (*index, refusal)));
        }
        Ok(())
    }

    /// Fetches home lines; together with this host's own fence words, if `op` is given, which fails if its incarnation is fenced.
    fn home_lines(&self, numbers: &[u64], op: Option<&Op<'_>>, mut each: impl FnMut(HintLine)) -> Result<()> {
        let each = |line: Option<&HintLine>| each(or_tombs(line.copied()));
        match op {
            Some(op) => self.fetch_unfenced(numbers, op, each),
            None => self.fetch_with_fences(numbers, std::iter::empty(), each).map(drop),
        }
    }
}

/// Where WRITING is on its way, and the fence check ahead.
fn after_writing() {
    point!("cache.writing");
}

/// The answer to the wish for a block whose hint was not written.
fn refusal_of(inserted: Inserted) -> Option<Reserved> {
    match inserted {
        Inserted::Done { .. } => None,
        Inserted::Exists => Some(Reserved::Exists),
        Inserted::Busy => Some(Reserved::Busy),
        Inserted::Full => Some(Reserved::NoHint),
    }
}
