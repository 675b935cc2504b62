// SPDX-License-Identifier: Apache-2.0
//! Lists of copies.

use super::args::In;
use crate::copies;
use crate::status::status_of;
use crate::types::Copy;
use std::ffi::c_int;

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_copy_list(direction: u32, pieces: In<Copy>, count: usize) -> c_int {
    // SAFETY: the caller of C vouches for the ordinary memory of each piece.
    status_of(|| unsafe { copies::copy(direction, pieces.items(count, "pieces")?) })
}
