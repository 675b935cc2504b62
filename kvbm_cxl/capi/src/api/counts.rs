// SPDX-License-Identifier: Apache-2.0
//! Counters.

use super::{items, writable};
use crate::counts;
use crate::handle::with;
use crate::status::status_of;
use crate::types::{Count, CxlPool};
use std::ffi::c_int;

/// # Safety
/// `counts` is null or `count` of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_count(pool: *mut CxlPool, counts: *const Count, count: usize) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let counts = unsafe { items(counts, count, "counts") }?;
        with(pool, |pool| pool.as_member(|member| member.counts.take(counts)))
    })
}

/// # Safety
/// `value` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_host_count(pool: *mut CxlPool, slot: u32, counter: u32, value: *mut u64) -> c_int {
    status_of(|| {
        writable(value, "value")?;
        let found = with(pool, |pool| counts::of_host(pool.pool().lines(), slot, counter))?;
        // SAFETY: not null, so writable.
        unsafe { value.write(found) };
        Ok(())
    })
}
