// SPDX-License-Identifier: Apache-2.0
//! Failure-detector timer: how long a host was silent. It ignores the time in which the observer itself was suspended.
//!
//! An observer that was suspended for seconds (a virtual machine that was paused or moved, a process that got no processor) finds every
//! host's last sign old when it runs again, above all that of hosts suspended with it. So time counts only between looks that are
//! near each other: after a pause most of the patience is left, in which the living are heard again.

use crate::fault::mutant;

/// Looks that a silence has to last for at least: of the time between two of them no more than this part of the patience counts.
const LOOKS: u64 = 4;

/// A silence, in nanoseconds of the listener's own clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailureDetector {
    looked_ns: u64,
    still_ns: u64,
}

impl FailureDetector {
    /// Begins now: there was a sign, or no look was taken yet.
    pub fn since(now_ns: u64) -> FailureDetector {
        FailureDetector { looked_ns: now_ns, still_ns: 0 }
    }

    /// There was no sign up to now either; how long the silence is. `patience_ns` is how long it may be.
    pub fn goes_on(&mut self, now_ns: u64, patience_ns: u64) -> u64 {
        let apart_ns = now_ns.saturating_sub(self.looked_ns);
        let most_ns = if mutant!("pauses_are_silence") { u64::MAX } else { patience_ns / LOOKS };
        self.still_ns = self.still_ns.saturating_add(apart_ns.min(most_ns));
        self.looked_ns = now_ns;
        self.still_ns
    }

    pub fn lasted_ns(&self) -> u64 {
        self.still_ns
    }
}

#[cfg(test)]
mod tests;
