// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::lock::FIRST_USER_LOCK;

#[test]
fn every_lock_has_its_own_bit() {
    let mut seen = std::collections::HashSet::new();
    for lock in 0..2 * LOCKS_PER_RECORD as u32 + 5 {
        let (number, byte, mask) = place(lock);
        assert!(byte < RECORD_BYTES && mask.count_ones() == 1 && number < 3);
        assert!(seen.insert((number, byte, mask)));
    }
}

#[test]
fn reserved_locks_and_locks_beyond_the_pool_are_never_given() {
    assert_eq!(lowest_free(0, &[0; RECORD_BYTES], FIRST_USER_LOCK..256), Some(FIRST_USER_LOCK));
    assert_eq!(lowest_free(0, &[0xff; RECORD_BYTES], FIRST_USER_LOCK..256), None);
    let mut data = [0xff; RECORD_BYTES];
    data[31] = 0x7f; // lock 255, the last of a pool of 256
    assert_eq!(lowest_free(0, &data, FIRST_USER_LOCK..256), Some(255));
    assert_eq!(lowest_free(0, &data, FIRST_USER_LOCK..255), None);
    assert_eq!(lowest_free(1, &[0; RECORD_BYTES], FIRST_USER_LOCK..400), Some(LOCKS_PER_RECORD as u32));
    assert_eq!(lowest_free(1, &[0; RECORD_BYTES], FIRST_USER_LOCK..320), None);
}

#[test]
fn numbers_that_cannot_be_allocated_are_refused() {
    let geometry = Geometry::with_len(64 << 20);
    assert!(check_number(0, &geometry).is_err());
    assert!(check_number(FIRST_USER_LOCK, &geometry).is_ok());
    assert!(check_number(geometry.locks, &geometry).is_err());
}
