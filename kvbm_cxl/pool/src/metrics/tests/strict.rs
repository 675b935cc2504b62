// SPDX-License-Identifier: Apache-2.0
//! A reader of the text exposition format that accepts nothing but what the format says, and checks what holds for every metric.

use std::collections::{BTreeMap, BTreeSet};

/// Labels of a sample, in order.
pub type Labels = Vec<(String, String)>;

/// One metric with its samples.
#[derive(Debug, PartialEq)]
pub struct Family {
    pub kind: String,
    pub help: String,
    /// Name (with its suffix), labels and value of each sample.
    pub samples: Vec<(String, Labels, f64)>,
}

impl Family {
    /// The value of the sample with these labels; a metric without suffix.
    pub fn value(&self, labels: &[(&str, &str)]) -> Option<f64> {
        let same = |found: &Labels| found.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(labels.iter().copied());
        self.samples.iter().find(|(_, found, _)| same(found)).map(|(_, _, value)| *value)
    }
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_lowercase()) && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Splits what follows a name into labels and the rest.
fn labels_of(text: &str) -> (Labels, &str) {
    let Some(mut rest) = text.strip_prefix('{') else { return (Vec::new(), text) };
    let mut labels = Labels::new();
    loop {
        let (name, after) = rest.split_once("=\"").expect("a label with a value");
        assert!(is_name(name), "label name {name:?}");
        assert!(labels.iter().all(|(known, _)| known != name), "label {name} twice");
        let (mut value, mut chars) = (String::new(), after.chars());
        loop {
            match chars.next().expect("an end of the value") {
                '"' => break,
                '\\' => value.push(match chars.next().expect("an escaped character") {
                    'n' => '\n',
                    c @ ('\\' | '"') => c,
                    other => panic!("\\{other} is no escape"),
                }),
                c => value.push(c),
            }
        }
        labels.push((name.to_owned(), value));
        rest = chars.as_str();
        match rest.split_at(1) {
            (",", after) => rest = after,
            ("}", after) => return (labels, after),
            other => panic!("{other:?} after a label"),
        }
    }
}

/// Reads a whole text.
pub fn parse(text: &str) -> BTreeMap<String, Family> {
    assert!(text.is_empty() || text.ends_with('\n'), "the last line has to end");
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let (name, help) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')).expect("HELP opens a metric");
        assert!(is_name(name), "{name:?}");
        let kind = lines.next().and_then(|line| line.strip_prefix(&format!("# TYPE {name} "))).expect("TYPE behind HELP");
        assert!(["counter", "gauge", "histogram"].contains(&kind), "{kind:?}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        let mut family = Family { kind: kind.to_owned(), help: help.to_owned(), samples: Vec::new() };
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let end = line.find(['{', ' ']).expect("a value");
            let (sample, rest) = line.split_at(end);
            let suffix = sample.strip_prefix(name).expect("samples of a metric follow its TYPE");
            assert!(if kind == "histogram" { ["_bucket", "_sum", "_count"].contains(&suffix) } else { suffix.is_empty() }, "{sample}");
            let (labels, value) = labels_of(rest);
            let value = value.strip_prefix(' ').expect("one space before the value");
            assert!(!value.contains(char::is_whitespace), "{line}");
            let value: f64 = value.parse().unwrap();
            assert!(kind == "gauge" || value >= 0.0, "{line}");
            assert!(!family.samples.iter().any(|(known, others, _)| (known.as_str(), others) == (sample, &labels)), "{line} twice");
            family.samples.push((sample.to_owned(), labels, value));
        }
        if kind == "histogram" {
            check_histogram(name, &family);
        }
        assert!(families.insert(name.to_owned(), family).is_none(), "{name} twice");
    }
    families
}

/// Buckets rise in bound and count, end with +Inf, and agree with the count; for each set of labels.
fn check_histogram(name: &str, family: &Family) {
    let without = |labels: &Labels| labels.iter().filter(|(label, _)| label != "le").cloned().collect::<Labels>();
    let sets: BTreeSet<Labels> = family.samples.iter().map(|(_, labels, _)| without(labels)).collect();
    assert!(!sets.is_empty(), "{name} has no samples");
    for set in sets {
        let of = |suffix: &str| {
            let found = family.samples.iter().filter(|(sample, labels, _)| *sample == format!("{name}{suffix}") && without(labels) == set);
            found.map(|(_, labels, value)| (labels.clone(), *value)).collect::<Vec<_>>()
        };
        let bound = |labels: &Labels| {
            let (_, le) = labels.iter().find(|(label, _)| label == "le").expect("a bucket with a bound");
            if le == "+Inf" { f64::INFINITY } else { le.parse::<f64>().unwrap() }
        };
        let buckets: Vec<(f64, f64)> = of("_bucket").iter().map(|(labels, value)| (bound(labels), *value)).collect();
        assert!(buckets.is_sorted_by(|one, next| one.0 < next.0 && one.1 <= next.1), "{name}: {buckets:?}");
        let last = buckets.last().expect("at least one bucket");
        let (count, sum) = (of("_count"), of("_sum"));
        assert_eq!((count.len(), sum.len()), (1, 1), "{name}{set:?}");
        assert_eq!((last.0, last.1), (f64::INFINITY, count[0].1), "{name}: +Inf and the count");
        assert!(count[0].1 > 0.0 || sum[0].1 == 0.0, "{name}: a sum of nothing");
    }
}
