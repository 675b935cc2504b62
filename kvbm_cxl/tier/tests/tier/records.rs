// SPDX-License-Identifier: Apache-2.0
//! Records of what workers ask for and store: ids of blocks, the same on two hosts with one salt.

use crate::bench::*;
use cxl_pool::cache::trace::trace_id;
use cxl_tier::keys::key_of;
use cxl_tier::{CxlBlocks, Outcome, Ranks, RecordConfig};
use std::path::Path;

fn record(directory: &Path, salt: &str) -> RecordConfig {
    RecordConfig { directory: directory.into(), salt: salt.into(), most_bytes: 1 << 20 }
}

fn recorded(member: &Member, ranks: Ranks, record: &RecordConfig) -> CxlBlocks {
    CxlBlocks::recorded(&member.cache, &model(), shape(), ranks, Some(record)).unwrap()
}

/// The lines of all files in the folder, without the times, sorted.
fn lines(directory: &Path) -> Vec<String> {
    let files = std::fs::read_dir(directory).unwrap().map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap());
    let text: String = files.collect();
    let untimed = |line: &str| line.strip_prefix("{\"at_us\": ").and_then(|rest| rest.split_once(", ")).map(|(_, rest)| rest.to_string());
    let mut lines: Vec<String> = text.lines().filter_map(untimed).filter(|line| !line.starts_with("\"dropped\"")).collect();
    lines.sort();
    lines
}

#[test]
fn two_hosts_with_one_salt_record_the_same_ids() {
    let (bench, folder) = (Bench::new(256), tempfile::tempdir().unwrap());
    let (prefill, decode) = (bench.member(1), bench.member(2));
    let keys = chain(4, 51);
    let (first, second) =
        (recorded(&prefill, Ranks::ALONE, &record(folder.path(), "s")), recorded(&decode, Ranks::ALONE, &record(folder.path(), "s")));
    assert_eq!(first.has(&keys), all(Outcome::Absent, 4));
    assert_eq!(put(&first, &keys[..3], 51), all(Outcome::Done, 3));
    // What is there already is not published again.
    assert_eq!(put(&first, &keys[..3], 51), all(Outcome::Exists, 3));
    assert_eq!(second.has(&keys)[..3], all(Outcome::Done, 3));
    let namespace = first.namespace();
    let ids = |count: usize| {
        let ids = keys[..count].iter().map(|&key| trace_id("s", namespace, key_of(key).unwrap()).to_string());
        ids.collect::<Vec<_>>().join(", ")
    };
    let tokens = small(1).page_size;
    drop((first, second));
    let mut wanted = vec![
        format!("\"input_length\": {}, \"found\": 0, \"hash_ids\": [{}]}}", 4 * tokens, ids(4)),
        format!("\"published\": [{}]}}", ids(3)),
        format!("\"input_length\": {}, \"found\": {}, \"hash_ids\": [{}]}}", 4 * tokens, 3 * tokens, ids(4)),
    ];
    wanted.sort();
    assert_eq!(lines(folder.path()), wanted);
}

#[test]
fn one_worker_of_several_records_and_none_fails_for_it() {
    let (bench, folder) = (Bench::new(256), tempfile::tempdir().unwrap());
    let member = bench.member(1);
    let of = |rank| recorded(&member, Ranks::new(rank, 2).unwrap(), &record(folder.path(), "s"));
    assert!(of(0).recorded_entries().is_some() && of(1).recorded_entries().is_none());
    // Where there can be no file the blocks are there all the same.
    let keys = chain(2, 52);
    let without = recorded(&member, Ranks::ALONE, &record(Path::new("/proc/nowhere"), "s"));
    assert!(without.recorded_entries().is_none());
    assert_eq!(put(&without, &keys, 52), all(Outcome::Done, 2));
    assert_eq!(without.has(&keys), all(Outcome::Done, 2));
}
