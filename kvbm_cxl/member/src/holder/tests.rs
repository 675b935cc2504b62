// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn only_keys_of_slots_are_slots() {
    let keys = Keys { folder: "kvbm-cxl/ab/slots/".into() };
    assert_eq!(keys.slot(&keys.of(63)), Some(63));
    for key in
        ["kvbm-cxl/ab/slots/", "kvbm-cxl/ab/slots/x", "kvbm-cxl/ab/slots/01", "kvbm-cxl/ab/slots/65536", "other/1", "kvbm-cxl/ac/slots/1"]
    {
        assert_eq!(keys.slot(key), None, "{key}");
    }
}

#[test]
fn what_is_no_holder_is_an_error_that_names_the_key() {
    let holder = Holder { machine: "0f".repeat(16), incarnation: 7, pid: 1, start: 2 };
    assert_eq!(Holder::from_json("k", holder.to_json().unwrap().as_bytes()).unwrap(), holder);
    for value in [&b""[..], b"{}", b"\xff\xfe", b"{\"machine\": 1}", b"[1"] {
        let error = Holder::from_json("some/key", value).unwrap_err().to_string();
        assert!(error.contains("some/key"), "{error}");
    }
}
