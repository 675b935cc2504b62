// SPDX-License-Identifier: Apache-2.0
//! Blocks of a GPU in the prefix cache: published, pulled, verified; and what becomes of a cell that a GPU may still write to.

use crate::bench::{Bench, SPACE, bytes, config, key};
use crate::device::Gpu;
use crate::fake::{Fake, Kind};
use crate::paged::{BLOCK_BYTES, BLOCKS, CELL_BYTES, cache, paged, pieces};
use crate::scenes::on;
use cxl_pool::Error;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Pulled, Reservation, Reserved};
use cxl_pool::copy::{CudaConfig, LocalRange};
use cxl_pool::metrics::{Engine, MissReason};

fn reserve(cache: &Cache, numbers: std::ops::Range<u64>) -> Vec<Reservation> {
    let requests: Vec<PublishRequest> =
        numbers.map(|number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: BLOCK_BYTES as u64 }).collect();
    let cell = |answer| match answer {
        Reserved::Cell(reservation) => reservation,
        _ => panic!("no cell"),
    };
    cache.reserve_all(&requests).unwrap().into_iter().map(cell).collect()
}

fn fill(reservations: &mut [Reservation], pieces: &[Vec<LocalRange>]) -> cxl_pool::Result<()> {
    // SAFETY: the memory of the tests stays, and no other thread uses it meanwhile; the same below.
    unsafe { Reservation::fill_all_raw(reservations, on(0), |place| pieces[place].clone()) }
}

fn pull(cache: &Cache, numbers: std::ops::Range<u64>, pieces: &[Vec<LocalRange>]) -> Vec<Pulled> {
    let keys: Vec<BlockKey> = numbers.map(key).collect();
    // SAFETY: as above.
    unsafe { cache.pull_all_raw(SPACE, &keys, on(0), |place, _| pieces[place].clone()) }.unwrap()
}

const HIT: Pulled = Pulled::Hit { len_bytes: BLOCK_BYTES as u64 };

#[test]
fn blocks_of_one_gpu_are_pulled_by_another_host_of_its_own_layout() {
    for checksums in [true, false] {
        let fake = Fake::new(Kind::Engine);
        let gpu = Gpu::open(fake.path(), 0);
        let bench = Bench::new(&[(CELL_BYTES, 40)]);
        let ((_pool, host), (_other_pool, other_host)) = (bench.join(1), bench.join(2));
        let (_service, _other_service) = (host.serve().unwrap(), other_host.serve().unwrap());
        let config = CacheConfig { checksums, ..config() };
        let cuda = CudaConfig { buffer_bytes: 64 << 10, ..fake.config() };
        let (prefill, decode) = (cache(&host, config.clone(), cuda.clone()), cache(&other_host, config, cuda));
        fake.set("queries_until_done", 1);

        let memory = gpu.memory(&paged(|number| number as usize, 77));
        let mut reservations = reserve(&prefill, 0..BLOCKS);
        let places: Vec<_> = (0..BLOCKS as usize).map(|slot| pieces(&memory, slot)).collect();
        fill(&mut reservations, &places).unwrap();
        prefill.commit_all(reservations).unwrap();
        let copies = fake.get("copies");

        // In another order of the blocks, and nothing else of that memory changes.
        let slot = |number: u64| (number as usize * 5 + 1) % BLOCKS as usize;
        let target = gpu.memory(&bytes(99, BLOCKS as usize * BLOCK_BYTES));
        let places: Vec<_> = (0..BLOCKS).map(|number| pieces(&target, slot(number))).collect();
        assert_eq!(pull(&decode, 0..BLOCKS, &places), [HIT; BLOCKS as usize]);
        assert!(target.read() == paged(slot, 99));
        assert_eq!(fake.get("copies"), 2 * copies);

        // What came from a GPU is any other block, with its checksum.
        let mut found = vec![0; BLOCK_BYTES];
        for number in 0..BLOCKS {
            let pulled = decode.pull(SPACE, key(number), &mut found).unwrap();
            assert!(pulled == HIT && found == bytes(number, BLOCK_BYTES));
        }

        // Counted by the engine that did it.
        let all = BLOCKS * BLOCK_BYTES as u64;
        prefill.service_round().unwrap();
        decode.service_round().unwrap();
        let counted = |cache: &Cache, engine| cache.metrics().copy_bytes_total.of(engine).get();
        assert_eq!((counted(&prefill, Engine::Cuda), counted(&prefill, Engine::Cpu)), (all, 0));
        assert_eq!((counted(&decode, Engine::Cuda), counted(&decode, Engine::Cpu)), (all, all));
        prefill.close().unwrap();
        decode.close().unwrap();
        drop((memory, target));
        drop(gpu);
        fake.assert_left_clean();
    }
}

