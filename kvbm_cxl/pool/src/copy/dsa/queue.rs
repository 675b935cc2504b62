// SPDX-License-Identifier: Apache-2.0
//! Work queues: what sysfs says of them, and the portal through which descriptors go.
//!
//! A queue that an administrator has enabled with type `user` appears as `/dev/dsa/wqX.Y`. Opening it binds this process's address space to
//! the device; closing it waits, in the kernel, for everything that was submitted through it.

use super::descriptor::Descriptor;
use crate::coherence::{CpuFeatures, Submission};
use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};

/// Size of a portal, in bytes.
const PORTAL_BYTES: usize = 4096;
/// Most queues looked at.
const MAX_QUEUES: usize = 1024;

/// Takes descriptors.
///
/// # Safety
/// A descriptor that was taken is executed as the specification says: nothing but its destination and completion record is written, and
/// nothing at all once [`WorkQueue`] has been dropped.
pub unsafe trait WorkQueue: Send {
    /// Hands a descriptor over; false when the queue has no room just now.
    fn submit(&mut self, descriptor: &Descriptor) -> bool;
    /// Limits of the queue.
    fn limits(&self) -> Limits;
}

/// What a queue takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one move.
    pub transfer_bytes: u32,
    /// Descriptors of one batch; below 2 there are none.
    pub batch_len: u32,
    /// Descriptors that may be under way.
    pub in_flight: u32,
    /// Whether the device may wait for pages that are not there.
    pub block_on_fault: bool,
}

/// A queue that this process may be able to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsableQueue {
    /// Its device file.
    pub path: PathBuf,
    /// What it takes.
    pub limits: Limits,
    /// Whether other processes submit to it as well.
    pub is_shared: bool,
}

/// The enabled user queues below these roots (`/sys`, `/dev`), in the order of their names. Nothing there is no error.
pub fn discover(sys: &Path, dev: &Path) -> Vec<UsableQueue> {
    let Ok(entries) = std::fs::read_dir(sys.join("bus/dsa/devices")) else { return Vec::new() };
    let mut found: Vec<UsableQueue> = entries.flatten().take(MAX_QUEUES).filter_map(|entry| look(&entry.path(), dev)).collect();
    found.sort_by(|one, other| one.path.cmp(&other.path));
    found
}

fn look(folder: &Path, dev: &Path) -> Option<UsableQueue> {
    let name = folder.file_name()?.to_str().filter(|name| name.starts_with("wq"))?;
    let text = |attribute: &str| std::fs::read_to_string(folder.join(attribute)).ok().map(|text| text.trim().to_owned());
    let number = |attribute: &str| text(attribute)?.parse::<u64>().ok();
    if text("state")? != "enabled" || text("type")? != "user" {
        return None;
    }
    let is_shared = match text("mode")?.as_str() {
        "shared" => true,
        "dedicated" => false,
        _ => return None,
    };
    let limits = Limits {
        transfer_bytes: number("max_transfer_size")?.min(1 << 30) as u32,
        batch_len: number("max_batch_size").unwrap_or(0).min(1024) as u32,
        in_flight: number("size")?.min(64) as u32,
        block_on_fault: number("block_on_fault") == Some(1),
    };
    (limits.transfer_bytes >= 4096 && limits.in_flight > 0).then(|| UsableQueue { path: dev.join("dsa").join(name), limits, is_shared })
}

/// A queue of the hardware.
pub struct HardwareQueue {
    portal: NonNull<u8>,
    submission: Submission,
    limits: Limits,
    _file: File,
}

// SAFETY: the portal is an address of this process, for every thread.
unsafe impl Send for HardwareQueue {}

impl HardwareQueue {
    /// Opens a queue.
    ///
    /// # Errors
    /// [`Error::Os`] when it cannot be opened or mapped, [`Error::Invalid`] when this CPU has no instruction to submit with.
    pub fn open(found: &UsableQueue) -> Result<Self> {
        let cpu = CpuFeatures::detect();
        let (submission, is_there) =
            if found.is_shared { (Submission::Enqueue, cpu.enqcmd) } else { (Submission::DirectStore, cpu.movdir64b) };
        if !is_there {
            return Err(Error::Invalid(format!("{}: this CPU has no instruction to submit with", found.path.display())));
        }
        let failed = |source| Error::Os { what: format!("opening {}", found.path.display()), source };
        let file = OpenOptions::new().read(true).write(true).open(&found.path).map_err(failed)?;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at a place of the kernel's choice. Portals take writes only.
        let at = unsafe { libc::mmap(null_mut(), PORTAL_BYTES, libc::PROT_WRITE, flags, file.as_raw_fd(), 0) };
        match NonNull::new(at.cast::<u8>()) {
            Some(portal) if at != libc::MAP_FAILED => Ok(HardwareQueue { portal, submission, limits: found.limits, _file: file }),
            _ => Err(Error::last_os(format!("mapping the portal of {}", found.path.display()))),
        }
    }
}

// SAFETY: the device executes what the specification says. Unmapping the portal and closing the file, which is the last of this queue,
// waits in the kernel until everything that was submitted is done.
unsafe impl WorkQueue for HardwareQueue {
    fn submit(&mut self, descriptor: &Descriptor) -> bool {
        // SAFETY: the portal is mapped for as long as `self` lives, aligned to a page, and `open` saw that the CPU has the instruction.
        unsafe { self.submission.submit(self.portal, &bytemuck::cast(*descriptor)) }
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

impl Drop for HardwareQueue {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length; the file is closed after this.
        unsafe { libc::munmap(self.portal.as_ptr().cast(), PORTAL_BYTES) };
    }
}

#[cfg(test)]
mod tests;
