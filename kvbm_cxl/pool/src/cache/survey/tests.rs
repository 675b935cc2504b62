// SPDX-License-Identifier: Apache-2.0
//! Every answer of the survey, planted line by line into a formatted pool; and once over a cache in use.

use super::*;
use crate::cache::{Cache, CacheConfig};
use crate::coherence::CoherenceOptions;
use crate::device::PoolSpec;
use crate::host::HostConfig;
use crate::machine::{Machine, State};
use crate::media::{FenceLine, Identity, Region};
use crate::platform::MachineId;
use crate::pool::{CellArea, FormatOptions, Pool, Share};
use bytemuck::Zeroable;
use std::sync::Arc;

const NAMESPACE: Namespace = Namespace([7; 16]);
const OTHER: Namespace = Namespace([8; 16]);

struct Bench {
    pool: Pool,
    folder: tempfile::TempDir,
}

fn key(number: u64) -> BlockKey {
    BlockKey([number.to_le_bytes(), (!number).to_le_bytes()].concat().try_into().unwrap())
}

/// A pool with cells of 4 KiB and of 16 KiB; slots 0 and 1 were joined under incarnation 2.
fn bench() -> Bench {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = PoolSpec::new(vec![folder.path().join("pool")], Some(8 << 20)).unwrap();
    let area = |cell_bytes, bytes| CellArea { cell_bytes, share: Share::Bytes(bytes) };
    let options = FormatOptions {
        slots: 4,
        seat_count: 2,
        locks: 32,
        objects: 16,
        chunk_bytes: 64 << 10,
        cells: vec![area(4096, 1 << 20), area(16384, 2 << 20)],
        machine: Some(MachineId([1; 16])),
        memory: Some(CoherenceOptions::default()),
        ..FormatOptions::default()
    };
    Bench { pool: Pool::format(&spec, &options).unwrap(), folder }
}

fn joined() -> Bench {
    let bench = bench();
    for slot in 0..2 {
        let identity = Identity { incarnation: 2, state: Identity::LIVE, machine: [9; 16], ..Identity::default() };
        bench.pool.lines().publish(slot, identity).unwrap();
    }
    bench
}

impl Bench {
    fn lines(&self) -> &Lines {
        self.pool.lines()
    }

    fn geometry(&self) -> Geometry {
        *self.pool.layout().geometry()
    }

    fn view(&self) -> CacheView {
        CacheView::load(self.lines()).unwrap()
    }

    fn fence(&self, slot: usize, incarnation: u32) {
        let mut line = self.lines().fetch::<FenceLine>(0).unwrap();
        line.fenced[slot] = incarnation;
        self.lines().publish(0, line).unwrap();
    }

    fn end(&self, slot: u64) {
        let identity = self.lines().fetch::<Identity>(slot).unwrap();
        self.lines().publish(slot, Identity { acknowledged: identity.incarnation, ..identity }).unwrap();
    }

    fn claim(&self, slot: u64, incarnation: u32, chunks: &[u64]) {
        let mut claim = CellClaim { incarnation, ..CellClaim::zeroed() };
        chunks.iter().for_each(|&chunk| claim.set(chunk as usize, true));
        self.lines().publish(slot * self.geometry().cell_claim_lines(), claim).unwrap();
    }

    fn describe(&self, cell: u64, state: u8, owner: u16, namespace: Namespace, key: BlockKey) {
        let line = Descriptor {
            state,
            owner,
            incarnation: 2,
            len_bytes: 1000 + cell as u32,
            seq: cell + 1,
            key: key.0,
            namespace: namespace.0,
            ..Descriptor::default()
        };
        self.lines().publish(cell, line).unwrap();
    }

    /// Puts a hint into place `place` of the home line of a key.
    fn hint(&self, namespace: Namespace, key: BlockKey, place: usize, cell: u64) {
        let home = Home::of_key(&self.geometry(), namespace, key);
        let index = home.hint_line(&self.geometry(), 0);
        let mut line = self.lines().fetch::<HintLine>(index).unwrap();
        line.set(place, Hint::Cell { fingerprint: home.fingerprint, cell });
        self.lines().publish(index, line).unwrap();
    }

    fn damage(&self, region: Region, index: u64) {
        let offset = self.pool.layout().line_offset(region, index).unwrap();
        let mut line = self.lines().fetch_raw(offset).unwrap();
        line.0[20] ^= 1;
        self.lines().memory().write_line(offset, &line).unwrap();
        self.lines().memory().fence_stores();
    }

    fn answer(&self, scan: bool) -> Option<Verdict> {
        self.view().why(NAMESPACE, key(1), scan).unwrap().answer().map(|seen| seen.verdict)
    }
}

