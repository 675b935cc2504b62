// SPDX-License-Identifier: Apache-2.0

use super::next_epoch;

#[test]
fn epochs_rise_and_belong_to_one_seat() {
    for seats in 1..=8 {
        for seat in 0..seats {
            for seen in 0..40 {
                let epoch = next_epoch(seat, seats, seen);
                assert!(epoch > u64::from(seen) && epoch <= u64::from(seen) + seats);
                assert_eq!((epoch - 1) % seats, seat);
            }
        }
    }
}
