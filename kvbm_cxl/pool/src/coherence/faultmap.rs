// SPDX-License-Identifier: Apache-2.0
//! Guarded access to a mapping: every operation is checked against the range and against what the SIGBUS handler has noted.
//!
//! A guarded operation looks twice: before, so that memory known to be bad is left alone, and afterwards, so that an operation that met the
//! damage itself reports it. Both looks cost one relaxed load while all is well.

use super::mapping::{MappedDevice, Mapping};
use super::sigbus::{Damage, GRANULE_BYTES, Registration};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, compiler_fence};
use std::sync::{Arc, OnceLock};

/// A range of the pool that must not be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRange {
    /// Pool offset.
    pub offset: u64,
    /// Size in bytes.
    pub len_bytes: u64,
}

/// A device that stopped answering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostDevice {
    /// Its name.
    pub device: String,
    /// `si_code` of the SIGBUS that told (`BUS_ADRERR` is 2).
    pub code: i32,
}

/// A mapping under guard, and its damage so far.
pub struct FaultMap {
    // First, so that the guard ends before the memory is unmapped.
    registration: Registration,
    mapping: Mapping,
    /// Name of the memory that this process's metadata is composed from.
    local: OnceLock<String>,
}

/// Guards the memory that a machine's processes share. Dropping it ends the guard.
pub struct LocalGuard {
    // First, so that the guard ends before what it closes goes.
    _registration: Registration,
    _pool: Arc<FaultMap>,
}

impl std::fmt::Debug for FaultMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FaultMap({:?})", self.mapping.devices)
    }
}

impl FaultMap {
    /// Takes a mapping under guard.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the mapping contradicts itself, [`Error::Full`] when too many mappings are open.
    pub fn new(mapping: Mapping) -> Result<Self> {
        mapping.check()?;
        let base = mapping.base.as_ptr().expose_provenance();
        let registration = Registration::new(Damage::new(base, mapping.len_bytes, &mapping.segments))?;
        Ok(FaultMap { registration, mapping, local: OnceLock::new() })
    }

    /// Guards `len_bytes` of memory from `start` that this pool's metadata is composed from; `name` is for errors. When any of it is lost,
    /// all of it reads as zero, and every later step on the pool is an error: it can have been made of those zeros.
    ///
    /// # Errors
    /// [`Error::Full`] when too many mappings are open.
    pub fn guard_local(self: &Arc<Self>, start: NonNull<u8>, len_bytes: usize, name: String) -> Result<LocalGuard> {
        let base = start.as_ptr().expose_provenance();
        let damage = Damage::of_local(base, len_bytes as u64, self.registration.damage());
        // The first name stands for all: a process has the segment of one machine for a pool.
        let _ = self.local.set(name);
        Ok(LocalGuard { _registration: Registration::new(damage)?, _pool: self.clone() })
    }

