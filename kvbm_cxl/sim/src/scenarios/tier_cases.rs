// SPDX-License-Identifier: Apache-2.0
//! What a storage tier does with lists of blocks (`cxl_pool::cache::tier`), as choreographies: each passes on the production code, for
//! every seed, and fails with the rule dropped that it is about.
//!
//! Checked: P1 as in the cache's own ([`super::cache_cases`]); T1 a put that says that a block is there found it there, or stored it,
//! after the last step of its turn; T2 has says yes only to what every rank can get; T3 a call that was dropped touches no memory any more.

use super::Scenario;
use super::cache_ledger::Name;
use super::cache_stage::{Actor, HALF_READ, HALF_WRITTEN, Shape, Stage, WARDEN, Watch};
use super::tier_memory::Memory;
use crate::{Failure, Stats};
use cxl_pool::cache::tier::{Answer, TierBlocks};
use cxl_pool::metrics::RefusalReason;
use std::mem::ManuallyDrop;

/// Who puts, or who gets and is stopped.
const Z: usize = 1;
/// Another publisher.
const A: usize = 2;
/// A reader.
const R: usize = 3;

const K: Name = Name(0, 1);
const L: Name = Name(0, 2);
/// K of the other rank.
const K_OF_RANK_1: Name = Name(1, 1);

/// Every choreography with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("t1_key_is_only_reserved", key_is_only_reserved),
    ("t1_put_while_evicted", put_while_evicted),
    ("t1_put_while_fenced", put_while_fenced),
    ("t1_parent_evicted_during_a_put", parent_evicted_during_a_put),
    ("t1_t2_another_length", another_length),
    ("t2_a_rank_lacks_it", a_rank_lacks_it),
    ("t3_get_dropped", get_dropped),
    ("t3_put_dropped", put_dropped),
    ("t3_get_dropped_before_it_begins", get_dropped_before_it_begins),
    ("get_of_what_was_evicted", get_of_what_was_evicted),
    ("get_while_fenced", get_while_fenced),
    ("get_while_the_owner_is_fenced", get_while_the_owner_is_fenced),
    ("get_into_the_same_memory", get_into_the_same_memory),
];

/// So many hosts, each of which can have a chunk of two cells.
fn shape(hosts: usize) -> Shape {
    // A put goes from reserve to commit in one call, so the writers of cells are not in the ledger.
    Shape { cells: 2, chunks: 3, watch: Watch { one_writer: false, ..Watch::ALL }, ..Shape::of(hosts) }
}

/// The blocks of rank 0 of two, whose namespace K and L are in.
fn tier_of_two(me: &Actor) -> TierBlocks {
    let namespaces = vec![K.namespace(), K_OF_RANK_1.namespace()];
    TierBlocks::new(&me.cache(), namespaces, K.namespace(), me.len_bytes() as u64)
}

/// The same of a worker without another rank.
fn tier(me: &Actor) -> TierBlocks {
    TierBlocks::new(&me.cache(), vec![K.namespace()], K.namespace(), me.len_bytes() as u64)
}

/// Puts new versions of blocks, each with the block before it as its parent.
fn put(me: &Actor, names: &[Name]) -> Vec<Answer> {
    let tier = tier(me);
    let sources: Vec<Memory> = names.iter().map(|&name| Memory::holding(&me.draw_up(name))).collect();
    let parents = std::iter::once(None).chain(names.iter().copied().map(Some));
    let blocks: Vec<_> = sources.iter().zip(names).zip(parents).map(|((source, &name), parent)| source.block(name, parent)).collect();
    // SAFETY: no other thread uses the sources, which live longer than the call.
    unsafe { tier.put(&blocks, &tier.call().turns()) }
}

/// Gets blocks, and checks P1 for those that are said to be got.
fn get(me: &Actor, names: &[Name]) -> Vec<Answer> {
    let places: Vec<Memory> = names.iter().map(|_| Memory::new(me.len_bytes())).collect();
    get_into(me, names, &places)
}

fn get_into(me: &Actor, names: &[Name], places: &[Memory]) -> Vec<Answer> {
    let tier = tier(me);
    let blocks: Vec<_> = places.iter().zip(names).map(|(place, &name)| place.block(name, None)).collect();
    // SAFETY: no other thread uses the places, which live longer than the call.
    let answers = unsafe { tier.get(&blocks, &tier.call().turns()) };
    for ((answer, place), &name) in answers.iter().zip(places).zip(names) {
        if matches!(answer, Answer::Done) {
            me.accepted(name, &place.bytes(), "get");
        }
    }
    answers
}

