// SPDX-License-Identifier: Apache-2.0
//! Random numbers that are the same for a seed on every machine, and the distributions that workloads are made of.

/// Splitmix64.
pub struct Random(u64);

/// Spreads a word over all its bits.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Random(mix(seed ^ 0x6a09_e667_f3bc_c908))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to 1, 0 and 1 excluded.
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// A whole number below `limit`; 0 where that is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        ((self.unit() * limit as f64) as usize).min(limit.saturating_sub(1))
    }

    /// Time to the next event, where events come at random, one in `mean` on average.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Standard normal.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Number of tries up to the first success, where successes come once in `mean` tries.
    pub fn tries(&mut self, mean: f64) -> usize {
        (self.unit().ln() / (1.0 - 1.0 / mean).ln()).ceil() as usize
    }
}

/// A lognormal distribution by its own mean and standard deviation.
#[derive(Clone, Copy)]
pub struct LogNormal {
    mu: f64,
    sigma: f64,
}

impl LogNormal {
    /// With this mean and standard deviation, of the values and not of their logarithms.
    pub fn new(mean: f64, deviation: f64) -> Self {
        let variance = (1.0 + (deviation / mean).powi(2)).ln();
        LogNormal { mu: mean.ln() - variance / 2.0, sigma: variance.sqrt() }
    }

    /// One value.
    pub fn draw(&self, random: &mut Random) -> f64 {
        (self.mu + self.sigma * random.normal()).exp()
    }
}

/// Which of `count` things is asked for, the one of rank r in proportion to r^-exponent.
pub struct Zipf {
    /// The part of the requests that goes to this rank or a lower one.
    up_to: Vec<f64>,
}

impl Zipf {
    /// Over `count` things.
    pub fn new(count: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weights = (1..=count).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        let mut up_to: Vec<f64> = weights.collect();
        up_to.iter_mut().for_each(|part| *part /= sum);
        Zipf { up_to }
    }

    /// An index, 0 for the one asked for most.
    pub fn draw(&self, random: &mut Random) -> usize {
        self.at(random.unit())
    }

    fn at(&self, part: f64) -> usize {
        self.up_to.partition_point(|&end| end < part).min(self.up_to.len().saturating_sub(1))
    }

    /// The part of the requests that each one gets.
    pub fn shares(&self) -> impl Iterator<Item = f64> {
        let before = std::iter::once(&0.0).chain(&self.up_to);
        before.zip(&self.up_to).map(|(low, high)| high - low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f64]) -> (f64, f64) {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        (mean, (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt())
    }

    #[test]
    fn lognormal_has_the_mean_and_deviation_asked_for() {
        let mut random = Random::new(3);
        let values: Vec<f64> = (0..400_000).map(|_| LogNormal::new(1073.0, 1549.0).draw(&mut random)).collect();
        let (mean, deviation) = moments(&values);
        assert!((mean / 1073.0 - 1.0).abs() < 0.02 && (deviation / 1549.0 - 1.0).abs() < 0.06, "{mean} ({deviation})");
    }

    #[test]
    fn zipf_asks_by_rank() {
        let (zipf, mut random, mut counts) = (Zipf::new(4, 1.0), Random::new(5), [0.0f64; 4]);
        (0..100_000).for_each(|_| counts[zipf.draw(&mut random)] += 1.0);
        let expected = [1.0, 0.5, 1.0 / 3.0, 0.25].map(|weight| weight / (25.0 / 12.0) * 1e5);
        assert!(counts.iter().zip(expected).all(|(count, expected)| (count / expected - 1.0).abs() < 0.03), "{counts:?}");
        assert!(zipf.shares().zip(expected).all(|(share, expected)| (share * 1e5 - expected).abs() < 1e-6));
        assert_eq!((zipf.at(0.0), zipf.at(1.0)), (0, 3));
    }

    #[test]
    fn times_between_events_have_their_mean_and_deviation() {
        let mut random = Random::new(11);
        let values: Vec<f64> = (0..200_000).map(|_| random.exponential(0.25)).collect();
        let (mean, deviation) = moments(&values);
        assert!((mean / 0.25 - 1.0).abs() < 0.02 && (deviation / 0.25 - 1.0).abs() < 0.02, "{mean} ({deviation})");
    }

    #[test]
    fn tries_have_their_mean() {
        let mut random = Random::new(1);
        let tries: Vec<f64> = (0..100_000).map(|_| random.tries(6.0) as f64).collect();
        assert!((moments(&tries).0 / 6.0 - 1.0).abs() < 0.02 && tries.iter().all(|&tries| tries >= 1.0));
        assert!((0..1000).all(|_| random.below(3) < 3) && random.below(0) == 0);
    }
}
