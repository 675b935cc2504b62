// SPDX-License-Identifier: Apache-2.0
//! A pool as one process opens it: devices, superblock, layout and lines together.

mod before;
mod content;
mod format;
mod former;
mod media;
mod neighbours;

pub use former::FormerHosts;
pub use media::{FORMAT_SAMPLES, HeaderContent, erase_superblocks, fetch_superblock, inspect_header, write_regions, write_superblocks};
use media::{mark_format, unmark_format};
pub use neighbours::{PoolOnDevice, pools_on, refuse_overlap};

use crate::alloc;
use crate::cache;
use crate::coherence::{Coherence, CoherenceOptions, FaultMap, MappedMemory, Mapping, over_mapping};
use crate::device::{Access, Device, DeviceInfo, DevicePart, PoolSpec, Sysfs, is_in_memory, map, map_ahead, map_header, mapping_limit};
use crate::error::{Error, Result};
use crate::host::{Hooks, Host, HostConfig};
use crate::limits::*;
use crate::line::{Line, Lines};
use crate::machine::{Machine, random_bytes};
use crate::media::{CoherenceMode, DeviceRecord, Layout, Stripes, Superblock, SuperblockParts, uuid_text};
use crate::metrics::stats;
use crate::platform::{MachineId, Platform};
use before::Before;
use std::fs::File;
use std::sync::Arc;

/// How a pool is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Map the devices read-only and refuse every write with an error.
    pub read_only: bool,
    /// How the mapping is used; `None` = as `CXL_COHERENCE` says. Whether flushes are elided is the superblock's to say.
    pub memory: Option<CoherenceOptions>,
    /// Where sysfs is.
    pub sysfs: Sysfs,
}

/// A part of the pool that is cut into cells of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellArea {
    /// Bytes of a cell, a multiple of 64: the largest block that it takes.
    pub cell_bytes: u64,
    /// How much of the pool.
    pub share: Share,
}

/// A part of the pool's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// So many bytes, rounded down to whole cell chunks.
    Bytes(u64),
    /// So many hundredths.
    Percent(u32),
}

/// What a pool is formatted with. The numbers never change afterwards.
#[derive(Clone, Debug)]
pub struct FormatOptions {
    /// Stripe over several devices, in bytes, a power of two. `None` takes [`DEFAULT_STRIPE_BYTES`], or the next larger power of two
    /// with which the number of mappings stays within bounds.
    pub stripe_bytes: Option<u64>,
    /// Manager seats.
    pub seat_count: u32,
    /// Host slots.
    pub slots: u32,
    /// Locks.
    pub locks: u32,
    /// Cells of the object table; 0 = by the size of the pool ([`crate::media::Geometry::default_objects`]).
    pub objects: u32,
    /// Chunk, in bytes, a power of two.
    pub chunk_bytes: u64,
    /// Cells of the prefix cache, smallest first; none = a pool without a cache. Each block takes a cell of the smallest size that holds
    /// it.
    pub cells: Vec<CellArea>,
    /// A machine that seat 0 is reserved for; `None` = for none: the first machine that comes claims it.
    pub machine: Option<MachineId>,
    /// Machines that seats 1 and up are reserved for; none or missing = for none.
    pub seats: Vec<MachineId>,
    /// How hosts see each other's writes.
    pub coherence: CoherenceMode,
    /// Format even if there is something on the devices. It is lost, and every process that has that pool open loses it.
    pub force: bool,
    /// With `force`: format even if hosts use the pool that is there. The format waits until each has stopped.
    pub evict_hosts: bool,
    /// How the mapping is used; `None` = as `CXL_COHERENCE` says.
    pub memory: Option<CoherenceOptions>,
    /// Where sysfs is.
    pub sysfs: Sysfs,
}

impl Default for FormatOptions {
    fn default() -> Self {
        FormatOptions {
            stripe_bytes: None,
            seat_count: DEFAULT_SEATS as u32,
            slots: DEFAULT_SLOTS as u32,
            locks: DEFAULT_LOCKS as u32,
            objects: 0,
            chunk_bytes: DEFAULT_CHUNK_BYTES,
            cells: Vec::new(),
            machine: None,
            seats: Vec::new(),
            coherence: CoherenceMode::default(),
            force: false,
            evict_hosts: false,
            memory: None,
            sysfs: Sysfs::default(),
        }
    }
}

/// Reads the superblock at an offset of a memory; the text names its device.
type FetchSuperblock = fn(&dyn Coherence, u64, &str) -> Result<Superblock>;

/// A pool that this process has mapped. Nothing runs and nothing is written until [`Pool::join`].
pub struct Pool {
    superblock: Superblock,
    devices: Vec<DeviceInfo>,
    /// The first device, on which the kernel is asked for the processes of other hosts.
    file: Option<File>,
    lines: Lines,
    faults: Arc<FaultMap>,
    description: String,
    read_only: bool,
    sysfs: Sysfs,
}

