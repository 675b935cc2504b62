// SPDX-License-Identifier: Apache-2.0
//! Short sequences worked out on paper from the definitions.

use super::*;

/// A cache of `room` cells that holds letters, driven as a cache is: a miss evicts where the cache is full.
struct Letters {
    policy: Box<dyn EvictionPolicy>,
    holds: Vec<Option<char>>,
}

impl Letters {
    fn new(kind: PolicyKind, room: u64) -> Self {
        Letters { policy: kind.build(room), holds: vec![None; room as usize] }
    }

    /// Asks for each letter in turn; gives the letters evicted, with `-` for a hit and `.` for a miss that found room.
    fn ask(&mut self, letters: &str) -> String {
        letters.chars().map(|letter| self.ask_one(letter)).collect()
    }

    fn ask_one(&mut self, letter: char) -> char {
        if let Some(cell) = self.holds.iter().position(|&held| held == Some(letter)) {
            self.policy.on_use(cell as u64, 7);
            return '-';
        }
        let (cell, evicted) = match self.holds.iter().position(Option::is_none) {
            Some(cell) => (cell as u64, '.'),
            None => {
                let cell = evict(&mut *self.policy, 7).unwrap();
                (cell, self.holds[cell as usize].unwrap())
            }
        };
        self.policy.on_insert(&entry(cell, letter.into()), QueueEnd::Young, 7).unwrap();
        self.holds[cell as usize] = Some(letter);
        evicted
    }
}

#[test]
fn lru_evicts_the_least_recently_used() {
    let mut cache = Letters::new(PolicyKind::Lru, 3);
    assert_eq!(cache.ask("ABCADAEA"), "...-B-C-");
}

#[test]
fn lru_fits_other_hosts_uses_in_by_tick() {
    let mut policy = Lru::new(100);
    for (cell, tick) in [(0, 10), (1, 10), (2, 11), (3, 12), (4, 13)] {
        policy.on_insert(&entry(cell, cell), QueueEnd::Young, tick).unwrap();
    }
    let mut out = Vec::new();
    policy.victims(2, 13, &mut out);
    assert_eq!(out, [Candidate { cell: 0, tick: 10 }, Candidate { cell: 1, tick: 10 }]);
    // Another host used 0 at tick 11: after 2, before 3. A host has 1 pinned: at the young end.
    assert!(!policy.settle(0, Verdict::Younger { tick: 11 }));
    assert!(!policy.settle(1, Verdict::InUse));
    policy.on_insert(&entry(5, 5), QueueEnd::Old, 13).unwrap();
    assert_eq!(std::iter::from_fn(|| evict(&mut policy, 13)).collect::<Vec<_>>(), [5, 2, 0, 3, 4, 1]);
}

#[test]
fn a_candidate_not_looked_at_is_the_next_again() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        (0..20).for_each(|cell| policy.on_insert(&entry(cell, cell), QueueEnd::Young, 7).unwrap());
        let mut out = Vec::new();
        policy.victims(1, 9, &mut out);
        assert_eq!(cells(&out), [0]);
        assert!(!policy.settle(0, Verdict::Kept));
        assert_eq!(evict(&mut *policy, 9), Some(0), "{kind}");
        // Unless it was used meanwhile.
        policy.victims(1, 9, &mut out);
        (0..3).for_each(|_| policy.on_use(1, 9));
        assert!(!policy.settle(1, Verdict::Kept));
        assert_eq!(evict(&mut *policy, 9), Some(2), "{kind}");
    }
}

#[test]
fn what_was_adopted_goes_first_unless_a_host_uses_it() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        (0..20).for_each(|cell| policy.on_insert(&entry(cell, cell), QueueEnd::Young, 30).unwrap());
        (20..22).for_each(|cell| policy.on_insert(&entry(cell, cell), QueueEnd::Old, 30).unwrap());
        let mut out = Vec::new();
        policy.victims(2, 30, &mut out);
        assert_eq!(out, [Candidate { cell: 21, tick: 0 }, Candidate { cell: 20, tick: 0 }], "{kind}");
        assert!(!policy.settle(21, Verdict::Younger { tick: 30 }));
        assert!(policy.settle(20, Verdict::Evicted));
        assert_eq!(evict(&mut *policy, 30), Some(0), "{kind}");
    }
}
