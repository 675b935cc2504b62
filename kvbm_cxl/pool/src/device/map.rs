// SPDX-License-Identifier: Apache-2.0
//! Mapping devices into one linear range of this process.

use super::{Access, Device, DeviceInfo, DeviceKind, is_tmpfs};
use crate::coherence::{MappedDevice, Mapping, Segment};
use crate::error::{Error, Result};
use crate::limits::DEVICE_HEADER_BYTES;
use crate::media::Stripes;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) struct Range {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the range is only an address and a length; unmapping works from any thread.
unsafe impl Send for Range {}
// SAFETY: as above; nothing is reachable through a shared reference.
unsafe impl Sync for Range {}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: this value owns exactly this range, and every keeper of addresses into it keeps this value alive (`Mapping::owner`).
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

impl Range {
    /// Reserves addresses that nothing else will take, starting at a multiple of `align_bytes` (a power of two).
    pub(super) fn reserve(len_bytes: u64, align_bytes: u64) -> Result<Range> {
        let too_large = || Error::Invalid(format!("a mapping of {len_bytes} bytes does not fit into the address space"));
        let len = usize::try_from(len_bytes).map_err(|_| too_large())?;
        let align = usize::try_from(align_bytes).map_err(|_| too_large())?;
        let padded = len.checked_add(align).ok_or_else(too_large)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), padded, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os(format!("reserving {padded} bytes of addresses")));
        }
        let start = start.cast::<u8>();
        let head = start.align_offset(align).min(align);
        // SAFETY: `head` <= `align`, so the aligned start and the `len` bytes after it lie within the `padded` bytes reserved.
        let (aligned, end) = unsafe { (start.add(head), start.add(head + len)) };
        for (piece, bytes) in [(start, head), (end, align - head)] {
            if bytes > 0 {
                // SAFETY: the piece is a page-aligned part of the reservation just made, outside of the kept part.
                unsafe { libc::munmap(piece.cast(), bytes) };
            }
        }
        let start = NonNull::new(aligned).ok_or_else(too_large)?;
        Ok(Range { start, len_bytes: len })
    }

    /// Maps `len_bytes` of a device from `device_offset` at `offset` of this range.
    fn place(&self, offset: u64, len_bytes: u64, device: &Device, device_offset: u64) -> Result<()> {
        let info = device.info();
        let end = offset.checked_add(len_bytes).filter(|&end| end <= self.len_bytes as u64);
        let device_end = device_offset.checked_add(len_bytes).filter(|&end| end <= info.len_bytes);
        if end.is_none() || device_end.is_none() {
            return Err(device.refuse(format!(
                "{len_bytes} bytes at {device_offset:#x} are wanted of it, it has only {}: it was truncated or is the wrong device",
                info.len_bytes
            )));
        }
        let protection = if device.access() == Access::Write { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let address = self
            .place_file(offset, len_bytes, &device.file, device.in_file(device_offset), protection)
            .map_err(|error| why_not(device, &error))?;
        // A pool in a core dump would be as large as the pool and hold other tenants' data. Advice: a kernel without it changes nothing.
        // SAFETY: exactly the pages mapped just now.
        unsafe { libc::madvise(address, len_bytes as usize, libc::MADV_DONTDUMP) };
        Ok(())
    }

    /// Maps `len_bytes` of a file from `file_offset` at `offset` of this range; returns their address.
    pub(super) fn place_file(
        &self,
        offset: u64,
        len_bytes: u64,
        file: &File,
        file_offset: u64,
        protection: libc::c_int,
    ) -> std::io::Result<*mut libc::c_void> {
        assert!(offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes as u64), "outside of the reservation");
        // SAFETY: offset + len_bytes <= self.len_bytes, so the address lies within the range that this value owns.
        let address = unsafe { self.start.as_ptr().add(offset as usize) };
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: MAP_FIXED replaces only pages of the reservation, which no other code uses yet.
        let mapped =
            unsafe { libc::mmap(address.cast(), len_bytes as usize, protection, flags, file.as_raw_fd(), file_offset as libc::off_t) };
        if mapped == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(mapped) }
    }
}

fn why_not(device: &Device, error: &std::io::Error) -> Error {
    let info = device.info();
    let advice = match (error.raw_os_error(), info.kind) {
        (Some(libc::ENOMEM), DeviceKind::Hugetlb) => "there are not enough huge pages: raise vm.nr_hugepages",
        (Some(libc::ENOMEM), _) => "no address space or too many mappings: see vm.max_map_count and ulimit -v",
        (Some(libc::EINVAL), DeviceKind::Devdax) => {
            "the kernel refuses the alignment: is the size or align in sysfs that of another device?"
        }
        (Some(libc::EACCES | libc::EPERM), _) => {
            "no permission for this kind of mapping: open the pool read-only, or change the device's mode"
        }
        (Some(libc::ENODEV), _) => "its file system cannot map files",
        _ => "see the system log",
    };
    device.refuse(format!("mapping it failed ({error}): {advice}"))
}

/// Maps the header of one device: its first [`DEVICE_HEADER_BYTES`], or one unit of its alignment where that is larger.
pub fn map_header(device: &Device) -> Result<Mapping> {
    let info = device.info();
    let len_bytes = info.unit_bytes();
    if info.len_bytes < len_bytes {
        return Err(device.refuse(format!("its {} bytes are fewer than the {len_bytes} of a device header", info.len_bytes)));
    }
    map_part(device, 0, len_bytes)
}

