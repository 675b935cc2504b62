// SPDX-License-Identifier: Apache-2.0
//! Steps of order that simulated hosts cannot show, on emulated ones: worker threads of a large copy make them themselves, with real
//! threads, whose unfenced steps stay with them; and what a device wrote may lie in a cache.

use cxl_pool::coherence::{Coherence, CoherenceOptions, over_mapping};
use cxl_pool::copy::dsa::{Descriptor, Limits, WorkQueue};
use cxl_pool::copy::{AheadEngine, Checksum, CopyConfig, CopyEngine, CpuEngine, DsaEngine, ReadAhead, ReadList, WriteList};
use cxl_pool::device::{Access, Device, Sysfs, map_part};
use cxl_pool::fault::drop_rule;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
fn stale_lines(engine: &dyn CopyEngine, look: u64, rule: Option<&'static str>) -> usize {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(POOL_BYTES as u64).unwrap();
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

fn with_workers() -> CpuEngine {
    CpuEngine::new(CopyConfig { workers: 2, parallel_from_bytes: 1, ..CopyConfig::default() })
}

#[test]
fn what_workers_copied_is_found_by_the_other_host() {
    assert_eq!(stale_lines(&with_workers(), 0, None), 0);
}

#[test]
fn the_loss_of_a_workers_fence_is_noticed() {
    for rule in ["copy.publish_no_fence", "copy.pull_no_flush", "copy.pull_no_full_fence"] {
        // More lines than one thread can have kept back: not only the caller's fence counts.
        let engine = with_workers();
        let most = (1..=LOOKS).map(|look| stale_lines(&engine, look, Some(rule))).find(|&lines| lines > PENDING_OF_ONE_THREAD);
        println!("{rule}: {most:?} stale lines");
        assert!(most.is_some(), "{rule}: nothing noticed its loss");
    }
}

/// Lines of another version that a reader gets of blocks that it had the device told of while they held that one.
fn stale_lines_told_of(rule: Option<&'static str>) -> usize {
    const BLOCKS: usize = 8;
    let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    file.as_file().set_len(POOL_BYTES as u64).unwrap();
    let (writer, reader) = (host(file.path()), host(file.path()));
    let config = CopyConfig { read_ahead: ReadAhead::Blocks(4), ..CopyConfig::alone() };
    let engine = AheadEngine::over(Arc::new(CpuEngine::new(config)), reader.clone(), &config, None);
    let (old, new) = (version(1), version(2));
    let mut found = vec![0; POOL_BYTES];
    engine.publish(&*writer, &WriteList::gather(0, [&old[..]]), Checksum::Off).unwrap();
    // All of it lies in the reader's cache, as from a prefetch, when the next version is written.
    let lines: Vec<u64> = (0..(POOL_BYTES / LINE_BYTES) as u64).map(|line| line * LINE_BYTES as u64).collect();
    reader.prefetch_lines(&lines).unwrap();
    engine.publish(&*writer, &WriteList::gather(0, [&new[..]]), Checksum::Off).unwrap();
    drop_rule(rule);
    let block_bytes = POOL_BYTES / BLOCKS;
    let mut lists: Vec<ReadList<'_>> =
        found.chunks_mut(block_bytes).enumerate().map(|(block, room)| ReadList::scatter((block * block_bytes) as u64, [room])).collect();
    assert!(engine.pull_each(&*reader, &mut lists, Checksum::Off).iter().all(Result::is_ok));
    drop_rule(None);
    let pages = engine.ahead_pages();
    assert!(pages.used > 0 && pages.used + pages.wasted == pages.given, "{pages:?}");
    found.chunks(LINE_BYTES).zip(new.chunks(LINE_BYTES)).filter(|(found, new)| found != new).count()
}

#[test]
fn what_a_device_was_told_of_is_read_as_it_is_and_not_as_it_was() {
    assert_eq!(stale_lines_told_of(None), 0);
    // A line of each page comes into the caches anew; without the flush behind that, the others are what they were.
    for rule in ["copy.pull_no_flush", "copy.pull_no_full_fence"] {
        assert!(stale_lines_told_of(Some(rule)) > 0, "{rule}: nothing noticed its loss");
    }
}

/// A device that moves whole pieces at once, through this host's cache.
struct Cached;

// SAFETY: every move is made on the spot, as the descriptor says.
unsafe impl WorkQueue for Cached {
    fn submit(&mut self, descriptor: &Descriptor) -> bool {
        assert_eq!(descriptor.operation(), 3);
        let from = std::ptr::with_exposed_provenance::<u8>(descriptor.source as usize);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(descriptor.destination as usize);
        let answer = std::ptr::with_exposed_provenance::<AtomicU64>(descriptor.completion as usize);
        // SAFETY: the engine names memory and a completion record that are there until the record is written.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, descriptor.size as usize);
            (*answer).store(1, Ordering::Release);
        }
        true
    }

    fn limits(&self) -> Limits {
        Limits { transfer_bytes: 1 << 20, batch_len: 0, in_flight: 4, block_on_fault: false }
    }
}

#[test]
fn what_a_device_wrote_is_flushed() {
    let engine = DsaEngine::over(Box::new(Cached), CpuEngine::new(CopyConfig::alone()), 10_000);
    assert_eq!(stale_lines(&engine, 0, None), 0);
    for rule in ["copy.dma_no_flush", "copy.publish_no_fence", "copy.pull_no_flush", "copy.pull_no_full_fence"] {
        assert!(stale_lines(&engine, 0, Some(rule)) > 0, "{rule}: nothing noticed its loss");
    }
    assert!(engine.counters()[0].pulled_bytes > POOL_BYTES as u64, "the device took part");
}
