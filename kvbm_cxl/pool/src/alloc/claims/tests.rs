// SPDX-License-Identifier: Apache-2.0

use super::*;

fn claim(incarnation: u32, chunks: &[usize]) -> Option<Claim> {
    let mut claim = Claim { incarnation, ..Claim::zeroed() };
    chunks.iter().for_each(|&bit| set(&mut claim.bits, bit, true));
    Some(claim)
}

#[test]
fn bits_are_set_and_cleared_alone() {
    let mut bits = [0; CHUNKS_PER_CLAIM / 8];
    [0, 7, 8, 447].iter().for_each(|&bit| set(&mut bits, bit, true));
    set(&mut bits, 7, false);
    let left: Vec<usize> = (0..CHUNKS_PER_CLAIM).filter(|&bit| has(&bits, bit)).collect();
    assert_eq!(left, [0, 8, 447]);
}

#[test]
fn an_unreadable_line_claims_everything_and_cannot_be_proven_dead() {
    let row = ClaimRow { line: 1, claims: vec![claim(3, &[5]), None, claim(4, &[6])] };
    assert_eq!(row.first(), 448);
    assert_eq!(row.claimants(5, usize::MAX).collect::<Vec<_>>(), [(0, 3), (1, u32::MAX)]);
    assert_eq!(row.claimants(6, 2).collect::<Vec<_>>(), [(1, u32::MAX)]);
    assert_eq!(row.claimants(7, 1).count(), 0);
}
