// SPDX-License-Identifier: Apache-2.0
//! Whether hosts use the pool: heartbeats and manager beats that move while one looks.

use super::view::scan;
use crate::error::Result;
use crate::line::Lines;
use crate::media::{Seat, Summary};
use std::time::{Duration, Instant};

/// Pause between two looks.
const STEP: Duration = Duration::from_millis(20);

/// Who moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Slots whose heartbeat moved.
    pub slots: Vec<u16>,
    /// Seats whose manager beat moved.
    pub seats: Vec<u16>,
}

impl Activity {
    /// True when nothing moved. A host that is only paused does not move either.
    pub fn is_quiet(&self) -> bool {
        self.slots.is_empty() && self.seats.is_empty()
    }
}

/// Looks for `time` at every heartbeat and manager beat; ends early once something moved, unless `all`.
pub fn watch(lines: &Lines, time: Duration, all: bool) -> Result<Activity> {
    let deadline = Instant::now() + time;
    let first = beats(lines)?;
    let mut activity = Activity::default();
    loop {
        std::thread::sleep(STEP.min(deadline.saturating_duration_since(Instant::now())));
        let now = beats(lines)?;
        let moved = |then: &[Option<(u32, u64)>], now: &[Option<(u32, u64)>]| -> Vec<u16> {
            // A beat that cannot be read does not count as moving, nor as standing still for ever: it is a finding of its own.
            let pairs = then.iter().zip(now).enumerate();
            pairs.filter(|(_, (then, now))| then.is_some() && now.is_some() && then != now).map(|(index, _)| index as u16).collect()
        };
        merge(&mut activity.slots, moved(&first.0, &now.0));
        merge(&mut activity.seats, moved(&first.1, &now.1));
        if Instant::now() >= deadline || (!all && !activity.is_quiet()) {
            return Ok(activity);
        }
    }
}

fn merge(known: &mut Vec<u16>, more: Vec<u16>) {
    known.extend(more);
    known.sort_unstable();
    known.dedup();
}

/// Incarnation and heartbeat of every slot, epoch and beat of every seat.
type Beats = (Vec<Option<(u32, u64)>>, Vec<Option<(u32, u64)>>);

fn beats(lines: &Lines) -> Result<Beats> {
    let geometry = lines.layout().geometry();
    let (mut slots, mut seats) = (Vec::new(), Vec::new());
    for slot in 0..u64::from(geometry.slots) {
        let line = slot * geometry.summary_lines();
        scan::<Summary>(lines, line..line + 1, |_, summary| slots.push(summary.ok().map(|found| (found.incarnation, found.heartbeat))))?;
    }
    scan::<Seat>(lines, 0..geometry.all_seats(), |_, seat| seats.push(seat.ok().map(|found| (found.epoch, found.beat))))?;
    Ok((slots, seats))
}
