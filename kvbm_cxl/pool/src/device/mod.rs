// SPDX-License-Identifier: Apache-2.0
//! Devices: what a pool lies on, and how this process maps it.
//!
//! | kind | what it is | size from | alignment from |
//! |---|---|---|---|
//! | [`DeviceKind::Devdax`] | `/dev/daxX.Y` | sysfs (its fstat size is 0) | sysfs |
//! | [`DeviceKind::Hugetlb`] | a file on hugetlbfs | fstat | the file system's page |
//! | [`DeviceKind::File`] | any other file: fsdax, famfs, tmpfs, disk | fstat | the CPU's page |
//!
//! A file that is made here on tmpfs has huge pages where the system gives them, so that it is reached as fast as devdax, which always has.
//!
//! An access to a mapping past the end of its device is a SIGBUS, so every size is checked before anything is mapped.

mod huge;
mod map;
mod numa;
mod part;
mod spec;
pub(crate) mod trust;

pub use huge::bytes_in_huge_pages;
pub use map::{is_in_memory, map, map_ahead, map_header, map_part, mapping_limit};
pub use numa::{Sysfs, bind_current_thread_to_node};
pub use spec::{DevicePart, PoolSpec, parse_size};

use part::check_unit;

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// How long a new file may wait for huge pages; well below what others wait for its creation.
const HUGE_PAGES_TIMEOUT_MS: u64 = 20_000;

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A devdax character device.
    Devdax,
    /// A file on hugetlbfs.
    Hugetlb,
    /// Any other regular file.
    File,
}

/// What this process may do with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only look.
    Read,
    /// Look and write.
    Write,
}

/// The properties of an open device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its path.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Where on the device the part begins that this is, in bytes; 0 = where the device does.
    pub offset_bytes: u64,
    /// The size of the device, or of the part, in bytes, rounded down to the alignment.
    pub len_bytes: u64,
    /// Every mapping begins and ends at a multiple of this, in bytes.
    pub align_bytes: u64,
    /// The NUMA node nearest to it, where the system says so.
    pub numa_node: Option<u32>,
    /// Tells one device from another, whatever path it was opened by: of a file, its device and its number.
    pub identity: (u64, u64),
}

/// An open device.
#[derive(Debug)]
pub struct Device {
    file: File,
    info: DeviceInfo,
    access: Access,
    /// Of the device, whatever part of it this is.
    whole_bytes: u64,
}

