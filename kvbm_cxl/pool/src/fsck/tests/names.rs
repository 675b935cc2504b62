// SPDX-License-Identifier: Apache-2.0
//! Names of machines in a pool whose lines may hold any bytes.

use super::*;
use crate::host::{MAX_NAME_BYTES, NameLine, machine_name, name_lines, publish_name};

fn publish(lines: &Lines, slot: u32, incarnation: u32, name: &str) {
    publish_name(lines, slot, incarnation, name.as_bytes()).unwrap();
}

#[test]
fn a_name_is_shown_for_its_slot_and_incarnation_alone() {
    let lines = in_use();
    for name in ["a", "rack1/prefill", &"n".repeat(56), &"n".repeat(57), &"n".repeat(MAX_NAME_BYTES)] {
        publish(&lines, 1, 2, name);
        assert_eq!(machine_name(&lines, 1, 2).as_deref(), Some(name));
        assert_eq!(
            [(0, 2), (2, 2), (1, 1), (1, 3), (1, 0)].map(|(slot, incarnation)| machine_name(&lines, slot, incarnation)),
            [const { None }; 5]
        );
    }
    publish(&lines, 1, 2, &"long".repeat(100));
    assert_eq!(machine_name(&lines, 1, 2).unwrap(), "long".repeat(MAX_NAME_BYTES / 4));
    let survey = survey(&lines, &seats()).unwrap();
    let [first, second] = MACHINES.map(MachineId);
    assert_eq!((survey.name_of(first), survey.machine_text(first)), (None, first.to_string()));
    assert_eq!(survey.machine_text(second), format!("{} ({second})", "long".repeat(MAX_NAME_BYTES / 4)));
    assert!(!rules(&lines).contains(&"name.damaged"));
}

#[test]
fn a_name_of_two_incarnations_is_none() {
    let lines = in_use();
    publish(&lines, 1, 1, &"before".repeat(20));
    let (index, offset) = name_lines(1).next().unwrap();
    lines.publish_in(lines.seal_of(&[]), index, offset, NameLine { crc: 0, incarnation: 2, part: [b'a'; 56] }).unwrap();
    assert_eq!([1, 2].map(|incarnation| machine_name(&lines, 1, incarnation)), [None, None]);
    assert!(!rules(&lines).contains(&"name.damaged"), "the first line of a join that ended is whole");
}

#[test]
fn no_name_of_another_pool_and_no_empty_name_is_shown() {
    let lines = in_use();
    let foreign = Lines::new(lines.memory().clone(), lines.layout().clone(), &UUID, 2);
    publish(&foreign, 1, 2, "foreign");
    assert_eq!(machine_name(&lines, 1, 2), None);
    publish(&lines, 1, 2, "");
    assert_eq!(machine_name(&lines, 1, 2), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn whatever_a_host_wrote_is_printable_and_bounded(name in proptest::collection::vec(any::<u8>(), 0..200)) {
        let lines = in_use();
        publish_name(&lines, 1, 2, &name).unwrap();
        if let Some(shown) = machine_name(&lines, 1, 2) {
            prop_assert!(shown.len() <= 4 * MAX_NAME_BYTES && shown.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{shown}");
        }
    }

    #[test]
    fn a_flipped_bit_is_noted_and_hides_the_name(bit in 0..2 * 512usize) {
        let lines = in_use();
        publish(&lines, 1, 2, &"name".repeat(20));
        let (_, offset) = name_lines(1).nth(bit / 512).unwrap();
        let mut line = lines.fetch_raw(offset).unwrap();
        line.0[bit % 512 / 8] ^= 1 << (bit % 8);
        lines.memory().write_line(offset, &line).unwrap();
        prop_assert_eq!(machine_name(&lines, 1, 2), None);
        let report = check(&lines, &seats()).unwrap();
        let found: Vec<_> = report.findings.iter().filter(|found| found.rule == "name.damaged").collect();
        prop_assert!(found.len() == 1 && found[0].severity == Severity::Note && found[0].meaning.contains("slot 1"));
    }
}
