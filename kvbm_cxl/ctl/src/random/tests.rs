// SPDX-License-Identifier: Apache-2.0
//! Tests of `random`.
use super::*;

fn moments(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (mean, (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt())
}

#[test]
fn times_between_events_have_their_mean_and_deviation() {
    let mut random = Random::new(11);
    let values: Vec<f64> = (0..200_000).map(|_| random.exponential(0.25)).collect();
    let (mean, deviation) = moments(&values);
    assert!((mean / 0.25 - 1.0).abs() < 0.02 && (deviation / 0.25 - 1.0).abs() < 0.02, "{mean} ({deviation})");
}

#[test]
fn whole_numbers_are_below_their_limit() {
    let mut random = Random::new(1);
    assert!((0..1000).all(|_| random.below(3) < 3) && random.below(0) == 0);
}
