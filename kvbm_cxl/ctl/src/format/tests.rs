// SPDX-License-Identifier: Apache-2.0
//! Tests of `format`.
use super::*;

#[test]
fn cells_are_read() {
    let area = |cell_bytes, share| Ok(Cells::Area { cell_bytes, share });
    for (text, expected) in [
        ("none", Ok(Cells::None)),
        ("1M", area(1 << 20, None)),
        ("64K:25%", area(64 << 10, Some(Share::Percent(25)))),
        ("192:1G", area(192, Some(Share::Bytes(1 << 30)))),
    ] {
        assert_eq!(cells(text), expected, "{text}");
    }
    for text in ["", ":", "1M:", "1M:0%", "1M:101%", "1M:%", "1M:-5%", "M:5%", "1M:5%:5%", "None"] {
        assert!(cells(text).is_err(), "{text}");
    }
}
