// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn a_description_is_what_was_described_or_nothing() {
    for tokens in [Tokens { own: 1, parent: None }, Tokens { own: u64::MAX, parent: Some(0) }, Tokens { own: 0, parent: Some(7) }] {
        assert_eq!(Tokens::decode(&tokens.encode()), Some(tokens));
    }
    let whole = Tokens { own: 3, parent: None }.encode();
    for place in 0..8 {
        let mut other = whole;
        other[place] ^= 0x80;
        assert_eq!(Tokens::decode(&other), None, "byte {place}");
    }
}
