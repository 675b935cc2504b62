// SPDX-License-Identifier: Apache-2.0
//! Lines that do not verify, as one process remembers them (LOCKS.md 12.18).
//!
//! A reader cannot tell a damaged line from one whose writer is stopped in the middle of it. So the first calls that meet such a line wait
//! for it, all of them together for `damage_ms`. After that the line counts as damaged: calls that need it fail at
//! once, until the host's service finds the line whole again.

use super::Inner;
use crate::background::held;
use crate::error::{Error, Result};
use crate::line::if_whole;
use crate::media::{
    Binding, Claim, DeathLine, Descriptor, FenceLine, GrantLine, Identity, Intent, MediaLine, Record, Region, RequestLine, Seat, Summary,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Lines that a process remembers; when it meets more, it forgets the oldest, and waits once more for that one.
const REMEMBERED: usize = 64;
/// A line that no call has met for so many patiences is forgotten: the process may run no service that looks at it.
const FORGOTTEN_AFTER: u64 = 64;

struct Met {
    region: Region,
    index: u64,
    first_ns: u64,
    last_ns: u64,
}

#[derive(Default)]
pub(crate) struct Damage {
    met: Mutex<Vec<Met>>,
    failed_calls: AtomicU64,
    healed_lines: AtomicU64,
}

/// Damaged lines of the lock, fence and membership layer, as this process counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DamageCounts {
    /// Calls that failed because they need a line that does not verify.
    pub failed_calls: u64,
    /// Lines of its own that this process found damaged and wrote again.
    pub healed_lines: u64,
    /// Damaged lines that this process remembers now.
    pub remembered_lines: u64,
}

impl Damage {
    /// Notes that a line did not verify at `now_ns`; true once it was waited for long enough.
    fn is_given_up(&self, region: Region, index: u64, now_ns: u64, patience_ns: u64) -> bool {
        let mut met = held(&self.met);
        if let Some(line) = met.iter_mut().find(|line| (line.region, line.index) == (region, index)) {
            let is_old = now_ns.saturating_sub(line.last_ns) > patience_ns.saturating_mul(FORGOTTEN_AFTER);
            line.last_ns = now_ns;
            if is_old {
                line.first_ns = now_ns;
            }
            return now_ns.saturating_sub(line.first_ns) >= patience_ns;
        }
        if met.len() >= REMEMBERED {
            met.remove(0);
        }
        met.push(Met { region, index, first_ns: now_ns, last_ns: now_ns });
        false
    }

    fn forget(&self, region: Region, index: u64) {
        held(&self.met).retain(|line| (line.region, line.index) != (region, index));
    }

    /// Counts a line that its owner wrote again.
    pub fn healed(&self) {
        self.healed_lines.fetch_add(1, Ordering::Relaxed);
    }

    pub fn counts(&self) -> DamageCounts {
        DamageCounts {
            failed_calls: self.failed_calls.load(Ordering::Relaxed),
            healed_lines: self.healed_lines.load(Ordering::Relaxed),
            remembered_lines: held(&self.met).len() as u64,
        }
    }
}

impl Inner {
    /// Decides what a call does that met `error`: `Ok` = it may look again, the line may only have a writer that is stopped in the middle
    /// of it. Any error but [`Error::BadLine`] comes back as it is.
    pub fn wait_for_whole(&self, error: Error, patience_ms: u64) -> Result<Error> {
        let Error::BadLine { region: name, index, .. } = error else { return Err(error) };
        let Some(region) = Region::of_name(name) else { return Err(error) };
        if !self.damage.is_given_up(region, index, self.platform.now_ns(), patience_ms * 1_000_000) {
            return Ok(error);
        }
        self.damage.failed_calls.fetch_add(1, Ordering::Relaxed);
        Err(error)
    }

    /// Looks at the remembered lines again and forgets those that verify.
    pub fn look_at_damage(&self) -> Result<()> {
        let known: Vec<(Region, u64)> = held(&self.damage.met).iter().map(|line| (line.region, line.index)).collect();
        for (region, index) in known {
            if self.is_whole(region, index)? {
                self.damage.forget(region, index);
            }
        }
        Ok(())
    }

    fn is_whole(&self, region: Region, index: u64) -> Result<bool> {
        match region {
            Region::Seat => self.is_whole_as::<Seat>(index),
            Region::Grant => self.is_whole_as::<GrantLine>(index),
            Region::Binding => self.is_whole_as::<Binding>(index),
            Region::Fence => self.is_whole_as::<FenceLine>(index),
            Region::Death => self.is_whole_as::<DeathLine>(index),
            Region::Identity => self.is_whole_as::<Identity>(index),
            Region::Summary => self.is_whole_as::<Summary>(index),
            Region::Request => self.is_whole_as::<RequestLine>(index),
            Region::Intent => self.is_whole_as::<Intent>(index),
            Region::Record => self.is_whole_as::<Record>(index),
            Region::Descriptor => self.is_whole_as::<Descriptor>(index),
            Region::Claim => self.is_whole_as::<Claim>(index),
            // No call waits for lines of other regions through here. One that did would wait for ever if its line were forgotten at once.
            _ => Ok(false),
        }
    }

    fn is_whole_as<T: MediaLine>(&self, index: u64) -> Result<bool> {
        Ok(if_whole(self.lines.fetch::<T>(index))?.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE_NS: u64 = 1_000;

    #[test]
    fn all_calls_together_wait_once() {
        let damage = Damage::default();
        let given_up = |now_ns| damage.is_given_up(Region::Fence, 3, now_ns, PATIENCE_NS);
        assert_eq!([10, 600, 1_009, 1_010, 1_011, 5_000].map(given_up), [false, false, false, true, true, true]);
        assert!(!damage.is_given_up(Region::Fence, 4, 5_000, PATIENCE_NS));
        assert_eq!(damage.counts().remembered_lines, 2);
        damage.forget(Region::Fence, 3);
        assert!(!given_up(5_001));
        // A line that no call met for long is waited for once more.
        assert!(given_up(6_001) && !given_up(6_002 + FORGOTTEN_AFTER * PATIENCE_NS));
    }

    #[test]
    fn the_memory_is_bounded() {
        let damage = Damage::default();
        (0..1_000).for_each(|index| assert!(!damage.is_given_up(Region::Grant, index, index, PATIENCE_NS)));
        assert_eq!(damage.counts().remembered_lines, REMEMBERED as u64);
    }
}
