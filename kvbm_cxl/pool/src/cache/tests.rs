// SPDX-License-Identifier: Apache-2.0
//! What needs to know where a key belongs, or comes between two steps. Everything else about the calls is in `tests/cache`.

use super::*;
use crate::coherence::CoherenceOptions;
use crate::device::PoolSpec;
use crate::host::HostConfig;
use crate::line::Line;
use crate::machine::{Machine, State};
use crate::media::{HINTS_PER_LINE, Region};
use crate::metrics::RefusalReason;
use crate::platform::MachineId;
use crate::pool::{CellArea, FormatOptions, Pool, Share};

const SPACE: Namespace = Namespace([3; 16]);

/// The cache of the only host of a pool, and the objects that have to outlive it.
pub(super) type Alone = (Cache, crate::host::Service, Pool, tempfile::TempDir);

/// That of a pool of `device_bytes` with `cells` cells of `cell_bytes` bytes. `seats` are reserved for these machines.
pub(super) fn alone(cell_bytes: u64, cells: u64, device_bytes: u64, seats: Vec<MachineId>, config: CacheConfig) -> Alone {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let id = MachineId([3; 16]);
    let options = FormatOptions {
        slots: 4,
        locks: 64,
        objects: 16,
        chunk_bytes: 256 << 10,
        cells: vec![CellArea { cell_bytes, share: Share::Bytes(cells * cell_bytes) }],
        machine: Some(id),
        seats,
        memory: Some(CoherenceOptions::default()),
        ..FormatOptions::default()
    };
    let pool = Pool::format(&PoolSpec::new(vec![directory.path().join("pool")], Some(device_bytes)).unwrap(), &options).unwrap();
    let machine = Machine::new(id, State::open(directory.path(), pool.superblock().uuid(), id).unwrap()).unwrap();
    let host_config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = crate::pool::join(pool.lines().clone(), Arc::new(machine), host_config).unwrap();
    let service = host.serve().unwrap();
    let cache = Cache::open(&host, config).unwrap();
    (cache, service, pool, directory)
}

/// That of a pool with `cells` cells of 64 bytes, with a seat of a machine that never comes.
fn cache(cells: u64) -> Alone {
    alone(64, cells, 8 << 20, vec![MachineId([9; 16])], CacheConfig::default())
}

fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32], b"hints")
}

/// Its owner would else keep it from the processes of the host that claim it next and die on the way.
#[test]
fn a_chunk_that_is_given_back_is_no_process_s() {
    let (cache, _service, pool, _directory) = cache(224);
    assert_eq!(cache.publish(SPACE, key(1), None, &[7; 30]).unwrap(), Published::Stored);
    let (local, tag) = (&cache.inner.store.local, cache.host().inner.tag);
    let chunk = (0..pool.layout().geometry().cell_chunks()).find(|&chunk| local.owner(chunk) == tag).unwrap();
    assert!(!cache.inner.store.give_back(chunk).unwrap(), "a block is in it");
    assert_eq!(local.owner(chunk), tag);
    assert!(cache.evict(SPACE, key(1)).unwrap());
    assert!(cache.inner.store.give_back(chunk).unwrap());
    assert_eq!(local.owner(chunk), 0);
}

#[test]
fn a_full_part_of_the_hint_table_keeps_no_block_out() {
    let (cache, _service, pool, _directory) = cache(112);
    let geometry = *pool.layout().geometry();
    // A stripe that is no longer than a window: all keys of the stripe share its places.
    assert_eq!(geometry.hint_lines_per_stripe(), crate::limits::HINT_WINDOW);
    let places = geometry.hint_lines_per_stripe() as usize * HINTS_PER_LINE;
    let crowd: Vec<u64> = (0..).filter(|&number| cache.inner.index.home(SPACE, key(number)).stripe == 7).take(4 * places).collect();
    let bytes = |number: u64| number.to_le_bytes();
    let publish = |number: u64| cache.publish(SPACE, key(number), None, &bytes(number));
    let is_there = |number: u64| {
        let mut found = [0; 8];
        matches!(cache.pull(SPACE, key(number), &mut found).unwrap(), Pulled::Hit { len_bytes: 8 }) && found == bytes(number)
    };
    let refused = || cache.metrics().publish_refused_total.of(RefusalReason::TableFull).get();
    // Alone, then in batches: where every place is taken, a block of the same window goes.
    for &number in &crowd[..2 * places] {
        assert_eq!(publish(number).unwrap(), Published::Stored);
        assert!(is_there(number));
    }
    for numbers in crowd[2 * places..].chunks(8) {
        let requests: Vec<PublishRequest> =
            numbers.iter().map(|&number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 8 }).collect();
        let mut reservations = Vec::new();
        for (answer, &number) in cache.reserve_all(&requests).unwrap().into_iter().zip(numbers) {
            let Reserved::Cell(mut reservation) = answer else { panic!("block {number} was refused") };
            reservation.fill([&bytes(number)[..]]).unwrap();
            reservations.push(reservation);
        }
        cache.commit_all(reservations).unwrap();
        assert!(numbers.iter().all(|&number| is_there(number)));
    }
    assert_eq!((refused(), crowd.iter().filter(|&&number| is_there(number)).count()), (0, places));
    assert_eq!(cache.usage().ready, places as u64);
    // Blocks that are in use stay, and a key without a place takes no cell.
    let there: Vec<u64> = crowd.iter().copied().filter(|&number| is_there(number)).collect();
    let pins: Vec<_> = there.iter().map(|&number| cache.pin(SPACE, key(number)).unwrap().unwrap()).collect();
    let before = cache.usage();
    match publish(crowd[0]) {
        Err(Error::Full { what, .. }) => assert!(what.contains("hint table"), "{what}"),
        _ => panic!("every block of the window is pinned"),
    }
    assert_eq!((cache.usage(), refused(), there.iter().all(|&number| is_there(number))), (before, 1, true));
    // Other parts of the table are none the worse, and one pin less is room for one more.
    let elsewhere = (0..).find(|&number| cache.inner.index.home(SPACE, key(number)).stripe == 8).unwrap();
    assert_eq!(publish(elsewhere).unwrap(), Published::Stored);
    drop(pins.into_iter().next());
    assert_eq!(publish(crowd[0]).unwrap(), Published::Stored);
}

