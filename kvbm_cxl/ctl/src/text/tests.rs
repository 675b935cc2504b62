// SPDX-License-Identifier: Apache-2.0
//! Tests of `text`.
use super::*;

#[test]
fn sizes_are_exact_or_rounded() {
    assert_eq!([0, 1023, 1024, 1536, 64 << 20, 3 << 40].map(bytes), ["0 B", "1023 B", "1 KiB", "1.5 KiB", "64 MiB", "3 TiB"]);
    assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
}

#[test]
fn control_characters_do_not_reach_the_terminal() {
    assert_eq!(safe("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
}

#[test]
fn columns_line_up() {
    let rows = [["a", "bb"], ["ccc", "d"]].map(|row| row.map(String::from).to_vec());
    assert_eq!(table(&rows), "a    bb\nccc  d\n");
}
