// SPDX-License-Identifier: Apache-2.0
//! Tests of `stats`.
use super::*;

#[test]
fn quantiles_and_intervals() {
    let mut values: Vec<f64> = (0..=100).rev().map(f64::from).collect();
    assert_eq!((median(&mut values), quantile(&mut values, 0.99), quantile(&mut [], 0.5)), (50.0, 99.0, 0.0));
    let estimate = Estimate::of(values);
    assert!((35.0..50.0).contains(&estimate.low) && (50.0..65.0).contains(&estimate.high), "{estimate:?}");
    assert!(estimate.exceeds(30.0) && !estimate.exceeds(45.0));
    let alone = Estimate::of(vec![2.0]);
    assert_eq!((alone.low, alone.median, alone.high), (2.0, 2.0, 2.0));
}

#[test]
fn numbers_line_up() {
    let rows = [vec!["a".into(), "1".into()], vec!["long".into(), "100".into()]];
    assert_eq!(columns(&rows), "  a       1\n  long  100\n");
}
