// SPDX-License-Identifier: Apache-2.0

use super::*;

fn last() -> String {
    // SAFETY: a C string of this thread, copied at once.
    unsafe { CStr::from_ptr(last_text()) }.to_str().unwrap().to_owned()
}

#[test]
fn failures_are_remembered_per_thread_and_success_leaves_them() {
    assert_eq!(status_of(|| Err(Error::Closed.into())), Status::E_CLOSED as c_int);
    assert_eq!((last_status(), last()), (-7, Error::Closed.to_string()));
    assert_eq!(status_of(|| Ok(())), 0);
    assert_eq!(last_status(), -7);
    std::thread::spawn(|| assert_eq!((last_status(), last()), (0, String::new()))).join().unwrap();
    forget();
    assert_eq!((last_status(), last()), (0, String::new()));
}

#[test]
fn panics_end_at_the_wall() {
    let status = status_of(|| panic!("meant: {}", 7));
    assert_eq!(status, Status::E_INTERNAL as c_int);
    assert_eq!(last(), "bug in the library: meant: 7");
}

#[test]
fn long_texts_are_cut_between_characters_and_zeros_do_not_end_them() {
    remember(&Failure::invalid("é".repeat(400)));
    assert_eq!(last(), "é".repeat(255));
    remember(&Failure::invalid("a\0b"));
    assert_eq!(last(), "a?b");
}

#[test]
fn every_status_has_a_text() {
    for (name, status) in Status::ALL {
        let text = text_of(*status as c_int);
        assert!(!text.is_empty() && text != c"unknown status", "{name}");
    }
    assert_eq!(text_of(17), c"unknown status");
}
