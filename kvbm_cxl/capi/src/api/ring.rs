// SPDX-License-Identifier: Apache-2.0
//! Messages between processes.

use super::args::{In, Out};
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

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_listen(pool: *mut CxlPool, name: In<c_char>, listener: Out<CxlRing>) -> c_int {
    status_of(|| {
        listener.fill("listener", || {
            let name = name.text(MAX_OBJECT_NAME_BYTES, NAME)?;
            on_rings(pool, 0, |rings, _| rings.listen(name))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_accept(pool: *mut CxlPool, listener: CxlRing, timeout_ms: u64, connection: Out<CxlRing>) -> c_int {
    let accept = || on_rings(pool, timeout_ms, |rings, timeout_ms| rings.accept(listener, timeout_ms));
    status_of(|| connection.fill("connection", accept))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_connect(pool: *mut CxlPool, name: In<c_char>, timeout_ms: u64, connection: Out<CxlRing>) -> c_int {
    status_of(|| {
        connection.fill("connection", || {
            let name = name.text(MAX_OBJECT_NAME_BYTES, NAME)?;
            on_rings(pool, timeout_ms, |rings, timeout_ms| rings.connect(name, timeout_ms))
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_presence(pool: *mut CxlPool, name: In<c_char>) -> c_int {
    status_of(|| {
        let name = name.text(MAX_OBJECT_NAME_BYTES, NAME)?;
        on_rings(pool, 0, |rings, _| rings.presence(name))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_max_message(pool: *mut CxlPool, connection: CxlRing, len_bytes: Out<usize>) -> c_int {
    // Messages have at most 64 KiB.
    let most = || Ok(on_rings(pool, 0, |rings, _| rings.max_message_bytes(connection))? as usize);
    status_of(|| len_bytes.fill("length", most))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_send(
    pool: *mut CxlPool,
    connection: CxlRing,
    message: In<c_void>,
    len_bytes: usize,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        let message = message.bytes(len_bytes, "message")?;
        on_rings(pool, timeout_ms, |rings, timeout_ms| rings.send(connection, message, timeout_ms))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_recv(
    pool: *mut CxlPool,
    connection: CxlRing,
    message: Out<c_void>,
    size: usize,
    len_bytes: Out<usize>,
    timeout_ms: u64,
) -> c_int {
    status_of(|| {
        len_bytes.check("length")?;
        if size != 0 {
            message.check("message")?;
        }
        let copy = |bytes: &[u8]| {
            message.write_bytes(size, bytes);
            bytes.len()
        };
        let received = on_rings(pool, timeout_ms, |rings, timeout_ms| rings.recv(connection, size, timeout_ms, copy))?;
        len_bytes.set(received.unwrap_or_else(|len| len));
        match received {
            Ok(_) => Ok(()),
            Err(len) => Err(Failure::new(Status::E_TOO_LARGE, format!("a message of {len} bytes waits, there is room for {size}"))),
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_check(pool: *mut CxlPool, connection: CxlRing, seen: Out<u32>) -> c_int {
    status_of(|| {
        let alive = on_rings(pool, 0, |rings, _| rings.check(connection))?;
        seen.set(u32::from(alive == Alive::Seen));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_trace(pool: *mut CxlPool, connection: CxlRing, trace: Out<CxlRing>) -> c_int {
    status_of(|| trace.fill("trace", || on_rings(pool, 0, |rings, _| rings.trace(connection))))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_has_let_go(pool: *mut CxlPool, trace: CxlRing, has_let_go: Out<u32>) -> c_int {
    status_of(|| has_let_go.fill("answer", || Ok(on_rings(pool, 0, |rings, _| rings.has_let_go(trace))?.into())))
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_ring_close(pool: *mut CxlPool, ring: CxlRing, timeout_ms: u64) -> c_int {
    status_of(|| on_rings(pool, timeout_ms, |rings, timeout_ms| rings.close(ring, timeout_ms)))
}
