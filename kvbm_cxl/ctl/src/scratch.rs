// SPDX-License-Identifier: Apache-2.0
//! Memory that a diagnosis may write: never a byte that belongs to a pool.
//!
//! - A device that is a plain file is left alone: a scratch file is made in its directory, on the same file system, and removed afterwards.
//! - A region of a device is written only where the user states that it is free (`--scratch-offset`), and even then not where the
//!   superblock says that the header or the metadata of a pool lie.
//! - An unformatted devdax device is written only when that is forced: that its header is empty does not say that the rest is unused.

use cxl_pool::coherence::{CoherenceOptions, MappedMemory, over_mapping};
use cxl_pool::device::{Access, Device, DeviceKind, DevicePart, Sysfs, map_header, map_part};
use cxl_pool::limits::DEVICE_HEADER_BYTES;
use cxl_pool::line::Lines;
use cxl_pool::media::{Geometry, Layout, Stripes, Superblock};
use cxl_pool::pool::{HeaderContent, inspect_header, refuse_overlap};
use cxl_pool::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// Smallest scratch memory, in bytes: a device header's worth of room, the lines, and payload for both directions.
pub const MIN_SCRATCH_BYTES: u64 = 8 << 20;
/// Seed of the scratch lines' checksums, in the place of a pool's UUID.
const SEED: [u8; 16] = *b"cxlctl scratch 1";

/// A range of a file or device that may be overwritten.
pub struct Scratch {
    part: DevicePart,
    offset: u64,
    len_bytes: u64,
    sysfs: Sysfs,
    /// Removes the file when it was made here.
    _file: Option<tempfile::TempPath>,
}

impl Scratch {
    /// A file in `directory` that is removed with the result.
    pub fn file(directory: &Path, len_bytes: u64) -> Result<Scratch> {
        let len_bytes = checked_len(len_bytes)?;
        let failed = |source| Error::Os { what: format!("making a scratch file in {}", directory.display()), source };
        let path = tempfile::Builder::new().prefix(".cxlctl-scratch-").tempfile_in(directory).map_err(failed)?.into_temp_path();
        let (device, _) = Device::open_or_create(&path, len_bytes, &Sysfs::default())?;
        // A huge page rounds the length down.
        let len_bytes = device.info().len_bytes;
        Ok(Scratch { part: DevicePart::whole(path.to_path_buf()), offset: 0, len_bytes, sysfs: Sysfs::default(), _file: Some(path) })
    }

    /// The `len_bytes` bytes from `offset` of a part of an existing file or device, which the caller states to be free.
    ///
    /// # Errors
    /// [`Error::NotAPool`] when it does not lie within the device, or the header or metadata of the part's pool lie there;
    /// [`Error::Partition`] when another pool does.
    pub fn region(part: &DevicePart, offset: u64, len_bytes: u64, sysfs: &Sysfs) -> Result<Scratch> {
        let len_bytes = checked_len(len_bytes)?;
        let device = part.open(Access::Write, sysfs)?;
        if offset.checked_add(len_bytes).is_none_or(|end| end > device.info().len_bytes) {
            return Err(device.refuse(format!("{len_bytes} bytes at {offset:#x} do not lie within its {} bytes", device.info().len_bytes)));
        }
        if let HeaderContent::Pool(superblock) = header_of(&device)? {
            let end = metadata_end(&superblock)?;
            if offset < end {
                return Err(device.refuse(format!(
                    "the header and metadata of a pool lie in its first {end:#x} bytes: give a larger --scratch-offset, in a block of yours"
                )));
            }
        }
        refuse_overlap(&device, offset, len_bytes)?;
        Ok(Scratch { part: part.clone(), offset, len_bytes, sysfs: sysfs.clone(), _file: None })
    }

    /// What may be written of a pool's device, or the reason why nothing may.
    ///
    /// The outer error is a device that cannot be used at all.
    pub fn beside(
        part: &DevicePart,
        offset: Option<u64>,
        len_bytes: u64,
        force: bool,
        sysfs: &Sysfs,
    ) -> Result<std::result::Result<Scratch, String>> {
        if let Some(offset) = offset {
            return Scratch::region(part, offset, len_bytes, sysfs).map(Ok);
        }
        let device = part.open(Access::Read, sysfs)?;
        if device.info().kind != DeviceKind::Devdax {
            let directory = part.path.parent().unwrap_or(Path::new("/"));
            return Ok(Scratch::file(directory, len_bytes).map_err(|error| {
                format!("no scratch file can be made in its directory ({error}): state a free region of it with --scratch-offset")
            }));
        }
        Ok(match header_of(&device)? {
            HeaderContent::Empty if force => {
                let align = device.info().align_bytes;
                Ok(Scratch::region(part, DEVICE_HEADER_BYTES.next_multiple_of(align), len_bytes.next_multiple_of(align), sysfs)?)
            }
            HeaderContent::Empty => {
                Err("it is not formatted, but others may use it without a header: --force measures on it and overwrites \
                 a part, --scratch-offset on a region that you know to be free"
                    .into())
            }
            found => Err(format!("it holds {found}: state a free region of it with --scratch-offset, such as a block that you allocated")),
        })
    }

    /// The file or the part of a device.
    pub fn part(&self) -> &DevicePart {
        &self.part
    }

    /// Where in it, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Maps it once more. Every call is a mapping of its own, with its own view where hosts are emulated.
    pub fn memory(&self, options: &CoherenceOptions) -> Result<MappedMemory> {
        let device = self.part.open(Access::Write, &self.sysfs)?;
        over_mapping(map_part(&device, self.offset, self.len_bytes)?, options)
    }

    /// How lines lie in it.
    pub fn layout(&self, objects: u32) -> Result<Arc<Layout>> {
        let geometry = Geometry { seats: 1, slots: 2, locks: 8, objects, chunk_bytes: 1 << 20, ..Geometry::with_len(self.len_bytes) };
        Layout::new(geometry).map(Arc::new)
    }
}

pub fn lines(memory: &MappedMemory, layout: &Arc<Layout>) -> Lines {
    Lines::new(memory.memory.clone(), layout.clone(), &SEED, 1)
}

/// What the first bytes of a device hold.
pub fn header_of(device: &Device) -> Result<HeaderContent> {
    if device.info().len_bytes < DEVICE_HEADER_BYTES.max(device.info().align_bytes) {
        return Ok(HeaderContent::Unknown { what: "too few bytes for a device header", offset: 0 });
    }
    let options = CoherenceOptions::default();
    inspect_header(&*over_mapping(map_header(device)?, &options)?.memory, 0, &device.info().label())
}

/// The offset on its device where the metadata of a pool's superblock ends.
fn metadata_end(superblock: &Superblock) -> Result<u64> {
    let layout = superblock.layout();
    let stripes = Stripes::of(layout.geometry())?;
    let pieces = stripes.pieces().take_while(|piece| piece.start < layout.data_offset());
    let end = |piece: cxl_pool::media::Piece| piece.device_offset + piece.len_bytes.min(layout.data_offset() - piece.start);
    Ok(pieces.filter(|piece| piece.device == superblock.device_index()).map(end).max().unwrap_or(DEVICE_HEADER_BYTES))
}

fn checked_len(len_bytes: u64) -> Result<u64> {
    if (MIN_SCRATCH_BYTES..=1 << 32).contains(&len_bytes) {
        return Ok(len_bytes.next_multiple_of(1 << 20));
    }
    Err(Error::Invalid(format!("scratch memory of {len_bytes} bytes: between {MIN_SCRATCH_BYTES} and {} can be", 1u64 << 32)))
}

#[cfg(test)]
mod tests;
