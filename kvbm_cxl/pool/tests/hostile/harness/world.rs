// SPDX-License-Identifier: Apache-2.0
//! A small pool that hosts have lived in for a while.

use super::machine::{Clock, Machine, Process};
use super::memory::Memory;
use cxl_pool::Result;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Pinned};
use cxl_pool::host::{Host, HostConfig, name_lines};
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::*;
use cxl_pool::objects::Objects;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{write_regions, write_superblocks};
use std::sync::{Arc, OnceLock};

/// Deadline of every call, in milliseconds of the machines' own time.
pub const TIMEOUT_MS: u64 = 60;
/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Chunks of the pool.
pub const CHUNKS: u64 = 24;
const UUID: [u8; 16] = *b"a hostile pool!!";
const INCARNATION: u64 = 7;

/// A host of the pool, as a test uses it.
pub struct Member {
    pub host: Host,
    pub objects: Objects,
    pub allocator: Option<Allocator>,
    pub cache: Option<Cache>,
    /// Blocks of the cache that it has pinned.
    pub pins: Vec<Pinned>,
    /// Blocks that it allocated, by offset.
    pub blocks: Vec<u64>,
    /// Locks that it allocated.
    pub locks: Vec<u32>,
}

/// The pool and its machines.
pub struct World {
    pub memory: Arc<Memory>,
    pub lines: Lines,
    pub seats: Vec<MachineId>,
    pub clock: Arc<Clock>,
    pub machines: Vec<Arc<Machine>>,
    pub members: Vec<Option<Member>>,
    /// There are lines that verify and that no host of the pool wrote: blocks may then be anything.
    pub is_forged: bool,
}

/// The namespace of every block.
pub const NAMESPACE: Namespace = Namespace([0xcc; 16]);

/// Key of block `number`.
pub fn key(number: u64) -> BlockKey {
    BlockKey([number as u8; 16])
}

/// What block `number` holds, of any publisher: a block's key says what is in it.
pub fn content(number: u64) -> Vec<u8> {
    (0..300 + 377 * number).map(|at| (at.wrapping_mul(2 * number + 1) >> 3) as u8 ^ number as u8).collect()
}

/// The geometry of the pool; its metadata lies on a device of its own, or with the payload.
pub fn geometry(is_apart: bool) -> Geometry {
    let mut cells = Geometry::with_len(0).cells;
    cells[0] = CellClass { cell_bytes: 1024, chunks: 5 };
    cells[1] = CellClass { cell_bytes: 4096, chunks: 4 };
    let with = |len_bytes| Geometry {
        seats: 3,
        slots: 8,
        locks: 16,
        objects: 16,
        chunk_bytes: CHUNK_BYTES,
        stripes: 2,
        cells_per_chunk: 4,
        cells,
        ..Geometry::with_len(len_bytes)
    };
    if is_apart {
        let payload_bytes = with(0).cells_len_bytes().next_multiple_of(CHUNK_BYTES) + CHUNKS * CHUNK_BYTES;
        return Geometry { devices: 2, ..with(0) }.with_metadata_apart(payload_bytes).unwrap();
    }
    let len_bytes = (1..).map(|count| DEVICE_HEADER_BYTES + count * CHUNK_BYTES);
    let fits = |len_bytes: &u64| Layout::new(with(*len_bytes)).is_ok_and(|layout| layout.chunks() == CHUNKS);
    with(len_bytes.take(1000).find(fits).expect("some length has that many chunks"))
}

fn seats() -> Vec<MachineId> {
    vec![Machine::new(0).id()]
}

