// SPDX-License-Identifier: Apache-2.0
//! Leaves first.

use super::*;
use std::collections::{HashMap, HashSet};

/// A block `number` that continues `parent`.
fn block(cell: u64, number: u64, parent: Option<u64>) -> Entry {
    Entry { parent: parent.map(key), ..entry(cell, number) }
}

fn leaf_lru() -> LeafFirst {
    LeafFirst::new(1000)
}

/// Chains of the given cells, each inserted root first at its tick. Block and cell have one number.
fn chains(policy: &mut dyn EvictionPolicy, chains: &[(&[u64], u32)]) {
    for &(chain, tick) in chains {
        let parents = std::iter::once(None).chain(chain.iter().copied().map(Some));
        for (&cell, parent) in chain.iter().zip(parents) {
            policy.on_insert(&block(cell, cell, parent), QueueEnd::Young, tick).unwrap();
        }
    }
}

fn drain(policy: &mut dyn EvictionPolicy) -> Vec<u64> {
    std::iter::from_fn(|| evict(policy, 0)).collect()
}

#[test]
fn old_chains_go_one_by_one_from_their_ends() {
    let mut policy = leaf_lru();
    chains(&mut policy, &[(&[0, 1, 2, 3], 7), (&[10, 11, 12], 7), (&[20, 21], 7)]);
    [0, 1].into_iter().for_each(|cell| policy.on_use(cell, 8));
    // The two blocks used last stay to the end. 0 before 1 by use, but 1 continues 0.
    assert_eq!(drain(&mut policy), [3, 2, 12, 11, 10, 21, 20, 1, 0]);
}

#[test]
fn a_batch_takes_a_chain_as_single_steps_do() {
    let mut policy = leaf_lru();
    chains(&mut policy, &[(&[0, 1, 2, 3], 7), (&[0, 4, 5], 7), (&[6, 7], 7)]);
    let mut out = Vec::new();
    policy.victims(9, 7, &mut out);
    assert_eq!(cells(&out), [3, 2, 1, 5, 4, 0, 7, 6]);
    assert!(out.iter().all(|candidate| policy.settle(candidate.cell, Verdict::Evicted)));
    assert!(policy.is_empty() && policy.links.is_empty());
}

#[test]
fn what_leads_to_a_kept_block_is_kept() {
    for verdict in [Verdict::InUse, Verdict::Kept, Verdict::Younger { tick: 7 }] {
        let mut policy = leaf_lru();
        chains(&mut policy, &[(&[0, 1, 2, 3], 7)]);
        let mut out = Vec::new();
        policy.victims(4, 7, &mut out);
        assert_eq!(cells(&out), [3, 2, 1, 0]);
        assert!(policy.settle(3, Verdict::Evicted));
        assert!(!policy.settle(2, verdict));
        assert!(!policy.settle(1, Verdict::Evicted), "2 continues it");
        assert!(!policy.settle(0, Verdict::Evicted), "1 continues it");
        assert_eq!((policy.len(), drain(&mut policy)), (3, vec![2, 1, 0]));
    }
}

#[test]
fn a_parent_of_another_process_holds_nothing_up_and_may_come_later() {
    let mut policy = leaf_lru();
    policy.on_insert(&block(1, 1, Some(0)), QueueEnd::Young, 7).unwrap();
    policy.on_insert(&block(2, 2, Some(1)), QueueEnd::Young, 7).unwrap();
    policy.on_insert(&block(0, 0, None), QueueEnd::Old, 7).unwrap();
    assert_eq!(drain(&mut policy), [2, 1, 0]);
    assert!(policy.links.is_empty());
}

#[test]
fn a_block_used_while_it_waits_has_the_place_of_that_use() {
    let mut policy = leaf_lru();
    chains(&mut policy, &[(&[0, 1], 7), (&[5], 7)]);
    let mut out = Vec::new();
    policy.victims(1, 7, &mut out);
    assert_eq!(cells(&out), [1]);
    assert!(!policy.settle(1, Verdict::Kept));
    policy.on_use(0, 7);
    assert_eq!(drain(&mut policy), [1, 5, 0]);
}

#[test]
fn a_namespace_has_its_own_chains() {
    let mut policy = leaf_lru();
    policy.on_insert(&block(0, 0, None), QueueEnd::Young, 7).unwrap();
    policy.on_insert(&Entry { namespace: [9; 16], ..block(1, 1, Some(0)) }, QueueEnd::Young, 7).unwrap();
    assert_eq!(drain(&mut policy), [0, 1]);
}

