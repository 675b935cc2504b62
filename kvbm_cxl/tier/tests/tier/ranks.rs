// SPDX-License-Identifier: Apache-2.0
//! Workers that each hold a part of every block: a block is there if every rank's part is.

use crate::bench::*;
use cxl_tier::{Outcome, Ranks};

#[test]
fn a_block_that_one_rank_lacks_is_a_miss_for_all() {
    let bench = Bench::new(128);
    let (prefill, decode) = (bench.member(1), bench.member(2));
    let ranks = [0, 1].map(|rank| Ranks::new(rank, 2).unwrap());
    let keys = chain(6, 3);
    let [first, second] = ranks.map(|rank| prefill.rank(rank));
    assert_eq!(put(&first, &keys, 30), all(Outcome::Done, 6));
    let deciders = ranks.map(|rank| decode.rank(rank));
    for blocks in &deciders {
        assert_eq!(blocks.has(&keys), all(Outcome::Absent, 6), "rank 1 has stored nothing");
    }
    assert_eq!(put(&second, &keys[..4], 31), all(Outcome::Done, 4));
    let expected = [all(Outcome::Done, 4), all(Outcome::Absent, 2)].concat();
    for (blocks, seed) in deciders.iter().zip([30, 31]) {
        assert_eq!(blocks.has(&keys), expected);
        // Each rank's own bytes.
        assert_eq!(get(blocks, &keys[..4], seed), all(Outcome::Done, 4));
    }
    assert_eq!(get(&deciders[1], &keys, 31), expected);
    assert_eq!(decode.blocks().has(&keys), all(Outcome::Absent, 6), "a worker alone has other parts");
}
