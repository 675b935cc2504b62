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
            "24 nixl_posted counter",
            "25 nixl_reads counter",
            "26 nixl_writes counter",
            "27 nixl_failed counter",
            "28 nixl_cancelled counter",
            "29 nixl_disconnected counter",
            "30 nixl_pool_read_bytes counter",
            "31 nixl_pool_written_bytes counter",
            "32 nixl_local_bytes counter",
            "33 nixl_staged_read_bytes counter",
            "34 nixl_staged_written_bytes counter",
            "35 nixl_served_read_bytes counter",
            "36 nixl_served_written_bytes counter",
            "37 nixl_vram_bytes counter",
            "38 nixl_objects_written counter",
            "39 nixl_objects_existed counter",
            "40 nixl_objects_read counter",
            "41 nixl_objects_missed counter",
            "42 nixl_object_written_bytes counter",
            "43 nixl_object_read_bytes counter",
            "44 nixl_file_written_bytes counter",
            "45 nixl_file_read_bytes counter",
            "46 nixl_notifs_sent counter",
            "47 nixl_notifs_received counter",
            "48 nixl_notifs_resent counter",
            "49 nixl_links_made counter",
            "50 nixl_links_lost counter",
            "51 nixl_peers_gone counter",
            "52 nixl_refused counter",
            "53 nixl_links gauge",
            "54 nixl_staging_used_bytes gauge",
            "55 nixl_staging_bytes gauge",
            "56 nixl_engines gauge",
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
    let (own, given) = values.split_at(expected.len());
    assert_eq!(own, expected);
    assert!(given.iter().all(|value| *value == 0));
    metrics.pins.set(-1);
    assert_eq!(Stat::Pins.of(&metrics), 0);
}

/// What layers above count comes from what they gave, and only gauges fall.
#[test]
fn what_is_given_goes_to_its_own_place() {
    let metrics = Metrics::new();
    for round in 1..=2 {
        for stat in Stat::ALL {
            assert_eq!(metrics.given.add(*stat, 1000 * round + stat.place() as i64), stat.is_given(), "{stat:?}");
        }
    }
    for stat in Stat::ALL {
        let expected = if stat.is_given() { 3000 + 2 * stat.place() as u64 } else { 0 };
        assert_eq!(stat.of(&metrics), expected, "{stat:?}");
        let falls = stat.is_given() && stat.kind() == Kind::Gauge;
        assert_eq!(metrics.given.add(*stat, -10_000), falls);
        assert_eq!(stat.of(&metrics), if falls { 0 } else { expected }, "{stat:?}");
        metrics.given.add(*stat, 10_005);
        assert!(!falls || stat.of(&metrics) == expected + 5, "{stat:?}");
    }
    metrics.given.let_go();
    assert_eq!((Stat::NixlLinks.of(&metrics), Stat::NixlPosted.of(&metrics)), (0, 13_053));
    assert!(!Stat::MissesDamaged.is_given() && Stat::NixlPosted.is_given());
    assert!(format!("{metrics:?}").contains("\"nixl_refused\": 13109"));
}

#[test]
fn names_are_distinct_and_explained() {
    assert_eq!(Stat::ALL.iter().map(|stat| stat.name()).collect::<BTreeSet<_>>().len(), Stat::ALL.len());
    assert!(Stat::ALL.iter().all(|stat| stat.help().ends_with('.')));
}
