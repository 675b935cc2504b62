// SPDX-License-Identifier: Apache-2.0
//! What may become of the bytes of a pool, and of the memory that a machine's processes share.

use super::choices::Choices;
use super::world::{World, foreign};
use cxl_pool::host::{NameLine, name_lines};
use cxl_pool::limits::MAX_NUMBER;
use cxl_pool::line::{Line, Lines, empty_line};
use cxl_pool::media::*;
use std::sync::atomic::Ordering;

/// Seals 64 bytes as a line, whatever structure it has.
fn seal(lines: &Lines, region: Region, index: u64, line: &Line) -> Line {
    macro_rules! seal {
        ($($region:ident: $structure:ty),*) => {
            match region {
                $(Region::$region => lines.seal::<$structure>(index, bytemuck::cast(*line)),)*
            }
        };
    }
    seal!(
        Seat: Seat, Grant: GrantLine, Binding: Binding, Fence: FenceLine, Death: DeathLine, JoinBox: JoinBox, Identity: Identity,
        Summary: Summary, Request: RequestLine, Intent: Intent, Record: Record, Claim: Claim, FreeBox: FreeBox, FreeAck: FreeAck,
        ChunkHead: ChunkHead, KeepMap: KeepMap, Stats: StatsLine, Descriptor: Descriptor, Hint: HintLine, Pin: PinLine,
        CellClaim: CellClaim, Ask: Ask, Splitter: Splitter, Claimant: Claimant, SeatClaim: SeatClaim
    )
}

/// A number that code is likely to trip over.
fn extreme(choices: &mut Choices, layout: &Layout, was: u64) -> u64 {
    let geometry = layout.geometry();
    let chunk = choices.below(layout.chunks() + 2);
    let block = layout.data_offset() + chunk * geometry.chunk_bytes;
    match choices.below(23) {
        0 => 0,
        1 => choices.below(12),
        2 => u64::MAX - choices.below(3),
        3 => u64::from(u32::MAX) - choices.below(3),
        4 => u64::from(MAX_NUMBER) - choices.below(3),
        5 => u64::from(MAX_NUMBER) + choices.below(3),
        6 => u64::from(u16::MAX) - choices.below(2),
        7 => u64::from(geometry.slots) + choices.below(3),
        8 => u64::from(geometry.locks) + choices.below(3),
        9 => chunk,
        10 => block,
        11 => block + choices.below(geometry.chunk_bytes),
        12 => block + choices.below(1024) * 64,
        13 => geometry.len_bytes.wrapping_sub(choices.below(130)),
        14 => choices.below(geometry.len_bytes),
        15 => 64 << choices.below(12),
        16 => was.wrapping_add(1),
        17 => was.wrapping_sub(1),
        18 => 1 << choices.below(64),
        19 => choices.below(geometry.cell_count() + 2),
        20 => geometry.cells[choices.below(2) as usize].cell_bytes + choices.below(2),
        21 => layout.cells_offset() + choices.below(geometry.cells_len_bytes()),
        _ => choices.word(),
    }
}

/// Any line, of every region alike.
fn any_line(choices: &mut Choices, world: &World) -> (Region, u64) {
    let region = choices.pick(&Region::ALL);
    (region, any_index(choices, world, region))
}

fn any_index(choices: &mut Choices, world: &World, region: Region) -> u64 {
    let lines = world.lines.layout().span(region).lines;
    // Low numbers are in use, high ones are mostly empty.
    let limit = if choices.one_in(2) { lines.min(12) } else { lines };
    choices.below(limit)
}

/// Sets fields of a line, sealed: it verifies, and says something that no host ever wrote.
fn set_fields(choices: &mut Choices, world: &World, region: Region, index: u64) {
    let mut line = world.line(region, index);
    for _ in 0..=choices.below(3) {
        let width = choices.pick(&[1usize, 2, 4, 4, 4, 8]);
        let at = 4 + choices.below((60 / width) as u64) as usize * width;
        let at = if width == 8 { at + 4 } else { at };
        let Some(field) = line.0.get_mut(at..at + width) else { continue };
        let mut was = [0; 8];
        was[..width].copy_from_slice(field);
        let value = extreme(choices, world.lines.layout(), u64::from_le_bytes(was));
        field.copy_from_slice(&value.to_le_bytes()[..width]);
    }
    let lines = if choices.one_in(16) { foreign(&world.lines) } else { world.lines.clone() };
    world.set_line(region, index, &seal(&lines, region, index, &line));
}

/// Writes eight bytes of the input into a line of one of `regions` and seals it.
pub fn patch(choices: &mut Choices, world: &World, regions: &[Region]) {
    let region = choices.pick(regions);
    let index = any_index(choices, world, region);
    let mut line = world.line(region, index);
    let at = 4 + choices.below(53) as usize;
    let width = choices.pick(&[1, 2, 4, 8]);
    line.0[at..at + width].copy_from_slice(&choices.word().to_le_bytes()[..width]);
    world.set_line(region, index, &seal(&world.lines, region, index, &line));
}