#[test]
fn a_pool_without_cells_is_told() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let spec = PoolSpec::new(vec![folder.path().join("pool")], Some(8 << 20)).unwrap();
    let options = FormatOptions { memory: Some(CoherenceOptions::default()), slots: 2, ..FormatOptions::default() };
    let pool = Pool::format(&spec, &options).unwrap();
    let refused = CacheView::load(pool.lines()).err().unwrap().to_string();
    assert!(refused.contains("no cells"), "{refused}");
}

#[test]
fn nothing_is_known_of_a_key_that_was_never_there() {
    let bench = joined();
    let told = bench.view().why(NAMESPACE, key(1), true).unwrap();
    assert!(told.seen.is_empty() && told.elsewhere.is_empty() && !told.is_hit() && told.is_scanned);
    assert_eq!((told.damaged_lines, told.free_places), (0, 32));
}

#[test]
fn a_hit_tells_cell_owner_length_and_pins() {
    let bench = joined();
    bench.describe(5, Descriptor::READY, 1, NAMESPACE, key(1));
    bench.hint(NAMESPACE, key(1), 0, 5);
    let mut pins = PinLine { incarnation: 2, ..PinLine::default() };
    pins.nibbles[0] = 0xb << 20;
    bench.lines().publish(bench.geometry().pin_lines(), pins).unwrap();
    let told = bench.view().why(NAMESPACE, key(1), false).unwrap();
    let info = told.answer().unwrap().info.clone().unwrap();
    assert!(told.is_hit());
    assert_eq!((info.cell, info.descriptor.owner, info.descriptor.len_bytes, info.cell_bytes), (5, 1, 1005, 4096));
    assert_eq!((&info.pinned_by[..], info.ticks), (&[1][..], 1 << 3));
    assert_eq!(info.standing, OwnerStatus::Live);
    // A pin of an incarnation that is fenced is none.
    bench.lines().publish(bench.geometry().pin_lines(), PinLine { incarnation: 1, ..pins }).unwrap();
    bench.fence(1, 1);
    assert!(bench.view().cells(5, 1).unwrap()[0].pinned_by.is_empty());
    // One that cannot be read counts for every slot that may be in use.
    bench.damage(Region::Pin, 0);
    assert_eq!(bench.view().cells(5, 1).unwrap()[0].pinned_by, [0]);
}

#[test]
fn every_state_of_the_cell_that_a_hint_names_is_told() {
    let bench = joined();
    bench.hint(NAMESPACE, key(1), 0, 5);
    for (state, expected) in [
        (Descriptor::FREE, Verdict::Free),
        (Descriptor::WRITING, Verdict::Writing),
        (Descriptor::EVICTING, Verdict::Evicting),
        (Descriptor::RETIRING, Verdict::Retiring),
        (Descriptor::READY, Verdict::Hit),
    ] {
        bench.describe(5, state, 0, NAMESPACE, key(1));
        assert_eq!(bench.answer(false), Some(expected));
    }
    bench.describe(5, Descriptor::READY, 0, NAMESPACE, key(2));
    assert_eq!(bench.answer(false), Some(Verdict::OtherKey));
    bench.describe(5, Descriptor::READY, 0, OTHER, key(1));
    assert_eq!(bench.answer(false), Some(Verdict::OtherNamespace));
    bench.damage(Region::Descriptor, 5);
    assert_eq!(bench.answer(false), Some(Verdict::Damaged));
    bench.hint(NAMESPACE, key(1), 0, bench.geometry().cell_count());
    assert_eq!(bench.answer(false), Some(Verdict::NoSuchCell));
}

#[test]
fn a_block_longer_than_its_cell_is_no_hit() {
    let bench = joined();
    bench.describe(5, Descriptor::READY, 0, NAMESPACE, key(1));
    let found = bench.lines().fetch::<Descriptor>(5).unwrap();
    bench.lines().publish(5, Descriptor { len_bytes: 4097, ..found }).unwrap();
    bench.hint(NAMESPACE, key(1), 0, 5);
    assert_eq!(bench.answer(false), Some(Verdict::TooLong));
}

