// SPDX-License-Identifier: Apache-2.0
//! Messages of the library's background threads, for the caller's log.

use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{PoisonError, RwLock};

type LogFn = unsafe extern "C" fn(context: *mut c_void, level: c_int, message: *const c_char);

#[derive(Clone, Copy)]
struct Target {
    log: LogFn,
    context: *mut c_void,
}

// SAFETY: the caller of `cxl_shm_set_log` promises that the function may be called with this context from any thread.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

/// Held while the function is called, so that it is not called any more when `cxl_shm_set_log` has returned.
static TARGET: RwLock<Option<Target>> = RwLock::new(None);

struct Caller;

impl Log for Caller {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let target = TARGET.read().unwrap_or_else(PoisonError::into_inner);
        let Some(target) = *target else { return };
        let level = match record.level() {
            Level::Error => 1,
            Level::Warn => 2,
            Level::Info => 3,
            Level::Debug | Level::Trace => 4,
        };
        let Ok(message) = CString::new(record.args().to_string().replace('\0', " ")) else { return };
        // SAFETY: the caller of `cxl_shm_set_log` promises that it may be called from any thread; the message lives as long as the call.
        unsafe { (target.log)(target.context, level, message.as_ptr()) };
    }

    fn flush(&self) {}
}

/// # Safety
/// `log` may be called with `context` from any thread until this function is called again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_set_log(log: Option<LogFn>, context: *mut c_void) {
    *TARGET.write().unwrap_or_else(PoisonError::into_inner) = log.map(|log| Target { log, context });
    // Fails where it is set already.
    let _ = log::set_logger(&Caller);
    log::set_max_level(if log.is_some() { LevelFilter::Warn } else { LevelFilter::Off });
}

#[cfg(test)]
mod tests;