impl Pool {
    /// Opens a pool. Never writes and never formats; the order of the devices does not matter.
    ///
    /// # Errors
    /// [`Error::NotAPool`] when a device is not what the superblocks say, or one is missing; [`Error::Invalid`].
    pub fn open(spec: &PoolSpec, options: &OpenOptions) -> Result<Pool> {
        Pool::open_parts(spec.parts(), options, fetch_superblock)
    }

    /// The same of parts that no one name may have, with superblocks as `fetch` reads them.
    fn open_parts(parts: impl IntoIterator<Item = DevicePart>, options: &OpenOptions, fetch: FetchSuperblock) -> Result<Pool> {
        let access = if options.read_only { Access::Read } else { Access::Write };
        let found = parts
            .into_iter()
            .map(|part| {
                let device = part.open(access, &options.sysfs)?;
                let header = over_mapping(map_header(&device)?, &CoherenceOptions::default())?;
                let superblock = fetch(&*header.memory, 0, &device.info().label())?;
                Ok((device, superblock))
            })
            .collect::<Result<Vec<_>>>()?;
        let (devices, superblock) = in_order(found)?;
        let unknown = superblock.unknown_ro_compat();
        if unknown != 0 && !options.read_only {
            return Err(devices[0].refuse(format!(
                "it uses features (ro-compat bits {unknown:#x}) that this program does not know: open it read-only, or use a newer program"
            )));
        }
        let mapping = map(&devices, &Stripes::of(superblock.layout().geometry())?, mapping_limit())?;
        let mut connected = connect(mapping, superblock.coherence(), options.memory)?;
        if options.read_only {
            connected.memory = Arc::new(ReadOnly(connected.memory));
        }
        Pool::over(connected, superblock, &devices, options.read_only, &options.sysfs)
    }

    /// Formats the devices as one pool and opens it.
    ///
    /// Files that do not exist are made when the name gives a size. [`write_regions`] and
    /// [`write_superblocks`] say what it writes, and in which order.
    ///
    /// # Errors
    /// [`Error::HasContent`] naming the content of a device, unless [`FormatOptions::force`]; [`Error::Partition`] where the part of a
    /// device that the name gives is none, or overlaps another pool, which not even force allows; [`Error::InUse`] when hosts use a pool,
    /// and [`Error::HostsUnseen`] where that cannot be seen, unless [`FormatOptions::evict_hosts`]; [`Error::Timeout`] when evicted hosts
    /// do not stop; [`Error::Invalid`] for numbers that do not fit. A file that was made for a format that fails is removed.
    pub fn format(spec: &PoolSpec, options: &FormatOptions) -> Result<Pool> {
        let (mut devices, made) = format::open_devices(spec, options)?;
        refuse_duplicates(&devices)?;
        let payload = &devices[usize::from(spec.metadata().is_some())..];
        let mut turns = payload.iter().map(Device::lock_for_format).collect::<Result<Vec<_>>>()?;
        payload.iter().try_for_each(|device| refuse_overlap(device, 0, device.info().len_bytes))?;
        let geometry = format::geometry_for(payload, spec.metadata().is_some(), options)?;
        let layout = Layout::new(geometry)?;
        let stripes = Stripes::of(&geometry)?;
        if let Some(part) = spec.metadata() {
            // No more of it than the metadata needs: the rest stays that of others.
            let device = format::metadata_part(devices.remove(0), part, geometry.metadata_bytes)?;
            turns.push(device.lock_for_format()?);
            refuse_overlap(&device, 0, geometry.metadata_bytes)?;
            devices.insert(0, device);
        }
        if !options.force {
            devices.iter().try_for_each(content::refuse_used)?;
        }
        devices.iter().try_for_each(Device::reserve_holes)?;
        let connected = connect(map(&devices, &stripes, mapping_limit())?, options.coherence, options.memory)?;
        let memory = connected.memory.clone();
        let before = Before::look(spec, &format::contents(&devices, &*memory)?, options)?;
        let uuid = random_bytes()?;
        let superblock = Superblock::new(&SuperblockParts {
            uuid,
            incarnation: format::new_incarnation(&uuid, &before)?,
            layout,
            coherence: options.coherence,
            seats: seat_table(options),
            devices: devices.iter().map(|device| record_of(device.info())).collect::<Result<_>>()?,
        })?;

        erase_superblocks(&*memory, devices.len())?;
        before.wait_until_stopped()?;
        mark_format(&*memory, devices.iter().map(|device| device.info().len_bytes))?;
        let pool = Pool::over(connected, superblock, &devices, false, &options.sysfs)?;
        write_regions(&pool.lines)?;
        write_superblocks(&*memory, &pool.superblock)?;
        unmark_format(&*memory, devices.len())?;
        made.keep();
        drop(turns);
        Ok(pool)
    }

