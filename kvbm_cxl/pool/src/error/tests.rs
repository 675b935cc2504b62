// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn what_cannot_be_seen_is_printed_as_an_escape() {
    assert_eq!(escaped("/dev/shm/ähm 数"), "/dev/shm/ähm 数");
    let name = "/dev/shm/a\u{202e}txt.\u{1b}[2J\n\u{200b}\u{2067}\u{feff}";
    let safe = r"/dev/shm/a\u{202e}txt.\u{1b}[2J\n\u{200b}\u{2067}\u{feff}";
    assert_eq!(escaped(name), safe);
    assert_eq!(display_path(Path::new(name)), safe);
    for error in [
        Error::NotAPool { device: name.into(), reason: String::new() },
        Error::Invalid(name.into()),
        Error::NotFound(name.into()),
        Error::Exists(name.into()),
        Error::DeviceLost { device: name.into(), offset: 0, len_bytes: 1, cause: name.into() },
        Error::Os { what: name.into(), source: std::io::ErrorKind::NotFound.into() },
        Error::Timeout { what: name.into(), timeout_ms: 1 },
    ] {
        assert!(error.to_string().contains(safe) && !error.to_string().contains('\u{202e}'), "{error}");
    }
}
