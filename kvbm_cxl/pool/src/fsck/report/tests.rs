// SPDX-License-Identifier: Apache-2.0

use super::*;

fn finding(first: u64, meaning: &str) -> Finding {
    Finding {
        severity: Severity::Error,
        rule: "test",
        place: FindingPlace::Lines { region: Region::Grant, first, count: 1 },
        meaning: meaning.into(),
        remedy: Remedy::None("nothing"),
    }
}

#[test]
fn neighbours_merge_and_others_do_not() {
    let mut report = Report::default();
    [finding(1, "a"), finding(2, "a"), finding(4, "a"), finding(5, "b")].into_iter().for_each(|found| report.add(found));
    let places: Vec<_> = report.findings.iter().map(|found| found.place).collect();
    let lines = |first, count| FindingPlace::Lines { region: Region::Grant, first, count };
    assert_eq!(places, [lines(1, 2), lines(4, 1), lines(5, 1)]);
    assert_eq!(report.count(Severity::Error), 3);
}

#[test]
fn a_report_is_bounded_and_counts_on() {
    let mut report = Report::default();
    (0..MAX_FINDINGS as u64 + 7).for_each(|index| report.add(finding(2 * index, "a")));
    assert_eq!((report.findings.len(), report.omitted), (MAX_FINDINGS, [0, 0, 7]));
    assert!(!report.is_clean());
}
