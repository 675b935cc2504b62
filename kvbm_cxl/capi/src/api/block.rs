// SPDX-License-Identifier: Apache-2.0
//! Blocks.

use super::args::Out;
use crate::handle;
use crate::pool::check_flags;
use crate::status::{Failure, Outcome, Status, catch_failure, status_of};
use crate::types::{ALLOC_SCRATCH, CxlPool};
use cxl_pool::Error;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Allocates a block; a kept one is kept before its address is returned.
fn allocate(pool: *mut CxlPool, size: usize, flags: u32) -> Outcome<*mut c_void> {
    check_flags(flags, ALLOC_SCRATCH)?;
    handle::with(pool, |pool| {
        pool.as_member(|member| {
            let block = member.allocator.alloc(size as u64)?;
            if flags & ALLOC_SCRATCH == 0
                && let Err(error) = member.allocator.keep(block.offset)
            {
                // Whether or not the keep took effect, no caller knows of the block; if this fails too, it is lost until the pool is
                // checked.
                let _ = member.allocator.free(block.offset);
                return Err(error.into());
            }
            Ok(pool.pointer(block.offset))
        })
    })
}

fn on_block(ptr: *mut c_void, work: impl FnOnce(&crate::pool::Member, u64) -> cxl_pool::Result<()>) -> Outcome<()> {
    handle::with_address(ptr.addr(), 1, |pool, offset| {
        pool.as_member(|member| {
            work(member, offset).map_err(|error| match error {
                Error::NotFound(reason) => Failure::new(Status::E_NOT_A_BLOCK, reason),
                other => other.into(),
            })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn shmalloc(size: usize) -> *mut c_void {
    catch_failure(|| allocate(null_mut(), size, 0)).unwrap_or(null_mut())
}

#[unsafe(no_mangle)]
pub extern "C" fn shfree(ptr: *mut c_void) {
    cxl_shm_free(ptr);
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_alloc(pool: *mut CxlPool, size: usize, flags: u32, ptr: Out<*mut c_void>) -> c_int {
    status_of(|| ptr.fill("address", || allocate(pool, size, flags)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_alloc_scratch(size: usize) -> *mut c_void {
    catch_failure(|| allocate(null_mut(), size, ALLOC_SCRATCH)).unwrap_or(null_mut())
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_keep(ptr: *mut c_void) -> c_int {
    status_of(|| on_block(ptr, |member, offset| member.allocator.keep(offset)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_free(ptr: *mut c_void) -> c_int {
    if ptr.is_null() {
        return Status::OK as c_int;
    }
    status_of(|| on_block(ptr, |member, offset| member.allocator.free(offset)))
}