/// Damages the pool once.
pub fn damage(choices: &mut Choices, world: &World) {
    let (region, index) = any_line(choices, world);
    match choices.below(18) {
        0..4 => rubbish(choices, world),
        4 => {
            // All bytes behind the checksum are random, and it is right.
            let line = Line(std::array::from_fn(|_| choices.word() as u8));
            world.set_line(region, index, &seal(&world.lines, region, index, &line));
        }
        5 => swap(choices, world, region, index),
        6 => whole_region(choices, world, region),
        7 => local_memory(choices, world),
        8 if choices.one_in(2) => hostile_name(choices, world),
        8 => hostile_message(choices, world),
        9 => hostile_chunks(choices, world),
        10..12 => hostile_cells(choices, world),
        _ => set_fields(choices, world, region, index),
    }
}

/// Damage that no line survives: what it said is gone, and nothing else stands in its place. And bytes of a block that change.
pub fn rubbish(choices: &mut Choices, world: &World) {
    let (region, index) = any_line(choices, world);
    match choices.below(4) {
        0 => {
            let line = Line(std::array::from_fn(|_| choices.word() as u8));
            world.set_line(region, index, &line);
        }
        1 => {
            let mut line = world.line(region, index);
            for _ in 0..=choices.below(3) {
                let bit = choices.below(512) as usize;
                line.0[bit / 8] ^= 1 << (bit % 8);
            }
            world.set_line(region, index, &line);
        }
        2 => world.set_line(region, index, &Line(choices.pick(&[[0; 64], [0xff; 64]]))),
        _ => {
            let layout = world.lines.layout();
            let (offset, cell_bytes) = layout.cell(choices.below(layout.geometry().cell_count())).expect("a cell of the layout");
            let at = (offset + choices.below(cell_bytes.min(2000))) as usize;
            let bit = choices.below(8);
            world.memory.with(|bytes| bytes[at] ^= 1 << bit);
        }
    }
}

/// Two lines change places, as they are or sealed anew.
fn swap(choices: &mut Choices, world: &World, region: Region, index: u64) {
    let (other_region, other) = if choices.one_in(3) { any_line(choices, world) } else { (region, any_index(choices, world, region)) };
    let (one, two) = (world.line(region, index), world.line(other_region, other));
    if choices.one_in(2) {
        world.set_line(region, index, &two);
        world.set_line(other_region, other, &one);
    } else {
        world.set_line(region, index, &seal(&world.lines, region, index, &two));
        world.set_line(other_region, other, &seal(&world.lines, other_region, other, &one));
    }
}

/// A whole region: zero, random, empty as after a format, or the bytes of another one.
fn whole_region(choices: &mut Choices, world: &World, region: Region) {
    let kind = choices.below(5);
    let (word, source) = (choices.word(), choices.pick(&Region::ALL));
    let source_lines = world.lines.layout().span(source).lines.max(1);
    for index in 0..world.lines.layout().span(region).lines {
        let copied = world.line(source, index % source_lines);
        let line = match kind {
            0 => Line::ZERO,
            1 => Line([word as u8; 64]),
            2 => empty_line(&world.lines, region, index),
            3 => copied,
            _ => seal(&world.lines, region, index, &copied),
        };
        world.set_line(region, index, &line);
    }
}

/// What another build, or a broken process, left in the memory that the processes of a machine share.
fn local_memory(choices: &mut Choices, world: &World) {
    let machine = choices.below(world.machines.len() as u64) as usize;
    world.machines[machine].with_local(|units| {
        for _ in 0..=choices.below(6) {
            // The heads of its two parts, or anywhere.
            let limit = if choices.one_in(2) { 3 } else { units.len() as u64 };
            let unit = choices.below(limit) as usize;
            let word = &units[unit].words()[choices.below(8) as usize];
            let value = extreme(choices, world.lines.layout(), word.load(Ordering::Relaxed));
            word.store(if choices.one_in(3) { value << 32 | value & 0xffff } else { value }, Ordering::Relaxed);
        }
    });
}

/// A message in a free box that asks for anything.
fn hostile_message(choices: &mut Choices, world: &World) {
    let slots = u64::from(world.lines.layout().geometry().slots);
    let index = choices.below(slots.min(4)) * slots + choices.below(slots.min(4));
    let mut message = FreeBox {
        crc: 0,
        incarnation: 1 + choices.below(3) as u32,
        receiver: 1 + choices.below(3) as u32,
        sequence: extreme(choices, world.lines.layout(), 1) as u32,
        offsets: [0; BLOCKS_PER_FREE_BOX],
    };
    message.offsets.iter_mut().for_each(|offset| *offset = extreme(choices, world.lines.layout(), 64));
    world.set_line(Region::FreeBox, index, &world.lines.seal(index, message));
}

