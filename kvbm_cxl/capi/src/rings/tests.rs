// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::time::Duration;

#[test]
fn an_attempt_that_takes_long_is_the_last_one() {
    let turns = Turns::of(());
    let mut turn = turn(&turns, 1, Deadline::within(50)).unwrap();
    let (deadline, mut attempts) = (Deadline::within(50), 0);
    let failed = wait(&mut turn, 1, deadline, |(), timeout_ms| -> Result<(), _> {
        assert!(timeout_ms <= SLICE_MS);
        attempts += 1;
        std::thread::sleep(Duration::from_millis(60));
        Err(Error::Timeout { what: "the lock of another host".into(), timeout_ms })
    });
    let failed = failed.err().unwrap();
    assert_eq!((attempts, failed.status), (1, Status::E_TIMEOUT));
    assert!(failed.message.contains("50 ms"), "{}", failed.message);
}

#[test]
fn a_wait_lasts_to_its_deadline() {
    let turns = Turns::of(());
    let mut turn = turn(&turns, 1, Deadline::within(0)).unwrap();
    let (deadline, mut attempts) = (Deadline::within(20 * SLICE_MS), 0);
    let got = wait(&mut turn, 1, deadline, |(), timeout_ms| {
        attempts += 1;
        if attempts == 5 { Ok("a message") } else { Err(Error::Timeout { what: "a message".into(), timeout_ms }) }
    });
    assert_eq!(got.ok(), Some("a message"));
}
