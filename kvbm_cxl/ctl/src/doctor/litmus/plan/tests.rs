// SPDX-License-Identifier: Apache-2.0
//! Tests of `plan`.
use super::*;

#[test]
fn trials_travel_as_words() {
    let trials = Trial::plan(Instructions::best().unwrap(), true, true);
    assert!(trials.len() > Test::ALL.len());
    assert!(Trial::plan(Instructions::best().unwrap(), true, false).iter().all(|trial| trial.test != Test::GpuPayload));
    for trial in trials {
        assert_eq!(Trial::decode(trial.encode()).unwrap(), Some(trial));
    }
    for word in [u64::MAX, 1 << 48, 0x0900_0000_0000, 0x0009_0000_0000] {
        assert_eq!(Trial::decode(word).unwrap(), None, "{word:#x}");
    }
    for violation in Violation::ALL {
        assert_eq!(Violation::from_code(violation.code()), Some(violation));
    }
    assert_eq!((Violation::from_code(0), Violation::from_code(99)), (None, None));
}
