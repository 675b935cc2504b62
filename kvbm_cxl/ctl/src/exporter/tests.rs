// SPDX-License-Identifier: Apache-2.0
//! Tests of `exporter`.
use super::*;

#[test]
fn the_age_of_what_is_known_counts_from_the_end_of_the_look() {
    let mut ended = None;
    let (at, found) = refresh(None, Duration::from_secs(600), || {
        let begun = Instant::now();
        while begun.elapsed().is_zero() {}
        ended = Some(Instant::now());
        Ok(7)
    })
    .unwrap();
    assert!(found == 7 && Some(at) >= ended);
    let again = refresh(Some((at, found)), Duration::from_secs(600), || unreachable!("it is not old yet")).unwrap();
    assert_eq!(again, (at, 7));
    assert_eq!(refresh(Some(again), Duration::ZERO, || Ok(8)).unwrap().1, 8);
}
