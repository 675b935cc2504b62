// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn the_last_word_of_the_only_claimant_alone_is_trusted() {
    let claimant = |slot, incarnation| CellClaimant { slot, incarnation, is_certain: true };
    let found = Descriptor { owner: 3, incarnation: 7, ..Descriptor::default() };
    assert!(is_trusted(&found, &[claimant(3, 7)]));
    for other in [claimant(3, 6), claimant(3, 8), claimant(2, 7), CellClaimant { is_certain: false, ..claimant(3, 7) }] {
        assert!(!is_trusted(&found, &[other]), "{other:?}");
    }
    assert!(!is_trusted(&found, &[]) && !is_trusted(&found, &[claimant(3, 7), claimant(3, 6)]));
}
