// SPDX-License-Identifier: Apache-2.0
//! Devices as storage of bytes.

use super::{c_bytes, writable};
use crate::devices;
use crate::pool::check_flags;
use crate::status::{Failure, Outcome, status_of};
use crate::types::{CxlDevice, CxlPool, DEVICE_IN_POOL, DEVICE_READ_ONLY};
use std::ffi::{OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Longest path of a device, in bytes.
const MAX_PATH_BYTES: usize = libc::PATH_MAX as usize;

/// # Safety
/// `path` is null or a C string; `device` is null or writable, as are `len_bytes` and `found`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_device_open(
    pool: *mut CxlPool,
    path: *const c_char,
    flags: u32,
    device: *mut CxlDevice,
    len_bytes: *mut u64,
    found: *mut u32,
) -> c_int {
    status_of(|| {
        check_flags(flags, DEVICE_READ_ONLY)?;
        writable(device, "number of the device")?;
        // SAFETY: as demanded of the caller.
        let path = Path::new(OsStr::from_bytes(unsafe { c_bytes(path, MAX_PATH_BYTES, "path of the device") }?));
        let (number, len, is_in_pool) = devices::open(pool, path, flags & DEVICE_READ_ONLY == 0)?;
        // SAFETY: each is null, which is left alone, or writable.
        unsafe {
            device.write(number);
            len_bytes.as_mut().into_iter().for_each(|place| *place = len);
            found.as_mut().into_iter().for_each(|place| *place = if is_in_pool { DEVICE_IN_POOL } else { 0 });
        }
        Ok(())
    })
}

fn check_size(size: usize) -> Outcome<()> {
    if isize::try_from(size).is_ok() { Ok(()) } else { Err(Failure::invalid(format!("{size} bytes are more than there are addresses"))) }
}

/// # Safety
/// `destination` is null or has `size` writable bytes that no other thread uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_device_read(device: CxlDevice, offset: u64, destination: *mut c_void, size: usize) -> c_int {
    status_of(|| {
        writable(destination, "ordinary memory")?;
        check_size(size)?;
        // SAFETY: not null, so `size` writable bytes, no more than a slice can have.
        devices::read(device, offset, unsafe { std::slice::from_raw_parts_mut(destination.cast::<u8>(), size) })
    })
}

/// # Safety
/// `source` is null or has `size` readable bytes that no thread writes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_device_write(device: CxlDevice, offset: u64, source: *const c_void, size: usize) -> c_int {
    status_of(|| {
        writable(source, "ordinary memory")?;
        check_size(size)?;
        // SAFETY: not null, so `size` readable bytes, no more than a slice can have.
        devices::write(device, offset, unsafe { std::slice::from_raw_parts(source.cast::<u8>(), size) })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_device_close(device: CxlDevice) -> c_int {
    status_of(|| devices::close(device))
}
