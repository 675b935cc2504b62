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
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::ptr::null_mut;
    use std::sync::Mutex;

    unsafe extern "C" fn keep(context: *mut c_void, level: c_int, message: *const c_char) {
        // SAFETY: the context is the test's list, which outlives the calls; the message is a string of C.
        let (kept, message) = unsafe { (&*context.cast::<Mutex<Vec<(c_int, String)>>>(), CStr::from_ptr(message)) };
        kept.lock().unwrap().push((level, message.to_str().unwrap().into()));
    }

    #[test]
    fn what_the_library_logs_goes_to_the_function_until_it_is_taken_away() {
        let kept: Mutex<Vec<(c_int, String)>> = Mutex::default();
        // SAFETY: the list lives to the end of this function, and the function is taken away before.
        unsafe { cxl_shm_set_log(Some(keep), (&raw const kept).cast_mut().cast()) };
        log::warn!("a round failed\0 here");
        log::error!("a file was replaced");
        log::info!("left out");
        // SAFETY: no function.
        unsafe { cxl_shm_set_log(None, null_mut()) };
        log::warn!("not told");
        assert_eq!(*kept.lock().unwrap(), [(2, "a round failed  here".to_string()), (1, "a file was replaced".to_string())]);
    }
}
