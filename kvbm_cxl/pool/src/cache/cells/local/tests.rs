// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn notes_keep_cell_and_count() {
    assert_eq!(pin_of_note(note(0, 3)), Some((0, 3)));
    assert_eq!(pin_of_note(note(u64::from(u32::MAX), u16::MAX)), Some((u32::MAX.into(), u16::MAX)));
    assert_eq!((note(7, 0), pin_of_note(0)), (0, None));
}
