// SPDX-License-Identifier: Apache-2.0
//! Statuses, the last error of each thread, and the wall that no panic passes.

use cxl_pool::{Error, PartitionProblem};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes of the last error's text, with its closing zero.
pub const LAST_ERROR_BYTES: usize = 512;

/// A text with its closing zero as a C string.
const fn c_text(text: &str) -> &CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

macro_rules! statuses {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        /// What a call failed with; `CXL_SHM_E_...` of the header.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        pub enum Status {
            $(#[doc = $text] $name = $value,)*
        }

        impl Status {
            /// Every status with its name in the header.
            pub const ALL: &[(&str, Status)] = &[$((concat!("CXL_SHM_", stringify!($name)), Status::$name)),*];
        }

        /// The text of a status.
        pub fn text_of(status: c_int) -> &'static CStr {
            match status {
                $($value => const { c_text(concat!($text, "\0")) },)*
                _ => c"unknown status",
            }
        }
    };
}

#[allow(non_camel_case_types)]
mod names {
    use super::*;
    statuses! {
        OK = 0, "success";
        E_INVALID = -1, "invalid argument";
        E_FULL = -2, "no room left";
        E_NOT_FOUND = -3, "not found";
        E_EXISTS = -4, "exists already";
        E_TIMEOUT = -5, "deadline passed";
        E_FENCED = -6, "this host was fenced: the outcome is unknown";
        E_CLOSED = -7, "closed, or not joined";
        E_NOT_IN_POOL = -8, "address or offset outside the blocks of an open pool";
        E_NOT_A_BLOCK = -9, "not the start of an allocated block";
        E_NOT_A_POOL = -10, "the devices cannot be opened as a pool";
        E_CORRUPT = -11, "metadata does not verify";
        E_DEVICE_LOST = -12, "a device is lost";
        E_POISONED = -13, "memory is damaged";
        E_REPLACED = -14, "the pool was replaced";
        E_SLOT_IN_USE = -15, "the host slot is in use by another machine";
        E_OS = -16, "the operating system refused";
        E_RECOVERED = -17, "what the lock protects must be repaired first";
        E_NOT_HELD = -18, "this thread does not hold the lock";
        E_DEADLOCK = -19, "this thread holds the lock already";
        E_BUSY = -20, "locks are held";
        E_FORKED = -21, "opened by the parent process";
        E_PEER_GONE = -22, "the other end of the connection is gone";
        E_PEER_CLOSED = -23, "the other end has closed the connection";
        E_TOO_LARGE = -24, "message too large";
        E_GPU = -25, "a GPU or its driver failed";
        E_CANCELLED = -26, "ended early, as the caller asked";
        E_INTERNAL = -99, "bug in the library";
    }
}
pub use names::{Status, text_of};

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    /// What the caller gets.
    pub status: Status,
    /// The reason in words.
    pub message: String,
}

/// Result of everything below the exported functions.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// A failure with a reason.
    pub fn new(status: Status, message: impl Into<String>) -> Self {
        Failure { status, message: message.into() }
    }

    /// An address or offset that is not where it has to be.
    pub fn not_in_pool(message: impl Into<String>) -> Self {
        Failure::new(Status::E_NOT_IN_POOL, message)
    }

    /// An argument that can never work.
    pub fn invalid(message: impl Into<String>) -> Self {
        Failure::new(Status::E_INVALID, message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::from(&error)
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let status = match error {
            Error::DeviceLost { .. } => Status::E_DEVICE_LOST,
            Error::Poisoned { .. } => Status::E_POISONED,
            Error::OutOfRange { .. } => Status::E_NOT_IN_POOL,
            Error::BadLine { .. } => Status::E_CORRUPT,
            Error::NotAPool { .. } | Error::HasContent { .. } => Status::E_NOT_A_POOL,
            Error::Invalid(_) => Status::E_INVALID,
            Error::Partition { problem: PartitionProblem::Overlaps { .. }, .. } => Status::E_EXISTS,
            Error::Partition { .. } => Status::E_INVALID,
            Error::Os { .. } => Status::E_OS,
            Error::Fenced { .. } => Status::E_FENCED,
            Error::Timeout { .. } => Status::E_TIMEOUT,
            Error::SlotInUse { .. } | Error::InUse { .. } | Error::HostsUnseen { .. } | Error::Twin { .. } => Status::E_SLOT_IN_USE,
            Error::Full { .. } => Status::E_FULL,
            Error::NotFound(_) => Status::E_NOT_FOUND,
            Error::Exists(_) => Status::E_EXISTS,
            Error::Replaced { .. } => Status::E_REPLACED,
            Error::Closed => Status::E_CLOSED,
            Error::PeerGone { .. } => Status::E_PEER_GONE,
            Error::PeerClosed { .. } => Status::E_PEER_CLOSED,
            Error::TooLarge { .. } => Status::E_TOO_LARGE,
            Error::Protocol { .. } => Status::E_CORRUPT,
            Error::Gpu { .. } => Status::E_GPU,
            Error::Cancelled(_) => Status::E_CANCELLED,
            // The enumeration may grow; until this table does, the text has to do.
            _ => Status::E_INTERNAL,
        };
        Failure::new(status, error.to_string())
    }
}

thread_local! {
    // Neither has a destructor, so both work in a thread that is ending as well.
    static STATUS: Cell<c_int> = const { Cell::new(0) };
    static TEXT: UnsafeCell<[u8; LAST_ERROR_BYTES]> = const { UnsafeCell::new([0; LAST_ERROR_BYTES]) };
}

/// Makes `failure` the last error of this thread.
pub fn remember(failure: &Failure) {
    STATUS.set(failure.status as c_int);
    let message = &failure.message;
    let mut end = message.len().min(LAST_ERROR_BYTES - 1);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    // A C string ends at the first zero, wherever it came from.
    let bytes = message.as_bytes()[..end].iter().map(|&byte| if byte == 0 { b'?' } else { byte });
    TEXT.with(|text| {
        // SAFETY: only this thread reaches its text, and no reference outlives a call of this module; C holds a bare pointer, which it was
        // told is overwritten by the next failing call.
        let text = unsafe { &mut *text.get() };
        text[end] = 0;
        text.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    });
}

/// Forgets the last error of this thread.
pub fn forget() {
    STATUS.set(0);
    TEXT.with(|text| {
        // SAFETY: as in `remember`.
        unsafe { (*text.get())[0] = 0 };
    });
}

/// Status of the last error of this thread, 0 if none.
pub fn last_status() -> c_int {
    STATUS.get()
}

/// Text of the last error of this thread: a C string that the next failing call overwrites.
pub fn last_text() -> *const c_char {
    TEXT.with(|text| text.get().cast_const().cast())
}

/// Runs the body of an exported function: failures become the last error, and so do panics, which must not reach C.
pub fn catch_failure<T>(body: impl FnOnce() -> Outcome<T>) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Failure::new(Status::E_INTERNAL, panic_text(&*panic))));
    outcome.inspect_err(remember).ok()
}

/// [`catch_failure`] for functions that return a status.
pub fn status_of(body: impl FnOnce() -> Outcome<()>) -> c_int {
    match catch_failure(body) {
        Some(()) => Status::OK as c_int,
        None => last_status(),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("bug in the library: {}", text.unwrap_or("panic"))
}

#[cfg(test)]
mod tests;
