// SPDX-License-Identifier: Apache-2.0
//! A part of a device as the whole that a pool sees, so that several pools lie side by side on one device.
//!
//! Only [`Device::part`] looks at where a part begins; mapping, reserving and locking add it in one place each, and everything above counts
//! from there.

use super::spec::label;
use super::{Device, DeviceInfo, DeviceKind, HUGE_PAGES_TIMEOUT_MS, huge, is_tmpfs, os};
use crate::error::{Error, PartitionProblem, Result};
use crate::limits::DEVICE_HEADER_BYTES;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Refuses an offset at which no pool begins: pools begin at multiples of `unit_bytes`, a power of two.
pub(super) fn check_unit(offset: u64, unit_bytes: u64) -> std::result::Result<(), PartitionProblem> {
    if offset.is_multiple_of(unit_bytes) {
        return Ok(());
    }
    let next = offset.checked_next_multiple_of(unit_bytes).unwrap_or(0);
    Err(PartitionProblem::Unaligned { offset, unit_bytes, next })
}

impl DeviceInfo {
    /// Its name for people, with the offset of a part that does not begin where the device does.
    pub fn label(&self) -> String {
        label(&self.name, self.offset_bytes)
    }

    /// The distance between places where pools can begin, in bytes: a device header, or one unit of the alignment where that is larger.
    pub fn unit_bytes(&self) -> u64 {
        DEVICE_HEADER_BYTES.max(self.align_bytes)
    }
}

impl Device {
    /// The part from `offset_bytes` on, of `size_bytes` or to the end, rounded down to the alignment. Everything that is done with the
    /// result is done within it.
    ///
    /// # Errors
    /// [`Error::Partition`] when no pool can begin there, or the device ends before the part does.
    pub fn part(self, offset_bytes: u64, size_bytes: Option<u64>) -> Result<Device> {
        let (unit_bytes, device_bytes) = (self.info.unit_bytes(), self.whole_bytes);
        let problem = match check_unit(offset_bytes, unit_bytes) {
            Err(problem) => Some(problem),
            Ok(()) if offset_bytes >= device_bytes => Some(PartitionProblem::BehindEnd { offset: offset_bytes, device_bytes }),
            Ok(()) => size_bytes.filter(|&size| size > device_bytes - offset_bytes).map(|size_bytes| PartitionProblem::TooLong {
                offset: offset_bytes,
                size_bytes,
                left_bytes: device_bytes - offset_bytes,
            }),
        };
        if let Some(problem) = problem {
            return Err(Error::Partition { device: self.info.name.clone(), problem });
        }
        let align_bytes = self.info.align_bytes;
        let len_bytes = size_bytes.unwrap_or(device_bytes - offset_bytes) / align_bytes * align_bytes;
        if len_bytes == 0 {
            return Err(self.refuse(format!("a part of {} bytes is less than its alignment of {align_bytes}", size_bytes.unwrap_or(0))));
        }
        Ok(Device { info: DeviceInfo { offset_bytes, len_bytes, ..self.info }, ..self })
    }

    /// All of the device that this is a part of, by a descriptor of its own.
    pub fn whole(&self) -> Result<Device> {
        let info = DeviceInfo { offset_bytes: 0, len_bytes: self.whole_bytes, ..self.info.clone() };
        Ok(Device { file: self.file()?, info, access: self.access, whole_bytes: self.whole_bytes })
    }

    /// Where bytes of this part lie in the file, as the kernel counts.
    pub(super) fn in_file(&self, offset: u64) -> u64 {
        self.info.offset_bytes + offset
    }

    /// Keeps other processes of this machine from formatting a part that overlaps this one at the same time, for as long as the result
    /// lives. Formats of other parts may run at the same time.
    pub fn lock_for_format(&self) -> Result<impl Drop + use<>> {
        // A description of its own: the kernel keeps locks apart by it.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let failed = |doing, source| os(Path::new(&self.info.name), doing, source);
        let file = File::options().read(true).write(true).open(path).map_err(|source| failed("opening", source))?;
        match range_command(&file, libc::F_WRLCK, self.in_file(0), self.info.len_bytes) {
            Ok(()) => Ok(RangeLock(file)),
            Err(source) if matches!(source.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                Err(self.refuse("another process is formatting it"))
            }
            Err(source) => Err(failed("locking", source)),
        }
    }

    /// Gives a file with holes the memory that it lacks in this part, so that a full file system is an error now and not a lost device in
    /// serving. On tmpfs a part of a file gets huge pages, as a file does that is made for a pool.
    ///
    /// # Errors
    /// [`Error::NotAPool`] when its file system has no room.
    pub fn reserve_holes(&self) -> Result<()> {
        let path = Path::new(&self.info.name);
        let found = self.file.metadata().map_err(|source| os(path, "looking at", source))?;
        let is_whole = self.info.offset_bytes == 0 && self.info.len_bytes == self.whole_bytes;
        let has_all = found.blocks().saturating_mul(512) >= found.len();
        if self.info.kind != DeviceKind::File || (is_whole && has_all) {
            return Ok(());
        }
        // All of it, where a page at the end of the file is not whole.
        let end = if is_whole { found.len() } else { self.info.len_bytes };
        let (start, len) = match (libc::off_t::try_from(self.in_file(0)), libc::off_t::try_from(end)) {
            (Ok(start), Ok(len)) => (start, len),
            _ => return Err(self.refuse("it is too large")),
        };
        // SAFETY: a plain system call on an open descriptor; it touches no memory of ours.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), 0, start, len) } == 0 {
            if !is_whole && is_tmpfs(&self.file) {
                huge::collapse(&self.file, self.in_file(0), self.info.len_bytes, HUGE_PAGES_TIMEOUT_MS);
            }
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        // A file system without reservations has to be believed, as when the file is made here.
        if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
            return Ok(());
        }
        Err(self.refuse(format!(
            "it is a file with holes ({} of {} bytes have memory), and the rest cannot be reserved ({error}): free room on its file \
             system, or use a smaller file",
            found.blocks().saturating_mul(512),
            found.len()
        )))
    }

    /// The first offset of this device from `offset` on that may hold something: of a file with holes, what they end at.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        if self.info.kind != DeviceKind::File {
            return Some(offset);
        }
        let Ok(from) = libc::off_t::try_from(self.in_file(offset)) else { return None };
        // SAFETY: a plain system call on an open descriptor; nothing here reads or writes by the position that it moves.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), from, libc::SEEK_DATA) };
        match u64::try_from(found) {
            Ok(found) => Some(offset + (found - self.in_file(offset))),
            Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO) => None,
            // A file system that cannot tell: everything is data.
            Err(_) => Some(offset),
        }
    }
}

/// A held lock on a range of a file, dropped by name, because a forked child may keep the description open.
struct RangeLock(File);

impl Drop for RangeLock {
    fn drop(&mut self) {
        // Nothing can be done about a failure, and closing the last descriptor releases the lock as well.
        let _ = range_command(&self.0, libc::F_UNLCK, 0, 0);
    }
}

/// Takes or drops the lock of this description on a range, or fails at once. A length of zero reaches to the end of all files.
fn range_command(file: &File, kind: libc::c_int, start: u64, len_bytes: u64) -> std::io::Result<()> {
    let too_large = |_| std::io::Error::from(ErrorKind::FileTooLarge);
    // SAFETY: all fields are integers, for which zero is a value.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = libc::off_t::try_from(start).map_err(too_large)?;
    request.l_len = libc::off_t::try_from(len_bytes).map_err(too_large)?;
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed, and the request is of the type that this command takes.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } != -1 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
