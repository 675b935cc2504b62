// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn who_looks_often_sees_all_of_it() {
    let mut silence = FailureDetector::since(1_000);
    for now_ns in (1_000..=101_000).step_by(500) {
        assert_eq!(silence.goes_on(now_ns, 100_000), now_ns - 1_000);
    }
}

#[test]
fn a_pause_of_the_listener_is_not_the_others_silence() {
    let mut silence = FailureDetector::since(0);
    assert_eq!(silence.goes_on(1_000_000, 1_000), 250);
    assert_eq!(silence.goes_on(1_000_100, 1_000), 350);
    assert_eq!(silence.still_ns, 350);
    // Who is silent all the same is given up in the end, however seldom the observer looks.
    let looks = (2_000_000u64..).step_by(1_000_000).take_while(|now_ns| silence.goes_on(*now_ns, 1_000) < 1_000).count();
    assert_eq!(looks, 2);
}

#[test]
fn a_clock_that_stands_still_adds_nothing() {
    let mut silence = FailureDetector::since(10);
    assert_eq!(silence.goes_on(10, 1_000), 0);
    assert_eq!(silence.goes_on(5, 1_000), 0);
    assert_eq!(FailureDetector { looked_ns: 0, still_ns: u64::MAX }.goes_on(u64::MAX, u64::MAX), u64::MAX);
}