/// The bytes of a freshly formatted pool.
fn formatted(is_apart: bool) -> &'static [u8] {
    static IMAGES: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
    IMAGES[usize::from(is_apart)].get_or_init(|| {
        let layout = Layout::new(geometry(is_apart)).unwrap();
        assert_eq!(layout.chunks(), CHUNKS);
        let len_bytes = layout.geometry().len_bytes;
        let memory = Arc::new(Memory::new(vec![0; len_bytes as usize]));
        let record = |index| DeviceRecord { id: [3 + index; 16], len_bytes, name: format!("/dev/dax{index}.0") };
        let superblock = Superblock::new(&SuperblockParts {
            uuid: UUID,
            incarnation: INCARNATION,
            layout: layout.clone(),
            coherence: CoherenceMode::Software,
            seats: seats(),
            devices: (0..layout.geometry().devices as u8).map(record).collect(),
        })
        .unwrap();
        write_regions(&Lines::new(memory.clone(), Arc::new(layout), &UUID, INCARNATION)).unwrap();
        write_superblocks(&*memory, &superblock).unwrap();
        memory.image()
    })
}

/// `lines` of another pool laid out alike: what it seals does not verify here.
pub fn foreign(lines: &Lines) -> Lines {
    Lines::new(lines.memory().clone(), lines.layout().clone(), b"some other pool!", INCARNATION)
}

impl World {
    /// The lines of this pool over other memory.
    pub fn lines_over(&self, memory: Arc<Memory>) -> Lines {
        Lines::new(memory, self.lines.layout().clone(), &UUID, INCARNATION)
    }

    /// A freshly formatted pool without hosts.
    pub fn formatted(is_apart: bool) -> World {
        let memory = Arc::new(Memory::new(formatted(is_apart).to_vec()));
        let layout = Arc::new(Layout::new(geometry(is_apart)).unwrap());
        let machines: Vec<_> = (0..5).map(Machine::new).collect();
        World {
            lines: Lines::new(memory.clone(), layout, &UUID, INCARNATION),
            memory,
            seats: seats(),
            clock: Arc::default(),
            members: machines.iter().map(|_| None).collect(),
            machines,
            is_forged: false,
        }
    }

    /// A pool with three hosts, one of them gone without a word, locks, objects, kept blocks and frees under way.
    pub fn lived_in(is_apart: bool) -> World {
        let mut world = World::formatted(is_apart);
        (0..3).for_each(|machine| world.join(machine).unwrap());
        (0..3).for_each(|machine| world.attach(machine).unwrap());
        (0..3).for_each(|machine| world.open_cache(machine).unwrap());
        for machine in 0..3 {
            let member = world.members[machine].as_mut().unwrap();
            let allocator = member.allocator.as_ref().unwrap();
            for len_bytes in [64, 100, 5000, 40_000] {
                let block = allocator.alloc(len_bytes).unwrap();
                allocator.keep(block.offset).unwrap();
                member.blocks.push(block.offset);
            }
            member.blocks.push(allocator.alloc(700).unwrap().offset);
            let name = format!("object-{machine}");
            member.objects.put(name.as_bytes(), member.blocks[1], 100, TIMEOUT_MS).unwrap();
            member.objects.put(format!("gone-{machine}").as_bytes(), member.blocks[0], 64, TIMEOUT_MS).unwrap();
            member.objects.destroy(format!("gone-{machine}").as_bytes(), TIMEOUT_MS).unwrap();
            let lock = cxl_pool::lock_table::allocate_lock(&member.host, TIMEOUT_MS).unwrap();
            drop(member.host.acquire(lock, TIMEOUT_MS).unwrap());
            member.locks.push(lock);
            for number in 3 * machine as u64..3 * machine as u64 + 3 {
                member.cache.as_ref().unwrap().publish(NAMESPACE, key(number), None, &content(number)).unwrap();
            }
        }
        for machine in [0, 2] {
            let member = world.members[machine].as_mut().unwrap();
            member.pins.push(member.cache.as_ref().unwrap().pin(NAMESPACE, key(4)).unwrap().unwrap());
        }
        let run = world.members[1].as_ref().unwrap().allocator.as_ref().unwrap().alloc(3 * CHUNK_BYTES - 5).unwrap();
        world.members[1].as_ref().unwrap().allocator.as_ref().unwrap().keep(run.offset).unwrap();
        world.members[1].as_mut().unwrap().blocks.push(run.offset);
        // Two messages on their way: 2 frees blocks of 0 and of 1.
        let others: Vec<u64> = (0..2).map(|machine| world.members[machine].as_ref().unwrap().blocks[0]).collect();
        let sender = world.members[2].as_ref().unwrap().allocator.as_ref().unwrap();
        others.iter().for_each(|&offset| sender.free(offset).unwrap());
        sender.service_round().unwrap();
        world.stop(2);
        world
    }