#[test]
fn a_fenced_owner_makes_a_miss_and_it_is_told_whether_a_host_has_the_chunk() {
    let bench = joined();
    bench.describe(5, Descriptor::READY, 0, NAMESPACE, key(1));
    bench.hint(NAMESPACE, key(1), 0, 5);
    let chunk = 5 / u64::from(bench.geometry().cells_per_chunk);
    bench.claim(0, 2, &[chunk]);
    bench.fence(0, 2);
    assert_eq!(bench.answer(false), Some(Verdict::FencedOwner { is_claimed: false }));
    assert_eq!(bench.view().cells(5, 1).unwrap()[0].standing, OwnerStatus::Fenced);
    assert_eq!(bench.view().chunk(chunk).unwrap().state, ChunkState::Abandoned);
    bench.claim(1, 2, &[chunk]);
    assert_eq!(bench.answer(false), Some(Verdict::FencedOwner { is_claimed: true }));
    assert_eq!(bench.view().chunk(chunk).unwrap().state, ChunkState::Claimed(Claimant { slot: 1, incarnation: 2 }));
    // The adopter is fenced as well: no host may take the chunk before both are proven to have ended.
    bench.fence(1, 2);
    assert_eq!(bench.view().chunk(chunk).unwrap().state, ChunkState::Waiting);
    bench.end(0);
    bench.end(1);
    assert_eq!(bench.view().chunk(chunk).unwrap().state, ChunkState::Abandoned);
    assert_eq!(bench.view().cells(5, 1).unwrap()[0].standing, OwnerStatus::Over);
    bench.damage(Region::Fence, 1);
    assert_eq!(bench.answer(false), Some(Verdict::FencesUnknown));
}

#[test]
fn a_block_without_hint_and_the_key_in_another_namespace_are_found_by_a_scan_alone() {
    let bench = joined();
    bench.describe(5, Descriptor::READY, 0, NAMESPACE, key(1));
    bench.describe(9, Descriptor::READY, 0, OTHER, key(1));
    assert_eq!(bench.answer(false), None);
    let told = bench.view().why(NAMESPACE, key(1), true).unwrap();
    assert_eq!(told.answer().map(|seen| (seen.verdict, seen.cell, seen.line)), Some((Verdict::NoHint, 5, None)));
    assert_eq!((told.elsewhere, told.seen.len()), (vec![OTHER], 1));
    bench.describe(11, Descriptor::RETIRING, 0, Namespace([3; 16]), key(1));
    assert_eq!(bench.view().namespaces_of(key(1)).unwrap(), [NAMESPACE, OTHER]);
    assert_eq!(bench.view().blocks_that(|namespace, _| namespace == OTHER).unwrap(), [9]);
}

#[test]
fn a_hint_behind_an_empty_place_or_in_a_damaged_line_leads_nowhere() {
    let bench = joined();
    bench.describe(5, Descriptor::READY, 0, NAMESPACE, key(1));
    bench.hint(NAMESPACE, key(1), 1, 5);
    assert_eq!(bench.answer(true), Some(Verdict::BehindTheEnd));
    let blocks = bench.view().cells(5, 1).unwrap();
    assert_eq!(bench.view().are_reachable(&blocks).unwrap(), [false]);
    bench.hint(NAMESPACE, key(1), 0, 77);
    assert_eq!(bench.view().are_reachable(&blocks).unwrap(), [true]);
    let told = bench.view().why(NAMESPACE, key(1), false).unwrap();
    assert!(told.is_hit() && told.seen.len() == 2, "{:?}", told.seen);
    bench.damage(Region::Hint, told.home_line);
    let told = bench.view().why(NAMESPACE, key(1), false).unwrap();
    assert!(told.answer().is_none() && told.damaged_lines == 1);
    assert_eq!(bench.view().are_reachable(&blocks).unwrap(), [false]);
}

