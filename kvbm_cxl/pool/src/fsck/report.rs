// SPDX-License-Identifier: Apache-2.0
//! What a check found.

use crate::line::Line;
use crate::media::Region;

/// Findings that a report holds; damage beyond that is counted and found again once the first part is repaired.
pub const MAX_FINDINGS: usize = 4096;
/// Line writes that a report holds; a repair checks again after each round, so the rest comes then.
const MAX_WRITES: usize = 1 << 18;

crate::named::named_enum! {
    /// How bad a finding is.
    Severity {
        /// Normal in a pool with this history: the next holder, manager or join deals with it.
        Note = "note",
        /// Nothing wrong will be read because of it, but space, time or an operator's statement is lost.
        Warning = "warning",
        /// A rule of the format or of the protocols does not hold.
        Error = "error",
    }
}

/// Where a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingPlace {
    /// The superblock copy of a device, by index.
    Superblock(usize),
    /// Consecutive lines of a region.
    Lines {
        /// The region.
        region: Region,
        /// First line.
        first: u64,
        /// Number of lines.
        count: u64,
    },
}

/// One line as a repair writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Write {
    /// The region.
    pub region: Region,
    /// Line number.
    pub index: u64,
    /// The whole line, sealed.
    pub line: Line,
}

/// What a repair would do about a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Nothing: the text says who or what deals with it.
    None(&'static str),
    /// Writes lines that follow from what survived; nothing is lost that counts.
    Safe {
        /// What it does.
        what: &'static str,
        /// The lines.
        writes: Vec<Write>,
    },
    /// Writes lines that may lose something; only when the operator accepts that.
    Loss {
        /// What it does, and what may be lost.
        what: &'static str,
        /// The lines.
        writes: Vec<Write>,
    },
}

impl Remedy {
    /// What it does, or why nothing.
    pub fn what(&self) -> &'static str {
        match self {
            Remedy::None(what) | Remedy::Safe { what, .. } | Remedy::Loss { what, .. } => what,
        }
    }

    /// The lines it writes.
    pub fn writes(&self) -> &[Write] {
        match self {
            Remedy::None(_) => &[],
            Remedy::Safe { writes, .. } | Remedy::Loss { writes, .. } => writes,
        }
    }

    fn writes_mut(&mut self) -> Option<&mut Vec<Write>> {
        match self {
            Remedy::None(_) => None,
            Remedy::Safe { writes, .. } | Remedy::Loss { writes, .. } => Some(writes),
        }
    }

    fn is_like(&self, other: &Remedy) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other) && self.what() == other.what()
    }
}

/// One thing that a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Stable name of the rule, such as `line.crc`.
    pub rule: &'static str,
    /// Where.
    pub place: FindingPlace,
    /// What it means.
    pub meaning: String,
    /// What a repair would do.
    pub remedy: Remedy,
}

/// The result of a check.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The findings, in the order of the regions checked.
    pub findings: Vec<Finding>,
    /// Findings beyond [`MAX_FINDINGS`], counted by severity only.
    pub omitted: [u64; 3],
    /// Metadata lines looked at.
    pub lines_checked: u64,
    /// Line writes held in the findings.
    writes_held: usize,
}

impl Report {
    /// Number of findings of a severity, those not listed included. Neighbouring lines with one finding count once.
    pub fn count(&self, severity: Severity) -> u64 {
        self.findings.iter().filter(|finding| finding.severity == severity).count() as u64 + self.omitted[severity as usize]
    }

    /// True when nothing worse than a note was found.
    pub fn is_clean(&self) -> bool {
        self.count(Severity::Warning) + self.count(Severity::Error) == 0
    }

    pub(super) fn over(lines_checked: u64) -> Self {
        Report { lines_checked, ..Report::default() }
    }

    /// Adds a finding, or widens the last one when it is the same thing about the next line.
    pub(super) fn add(&mut self, mut finding: Finding) {
        if let Some(writes) = finding.remedy.writes_mut() {
            writes.truncate(MAX_WRITES - self.writes_held);
            self.writes_held += writes.len();
        }
        if let (Some(last), FindingPlace::Lines { region, first, count }) = (self.findings.last_mut(), finding.place)
            && let FindingPlace::Lines { region: last_region, first: last_first, count: last_count } = &mut last.place
            && (*last_region, *last_first + *last_count) == (region, first)
            && (last.severity, last.rule, &last.meaning) == (finding.severity, finding.rule, &finding.meaning)
            && last.remedy.is_like(&finding.remedy)
        {
            *last_count += count;
            if let (Some(writes), Some(more)) = (last.remedy.writes_mut(), finding.remedy.writes_mut()) {
                writes.append(more);
            }
            return;
        }
        if self.findings.len() < MAX_FINDINGS {
            self.findings.push(finding);
        } else {
            self.writes_held -= finding.remedy.writes().len();
            self.omitted[finding.severity as usize] += 1;
        }
    }
}

#[cfg(test)]
mod tests;