/// A block in two cells: one of them may go while there are blocks that continue it.
#[test]
fn a_second_copy_does_not_hold_the_first() {
    let mut policy = leaf_lru();
    chains(&mut policy, &[(&[0, 1], 7)]);
    let mut out = Vec::new();
    policy.victims(1, 7, &mut out);
    assert_eq!(cells(&out), [1]);
    assert!(!policy.settle(1, Verdict::InUse));
    // 0 waits for 1 when the copy comes.
    policy.on_insert(&block(50, 0, None), QueueEnd::Young, 7).unwrap();
    assert_eq!(drain(&mut policy), [0, 1, 50]);
    assert!(policy.links.is_empty());
}

#[test]
fn keys_in_a_circle_can_still_be_evicted() {
    let mut policy = leaf_lru();
    for number in 0..5 {
        policy.on_insert(&block(number, number, Some((number + 1) % 5)), QueueEnd::Young, 7).unwrap();
    }
    policy.on_insert(&block(9, 9, Some(9)), QueueEnd::Young, 7).unwrap();
    let evicted = drain(&mut policy);
    assert_eq!(evicted.len(), 6);
    assert!(policy.is_empty() && policy.links.is_empty());
}

/// Random trees over random operations and verdicts: never a block before one that continues it, nothing lost, nothing stuck.
fn property(policy: &mut dyn EvictionPolicy, seed: u64) {
    let mut random = Random(seed);
    let room = 20 + random.below(40);
    let blocks = 3 * room;
    // The parent of a block has a lower number.
    let parents: Vec<Option<u64>> = (0..blocks).map(|number| (number > 2).then(|| random.below(number))).collect();
    let mut held: HashMap<u64, u64> = HashMap::new();
    let mut offered: Vec<u64> = Vec::new();
    let mut tick = 7;
    for step in 0..600 {
        match random.below(10) {
            0..4 => {
                let (cell, number) = (random.below(room), random.below(blocks));
                if !held.contains_key(&cell) && !held.values().any(|&other| other == number) {
                    let place = if random.below(6) == 0 { QueueEnd::Old } else { QueueEnd::Young };
                    policy.on_insert(&block(cell, number, parents[number as usize]), place, tick).unwrap();
                    held.insert(cell, number);
                }
            }
            4..7 => policy.on_use(random.below(room), tick),
            7 => {
                let cell = random.below(room);
                policy.on_remove(cell);
                held.remove(&cell);
                offered.retain(|&other| other != cell);
            }
            8 => tick += random.below(3) as u32,
            _ => {
                let mut out = Vec::new();
                let count = random.below(8) as usize;
                policy.victims(count, tick, &mut out);
                let fresh: HashSet<u64> = cells(&out).into_iter().chain(offered.iter().copied()).collect();
                assert_eq!(fresh.len(), out.len() + offered.len(), "seed {seed}, step {step}: offered twice");
                assert!(count == 0 || !offered.is_empty() || held.is_empty() || !out.is_empty(), "seed {seed}, step {step}: stuck");
                offered.extend(cells(&out));
                // Some are left unsettled until later.
                while offered.len() as u64 > random.below(6) {
                    settle(policy, &mut random, &mut held, offered.remove(0), tick, &parents);
                }
            }
        }
        assert_eq!(policy.len(), held.len(), "seed {seed}, step {step}");
    }
    for cell in offered {
        settle(policy, &mut random, &mut held, cell, tick, &parents);
    }
    while let Some(cell) = evict(policy, tick) {
        assert!(is_leaf(&held, cell, &parents), "seed {seed}: {cell} before what continues it");
        held.remove(&cell);
    }
    assert!(held.is_empty() && policy.is_empty(), "seed {seed}: {held:?} left");
}

fn is_leaf(held: &HashMap<u64, u64>, cell: u64, parents: &[Option<u64>]) -> bool {
    !held.values().any(|&other| parents[other as usize] == held.get(&cell).copied())
}

fn settle(
    policy: &mut dyn EvictionPolicy,
    random: &mut Random,
    held: &mut HashMap<u64, u64>,
    cell: u64,
    tick: u32,
    parents: &[Option<u64>],
) {
    let verdict = match random.below(6) {
        0 => Verdict::InUse,
        1 => Verdict::Kept,
        2 => Verdict::Younger { tick: tick - random.below(7) as u32 },
        _ => Verdict::Evicted,
    };
    let was_leaf = is_leaf(held, cell, parents);
    let gone = policy.settle(cell, verdict);
    assert_eq!(gone, verdict == Verdict::Evicted && was_leaf, "{cell} {verdict:?}");
    if gone {
        held.remove(&cell);
    }
}

#[test]
fn no_block_goes_before_one_that_continues_it() {
    (0..300).for_each(|seed| property(&mut leaf_lru(), seed));
}
