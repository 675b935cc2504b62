// SPDX-License-Identifier: Apache-2.0
//! Devices as storage of bytes, by number: data on a device outside pools, and the blocks of a pool by their place on a device.

use crate::copies;
use crate::handle;
use crate::numbers::Numbers;
use crate::pool::{OpenPool, copy_engine};
use crate::status::{Failure, Outcome, Status};
use crate::types::{CxlDevice, CxlPool};
use cxl_pool::coherence::{Coherence, CoherenceOptions, MappedMemory, over_mapping};
use cxl_pool::copy::CopyEngine;
use cxl_pool::device::{Access, Device, Sysfs, map_part};
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::media::{Piece, Stripes, Superblock};
use cxl_pool::pool::pools_on;
use std::path::Path;
use std::sync::Arc;

enum DevicePlace {
    Alone(MappedMemory),
    /// In the pool with this handle, as the pieces say, which are sorted by their offset on the device.
    InPool(usize, Vec<Piece>),
}

struct DeviceEntry {
    place: DevicePlace,
    engine: Arc<dyn CopyEngine>,
    name: String,
    len_bytes: u64,
    writable: bool,
}

fn refusal(name: &str, reason: &str) -> Failure {
    Failure::new(Status::E_EXISTS, format!("{name} {reason}"))
}