/// Fails the run for a put that says of a block that is not there that it is.
fn must_not_be_there(me: &Actor, answer: &Answer, why: &str) {
    if matches!(answer, Answer::Done | Answer::Exists) {
        me.env.fail(format!("T1: put says {answer:?}, and {why}"));
    }
}

/// A key that is there is reserved by a process that gives it up.
fn key_is_only_reserved(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        let draft = me.reserve(K)?;
        me.say("K is reserved");
        me.hear("Z has put")?;
        draft.map_or(Ok(()), |draft| draft.abort())
    });
    stage.role(Z, |me| {
        me.hear("K is reserved")?;
        let answers = put(me, &[K, L]);
        me.say("Z has put");
        must_not_be_there(me, &answers[0], "K is only reserved");
        me.expect(matches!(answers[1], Answer::Done), "L is stored")
    });
    stage.role(WARDEN, |me| me.hear("Z has put"));
    stage.run()
}

/// A block that is there when a put begins is evicted before the put is through.
fn put_while_evicted(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("Z stands still")?;
        me.expect(me.evict(K)?, "no host has pinned K")?;
        me.say("K is gone");
        Ok(())
    });
    stage.role(Z, |me| {
        me.hear("K is there")?;
        me.stop_at("cache.may_write");
        let answers = put(me, &[K, L]);
        must_not_be_there(me, &answers[0], "K was evicted before L was stored");
        me.expect(matches!(answers[1], Answer::Done), "L is stored")?;
        // Missing blocks can be stored.
        me.expect(matches!(put(me, &[K])[0], Answer::Done), "K is stored")?;
        me.expect(get(me, &[K, L]).iter().all(|answer| matches!(answer, Answer::Done)), "both are got")
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.say("Z stands still");
        me.hear("K is gone")?;
        me.let_go(Z);
        Ok(())
    });
    stage.run()
}

/// The host of a put is fenced between the copy and the commit.
fn put_while_fenced(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(4));
    stage.role(Z, |me| {
        me.stop_at("cache.filled");
        let answers = put(me, &[K]);
        me.say("Z has put");
        must_not_be_there(me, &answers[0], "the host was fenced before the commit");
        me.hear("R has looked")
    });
    stage.role(R, |me| {
        me.hear("Z has put")?;
        let found = get(me, &[K]);
        me.say("R has looked");
        me.expect(!matches!(found[0], Answer::Done), "a fenced host's block is void")
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.let_go(Z);
        me.hear("R has looked")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// The parent of a block goes while the block is being put. A parent is a name, no promise.
fn parent_evicted_during_a_put(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(4));
    stage.role(Z, |me| {
        me.expect(matches!(put(me, &[K])[0], Answer::Done), "K is stored")?;
        me.beside("put", |me| {
            me.stop_at("cache.may_write");
            let child = Memory::holding(&me.draw_up(L));
            let tier = tier(me);
            // SAFETY: no other thread uses the source, which lives longer than the call.
            let answers = unsafe { tier.put(&[child.block(L, Some(K))], &tier.call().turns()) };
            me.say("L is put");
            me.expect(matches!(answers[0], Answer::Done), "L is stored")
        });
        me.hear("the put stands still")?;
        me.expect(me.evict(K)?, "no host has pinned K")?;
        me.say("K is gone");
        me.hear("R has L")?;
        me.expect(me.evict(L)?, "a block without its parent can be evicted")?;
        me.upkeep(2)
    });
    stage.role(R, |me| {
        me.hear("L is put")?;
        let has = tier(me).has(&[K.key(), L.key()]);
        me.expect(matches!(has[..], [Answer::Absent, Answer::Done]), "L is there without K")?;
        if !matches!(get(me, &[L])[0], Answer::Done) {
            me.env.fail("T1: L was stored, no host evicted it, but a get misses it");
        }
        me.say("R has L");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.say("the put stands still");
        me.hear("K is gone")?;
        me.let_go(Z);
        me.hear("R has L")
    });
    stage.run()
}

/// The key is there with a block of another length.
fn another_length(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("Z has asked")
    });
    stage.role(Z, |me| {
        me.hear("K is there")?;
        let len_bytes = me.len_bytes() - 8;
        let other = TierBlocks::new(&me.cache(), vec![K.namespace()], K.namespace(), len_bytes as u64);
        let memory = Memory::new(len_bytes);
        // SAFETY: no other thread uses the memory, which lives longer than the calls.
        let (stored, got) = unsafe {
            (other.put(&[memory.block(K, None)], &other.call().turns()), other.get(&[memory.block(K, None)], &other.call().turns()))
        };
        must_not_be_there(me, &stored[0], "K has another length");
        if matches!(other.has(&[K.key()])[0], Answer::Done) {
            me.env.fail("T2: has says yes to a block of another length, which no get can have");
        }
        me.say("Z has asked");
        me.expect(matches!((&stored[0], &got[0]), (Answer::Length, Answer::Missed(_))), "the length is reported")
    });
    stage.role(WARDEN, |me| me.hear("Z has asked"));
    stage.run()
}

