// SPDX-License-Identifier: Apache-2.0
//! Flushing, publishing, copying: the steps of the coherence layer with their fences, on ranges that lie in the blocks of a pool.

use super::args::{In, Out};
use crate::copies;
use crate::handle;
use crate::status::{Failure, Outcome, status_of};
use cxl_pool::coherence::Coherence;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::ffi::{c_int, c_void};

const MEMORY: &str = "ordinary memory";

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

fn check_line(line: *const c_void) -> Outcome<()> {
    if line.addr().is_multiple_of(LINE_BYTES) {
        return Ok(());
    }
    Err(Failure::invalid(format!("{line:p} is not the start of a line of {LINE_BYTES} bytes")))
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

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_publish_line(line: *mut c_void, bytes: In<c_void>) -> c_int {
    status_of(|| {
        check_line(line)?;
        bytes.check(MEMORY)?;
        let content = Line(bytes.bytes(LINE_BYTES, MEMORY)?.try_into().map_err(|_| Failure::invalid("a line has 64 bytes"))?);
        on_range(line, LINE_BYTES, |memory, offset| {
            memory.write_line(offset, &content)?;
            memory.fence_stores();
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_fetch_line(line: *const c_void, bytes: Out<c_void>) -> c_int {
    status_of(|| {
        check_line(line)?;
        bytes.check(MEMORY)?;
        on_range(line, LINE_BYTES, |memory, offset| {
            memory.flush_line(offset)?;
            memory.fence_all();
            let content = memory.load_line(offset)?;
            memory.fence_loads();
            bytes.write_bytes(LINE_BYTES, &content.0);
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_copy_in(destination: *mut c_void, source: In<c_void>, size: usize) -> c_int {
    status_of(|| {
        source.check(MEMORY)?;
        on_range(destination, size, |memory, offset| {
            memory.copy_in(offset, source.bytes(size, MEMORY)?)?;
            memory.fence_stores();
            Ok(())
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_copy_out(mut destination: Out<c_void>, source: *const c_void, size: usize) -> c_int {
    status_of(|| {
        destination.check(MEMORY)?;
        handle::with_address(source.addr(), size, |pool, offset| {
            let destination = destination.bytes(size, MEMORY)?;
            copies::copy_out(&**pool.pool().lines().memory(), || pool.copy_engine(), offset, destination)
        })
    })
}
