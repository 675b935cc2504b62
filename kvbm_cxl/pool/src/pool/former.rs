// SPDX-License-Identifier: Apache-2.0
//! The hosts of a pool that is to be formatted over: whether any of them is at work, and whether all have stopped (LOCKS.md 12.16).

use crate::error::Result;
use crate::failure_detector::FailureDetector;
use crate::line::{Lines, if_whole};
use crate::media::{Identity, Summary};

/// The hosts of the format before, watched by the process that formats.
///
/// A host has stopped when its identity says that it left, or when its heartbeat stood still for the patience: it ended, or was paused.
/// Lines that a paused one writes when it resumes do not verify in the new format, whose checksums begin elsewhere.
pub struct FormerHosts {
    lines: Lines,
    patience_ns: u64,
    slots: Vec<Watched>,
}

#[derive(Clone, Copy)]
struct Watched {
    /// Incarnation and heartbeat; none while the line does not verify, which then counts as one that stands still.
    beat: Option<(u32, u64)>,
    silence: FailureDetector,
    is_live: bool,
    has_moved: bool,
}

impl FormerHosts {
    /// Begins to watch the hosts of the pool that `lines` are of, with a clock that says `now_ns`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn new(lines: Lines, patience_ns: u64, now_ns: u64) -> Result<FormerHosts> {
        let unknown = Watched { beat: None, silence: FailureDetector::since(now_ns), is_live: false, has_moved: false };
        let slots = vec![unknown; lines.layout().geometry().slots as usize];
        let mut hosts = FormerHosts { lines, patience_ns, slots };
        hosts.look(now_ns)?;
        // The first look counts every beat as new.
        hosts.slots.iter_mut().for_each(|slot| slot.has_moved = false);
        Ok(hosts)
    }

    /// Looks again; true when every host has stopped. To be called several times within the patience.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn look(&mut self, now_ns: u64) -> Result<bool> {
        let per_slot = self.lines.layout().geometry().summary_lines();
        for (slot, watched) in self.slots.iter_mut().enumerate() {
            let identity = if_whole(self.lines.fetch::<Identity>(slot as u64))?;
            let has_left = identity.is_some_and(|found| found.state != Identity::LIVE);
            let found = if_whole(self.lines.fetch::<Summary>(slot as u64 * per_slot))?;
            let beat = found.map(|summary| (summary.incarnation, summary.heartbeat));
            let moves = beat.is_some() && beat != watched.beat;
            if moves {
                (watched.beat, watched.silence, watched.has_moved) = (beat, FailureDetector::since(now_ns), true);
            }
            let is_silent = !moves && watched.silence.goes_on(now_ns, self.patience_ns) >= self.patience_ns;
            watched.is_live = !has_left && !is_silent;
        }
        Ok(self.slots.iter().all(|slot| !slot.is_live))
    }

    /// Slots of hosts that have not stopped.
    pub fn live(&self) -> Vec<u16> {
        self.which(|slot| slot.is_live)
    }

    /// Slots of hosts whose heartbeat moved while it was watched, and that have not stopped.
    pub fn at_work(&self) -> Vec<u16> {
        self.which(|slot| slot.is_live && slot.has_moved)
    }

    fn which(&self, is_meant: impl Fn(&Watched) -> bool) -> Vec<u16> {
        self.slots.iter().enumerate().filter(|(_, slot)| is_meant(slot)).map(|(slot, _)| slot as u16).collect()
    }
}
