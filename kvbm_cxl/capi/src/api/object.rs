// SPDX-License-Identifier: Apache-2.0
//! Named objects, offsets and addresses.

use super::args::{In, Out};
use crate::handle;
use crate::pool::check_flags;
use crate::status::{Failure, Outcome, Status, catch_failure, status_of};
use crate::types::{CxlPool, NULL_OFFSET, PUT_REPLACE, ShmPtr, TIMEOUT_DEFAULT};
use cxl_pool::limits::MAX_OBJECT_NAME_BYTES;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::null_mut;

const KEY: &str = "key";

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_put(key: In<c_char>, ptr: *mut c_void) -> c_int {
    cxl_shm_put_ex(null_mut(), key, ptr, 0, 0, TIMEOUT_DEFAULT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_put_ex(
    pool: *mut CxlPool,
    key: In<c_char>,
    ptr: *mut c_void,
    len_bytes: u64,
    flags: u32,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        check_flags(flags, PUT_REPLACE)?;
        let name = key.text(MAX_OBJECT_NAME_BYTES, KEY)?;
        let len = usize::try_from(len_bytes).map_err(|_| Failure::invalid(format!("{len_bytes} bytes are too many")))?;
        handle::with(pool, |pool| {
            let Some(offset) = pool.offset_of(ptr.addr()) else {
                return Err(Failure::new(Status::E_NOT_IN_POOL, format!("{ptr:p} does not lie in this pool")));
            };
            pool.check_range(offset, len)?;
            let timeout_ms = pool.timeout_ms(timeout_ms);
            pool.as_member(|member| match flags & PUT_REPLACE {
                0 => Ok(member.objects.put(name, offset, len_bytes, timeout_ms)?),
                _ => Ok(member.objects.replace(name, offset, len_bytes, timeout_ms)?),
            })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get(key: In<c_char>, ptr: Out<*mut c_void>) -> c_int {
    cxl_shm_get_ex(null_mut(), key, ptr, Out::NONE, TIMEOUT_DEFAULT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get_ex(
    pool: *mut CxlPool,
    key: In<c_char>,
    ptr: Out<*mut c_void>,
    len_bytes: Out<u64>,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        ptr.check("address")?;
        let name = key.text(MAX_OBJECT_NAME_BYTES, KEY)?;
        let (address, len) = handle::with(pool, |pool| {
            let object = pool.as_member(|member| Ok(member.objects.get(name, pool.timeout_ms(timeout_ms))?))?;
            // The pool's content is checked again here: the address is about to be used.
            pool.check_range(object.offset, object.len_bytes as usize)?;
            Ok((pool.pointer(object.offset), object.len_bytes))
        })?;
        ptr.set(address);
        len_bytes.set(len);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_destroy(key: In<c_char>) -> c_int {
    cxl_shm_destroy_ex(null_mut(), key, TIMEOUT_DEFAULT)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_destroy_ex(pool: *mut CxlPool, key: In<c_char>, timeout_ms: u64) -> c_int {
    status_of(|| {
        let name = key.text(MAX_OBJECT_NAME_BYTES, KEY)?;
        handle::with(pool, |pool| pool.as_member(|member| Ok(member.objects.destroy(name, pool.timeout_ms(timeout_ms))?)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get_offset(ptr: *mut c_void) -> ShmPtr {
    if ptr.is_null() {
        return NULL_OFFSET;
    }
    catch_failure(|| handle::with_address(ptr.addr(), 1, |_, offset| Ok(offset))).unwrap_or(NULL_OFFSET)
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get_ptr(offset: ShmPtr) -> *mut c_void {
    if offset == NULL_OFFSET {
        return null_mut();
    }
    catch_failure(|| range(null_mut(), offset, 1)).unwrap_or(null_mut())
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_get_range(pool: *mut CxlPool, offset: ShmPtr, len_bytes: usize, ptr: Out<*mut c_void>) -> c_int {
    status_of(|| ptr.fill("address", || range(pool, offset, len_bytes)))
}

fn range(pool: *mut CxlPool, offset: u64, len_bytes: usize) -> Outcome<*mut c_void> {
    handle::with(pool, |pool| {
        pool.check_range(offset, len_bytes)?;
        Ok(pool.pointer(offset))
    })
}
