// SPDX-License-Identifier: Apache-2.0
//! The mapped pool as the device layer hands it over: one linear range of this process, made of ranges of one or more devices.

use crate::error::{Error, Result};
use crate::limits::MAX_DEVICES;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// A range of the pool that lies on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Pool offset of the first byte.
    pub start: u64,
    /// Size in bytes.
    pub len_bytes: u64,
    /// Index into [`Mapping::devices`].
    pub device: usize,
}

/// A device under a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedDevice {
    /// Its path.
    pub name: String,
    /// Where on it the part begins that the pool has, in bytes.
    pub offset_bytes: u64,
}

/// A pool mapped into this process.
pub struct Mapping {
    /// First byte; pool offset 0. Aligned to a page.
    pub base: NonNull<u8>,
    /// Size in bytes; the whole range is mapped and may be read and written.
    pub len_bytes: u64,
    /// The devices, for errors and reports.
    pub devices: Vec<MappedDevice>,
    /// Which device backs which range, in whole pages: sorted by start, without gaps or overlaps, from 0 to `len_bytes`.
    pub segments: Vec<Segment>,
    /// Keeps the range mapped for as long as the mapping exists.
    pub owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the base is only an address; its memory is accessed by value through raw pointers, never through a reference, and stays
// mapped while `owner` lives. Which thread does so makes no difference.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method of the mapping writes through a shared reference.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Checks what all layers below rely on: alignment, size, and segments that tile the range.
    pub(super) fn check(&self) -> Result<()> {
        let invalid = |reason: String| {
            Err(Error::Invalid(format!(
                "mapping of {}: {reason}",
                self.devices.iter().map(|device| &*device.name).collect::<Vec<_>>().join(", ")
            )))
        };
        let base = self.base.as_ptr() as usize as u64;
        if !base.is_multiple_of(4096) || !self.len_bytes.is_multiple_of(4096) || self.len_bytes == 0 {
            return invalid(format!("{:#x} bytes at {base:#x} are not whole pages", self.len_bytes));
        }
        if base.checked_add(self.len_bytes).is_none_or(|end| end > isize::MAX as u64) {
            return invalid(format!("{:#x} bytes at {base:#x} leave the address space", self.len_bytes));
        }
        if self.devices.is_empty() || self.devices.len() > MAX_DEVICES {
            return invalid(format!("{} devices, between 1 and {MAX_DEVICES} can be", self.devices.len()));
        }
        let mut end = 0;
        for segment in &self.segments {
            if segment.start != end
                || segment.len_bytes == 0
                || !segment.len_bytes.is_multiple_of(4096)
                || segment.device >= self.devices.len()
            {
                return invalid(format!("{segment:?} does not follow offset {end:#x}"));
            }
            end = match end.checked_add(segment.len_bytes) {
                Some(end) if end <= self.len_bytes => end,
                _ => return invalid(format!("{segment:?} ends after {:#x} bytes", self.len_bytes)),
            };
        }
        if end != self.len_bytes { invalid(format!("the segments end at {end:#x}, the mapping at {:#x}", self.len_bytes)) } else { Ok(()) }
    }
}
