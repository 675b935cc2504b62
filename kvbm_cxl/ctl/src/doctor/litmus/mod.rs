// SPDX-License-Identifier: Apache-2.0
//! Visibility tests between two sides, on one machine or on two hosts that share a device.
//!
//! On one machine the caches are coherent, so these tests then only show that instructions, mapping and recipes work at all; on two hosts
//! they test what the pool relies on. See `plan::Test` for what each one asks.

mod checks;
mod gpu_side;
mod party;
mod plan;

pub use party::{Party, Role, mix};
pub use plan::{Outcome, Test, Trial};

use cxl_pool::Error;
use cxl_pool::coherence::Instructions;
use serde::Serialize;
use std::time::Instant;

/// How often a trial without any overlap is run.
const TRIES: usize = 4;

/// What one trial showed.
#[derive(Debug, Serialize)]
pub struct TrialReport {
    pub test: Test,
    /// What the steps were made of.
    pub instructions: String,
    /// Whether these are the instructions in force.
    pub is_chosen: bool,
    /// Observations: the leader reports those of both sides, the follower its own.
    #[serde(flatten)]
    pub outcome: Outcome,
    pub took_ms: u64,
}

/// All trials that were run, and why they ended early if they did.
#[derive(Debug, Default, Serialize)]
pub struct Litmus {
    /// In the order in which they ran.
    pub trials: Vec<TrialReport>,
    /// What stopped them.
    pub error: Option<String>,
}

impl Litmus {
    /// Role A: runs `trials` with the holder of role B.
    pub fn lead(party: &mut Party, trials: &[Trial], rounds: u64, chosen: Instructions) -> Litmus {
        let mut litmus = Litmus::default();
        for trial in trials {
            let start = Instant::now();
            let outcome = (|| {
                let mut outcome = Outcome::default();
                // On a busy machine the two sides may not run at the same time, and then the test proves nothing.
                for _ in 0..TRIES {
                    party.announce(trial, rounds)?;
                    outcome.add(&checks::run(party, trial.test)?);
                    outcome.add(&party.take_over()?);
                    if outcome.overlapping > 0 || outcome.violations > 0 {
                        break;
                    }
                }
                Ok::<_, Error>(outcome)
            })();
            match outcome {
                Ok(outcome) => litmus.push(trial, chosen, outcome, start),
                Err(error) => {
                    litmus.error = Some(format!("{}: {error}", trial.test.name()));
                    return litmus;
                }
            }
        }
        litmus.error = party.finish().err().map(|error| error.to_string());
        litmus
    }

    /// Role B: runs what role A names.
    pub fn follow(party: &mut Party, chosen: Instructions) -> Litmus {
        let mut litmus = Litmus::default();
        let ended = (|| {
            while let Some(trial) = party.follow()? {
                let start = Instant::now();
                let outcome = checks::run(party, trial.test)?;
                party.hand_over(&outcome)?;
                litmus.push(&trial, chosen, outcome, start);
            }
            Ok::<_, Error>(())
        })();
        litmus.error = ended.err().map(|error| error.to_string());
        litmus
    }

    /// Adds what a trial showed, to what it showed before where it was run again.
    fn push(&mut self, trial: &Trial, chosen: Instructions, outcome: Outcome, start: Instant) {
        let instructions = trial.instructions.to_string();
        let took_ms = start.elapsed().as_millis() as u64;
        match self.trials.last_mut() {
            Some(last) if last.test == trial.test && last.instructions == instructions => {
                last.outcome.add(&outcome);
                last.took_ms += took_ms;
            }
            _ => {
                let is_chosen = trial.instructions == chosen;
                self.trials.push(TrialReport { test: trial.test, instructions, is_chosen, outcome, took_ms });
            }
        }
    }
}

#[cfg(test)]
mod tests;
