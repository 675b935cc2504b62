// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn the_count_follows_the_number_round_and_round() {
    let mut clock = TickClock::default();
    let start = clock.now();
    for step in 1..=30u32 {
        let cyclic = ((start + step) % 7) as u8 + 1;
        assert_eq!(clock.observe(cyclic), start + step);
        assert_eq!((clock.now(), clock.cyclic()), (start + step, cyclic));
        assert_eq!(clock.observe(cyclic), start + step, "the same number again is no new tick");
    }
    assert_eq!(clock.observe((clock.now() % 7 + 3) as u8 % 7 + 1), start + 33, "missed ones are counted");
    for none in [0, 8, 255] {
        assert_eq!((clock.observe(none), clock.tick_of(none)), (start + 33, None));
    }
}

#[test]
fn numbers_of_the_last_cycle_have_their_count() {
    let mut clock = TickClock::default();
    let mut written = Vec::new();
    for _ in 0..20 {
        written.push((clock.now(), clock.cyclic()));
        for &(tick, cyclic) in written.iter().rev().take(7) {
            assert_eq!(clock.tick_of(cyclic), Some(tick));
        }
        clock.observe(clock.cyclic() % 7 + 1);
    }
}
