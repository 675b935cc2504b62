// SPDX-License-Identifier: Apache-2.0

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[test]
fn keep_lines_carry_the_set_both_ways() {
    let mut set = BlockSet::new(1000);
    for block in [0, 7, 63, 64, 447, 448, 895, 896, 999] {
        set.insert(block);
    }
    let mut again = BlockSet::new(1000);
    (0..3).for_each(|line| again.set_line(line, &set.line(line)));
    assert_eq!((&set, set.count(), set.last()), (&again, 9, Some(999)));
    assert_eq!(set.line(1)[0], 1);
    assert_eq!(set.line(0)[55], 0x80);
}

#[test]
fn rebuilt_chunk_hands_out_everything_but_the_kept_blocks_once() {
    let mut kept = BlockSet::new(700);
    [3, 500, 699].iter().for_each(|&block| kept.insert(block));
    let mut heap = Heap::default();
    heap.add(HeapChunk::rebuilt(9, 700, kept));
    let blocks: Vec<u32> = std::iter::from_fn(|| heap.take()).map(|(_, block)| block).collect();
    assert_eq!(blocks.len(), 697);
    assert_eq!(blocks.iter().collect::<BTreeSet<_>>().len(), 697);
    assert!(!blocks.iter().any(|block| [3, 500, 699].contains(block)));
}

#[test]
fn freed_kept_block_is_not_handed_out_before_its_bit_is_gone() {
    let mut heap = Heap::default();
    let place = heap.add(HeapChunk::empty(4, 1));
    assert_eq!(heap.take(), Some((4, 0)));
    assert!(matches!(heap.keep(place, 4, 0), Kept::Publish(KeepLine { line: 0, bits }) if bits[0] == 1));
    assert_eq!(heap.keep(place, 4, 0), Kept::Already);
    assert_eq!(heap.free(place, 4, 0), Freed::IsKept);
    assert!(matches!(heap.unkeep(place, 4, 0), Some(KeepLine { line: 0, bits }) if bits[0] == 0));
    assert_eq!(heap.take(), None);
    assert_eq!(heap.free(place, 4, 0), Freed::NotAllocated);
    assert_eq!(heap.unkeep(place, 4, 0), None);
    assert!(heap.remove_empty(0, 9).is_empty());
    heap.finish_free(place, 4, 0);
    assert_eq!(heap.take(), Some((4, 0)));
}

#[derive(Clone, Debug)]
enum Step {
    Take,
    Free(usize),
    Keep(usize),
    Stray(u64, u32),
    Add(u32),
    RemoveEmpty,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Take),
        3 => (0usize..64).prop_map(Step::Free),
        2 => (0usize..64).prop_map(Step::Keep),
        1 => (0u64..9, 0u32..80).prop_map(|(chunk, block)| Step::Stray(chunk, block)),
        1 => (1u32..70).prop_map(Step::Add),
        1 => Just(Step::RemoveEmpty),
    ]
}

proptest! {
    /// Against a plain model: no block is out twice, nothing that is not out can be freed, and counts are exact.
    #[test]
    fn heap_agrees_with_its_model(steps in proptest::collection::vec(step(), 1..400)) {
        let mut heap = Heap::default();
        let mut places = BTreeMap::new();
        let mut next = 0;
        let mut out: BTreeMap<(u64, u32), bool> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Add(blocks) => {
                    places.insert(next, (heap.add(HeapChunk::empty(next, blocks)), blocks));
                    next += 1;
                }
                Step::Take => match heap.take() {
                    Some(block) => prop_assert!(places.contains_key(&block.0) && out.insert(block, false).is_none()),
                    None => prop_assert_eq!(out.len() as u32, places.values().map(|(_, blocks)| blocks).sum::<u32>()),
                },
                Step::Free(nth) => if let Some((&(number, block), &kept)) = out.iter().nth(nth) {
                    let place = places[&number].0;
                    match heap.free(place, number, block) {
                        Freed::Done => prop_assert!(!kept),
                        Freed::IsKept => {
                            prop_assert!(kept && heap.unkeep(place, number, block).is_some());
                            heap.finish_free(place, number, block);
                        }
                        Freed::NotAllocated => prop_assert!(false, "an allocated block cannot be freed"),
                    }
                    out.remove(&(number, block));
                },
                Step::Keep(nth) => if let Some((&(number, block), kept)) = out.iter_mut().nth(nth) {
                    let result = heap.keep(places[&number].0, number, block);
                    prop_assert_eq!(result == Kept::Already, *kept);
                    *kept = true;
                },
                Step::Stray(number, block) => if !out.contains_key(&(number, block)) {
                    let place = places.get(&number).map_or(0, |place| place.0);
                    prop_assert_eq!(heap.free(place, number, block), Freed::NotAllocated);
                    prop_assert_eq!(heap.keep(place, number, block), Kept::NotAllocated);
                },
                Step::RemoveEmpty => for number in heap.remove_empty(0, 2) {
                    prop_assert!(places.remove(&number).is_some());
                    prop_assert!(!out.keys().any(|block| block.0 == number));
                },
            }
            let kept = out.values().filter(|kept| **kept).count() as u64;
            prop_assert_eq!(heap.count(), (places.len() as u64, out.len() as u64 - kept, kept));
        }
    }
}
