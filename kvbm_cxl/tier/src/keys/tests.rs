// SPDX-License-Identifier: Apache-2.0

use super::*;

fn chain(len: u64, seed: u64) -> Vec<SequenceHash> {
    let mut hashes = vec![SequenceHash::root(seed)];
    for block in 1..len {
        let last = hashes[hashes.len() - 1];
        hashes.push(last.extend(seed.wrapping_mul(block + 1)));
    }
    hashes
}

#[test]
fn parents_are_found_across_the_widths_of_the_position() {
    // Positions of 8 and of 16 bits: fragments of two widths.
    let hashes = chain(300, 0x1234_5678_9abc_def1);
    let mut lineage = Lineage::default();
    lineage.learn(&hashes);
    assert_eq!(lineage.parent_of(&hashes[0]), None);
    for pair in hashes.windows(2) {
        assert_eq!(lineage.parent_of(&pair[1]), key_of(pair[0]), "at {}", pair[1].position());
    }
    let other = chain(3, 77);
    assert_eq!(lineage.parent_of(&other[2]), None, "the parent was never met");
}

#[test]
fn a_key_and_its_hash_are_the_same_at_every_width_of_the_position() {
    for hash in chain(300, 5).into_iter().chain([SequenceHash::new(17, Some(4), 70_000)]) {
        assert_eq!(key_of(hash).and_then(hash_of), Some(hash), "at {}", hash.position());
    }
}

#[test]
fn memory_is_bounded_and_the_oldest_goes_first() {
    let mut lineage = Lineage::default();
    let hashes = chain(REMEMBERED as u64 + 10, 3);
    lineage.learn(&hashes);
    assert_eq!((lineage.known.len(), lineage.order.len()), (REMEMBERED, REMEMBERED));
    assert_eq!(lineage.parent_of(&hashes[1]), None);
    assert!(lineage.parent_of(&hashes[REMEMBERED]).is_some());
}

#[test]
fn a_hash_of_another_encoding_has_no_key() {
    // Mode 3 is not of this encoding. A peer can send any 16 bytes.
    let wire = 3u128 << 126 | 5;
    let foreign: SequenceHash = kvbm_hash_of(wire);
    assert_eq!(foreign.mode(), 3);
    assert_eq!(key_of(foreign), None);
    assert_eq!(hash_of(BlockKey(wire.to_be_bytes())), None);
    assert!(!is_parent(&foreign, &chain(2, 9)[1]));
    let mut lineage = Lineage::default();
    lineage.learn(&[foreign]);
    assert_eq!((lineage.parent_of(&foreign), lineage.known.len()), (None, 0));
}

fn kvbm_hash_of(value: u128) -> SequenceHash {
    // SAFETY: the type is a u128 without invalid values, and of its size.
    unsafe { std::mem::transmute_copy(&value) }
}
