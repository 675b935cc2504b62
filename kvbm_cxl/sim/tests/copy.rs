// SPDX-License-Identifier: Apache-2.0
//! Worker threads of a large copy make the steps of order themselves: real threads, on emulated hosts, where what a thread has not fenced
//! stays with it.

use cxl_pool::coherence::{Coherence, CoherenceOptions, over_mapping};
use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, ReadList, WriteList};
use cxl_pool::device::{Access, Device, Sysfs, map_part};
use cxl_pool::fault::drop_rule;
use std::path::Path;
use std::sync::Arc;

const POOL_BYTES: usize = 16 << 20;
const LINE_BYTES: usize = 64;
/// Most steps that a thread of an emulated host has pending.
const PENDING_OF_ONE_THREAD: usize = 256;
/// Looks at a mutant: which thread gets how much of the work is not ours to say.
const LOOKS: u64 = 20;

fn host(path: &Path) -> Arc<dyn Coherence> {
    let device = Device::open(path, Access::Write, &Sysfs::default()).unwrap();
    let options: CoherenceOptions = "emulated:seed=3,noise=0".parse().unwrap();
    over_mapping(map_part(&device, 0, POOL_BYTES as u64).unwrap(), &options).unwrap().memory
}

/// Bytes of which no line is like any other line or version.
fn version(number: u64) -> Vec<u8> {
    (0..POOL_BYTES as u64 / 8).flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 40).to_le_bytes()).collect()
}

/// Lines of another version that a reader gets behind a publish, with a rule dropped in both.
fn stale_lines(look: u64, rule: Option<&'static str>) -> usize {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(POOL_BYTES as u64).unwrap();
    let engine = CpuEngine::new(CopyConfig { workers: 2, parallel_from_bytes: 1, ..CopyConfig::default() });
    let (writer, reader) = (host(file.path()), host(file.path()));
    let (old, new) = (version(2 * look + 1), version(2 * look + 2));
    let mut found = vec![0; POOL_BYTES];
    engine.publish(&*writer, &WriteList::gather(0, [&old[..]]), Checksum::Off).unwrap();
    engine.pull(&*reader, &mut ReadList::scatter(0, [&mut found[..]]), Checksum::Off).unwrap();
    assert!(found == old);
    drop_rule(rule);
    engine.publish(&*writer, &WriteList::gather(0, [&new[..]]), Checksum::Off).unwrap();
    engine.pull(&*reader, &mut ReadList::scatter(0, [&mut found[..]]), Checksum::Off).unwrap();
    drop_rule(None);
    found.chunks(LINE_BYTES).zip(new.chunks(LINE_BYTES)).filter(|(found, new)| found != new).count()
}

#[test]
fn what_workers_copied_is_found_by_the_other_host() {
    assert_eq!(stale_lines(0, None), 0);
}

#[test]
fn the_loss_of_a_workers_fence_is_noticed() {
    for rule in ["copy.publish_no_fence", "copy.pull_no_flush", "copy.pull_no_full_fence"] {
        // More lines than one thread can have kept back: not only the caller's fence counts.
        let most = (1..=LOOKS).map(|look| stale_lines(look, Some(rule))).find(|&lines| lines > PENDING_OF_ONE_THREAD);
        println!("{rule}: {most:?} stale lines");
        assert!(most.is_some(), "{rule}: nothing noticed its loss");
    }
}
