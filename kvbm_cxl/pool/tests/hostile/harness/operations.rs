// SPDX-License-Identifier: Apache-2.0
//! Everything that a host or an operator does with a pool. Each call may fail; none may do anything worse.

use super::cells;
use super::choices::Choices;
use super::memory::Memory;
use super::world::{TIMEOUT_MS, World};
use cxl_pool::alloc::{Block, audit, block_of, owner_of};
use cxl_pool::fsck;
use cxl_pool::host::MAX_NAME_BYTES;
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::media::Region;
use cxl_pool::pool::{fetch_superblock, inspect_header};
use cxl_pool::{Result, lock_table};
use std::sync::Arc;

/// Numbers of the operations, each as often as it deserves.
pub const ALL: [u8; 34] =
    [0, 1, 2, 3, 4, 5, 5, 5, 8, 8, 10, 11, 11, 11, 14, 14, 16, 16, 18, 19, 20, 21, 22, 23, 24, 24, 25, 25, 26, 26, 27, 27, 28, 28];
/// Those that use the cache, and what stops and starts its hosts.
pub const CACHE: [u8; 18] = [0, 3, 4, 5, 24, 24, 25, 25, 25, 26, 26, 26, 26, 27, 27, 28, 28, 28];
/// Those that read what managers and joining machines write.
pub const JOIN: [u8; 8] = [0, 1, 3, 4, 5, 5, 8, 19];
/// Those that read what the allocator writes.
pub const ALLOC: [u8; 9] = [1, 2, 3, 5, 14, 16, 18, 19, 22];
/// Those that read records.
pub const RECORDS: [u8; 5] = [3, 5, 8, 10, 11];
/// Those of an operator.
pub const FSCK: [u8; 4] = [20, 21, 22, 23];

/// Runs one operation. What it returned only matters as far as its promises go.
pub fn operation(choices: &mut Choices, world: &mut World, numbers: &[u8]) -> Result<()> {
    let machine = choices.below(world.members.len() as u64 - 1) as usize;
    match choices.pick(numbers) {
        0 => world.join(machine),
        1 => {
            world.join(machine)?;
            world.attach(machine)
        }
        2 => world.attach(machine),
        3 => {
            world.stop(machine);
            Ok(())
        }
        4 => leave(choices, world, machine),
        5 => serve(choices, world),
        8 => lock(choices, world, machine),
        10 => lock_numbers(choices, world, machine),
        11 => objects(choices, world, machine),
        14 => allocate(choices, world, machine),
        16 => free(choices, world, machine),
        18 => alloc_service(choices, world, machine),
        19 => declare(choices, world, machine),
        20 => check(choices, world),
        21 => repair(choices, world),
        22 => views(choices, world),
        24 => world.open_cache(machine),
        25 => cells::look_up(choices, world, machine),
        26 => cells::pull(choices, world, machine),
        27 => cells::publish(choices, world, machine),
        28 => cells::service(choices, world, machine),
        _ => superblock(world),
    }
}

fn serve(choices: &mut Choices, world: &World) -> Result<()> {
    for _ in 0..=choices.below(30) {
        for member in world.members.iter().flatten() {
            let _ = member.host.service_round();
        }
        // Long enough in sum for suspicions and take-overs.
        world.clock.pass(choices.below(8) * 1_000_000);
    }
    Ok(())
}

fn lock(choices: &mut Choices, world: &World, machine: usize) -> Result<()> {
    let Some(member) = &world.members[machine] else { return Ok(()) };
    let lock = choices.below(18) as u32;
    let mut guard = member.host.acquire(lock, TIMEOUT_MS)?;
    let _ = member.host.check_fences(guard.op());
    if choices.one_in(2) {
        guard.repaired();
    }
    if choices.one_in(4) {
        guard.damaged();
    }
    Ok(())
}

fn lock_numbers(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(member) = &mut world.members[machine] else { return Ok(()) };
    let any = choices.below(18) as u32;
    match choices.below(3) {
        0 => {
            let lock = lock_table::allocate_lock(&member.host, TIMEOUT_MS)?;
            assert!((10..16).contains(&lock), "lock {lock} does not exist or is reserved");
            member.locks.push(lock);
        }
        1 => lock_table::free_lock(&member.host, member.locks.pop().unwrap_or(any), TIMEOUT_MS)?,
        _ => drop(lock_table::is_allocated(&member.host, any, TIMEOUT_MS)?),
    }
    Ok(())
}

