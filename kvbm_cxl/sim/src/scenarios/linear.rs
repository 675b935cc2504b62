// SPDX-License-Identifier: Apache-2.0
//! Whether the answers that hosts got can have happened in one order.
//!
//! Each thing has a state, each operation is about one thing. An operation that returned took effect once between its call and its return.
//! One of unknown outcome (its host was fenced, its process died) took effect at most once after its call, and not after it was *settled*:
//! things are written under one lock, whose holders do not interleave, so a holder that came later has seen or sealed it.

use crate::{Env, SimProcess};
use cxl_pool::media::{FenceLine, SLOTS_PER_FENCE};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// What an operation does to the thing that it is about.
pub trait Effect: Clone + Debug {
    /// The states that the thing may have afterwards; none where the operation cannot have had this outcome.
    fn after(&self, state: u64) -> Vec<u64>;
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It took effect under the lock, and was not fenced when it had.
    Confirmed,
    /// It was a read that took no lock.
    Seen,
    /// It may take effect until it is settled; the slot and incarnation under which it was fenced, if they are known.
    Unknown(Option<(u16, u32)>),
    /// It took no effect and tells nothing.
    Nothing,
}

#[derive(Clone, Debug)]
struct Operation<E> {
    thing: u64,
    effect: E,
    process: SimProcess,
    began: u64,
    ended: Option<u64>,
    outcome: Outcome,
    /// When the end of its process was noticed.
    died: Option<u64>,
    /// Incarnation up to which each slot was fenced when it began.
    fences: Vec<u32>,
}

/// Operations on the things that one lock protects.
#[derive(Debug)]
pub struct Operations<E> {
    all: Vec<Operation<E>>,
    now: u64,
}

impl<E> Default for Operations<E> {
    fn default() -> Self {
        Operations { all: Vec::new(), now: 0 }
    }
}

/// Incarnation up to which any seat fences each slot, in the memory itself.
fn fences(env: &Env) -> Vec<u32> {
    env.view(|view| {
        let geometry = *view.layout().geometry();
        let fenced = |slot: u64| {
            let line = |seat| view.peek::<FenceLine>(seat * geometry.fence_lines() + slot / SLOTS_PER_FENCE as u64);
            (0..geometry.all_seats()).map(|seat| line(seat).fenced[slot as usize % SLOTS_PER_FENCE]).max().unwrap_or(0)
        };
        (0..u64::from(geometry.slots)).map(fenced).collect()
    })
}

impl<E: Effect> Operations<E> {
    /// An operation is about to begin, whose effect is `effect` if it has one; the result names it.
    pub fn begin(&mut self, env: &Env, thing: u64, effect: E) -> usize {
        self.now += 1;
        for other in self.all.iter_mut().filter(|other| other.ended.is_none() && other.died.is_none()) {
            if !env.view(|view| view.is_alive(other.process)) {
                other.died = Some(self.now);
            }
        }
        self.all.push(Operation {
            thing,
            effect,
            process: env.process(),
            began: self.now,
            ended: None,
            outcome: Outcome::Unknown(None),
            died: None,
            fences: fences(env),
        });
        self.all.len() - 1
    }

    /// It returned, and did or saw `effect`.
    pub fn end(&mut self, operation: usize, effect: E, outcome: Outcome) {
        self.now += 1;
        let operation = &mut self.all[operation];
        (operation.effect, operation.outcome, operation.ended) = (effect, outcome, Some(self.now));
    }

    /// A read that began and ended with `operation` also saw `effect` of `thing`.
    pub fn also(&mut self, operation: usize, thing: u64, effect: E) {
        let also = Operation { thing, effect, ..self.all[operation].clone() };
        self.all.push(also);
    }

    /// Operations that are certain to have taken effect.
    pub fn confirmed(&self) -> usize {
        self.all.iter().filter(|operation| operation.outcome == Outcome::Confirmed).count()
    }

    /// Whether some order explains everything.
    ///
    /// # Errors
    /// The first operation that no order explains, and those on the same thing before it.
    pub fn check(&self) -> Result<(), String> {
        let things: BTreeSet<u64> = self.all.iter().map(|operation| operation.thing).collect();
        things.into_iter().try_for_each(|thing| Search::new(self, thing).run())
    }

