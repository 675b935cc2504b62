// SPDX-License-Identifier: Apache-2.0
//! Errors and the version.

use crate::status;
use std::ffi::{c_char, c_int};

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_strerror(status: c_int) -> *const c_char {
    status::text_of(status).as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_last_error() -> *const c_char {
    status::last_text()
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_last_status() -> c_int {
    status::last_status()
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_clear_error() {
    status::forget();
}

/// Major, minor and patch version of this library.
pub const VERSION: [u32; 3] =
    [decimal(env!("CARGO_PKG_VERSION_MAJOR")), decimal(env!("CARGO_PKG_VERSION_MINOR")), decimal(env!("CARGO_PKG_VERSION_PATCH"))];

const fn decimal(text: &str) -> u32 {
    let (bytes, mut index, mut value) = (text.as_bytes(), 0, 0);
    while index < bytes.len() {
        value = value * 10 + (bytes[index] - b'0') as u32;
        index += 1;
    }
    value
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_version() -> u32 {
    VERSION[0] << 16 | VERSION[1] << 8 | VERSION[2]
}