    /// Makes a pool none any more, so that its parts of the devices are free for others. Only `evict_hosts`, `memory` and `sysfs` of the
    /// options count.
    ///
    /// # Errors
    /// [`Error::NotAPool`] when a device holds none. Unless hosts are to be evicted: the same where the devices are not all of a pool, and
    /// [`Error::InUse`] when hosts use it. [`Error::Timeout`] when evicted hosts do not stop.
    pub fn erase(spec: &PoolSpec, options: &FormatOptions) -> Result<()> {
        format::erase(spec, options)
    }

    fn over(connected: MappedMemory, superblock: Superblock, devices: &[Device], read_only: bool, sysfs: &Sysfs) -> Result<Pool> {
        let MappedMemory { memory, faults, description } = connected;
        let lines = Lines::of(memory, &superblock);
        let file = devices.first().map(Device::file).transpose()?;
        let devices = devices.iter().map(|device| device.info().clone()).collect();
        Ok(Pool { superblock, devices, file, lines, faults, description, read_only, sysfs: sysfs.clone() })
    }

    /// The superblock found at open; its device index means nothing here.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Arc<Layout> {
        self.lines.layout()
    }

    /// The metadata lines; [`Lines::memory`] is the memory below.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// The devices, in the order of their index.
    pub fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    /// The first of the devices that payload lies on.
    pub fn payload_device(&self) -> Option<&DeviceInfo> {
        self.devices.get(self.layout().geometry().payload_device())
    }

    /// Poisoned ranges and lost devices.
    pub fn faults(&self) -> &Arc<FaultMap> {
        &self.faults
    }

    /// What the memory is reached with, for reports.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Enters the pool's memory into this process's page tables, so that no copy has to wait for that; the bytes entered. With 4 KiB pages
    /// a GiB takes some 70 ms, or 400 where it was not touched yet; it ends after `timeout_ms`. Nothing of a file that has not got its
    /// memory yet, or lies on a disk, nor where memory is simulated or open for reading alone.
    pub fn map_ahead(&self, timeout_ms: u64) -> u64 {
        let memory = self.lines.memory();
        match memory.address(0, memory.len_bytes()) {
            Some(start) if !self.read_only && self.devices.iter().all(is_in_memory) => map_ahead(start, memory.len_bytes(), timeout_ms),
            _ => 0,
        }
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Joins the pool as part of this machine's host.
    ///
    /// # Errors
    /// [`Error::Invalid`] on a pool opened read-only; the errors of [`Sysfs::resolve`] and [`Host::join`].
    pub fn join(&self, config: HostConfig) -> Result<Host> {
        if self.read_only {
            return Err(read_only());
        }
        self.check_not_replaced()?;
        let machine = self.machine()?;
        let device_node = self.payload_device().and_then(|device| device.numa_node);
        let cpus = self.sysfs.resolve(&config.cpus, device_node)?;
        let config = HostConfig { seats: self.superblock.seats(), cpus, ..config };
        join(self.lines.clone(), Arc::new(machine), config)
    }

    fn machine(&self) -> Result<Machine> {
        let machine = Machine::for_pool(self.superblock.uuid(), self.faults.clone())?.watching(&self.devices);
        match &self.file {
            Some(file) => {
                let file = file.try_clone().map_err(|source| Error::Os { what: "duplicating the pool's descriptor".into(), source })?;
                machine.with_file(file, self.devices.first().map_or(0, |device| device.offset_bytes))
            }
            None => Ok(machine),
        }
    }

    /// Looks at every device again: is it still part of the pool that was opened?
    ///
    /// # Errors
    /// [`Error::Replaced`] when a device was formatted, erased or swapped since; the errors of the memory.
    pub fn check_not_replaced(&self) -> Result<()> {
        let expected = Some((*self.superblock.uuid(), self.superblock.incarnation()));
        for index in 0..self.devices.len() as u64 {
            let line = self.lines.fetch_raw(index * DEVICE_HEADER_BYTES)?;
            let found = Superblock::identity_in(&line);
            if found != expected {
                return Err(Error::Replaced { was: self.superblock.incarnation(), now: found.map_or(0, |(_, incarnation)| incarnation) });
            }
        }
        Ok(())
    }
}

/// What a host calls of the layers above it, in the order in which their shares of its local memory lie.
const HOOKS: [Hooks; 3] = [alloc::HOOKS, cache::HOOKS, stats::HOOKS];