fn objects(choices: &mut Choices, world: &World, machine: usize) -> Result<()> {
    let Some(member) = &world.members[machine] else { return Ok(()) };
    let layout = world.lines.layout();
    let name = format!("{}-{}", choices.pick(&["object", "gone", "new"]), choices.below(6));
    let name = name.as_bytes();
    let offset = layout.data_offset() + choices.below(1 << 14) * 64;
    match choices.below(6) {
        0 => member.objects.put(name, offset, choices.below(10_000), TIMEOUT_MS)?,
        1 => member.objects.replace(name, offset, choices.below(10_000), TIMEOUT_MS)?,
        2 => member.objects.destroy(name, TIMEOUT_MS)?,
        3..=4 => {
            let found = member.objects.get(name, TIMEOUT_MS)?;
            assert_eq!(found.name, name);
            assert!(is_inside(&world.lines, found.offset, found.len_bytes), "{found:?}");
        }
        _ => {
            for found in member.objects.list(TIMEOUT_MS)? {
                assert!(is_inside(&world.lines, found.offset, found.len_bytes), "{found:?}");
            }
        }
    }
    Ok(())
}

/// Whether all of a range lies in the chunks.
fn is_inside(lines: &Lines, offset: u64, len_bytes: u64) -> bool {
    let last = offset.checked_add(len_bytes.saturating_sub(1));
    lines.layout().chunk_of(offset).is_some() && last.is_some_and(|last| lines.layout().chunk_of(last).is_some())
}

fn allocate(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let lines = world.lines.clone();
    let Some(member) = &mut world.members[machine] else { return Ok(()) };
    let Some(allocator) = &member.allocator else { return Ok(()) };
    let mut batch: Vec<Block> = Vec::new();
    let mut outcome = Ok(());
    for _ in 0..=choices.below(6) {
        let len_bytes = match choices.below(6) {
            0 => choices.pick(&[0, 1, u64::MAX, 1 << 40, ((24 * 64) << 10) + 1]),
            1 => 1 + choices.below((4 * 64) << 10),
            _ => 1 + choices.below(3000),
        };
        let block = match allocator.alloc(len_bytes) {
            Ok(block) => block,
            Err(error) => {
                outcome = Err(error);
                continue;
            }
        };
        assert!(block.len_bytes >= len_bytes && is_inside(&lines, block.offset, block.len_bytes), "{block:?} for {len_bytes} bytes");
        // Nothing was freed between them, so whatever the pool says, no two of them may share a byte.
        let twin =
            batch.iter().find(|other| other.offset < block.offset + block.len_bytes && block.offset < other.offset + other.len_bytes);
        assert!(twin.is_none(), "{block:?} and {twin:?} are the same bytes");
        batch.push(block);
        if choices.one_in(2) {
            outcome = outcome.and(allocator.keep(block.offset));
        }
    }
    member.blocks.extend(batch.iter().map(|block| block.offset));
    outcome
}

fn any_block(choices: &mut Choices, world: &World) -> u64 {
    let known: Vec<u64> = world.members.iter().flatten().flat_map(|member| member.blocks.iter().copied()).collect();
    match choices.below(4) {
        0 => choices.below(world.lines.layout().geometry().len_bytes + 1000),
        1 => world.lines.layout().data_offset() + choices.below(24) * (64 << 10),
        _ if known.is_empty() => u64::MAX,
        _ => choices.pick(&known),
    }
}

fn free(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let mut outcome = Ok(());
    for _ in 0..=choices.below(4) {
        let offset = any_block(choices, world);
        let Some(allocator) = world.members[machine].as_ref().and_then(|member| member.allocator.as_ref()) else { return Ok(()) };
        let done = if choices.one_in(3) { allocator.keep(offset) } else { allocator.free(offset) };
        outcome = outcome.and(done);
    }
    outcome
}