    /// Starts a process of a machine and joins.
    pub fn join(&mut self, machine: usize) -> Result<()> {
        self.stop(machine);
        let config = HostConfig {
            slot: None,
            seats: self.seats.clone(),
            join_timeout_ms: Some(2 * TIMEOUT_MS),
            heartbeat_ms: 1,
            suspect_ms: 20,
            damage_ms: 20,
            poll_us: 200,
            idle_release_ms: 40,
            cpus: Default::default(),
        };
        let process = Process::start(&self.machines[machine], &self.clock);
        let host = cxl_pool::pool::join(self.lines.clone(), process, config)?;
        self.clock.add(&host);
        let objects = Objects::new(&host);
        self.members[machine] =
            Some(Member { host, objects, allocator: None, cache: None, pins: Vec::new(), blocks: Vec::new(), locks: Vec::new() });
        Ok(())
    }

    /// Ends the process of a machine without a word to others.
    pub fn stop(&mut self, machine: usize) {
        self.clock.forget(self.machines[machine].id());
        self.members[machine] = None;
    }

    /// Starts the allocator of a host.
    pub fn attach(&mut self, machine: usize) -> Result<()> {
        if let Some(member) = &mut self.members[machine] {
            member.allocator = None;
            let config = AllocConfig { lock_timeout_ms: Some(TIMEOUT_MS), spare_chunks: 1 };
            member.allocator = Some(Allocator::attach(&member.host, LocalArea::of(&member.host)?, config)?);
        }
        Ok(())
    }

    /// Opens the cache of a host anew.
    pub fn open_cache(&mut self, machine: usize) -> Result<()> {
        if let Some(member) = &mut self.members[machine] {
            member.pins.clear();
            if let Some(cache) = member.cache.take() {
                // Whatever it could not put in order is the next one's to find.
                let _ = cache.close();
            }
            let config = CacheConfig { checksums: true, lock_timeout_ms: Some(TIMEOUT_MS), remembered_keys: 64, ..CacheConfig::default() };
            member.cache = Some(Cache::open(&member.host, config)?);
        }
        Ok(())
    }

    /// The 64 bytes of a metadata line.
    pub fn line(&self, region: Region, index: u64) -> Line {
        let offset = self.lines.layout().line_offset(region, index).expect("a line of the layout") as usize;
        self.memory.with(|bytes| Line(bytes[offset..offset + 64].try_into().expect("64 bytes")))
    }

    /// Puts 64 bytes in the place of a metadata line.
    pub fn set_line(&self, region: Region, index: u64, line: &Line) {
        let offset = self.lines.layout().line_offset(region, index).expect("a line of the layout") as usize;
        self.memory.with(|bytes| bytes[offset..offset + 64].copy_from_slice(&line.0));
    }

    /// Bytes that no host writes: the header of every device except the names, and the gap between the metadata and the cells.
    pub fn fixed(&self) -> Vec<u8> {
        self.fixed_in(&self.memory)
    }

    /// The same of a copy of the memory.
    pub fn fixed_in(&self, memory: &Memory) -> Vec<u8> {
        let layout = self.lines.layout();
        let headers = u64::from(layout.geometry().devices) * DEVICE_HEADER_BYTES;
        let metadata_end = layout.spans().last().map_or(headers, |span| span.offset + span.lines * 64);
        let names: Vec<u64> = (0..layout.geometry().slots).flat_map(name_lines).map(|(_, offset)| offset).collect();
        let (first, end) = (names[0] as usize, names[names.len() - 1] as usize + 64);
        let (metadata_end, cells) = (metadata_end as usize, layout.cells_offset() as usize);
        memory.with(|bytes| [&bytes[..first], &bytes[end..headers as usize], &bytes[metadata_end..cells]].concat())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The clock knows the hosts and their processes know the clock: nothing of it would ever be freed.
        self.members.clear();
        self.clock.forget_all();
    }
}