/// Joins a pool on any platform, with everything that a host calls of the layers above it. [`Pool::join`] does so on this machine.
///
/// # Errors
/// Those of [`Host::join`].
pub fn join(lines: Lines, platform: Arc<dyn Platform>, config: HostConfig) -> Result<Host> {
    Host::join(lines, platform, config, &HOOKS)
}

/// The one place where a mapping becomes memory that the protocols work on.
fn connect(mapping: Mapping, mode: CoherenceMode, options: Option<CoherenceOptions>) -> Result<MappedMemory> {
    let options = match options {
        Some(options) => options,
        None => CoherenceOptions::from_env()?,
    };
    over_mapping(mapping, &CoherenceOptions { hardware: mode == CoherenceMode::Hardware, ..options })
}

/// Puts the devices in the order of their index and refuses any that are missing or do not belong together.
fn in_order(mut found: Vec<(Device, Superblock)>) -> Result<(Vec<Device>, Superblock)> {
    found.sort_by_key(|(_, superblock)| superblock.device_index());
    let Some((first, reference)) = found.first() else {
        return Err(Error::Invalid("a pool needs at least one device".into()));
    };
    let reference = reference.clone();
    for (device, superblock) in &found {
        if superblock.uuid() != reference.uuid() {
            return Err(device.refuse(format!(
                "foreign: it belongs to pool {}, but {} to pool {}",
                uuid_text(superblock.uuid()),
                first.info().label(),
                uuid_text(reference.uuid())
            )));
        }
        if !superblock.is_copy_of(&reference) {
            return Err(device.refuse(format!(
                "its superblock is of another format of pool {} (incarnation {:#x}) than that of {} (incarnation {:#x})",
                uuid_text(reference.uuid()),
                superblock.incarnation(),
                first.info().label(),
                reference.incarnation()
            )));
        }
    }
    let records = reference.devices();
    for (index, record) in records.iter().enumerate() {
        let mut holders = found.iter().filter(|(_, superblock)| superblock.device_index() == index);
        match (holders.next(), holders.next()) {
            (None, _) => {
                let is_metadata = index < reference.layout().geometry().payload_device();
                let advice = if is_metadata { "it carries the metadata: name it with metadata=PATH" } else { "name it as well" };
                return Err(first.refuse(format!(
                    "device {index} of {} of pool {} is missing: it was {:?} (id {}) when the pool was formatted; {advice}",
                    records.len(),
                    uuid_text(reference.uuid()),
                    record.name,
                    MachineId(record.id)
                )));
            }
            (Some((one, _)), Some((other, _))) => {
                return Err(
                    other.refuse(format!("it says it is device {index} of the pool, and so does {}: one is a copy", one.info().label()))
                );
            }
            (Some(_), None) => {}
        }
    }
    let stripes = Stripes::of(reference.layout().geometry())?;
    let devices: Vec<Device> = found.into_iter().map(|(device, _)| device).collect();
    for (index, device) in devices.iter().enumerate() {
        let needed = stripes.device_len_bytes(index);
        if device.info().len_bytes < needed {
            return Err(device.refuse(format!("truncated: the pool uses {needed} bytes of it, it has only {}", device.info().len_bytes)));
        }
    }
    Ok((devices, reference))
}

fn refuse_duplicates(devices: &[Device]) -> Result<()> {
    for (index, device) in devices.iter().enumerate() {
        if let Some(other) = devices[..index].iter().find(|other| other.is_same(device)) {
            return Err(device.refuse(format!("this is the same device as {}", other.info().label())));
        }
    }
    Ok(())
}

fn seat_table(options: &FormatOptions) -> Vec<MachineId> {
    std::iter::once(options.machine.unwrap_or_default()).chain(options.seats.iter().copied()).collect()
}

fn record_of(info: &DeviceInfo) -> Result<DeviceRecord> {
    Ok(DeviceRecord { id: random_bytes()?, len_bytes: info.len_bytes, name: info.label() })
}

fn read_only() -> Error {
    Error::Invalid("the pool was opened read-only: open it for writing to do this".into())
}

/// Memory that refuses writes, because storing to a read-only mapping is a SIGSEGV.
struct ReadOnly(Arc<dyn Coherence>);

impl Coherence for ReadOnly {
    crate::coherence::forward_coherence!(
        0: len_bytes load_line flush_line fence_stores fence_all fence_loads flush_range prefetch_lines copy_out copy_out_streaming
            store_streaming keeps_lines_whole sums_copies copy_out_summed check address device_address
    );

    fn write_line(&self, _offset: u64, _line: &Line) -> Result<()> {
        Err(read_only())
    }

    fn copy_in(&self, _offset: u64, _source: &[u8]) -> Result<()> {
        Err(read_only())
    }
}

#[cfg(test)]
mod tests;
