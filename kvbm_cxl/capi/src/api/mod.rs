// SPDX-License-Identifier: Apache-2.0
//! The exported functions, as `cxl_shm.h` declares and explains them.

mod block;
mod cache;
mod coherence;
mod copy;
mod counts;
mod device;
mod error;
mod gpu;
mod lock;
mod log;
mod object;
mod open;
mod queued;
mod ring;

use crate::status::{Failure, Outcome};
use std::ffi::{CStr, c_char};

/// The bytes of a C string of at most `max_bytes`.
///
/// # Safety
/// `text` is null, or readable up to its closing zero or `max_bytes + 1` bytes, whichever comes first.
unsafe fn c_bytes<'a>(text: *const c_char, max_bytes: usize, what: &str) -> Outcome<&'a [u8]> {
    if text.is_null() {
        return Err(Failure::invalid(format!("the {what} is NULL")));
    }
    // SAFETY: reads no further than the caller vouches for.
    let len = unsafe { libc::strnlen(text, max_bytes + 1) };
    if len > max_bytes {
        return Err(Failure::invalid(format!("the {what} is longer than {max_bytes} bytes")));
    }
    // SAFETY: `len` readable bytes and the zero after them.
    Ok(unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Longest name of a pool, in bytes: as many devices as there can be, with the longest paths.
const MAX_SPEC_BYTES: usize = (libc::PATH_MAX as usize + 1) * cxl_pool::limits::MAX_DEVICES;

/// The name of a pool; null stands for the environment.
///
/// # Safety
/// As [`bounded`].
unsafe fn spec<'a>(text: *const c_char) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as demanded of the caller.
    let bytes = unsafe { c_bytes(text, MAX_SPEC_BYTES, "name of the pool") }?;
    std::str::from_utf8(bytes).map(Some).map_err(|_| Failure::invalid("the name of the pool is not UTF-8"))
}

fn writable<T>(at: *const T, what: &str) -> Outcome<()> {
    if at.is_null() { Err(Failure::invalid(format!("the pointer to the {what} is NULL"))) } else { Ok(()) }
}

/// The array of `count` items at `at`.
///
/// # Safety
/// `at` is null or readable so far, and stays as it is for `'a`.
unsafe fn items<'a, T>(at: *const T, count: usize, what: &str) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    writable(at, what)?;
    if !at.is_aligned() || count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::invalid(format!("the array of {what} is misaligned or too long")));
    }
    // SAFETY: not null, aligned, of a possible length, and readable as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(at, count) })
}
