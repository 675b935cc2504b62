// SPDX-License-Identifier: Apache-2.0
//! Why there is no plan: the error, its file and line, and the remedy.

use crate::output::{Exit, Failure};
use std::fmt;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of a file, the first one is 1.
    Line {
        file: String,
        line: usize,
    },
    File(String),
    /// An option of the command line, or a preset.
    Option(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line { file, line } => write!(f, "{file}:{line}"),
            Origin::File(file) => f.write_str(file),
            Origin::Option(option) => f.write_str(option),
        }
    }
}

/// Why there is no plan.
#[derive(Debug)]
pub enum PlanError {
    /// A file cannot be read or written.
    Unusable {
        file: String,
        source: std::io::Error,
    },
    /// A file or an option does not have the required form.
    Malformed {
        origin: Origin,
        what: String,
        remedy: String,
    },
    /// A number is out of its range.
    OutOfRange {
        origin: Origin,
        name: String,
        given: String,
        least: f64,
        most: f64,
        unit: &'static str,
    },
    /// A name is not known.
    Unknown {
        origin: Origin,
        what: &'static str,
        given: String,
        known: Vec<&'static str>,
    },
    Empty {
        file: String,
    },
    Missing {
        name: &'static str,
        meaning: &'static str,
    },
    /// Counts do not add up: a mistake of this program.
    Unsound(String),
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::Unusable { file, source } => write!(f, "{file}: {source}"),
            PlanError::Malformed { origin, what, remedy } => write!(f, "{origin}: {what}: {remedy}"),
            PlanError::OutOfRange { origin, name, given, least, most, unit } => {
                write!(f, "{origin}: {name} is {given}: give {unit} from {least} to {most}")
            }
            PlanError::Unknown { origin, what, given, known } => {
                write!(f, "{origin}: {what} {given:?} is not known: choose one of {}", known.join(", "))
            }
            PlanError::Empty { file } => {
                write!(f, "{file}: no request in it: give a trace with one JSON object a line (timestamp, input_length, hash_ids)")
            }
            PlanError::Missing { name, meaning } => {
                write!(f, "the rack has no {name} ({meaning}): give it with --set {name}=NUMBER, in a file for --rack, or with --measured")
            }
            PlanError::Unsound(what) => write!(f, "{what}: the figures mean nothing, report this as a mistake of cxl-plan"),
        }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        let exit = match &error {
            PlanError::Unusable { .. } | PlanError::Unsound(_) => Exit::Failed,
            _ => Exit::Usage,
        };
        Failure::new(exit, error.to_string())
    }
}

impl From<cxl_pool::Error> for PlanError {
    fn from(error: cxl_pool::Error) -> Self {
        PlanError::Unsound(error.to_string())
    }
}

/// A plan, or why there is none.
pub type Planned<T> = Result<T, PlanError>;
