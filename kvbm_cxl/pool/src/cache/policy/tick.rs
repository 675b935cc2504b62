// SPDX-License-Identifier: Apache-2.0
//! The cyclic tick of the pool as a count that only rises.

/// Ticks after which the number in the pool comes round: it has three bits, and 0 means "never".
pub const CYCLE_TICKS: u32 = 7;

/// How many ticks this process has seen go by (CACHE.md section 2). Not a clock: a stale or wrong number costs hits only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TickClock {
    now: u32,
}

impl Default for TickClock {
    /// Starts after one full cycle, so that a cell without a tick is older than one with a tick.
    fn default() -> Self {
        TickClock { now: CYCLE_TICKS }
    }
}

impl TickClock {
    /// The clock that says `now`.
    pub fn at(now: u32) -> Self {
        TickClock { now }
    }

    /// The count.
    pub fn now(&self) -> u32 {
        self.now
    }

    /// The number that stands for the present in a pin line, 1 to 7.
    pub fn cyclic(&self) -> u8 {
        (self.now % CYCLE_TICKS) as u8 + 1
    }

    /// Takes over the number that the manager publishes, and gives the count. Any that is not 1 to 7 is not taken over.
    ///
    /// The first one may seem to lie up to six ticks ahead, and so does a step back: all that is known then looks older than it is.
    pub fn observe(&mut self, cyclic: u8) -> u32 {
        if let Some(age_ticks) = self.age_ticks(cyclic) {
            self.now = self.now.saturating_add((CYCLE_TICKS - age_ticks) % CYCLE_TICKS);
        }
        self.now
    }

    /// The count at which a host wrote this number into its pin line; `None` for 0, which means never, and for a number that is no tick.
    ///
    /// A number that its host has not cleared in time looks up to six ticks younger than it is.
    pub fn tick_of(&self, cyclic: u8) -> Option<u32> {
        self.age_ticks(cyclic).map(|age_ticks| self.now.saturating_sub(age_ticks))
    }

    fn age_ticks(&self, cyclic: u8) -> Option<u32> {
        let number = u32::from(cyclic).checked_sub(1).filter(|&number| number < CYCLE_TICKS)?;
        Some((self.now % CYCLE_TICKS + CYCLE_TICKS - number) % CYCLE_TICKS)
    }
}

#[cfg(test)]
mod tests;
