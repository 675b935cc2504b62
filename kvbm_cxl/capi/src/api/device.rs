// SPDX-License-Identifier: Apache-2.0
//! Devices as storage of bytes.

use super::args::{In, Out};
use crate::devices;
use crate::pool::check_flags;
use crate::status::status_of;
use crate::types::{CxlDevice, CxlPool, DEVICE_IN_POOL, DEVICE_READ_ONLY};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest path of a device, in bytes.
const MAX_PATH_BYTES: usize = libc::PATH_MAX as usize;
const MEMORY: &str = "ordinary memory";

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_device_open(
    pool: *mut CxlPool,
    path: In<c_char>,
    flags: u32,
    device: Out<CxlDevice>,
    len_bytes: Out<u64>,
    found: Out<u32>,
) -> c_int {
    status_of(|| {
        check_flags(flags, DEVICE_READ_ONLY)?;
        device.check("number of the device")?;
        let path = Path::new(OsStr::from_bytes(path.text(MAX_PATH_BYTES, "path of the device")?));
        let (number, len, is_in_pool) = devices::open(pool, path, flags & DEVICE_READ_ONLY == 0)?;
        device.set(number);
        len_bytes.set(len);
        found.set(if is_in_pool { DEVICE_IN_POOL } else { 0 });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_device_read(device: CxlDevice, offset: u64, mut destination: Out<c_void>, size: usize) -> c_int {
    status_of(|| {
        destination.check(MEMORY)?;
        devices::read(device, offset, destination.bytes(size, MEMORY)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_device_write(device: CxlDevice, offset: u64, source: In<c_void>, size: usize) -> c_int {
    status_of(|| {
        source.check(MEMORY)?;
        devices::write(device, offset, source.bytes(size, MEMORY)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_device_close(device: CxlDevice) -> c_int {
    status_of(|| devices::close(device))
}