    /// Whether `later` holds what `earlier` may still have done in its final form.
    fn settles(&self, later: &Operation<E>, earlier: &Operation<E>) -> bool {
        let Outcome::Unknown(fenced) = earlier.outcome else { return false };
        later.outcome == Outcome::Confirmed
            && earlier.began < later.began
            && (earlier.ended.or(earlier.died).is_some_and(|end| end <= later.began)
                || fenced.is_some_and(|(slot, incarnation)| later.fences[usize::from(slot)] >= incarnation))
    }
}

/// A state that a thing may have, with the open operations that may not take effect any more.
type Possible = (u64, BTreeSet<usize>);

/// The possible states of one thing, from event to event.
struct Search<'o, E> {
    operations: &'o Operations<E>,
    thing: u64,
    open: BTreeSet<usize>,
    possible: BTreeSet<Possible>,
}

impl<'o, E: Effect> Search<'o, E> {
    fn new(operations: &'o Operations<E>, thing: u64) -> Self {
        Search { operations, thing, open: BTreeSet::new(), possible: BTreeSet::from([(0, BTreeSet::new())]) }
    }

    fn run(mut self) -> Result<(), String> {
        // What ends at a moment counts after what begins there.
        let mut events: BTreeMap<(u64, bool), Vec<usize>> = BTreeMap::new();
        for (index, operation) in self.operations.all.iter().enumerate() {
            let is_known = matches!(operation.outcome, Outcome::Confirmed | Outcome::Seen);
            if operation.thing == self.thing && operation.outcome != Outcome::Nothing {
                events.entry((operation.began, false)).or_default().push(index);
            }
            if let Some(ended) = operation.ended.filter(|_| is_known) {
                events.entry((ended, true)).or_default().push(index);
            }
        }
        for ((_, is_end), indexes) in events {
            for index in indexes {
                match is_end {
                    false => _ = self.open.insert(index),
                    true if self.operations.all[index].thing == self.thing => self.end(index)?,
                    true => self.settle(index),
                }
            }
        }
        Ok(())
    }

    /// The open operations that are settled once `later` has taken effect.
    fn settled_by(&self, later: usize) -> Vec<usize> {
        let all = &self.operations.all;
        self.open.iter().copied().filter(|&earlier| self.operations.settles(&all[later], &all[earlier])).collect()
    }

    /// Every state that can come of the possible ones by open operations, each followed until it is `enough`.
    fn reach(&self, enough: impl Fn(&Possible) -> bool) -> BTreeSet<Possible> {
        let mut seen: BTreeSet<Possible> = self.possible.clone();
        let mut next: Vec<Possible> = seen.iter().cloned().collect();
        while let Some(possible) = next.pop() {
            if enough(&possible) {
                continue;
            }
            let (state, gone) = possible;
            for &index in self.open.difference(&gone) {
                let mut gone = gone.clone();
                gone.insert(index);
                gone.extend(self.settled_by(index));
                for state in self.operations.all[index].effect.after(state) {
                    if seen.insert((state, gone.clone())) {
                        next.push((state, gone.clone()));
                    }
                }
            }
        }
        seen
    }

    fn end(&mut self, index: usize) -> Result<(), String> {
        let mut reached = self.reach(|(_, gone)| gone.contains(&index));
        reached.retain(|(_, gone)| gone.contains(&index));
        if reached.is_empty() {
            return Err(self.describe(index));
        }
        self.possible = reached;
        self.close(Some(index));
        Ok(())
    }

    /// An operation on another thing ended: what it settles took effect by now or never will.
    fn settle(&mut self, later: usize) {
        let settled = self.settled_by(later);
        if settled.is_empty() {
            return;
        }
        let reached = self.reach(|_| false);
        self.possible =
            reached.into_iter().map(|(state, gone)| (state, gone.into_iter().chain(settled.iter().copied()).collect())).collect();
        self.close(None);
    }

    /// Forgets the operation that ended, and those of unknown outcome that cannot take effect any more whatever happened.
    fn close(&mut self, ended: Option<usize>) {
        let is_unknown = |index: &usize| matches!(self.operations.all[*index].outcome, Outcome::Unknown(_));
        let is_closed = |index: &usize| self.possible.iter().all(|(_, gone)| gone.contains(index));
        let closed = self.open.iter().copied().filter(|index| ended == Some(*index) || (is_unknown(index) && is_closed(index)));
        let closed: BTreeSet<usize> = closed.collect();
        self.open.retain(|index| !closed.contains(index));
        let possible = std::mem::take(&mut self.possible);
        self.possible = possible.into_iter().map(|(state, gone)| (state, gone.difference(&closed).copied().collect())).collect();
    }

