// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn owners_are_remembered_by_every_clone_and_bounded() {
    let area = LocalArea::private(100).unwrap();
    let other = area.clone();
    area.set_owner(99, 7);
    area.set_owner(100, 8);
    assert_eq!((other.owner(99), other.owner(100), other.owner(0)), (7, 0, 0));
    assert_eq!(LocalArea::len_bytes(100) % 64, 0);
}

#[test]
fn pending_frees_are_taken_once() {
    let area = LocalArea::private(1).unwrap();
    assert!(area.push(64, FROM_CALLERS));
    assert!(area.push(128, FROM_HOSTS));
    assert_eq!(area.pending().collect::<Vec<_>>(), [64, 128]);
    assert!(area.pull(64) && !area.pull(64) && area.pull(128));
    assert_eq!(area.pending().count(), 0);
}

#[test]
fn callers_cannot_use_the_room_of_other_hosts() {
    let area = LocalArea::private(1).unwrap();
    assert_eq!((1..).take_while(|&offset| area.push(offset, FROM_CALLERS)).count(), FROM_CALLERS.len());
    assert_eq!((area.room(FROM_CALLERS), area.room(FROM_HOSTS)), (0, FROM_HOSTS.len()));
    assert!(area.push(1 << 20, FROM_HOSTS));
}

#[test]
fn each_block_of_a_message_begins_once() {
    let area = LocalArea::private(1).unwrap();
    assert!(area.begin_block(1, 3, 9, 0) && area.begin_block(1, 3, 9, 5) && !area.begin_block(1, 3, 9, 0));
    assert!(area.begin_block(1, 2, 9, 0));
    assert!(area.begin_block(1, 3, 10, 0) && area.begin_block(1, 3, 10, 5));
    // The same number in another slot of this machine is another message.
    assert!(area.begin_block(0, 3, 10, 0) && area.begin_block(0, 3, 10, 5) && !area.begin_block(0, 3, 10, 5));
    assert!(area.begin_block(0, 3, u32::MAX, 0) && !area.begin_block(0, 3, u32::MAX, 0));
    assert_eq!((area.begun_blocks(0, 3, u32::MAX), area.begun_blocks(1, 3, u32::MAX)), (1, 0));
}

#[test]
fn a_message_is_untold_from_its_first_block_on_until_its_sender_is_told() {
    let area = LocalArea::private(1).unwrap();
    area.set_told(3);
    assert!(!area.is_untold() && area.begin_block(1, 3, 9, 2) && area.is_untold());
    area.set_told(2);
    assert!(area.is_untold());
    area.set_told(3);
    assert!(!area.is_untold() && area.begun_blocks(1, 3, 9) == TOLD && !area.begin_block(1, 3, 9, 1));
    assert!(area.begin_block(1, 3, 10, 1) && area.is_untold());
}

#[test]
fn an_area_of_another_build_is_refused() {
    let area = LocalArea::private(1).unwrap();
    area.header().version.store(VERSION + 1, Ordering::Relaxed);
    // SAFETY: the same bytes as `area`, which is kept alive.
    let again = unsafe { LocalArea::at(area.start, 1, area._owner.clone()) };
    assert!(matches!(again, Err(Error::Invalid(_))));
}
