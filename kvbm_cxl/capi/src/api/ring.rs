// SPDX-License-Identifier: Apache-2.0
//! Messages between processes.

use super::{c_bytes, writable};
use crate::handle;
use crate::rings::RingTable;
use crate::status::{Failure, Outcome, Status, status_of};
use crate::types::{CxlPool, CxlRing};
use cxl_pool::limits::MAX_OBJECT_NAME_BYTES;
use cxl_pool::ring::Alive;
use std::ffi::{c_char, c_int, c_void};

const NAME: &str = "name of the listener";

fn on_rings<T>(pool: *mut CxlPool, timeout_ms: u64, work: impl FnOnce(&RingTable, u64) -> Outcome<T>) -> Outcome<T> {
    handle::with(pool, |pool| pool.as_member(|member| work(&member.rings, pool.timeout_ms(timeout_ms))))
}

/// # Safety
/// `name` is null or a C string; `listener` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_listen(pool: *mut CxlPool, name: *const c_char, listener: *mut CxlRing) -> c_int {
    status_of(|| {
        writable(listener, "listener")?;
        // SAFETY: as demanded of the caller.
        let name = unsafe { c_bytes(name, MAX_OBJECT_NAME_BYTES, NAME) }?;
        let number = on_rings(pool, 0, |rings, _| rings.listen(name))?;
        // SAFETY: not null, so writable.
        unsafe { listener.write(number) };
        Ok(())
    })
}

/// # Safety
/// `connection` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_accept(pool: *mut CxlPool, listener: CxlRing, timeout_ms: u64, connection: *mut CxlRing) -> c_int {
    status_of(|| {
        writable(connection, "connection")?;
        let number = on_rings(pool, timeout_ms, |rings, timeout_ms| rings.accept(listener, timeout_ms))?;
        // SAFETY: not null, so writable.
        unsafe { connection.write(number) };
        Ok(())
    })
}

/// # Safety
/// `name` is null or a C string; `connection` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_connect(pool: *mut CxlPool, name: *const c_char, timeout_ms: u64, connection: *mut CxlRing) -> c_int {
    status_of(|| {
        writable(connection, "connection")?;
        // SAFETY: as demanded of the caller.
        let name = unsafe { c_bytes(name, MAX_OBJECT_NAME_BYTES, NAME) }?;
        let number = on_rings(pool, timeout_ms, |rings, timeout_ms| rings.connect(name, timeout_ms))?;
        // SAFETY: not null, so writable.
        unsafe { connection.write(number) };
        Ok(())
    })
}

/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_presence(pool: *mut CxlPool, name: *const c_char) -> c_int {
    status_of(|| {
        // SAFETY: as demanded of the caller.
        let name = unsafe { c_bytes(name, MAX_OBJECT_NAME_BYTES, NAME) }?;
        on_rings(pool, 0, |rings, _| rings.presence(name))
    })
}

/// # Safety
/// `len_bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_max_message(pool: *mut CxlPool, connection: CxlRing, len_bytes: *mut usize) -> c_int {
    status_of(|| {
        writable(len_bytes, "length")?;
        let most = on_rings(pool, 0, |rings, _| rings.max_message_bytes(connection))?;
        // SAFETY: not null, so writable. Messages have at most 64 KiB.
        unsafe { len_bytes.write(most as usize) };
        Ok(())
    })
}

/// # Safety
/// `message` is readable for `len_bytes` bytes; it may be null if these are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_send(
    pool: *mut CxlPool,
    connection: CxlRing,
    message: *const c_void,
    len_bytes: usize,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        if message.is_null() && len_bytes != 0 {
            return Err(Failure::invalid("the message is NULL"));
        }
        let message = if len_bytes == 0 {
            &[]
        } else if len_bytes > isize::MAX as usize {
            return Err(Failure::new(Status::E_TOO_LARGE, format!("a message of {len_bytes} bytes")));
        } else {
            // SAFETY: not null, and readable as demanded of the caller.
            unsafe { std::slice::from_raw_parts(message.cast::<u8>(), len_bytes) }
        };
        on_rings(pool, timeout_ms, |rings, timeout_ms| rings.send(connection, message, timeout_ms))
    })
}

/// # Safety
/// `message` is writable for `size` bytes, and may be null if these are none; `len_bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_recv(
    pool: *mut CxlPool,
    connection: CxlRing,
    message: *mut c_void,
    size: usize,
    len_bytes: *mut usize,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        writable(len_bytes, "length")?;
        if message.is_null() && size != 0 {
            return Err(Failure::invalid("the pointer to the message is NULL"));
        }
        let copy = |bytes: &[u8]| {
            if !bytes.is_empty() {
                // SAFETY: there is room for `size` bytes, and no more of them are copied; they lie in memory of this library.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.cast::<u8>(), bytes.len()) };
            }
            bytes.len()
        };
        let received = on_rings(pool, timeout_ms, |rings, timeout_ms| rings.recv(connection, size, timeout_ms, copy))?;
        // SAFETY: not null, so writable.
        unsafe { len_bytes.write(received.unwrap_or_else(|len| len)) };
        match received {
            Ok(_) => Ok(()),
            Err(len) => Err(Failure::new(Status::E_TOO_LARGE, format!("a message of {len} bytes waits, there is room for {size}"))),
        }
    })
}

/// # Safety
/// `seen` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_check(pool: *mut CxlPool, connection: CxlRing, seen: *mut u32) -> c_int {
    status_of(|| {
        let alive = on_rings(pool, 0, |rings, _| rings.check(connection))?;
        if !seen.is_null() {
            // SAFETY: not null, so writable.
            unsafe { seen.write(u32::from(alive == Alive::Seen)) };
        }
        Ok(())
    })
}

/// # Safety
/// `trace` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_trace(pool: *mut CxlPool, connection: CxlRing, trace: *mut CxlRing) -> c_int {
    status_of(|| {
        writable(trace, "trace")?;
        let number = on_rings(pool, 0, |rings, _| rings.trace(connection))?;
        // SAFETY: not null, so writable.
        unsafe { trace.write(number) };
        Ok(())
    })
}

/// # Safety
/// `has_let_go` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_ring_has_let_go(pool: *mut CxlPool, trace: CxlRing, has_let_go: *mut u32) -> c_int {
    status_of(|| {
        writable(has_let_go, "answer")?;
        let answer = on_rings(pool, 0, |rings, _| rings.has_let_go(trace))?;
        // SAFETY: not null, so writable.
        unsafe { has_let_go.write(u32::from(answer)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_close(pool: *mut CxlPool, ring: CxlRing, timeout_ms: u64) -> c_int {
    status_of(|| on_rings(pool, timeout_ms, |rings, timeout_ms| rings.close(ring, timeout_ms)))
}
