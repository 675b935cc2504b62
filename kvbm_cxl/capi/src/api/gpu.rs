// SPDX-License-Identifier: Apache-2.0
//! Memory of GPUs.

use super::args::{In, Out};
use crate::gpus;
use crate::pool::check_flags;
use crate::status::status_of;
use crate::types::{CxlGpu, CxlGpuCopy, CxlPool, GPU_BUFFERED, GpuInfo, GpuOptions, GpuPiece};
use std::ffi::{c_char, c_int};

/// Longest name of a driver's library, in bytes.
const MAX_LIBRARY_BYTES: usize = libc::PATH_MAX as usize;
const LIBRARY: &str = "name of the CUDA driver";

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_count(name: In<c_char>, count: Out<u32>) -> c_int {
    status_of(|| count.fill("number of GPUs", || gpus::count(name.utf8(MAX_LIBRARY_BYTES, LIBRARY)?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_open(pool: *mut CxlPool, device: u32, options: In<GpuOptions>, gpu: Out<CxlGpu>) -> c_int {
    status_of(|| {
        gpu.fill("number of the GPU", || {
            let options = options.structure()?;
            gpus::open(pool, device, In::at_address(options.library).utf8(MAX_LIBRARY_BYTES, LIBRARY)?, &options)
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_close(gpu: CxlGpu) -> c_int {
    status_of(|| gpus::close(gpu))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_get_info(gpu: CxlGpu, info: Out<GpuInfo>) -> c_int {
    status_of(|| info.fill_structure(|| gpus::info(gpu)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_check(gpu: CxlGpu, address: u64, len_bytes: usize) -> c_int {
    status_of(|| gpus::check(gpu, address, len_bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_start(
    gpu: CxlGpu,
    direction: u32,
    flags: u32,
    pieces: In<GpuPiece>,
    count: usize,
    copy: Out<CxlGpuCopy>,
) -> c_int {
    status_of(|| {
        check_flags(flags, GPU_BUFFERED)?;
        // SAFETY: the caller of C vouches for the memory of the pieces until the end of the copies is reported.
        let start = || unsafe { gpus::start(gpu, direction, flags & GPU_BUFFERED != 0, pieces.items(count, "pieces")?) };
        copy.fill("number of the copies", start)
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
