// SPDX-License-Identifier: Apache-2.0

use super::*;

#[test]
fn lists_are_those_of_the_kernel() {
    for (text, numbers) in [("0-3,8,10-11\n", vec![0, 1, 2, 3, 8, 10, 11]), ("\n", vec![]), ("64,4097", vec![64, 4097])] {
        let set = CpuSet::parse(text).unwrap();
        assert_eq!(set.numbers().collect::<Vec<_>>(), numbers);
        assert_eq!(set.to_string(), text.trim());
    }
    for text in ["3-1", "a", "1-", "0-4294967295", "2,1", "1,1", "-1", "+1", "0-3,3"] {
        assert_eq!(CpuSet::parse(text), None, "{text}");
    }
}

#[test]
fn a_binding_says_what_each_kind_has() {
    let all: CpuBinding = "node:3".parse().unwrap();
    assert!(ThreadKind::ALL.iter().all(|(kind, _)| *all.of(*kind) == CpuChoice::Node(3)));
    let each: CpuBinding = " copy=device ; upkeep=0-1,16".parse().unwrap();
    assert_eq!(each.to_string(), "copy=device;upkeep=0-1,16;workers=any");
    assert_eq!(each.to_string().parse::<CpuBinding>().unwrap(), each);
    assert_eq!("any".parse::<CpuBinding>().unwrap(), CpuBinding::default());
    for wrong in ["", "node:", "node:x", "node:-1", "3-1", "0-3;4", "copy=", "copies=1", "copy=1;copy=2", "workers=0-", "device,1"] {
        let told = wrong.parse::<CpuBinding>().unwrap_err();
        assert!(matches!(&told, Error::Invalid(text) if text.contains(ENV_CPUS)), "{wrong:?}: {told:?}");
    }
}

#[test]
fn cpus_that_are_not_there_are_refused_and_bind_nothing() {
    let before = CpuSet::of_current_thread().unwrap();
    let told = CpuSet::parse("65000").unwrap().check().unwrap_err();
    assert!(matches!(&told, Error::Invalid(text) if text.contains("65000")), "{told:?}");
    assert!(matches!(CpuSet::default().check(), Err(Error::Invalid(_))));
    before.check().unwrap();
    assert_eq!(CpuSet::of_current_thread().unwrap(), before);
}
