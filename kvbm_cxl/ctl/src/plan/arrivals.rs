// SPDX-License-Identifier: Apache-2.0
//! When requests come, where that is not as recorded.

use crate::trace::Trace;
use ctl_common::random::Random;

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// As recorded.
    Recorded,
    /// As recorded, but all times divided by this.
    Faster(f64),
    /// At random, so many a second on average, independent of one another.
    Poisson(f64),
}

/// Sets the times of a trace.
pub fn set(trace: &mut Trace, arrivals: Arrivals, seed: u64) {
    match arrivals {
        Arrivals::Recorded => {}
        Arrivals::Faster(times) => trace.requests.iter_mut().for_each(|request| request.arrival_s /= times),
        Arrivals::Poisson(per_s) => {
            let mut random = Random::new(seed);
            let mut now_s = 0.0;
            for request in &mut trace.requests {
                request.arrival_s = now_s;
                now_s += random.exponential(1.0 / per_s);
            }
        }
    }
}
