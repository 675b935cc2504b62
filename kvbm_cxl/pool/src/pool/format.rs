// SPDX-License-Identifier: Apache-2.0
//! Formatting over the content of the devices, and erasing it: the hosts of a pool there stop before the first line of the new one is
//! written.

use super::before::{Before, reading};
use super::content;
use super::media::fetch_any_superblock;
use super::{CellArea, FormatOptions, HeaderContent, Pool, Share, erase_superblocks, inspect_header};
use crate::coherence::{Coherence, CoherenceOptions, over_mapping};
use crate::device::{Access, Device, DevicePart, PoolSpec, map_header, mapping_limit};
use crate::error::{Error, Result};
use crate::limits::{CELL_CLASSES, DEFAULT_STRIPE_BYTES, DEFAULT_STRIPES, DEVICE_HEADER_BYTES};
use crate::line::crc_seed;
use crate::machine::random_bytes;
use crate::media::{CellClass, Geometry, Stripes};
use std::path::PathBuf;

/// Makes the superblocks of a pool void, once its hosts have stopped: from then on its parts of the devices are free. Its blocks stay where
/// they are until a format or its hosts write there.
pub(super) fn erase(spec: &PoolSpec, options: &FormatOptions) -> Result<()> {
    let mut devices = Vec::new();
    for part in spec.parts() {
        let device = part.open(Access::Write, &options.sysfs)?;
        // The header alone, so that formats of the device's other pools may run meanwhile.
        let unit_bytes = device.info().unit_bytes();
        devices.push(device.part(part.offset_bytes, Some(unit_bytes))?);
    }
    super::refuse_duplicates(&devices)?;
    let mut turns = devices.iter().map(Device::lock_for_format).collect::<Result<Vec<_>>>()?;
    let (mut headers, mut contents) = (Vec::with_capacity(devices.len()), Vec::with_capacity(devices.len()));
    for device in &devices {
        let header = over_mapping(map_header(device)?, &CoherenceOptions::default())?;
        let found = inspect_header(&*header.memory, 0, &device.info().label())?;
        if !found.is_pool() {
            return Err(device.refuse(format!("it holds {found}, and no pool that could be erased")));
        }
        headers.push(header);
        contents.push(found);
    }
    let mut parts = Vec::new();
    for (header, content) in devices.iter().zip(&contents) {
        let Some(part) = part_of(header, content)? else { continue };
        let (start, header_bytes) = (header.info().offset_bytes, header.info().len_bytes);
        if part.info().len_bytes > header_bytes {
            let rest = part.whole()?.part(start + header_bytes, Some(part.info().len_bytes - header_bytes))?;
            turns.push(rest.lock_for_format()?);
        }
        parts.push(part);
    }
    let has_others = |found: &HeaderContent| found.superblock().is_some_and(|superblock| superblock.devices().len() > 1);
    if contents.iter().any(has_others) && !options.evict_hosts {
        // Erased in part, it would leave devices that hold a pool and can be opened as none.
        Pool::open_parts(spec.parts(), &reading(options), fetch_any_superblock)?;
    }
    let before = Before::look(spec, &contents, options)?;
    headers.iter().try_for_each(|header| erase_superblocks(&*header.memory, 1))?;
    before.wait_until_stopped()?;
    parts.iter().try_for_each(content::clear)
}

/// What a pool has of a device; none where its superblock does not tell.
fn part_of(header: &Device, content: &HeaderContent) -> Result<Option<Device>> {
    let Some(superblock) = content.superblock() else { return Ok(None) };
    let (whole, start) = (header.whole()?, header.info().offset_bytes);
    let pool_bytes = Stripes::of(superblock.layout().geometry())?.device_len_bytes(superblock.device_index());
    let len_bytes = pool_bytes.min(whole.info().len_bytes.saturating_sub(start));
    whole.part(start, Some(len_bytes)).map(Some)
}

/// An incarnation whose checksums begin elsewhere than those of the pool before.
pub(super) fn new_incarnation(uuid: &[u8; 16], before: &Before) -> Result<u64> {
    let first = u64::from_le_bytes(random_bytes()?).max(1);
    Ok((first..=u64::MAX).find(|&incarnation| !before.has_seed(crc_seed(uuid, incarnation))).unwrap_or(first))
}

/// Opens the devices of a new pool. Files that are made here go again unless the format succeeds.
pub(super) fn open_devices(spec: &PoolSpec, options: &FormatOptions) -> Result<(Vec<Device>, Made)> {
    let mut made = Made(Vec::new());
    let mut devices = Vec::new();
    for part in spec.parts() {
        // A file is made as one pool: how long one for several has to be, a part of it does not say.
        let (device, is_new) = match part.size_bytes {
            Some(len_bytes) if part.offset_bytes == 0 => Device::open_or_create(&part.path, len_bytes, &options.sysfs)?,
            _ => (Device::open(&part.path, Access::Write, &options.sysfs)?, false),
        };
        if is_new {
            made.0.push(part.path.clone());
        }
        devices.push(device.part(part.offset_bytes, part.size_bytes)?);
    }
    Ok((devices, made))
}

