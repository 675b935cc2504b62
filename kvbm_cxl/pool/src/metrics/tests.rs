// SPDX-License-Identifier: Apache-2.0
mod strict;

use super::*;
use std::collections::BTreeSet;
use std::thread;
use strict::parse;

fn text_of(metrics: &Metrics) -> String {
    let mut text = String::new();
    metrics.render(&mut text);
    text
}

/// Dashboards and alerts name these: a name that changes or goes is a break.
const NAMES: &str = "\
cxl_cache_publish_total counter -
cxl_cache_publish_bytes_total counter -
cxl_cache_publish_seconds histogram -
cxl_cache_publish_refused_total counter reason=exists|busy|table_full|pool_full|quota|too_long|fenced|device_error
cxl_cache_publish_aborted_total counter -
cxl_cache_block_bytes histogram -
cxl_cache_pull_total counter -
cxl_cache_pull_bytes_total counter -
cxl_cache_pull_seconds histogram -
cxl_cache_hits_total counter -
cxl_cache_misses_total counter reason=absent|bad_line|free|writing|evicting|retiring|other_key|namespace|fenced_owner|fenced_during|\
changed|checksum|length|pins_full|host_fenced|device_error
cxl_cache_lookup_seconds histogram -
cxl_cache_pins_total counter -
cxl_cache_pins gauge -
cxl_cache_evictions_total counter reason=capacity|quota|cleared|duplicate
cxl_cache_evictions_pinned_total counter -
cxl_cache_adopted_total counter -
cxl_cache_quarantined_cells gauge -
cxl_lock_wait_seconds histogram -
cxl_lock_timeouts_total counter -
cxl_lock_damaged_total counter -
cxl_host_healed_lines_total counter -
cxl_host_rejoins_total counter -
cxl_host_failed_rounds_total counter reason=device|damaged|fenced|timeout|full|in_use|replaced|other
cxl_host_moved_files gauge -
cxl_copy_bytes_total counter engine=cpu|dsa|cuda
cxl_copy_seconds histogram engine=cpu|dsa|cuda
cxl_copy_ahead_pages_total counter fate=given|used|wasted
cxl_gpu_unflushed_bytes_total counter -
cxl_gpu_registered_bytes gauge -
cxl_gpu_queued_bytes gauge -
cxl_ring_messages_total counter direction=sent|received
cxl_ring_bytes_total counter direction=sent|received
";

#[test]
fn reasons_of_failed_rounds_are_the_classes_of_errors() {
    assert_eq!(FailureReason::VALUES, crate::error::ERROR_CLASSES);
}

#[test]
fn names_stay_what_they_are() {
    let mut names = String::new();
    for metric in Metrics::ALL {
        let label = metric.label.map_or("-".into(), |(name, values)| format!("{name}={}", values.join("|")));
        names.push_str(&format!("{} {} {label}\n", metric.name, metric.kind.name()));
    }
    assert_eq!(names, NAMES);
}

#[test]
fn what_is_rendered_reads_back() {
    let metrics = Metrics::new();
    let empty = parse(&text_of(&metrics));
    assert_eq!(empty.len(), Metrics::ALL.len());
    for metric in Metrics::ALL {
        let family = &empty[metric.name];
        assert_eq!((family.kind.as_str(), family.help.as_str()), (metric.kind.name(), metric.help));
        assert!(family.samples.iter().filter(|(name, ..)| !name.ends_with("_bucket")).all(|(.., value)| *value == 0.0));
    }

    metrics.publish_total.add(3);
    metrics.pins.add(-2);
    metrics.lock_wait_seconds.observe(1_000);
    metrics.lock_wait_seconds.observe(1_500_000_000);
    metrics.copy_seconds.of(Engine::Dsa).observe(300);
    // Every value of every label has a count of its own.
    MissReason::ALL.iter().for_each(|reason| metrics.misses_total.of(*reason).add(100 + reason.index() as u64));
    let read = parse(&text_of(&metrics));
    assert_eq!(read["cxl_cache_publish_total"].value(&[]), Some(3.0));
    assert_eq!(read["cxl_cache_pins"].value(&[]), Some(-2.0));
    for (place, reason) in MissReason::ALL.iter().enumerate() {
        assert_eq!(read["cxl_cache_misses_total"].value(&[("reason", reason.text())]), Some(100.0 + place as f64));
    }
    assert_eq!(metrics.misses_total.total(), (100..).take(MissReason::ALL.len()).sum());
    let sample = |family: &str, name: &str, labels: &[(&str, &str)]| {
        let is_same = |found: &strict::Labels| found.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(labels.iter().copied());
        let samples = &read[family].samples;
        samples.iter().find(|(found, with, _)| *found == format!("{family}{name}") && is_same(with)).map(|(.., value)| *value)
    };
    assert_eq!(sample("cxl_lock_wait_seconds", "_sum", &[]), Some(1.500001));
    assert_eq!(sample("cxl_lock_wait_seconds", "_count", &[]), Some(2.0));
    assert_eq!(sample("cxl_lock_wait_seconds", "_bucket", &[("le", "0.000000512")]), Some(0.0));
    assert_eq!(sample("cxl_lock_wait_seconds", "_bucket", &[("le", "0.000001024")]), Some(1.0));
    assert_eq!(sample("cxl_copy_seconds", "_bucket", &[("engine", "dsa"), ("le", "0.000000512")]), Some(1.0));
    assert_eq!(sample("cxl_copy_seconds", "_count", &[("engine", "cpu")]), Some(0.0));
}