impl Device {
    /// Opens a device. Nothing is created and nothing written.
    ///
    /// # Errors
    /// [`Error::NotAPool`] with the reason and what to do about it.
    pub fn open(path: &Path, access: Access, sysfs: &Sysfs) -> Result<Device> {
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::Write)
            // A FIFO named by mistake must not make us wait for its other end.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|source| open_error(path, access, &source))?;
        Device::from_file(path, file, access, sysfs)
    }

    /// Opens a device, and makes a file of `len_bytes` first when there is none (or an empty one).
    ///
    /// The file's memory is reserved at once, so that a full file system is an error here and not a SIGBUS later. Also tells whether this
    /// call made the file; one that cannot be reserved is removed again.
    pub fn open_or_create(path: &Path, len_bytes: u64, sysfs: &Sysfs) -> Result<(Device, bool)> {
        let is_file = std::fs::metadata(path).map_or_else(|error| error.kind() == ErrorKind::NotFound, |found| found.is_file());
        if !is_file {
            return Device::open(path, Access::Write, sysfs).map(|device| (device, false));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_NONBLOCK);
        // Made by this call alone, or there before: a name that another user took first is then looked at as such.
        let (file, is_new) = match options.clone().create_new(true).open(path) {
            Ok(file) => (file, true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                (options.open(path).map_err(|source| open_error(path, Access::Write, &source))?, false)
            }
            Err(source) => return Err(open_error(path, Access::Write, &source)),
        };
        if let Err(reason) = trust::check_pool_file(path, &file, Access::Write) {
            return Err(Error::NotAPool { device: path.display().to_string(), reason });
        }
        let device = Device::fill(path, file, len_bytes, sysfs);
        if device.is_err() && is_new {
            // This error says more than one about the leftover file.
            let _ = std::fs::remove_file(path);
        }
        Ok((device?, is_new))
    }

    fn fill(path: &Path, file: File, len_bytes: u64, sysfs: &Sysfs) -> Result<Device> {
        let is_empty = || file.metadata().map(|found| found.len() == 0).map_err(|source| os(path, "reading the size of", source));
        if is_empty()? {
            // Two that create at once take turns, and the second finds the first one's file.
            let _turn = Turn::wait(&file, path)?;
            let links = file.metadata().map_err(|source| os(path, "looking at", source))?.nlink();
            if links == 0 {
                return Err(Error::NotAPool {
                    device: path.display().to_string(),
                    reason: "the process that made it has removed it again: retry".into(),
                });
            }
            if is_empty()? {
                reserve(&file, path, len_bytes)?;
            }
        }
        Device::from_file(path, file, Access::Write, sysfs)
    }

    fn from_file(path: &Path, file: File, access: Access, sysfs: &Sysfs) -> Result<Device> {
        let name = path.display().to_string();
        let distrust = |reason| Error::NotAPool { device: name.clone(), reason };
        let refuse = |reason: String| Err(Error::NotAPool { device: name.clone(), reason });
        let meta = file.metadata().map_err(|source| os(path, "looking at", source))?;
        trust::check_pool_file(path, &file, access).map_err(distrust)?;
        let page = page_bytes();
        let (kind, len_bytes, align_bytes, numa_node) = if meta.file_type().is_char_device() {
            let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
            match sysfs.dax(major, minor)? {
                Some(facts) => (DeviceKind::Devdax, facts.len_bytes, facts.align_bytes, facts.numa_node),
                None if !sysfs.is_mounted() => {
                    return refuse(
                        "nothing is mounted at /sys, which says what this character device is: give the container its sysfs".into(),
                    );
                }
                None => return refuse("this character device is not devdax: name a /dev/daxX.Y or a file".into()),
            }
        } else if meta.is_file() {
            let node = sysfs.block_node(libc::major(meta.dev()), libc::minor(meta.dev()));
            match huge_page_bytes(&file, path)? {
                Some(huge) => (DeviceKind::Hugetlb, meta.len(), huge, node),
                None => (DeviceKind::File, meta.len(), page, node),
            }
        } else if meta.file_type().is_block_device() {
            return refuse(
                "this is a block device: name a file on a dax file system, or make it devdax (ndctl create-namespace -m devdax)".into(),
            );
        } else {
            return refuse("this is neither devdax nor a file".into());
        };
        if !align_bytes.is_power_of_two() || align_bytes < page {
            return refuse(format!("its alignment of {align_bytes} bytes is not a power of two of at least {page}"));
        }
        if kind == DeviceKind::Hugetlb && !len_bytes.is_multiple_of(align_bytes) {
            return refuse(format!("its size of {len_bytes} bytes is not a multiple of its huge page of {align_bytes} bytes"));
        }
        let len_bytes = len_bytes / align_bytes * align_bytes;
        if len_bytes == 0 {
            return refuse("it is empty: give a size to create a pool in it, or make it longer (fallocate) for pools at offsets".into());
        }
        let identity = if kind == DeviceKind::Devdax { (u64::MAX, meta.rdev()) } else { (meta.dev(), meta.ino()) };
        let info = DeviceInfo { name, kind, offset_bytes: 0, len_bytes, align_bytes, numa_node, identity };
        Ok(Device { file, info, access, whole_bytes: len_bytes })
    }

    /// Its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What it was opened for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// A descriptor of its own of the open device.
    pub fn file(&self) -> Result<File> {
        self.file.try_clone().map_err(|source| os(Path::new(&self.info.name), "duplicating a descriptor of", source))
    }

    /// True when `other` is this same device, whatever paths they were opened by.
    pub fn is_same(&self, other: &Device) -> bool {
        self.info.identity == other.info.identity
    }

    /// An error about this device.
    pub fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::NotAPool { device: self.info.label(), reason: reason.into() }
    }
}

/// A held file lock; released when dropped, even while a duplicate of the descriptor lives on.
struct Turn(File);

