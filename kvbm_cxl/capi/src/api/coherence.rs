// SPDX-License-Identifier: Apache-2.0
//! Flushing, publishing, copying: the steps of the coherence layer with their fences, on ranges that lie in the blocks of a pool.

use crate::copies;
use crate::handle;
use crate::status::{Failure, Outcome, status_of};
use cxl_pool::coherence::Coherence;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::ffi::{c_int, c_void};

/// Runs `work` on the memory that a range lies in, with the pool offset of its first byte.
fn on_range(address: *const c_void, size: usize, work: impl FnOnce(&dyn Coherence, u64) -> Outcome<()>) -> Outcome<()> {
    handle::with_address(address.addr(), size, |pool, offset| work(&**pool.pool().lines().memory(), offset))
}

/// Flushes a range so that it is written back and dropped when this returns, and no later load runs ahead.
fn flush(address: *const c_void, size: usize) -> Outcome<()> {
    on_range(address, size, |memory, offset| {
        memory.flush_range(offset, size as u64)?;
        memory.fence_all();
        Ok(())
    })
}

fn check_line(line: *const c_void, bytes: *const c_void) -> Outcome<()> {
    if !line.addr().is_multiple_of(LINE_BYTES) {
        return Err(Failure::invalid(format!("{line:p} is not the start of a line of {LINE_BYTES} bytes")));
    }
    not_null(bytes)
}

fn not_null(ordinary: *const c_void) -> Outcome<()> {
    if ordinary.is_null() { Err(Failure::invalid("the pointer to ordinary memory is NULL")) } else { Ok(()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn clflush(addr: *mut c_void, size: usize) {
    cxl_shm_flush(addr, size);
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_flush(addr: *const c_void, size: usize) -> c_int {
    status_of(|| flush(addr, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_invalidate(addr: *const c_void, size: usize) -> c_int {
    // No instruction drops a line without writing it back, so the two have one recipe.
    status_of(|| flush(addr, size))
}

/// # Safety
/// `bytes` is null or has [`LINE_BYTES`] readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_publish_line(line: *mut c_void, bytes: *const c_void) -> c_int {
    status_of(|| {
        check_line(line, bytes)?;
        // SAFETY: not null, so that many bytes; an array of bytes needs no alignment.
        let content = Line(unsafe { bytes.cast::<[u8; LINE_BYTES]>().read() });
        on_range(line, LINE_BYTES, |memory, offset| {
            memory.write_line(offset, &content)?;
            memory.fence_stores();
            Ok(())
        })
    })
}

/// # Safety
/// `bytes` is null or has [`LINE_BYTES`] writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_fetch_line(line: *const c_void, bytes: *mut c_void) -> c_int {
    status_of(|| {
        check_line(line, bytes)?;
        on_range(line, LINE_BYTES, |memory, offset| {
            memory.flush_line(offset)?;
            memory.fence_all();
            let content = memory.load_line(offset)?;
            memory.fence_loads();
            // SAFETY: not null, so that many bytes; an array of bytes needs no alignment.
            unsafe { bytes.cast::<[u8; LINE_BYTES]>().write(content.0) };
            Ok(())
        })
    })
}

/// # Safety
/// `source` is null or has `size` readable bytes that no thread writes meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_copy_in(destination: *mut c_void, source: *const c_void, size: usize) -> c_int {
    status_of(|| {
        not_null(source)?;
        on_range(destination, size, |memory, offset| {
            // SAFETY: not null, so `size` readable bytes; a range in the pool is no larger than isize::MAX.
            memory.copy_in(offset, unsafe { std::slice::from_raw_parts(source.cast::<u8>(), size) })?;
            memory.fence_stores();
            Ok(())
        })
    })
}

/// # Safety
/// `destination` is null or has `size` writable bytes that no other thread uses meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_copy_out(destination: *mut c_void, source: *const c_void, size: usize) -> c_int {
    status_of(|| {
        not_null(destination)?;
        handle::with_address(source.addr(), size, |pool, offset| {
            // SAFETY: not null, so `size` writable bytes; a range in the pool is no larger than isize::MAX.
            let destination = unsafe { std::slice::from_raw_parts_mut(destination.cast::<u8>(), size) };
            copies::copy_out(&**pool.pool().lines().memory(), || pool.copy_engine(), offset, destination)
        })
    })
}
