// SPDX-License-Identifier: Apache-2.0
//! Runs whole pools over damaged memory: shared by the tests and the fuzz targets.
//!
//! A case is a lived-in pool and a row of damages and operations. Machines have a clock of their own making, so that every time-out passes
//! at once and the whole case depends on its input alone.

mod cells;
mod choices;
mod damage;
mod machine;
mod memory;
mod operations;
mod world;

pub use choices::Choices;
use cxl_pool::media::Region;
pub use world::World;

/// Longest that an operation may take on the machines' clock, in nanoseconds. The longest are a hundred service rounds, each of which may
/// wait for a slot until its deadline, with another host's round in every wait.
const LONGEST_NS: u64 = 60_000_000_000;

/// One case: any damage, any operation.
pub fn pool_image(choices: &mut Choices) {
    let mut world = World::lived_in(choices.one_in(4));
    world.is_forged = true;
    let fixed = world.fixed();
    for _ in 0..=choices.below(4) {
        for _ in 0..=choices.below(4) {
            damage::damage(choices, &world);
        }
        for _ in 0..=choices.below(8) {
            operate(choices, &mut world, &operations::ALL);
        }
    }
    assert!(world.fixed() == fixed, "something wrote where no host writes");
}

/// What managers and joining machines write, against joins, take-overs and locks.
pub fn join(choices: &mut Choices) {
    let regions = [
        Region::Seat,
        Region::Grant,
        Region::Binding,
        Region::Fence,
        Region::Death,
        Region::JoinBox,
        Region::Identity,
        Region::Summary,
        Region::Request,
    ];
    focused(choices, &regions, &operations::JOIN);
}

/// What the allocator writes, against attaching, adopting, allocating and freeing.
pub fn alloc_load(choices: &mut Choices) {
    let regions = [Region::Claim, Region::FreeBox, Region::FreeAck, Region::ChunkHead, Region::KeepMap];
    focused(choices, &regions, &operations::ALLOC);
}

/// Records and intents, against the lock table and the named objects.
pub fn objects(choices: &mut Choices) {
    focused(choices, &[Region::Record, Region::Intent, Region::Fence], &operations::RECORDS);
}

/// Any region, against checks, repairs and views.
pub fn fsck(choices: &mut Choices) {
    focused(choices, &Region::ALL, &operations::FSCK);
}

/// What the cache writes, against everything that is done with it.
pub fn cache(choices: &mut Choices) {
    let regions = [Region::Descriptor, Region::Hint, Region::Pin, Region::CellClaim, Region::Ask];
    focused(choices, &regions, &operations::CACHE);
}

/// Lines and blocks that are damaged, and nothing that a host never wrote: whatever is handed out as a block is right.
pub fn cache_in_rubbish(choices: &mut Choices) {
    let mut world = World::lived_in(choices.one_in(4));
    for _ in 0..=choices.below(5) {
        for _ in 0..choices.below(4) {
            damage::rubbish(choices, &world);
        }
        for _ in 0..=choices.below(8) {
            operate(choices, &mut world, &operations::CACHE);
        }
    }
}

/// Well-sealed patches of some regions, so that a fuzzer finds its way into what reads those.
fn focused(choices: &mut Choices, regions: &[Region], numbers: &[u8]) {
    let mut world = World::lived_in(choices.one_in(4));
    world.is_forged = true;
    let fixed = world.fixed();
    for _ in 0..=choices.below(3) {
        for _ in 0..=choices.below(6) {
            damage::patch(choices, &world, regions);
        }
        for _ in 0..=choices.below(6) {
            operate(choices, &mut world, numbers);
        }
    }
    assert!(world.fixed() == fixed, "something wrote where no host writes");
}

/// One operation, within its bounds.
fn operate(choices: &mut Choices, world: &mut World, numbers: &[u8]) {
    let start_ns = world.clock.now_ns();
    world.memory.start_operation();
    let outcome = operations::operation(choices, world, numbers);
    if let Err(error) = &outcome {
        assert!(!error.to_string().is_empty());
    }
    let took_ns = world.clock.now_ns() - start_ns;
    assert!(took_ns < LONGEST_NS, "an operation took {} ms: {outcome:?}", took_ns / 1_000_000);
}
