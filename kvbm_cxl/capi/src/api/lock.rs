// SPDX-License-Identifier: Apache-2.0
//! Locks.

use super::args::Out;
use crate::handle;
use crate::status::{Failure, Outcome, Status, status_of};
use crate::types::{CxlLock, CxlPool, LockInfo, TIMEOUT_DEFAULT};
use cxl_pool::lock_table;
use std::ffi::c_int;
use std::ptr::null_mut;

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_allocate_lock(lock: Out<CxlLock>) -> c_int {
    cxl_shm_allocate_lock_ex(null_mut(), TIMEOUT_DEFAULT, lock)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_allocate_lock_ex(pool: *mut CxlPool, timeout_ms: u64, lock: Out<CxlLock>) -> c_int {
    let allocate = || handle::with(pool, |pool| pool.as_member(|member| member.new_lock(pool.timeout_ms(timeout_ms))));
    status_of(|| lock.fill("lock", allocate))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_free_lock(lock: CxlLock) -> c_int {
    cxl_shm_free_lock_ex(null_mut(), lock, TIMEOUT_DEFAULT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_free_lock_ex(pool: *mut CxlPool, lock: CxlLock, timeout_ms: u64) -> c_int {
    status_of(|| {
        handle::with(pool, |pool| {
            pool.as_member(|member| {
                if member.locks.is_held(lock)? {
                    return Err(Failure::new(Status::E_BUSY, format!("lock {lock} is held: release it first")));
                }
                Ok(lock_table::free_lock(&member.host, lock, pool.timeout_ms(timeout_ms))?)
            })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_acquire_lock(lock: CxlLock) -> c_int {
    status_of(|| acquire(null_mut(), lock, TIMEOUT_DEFAULT, false).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_acquire_lock_ex(pool: *mut CxlPool, lock: CxlLock, timeout_ms: u64, info: Out<LockInfo>) -> c_int {
    status_of(|| match info.is_null() {
        true => acquire(pool, lock, timeout_ms, false).map(drop),
        false => info.fill_structure(|| acquire(pool, lock, timeout_ms, true)),
    })
}

fn acquire(pool: *mut CxlPool, lock: CxlLock, timeout_ms: u64, take_damaged: bool) -> Outcome<LockInfo> {
    handle::with(pool, |pool| {
        pool.as_member(|member| {
            let acquired = member.locks.acquire(&member.host, lock, pool.timeout_ms(timeout_ms), take_damaged)?;
            Ok(LockInfo { struct_size: size_of::<LockInfo>(), recovered: acquired.recovered.into(), grant: acquired.grant })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_release_lock(lock: CxlLock) -> c_int {
    cxl_shm_release_lock_ex(null_mut(), lock)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_release_lock_ex(pool: *mut CxlPool, lock: CxlLock) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.as_member(|member| member.locks.release(lock))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_lock_repaired(pool: *mut CxlPool, lock: CxlLock) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.as_member(|member| member.locks.set_repaired(lock, true))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_lock_damaged(pool: *mut CxlPool, lock: CxlLock) -> c_int {
    status_of(|| handle::with(pool, |pool| pool.as_member(|member| member.locks.set_repaired(lock, false))))
}
