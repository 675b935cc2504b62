// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn failed_rounds_are_counted_by_class_and_the_last_is_kept() {
    let rounds = FailedRounds::default();
    assert_eq!((rounds.last(), rounds.counts().iter().sum::<u64>()), (None, 0));
    rounds.record("a round", &Error::Closed);
    let late = Error::Timeout { what: "a lock".into(), timeout_ms: 7 };
    for _ in 0..2 * REMEMBERED {
        rounds.record("another round", &late);
    }
    let counted: Vec<_> = ERROR_CLASSES.iter().zip(rounds.counts()).filter(|(_, count)| *count > 0).collect();
    assert_eq!(counted, [(&"timeout", 2 * REMEMBERED as u64), (&"other", 1)]);
    let last = FailedRound { what: "another round", class: "timeout", message: late.to_string() };
    assert_eq!(rounds.last(), Some(last));
    assert_eq!(held(&rounds.seen).logged.len(), 2, "one that repeats is logged once a minute");
}

#[test]
fn what_is_remembered_of_the_log_is_bounded() {
    let rounds = FailedRounds::default();
    for timeout_ms in 0..3 * REMEMBERED as u64 {
        rounds.record("a round", &Error::Timeout { what: "a lock".into(), timeout_ms });
    }
    assert_eq!(held(&rounds.seen).logged.len(), REMEMBERED);
}
