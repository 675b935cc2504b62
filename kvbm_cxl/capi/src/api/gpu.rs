// SPDX-License-Identifier: Apache-2.0
//! Memory of GPUs.

use super::{c_bytes, items, writable};
use crate::gpus;
use crate::pool::check_flags;
use crate::status::{Failure, Outcome, status_of};
use crate::types::{self, CxlGpu, CxlGpuCopy, CxlPool, GPU_BUFFERED, GpuInfo, GpuOptions, GpuPiece};
use std::ffi::{c_char, c_int};
use std::ptr::with_exposed_provenance;

/// Longest name of a driver's library, in bytes.
const MAX_LIBRARY_BYTES: usize = libc::PATH_MAX as usize;

/// The name of a driver's library; null stands for the environment.
///
/// # Safety
/// As [`bounded`].
unsafe fn library<'a>(text: *const c_char) -> Outcome<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as demanded of the caller.
    let bytes = unsafe { c_bytes(text, MAX_LIBRARY_BYTES, "name of the CUDA driver") }?;
    std::str::from_utf8(bytes).map(Some).map_err(|_| Failure::invalid("the name of the CUDA driver is not UTF-8"))
}

/// # Safety
/// `name` is null or a C string; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_count(name: *const c_char, count: *mut u32) -> c_int {
    status_of(|| {
        writable(count, "number of GPUs")?;
        // SAFETY: as demanded of the caller.
        let found = gpus::count(unsafe { library(name) }?)?;
        // SAFETY: not null, so writable.
        unsafe { count.write(found) };
        Ok(())
    })
}

/// # Safety
/// `options` is null or a structure whose first member is its size, and in which `library` is null or a C string; `gpu` is null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_open(pool: *mut CxlPool, device: u32, options: *const GpuOptions, gpu: *mut CxlGpu) -> c_int {
    status_of(|| {
        writable(gpu, "number of the GPU")?;
        // SAFETY: as demanded of the caller.
        let options = unsafe { types::read(options) }?;
        // SAFETY: as above.
        let name = unsafe { library(with_exposed_provenance(options.library)) }?;
        let number = gpus::open(pool, device, name, &options)?;
        // SAFETY: not null, so writable.
        unsafe { gpu.write(number) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_close(gpu: CxlGpu) -> c_int {
    status_of(|| gpus::close(gpu))
}

/// # Safety
/// `info` is null or a writable structure whose first member is its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_get_info(gpu: CxlGpu, info: *mut GpuInfo) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        unsafe { types::check_writable(info) }?;
        let found = gpus::info(gpu)?;
        // SAFETY: checked, and as many bytes as its size says are writable.
        unsafe { types::write(info, &found) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_check(gpu: CxlGpu, address: u64, len_bytes: usize) -> c_int {
    status_of(|| gpus::check(gpu, address, len_bytes))
}

/// # Safety
/// `pieces` is null or `count` pieces, whose memory may be used until the end of the copies is reported; `copy` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_start(
    gpu: CxlGpu,
    direction: u32,
    flags: u32,
    pieces: *const GpuPiece,
    count: usize,
    copy: *mut CxlGpuCopy,
) -> c_int {
    status_of(|| {
        check_flags(flags, GPU_BUFFERED)?;
        writable(copy, "number of the copies")?;
        // SAFETY: as demanded of the caller.
        let number = unsafe { gpus::start(gpu, direction, flags & GPU_BUFFERED != 0, items(pieces, count, "pieces")?) }?;
        // SAFETY: not null, so writable.
        unsafe { copy.write(number) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_wait(copy: CxlGpuCopy, timeout_ms: u64) -> c_int {
    status_of(|| gpus::wait(copy, timeout_ms))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_cancel(copy: CxlGpuCopy) -> c_int {
    status_of(|| gpus::cancel(copy))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_release(copy: CxlGpuCopy) -> c_int {
    status_of(|| gpus::release(copy))
}
