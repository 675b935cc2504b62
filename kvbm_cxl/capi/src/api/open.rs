// SPDX-License-Identifier: Apache-2.0
//! Opening, joining, formatting, and facts about an open pool.

use super::{spec, writable};
use crate::handle;
use crate::pool;
use crate::status::{Failure, status_of};
use crate::types::{self, CxlPool, FormatOptions, Info, Options};
use cxl_pool::cpus::ThreadKind;
use std::ffi::{c_char, c_int};

/// # Safety
/// `spec` is null or a C string; `options` is null or a structure of its `struct_size`; `pool` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_open(spec: *const c_char, options: *const Options, pool: *mut *mut CxlPool) -> c_int {
    status_of(|| {
        writable(pool, "handle")?;
        // SAFETY: as demanded of the caller.
        let (text, options) = unsafe { (self::spec(spec)?, types::read(options)?) };
        let handle = handle::open(text, &options)?;
        // SAFETY: not null, so writable.
        unsafe { pool.write(handle) };
        Ok(())
    })
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

/// # Safety
/// `spec` is null or a C string; `options` is null or a structure of its `struct_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_init(spec: *const c_char, options: *const Options) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (text, options) = unsafe { (self::spec(spec)?, types::read(options)?) };
        handle::open_default(text, &options)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_fini() -> c_int {
    status_of(|| handle::close(std::ptr::null_mut()))
}

/// # Safety
/// `spec` is null or a C string; `options` is null or a structure of its `struct_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_format(spec: *const c_char, options: *const FormatOptions) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let (text, options) = unsafe { (self::spec(spec)?, types::read(options)?) };
        pool::format(text, &options)
    })
}

/// # Safety
/// `info` is null or a writable structure of its `struct_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_get_info(pool: *mut CxlPool, info: *mut Info) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        unsafe { types::check_writable(info.cast_const()) }?;
        let found = handle::with(pool, |pool| Ok(pool.info()))?;
        // SAFETY: checked above.
        unsafe { types::write(info, &found) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_check(pool: *mut CxlPool) -> c_int {
    status_of(|| handle::with(pool, |pool| Ok(pool.pool().check_not_replaced()?)))
}

/// # Safety
/// `id` is null or has 16 writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_machine_id(id: *mut u8) -> c_int {
    status_of(|| {
        writable(id, "identity")?;
        let found = cxl_pool::machine::machine_id()?;
        // SAFETY: not null, so 16 writable bytes.
        unsafe { id.copy_from_nonoverlapping(found.0.as_ptr(), found.0.len()) };
        Ok(())
    })
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
