// SPDX-License-Identifier: Apache-2.0
//! What an operator can do when a driver does not register the pool's memory.

use super::driver::{
    ERROR_ALREADY_REGISTERED, ERROR_INVALID_VALUE, ERROR_NOT_PERMITTED, ERROR_NOT_SUPPORTED, ERROR_OPERATING_SYSTEM, ERROR_OUT_OF_MEMORY,
};
use std::ffi::c_int;

/// What to change after a registration of pages, and where that was tried of I/O memory, was answered with `code` by a driver of this
/// version of CUDA.
pub(super) fn advice(code: c_int, version: Option<(u32, u32)>) -> String {
    match code {
        ERROR_OUT_OF_MEMORY | ERROR_NOT_PERMITTED | ERROR_OPERATING_SYSTEM => format!(
            "registered memory is held in place: allow this process all of the pool (memlock limit {}; `ulimit -l unlimited`, \
             LimitMEMLOCK=infinity of a service, --ulimit memlock=-1 of a container), or register less (CXL_CUDA_REGISTER_BYTES)",
            memlock_limit()
        ),
        ERROR_INVALID_VALUE | ERROR_NOT_SUPPORTED => format!(
            "this driver{} takes the mapping neither as pages nor as I/O memory, as it may be with memory of a device: use the driver's \
             open kernel modules and a newer driver, and let the IOMMU pass GPUs through (iommu=pt)",
            version.map_or(String::new(), |(major, minor)| format!(", of CUDA {major}.{minor},"))
        ),
        ERROR_ALREADY_REGISTERED => {
            "other code of this process has registered the pool's memory, and may unregister it under a copy: have it leave that to the \
             pool"
                .into()
        }
        _ => "the driver's documentation has the meaning of the error, dmesg may have its cause".into(),
    }
}

fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to `limit`.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } {
        0 if limit.rlim_cur == libc::RLIM_INFINITY => "none".into(),
        0 => format!("{} bytes", limit.rlim_cur),
        _ => "unknown".into(),
    }
}
