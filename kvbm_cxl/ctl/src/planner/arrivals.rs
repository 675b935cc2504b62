// SPDX-License-Identifier: Apache-2.0
//! When requests come, where that is not as recorded.

use crate::planner::error::{Origin, PlanError, Planned};
use crate::planner::keys::Rack;
use crate::planner::trace::Trace;
use crate::random::Random;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    Recorded,
    /// As recorded, but all times divided by this.
    Faster(f64),
    /// At random, so many a second on average, independent of one another.
    Poisson(f64),
}

impl Arrivals {
    /// So fast that this part of what the instances can compute is asked for if nothing is found.
    ///
    /// # Errors
    /// [`PlanError::Malformed`] where all requests come at one time.
    pub fn for_load(trace: &Trace, rack: &Rack, load: f64) -> Planned<Arrivals> {
        if trace.span_s() <= 0.0 {
            return Err(PlanError::Malformed {
                origin: Origin::File(trace.file.clone()),
                what: "all requests come at one time, so --load cannot set how fast they come".into(),
                remedy: "give --poisson".into(),
            });
        }
        let wanted_s = trace.asked_tokens() as f64 / (rack.tokens_per_s * rack.instances * load);
        Ok(Arrivals::Faster(trace.span_s() / wanted_s))
    }
}

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
