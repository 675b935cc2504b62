// SPDX-License-Identifier: Apache-2.0
//! What a call without the interpreter's lock says of its failure, and the exceptions of `kvbm_cxl.errors` that are made of it.

use cxl_pool::{Error, PartitionProblem};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Why a call failed.
#[derive(Debug)]
pub enum Failure {
    Pool(Error),
    /// A block that was not published: which bound, and the library's words.
    Refused(&'static str, String),
    /// A reason of this layer: class of the exception, its kind, and what to do.
    Own(&'static str, &'static str, String),
}

/// Result of everything below the functions that Python calls.
pub type Outcome<T> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Pool(error)
    }
}

impl Failure {
    /// The handle was closed.
    pub fn closed(what: &str) -> Self {
        Failure::Own("ClosedError", "closed", format!("{what} is closed"))
    }

    /// The handle is of the parent process.
    pub fn forked(what: &str) -> Self {
        let advice = "open the pool again in this process, or start processes with method \"spawn\"";
        Failure::Own("ForkedError", "forked", format!("{what} was opened by the parent of this process: {advice}"))
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Failure::Own("InvalidError", "invalid", message.into())
    }

    /// An error that others get as well.
    pub fn of(error: &Error) -> Self {
        let (class, kind) = names(error);
        Failure::Own(class, kind, error.to_string())
    }

    fn parts(self) -> (&'static str, &'static str, String) {
        match self {
            Failure::Own(class, kind, message) => (class, kind, message),
            Failure::Refused(kind, message) => ("FullError", kind, message),
            Failure::Pool(error) => Failure::of(&error).parts(),
        }
    }
}

fn names(error: &Error) -> (&'static str, &'static str) {
    match error {
        Error::DeviceLost { .. } => ("DeviceError", "device_lost"),
        Error::Poisoned { .. } => ("DeviceError", "poisoned"),
        Error::Gpu { .. } => ("DeviceError", "gpu"),
        Error::OutOfRange { .. } => ("InvalidError", "out_of_range"),
        Error::BadLine { .. } => ("DamagedError", "bad_line"),
        Error::NotAPool { .. } => ("NotAPoolError", "not_a_pool"),
        Error::HasContent { .. } => ("NotAPoolError", "has_content"),
        Error::Invalid(_) => ("InvalidError", "invalid"),
        Error::Partition { problem, .. } => match problem {
            PartitionProblem::Overlaps { .. } => ("ExistsError", "overlap"),
            PartitionProblem::Unaligned { .. } => ("InvalidError", "unaligned"),
            PartitionProblem::BehindEnd { .. } => ("InvalidError", "behind_end"),
            PartitionProblem::TooLong { .. } => ("InvalidError", "too_long"),
            _ => ("InvalidError", "partition"),
        },
        Error::Os { .. } => ("SystemError_", "os"),
        Error::Fenced { .. } => ("FencedError", "fenced"),
        Error::Timeout { .. } => ("TimeoutError_", "timeout"),
        Error::SlotInUse { .. } | Error::Twin { .. } => ("SlotInUseError", "slot_in_use"),
        Error::InUse { .. } => ("SlotInUseError", "in_use"),
        Error::HostsUnseen { .. } => ("SlotInUseError", "hosts_unseen"),
        Error::Full { .. } => ("FullError", "full"),
        Error::NotFound(_) => ("NotFoundError", "not_found"),
        Error::Exists(_) => ("ExistsError", "exists"),
        Error::Replaced { .. } => ("ReplacedError", "replaced"),
        Error::Closed => ("ClosedError", "closed"),
        // The enumeration may grow, and of rings no call of this module is.
        _ => ("CxlError", "error"),
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> PyErr {
        let (class, kind, message) = failure.parts();
        Python::attach(|py| {
            let made = || -> PyResult<PyErr> {
                let error = py.import("kvbm_cxl.errors")?.getattr(class)?.call1((&message,))?;
                error.setattr("kind", kind)?;
                Ok(PyErr::from_value(error))
            };
            // Without the package around it the module has no classes to raise; the reason must not get lost over that.
            made().unwrap_or_else(|_| PyRuntimeError::new_err(format!("{kind}: {message}")))
        })
    }
}

/// [`Failure::invalid`] as an exception.
pub fn invalid(message: impl Into<String>) -> PyErr {
    Failure::invalid(message).into()
}
