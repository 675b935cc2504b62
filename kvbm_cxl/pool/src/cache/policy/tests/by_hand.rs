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
            self.policy.touched(cell as u64, 7);
            return '-';
        }
        let (cell, evicted) = match self.holds.iter().position(Option::is_none) {
            Some(cell) => (cell as u64, '.'),
            None => {
                let cell = evict(&mut *self.policy, 7).unwrap();
                (cell, self.holds[cell as usize].unwrap())
            }
        };
        self.policy.inserted(&entry(cell, letter.into()), QueueEnd::Young, 7).unwrap();
        self.holds[cell as usize] = Some(letter);
        evicted
    }
}

#[test]
fn lru_evicts_the_least_recently_used() {
    let mut cache = Letters::new(PolicyKind::Lru, 3);
    assert_eq!(cache.ask("ABCADAEA"), "...-B-C-");
}

/// Queue old to young, `*` for the flag, `>` for the hand.
#[test]
fn sieve_goes_round_and_keeps_places() {
    let mut cache = Letters::new(PolicyKind::Sieve, 4);
    // >A* B C* D
    assert_eq!(cache.ask("ABCDAC"), "....--");
    // The hand clears A and takes B: A >C* D E
    assert_eq!(cache.ask("E"), "B");
    // It clears C and takes D, not A, which keeps its old place: A C >E F
    assert_eq!(cache.ask("F"), "D");
    // E has been used, so F goes, and the hand is at the end; G comes in behind it: A C E G, then the old end again.
    assert_eq!(cache.ask("EG"), "-F");
    assert_eq!(cache.ask("HIJ"), "ACE");
}

#[test]
fn s3_fifo_promotes_demotes_and_remembers() {
    // Ten cells, so that the small queue is full with one.
    let mut cache = Letters::new(PolicyKind::S3Fifo, 10);
    assert_eq!(cache.ask("ABCDEFGHIJ"), "..........");
    // A is used twice and B once. A goes to the main queue, B was not used enough: small CDEFGHIJK, main A, ghost B.
    assert_eq!(cache.ask("AABK"), "---B");
    // B comes back into the main queue: small DEFGHIJK, main AB, ghost C.
    assert_eq!(cache.ask("B"), "C");
    // C too, and so on: each that comes back pushes out the next of the small queue, until that is a tenth.
    assert_eq!(cache.ask("CDEFGHI"), "DEFGHIJ");
    // small K, main ABCDEFGHI, ghost J. The small queue still gives the next, as it has a tenth.
    assert_eq!(cache.ask("L"), "K");
    // J comes back. small L gives way: main ABCDEFGHIJ.
    assert_eq!(cache.ask("J"), "L");
    // Now the main queue has to give. A was used once, B not since it came back: A goes round, B goes.
    assert_eq!(cache.ask("AM"), "-B");
    // B was in the main queue and left no name. small M gives way: N is new, and so is B.
    assert_eq!(cache.ask("NB"), "MN");
}

#[test]
fn a_name_is_forgotten_after_nine_tenths_of_the_cells() {
    for (others, remembered) in [(7, true), (8, false)] {
        let mut cache = Letters::new(PolicyKind::S3Fifo, 10);
        cache.ask("ABCDEFGHIJK");
        let letters: String = ('a'..).take(others).collect();
        cache.ask(&letters);
        // A's return evicts one more before its name is looked up.
        cache.ask("A");
        // Ten more new ones go through the small queue, and take A along where it stands there.
        cache.ask("0123456789");
        assert_eq!(cache.ask("A") == "-", remembered, "{others} evictions after A's");
    }
}

#[test]
fn lru_fits_other_hosts_uses_in_by_tick() {
    let mut policy = Lru::new(100);
    for (cell, tick) in [(0, 10), (1, 10), (2, 11), (3, 12), (4, 13)] {
        policy.inserted(&entry(cell, cell), QueueEnd::Young, tick).unwrap();
    }
    let mut out = Vec::new();
    policy.victims(2, 13, &mut out);
    assert_eq!(out, [Candidate { cell: 0, tick: 10 }, Candidate { cell: 1, tick: 10 }]);
    // Another host used 0 at tick 11: behind 2, before 3. A host has 1 pinned: at the young end.
    assert!(!policy.settle(0, Verdict::Younger { tick: 11 }));
    assert!(!policy.settle(1, Verdict::InUse));
    policy.inserted(&entry(5, 5), QueueEnd::Old, 13).unwrap();
    assert_eq!(std::iter::from_fn(|| evict(&mut policy, 13)).collect::<Vec<_>>(), [5, 2, 0, 3, 4, 1]);
}

#[test]
fn a_candidate_not_looked_at_is_the_next_again() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        (0..20).for_each(|cell| policy.inserted(&entry(cell, cell), QueueEnd::Young, 7).unwrap());
        let mut out = Vec::new();
        policy.victims(1, 9, &mut out);
        assert_eq!(cells(&out), [0]);
        assert!(!policy.settle(0, Verdict::Kept));
        assert_eq!(evict(&mut *policy, 9), Some(0), "{kind}");
        // Unless it was used meanwhile.
        policy.victims(1, 9, &mut out);
        (0..3).for_each(|_| policy.touched(1, 9));
        assert!(!policy.settle(1, Verdict::Kept));
        assert_eq!(evict(&mut *policy, 9), Some(2), "{kind}");
    }
}

#[test]
fn what_was_adopted_goes_first_unless_a_host_uses_it() {
    for kind in PolicyKind::ALL {
        let mut policy = kind.build(100);
        (0..20).for_each(|cell| policy.inserted(&entry(cell, cell), QueueEnd::Young, 30).unwrap());
        (20..22).for_each(|cell| policy.inserted(&entry(cell, cell), QueueEnd::Old, 30).unwrap());
        let mut out = Vec::new();
        policy.victims(2, 30, &mut out);
        assert_eq!(out, [Candidate { cell: 21, tick: 0 }, Candidate { cell: 20, tick: 0 }], "{kind}");
        assert!(!policy.settle(21, Verdict::Younger { tick: 30 }));
        assert!(policy.settle(20, Verdict::Evicted));
        assert_eq!(evict(&mut *policy, 30), Some(0), "{kind}");
    }
}