#[test]
fn labels_are_distinct_and_explained() {
    for (name, label) in Metrics::ALL.iter().filter_map(|metric| Some((metric.name, metric.label?))) {
        assert_eq!(label.1.iter().collect::<BTreeSet<_>>().len(), label.1.len(), "{name}");
    }
    let explained = [
        MissReason::MEANINGS,
        RefusalReason::MEANINGS,
        EvictionReason::MEANINGS,
        Engine::MEANINGS,
        AheadFate::MEANINGS,
        Direction::MEANINGS,
    ]
    .concat();
    assert!(explained.iter().all(|meaning| meaning.ends_with('.')));
}

/// A value is in the first bucket whose bound is not below it.
#[test]
fn values_fall_into_the_right_buckets() {
    let bounds: Vec<u64> = (6..6 + BUCKETS as u32 - 1).map(|exponent| 1 << exponent).collect();
    let around = bounds.iter().flat_map(|bound| [bound - 1, *bound, bound + 1]).chain([0, 1, u64::MAX - 1, u64::MAX]);
    for value in around {
        let histogram: Histogram<Bytes> = Histogram::default();
        histogram.observe(value);
        assert_eq!((histogram.count(), histogram.sum()), (1, value));
        let mut text = String::new();
        let mut out = Exposition::new(&mut text);
        out.family("sizes", Kind::Histogram, "Sizes.");
        histogram.write("sizes", &[], &mut out);
        let filled = |(_, labels, count): &(String, strict::Labels, f64)| (*count > 0.0).then(|| labels[0].1.clone());
        let read = parse(&text);
        let first = read["sizes"].samples.iter().find_map(filled).unwrap();
        let expected = bounds.iter().find(|bound| **bound >= value).map_or("+Inf".into(), u64::to_string);
        assert_eq!(first, expected, "{value}");
    }
}

#[test]
fn nothing_is_lost_between_threads_and_every_text_is_sound_meanwhile() {
    const THREADS: u64 = 4;
    const REASONS: u64 = MissReason::ALL.len() as u64;
    const EACH: u64 = 1_200 * REASONS;
    let metrics = Metrics::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let metrics = &metrics;
                scope.spawn(move || {
                    for number in 0..EACH {
                        metrics.pull_total.inc();
                        metrics.pull_seconds.observe(number << thread);
                        metrics.misses_total.of(MissReason::ALL[(number % REASONS) as usize]).inc();
                        metrics.pins.add(if number % 2 == 0 { 1 } else { -1 });
                    }
                })
            })
            .collect();
        let mut last = 0.0;
        while !workers.iter().all(|worker| worker.is_finished()) {
            let pulled = parse(&text_of(&metrics))["cxl_cache_pull_total"].value(&[]).unwrap();
            assert!(pulled >= last, "a counter went back");
            last = pulled;
        }
    });
    assert_eq!(metrics.pull_total.get(), THREADS * EACH);
    assert_eq!(metrics.pull_seconds.count(), THREADS * EACH);
    assert_eq!(metrics.pull_seconds.sum(), (0..THREADS).map(|thread| (EACH * (EACH - 1) / 2) << thread).sum());
    assert!(MissReason::ALL.iter().all(|reason| metrics.misses_total.of(*reason).get() == THREADS * EACH / REASONS));
    assert_eq!(metrics.pins.get(), 0);
}

/// Counters that different threads count on share no line.
#[test]
fn counters_have_lines_of_their_own() {
    assert_eq!((size_of::<Counter>(), align_of::<Counter>(), align_of::<Gauge>(), align_of::<Histogram<Time>>()), (64, 64, 64, 64));
}

/// The text of docs/operating/metrics.md below a heading, up to the next one.
fn section(heading: &str) -> String {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operating/metrics.md")).unwrap();
    let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading:?}"));
    rest.split("\n## ").next().unwrap_or_default().to_owned()
}

/// A section of the page holds the table that follows from the code, row by row. On a difference the page has to change.
fn expect_table(heading: &str, rows: &[String]) {
    let table: Vec<String> = section(heading).lines().filter(|line| line.starts_with("- `")).map(str::to_owned).collect();
    assert!(table == rows, "docs/operating/metrics.md, {heading:?}, has to hold these rows:\n{}\n", rows.join("\n"));
}

#[test]
fn the_page_lists_what_there_is() {
    let row = |metric: &Descriptor| {
        let label = metric.label.map_or(String::new(), |(name, _)| format!("{{{name}}}"));
        format!("- `{}{label}`: {}", metric.name, metric.help)
    };
    expect_table("What a process counts", &Metrics::ALL.iter().map(row).collect::<Vec<_>>());

    fn values<L: Label>(heading: &str) {
        let rows = L::VALUES.iter().zip(L::MEANINGS).map(|(value, meaning)| format!("- `{value}`: {meaning}"));
        expect_table(heading, &rows.collect::<Vec<_>>());
    }
    values::<MissReason>("Reasons of a miss");
    values::<RefusalReason>("Reasons of a refused publish");
    values::<EvictionReason>("Reasons of an eviction");
    values::<Engine>("Engines");
    values::<Direction>("Directions");
}