#[test]
fn the_summary_counts_states_owners_chunks_hints_and_who_is_waited_for() {
    let bench = joined();
    let per_chunk = u64::from(bench.geometry().cells_per_chunk);
    let first_large = bench.geometry().cells[0].chunks * per_chunk;
    // Slot 0 has chunk 0 and is fenced; slot 1 has adopted it, and has chunk 1 and a large one for itself.
    bench.claim(0, 2, &[0]);
    bench.claim(1, 2, &[0, 1, bench.geometry().cells[0].chunks]);
    bench.describe(0, Descriptor::WRITING, 0, NAMESPACE, key(1));
    bench.describe(1, Descriptor::READY, 1, NAMESPACE, key(2));
    bench.describe(per_chunk, Descriptor::READY, 1, NAMESPACE, key(3));
    bench.describe(per_chunk + 1, Descriptor::EVICTING, 1, OTHER, key(4));
    bench.describe(first_large, Descriptor::READY, 1, OTHER, key(5));
    bench.fence(0, 2);
    bench.hint(NAMESPACE, key(3), 0, per_chunk);
    bench.hint(NAMESPACE, key(9), 0, per_chunk);
    bench.damage(Region::Descriptor, per_chunk + 1);
    let summary = bench.view().summary(true).unwrap();
    let all = bench.geometry().cell_count();
    assert_eq!(CellState::ALL.map(|state| summary.cells.of(state)), [all - 5, 1, 3, 0, 0, 1]);
    assert_eq!(summary.classes.iter().map(|class| class.cells.total()).sum::<u64>(), all);
    assert_eq!(summary.classes[1].cells.of(CellState::Ready), 1);
    assert_eq!((summary.chunks.claimed, summary.chunks.unclaimed), (3, bench.geometry().cell_chunks() - 3));
    let owner = |slot| summary.owners.iter().find(|found| found.owner == Claimant { slot, incarnation: 2 }).copied().unwrap();
    assert_eq!((owner(0).standing, owner(0).chunks, owner(0).cells.of(CellState::Writing)), (OwnerStatus::Fenced, 1, 1));
    assert_eq!((owner(1).standing, owner(1).chunks, owner(1).cells.of(CellState::Ready)), (OwnerStatus::Live, 3, 3));
    assert_eq!(owner(1).len_bytes, 3 * 1000 + 1 + per_chunk + first_large);
    assert_eq!(summary.served, 3);
    let largest = summary.namespaces[0];
    assert_eq!((largest.namespace, largest.blocks, largest.cell_bytes), (Some(OTHER), 1, 16384));
    assert_eq!(summary.namespaces[1].blocks, 2);
    let hints = summary.hints.unwrap();
    assert_eq!((hints.used, hints.stale, hints.unreachable_blocks), (2, 1, 2));
    // Cells of chunk 0 that slot 1 has not stamped wait for the proof that slot 0 has ended: all but cell 1.
    assert_eq!(summary.waits.len(), 1);
    assert_eq!((summary.waits[0].awaited, summary.waits[0].cells), (Claimant { slot: 0, incarnation: 2 }, per_chunk - 1));
    assert_eq!(summary.waiting_bytes, (per_chunk - 1) * 4096);
    bench.end(0);
    assert!(bench.view().summary(false).unwrap().waits.is_empty());
    // Two hosts that are there with one chunk: impossible, and reported.
    bench.lines().publish(0, FenceLine::default()).unwrap();
    bench.lines().publish(0, Identity { acknowledged: 0, ..bench.lines().fetch::<Identity>(0).unwrap() }).unwrap();
    assert_eq!(bench.view().summary(false).unwrap().chunks.contested, 1);
}

#[test]
fn a_cache_in_use_is_told_as_it_is() {
    let bench = bench();
    let state = State::open(bench.folder.path(), bench.pool.superblock().uuid(), MachineId([1; 16])).unwrap();
    let config = HostConfig { seats: bench.pool.superblock().seats(), ..HostConfig::default() };
    let machine = Arc::new(Machine::new(MachineId([1; 16]), state).unwrap());
    let host = crate::pool::join(bench.lines().clone(), machine, config).unwrap();
    let _service = host.serve().unwrap();
    let cache = Cache::open(&host, CacheConfig { checksums: true, ..CacheConfig::default() }).unwrap();
    for number in 0..20 {
        let bytes: Vec<u8> = (0..1000 + 700 * number as usize).map(|at| (at as u64 * 31 + number) as u8).collect();
        cache.publish(NAMESPACE, key(number), None, &bytes).unwrap();
    }
    let pin = cache.pin(NAMESPACE, key(3)).unwrap().unwrap();
    let summary = bench.view().summary(true).unwrap();
    assert_eq!((summary.served, summary.pinned, &summary.pins[..]), (20, 1, &[(host.slot(), 1)][..]));
    assert_eq!(summary.namespaces[0].len_bytes, (0..20).map(|number| 1000 + 700 * number).sum::<u64>());
    let hints = summary.hints.unwrap();
    assert_eq!((hints.used, hints.stale, hints.unreachable_blocks, hints.damaged_lines), (20, 0, 0, 0));
    assert!(summary.waits.is_empty() && summary.chunks.abandoned == 0);
    let owned: u64 = summary.owners.iter().map(|owner| owner.cells.total()).sum();
    assert_eq!(owned, cache.usage().owned);
    assert_eq!(bench.view().why(NAMESPACE, key(3), true).unwrap().answer().unwrap().info.as_ref().unwrap().pinned_by, [host.slot()]);
    drop(pin);
    cache.evict(NAMESPACE, key(3)).unwrap();
    let told = bench.view().why(NAMESPACE, key(3), true).unwrap();
    assert!(told.seen.is_empty(), "{:?}", told.seen);
    assert!(bench.view().why(NAMESPACE, key(4), true).unwrap().is_hit());
    cache.close().unwrap();
}