/// A name of a machine of any bytes, sealed or not.
fn hostile_name(choices: &mut Choices, world: &World) {
    let (index, offset) = choices.pick(&(0..4).flat_map(name_lines).collect::<Vec<_>>());
    let name = NameLine { crc: 0, incarnation: 1 + choices.below(3) as u32, part: std::array::from_fn(|_| choices.word() as u8) };
    let line = match choices.one_in(4) {
        true => Line(bytemuck::cast(name)),
        false => world.lines.seal_in(world.lines.seal_of(&[]), index, name),
    };
    world.memory.with(|bytes| bytes[offset as usize..][..64].copy_from_slice(&line.0));
}

/// Heads, keep maps and claims that verify and contradict each other.
fn hostile_chunks(choices: &mut Choices, world: &World) {
    let layout = world.lines.layout().clone();
    for _ in 0..=choices.below(4) {
        let chunk = choices.below(layout.chunks());
        let head = ChunkHead {
            slot: choices.below(4) as u32,
            incarnation: 1 + choices.below(2) as u32,
            state: choices.below(4) as u32,
            block_bytes: choices.pick(&[64, 192, 4096, layout.geometry().chunk_bytes, layout.geometry().chunk_bytes * 3, 100, 0]),
            run: choices.below(layout.chunks() + 2),
            ..ChunkHead::default()
        };
        world.set_line(Region::ChunkHead, chunk, &world.lines.seal(chunk, head));
        let keep_lines = layout.geometry().keep_lines();
        let index = chunk * keep_lines + choices.below(keep_lines);
        let mut keep = KeepMap { crc: 0, incarnation: 1, bits: [0; BLOCKS_PER_KEEP / 8] };
        keep.bits[choices.below(3) as usize] = choices.word() as u8 | 1;
        world.set_line(Region::KeepMap, index, &world.lines.seal(index, keep));
        let slot = choices.below(4);
        let mut claim: Claim = bytemuck::cast(world.line(Region::Claim, slot));
        claim.bits[(chunk / 8) as usize] ^= 1 << (chunk % 8);
        world.set_line(Region::Claim, slot, &world.lines.seal(slot, claim));
    }
}

/// Descriptors, claims, hints, pins and requests of the cache that verify and contradict each other.
fn hostile_cells(choices: &mut Choices, world: &World) {
    let geometry = *world.lines.layout().geometry();
    for _ in 0..=choices.below(4) {
        let cell = choices.below(geometry.cell_count());
        let (slot, incarnation) = (choices.below(4), 1 + choices.below(2) as u32);
        let descriptor = Descriptor {
            state: choices.below(5) as u8,
            kind: choices.below(2) as u8,
            owner: slot as u16,
            incarnation,
            len_bytes: choices.pick(&[0, 1, 64, 1000, 1024, 4096, 4097, u32::MAX]),
            seq: choices.below(100),
            key: super::world::key(choices.below(12)).0,
            namespace: super::world::NAMESPACE.0,
            ..Descriptor::default()
        };
        world.set_line(Region::Descriptor, cell, &world.lines.seal(cell, descriptor));
        let mut claim: CellClaim = bytemuck::cast(world.line(Region::CellClaim, slot));
        claim.set(choices.below(geometry.cell_chunks() + 2) as usize, choices.one_in(2));
        world.set_line(Region::CellClaim, slot, &world.lines.seal(slot, claim));
        let pins = PinLine { crc: 0, incarnation, nibbles: [choices.word(), 0, choices.word(), 0, 0, 0, choices.word()] };
        let index = slot * geometry.pin_lines();
        world.set_line(Region::Pin, index, &world.lines.seal(index, pins));
        let index = any_index(choices, world, Region::Hint);
        let mut hints: HintLine = bytemuck::cast(world.line(Region::Hint, index));
        let place = choices.below(HINTS_PER_LINE as u64) as usize;
        let hint = match choices.below(4) {
            0 => Hint::Empty,
            1 => Hint::Tomb,
            // As another hint of the pool has it, so that the fingerprint is one that is looked for.
            2 => {
                let other: HintLine = bytemuck::cast(world.line(Region::Hint, any_index(choices, world, Region::Hint)));
                other.get(choices.below(HINTS_PER_LINE as u64) as usize)
            }
            _ => Hint::Cell { fingerprint: choices.word(), cell: choices.pick(&[cell, geometry.cell_count(), (1 << 48) - 2]) },
        };
        hints.set(place, hint);
        world.set_line(Region::Hint, index, &world.lines.seal(index, hints));
        let ask = Ask {
            incarnation,
            number: 1 + choices.below(50),
            what: choices.below(4) as u32,
            class: choices.pick(&[0, 1, 2, 4, u32::MAX]),
            key: descriptor.key,
            namespace: descriptor.namespace,
            ..Ask::default()
        };
        world.set_line(Region::Ask, slot, &world.lines.seal(slot, ask));
    }
}
