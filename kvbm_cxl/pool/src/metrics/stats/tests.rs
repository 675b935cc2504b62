// SPDX-License-Identifier: Apache-2.0
use super::*;
use std::collections::BTreeSet;

/// The places are part of the format: a counter keeps its place for ever.
#[test]
fn places_and_names_stay_what_they_are() {
    let names: Vec<String> = Stat::ALL.iter().map(|stat| format!("{} {} {}", stat.place(), stat.name(), stat.kind().name())).collect();
    assert_eq!(
        names,
        [
            "0 published_blocks counter",
            "1 published_bytes counter",
            "2 pulled_blocks counter",
            "3 pulled_bytes counter",
            "4 hits counter",
            "5 misses counter",
            "6 refusals counter",
            "7 evictions counter",
            "8 pins_taken counter",
            "9 pins gauge",
            "10 aborts counter",
            "11 adopted counter",
            "12 quarantined_cells gauge",
            "13 rejoins counter",
            "14 lock_waits counter",
            "15 lock_wait_ns counter",
            "16 ring_sent counter",
            "17 ring_received counter",
            "18 copied_by_cpu_bytes counter",
            "19 copied_by_dsa_bytes counter",
            "20 copied_by_cuda_bytes counter",
            "21 misses_absent counter",
            "22 misses_fenced counter",
            "23 misses_damaged counter",
        ]
    );
    assert!(Stat::ALL.iter().enumerate().all(|(place, stat)| stat.place() == place && Stat::at(place) == Some(*stat)));
    assert_eq!((Stat::at(Stat::ALL.len()), Stat::at(usize::MAX)), (None, None));
    const { assert!(Stat::ALL.len() <= STATS) }
}

/// Every counter is taken from a metric of its own.
#[test]
fn counters_come_from_the_right_metrics() {
    let metrics = Metrics::new();
    metrics.publish_total.add(1);
    metrics.publish_bytes_total.add(2);
    metrics.pull_total.add(3);
    metrics.pull_bytes_total.add(4);
    metrics.hits_total.add(5);
    metrics.misses_total.of(MissReason::Absent).add(100);
    metrics.misses_total.of(MissReason::HostFenced).add(200);
    metrics.misses_total.of(MissReason::FencedDuring).add(20);
    metrics.misses_total.of(MissReason::Checksum).add(3000);
    metrics.misses_total.of(MissReason::Writing).add(40_000);
    metrics.publish_refused_total.of(super::super::RefusalReason::Quota).add(6);
    metrics.evictions_total.of(super::super::EvictionReason::Capacity).add(7);
    metrics.pins_total.add(8);
    metrics.pins.set(9);
    metrics.publish_aborted_total.add(10);
    metrics.adopted_total.add(11);
    metrics.quarantined_cells.set(12);
    metrics.rejoins_total.add(13);
    (0..14).for_each(|_| metrics.lock_wait_seconds.observe(15));
    metrics.ring_messages_total.of(Direction::Sent).add(16);
    metrics.ring_messages_total.of(Direction::Received).add(17);
    metrics.copy_bytes_total.of(Engine::Cpu).add(18);
    metrics.copy_bytes_total.of(Engine::Dsa).add(19);
    metrics.copy_bytes_total.of(Engine::Cuda).add(20);
    let values: Vec<u64> = Stat::ALL.iter().map(|stat| stat.of(&metrics)).collect();
    let expected = [1, 2, 3, 4, 5, 43_320, 6, 7, 8, 9, 10, 11, 12, 13, 14, 14 * 15, 16, 17, 18, 19, 20, 100, 220, 3000];
    assert_eq!(values, expected);
    metrics.pins.set(-1);
    assert_eq!(Stat::Pins.of(&metrics), 0);
}

#[test]
fn names_are_distinct_and_explained() {
    assert_eq!(Stat::ALL.iter().map(|stat| stat.name()).collect::<BTreeSet<_>>().len(), Stat::ALL.len());
    assert!(Stat::ALL.iter().all(|stat| stat.help().ends_with('.')));
}
