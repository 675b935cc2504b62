// SPDX-License-Identifier: Apache-2.0
//! What a host and an operator do with the cache.

use super::choices::Choices;
use super::world::{NAMESPACE, World, content, key};
use cxl_pool::cache::survey::CacheView;
use cxl_pool::cache::{BlockKey, Cache, PublishRequest, Published, Pulled, Reserved};
use cxl_pool::{Error, Result};

/// Numbers of the blocks.
const BLOCKS: u64 = 12;

fn cache_of(world: &World, machine: usize) -> Option<Cache> {
    world.members[machine].as_ref()?.cache.clone()
}

/// Bytes that were handed out as block `number`. Where no line was forged they are the block's.
fn judge(world: &World, number: u64, bytes: &[u8]) {
    assert!(world.is_forged || bytes == content(number), "block {number} was handed out with other bytes");
}

pub fn look_up(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(cache) = cache_of(world, machine) else { return Ok(()) };
    let cells = world.lines.layout().geometry().cell_count();
    let keys: Vec<BlockKey> = (0..BLOCKS).map(key).collect();
    if let Some(found) = cache.lookup(NAMESPACE, key(choices.below(BLOCKS)))? {
        assert!(found.cell < cells, "{found:?}");
    }
    let chain = cache.lookup_chain(NAMESPACE, &keys)?;
    assert!(chain.len() <= keys.len() && chain.iter().all(|found| found.cell < cells), "{chain:?}");
    let pins = cache.pin_chain(NAMESPACE, &keys[..choices.below(BLOCKS) as usize])?;
    let Some(member) = &mut world.members[machine] else { return Ok(()) };
    if choices.one_in(2) {
        member.pins.extend(pins);
        member.pins.truncate(20);
    } else {
        member.pins.clear();
    }
    Ok(())
}

pub fn pull(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(cache) = cache_of(world, machine) else { return Ok(()) };
    let mut bytes = vec![0; 5000];
    for _ in 0..=choices.below(4) {
        let number = choices.below(BLOCKS);
        match cache.pull(NAMESPACE, key(number), &mut bytes)? {
            Pulled::Hit { len_bytes } => judge(world, number, &bytes[..len_bytes as usize]),
            Pulled::Miss(_) => {}
        }
    }
    // A block that is pinned can be used in place as well.
    for number in 0..BLOCKS {
        let Some(member) = &world.members[machine] else { return Ok(()) };
        for pin in member.pins.iter().filter(|pin| pin.key() == key(number)) {
            if pin.copy_to(&mut bytes)?.is_none() {
                judge(world, number, &bytes[..pin.len_bytes() as usize]);
            }
        }
    }
    Ok(())
}

pub fn publish(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(cache) = cache_of(world, machine) else { return Ok(()) };
    if choices.one_in(3) {
        // A batch, of which some are given up.
        let numbers: Vec<u64> = (0..=choices.below(5)).map(|_| choices.below(BLOCKS)).collect();
        let request = |&number: &u64| PublishRequest {
            namespace: NAMESPACE,
            key: key(number),
            parent: None,
            len_bytes: content(number).len() as u64,
        };
        let requests: Vec<PublishRequest> = numbers.iter().map(request).collect();
        let mut filled = Vec::new();
        for (number, reserved) in numbers.iter().zip(cache.reserve_all(&requests)?) {
            let Reserved::Cell(mut reservation) = reserved else { continue };
            let (offset, cell_bytes) = world.lines.layout().cell(reservation.cell())?;
            assert!(offset == reservation.offset() && reservation.len_bytes() <= cell_bytes);
            if choices.one_in(4) {
                continue;
            }
            reservation.fill([&content(*number)[..]])?;
            filled.push(reservation);
        }
        return cache.commit_all(filled);
    }
    let number = choices.below(BLOCKS);
    match cache.publish(NAMESPACE, key(number), None, &content(number)) {
        Ok(Published::Stored | Published::Exists | Published::Busy) => Ok(()),
        Err(Error::Full { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

pub fn service(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(cache) = cache_of(world, machine) else { return Ok(()) };
    let usage = cache.usage();
    assert!(usage.free + usage.ready + usage.quarantined <= usage.owned, "{usage:?}");
    match choices.below(5) {
        0 => cache.evict(NAMESPACE, key(choices.below(BLOCKS))).map(drop),
        1 => cache.clear(Some(NAMESPACE).filter(|_| choices.one_in(2))).map(drop),
        2 => {
            drop(cache);
            let Some(member) = &mut world.members[machine] else { return Ok(()) };
            member.pins.clear();
            member.cache.take().map_or(Ok(()), Cache::close)
        }
        _ => {
            let mut outcome = Ok(());
            for _ in 0..=choices.below(3) {
                outcome = outcome.and(cache.service_round());
                world.clock.pass(300_000_000);
            }
            outcome
        }
    }
}

/// What tools tell of it.
pub fn views(choices: &mut Choices, world: &World) -> Result<()> {
    let view = CacheView::load(&world.lines)?;
    let summary = view.summary(true)?;
    assert_eq!(summary.cells.total(), view.cell_count());
    for number in 0..BLOCKS {
        let told = view.why(NAMESPACE, key(number), choices.one_in(2))?;
        assert!(!told.is_hit() || told.answer().is_some_and(|seen| seen.info.is_some()));
    }
    view.namespaces_of(key(1)).map(drop)
}
