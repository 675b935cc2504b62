// SPDX-License-Identifier: Apache-2.0
//! Lists of copies.

use super::items;
use crate::copies;
use crate::status::status_of;
use crate::types::Copy;
use std::ffi::c_int;

/// # Safety
/// `pieces` is null or `count` pieces, whose ordinary memory may be read, or written by no other thread, as the direction demands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_copy_list(direction: u32, pieces: *const Copy, count: usize) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        unsafe { copies::copy(direction, items(pieces, count, "pieces")?) }
    })
}
