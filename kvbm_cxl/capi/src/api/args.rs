// SPDX-License-Identifier: Apache-2.0
//! Pointers as C passes them to the exported functions.
//!
//! Only C makes them. It vouches for what `cxl_shm.h` states of each argument: null, or readable ([`In`]) or writable ([`Out`]), until the
//! function returns, as far as its type and the count that comes with it say. Every read and write below rests on that.

use crate::status::{Failure, Outcome};
use crate::types::{self, Versioned};
use bytemuck::Pod;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null_mut, with_exposed_provenance};

/// Memory that a function reads.
#[repr(transparent)]
pub struct In<T>(*const T);

/// Memory that a function writes.
#[repr(transparent)]
pub struct Out<T>(*mut T);

fn check<T>(at: *const T, what: &str) -> Outcome<()> {
    if at.is_null() { Err(Failure::invalid(format!("the pointer to the {what} is NULL"))) } else { Ok(()) }
}

fn check_array<T>(at: *const T, count: usize, what: &str) -> Outcome<()> {
    check(at, what)?;
    if !at.is_aligned() || count.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::invalid(format!("the array of {what} is misaligned or too long")));
    }
    Ok(())
}

impl<T> In<T> {
    /// The pointer that C stored as `address` in a structure.
    pub fn at_address(address: usize) -> In<T> {
        In(with_exposed_provenance(address))
    }

    pub fn check(&self, what: &str) -> Outcome<()> {
        check(self.0, what)
    }
}

impl<T: Pod> In<T> {
    pub fn read(&self, what: &str) -> Outcome<T> {
        check(self.0, what)?;
        // SAFETY: not null, so readable.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The array of `count` items, which is the argument that C passed with this one.
    pub fn items(&self, count: usize, what: &str) -> Outcome<&[T]> {
        if count == 0 {
            return Ok(&[]);
        }
        check_array(self.0, count, what)?;
        // SAFETY: not null, so `count` readable items; aligned, of a possible length.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

impl<T: Versioned> In<T> {
    /// The structure; null reads as all zero.
    pub fn structure(&self) -> Outcome<T> {
        // SAFETY: null, or a readable structure.
        unsafe { types::read(self.0) }
    }
}

impl In<u8> {
    /// 16 bytes, if they are given.
    pub fn id(&self) -> Option<[u8; 16]> {
        In(self.0.cast::<[u8; 16]>()).read("16 bytes").ok()
    }

    /// `count` times 16 bytes.
    pub fn ids(&self, count: usize, what: &str) -> Outcome<&[[u8; 16]]> {
        if count == 0 {
            return Ok(&[]);
        }
        let at = self.0.cast::<[u8; 16]>();
        check_array(at, count, what)?;
        // SAFETY: as in `items`.
        Ok(unsafe { std::slice::from_raw_parts(at, count) })
    }
}

impl In<c_void> {
    pub fn bytes(&self, size: usize, what: &str) -> Outcome<&[u8]> {
        if size == 0 {
            return Ok(&[]);
        }
        check_array(self.0.cast::<u8>(), size, what)?;
        // SAFETY: not null, so `size` readable bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), size) })
    }
}

impl In<c_char> {
    /// A C string of at most `max_bytes`; one that is longer is read no further.
    pub fn text(&self, max_bytes: usize, what: &str) -> Outcome<&[u8]> {
        if self.0.is_null() {
            return Err(Failure::invalid(format!("the {what} is NULL")));
        }
        // SAFETY: not null, so readable up to its closing zero.
        let len = unsafe { libc::strnlen(self.0, max_bytes + 1) };
        if len > max_bytes {
            return Err(Failure::invalid(format!("the {what} is longer than {max_bytes} bytes")));
        }
        // SAFETY: `len` readable bytes and the zero after them.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// A C string of UTF-8, if one is given.
    pub fn utf8(&self, max_bytes: usize, what: &str) -> Outcome<Option<&str>> {
        if self.0.is_null() {
            return Ok(None);
        }
        let text = std::str::from_utf8(self.text(max_bytes, what)?);
        text.map(Some).map_err(|_| Failure::invalid(format!("the {what} is not UTF-8")))
    }
}

impl<T> Out<T> {
    /// Nothing is written.
    pub const NONE: Out<T> = Out(null_mut());

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn check(&self, what: &str) -> Outcome<()> {
        check(self.0, what)
    }

    /// Writes a value, if there is a place for it.
    pub fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so writable.
            unsafe { self.0.write(value) };
        }
    }

    /// Writes what `make` returns; without a place for it, `make` is not called.
    pub fn fill(&self, what: &str, make: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
        self.check(what)?;
        self.set(make()?);
        Ok(())
    }
}

impl<T> Out<T> {
    /// As [`Out::write_items`], for `size` bytes.
    pub fn write_bytes(&self, size: usize, bytes: &[u8]) {
        Out(self.0.cast::<u8>()).write_items(size, bytes);
    }
}

impl<T: Pod> Out<T> {
    /// Writes `values` to the array of `count` items, which is the argument that C passed with this one.
    pub fn write_items(&self, count: usize, values: &[T]) {
        if !self.0.is_null() {
            // SAFETY: not null, so `count` writable items, of which no more are written; the source is ours.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, values.len().min(count)) };
        }
    }
}

impl<T: Versioned> Out<T> {
    /// As [`Out::fill`], for a structure of the caller's version.
    pub fn fill_structure(&self, make: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
        // SAFETY: null, or a structure.
        unsafe { types::check_writable(self.0) }?;
        let value = make()?;
        // SAFETY: checked above.
        unsafe { types::write(self.0, &value) }
    }
}

impl Out<u8> {
    /// As [`Out::fill`], for 16 bytes.
    pub fn fill_id(&self, what: &str, make: impl FnOnce() -> Outcome<[u8; 16]>) -> Outcome<()> {
        self.check(what)?;
        self.write_items(16, &make()?);
        Ok(())
    }
}

impl Out<c_void> {
    pub fn bytes(&mut self, size: usize, what: &str) -> Outcome<&mut [u8]> {
        if size == 0 {
            return Ok(&mut []);
        }
        check_array(self.0.cast::<u8>(), size, what)?;
        // SAFETY: not null, so `size` writable bytes that no other thread uses.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.0.cast::<u8>(), size) })
    }
}
