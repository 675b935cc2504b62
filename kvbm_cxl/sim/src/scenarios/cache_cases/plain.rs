// SPDX-License-Identifier: Apache-2.0
//! Counter-examples without any fault (CACHE.md C4, C7, C9, C10, C16, C17, C18, C19): two hosts in the wrong moment are enough.

use super::super::cache_ledger::Name;
use super::super::cache_stage::{Actor, Hold, Shape, Stage, WARDEN, Watch};
use super::{A, K, L, M, R, Z};
use crate::{Failure, Stats};
use cxl_pool::Result;
use std::cell::Cell;
use std::rc::Rc;

/// The publisher.
const OWNER: usize = Z;
/// A reader, on a host of its own.
const READER: usize = A;
/// Another one, on the same host where two processes matter.
const OTHER: usize = R;
/// Blocks of which some share a line of the hint table, whose stripe has eight.
const CROWD: u16 = 10;

/// C4: a reader pins while the owner is between its look at the pins and its word that the block goes.
pub(super) fn pinned_behind_an_early_look(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.stop_at("cache.evict");
        me.evict(K)?;
        me.say("K was to go");
        Ok(())
    });
    stage.role(READER, |me| {
        me.hear("the owner waits")?;
        let pin = me.pin(K)?;
        me.expect(pin.is_some(), "K can be pinned")?;
        me.say("K is pinned");
        me.hear("K was to go")?;
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| {
        me.await_stop(OWNER)?;
        me.say("the owner waits");
        me.hear("K is pinned")?;
        me.let_go(OWNER);
        Ok(())
    });
    stage.run()
}

/// C17: the block goes between a reader's look at it and the reader's pin.
pub(super) fn gone_before_the_pin(seed: u64) -> std::result::Result<Stats, Failure> {
    gone_before_a_pin(seed, |me| me.pin(K))
}

/// C17 with the call for several blocks, which takes another way.
pub(super) fn gone_before_the_pins(seed: u64) -> std::result::Result<Stats, Failure> {
    gone_before_a_pin(seed, |me| me.pin_in_chain(K))
}

fn gone_before_a_pin(seed: u64, pin: fn(&Actor) -> Result<Option<Hold<'_>>>) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("the reader waits")?;
        me.expect(me.evict(K)?, "K is not pinned")?;
        me.publish(L)?;
        me.say("L is there");
        Ok(())
    });
    stage.role(READER, move |me| {
        me.hear("K is there")?;
        me.stop_at("cache.pin");
        let pin = pin(me)?;
        me.expect(pin.is_none(), "K is gone")
    });
    stage.role(WARDEN, |me| {
        me.await_stop(READER)?;
        me.say("the reader waits");
        me.hear("L is there")?;
        me.let_go(READER);
        Ok(())
    });
    stage.run()
}

/// C16: a block is pinned whose line of pins is published already, for a neighbour.
pub(super) fn pinned_beside_another(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 2, ..Shape::of(3) });
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.publish(L)?;
        me.say("both are there");
        me.hear("both are pinned")?;
        me.evict(K)?;
        me.say("K was to go");
        Ok(())
    });
    stage.role(READER, |me| {
        me.hear("both are there")?;
        let pins = [me.pin(L)?, me.pin(K)?];
        me.expect(pins.iter().all(Option::is_some), "both can be pinned")?;
        me.say("both are pinned");
        me.hear("K was to go")?;
        pins.into_iter().flatten().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| me.hear("K was to go"));
    stage.run()
}

