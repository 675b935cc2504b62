// SPDX-License-Identifier: Apache-2.0
//! Counters.

use super::args::{In, Out};
use crate::counts;
use crate::handle::with;
use crate::status::status_of;
use crate::types::{Count, CxlPool};
use std::ffi::c_int;

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_count(pool: *mut CxlPool, counts: In<Count>, count: usize) -> c_int {
    status_of(|| {
        let counts = counts.items(count, "counts")?;
        with(pool, |pool| pool.as_member(|member| member.counts.take(counts)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_host_count(pool: *mut CxlPool, slot: u32, counter: u32, value: Out<u64>) -> c_int {
    status_of(|| value.fill("value", || with(pool, |pool| counts::of_host(pool.pool().lines(), slot, counter))))
}
