// SPDX-License-Identifier: Apache-2.0
//! Repairing what a check found.

use super::check;
use super::report::{Remedy, Report, Write};
use crate::error::{Error, Result};
use crate::line::Lines;
use crate::platform::MachineId;
use std::collections::HashSet;

/// Passes of a repair: some lines can only be repaired once those that they depend on are, and a report is bounded.
const MAX_PASSES: usize = 64;

/// What a repair did.
#[derive(Clone, Debug)]
pub struct Repaired {
    /// What the first check found.
    pub before: Report,
    /// The findings that remain.
    pub after: Report,
    /// Lines written.
    pub lines_written: u64,
}

/// Applies every remedy that is safe, and with `accept_loss` those that may lose something, until nothing more can be done.
///
/// The caller has the pool to itself: every host is stopped, and stays so.
///
/// # Errors
/// Those of [`check`]; [`Error::BadLine`] when a line does not come back as it was written.
pub fn repair(lines: &Lines, seats: &[MachineId], accept_loss: bool) -> Result<Repaired> {
    let before = check(lines, seats)?;
    let (mut report, mut lines_written) = (before.clone(), 0);
    let mut written = HashSet::new();
    for _ in 0..MAX_PASSES {
        // Safe repairs come first: with them in place, less may have to be given up.
        let safe = apply(lines, &report, false, &mut written)?;
        let lost = if safe == 0 && accept_loss { apply(lines, &report, true, &mut written)? } else { 0 };
        if safe + lost == 0 {
            break;
        }
        lines_written += safe + lost;
        report = check(lines, seats)?;
    }
    Ok(Repaired { before, after: report, lines_written })
}

fn apply(lines: &Lines, report: &Report, with_loss: bool, written: &mut HashSet<Write>) -> Result<u64> {
    let mut count = 0;
    for finding in &report.findings {
        let writes = match &finding.remedy {
            Remedy::Safe { writes, .. } if !with_loss => writes,
            Remedy::Loss { writes, .. } if with_loss => writes,
            _ => continue,
        };
        for write in writes {
            // Nothing is written twice in the same way: a remedy that does not help must not be tried for ever.
            if !written.insert(*write) {
                continue;
            }
            let offset = lines.layout().line_offset(write.region, write.index)?;
            lines.memory().write_line(offset, &write.line)?;
            lines.fence_published();
            if lines.fetch_raw(offset)? != write.line {
                let reason = "the device did not keep what the repair wrote";
                return Err(Error::BadLine { region: write.region.name(), index: write.index, reason });
            }
            count += 1;
        }
    }
    Ok(count)
}