/// One rank has the block, the other has it no longer.
fn a_rank_lacks_it(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.publish(K_OF_RANK_1)?;
        me.say("both ranks have it");
        me.hear("Z has asked")?;
        me.expect(me.evict(K_OF_RANK_1)?, "no host has pinned it")?;
        me.say("one rank has it");
        me.hear("Z has asked again")
    });
    stage.role(Z, |me| {
        me.hear("both ranks have it")?;
        me.expect(matches!(tier_of_two(me).has(&[K.key()])[0], Answer::Done), "both ranks have it")?;
        me.say("Z has asked");
        me.hear("one rank has it")?;
        if matches!(tier_of_two(me).has(&[K.key()])[0], Answer::Done) {
            me.env.fail("T2: has says yes to a block that a rank lacks");
        }
        me.say("Z has asked again");
        Ok(())
    });
    stage.role(WARDEN, |me| me.hear("Z has asked again"));
    stage.run()
}

/// The call's end while a turn of its two stands still somewhere in its copy: the drop waits, and the memory is the caller's afterwards.
fn dropped(seed: u64, places: &[&'static str], is_put: bool) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(4));
    let place = stage.random().pick(places);
    stage.role(A, move |me| {
        if !is_put {
            me.publish(K)?;
            me.publish(L)?;
        }
        me.say("it can begin");
        me.hear("R has looked")
    });
    stage.role(Z, move |me| {
        me.hear("it can begin")?;
        let memory = [K, L].map(|name| if is_put { Memory::holding(&me.draw_up(name)) } else { Memory::new(me.len_bytes()) });
        // Nothing of a run that ends in between waits for its threads.
        let call = ManuallyDrop::new(tier(me).call());
        let (turns, used) = (call.turns(), memory.clone());
        me.beside("call", move |me| {
            me.stop_at(place);
            let (tier, blocks) = (tier(me).in_turns_of(1), [used[0].block(K, None), used[1].block(L, Some(K))]);
            // SAFETY: the memory lives as long as this thread, and its next use begins when the call was dropped.
            let answers = unsafe { if is_put { tier.put(&blocks, &turns) } else { tier.get(&blocks, &turns) } };
            me.say("the call is over");
            me.expect(matches!(answers[1], Answer::Dropped), "the second block was dropped")
        });
        me.hear("the call stands still")?;
        drop(ManuallyDrop::into_inner(call));
        memory.iter().for_each(Memory::reuse);
        me.hear("the call is over")?;
        if !memory.iter().all(Memory::is_as_reused) {
            me.env.fail("T3: a call that was dropped wrote to memory that another use has");
        }
        Ok(())
    });
    stage.role(R, |me| {
        me.hear("the call is over")?;
        get(me, &[K, L]);
        me.say("R has looked");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.say("the call stands still");
        // Long enough for a drop that does not wait.
        me.env.platform().sleep_ns(3_000_000);
        me.let_go(Z);
        me.hear("R has looked")
    });
    stage.run()
}

fn get_dropped(seed: u64) -> std::result::Result<Stats, Failure> {
    dropped(seed, &["cache.pin_confirmed", "cache.copying", HALF_READ], false)
}

fn put_dropped(seed: u64) -> std::result::Result<Stats, Failure> {
    dropped(seed, &["cache.may_write", HALF_WRITTEN], true)
}

/// A call is dropped before the thread that does its work comes to it.
fn get_dropped_before_it_begins(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("the call is over")
    });
    stage.role(Z, |me| {
        me.hear("K is there")?;
        let memory = Memory::new(me.len_bytes());
        let call = tier(me).call();
        let (turns, used) = (call.turns(), memory.clone());
        drop(call);
        memory.reuse();
        // SAFETY: the memory lives longer than the call, which was dropped before its next use.
        let answers = unsafe { tier(me).get(&[used.block(K, None)], &turns) };
        if !memory.is_as_reused() {
            me.env.fail("T3: a call that was dropped before it began wrote to memory that another use has");
        }
        me.say("the call is over");
        me.expect(matches!(answers[..], [Answer::Dropped]), "the block was dropped")
    });
    stage.role(WARDEN, |me| me.hear("the call is over"));
    stage.run()
}