/// Whether a pool begins at the start of the device or within a range of it, as the memory is now. Pools begin at multiples of the device
/// header.
fn holds_a_pool(memory: &dyn Coherence, offset: u64, len_bytes: u64) -> Outcome<bool> {
    let first = offset / DEVICE_HEADER_BYTES * DEVICE_HEADER_BYTES;
    let within = (first..offset + len_bytes).step_by(DEVICE_HEADER_BYTES as usize);
    for place in std::iter::once(0).chain(within) {
        memory.flush_line(place)?;
        memory.fence_all();
        let line = memory.load_line(place)?;
        memory.fence_loads();
        if Superblock::identity_in(&line).is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The pieces of the pool that lie on `device`, sorted by their offset there, which counts from the start of the device whatever part of it
/// the pool has; `None` if it is no device of the pool.
fn pieces_on(pool: &OpenPool, device: &Device) -> Outcome<Option<Vec<Piece>>> {
    let pool = pool.pool();
    let is_it = |name: &str| Device::open(Path::new(name), Access::Read, &Sysfs::default()).is_ok_and(|other| other.is_same(device));
    let Some(index) = pool.devices().iter().position(|info| is_it(&info.name)) else { return Ok(None) };
    let stripes = Stripes::of(pool.layout().geometry())?;
    let begins = pool.devices()[index].offset_bytes;
    let on_device = |piece: Piece| Piece { device_offset: begins + piece.device_offset, ..piece };
    let mut pieces: Vec<Piece> = stripes.pieces().filter(|piece| piece.device == index).map(on_device).collect();
    pieces.sort_unstable_by_key(|piece| piece.device_offset);
    Ok(Some(pieces))
}

/// The stretches of the pool, as offset and length, that lie at `offset` of a device.
fn stretches(pieces: &[Piece], offset: u64, len_bytes: u64) -> Option<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let (mut at, mut left) = (offset, len_bytes);
    for piece in &pieces[pieces.partition_point(|piece| piece.device_offset + piece.len_bytes <= offset)..] {
        if left == 0 {
            break;
        }
        let inside = at.checked_sub(piece.device_offset)?;
        let taken = (piece.len_bytes - inside).min(left);
        found.push((piece.start + inside, taken));
        (at, left) = (at + taken, left - taken);
    }
    (left == 0).then_some(found)
}

impl DeviceEntry {
    fn open(pool: *mut CxlPool, path: &Path, writable: bool) -> Outcome<DeviceEntry> {
        let access = if writable { Access::Write } else { Access::Read };
        let device = Device::open(path, access, &Sysfs::default())?;
        let (name, len_bytes) = (device.info().name.clone(), device.info().len_bytes);
        let own = handle::with_handle(pool, |handle, pool| Ok(pieces_on(pool, &device)?.map(|pieces| (handle, pieces))))?;
        let place = match own {
            Some((handle, pieces)) => DevicePlace::InPool(handle, pieces),
            None => {
                let memory = over_mapping(map_part(&device, 0, len_bytes)?, &CoherenceOptions::from_env()?)?;
                if holds_a_pool(&*memory.memory, 0, 0)? || !pools_on(&device)?.is_empty() {
                    return Err(refusal(&name, "is a device of another pool: open that pool to reach its blocks"));
                }
                DevicePlace::Alone(memory)
            }
        };
        Ok(DeviceEntry { place, engine: copy_engine()?, name, len_bytes, writable })
    }

    /// Runs `step` for each stretch of memory that makes up a range of the device: its memory, its offset there, its length.
    fn each(&self, offset: u64, len: usize, write: bool, mut step: impl FnMut(&dyn Coherence, u64, usize) -> Outcome<()>) -> Outcome<()> {
        let (name, len_bytes) = (&self.name, len as u64);
        if write && !self.writable {
            return Err(Failure::invalid(format!("{name} was opened for reading only")));
        }
        if len_bytes > self.len_bytes || offset > self.len_bytes - len_bytes {
            let has = self.len_bytes;
            return Err(Failure::invalid(format!("{len_bytes} bytes at {offset:#x} of {name}, which has {has}, do not exist")));
        }
        match &self.place {
            DevicePlace::Alone(mapped) => {
                if write && holds_a_pool(&*mapped.memory, offset, len_bytes)? {
                    return Err(refusal(name, "was formatted as a pool since it was opened: close it, and open the pool"));
                }
                step(&*mapped.memory, offset, len)
            }
            DevicePlace::InPool(handle, pieces) => handle::with(std::ptr::without_provenance_mut(*handle), |pool| {
                let data = pool.data();
                let is_data = |(start, len): &(u64, u64)| data.contains(start) && *len <= data.end - *start;
                let found = stretches(pieces, offset, len_bytes).filter(|found| found.iter().all(is_data));
                let found = found.ok_or_else(|| {
                    let reason = format!(
                        "{len_bytes} bytes at {offset:#x} of {name} are not blocks of its pool, but hold what the pool itself needs: use \
                         blocks that you allocated"
                    );
                    Failure::new(Status::E_NOT_IN_POOL, reason)
                })?;
                found.into_iter().try_for_each(|(start, len)| step(&**pool.pool().lines().memory(), start, len as usize))
            }),
        }
    }
}

static OPEN: Numbers<Arc<DeviceEntry>> = Numbers::new();

fn closed_error(number: CxlDevice) -> Failure {
    Failure::new(Status::E_CLOSED, format!("{number} is no open device (was it closed?)"))
}

fn find(number: CxlDevice) -> Outcome<Arc<DeviceEntry>> {
    OPEN.get(number).ok_or_else(|| closed_error(number))
}

/// Opens a device; returns its number, its length in bytes and whether it is part of the pool.
pub fn open(pool: *mut CxlPool, path: &Path, writable: bool) -> Outcome<(CxlDevice, u64, bool)> {
    let entry = DeviceEntry::open(pool, path, writable)?;
    let (len_bytes, is_in_pool) = (entry.len_bytes, matches!(entry.place, DevicePlace::InPool(..)));
    Ok((OPEN.add(Arc::new(entry)), len_bytes, is_in_pool))
}

/// Closes a device. It stays mapped for the calls that are under way on it.
pub fn close(number: CxlDevice) -> Outcome<()> {
    OPEN.remove(number).map(drop).ok_or_else(|| closed_error(number))
}

pub fn read(number: CxlDevice, offset: u64, destination: &mut [u8]) -> Outcome<()> {
    let entry = find(number)?;
    let mut done = 0;
    entry.each(offset, destination.len(), false, |memory, at, len| {
        copies::copy_out(memory, || Ok(&*entry.engine), at, &mut destination[done..done + len])?;
        done += len;
        Ok(())
    })
}

pub fn write(number: CxlDevice, offset: u64, source: &[u8]) -> Outcome<()> {
    let entry = find(number)?;
    let mut done = 0;
    entry.each(offset, source.len(), true, |memory, at, len| {
        memory.copy_in(at, &source[done..done + len])?;
        memory.fence_stores();
        done += len;
        Ok(())
    })
}

#[cfg(test)]
mod tests;