impl Turn {
    /// Waits for the lock. Its holder only reserves a file's memory meanwhile; the deadline covers one that is stopped.
    fn wait(file: &File, path: &Path) -> Result<Turn> {
        const TIMEOUT_MS: u64 = 60_000;
        let file = file.try_clone().map_err(|source| os(path, "opening", source))?;
        let deadline = std::time::Instant::now() + std::time::Duration::from_millis(TIMEOUT_MS);
        loop {
            match flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
                Ok(()) => return Ok(Turn(file)),
                Err(source) if source.kind() != ErrorKind::WouldBlock => return Err(os(path, "locking", source)),
                Err(_) if std::time::Instant::now() >= deadline => {
                    return Err(Error::Timeout { what: format!("another process creates {}", path.display()), timeout_ms: TIMEOUT_MS });
                }
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Nothing can be done about a failure, and closing the last descriptor releases the lock as well.
        let _ = flock(&self.0, libc::LOCK_UN);
    }
}

/// `flock(2)`, repeated when a signal interrupts it.
pub(crate) fn flock(file: &File, operation: libc::c_int) -> std::io::Result<()> {
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed; the call touches no memory of ours.
        if unsafe { libc::flock(file.as_raw_fd(), operation) } == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn reserve(file: &File, path: &Path, len_bytes: u64) -> Result<()> {
    let page = huge_page_bytes(file, path)?.unwrap_or_else(page_bytes);
    if len_bytes == 0 || !len_bytes.is_multiple_of(page) {
        return Err(Error::NotAPool {
            device: path.display().to_string(),
            reason: format!("a size of {len_bytes} bytes is not a multiple of the page of {page} bytes"),
        });
    }
    let len = libc::off_t::try_from(len_bytes).map_err(|_| Error::Invalid(format!("a file of {len_bytes} bytes is too large")))?;
    // SAFETY: a plain system call on an open descriptor; it touches no memory of ours.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
        // Only now: a file that has its length has its memory, also where this process ends here.
        huge::collapse(file, 0, len_bytes, HUGE_PAGES_TIMEOUT_MS);
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EOPNOTSUPP) {
        return file.set_len(len_bytes).map_err(|source| os(path, "resizing", source));
    }
    // What the failed call may have left must not pass for a device of another size.
    let _ = file.set_len(0);
    let advice = if error.kind() == ErrorKind::StorageFull { ": its file system has no room for it" } else { "" };
    Err(Error::NotAPool { device: path.display().to_string(), reason: format!("{len_bytes} bytes cannot be reserved ({error}){advice}") })
}

fn file_system(file: &File) -> std::io::Result<libc::statfs> {
    let mut facts = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open and `facts` has room for what the kernel writes.
    if unsafe { libc::fstatfs(file.as_raw_fd(), facts.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has written all of it.
    Ok(unsafe { facts.assume_init() })
}

fn is_tmpfs(file: &File) -> bool {
    file_system(file).is_ok_and(|facts| facts.f_type as u64 == libc::TMPFS_MAGIC as u64)
}

fn huge_page_bytes(file: &File, path: &Path) -> Result<Option<u64>> {
    let facts = file_system(file).map_err(|source| os(path, "looking at the file system of", source))?;
    Ok((facts.f_type as u64 == libc::HUGETLBFS_MAGIC as u64).then_some(facts.f_bsize as u64))
}

/// The CPU's page, in bytes.
fn page_bytes() -> u64 {
    // SAFETY: sysconf has no requirements.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(page).ok().filter(|page| page.is_power_of_two()).unwrap_or(4096)
}

fn os(path: &Path, doing: &str, source: std::io::Error) -> Error {
    Error::Os { what: format!("{doing} {}", path.display()), source }
}

fn open_error(path: &Path, access: Access, source: &std::io::Error) -> Error {
    let reason = match source.raw_os_error() {
        Some(libc::ENOENT) => match path.parent().filter(|folder| !folder.exists()) {
            Some(folder) => {
                format!("there is no such device, nor the folder {} that it would lie in: make the folder first", folder.display())
            }
            None => "there is no such device: name an existing one, or give a size to create a file".into(),
        },
        Some(libc::ENXIO) => {
            "the device is there but has no driver: bind it to device_dax (daxctl reconfigure-device --mode=devdax)".into()
        }
        Some(libc::EACCES | libc::EPERM) if access == Access::Write => {
            format!("no permission to open it for reading and writing ({source}): change its owner or mode, or open the pool read-only")
        }
        Some(libc::EACCES | libc::EPERM) => format!("no permission to open it for reading ({source}): change its owner or mode"),
        Some(libc::EROFS) => "its file system is read-only: open the pool read-only".into(),
        Some(libc::EISDIR) => "this is a directory: name a file in it".into(),
        Some(libc::EBUSY) => "the device is in use by something else".into(),
        _ => format!("cannot be opened: {source}"),
    };
    Error::NotAPool { device: path.display().to_string(), reason }
}

#[cfg(test)]
mod tests;
