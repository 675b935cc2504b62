// SPDX-License-Identifier: Apache-2.0
//! The last host: states who is dead, takes every cell over, fills the whole cache and empties it. What does not come back is a leak.

use crate::leases::host_config;
use crate::parent::PATIENCE;
use crate::payload::{self, CELL_BYTES};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Published, Pulled, chain};
use cxl_pool::fsck::{self, Severity};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::machine::{Machine, State};
use cxl_pool::media::{CHUNKS_PER_CELL_CLAIM, CellClaim, Descriptor, Identity};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::Pool;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Identity of the judge's machine.
pub fn machine_id(number: u8) -> MachineId {
    MachineId([number ^ 0xf0; 16])
}

/// Waits until `is_done`, with rounds of the cache's upkeep in between.
fn wait(cache: &Cache, what: &str, is_done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_done() {
        assert!(Instant::now() < deadline, "{what}: {:?}", cache.usage());
        // Whatever a round cannot do yet, a later one does.
        let _ = cache.service_round();
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the host at `slot` has every chunk in which hosts left anything. One that is claimed and empty waits for a host that needs it.
fn has_all_that_was_left(pool: &Pool, slot: u16) -> bool {
    let geometry = pool.layout().geometry();
    assert_eq!(geometry.cell_claim_lines(), 1);
    let claim = |slot| pool.lines().fetch::<CellClaim>(slot).unwrap();
    let (own, per_chunk) = (claim(slot.into()), u64::from(geometry.cells_per_chunk));
    let others: Vec<CellClaim> = (0..u64::from(geometry.slots)).map(claim).collect();
    let is_left = |chunk: usize| !own.has(chunk) && others.iter().any(|other| other.has(chunk));
    let is_free = |cell| pool.lines().fetch::<Descriptor>(cell).unwrap().state == Descriptor::FREE;
    let is_empty = |chunk: usize| (0..per_chunk).all(|cell| is_free(chunk as u64 * per_chunk + cell));
    (0..CHUNKS_PER_CELL_CLAIM.min(geometry.cell_chunks() as usize)).filter(|&chunk| is_left(chunk)).all(is_empty)
}

/// States the death of every host that is not here any more. No process but this one runs.
fn declare_dead(pool: &Pool, host: &Host) -> u32 {
    let slots = pool.layout().geometry().slots;
    let mut dead = 0;
    for slot in (0..slots).filter(|&slot| slot != u32::from(host.slot())) {
        let identity: Identity = pool.lines().fetch(slot.into()).unwrap();
        if identity.incarnation > 0 && identity.state != Identity::LEFT {
            host.declare_dead(slot as u16, identity.incarnation).unwrap();
            dead += 1;
        }
    }
    dead
}

/// Judges a pool that is not used any more; says what was found in good order.
pub fn judge(pool: &Pool, number: u8, state_directory: &Path) -> String {
    let state = State::open(state_directory, pool.superblock().uuid(), machine_id(number)).unwrap();
    let machine = Arc::new(Machine::new(machine_id(number), state).unwrap());
    let config = HostConfig { seats: pool.superblock().seats(), ..host_config() };
    let host = cxl_pool::pool::join(pool.lines().clone(), machine, config).unwrap();
    let service = host.serve().unwrap();
    let dead = declare_dead(pool, &host);
    let cells = pool.layout().geometry().cell_count();
    let cache = Cache::open(&host, CacheConfig { checksums: true, upkeep_ms: 1, ..CacheConfig::default() }).unwrap();

    // What hosts gave back has no owner until it is needed.
    let is_done = || cache.usage().quarantined == 0 && has_all_that_was_left(pool, host.slot());
    wait(&cache, "cells of others that were not adopted", is_done);
    let usage = cache.usage();
    assert_eq!(usage.free + usage.ready, usage.owned, "cells in no list: {usage:?}");
    let adopted = usage.ready;
    let removed = cache.clear(None).unwrap();
    assert_eq!((removed as u64, cache.usage().free), (adopted, usage.owned), "blocks that cannot be evicted: {:?}", cache.usage());
    assert_eq!(cache.shares(), [], "blocks without an owner");

    let filled = fill(&cache, pool);
    // A window of the hint table that happens to be full keeps a block out.
    assert!(filled * 100 >= cells * 97, "only {filled} of {cells} cells can be filled");
    assert_eq!(cache.clear(None).unwrap() as u64, filled);
    assert_eq!(cache.usage().free, cells, "cells that did not come back: {:?}", cache.usage());
    cache.close().unwrap();
    host.leave().unwrap();
    drop(service);
    let report = fsck::check(pool.lines(), &pool.superblock().seats()).unwrap();
    let found: Vec<_> = report.findings.iter().filter(|finding| finding.severity > Severity::Note).collect();
    assert!(report.is_clean(), "{found:?}");
    format!("{dead} hosts dead, {adopted} blocks adopted, {filled} of {cells} cells filled and emptied")
}

/// Fills the cells of every size with blocks that need that size, and pulls every one back; returns how many.
fn fill(cache: &Cache, pool: &Pool) -> u64 {
    let space = Namespace([0xa5; 16]);
    let mut blocks: Vec<(BlockKey, u64)> = Vec::new();
    let geometry = pool.layout().geometry();
    let mut count = 0;
    for (class, most) in geometry.cells.iter().zip(CELL_BYTES) {
        let least = if most == CELL_BYTES[0] { 0 } else { CELL_BYTES[0] };
        let cells = class.chunks * u64::from(geometry.cells_per_chunk);
        let before = blocks.len() as u64;
        // A few more than there is room for would push others out, so each cell is asked for once.
        for _ in 0..cells {
            let publication = loop {
                count += 1;
                let publication = payload::publication(1 << 20, count, false);
                if (least + 1..=most).contains(&(payload::len_bytes(publication) as u64)) {
                    break publication;
                }
            };
            let key = chain(None, &[count as u32], b"last");
            match cache.publish(space, key, None, &payload::bytes(space, key, publication)) {
                Ok(Published::Stored) => blocks.push((key, publication)),
                Err(cxl_pool::Error::Full { .. }) => {}
                other => panic!("block {} of {cells}: {other:?}", blocks.len() as u64 - before),
            }
        }
    }
    let mut bytes = vec![0; CELL_BYTES[1] as usize];
    for (key, publication) in &blocks {
        let pulled = cache.pull(space, *key, &mut bytes).unwrap();
        assert_eq!(pulled, Pulled::Hit { len_bytes: payload::len_bytes(*publication) as u64 }, "a block that was just published");
        assert_eq!(payload::check(space, *key, &bytes[..payload::len_bytes(*publication)]), Ok(*publication));
    }
    blocks.len() as u64
}