/// The content of the devices of a format.
pub(super) fn contents(devices: &[Device], memory: &dyn Coherence) -> Result<Vec<HeaderContent>> {
    let content = |(index, device): (usize, &Device)| inspect_header(memory, index as u64 * DEVICE_HEADER_BYTES, &device.info().label());
    devices.iter().enumerate().map(content).collect()
}

/// Adds the cells: chunks as large as a pin line covers, or smaller where the hosts would have too few of them.
fn with_cells(mut geometry: Geometry, areas: &[CellArea]) -> Result<Geometry> {
    if areas.is_empty() {
        return Ok(geometry);
    }
    if areas.len() > CELL_CLASSES {
        return Err(Error::Invalid(format!("{} sizes of cells are more than {CELL_CLASSES}", areas.len())));
    }
    let payload_bytes = geometry.payload_bytes();
    let cells = |area: &CellArea| {
        let bytes = match area.share {
            Share::Bytes(bytes) => bytes,
            Share::Percent(percent) => (u128::from(payload_bytes) * u128::from(percent.min(100)) / 100) as u64,
        };
        bytes.checked_div(area.cell_bytes).unwrap_or(0)
    };
    let least = areas.iter().map(cells).min().unwrap_or(0);
    let wanted = (2 * u64::from(geometry.slots)).min(least);
    let fits = |per_chunk: &u32| least / u64::from(*per_chunk) >= wanted;
    geometry.cells_per_chunk = [112, 56, 28, 14, 7, 2].into_iter().find(fits).unwrap_or(1);
    geometry.stripes = DEFAULT_STRIPES as u32;
    for (class, area) in geometry.cells.iter_mut().zip(areas) {
        let chunks = cells(area) / u64::from(geometry.cells_per_chunk);
        if chunks == 0 {
            return Err(Error::Invalid(format!(
                "not one cell of {} bytes fits its share of a pool of {} bytes: use smaller cells, a larger share or a larger device",
                area.cell_bytes, payload_bytes
            )));
        }
        *class = CellClass { cell_bytes: area.cell_bytes, chunks };
    }
    Ok(geometry)
}

/// The numbers of a new pool over these devices of its payload.
///
/// # Errors
/// [`Error::Invalid`] for numbers that do not fit.
pub(super) fn geometry_for(payload: &[Device], is_apart: bool, options: &FormatOptions) -> Result<Geometry> {
    // How much the metadata needs follows from the payload: until that is known, the least that there can be.
    let metadata_bytes = if is_apart { 2 * DEVICE_HEADER_BYTES } else { 0 };
    let stripes = stripes_for(payload, metadata_bytes, options)?;
    let geometry = Geometry {
        devices: (payload.len() + usize::from(is_apart)) as u32,
        metadata_bytes,
        stripe_bytes: stripes.stripe_bytes(),
        len_bytes: stripes.len_bytes(),
        seats: options.seat_count,
        slot_seats: true,
        slots: options.slots,
        locks: options.locks,
        chunk_bytes: options.chunk_bytes,
        ..Geometry::with_len(0)
    };
    let payload_bytes = geometry.payload_bytes();
    let objects = if options.objects == 0 { Geometry::default_objects(payload_bytes) } else { options.objects };
    let geometry = with_cells(Geometry { objects, ..geometry }, &options.cells)?;
    if is_apart { geometry.with_metadata_apart(payload_bytes) } else { Ok(geometry) }
}

/// The part of the device of the metadata that a pool needs.
///
/// # Errors
/// [`Error::NotAPool`] saying how much that is where the part named has less.
pub(super) fn metadata_part(device: Device, part: &DevicePart, metadata_bytes: u64) -> Result<Device> {
    if device.info().len_bytes < metadata_bytes {
        return Err(device.refuse(format!(
            "the metadata needs {metadata_bytes} bytes of it, it has {}: give it metadata_size={metadata_bytes}, name a larger device, or \
             format with fewer slots, locks or cells, or larger chunks",
            device.info().len_bytes
        )));
    }
    device.part(part.offset_bytes, Some(metadata_bytes))
}

fn stripes_for(payload: &[Device], metadata_bytes: u64, options: &FormatOptions) -> Result<Stripes> {
    let sizes: Vec<u64> = payload.iter().map(|device| device.info().len_bytes).collect();
    let within = || Stripes::stripe_behind(metadata_bytes, &sizes, DEFAULT_STRIPE_BYTES, mapping_limit());
    let stripe_bytes = match options.stripe_bytes {
        Some(stripe_bytes) => stripe_bytes,
        None if payload.len() == 1 => DEFAULT_STRIPE_BYTES,
        // Without any that fits, the default is tried and refused with its reason.
        None => within().unwrap_or(DEFAULT_STRIPE_BYTES),
    };
    Stripes::fit_behind(metadata_bytes, &sizes, stripe_bytes)
}

/// Files that a format made: removed when it fails, so that the next one, with other numbers, does not find them.
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // The error that the format ends with says more than one about a leftover file.
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}
