// SPDX-License-Identifier: Apache-2.0
//! Checking and repairing a pool's metadata: what `cxlctl fsck` and `cxlctl inspect` do, as a library.
//!
//! Anything may stand in the memory that is checked: every line is fetched by value, verified, and every number in it is checked before it
//! is used; all work is bounded by the layout. A pool whose hosts followed the protocols has no errors, whatever happened to them; a trace
//! of a dead host, which the next holder repairs in passing, is a [`Severity::Note`].
//!
//! A check sees a running pool at different moments in different lines. [`check_twice`] keeps what both of two passes found; a repair
//! wants the pool to itself ([`watch`]).

mod cells;
mod chunks;
mod damage;
mod describe;
mod locks;
mod online;
mod places;
mod records;
mod repair;
mod report;
mod seats;
mod slots;
mod superblocks;
mod survey;
mod view;
mod watch;

pub use describe::{Description, Value, describe, line_name, line_owner};
pub use online::{DamagedLine, Healing, damaged_online};
pub use repair::{Repaired, repair};
pub use report::{Finding, FindingPlace, MAX_FINDINGS, Remedy, Report, Severity, Write};
pub use superblocks::check_superblocks;
pub use survey::{LockInfo, ObjectInfo, SeatInfo, SlotInfo, SlotState, Survey, survey};
pub use watch::{Activity, watch};

use crate::error::Result;
use crate::line::Lines;
use crate::platform::MachineId;
use view::View;

#[cfg(test)]
mod tests;

/// Checks every line of every region, and what they say together. `seats` is the superblock's seat table.
///
/// # Errors
/// Those of the memory, except where only single lines fail, which are findings.
pub fn check(lines: &Lines, seats: &[MachineId]) -> Result<Report> {
    let mut report = Report::over(lines.layout().spans().iter().map(|span| span.lines).sum());
    let view = View::load(lines, seats)?;
    damage::check(&view, &mut report);
    seats::check(&view, &mut report);
    places::check(&view, &mut report);
    slots::check(&view, &mut report)?;
    locks::check(&view, &mut report);
    records::check(&view, &mut report);
    chunks::check(&view, &mut report)?;
    cells::check(&view, &mut report)?;
    Ok(report)
}

/// Checks a pool that hosts are using: what two passes agree on.
pub fn check_twice(lines: &Lines, seats: &[MachineId]) -> Result<Report> {
    let before = check(lines, seats)?;
    if before.findings.is_empty() {
        return Ok(before);
    }
    let mut report = check(lines, seats)?;
    report.findings.retain(|found| before.findings.iter().any(|known| (known.rule, known.place) == (found.rule, found.place)));
    Ok(report)
}
