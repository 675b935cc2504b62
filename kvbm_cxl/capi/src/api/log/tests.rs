// SPDX-License-Identifier: Apache-2.0

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
