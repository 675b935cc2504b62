// SPDX-License-Identifier: Apache-2.0
//! Policies against a slow model that is plainly right, over random operations; sequences worked by hand; properties.

mod by_hand;
mod leaves;
mod models;

use super::*;
use models::LruModel;

/// Splitmix64: a failing seed replays.
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % limit
    }
}

pub(super) fn key(number: u64) -> [u8; 16] {
    bytemuck::cast([number, !number])
}

pub(super) fn entry(cell: u64, number: u64) -> Entry {
    Entry { cell, key: key(number), namespace: [3; 16], parent: None }
}

pub(super) fn cells(candidates: &[Candidate]) -> Vec<u64> {
    candidates.iter().map(|candidate| candidate.cell).collect()
}

/// Offers one cell and evicts it.
pub(super) fn evict(policy: &mut dyn EvictionPolicy, tick: u32) -> Option<u64> {
    let mut out = Vec::new();
    policy.victims(1, tick, &mut out);
    let cell = out.first()?.cell;
    assert!(policy.settle(cell, Verdict::Evicted));
    Some(cell)
}

/// The operations of `seed` on both, compared at each step. Cells are spread over pages, keys come back.
fn compare(policy: &mut dyn EvictionPolicy, seed: u64, steps: u64) {
    let mut model = LruModel::default();
    let mut random = Random(seed);
    let mut tick = 7 * (seed as u32 % 2);
    let mut offered: Vec<Candidate> = Vec::new();
    let room = 4 + random.below(60);
    for step in 0..steps {
        let cell = random.below(room) * 97;
        match random.below(20) {
            0..6 => {
                let place = if random.below(5) == 0 { QueueEnd::Old } else { QueueEnd::Young };
                let entry = entry(cell, random.below(3 * room));
                offered.retain(|candidate| candidate.cell != cell);
                policy.on_insert(&entry, place, tick).unwrap();
                model.on_insert(&entry, place, tick);
            }
            6..10 => {
                policy.on_use(cell, tick);
                model.on_use(cell, tick);
            }
            10 | 11 => {
                let tick = tick.saturating_sub(random.below(9) as u32);
                policy.used_elsewhere(cell, tick);
                model.used_elsewhere(cell, tick);
            }
            12 => {
                offered.retain(|candidate| candidate.cell != cell || random.below(2) == 0);
                policy.on_remove(cell);
                model.on_remove(cell);
            }
            13 => tick += [0, 1, 1, 1, 2, 6, 7, 20][random.below(8) as usize],
            14..17 => {
                let count = 1 + random.below(4) as usize;
                let (mut found, mut expected) = (Vec::new(), Vec::new());
                policy.victims(count, tick, &mut found);
                model.victims(count, tick, &mut expected);
                assert_eq!(found, expected, "seed {seed}, step {step}");
                offered.extend(found);
            }
            _ if offered.is_empty() => {}
            _ => {
                let candidate = offered.swap_remove(random.below(offered.len() as u64) as usize);
                let verdict = match random.below(8) {
                    0 => Verdict::InUse,
                    1 => Verdict::Kept,
                    2 | 3 => Verdict::Younger { tick: tick.saturating_sub(random.below(9) as u32) },
                    _ => Verdict::Evicted,
                };
                let settled = policy.settle(candidate.cell, verdict);
                assert_eq!(settled, model.settle(candidate.cell, verdict), "seed {seed}, step {step}, {candidate:?} {verdict:?}");
            }
        }
        assert_eq!(policy.len(), model.len(), "seed {seed}, step {step}");
    }
    // The rest comes out in the same order.
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    policy.victims(usize::MAX, tick, &mut found);
    model.victims(usize::MAX, tick, &mut expected);
    assert_eq!(found, expected, "seed {seed}, at the end");
}

#[test]
fn lru_does_as_its_model() {
    (0..300).for_each(|seed| compare(&mut Lru::new(10_000), seed, 1000));
}

/// Where no key continues another, leaves first changes nothing.
#[test]
fn leaf_lru_without_chains_is_lru() {
    (0..100).for_each(|seed| compare(&mut *PolicyKind::LeafLru.build(10_000), seed, 1000));
}

#[test]
fn names_are_read_and_written() {
    for kind in PolicyKind::ALL {
        assert_eq!(PolicyKind::parse(&kind.to_string()).unwrap(), kind);
    }
    assert_eq!(PolicyKind::default().name(), "lru");
    let refused = PolicyKind::parse("LRU").unwrap_err().to_string();
    assert!(refused.contains("\"LRU\"") && refused.contains("lru, leaf-lru"), "{refused}");
}

#[test]
fn a_cell_beyond_the_pool_is_refused_and_costs_no_memory() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(1000);
        for cell in [1000, 1 << 24, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            assert!(policy.on_insert(&entry(cell, cell), QueueEnd::Young, 7).is_err(), "{kind} takes cell {cell}");
            policy.on_use(cell, 7);
            policy.on_remove(cell);
            assert!(!policy.settle(cell, Verdict::Evicted));
        }
        assert!(policy.is_empty());
        policy.on_insert(&entry(999, 1), QueueEnd::Young, 7).unwrap();
        assert_eq!((policy.len(), evict(&mut *policy, 7), evict(&mut *policy, 7)), (1, Some(999), None));
        assert!(!kind.build(u64::MAX).settle(u64::from(u32::MAX), Verdict::Kept));
    }
}

#[test]
fn only_what_is_offered_can_be_settled() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        policy.on_insert(&entry(5, 5), QueueEnd::Young, 7).unwrap();
        for verdict in [Verdict::Evicted, Verdict::InUse, Verdict::Younger { tick: 7 }, Verdict::Kept] {
            assert!(!policy.settle(5, verdict), "{kind}");
            assert_eq!(policy.len(), 1);
        }
        let mut out = Vec::new();
        policy.victims(9, 7, &mut out);
        policy.victims(9, 7, &mut out);
        assert_eq!(cells(&out), [5], "{kind} offers a candidate twice");
        policy.on_remove(5);
        assert!(!policy.settle(5, Verdict::Evicted), "{kind}: the one who removed it frees it");
    }
}

/// Whatever other hosts' ticks are, an evictor that evicts what it cannot find younger comes to an end.
#[test]
fn every_policy_runs_dry_when_the_evictor_trusts_the_ticks() {
    for kind in PolicyKind::ALL {
        let mut random = Random(11);
        let mut policy = kind.build(1000);
        let remote: Vec<u32> = (0..500).map(|_| 14 + random.below(7) as u32).collect();
        for cell in 0..500 {
            policy.on_insert(&entry(cell, cell), if cell % 3 == 0 { QueueEnd::Old } else { QueueEnd::Young }, 14).unwrap();
        }
        let (mut asked, mut evicted) = (0, Vec::new());
        while !policy.is_empty() {
            let mut out = Vec::new();
            policy.victims(16, 20, &mut out);
            for candidate in out {
                asked += 1;
                assert!(asked <= 1000, "{kind} keeps offering younger cells");
                let tick = remote[candidate.cell as usize];
                if tick > candidate.tick {
                    assert!(!policy.settle(candidate.cell, Verdict::Younger { tick }));
                } else {
                    assert!(policy.settle(candidate.cell, Verdict::Evicted));
                    evicted.push(tick);
                }
            }
        }
        assert!(evicted.is_sorted(), "{kind}: hosts' uses are one order");
    }
}