#[test]
fn blocks_about_to_go_stay_where_a_fence_cannot_be_told() {
    let (cache, _service, pool, _directory) = cache(112);
    let (inner, numbers) = (&cache.inner, 0..40u64);
    for number in numbers.clone() {
        assert_eq!(cache.publish(SPACE, key(number), None, &number.to_le_bytes()).unwrap(), Published::Stored);
    }
    let usage = cache.usage();
    let (row, op) = (pool.layout().line_offset(Region::Fence, 1).unwrap(), inner.store.work().unwrap());
    let whole = pool.lines().fetch_raw(row).unwrap();
    let blocks = inner.store.cells().blocks(|_| true);
    let victims = inner.store.take(&blocks);
    assert_eq!(victims.len(), 40);
    pool.lines().memory().write_line(row, &Line([1; 64])).unwrap();
    pool.lines().fence_published();
    assert!(matches!(inner.retire(&op, victims, cells::evict::Reason::Asked), Err(Error::BadLine { region: "Fence", .. })));
    pool.lines().memory().write_line(row, &whole).unwrap();
    pool.lines().fence_published();
    assert_eq!(cache.usage(), usage);
    for number in numbers {
        let mut found = [0; 8];
        assert_eq!(cache.pull(SPACE, key(number), &mut found).unwrap(), Pulled::Hit { len_bytes: 8 });
        assert_eq!(found, number.to_le_bytes());
        assert!(cache.evict(SPACE, key(number)).unwrap());
    }
}

#[test]
fn a_chunk_counts_the_cells_that_its_process_fills_until_they_are_given_back() {
    let (cache, _service, _pool, _directory) = cache(112);
    let local = &cache.inner.store.local;
    let reserve =
        |number: u64| match cache.reserve(&PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 8 }).unwrap() {
            Reserved::Cell(reservation) => reservation,
            _ => panic!("there is a cell"),
        };
    let [mut committed, aborted, dropped] = [1, 2, 3].map(reserve);
    let chunk = committed.cell() / u64::from(cache.inner.geometry().cells_per_chunk);
    committed.fill([&1u64.to_le_bytes()[..]]).unwrap();
    committed.commit().unwrap();
    assert!(local.chunk(chunk).is_filled());
    aborted.abort().unwrap();
    assert!(local.chunk(chunk).is_filled());
    let mine = local.owner(chunk);
    local.end_filling(chunk, mine + 1);
    assert!(local.chunk(chunk).is_filled(), "no other process ends it");
    drop(dropped);
    assert!(!local.chunk(chunk).is_filled());
    local.end_filling(chunk, mine);
    assert_eq!((local.owner(chunk), local.chunk(chunk).is_filled()), (mine, false), "there is nothing to end");

    // Only the fills that were found are noted as flushed, none that has begun since.
    local.begin_filling(chunk);
    let found = local.chunk(chunk);
    local.begin_filling(chunk);
    local.note_flushed(chunk, found);
    assert!(local.chunk(chunk).is_filled());
    local.note_flushed(chunk, local.chunk(chunk));
    assert_eq!((local.owner(chunk), local.chunk(chunk).is_filled()), (mine, false));

    // A chunk without an owner is not forgotten; the next one's starts over.
    local.begin_filling(chunk);
    local.disown(chunk, mine + 1);
    assert_eq!(local.owner(chunk), mine);
    local.disown(chunk, mine);
    assert_eq!((local.owner(chunk), local.chunk(chunk).is_filled()), (0, true));
    local.set_owner(chunk, mine);
    assert_eq!((local.owner(chunk), local.chunk(chunk).is_filled()), (mine, false));
    local.begin_filling(chunk);
    local.set_owner(chunk, mine);
    assert!(local.chunk(chunk).is_filled(), "it has had it all the while");
    local.end_filling(chunk, mine);
}

#[test]
fn what_came_into_a_cell_since_is_not_taken_out_for_what_was_there() {
    let (cache, _service, _pool, _directory) = cache(112);
    let other = Namespace([4; 16]);
    for number in 0..3 {
        cache.publish(SPACE, key(number), None, &[1; 8]).unwrap();
    }
    let listed = cache.inner.store.cells().blocks(|block| block.namespace == SPACE.0);
    // While one thread works through the list, others make room and use it.
    let cell = cache.lookup(SPACE, key(1)).unwrap().unwrap().cell;
    assert!(cache.evict(SPACE, key(1)).unwrap());
    cache.publish(other, key(9), None, &[2; 8]).unwrap();
    assert_eq!(cache.lookup(other, key(9)).unwrap().unwrap().cell, cell);
    assert_eq!(cache.inner.remove_each(listed, cells::evict::Reason::Asked).unwrap(), 2);
    assert!(cache.lookup(other, key(9)).unwrap().is_some());
    assert_eq!(cache.usage().ready, 1);
}