/// C16: two processes of one host have pinned a block, and one gives its pin back.
pub(super) fn pinned_by_two_processes(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("one pin is left")?;
        me.expect(!me.evict(K)?, "K is pinned")?;
        me.say("K was to go");
        Ok(())
    });
    stage.role_on(READER, READER, |me| {
        me.hear("K is there")?;
        let pin = me.pin(K)?;
        me.say("the first pin is there");
        me.hear("K was to go")?;
        pin.into_iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role_on(OTHER, READER, |me| {
        me.hear("the first pin is there")?;
        me.pin(K)?.into_iter().for_each(|pin| pin.release());
        me.say("one pin is left");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("K was to go"));
    stage.run()
}

/// Pins of one process in the last of these scenes: more than four bits count.
const PINS: usize = 17;

/// C16: one process has pinned a block many times, and gives all pins back but one.
pub(super) fn pinned_many_times(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("one pin is left")?;
        me.expect(!me.evict(K)?, "K is pinned")?;
        me.say("K was to go");
        Ok(())
    });
    stage.role(READER, |me| {
        me.hear("K is there")?;
        let mut pins = (0..PINS).filter_map(|_| me.pin(K).transpose()).collect::<Result<Vec<_>>>()?;
        me.expect(pins.len() == PINS, "K can be pinned again and again")?;
        pins.drain(1..).for_each(|pin| pin.release());
        me.say("one pin is left");
        me.hear("K was to go")?;
        pins.iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role(WARDEN, |me| me.hear("K was to go"));
    stage.run()
}

/// C16: a process dies in the middle of a pin, while a process of the same host has `before` pins; it takes the dead process's pins out
/// of the counts, or gives all its own back but one, or takes its first one then.
fn pinned_beside_a_death(seed: u64, before: usize, reaps: bool) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape::of(3));
    let dying = Rc::new(Cell::new(None));
    let died = Rc::clone(&dying);
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("one pin is left")?;
        me.expect(!me.evict(K)?, "K is pinned")?;
        me.say("K was to go");
        Ok(())
    });
    stage.role_on(READER, READER, move |me| {
        me.hear("K is there")?;
        // The host's line is published under this incarnation, whatever comes.
        me.pin(K)?.into_iter().for_each(|pin| pin.release());
        let mut pins = (0..before).filter_map(|_| me.pin(K).transpose()).collect::<Result<Vec<_>>>()?;
        me.say("the reader has its pins");
        me.hear("the other one is dead")?;
        if reaps {
            me.upkeep(2)?;
        } else if before > 1 {
            pins.drain(1..).for_each(|pin| pin.release());
        } else {
            pins.extend(me.pin(K)?);
        }
        me.say("one pin is left");
        me.hear("K was to go")?;
        pins.iter().try_for_each(|pin| pin.read().map(drop))
    });
    stage.role_on(OTHER, READER, move |me| {
        dying.set(Some(me.env.process()));
        me.hear("the reader has its pins")?;
        me.die_at("cache.pin_counted");
        me.pin(K)?.into_iter().for_each(|pin| pin.release());
        Ok(())
    });
    stage.role(WARDEN, move |me| {
        me.hear("the reader has its pins")?;
        while died.get().is_none() {
            me.env.platform().sleep_ns(100_000);
        }
        died.get().map_or(Ok(()), |process| me.await_death(process))?;
        me.say("the other one is dead");
        me.hear("K was to go")
    });
    stage.run()
}

/// C16: recreated counts hold all pins of a process that lives.
pub(super) fn pinned_thrice_beside_a_death(seed: u64) -> std::result::Result<Stats, Failure> {
    pinned_beside_a_death(seed, 3, false)
}

/// C16: a pin on recreated counts is published, whatever the dead process had published.
pub(super) fn pinned_after_a_death(seed: u64) -> std::result::Result<Stats, Failure> {
    pinned_beside_a_death(seed, 0, false)
}

/// C16: who takes a dead process's pins out of the counts leaves those of the living.
pub(super) fn pinned_through_a_reaping(seed: u64) -> std::result::Result<Stats, Failure> {
    pinned_beside_a_death(seed, 1, true)
}

/// C7, C18, C19: one cell holds one block after the other, and a reader pulls each as soon as it is there, and the one before.
pub(super) fn one_cell_for_all(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch::PULLS, ..Shape::of(3) });
    stage.role(OWNER, |me| {
        for round in 0..ROUNDS {
            me.publish(Name(0, round))?;
            me.hear(TAKEN[usize::from(round)])?;
            // The reader may be looking at it just now; then it goes when that is asked for again.
            me.evict(Name(0, round))?;
            while me.cache().usage().ready > 0 {
                me.upkeep(1)?;
                me.evict(Name(0, round))?;
            }
        }
        Ok(())
    });
    stage.role(READER, |me| {
        for round in 0..ROUNDS {
            while !me.has(Name(0, round))? {
                me.env.platform().sleep_ns(1 + me.env.below(20_000) as u64);
                if round > 0 {
                    me.pull(Name(0, round - 1))?;
                }
            }
            me.say(TAKEN[usize::from(round)]);
        }
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear(TAKEN[usize::from(ROUNDS) - 1]));
    stage.run()
}