    /// The mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Size of the mapping in bytes.
    #[inline]
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes
    }

    /// Where a range is mapped, if it lies in the mapping and nothing in it is known to be bad.
    #[inline]
    pub(super) fn enter(&self, offset: u64, len_bytes: u64) -> Result<*mut u8> {
        let limit_bytes = self.mapping.len_bytes;
        if len_bytes > limit_bytes || offset > limit_bytes - len_bytes {
            return Err(Error::OutOfRange { what: "pool", offset, len_bytes, limit_bytes });
        }
        self.check(offset, len_bytes)?;
        // SAFETY: the offset lies in the mapping, which is shorter than `isize::MAX`.
        Ok(unsafe { self.mapping.base.as_ptr().add(offset as usize) })
    }

    /// As [`FaultMap::enter`], for one line.
    #[inline]
    pub(super) fn enter_line(&self, offset: u64) -> Result<*mut u8> {
        if !offset.is_multiple_of(LINE_BYTES as u64) {
            return Err(Error::Invalid(format!("offset {offset:#x} is not the start of a line")));
        }
        self.enter(offset, LINE_BYTES as u64)
    }

    /// Where the mapping begins, if each of `offsets` is that of a line in it and nothing in them is known to be bad.
    #[inline]
    pub(super) fn enter_lines(&self, offsets: &[u64]) -> Result<*mut u8> {
        let last = self.mapping.len_bytes.saturating_sub(LINE_BYTES as u64);
        // Without a branch for each.
        let (most, bits) = offsets.iter().fold((0, 0), |(most, bits), &offset| (offset.max(most), bits | offset));
        if self.registration.damage().any() || most > last || bits % LINE_BYTES as u64 != 0 {
            offsets.iter().try_for_each(|&offset| self.enter_line(offset).map(drop))?;
        }
        Ok(self.mapping.base.as_ptr())
    }

    /// Whether an operation on the range that just ended met damage.
    #[inline]
    pub(super) fn leave(&self, offset: u64, len_bytes: u64) -> Result<()> {
        // The handler runs on this thread, so it is enough that the compiler keeps the check after the access.
        compiler_fence(Ordering::SeqCst);
        self.check(offset, len_bytes)
    }

    /// As [`FaultMap::leave`], for several lines.
    #[inline]
    pub(super) fn leave_lines(&self, offsets: &[u64]) -> Result<()> {
        compiler_fence(Ordering::SeqCst);
        match self.registration.damage().any() {
            true => offsets.iter().try_for_each(|&offset| self.check_slowly(offset, LINE_BYTES as u64)),
            false => Ok(()),
        }
    }

    /// Checks a range against the damage known so far, for callers that work in place and must look afterwards.
    #[inline]
    pub fn check(&self, offset: u64, len_bytes: u64) -> Result<()> {
        if self.registration.damage().any() { self.check_slowly(offset, len_bytes) } else { Ok(()) }
    }

    #[cold]
    fn check_slowly(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let damage = self.registration.damage();
        if damage.is_closed() {
            let device = self.local.get().cloned().unwrap_or_default();
            let cause = "the memory that this machine's processes share for the pool is gone (its file was truncated, or its memory is \
                         damaged): end this machine's processes of the pool and start them again"
                .into();
            return Err(Error::DeviceLost { device, offset, len_bytes, cause });
        }
        if let Some(segment) = damage.segments(offset, len_bytes).iter().find(|segment| damage.loss_code(segment.device).is_some()) {
            let MappedDevice { name: device, offset_bytes } = self.mapping.devices[segment.device].clone();
            let of_device = self.mapping.segments.iter().filter(|other| other.device == segment.device);
            let cause = why_lost(Path::new(&device), offset_bytes + of_device.map(|segment| segment.len_bytes).sum::<u64>());
            return Err(Error::DeviceLost { device, offset, len_bytes, cause });
        }
        let end = offset.saturating_add(len_bytes).div_ceil(GRANULE_BYTES);
        match (offset / GRANULE_BYTES..end).any(|granule| damage.is_poisoned(granule)) {
            true => Err(Error::Poisoned { offset, len_bytes }),
            false => Ok(()),
        }
    }

    /// The poisoned ranges, neighbours joined.
    pub fn bad_ranges(&self) -> Vec<BadRange> {
        let damage = self.registration.damage();
        let mut ranges: Vec<BadRange> = Vec::new();
        if !damage.any() {
            return ranges;
        }
        for granule in (0..self.len_bytes().div_ceil(GRANULE_BYTES)).filter(|&granule| damage.is_poisoned(granule)) {
            let offset = granule * GRANULE_BYTES;
            let len_bytes = GRANULE_BYTES.min(self.len_bytes() - offset);
            match ranges.last_mut() {
                Some(last) if last.offset + last.len_bytes == offset => last.len_bytes += len_bytes,
                _ => ranges.push(BadRange { offset, len_bytes }),
            }
        }
        ranges
    }

    /// The devices that are gone.
    pub fn lost_devices(&self) -> Vec<LostDevice> {
        let damage = self.registration.damage();
        let devices = self.mapping.devices.iter().enumerate();
        devices.filter_map(|(index, device)| damage.loss_code(index).map(|code| LostDevice { device: device.name.clone(), code })).collect()
    }

    /// Marks the 2 MiB around `offset` bad, as a poison fault there would: for lists of bad memory that are known beforehand, and for
    /// tests.
    pub fn mark_poisoned(&self, offset: u64) -> Result<()> {
        if offset >= self.len_bytes() {
            return Err(Error::OutOfRange { what: "pool", offset, len_bytes: 1, limit_bytes: self.len_bytes() });
        }
        self.registration.damage().mark_poisoned(offset, 1);
        Ok(())
    }
}

/// Why the device does not answer, as far as the system tells, and what to do.
fn why_lost(path: &Path, pool_end: u64) -> String {
    let Some(found) = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file) else {
        return "reattach it and open the pool again".into();
    };
    let has_holes = found.blocks().saturating_mul(512) < found.len();
    match found.len() {
        len_bytes if len_bytes < pool_end => {
            format!("its file was truncated to {len_bytes} bytes: restore it or format it again, and open the pool again")
        }
        _ if has_holes => {
            "its file has holes, and its file system has no room for them: free some there and open the pool again, or remove \
                           the file and format it with a size, which reserves all of it"
                .into()
        }
        _ => "open the pool again".into(),
    }
}
