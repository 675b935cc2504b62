// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;

fn copy(grant: u32, version: u32, tag: u8) -> Record {
    Record { grant, version, data: [tag; RECORD_BYTES], ..Record::zeroed() }
}

#[test]
fn unwritten_record_reads_as_zero() {
    let best = choose(3, &[Record::zeroed(); 4]).unwrap();
    assert_eq!((best.number, best.copy), (3, Record::zeroed()));
}

#[test]
fn higher_grant_outvotes_higher_version() {
    let best = choose(0, &[copy(4, 9, 1), copy(5, 2, 2), copy(0, 0, 0)]).unwrap();
    assert_eq!((best.slot, best.copy.data[0]), (1, 2));
    let best = choose(0, &[copy(5, 3, 1), copy(5, 2, 2)]).unwrap();
    assert_eq!((best.slot, best.copy.data[0]), (0, 1));
}

#[test]
fn a_sealed_empty_record_outvotes_a_late_first_write() {
    let best = choose(0, &[copy(1, 1, 7), copy(2, 0, 0)]).unwrap();
    assert_eq!((best.slot, best.copy.data[0]), (1, 0));
}

#[test]
fn two_writers_of_one_version_are_refused() {
    assert!(choose(0, &[copy(2, 2, 1), copy(2, 2, 2)]).is_err());
}

#[test]
fn structures_share_no_record_and_no_intent_line() {
    let geometry = Geometry::with_len(64 << 20);
    let (locks, objects) = (Structure::LockTable.records(&geometry), Structure::Objects.records(&geometry));
    assert_eq!((locks.start, locks.end, objects.end), (0, objects.start, geometry.records()));
    assert_ne!(Structure::LockTable.intent_line(3), Structure::Objects.intent_line(3));
    assert_ne!(Structure::LockTable.lock(), Structure::Objects.lock());
}

proptest! {
    #[test]
    fn choice_does_not_depend_on_the_slot_order(mut grants in proptest::collection::vec((1u32..9, 0u32..9), 1..9)) {
        grants.sort_unstable();
        grants.dedup();
        let forward: Vec<_> = grants.iter().map(|&(grant, version)| copy(grant, version, grant as u8)).collect();
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let highest = *forward.last().unwrap();
        prop_assert_eq!(choose(0, &forward).unwrap().copy, highest);
        prop_assert_eq!(choose(0, &backward).unwrap().copy, highest);
    }
}