fn alloc_service(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(member) = &mut world.members[machine] else { return Ok(()) };
    let Some(allocator) = &member.allocator else { return Ok(()) };
    let usage = allocator.usage();
    assert!(usage.kept_bytes + usage.scratch_bytes <= usage.owned_bytes, "{usage:?}");
    match choices.below(4) {
        0 => allocator.adopt_dead().map(drop),
        1 => match member.allocator.take() {
            Some(allocator) => allocator.close(),
            None => Ok(()),
        },
        _ => {
            let mut outcome = Ok(());
            for _ in 0..3 {
                outcome = outcome.and(allocator.service_round());
                world.clock.pass(1_000_000);
            }
            outcome
        }
    }
}

fn declare(choices: &mut Choices, world: &World, machine: usize) -> Result<()> {
    let Some(member) = &world.members[machine] else { return Ok(()) };
    let slot = choices.below(10) as u16;
    let incarnation = choices.pick(&[0, 1, 2, 1 << 31, u32::MAX]);
    let _ = member.host.is_fenced(slot.min(7), incarnation);
    let _ = member.host.is_proven_dead(slot.min(7), incarnation);
    // Only of a host that is stopped: a false statement is allowed to lose data.
    if choices.one_in(3) { member.host.declare_dead(slot, incarnation) } else { Ok(()) }
}

fn leave(choices: &mut Choices, world: &mut World, machine: usize) -> Result<()> {
    let Some(member) = &mut world.members[machine] else { return Ok(()) };
    if choices.one_in(2)
        && let Some(allocator) = member.allocator.take()
    {
        let _ = allocator.close();
    }
    member.allocator = None;
    let outcome = member.host.leave();
    assert!(outcome.is_err() || member.host.enter().is_err(), "a host that left goes on");
    world.stop(machine);
    outcome
}

fn check(choices: &mut Choices, world: &World) -> Result<()> {
    let report = if choices.one_in(2) { fsck::check(&world.lines, &world.seats)? } else { fsck::check_twice(&world.lines, &world.seats)? };
    for finding in &report.findings {
        assert!(!finding.rule.is_empty() && !finding.meaning.is_empty() && !finding.remedy.what().is_empty());
    }
    Ok(())
}

/// On a copy: a repair wants the pool to itself.
fn repair(choices: &mut Choices, world: &World) -> Result<()> {
    let memory = Arc::new(Memory::new(world.memory.image()));
    let lines = world.lines_over(memory.clone());
    let repaired = fsck::repair(&lines, &world.seats, choices.one_in(2))?;
    assert!(repaired.lines_written == 0 || !repaired.before.findings.is_empty());
    assert!(world.fixed_in(&memory) == world.fixed(), "a repair wrote where no host writes");
    Ok(())
}

fn views(choices: &mut Choices, world: &World) -> Result<()> {
    let lines = &world.lines;
    for slot in fsck::survey(lines, &world.seats)?.slots {
        let is_safe = |name: &str| name.len() <= 4 * MAX_NAME_BYTES && name.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        assert!(slot.name.as_deref().is_none_or(is_safe), "{:?}", slot.name);
    }
    for region in Region::ALL {
        for index in 0..lines.layout().span(region).lines {
            let told = fsck::describe(lines, region, index, &world.line(region, index));
            assert!(!told.name.is_empty() && !told.owner.is_empty());
        }
    }
    for _ in 0..8 {
        let offset = any_block(choices, world);
        let _ = owner_of(lines, offset);
        if let Ok(Some(block)) = block_of(lines, offset) {
            assert!(is_inside(lines, block.offset, block.len_bytes), "{block:?}");
            assert!((block.offset..block.offset + block.len_bytes).contains(&offset), "{block:?} is not around {offset:#x}");
        }
    }
    cells::views(choices, world)?;
    let audit = audit(lines)?;
    assert!(audit.owned + audit.free + audit.waiting <= audit.chunks, "{audit:?}");
    Ok(())
}

fn superblock(world: &World) -> Result<()> {
    for device in 0..u64::from(world.lines.layout().geometry().devices) {
        let offset = device * DEVICE_HEADER_BYTES;
        drop(inspect_header(&*world.memory, offset, "device")?);
        let superblock = fetch_superblock(&*world.memory, offset, "device")?;
        fsck::check_superblocks(&world.lines, &superblock, &mut fsck::Report::default())?;
    }
    Ok(())
}
