// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::collections::HashSet;

#[test]
fn counts_are_kept_apart_and_rendered() {
    let counts = Counts::default();
    counts.count(Operation::Put, &[Outcome::Done, Outcome::NoRoom, Outcome::Done]);
    counts.count(Operation::Get, &[Outcome::Dropped]);
    assert_eq!((counts.of(Operation::Put, Outcome::Done), counts.all(Operation::Put), counts.all(Operation::Has)), (2, 3, 0));
    let text = counts.render();
    assert!(text.contains("kvbm_cxl_tier_blocks_total{operation=\"put\",outcome=\"no_room\"} 1\n"), "{text}");
    assert!(text.contains("{operation=\"get\",outcome=\"dropped\"} 1\n") && !text.contains("\"has\""), "{text}");
    let names: HashSet<_> = Outcome::ALL.iter().map(|outcome| outcome.name()).collect();
    assert_eq!(names.len(), Outcome::ALL.len());
}

#[test]
fn only_what_is_there_is_ok() {
    let ok: Vec<_> = Outcome::ALL.iter().filter(|outcome| outcome.is_ok()).collect();
    assert_eq!(ok, [&Outcome::Done, &Outcome::Exists]);
    assert_eq!(Outcome::of(&Answer::Missed(MissReason::Writing)), Outcome::Absent);
    assert_eq!(Outcome::of(&Answer::Missed(MissReason::FencedDuring)), Outcome::OwnerGone);
    assert_eq!(Outcome::of(&Answer::Refused(RefusalReason::Busy)), Outcome::Busy);
}
