// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn a_way_counts_from_where_it_keeps_winning() {
    for (wins, from) in [
        ([true; 4], 64 << 10),
        ([true, false, true, true], 1 << 20),
        ([false, false, false, true], 4 << 20),
        ([true, true, true, false], u64::MAX),
    ] {
        assert_eq!(from_bytes(&wins), from, "{wins:?}");
    }
    let us = Duration::from_micros;
    assert!(is_worth(us(90), us(100)) && !is_worth(us(95), us(100)) && !is_worth(us(100), us(100)));
}