#[test]
fn a_byte_that_changed_in_the_pool_is_a_miss() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(&[(CELL_BYTES, 40)]);
    let (_pool, host) = bench.join(1);
    let _service = host.serve().unwrap();
    let cache = cache(&host, config(), fake.config());
    let memory = gpu.memory(&paged(|number| number as usize, 5));
    let mut reservations = reserve(&cache, 0..3);
    let places: Vec<_> = (0..3).map(|slot| pieces(&memory, slot)).collect();
    fill(&mut reservations, &places).unwrap();
    cache.commit_all(reservations).unwrap();
    let pins = cache.pin_chain(SPACE, &[key(0), key(1), key(2)]).unwrap();
    let wrong = bytes(1, BLOCK_BYTES)[700] ^ 1;
    let lines = host.lines().memory();
    lines.copy_in(pins[1].offset() + 700, &[wrong]).unwrap();
    lines.fence_stores();
    drop(pins);
    assert_eq!(
        pull(&cache, 0..4, &[&places[..], &places[..1]].concat()),
        [HIT, Pulled::Miss(MissReason::Checksum), HIT, Pulled::Miss(MissReason::Absent)]
    );
    // Pieces that are not as long as their block are refused, the others copied.
    let mut short = places.clone();
    short[0].pop();
    assert_eq!(pull(&cache, 0..3, &short), [Pulled::Miss(MissReason::Length), Pulled::Miss(MissReason::Checksum), HIT]);
    let mut reservations = reserve(&cache, 3..5);
    let filled = fill(&mut reservations, &short[..2]);
    assert!(matches!(filled, Err(Error::Invalid(_))), "{filled:?}");
    drop(reservations);
    cache.close().unwrap();
}

#[test]
fn a_cell_that_a_gpu_may_still_write_to_is_nobodys() {
    let fake = Fake::new(Kind::Engine);
    let gpu = Gpu::open(fake.path(), 0);
    let bench = Bench::new(&[(CELL_BYTES, 40)]);
    let (_pool, host) = bench.join(1);
    let _service = host.serve().unwrap();
    let config = CacheConfig { checksums: false, ..config() };
    let cache = cache(&host, config, CudaConfig { timeout_ms: 60, ..fake.config() });
    let memory = gpu.memory(&paged(|number| number as usize, 5));
    let mut reservations = reserve(&cache, 0..2);
    let cells: Vec<u64> = reservations.iter().map(Reservation::cell).collect();
    let places: Vec<_> = (0..2).map(|slot| pieces(&memory, slot)).collect();
    fake.set("is_stuck", 1);
    let filled = fill(&mut reservations, &places);
    assert!(matches!(filled, Err(Error::Timeout { .. })), "{filled:?}");
    drop(reservations);
    assert!(!cache.copy_engine().is_settled(0));
    assert!(cache.lookup(SPACE, key(0)).unwrap().is_none(), "served although it was never filled");
    // Everything else goes on, in other cells.
    fake.set("is_stuck", 0);
    assert!(cache.copy_engine().is_settled(5_000));
    for round in 0..30 {
        let reservations = reserve(&cache, 100 + round..101 + round);
        assert!(!cells.contains(&reservations[0].cell()), "a cell that was given up is used again");
        drop(reservations);
    }
}