/// Maps a part of one device, for diagnosis: what it means to the pool, if it is part of one, is not looked at.
///
/// # Errors
/// [`Error::NotAPool`] when offset or length are not multiples of the device's alignment, or do not lie within it.
pub fn map_part(device: &Device, device_offset: u64, len_bytes: u64) -> Result<Mapping> {
    let info = device.info();
    if !device_offset.is_multiple_of(info.align_bytes) || !len_bytes.is_multiple_of(info.align_bytes) || len_bytes == 0 {
        return Err(device.refuse(format!(
            "it maps in units of {} bytes, so {len_bytes} bytes at {device_offset:#x} cannot be mapped",
            info.align_bytes
        )));
    }
    let range = Range::reserve(len_bytes, info.align_bytes)?;
    range.place(0, len_bytes, device, device_offset)?;
    let segments = vec![Segment { start: 0, len_bytes, device: 0 }];
    Ok(Mapping { base: range.start, len_bytes, devices: vec![mapped_device(info)], segments, owner: Arc::new(range) })
}

/// Maps the devices, in the order of their index, as one linear range: pool offset = distance from its base.
///
/// `mapping_limit` bounds the number of mappings, see [`mapping_limit`].
///
/// # Errors
/// [`Error::NotAPool`] when a device is smaller than the arrangement wants or the system refuses; [`Error::Invalid`] when the number of
/// mappings would pass the limit (the text names a stripe size that fits) or a stripe is not a multiple of a device's alignment.
pub fn map(devices: &[Device], stripes: &Stripes, mapping_limit: u64) -> Result<Mapping> {
    let wanted = stripes.pieces_len();
    if wanted > mapping_limit {
        let advice = match stripes.stripe_within(mapping_limit) {
            Some(fits) => format!("format the pool with stripes of {fits} bytes"),
            None => "use fewer devices".into(),
        };
        return Err(Error::Invalid(format!(
            "stripes of {} bytes need {wanted} mappings, half of vm.max_map_count allows {mapping_limit}: {advice}, or raise \
             vm.max_map_count to {}",
            stripes.stripe_bytes(),
            wanted.saturating_mul(2)
        )));
    }
    check_alignment(devices, stripes)?;
    let align_bytes = devices.iter().map(|device| device.info().align_bytes).max().unwrap_or(1).max(DEVICE_HEADER_BYTES);
    let range = Range::reserve(stripes.len_bytes(), align_bytes)?;
    let mut segments = Vec::with_capacity(wanted as usize);
    for piece in stripes.pieces() {
        let device = devices.get(piece.device).ok_or_else(|| Error::Invalid("fewer devices than the arrangement has".into()))?;
        range.place(piece.start, piece.len_bytes, device, piece.device_offset)?;
        segments.push(Segment { start: piece.start, len_bytes: piece.len_bytes, device: piece.device });
    }
    let mapped = devices.iter().map(|device| mapped_device(device.info())).collect();
    Ok(Mapping { base: range.start, len_bytes: stripes.len_bytes(), devices: mapped, segments, owner: Arc::new(range) })
}

fn mapped_device(info: &DeviceInfo) -> MappedDevice {
    MappedDevice { name: info.name.clone(), offset_bytes: info.offset_bytes }
}

/// Has the system enter the pages of a mapping of this process into its tables now, instead of when each is first touched, until it has
/// taken `timeout_ms`; the bytes entered. Advice: where the system does not take it, pages are entered as they always were.
pub fn map_ahead(start: NonNull<u8>, len_bytes: u64, timeout_ms: u64) -> u64 {
    const STEP_BYTES: u64 = 64 << 20;
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let mut entered = 0;
    for offset in (0..len_bytes).step_by(STEP_BYTES as usize) {
        if Instant::now() >= deadline {
            break;
        }
        let (at, step) = (start.as_ptr().wrapping_add(offset as usize), STEP_BYTES.min(len_bytes - offset));
        // SAFETY: advice about pages whose content stays as it is; where there is no mapping it is refused.
        if unsafe { libc::madvise(at.cast(), step as usize, libc::MADV_POPULATE_READ) } == 0 {
            entered += step;
        }
    }
    entered
}

/// Whether all of a device's memory is there, so that touching it takes none: not that of a file with holes, or of one on a disk.
pub fn is_in_memory(info: &DeviceInfo) -> bool {
    if info.kind != DeviceKind::File {
        return true;
    }
    let Ok(file) = File::open(&info.name) else { return false };
    // All of the file, whatever part this is: which of its bytes have memory the system does not tell.
    is_tmpfs(&file) && file.metadata().is_ok_and(|found| found.blocks().saturating_mul(512) >= found.len())
}

fn check_alignment(devices: &[Device], stripes: &Stripes) -> Result<()> {
    for (index, device) in devices.iter().enumerate() {
        let info = device.info();
        let align = info.align_bytes;
        let unit = stripes.unit_bytes(index);
        if !unit.is_multiple_of(align) {
            return Err(
                device.refuse(format!("it maps in units of {align} bytes, which {unit} bytes are not: format it with such a multiple"))
            );
        }
        if devices.len() > 1 && !DEVICE_HEADER_BYTES.is_multiple_of(align) {
            return Err(device.refuse(format!(
                "it maps in units of {align} bytes, larger than the header of {DEVICE_HEADER_BYTES}: a pool over several devices needs \
                 devices with an align of at most that (daxctl create-device --align=2m)"
            )));
        }
    }
    Ok(())
}

/// The most mappings a pool may have in this process: half of `vm.max_map_count`, so that the rest of the program keeps the other half.
pub fn mapping_limit() -> u64 {
    // The kernel's built-in default stands in where /proc is hidden.
    const DEFAULT_MAX_MAP_COUNT: u64 = 65_530;
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    text.trim().parse().unwrap_or(DEFAULT_MAX_MAP_COUNT) / 2
}