    fn describe(&self, index: usize) -> String {
        let all = &self.operations.all;
        let operation = &all[index];
        let end = operation.ended.unwrap_or(u64::MAX);
        let before = all.iter().filter(|other| other.thing == self.thing && other.began <= end && other.outcome != Outcome::Nothing);
        let before: Vec<_> = before.collect();
        let shown = before[before.len().saturating_sub(12)..].iter().map(|other| {
            let Operation { effect, process, began, ended, outcome, .. } = other;
            format!("\n  {began}..{}: {process:?} {effect:?} {outcome:?}", ended.map_or("".into(), |end| end.to_string()))
        });
        let states: BTreeSet<u64> = self.possible.iter().map(|possible| possible.0).collect();
        format!(
            "no order explains {:?} of thing {} ({states:?} possible before):{}",
            operation.effect,
            self.thing,
            shown.collect::<String>()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a value, or reads it.
    #[derive(Clone, Debug)]
    enum Cell {
        Write(u64),
        Read(u64),
    }

    impl Effect for Cell {
        fn after(&self, state: u64) -> Vec<u64> {
            match *self {
                Cell::Write(value) => vec![value],
                Cell::Read(value) => (value == state).then_some(state).into_iter().collect(),
            }
        }
    }

    /// (thing, effect, began, ended, outcome)
    fn check(operations: &[(u64, Cell, u64, u64, Outcome)]) -> Result<(), String> {
        let all = operations.iter().map(|(thing, effect, began, ended, outcome)| Operation {
            thing: *thing,
            effect: effect.clone(),
            process: SimProcess(0),
            began: *began,
            ended: Some(*ended),
            outcome: *outcome,
            died: None,
            fences: vec![if *began >= 20 { 1 } else { 0 }],
        });
        Operations { all: all.collect(), now: 0 }.check()
    }

    use Cell::{Read, Write};
    use Outcome::{Confirmed, Seen, Unknown};

    #[test]
    fn a_read_shows_what_was_written_before_or_meanwhile() {
        assert!(check(&[(0, Write(1), 1, 2, Confirmed), (0, Read(1), 3, 4, Seen)]).is_ok());
        assert!(check(&[(0, Write(1), 1, 2, Confirmed), (0, Read(0), 3, 4, Seen)]).is_err());
        for seen in [0, 1] {
            assert!(check(&[(0, Write(1), 1, 4, Confirmed), (0, Read(seen), 2, 3, Seen)]).is_ok());
        }
        assert!(check(&[(0, Write(1), 1, 8, Confirmed), (0, Read(1), 2, 3, Seen), (0, Read(0), 4, 5, Seen)]).is_err());
        assert!(check(&[(0, Write(1), 1, 2, Confirmed), (1, Read(1), 3, 4, Seen)]).is_err());
    }

    #[test]
    fn an_unknown_write_takes_effect_once_or_never() {
        let unknown = (0, Write(1), 1, 2, Unknown(None));
        for seen in [0, 1] {
            assert!(check(&[unknown.clone(), (0, Read(seen), 3, 4, Seen)]).is_ok());
        }
        assert!(check(&[unknown.clone(), (0, Read(0), 3, 4, Seen), (0, Read(1), 5, 6, Seen)]).is_ok());
        assert!(check(&[unknown, (0, Read(1), 3, 4, Seen), (0, Read(0), 5, 6, Seen)]).is_err());
    }

    #[test]
    fn a_later_holder_settles_an_unknown_write() {
        let unknown = (0, Write(1), 1, 2, Unknown(None));
        for thing in [0, 1] {
            let read = (thing, Read(0), 3, 4, Confirmed);
            assert!(check(&[unknown.clone(), read.clone(), (0, Read(1), 5, 6, Seen)]).is_err() == (thing == 0));
            let late = [unknown.clone(), read, (0, Read(0), 5, 6, Seen), (0, Read(1), 7, 8, Seen)];
            assert!(check(&late).is_err());
        }
    }

    #[test]
    fn a_holder_after_the_fence_settles_a_zombie_that_still_runs() {
        for (began, is_settled) in [(10, false), (20, true)] {
            let zombie = (0, Write(1), 1, 50, Unknown(Some((0, 1))));
            let holder = (0, Read(0), began, began + 1, Confirmed);
            assert_eq!(check(&[zombie, holder, (0, Read(1), 60, 61, Seen)]).is_err(), is_settled);
        }
    }
}
