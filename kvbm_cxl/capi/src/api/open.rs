// SPDX-License-Identifier: Apache-2.0
//! Opening, joining, formatting, and facts about an open pool.

use super::args::{In, Out};
use crate::handle;
use crate::pool;
use crate::status::{Failure, status_of};
use crate::types::{CxlPool, FormatOptions, Info, Options};
use cxl_pool::cpus::ThreadKind;
use std::ffi::{c_char, c_int};

/// Longest name of a pool, in bytes: as many devices as there can be, with the longest paths.
const MAX_SPEC_BYTES: usize = (libc::PATH_MAX as usize + 1) * cxl_pool::limits::MAX_DEVICES;
const SPEC: &str = "name of the pool";

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_open(spec: In<c_char>, options: In<Options>, pool: Out<*mut CxlPool>) -> c_int {
    status_of(|| pool.fill("handle", || handle::open(spec.utf8(MAX_SPEC_BYTES, SPEC)?, &options.structure()?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_join(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.join()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_leave(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.leave()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_close(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::close(pool))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_init(spec: In<c_char>, options: In<Options>) -> c_int {
    status_of(|| handle::open_default(spec.utf8(MAX_SPEC_BYTES, SPEC)?, &options.structure()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_fini() -> c_int {
    status_of(|| handle::close(std::ptr::null_mut()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_format(spec: In<c_char>, options: In<FormatOptions>) -> c_int {
    status_of(|| pool::format(spec.utf8(MAX_SPEC_BYTES, SPEC)?, &options.structure()?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get_info(pool: *mut CxlPool, info: Out<Info>) -> c_int {
    status_of(|| info.fill_structure(|| handle::with(pool, |pool| Ok(pool.info()))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_check(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| Ok(pool.pool().check_not_replaced()?)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_machine_id(id: Out<u8>) -> c_int {
    status_of(|| id.fill_id("identity", || Ok(cxl_pool::machine::machine_id()?.0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_bind_worker(pool: *mut CxlPool) -> c_int {
    status_of(|| {
        let bind = |member: &pool::Member| Ok(member.host.config().cpus.bind_current_thread(ThreadKind::Worker)?);
        handle::with(pool, |pool| pool.as_member(bind))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_bind_thread(numa_node: u32) -> c_int {
    status_of(|| cxl_pool::device::bind_current_thread_to_node(numa_node).map_err(Failure::from))
}
