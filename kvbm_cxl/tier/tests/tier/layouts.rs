// SPDX-License-Identifier: Apache-2.0
//! A block has the same bytes in the pool however it lies in memory.

use crate::bench::*;
use cxl_tier::Outcome;
use cxl_tier::memory::Lies;
use kvbm_physical::layout::BlockDimension::{BlockIsFirstDim, BlockIsSecondDim};

const ALL: [Lies; 3] = [Lies::Contiguous, Lies::LayerSeparate(BlockIsFirstDim), Lies::LayerSeparate(BlockIsSecondDim)];

#[test]
fn every_layout_gets_what_every_other_has_put() {
    let bench = Bench::new(128);
    let (prefill, decode) = (bench.member(1), bench.member_over(2, EMULATED));
    let (prefill, decode) = (prefill.blocks(), decode.blocks());
    for (seed, from) in (1..).zip(ALL) {
        let source = layout_of(&small(7), from);
        let keys = chain(5, seed);
        let ids = [6, 0, 3, 2, 5];
        ids.iter().enumerate().for_each(|(number, &id)| fill(&source, id, seed, number));
        // SAFETY: this thread alone uses the layouts, here and below.
        assert_eq!(unsafe { prefill.put(&keys, &source, &ids) }, all(Outcome::Done, 5));
        for into in ALL {
            let destination = layout_of(&small(9), into);
            let places = [1, 8, 0, 4, 6];
            // SAFETY: as above.
            assert_eq!(unsafe { decode.get(&keys, &destination, &places) }, all(Outcome::Done, 5), "{from:?} to {into:?}");
            for (number, &place) in places.iter().enumerate() {
                assert!(holds(&destination, place, seed, number), "{from:?} to {into:?}, block {number}");
            }
            assert!([2, 3, 5, 7].iter().all(|&id| is_untouched(&destination, id)), "{from:?} to {into:?}: a block that was not asked for");
        }
    }
}

#[test]
fn hosts_that_are_not_coherent_see_each_others_blocks() {
    let bench = Bench::new(256);
    let [first, second] = [1, 2].map(|machine| bench.member_over(machine, EMULATED));
    for round in 0..4u64 {
        let (from, to) = if round % 2 == 0 { (&first, &second) } else { (&second, &first) };
        let keys = chain(60, round + 1);
        assert_eq!(put(&from.blocks(), &keys, round + 1), all(Outcome::Done, 60));
        assert_eq!(get(&to.blocks(), &keys, round + 1), all(Outcome::Done, 60));
    }
    first.assert_clean();
}