const ROUNDS: u16 = 6;
/// Said by the reader for each round.
const TAKEN: [&str; ROUNDS as usize] = ["taken 1", "taken 2", "taken 3", "taken 4", "taken 5", "taken 6"];

/// C9: blocks share hint lines; one after the other goes, and the others are still found.
pub(super) fn others_are_still_found(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 16, watch: Watch::PULLS, ..Shape::of(2) });
    let first = stage.random().below(1000) as u16;
    stage.role(OWNER, move |me| {
        let names: Vec<Name> = (0..CROWD).map(|step| Name(0, first + step)).collect();
        names.iter().try_for_each(|name| me.publish(*name))?;
        me.say("all are there");
        for (index, name) in names.iter().enumerate() {
            me.expect(me.evict(*name)?, "it is not pinned")?;
            me.all_reachable(&names[index + 1..])?;
        }
        me.say("none is there");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("none is there"));
    stage.run()
}

/// C9: an insert has chosen its place, and others insert into the same lines before it publishes.
pub(super) fn hint_chosen_before_others(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 8, chunks: 2, watch: Watch::PULLS, ..Shape::of(3) });
    let first = stage.random().below(1000) as u16;
    stage.role(OWNER, move |me| {
        me.stop_at("cache.hint_chosen");
        me.publish(Name(1, first))?;
        me.hear("the others are there")?;
        let names: Vec<Name> = (0..8).map(|step| Name(0, first + step)).chain([Name(1, first)]).collect();
        me.all_reachable(&names)?;
        me.say("all were found");
        Ok(())
    });
    stage.role(READER, move |me| {
        me.hear("the owner waits")?;
        // With the lock this waits until the owner resumes.
        (0..8).try_for_each(|step| me.publish(Name(0, first + step)))?;
        me.say("the others are there");
        me.hear("all were found")
    });
    stage.role(WARDEN, |me| {
        me.await_stop(OWNER)?;
        me.say("the owner waits");
        me.env.platform().sleep_ns(10_000_000);
        me.let_go(OWNER);
        me.hear("all were found")
    });
    stage.run()
}

/// C24: a reader's host holds the home line of a block as it was before the block was published.
pub(super) fn hint_line_cached_before(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { cells: 8, chunks: 2, watch: Watch::PULLS, ..Shape::of(3) });
    stage.role(OWNER, |me| {
        me.hear("K is not there")?;
        me.publish(K)?;
        me.say("K is there");
        Ok(())
    });
    stage.role(READER, |me| {
        me.expect(me.cache().lookup(K.namespace(), K.key())?.is_none(), "K is not published")?;
        me.say("K is not there");
        me.hear("K is there")?;
        me.must_find(K)?;
        me.say("K was found");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("K was found"));
    stage.run()
}

/// C10: another thread of the owner wants a cell while the hint of the block that leaves one is about to go.
pub(super) fn cell_wanted_before_its_hint_is_gone(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, Shape { watch: Watch { ready_is_whole: false, ..Watch::ALL }, ..Shape::of(2) });
    stage.role(OWNER, |me| {
        me.publish(K)?;
        me.beside("another", |another| {
            another.hear("K is about to go")?;
            wants_the_cell(another, M, "another has tried", "the owner has tried")
        });
        me.stop_at("cache.hint_removed");
        me.expect(me.evict(K)?, "K is not pinned")?;
        wants_the_cell(me, L, "the owner has tried", "another has tried")
    });
    stage.role(WARDEN, |me| {
        me.await_stop(OWNER)?;
        me.say("K is about to go");
        me.env.platform().sleep_ns(10_000_000);
        me.let_go(OWNER);
        me.hear("the owner has tried")
    });
    stage.run()
}

/// Reserves the cell, if it is free, and keeps it until the other one has tried as well.
fn wants_the_cell(me: &Actor, name: Name, tried: &'static str, other: &'static str) -> Result<()> {
    let draft = me.reserve(name)?;
    me.say(tried);
    me.hear(other)?;
    draft.map_or(Ok(()), |mut draft| draft.fill().and_then(|()| draft.commit()))
}
