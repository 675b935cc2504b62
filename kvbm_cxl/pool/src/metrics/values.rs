// SPDX-License-Identifier: Apache-2.0
//! Counters, gauges and histograms: an update is a relaxed add or two, on lines of their own, and never allocates.

use super::labels::Label;
use super::text::{Exposition, Kind, Seconds};
use std::fmt::Display;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Something that is counted, as one or several samples of one name.
pub trait Metric {
    /// What Prometheus calls it.
    const KIND: Kind;
    /// Name and values of its label, if it has one.
    const LABEL: Option<(&'static str, &'static [&'static str])> = None;

    /// Writes its samples, each with `labels`.
    fn write(&self, name: &str, labels: &[(&str, &str)], out: &mut Exposition<'_>);
}

/// A number that only rises. On a cache line of its own, so that two threads that count different things do not meet.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// The sum so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Metric for Counter {
    const KIND: Kind = Kind::Counter;

    fn write(&self, name: &str, labels: &[(&str, &str)], out: &mut Exposition<'_>) {
        out.sample(name, "", labels, self.get());
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Adds `count`, which may be negative.
    pub fn add(&self, count: i64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Makes it `value`.
    pub fn set(&self, value: i64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// What it is.
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Metric for Gauge {
    const KIND: Kind = Kind::Gauge;

    fn write(&self, name: &str, labels: &[(&str, &str)], out: &mut Exposition<'_>) {
        out.sample(name, "", labels, self.get());
    }
}

/// What a histogram measures and in which unit Prometheus gets it.
pub trait Scale {
    /// The first bucket holds values up to two to the power of this.
    const FIRST_EXPONENT: u32;

    /// A value as Prometheus gets it.
    fn shown(value: u64) -> impl Display;
}

/// Nanoseconds, shown as seconds; buckets from 256 ns to 17 s.
#[derive(Debug)]
pub struct Time;

impl Scale for Time {
    const FIRST_EXPONENT: u32 = 8;

    fn shown(value: u64) -> impl Display {
        Seconds { ns: value }
    }
}

/// Bytes; buckets from 64 B to 4 GiB.
#[derive(Debug)]
pub struct Bytes;

impl Scale for Bytes {
    const FIRST_EXPONENT: u32 = 6;

    fn shown(value: u64) -> impl Display {
        value
    }
}

/// Buckets of a histogram, the one without an upper bound included.
pub const BUCKETS: usize = 28;

/// How often values were about as large as each power of two.
#[derive(Debug)]
#[repr(align(64))]
pub struct Histogram<S> {
    /// Of this bucket alone: what Prometheus shows is summed up when it is shown, so that its count cannot differ from its last bucket.
    buckets: [AtomicU64; BUCKETS],
    sum: AtomicU64,
    scale: PhantomData<S>,
}

impl<S> Default for Histogram<S> {
    fn default() -> Self {
        Histogram { buckets: Default::default(), sum: AtomicU64::new(0), scale: PhantomData }
    }
}

impl<S: Scale> Histogram<S> {
    /// Counts a value in.
    pub fn observe(&self, value: u64) {
        // The smallest exponent whose power of two is not below the value.
        let exponent = u64::BITS - value.saturating_sub(1).leading_zeros();
        let bucket = (exponent.saturating_sub(S::FIRST_EXPONENT) as usize).min(BUCKETS - 1);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        // After the bucket: a reader that finds a value in the sum finds it among the counted ones as well.
        self.sum.fetch_add(value, Ordering::Release);
    }

    /// Values counted so far.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    /// Their sum.
    pub fn sum(&self) -> u64 {
        self.sum.load(Ordering::Acquire)
    }
}

impl<S: Scale> Metric for Histogram<S> {
    const KIND: Kind = Kind::Histogram;

    fn write(&self, name: &str, labels: &[(&str, &str)], out: &mut Exposition<'_>) {
        // First, so that there is no sum of nothing.
        let (sum, mut count) = (self.sum(), 0);
        for (index, bucket) in self.buckets.iter().enumerate() {
            count += bucket.load(Ordering::Relaxed);
            let shown = match index {
                last if last == BUCKETS - 1 => "+Inf".to_owned(),
                index => S::shown(1 << (S::FIRST_EXPONENT + index as u32)).to_string(),
            };
            out.sample(name, "_bucket", &[labels, &[("le", &shown)]].concat(), count);
        }
        out.sample(name, "_sum", labels, S::shown(sum));
        out.sample(name, "_count", labels, count);
    }
}

/// One metric for each value of a label.
#[derive(Debug)]
pub struct Labelled<L, M, const N: usize> {
    metrics: [M; N],
    label: PhantomData<L>,
}

impl<L: Label, M: Default, const N: usize> Default for Labelled<L, M, N> {
    fn default() -> Self {
        const { assert!(N == L::VALUES.len(), "one metric for each value of the label") };
        Labelled { metrics: std::array::from_fn(|_| M::default()), label: PhantomData }
    }
}

impl<L: Label, M, const N: usize> Labelled<L, M, N> {
    /// The metric of a label's value.
    pub fn of(&self, label: L) -> &M {
        // A label's index is below the number of its values, which is N.
        &self.metrics[label.index()]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &M> {
        self.metrics.iter()
    }
}

impl<L: Label, const N: usize> Labelled<L, Counter, N> {
    /// The sum over all values of the label.
    pub fn total(&self) -> u64 {
        self.metrics.iter().map(Counter::get).sum()
    }
}

impl<L: Label, M: Metric, const N: usize> Metric for Labelled<L, M, N> {
    const KIND: Kind = M::KIND;
    const LABEL: Option<(&'static str, &'static [&'static str])> = Some((L::NAME, L::VALUES));

    fn write(&self, name: &str, labels: &[(&str, &str)], out: &mut Exposition<'_>) {
        for (value, metric) in L::VALUES.iter().zip(&self.metrics) {
            metric.write(name, &[labels, &[(L::NAME, value)]].concat(), out);
        }
    }
}