/// A block that `has` found is evicted before `get`.
fn get_of_what_was_evicted(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("Z has asked")?;
        me.expect(me.evict(K)?, "no host has pinned K")?;
        me.say("K is gone");
        me.hear("Z has got")
    });
    stage.role(Z, |me| {
        me.hear("K is there")?;
        me.expect(matches!(tier(me).has(&[K.key()])[0], Answer::Done), "K is there")?;
        me.say("Z has asked");
        me.hear("K is gone")?;
        let got = get(me, &[K]);
        me.say("Z has got");
        me.expect(matches!(got[0], Answer::Missed(_)), "K is a miss")
    });
    stage.role(WARDEN, |me| me.hear("Z has got"));
    stage.run()
}

/// The host of a get is fenced in the middle of its copy. Its pin counts for nothing, and the owner has another block in the cell.
fn get_while_fenced(seed: u64) -> std::result::Result<Stats, Failure> {
    let watch = Watch { pins_hold: false, ..shape(3).watch };
    let mut stage = Stage::new(seed, Shape { cells: 1, chunks: 1, watch, ..shape(3) });
    let place = stage.random().pick(&["cache.copying", HALF_READ, HALF_READ]);
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("Z is fenced")?;
        me.expect(me.evict(K)?, "a fenced reader's pin counts for nothing")?;
        me.publish(L)?;
        me.say("L is there");
        Ok(())
    });
    stage.role(Z, move |me| {
        me.hear("K is there")?;
        me.stop_at(place);
        get(me, &[K]);
        me.say("Z has got");
        Ok(())
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(Z)?;
        me.say("Z is fenced");
        me.hear("L is there")?;
        me.let_go(Z);
        me.hear("Z has got")?;
        me.revive(Z);
        Ok(())
    });
    stage.run()
}

/// The owner of a block is fenced in the middle of its copy: the host that takes its cells over may write to them.
fn get_while_the_owner_is_fenced(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    let place = stage.random().pick(&["cache.copying", HALF_READ]);
    stage.role(A, |me| {
        me.publish(K)?;
        me.say("K is there");
        me.hear("Z has got")
    });
    stage.role(Z, move |me| {
        me.hear("K is there")?;
        me.stop_at(place);
        let got = get(me, &[K]);
        me.say("Z has got");
        me.expect(!matches!(got[0], Answer::Done), "a fenced owner's block is void")?;
        me.expect(
            matches!(put(me, &[K])[0], Answer::Done | Answer::Refused(RefusalReason::Busy | RefusalReason::TableFull)),
            "it is put again",
        )
    });
    stage.role(WARDEN, |me| {
        me.await_stop(Z)?;
        me.fence(A)?;
        me.let_go(Z);
        me.hear("Z has got")?;
        me.revive(A);
        Ok(())
    });
    stage.run()
}

/// Two blocks of a list go to one place.
fn get_into_the_same_memory(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut stage = Stage::new(seed, shape(3));
    stage.role(A, |me| {
        me.publish(K)?;
        me.publish(L)?;
        me.say("both are there");
        me.hear("Z has got")
    });
    stage.role(Z, |me| {
        me.hear("both are there")?;
        let memory = Memory::new(me.len_bytes());
        let got = get_into(me, &[K, L], &[memory.clone(), memory]);
        me.say("Z has got");
        me.expect(matches!(got[..], [Answer::Done, Answer::Twice]), "the second one is refused")
    });
    stage.role(WARDEN, |me| me.hear("Z has got"));
    stage.run()
}
