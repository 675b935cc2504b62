// SPDX-License-Identifier: Apache-2.0
//! The kernel's word on which machines' processes exist (LOCKS.md 12.19).
//!
//! Each joined process holds a lock of its open file description on a byte of the pool's first file, far beyond its data, that stands for
//! its machine id. The kernel drops it when the last copy of the description is closed: with the process, or with the last child it forked
//! without running another program. Any process that reached the same inode under the same kernel can ask for it, in other containers and
//! other PID namespaces as well.

use super::identity::digest;
use crate::error::{Error, Result};
use crate::platform::{MachineId, MachineLockGuard};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// First byte that stands for a machine: no file and no device is as long.
const FIRST_BYTE: u64 = 1 << 62;

pub(super) struct KernelMarks {
    /// This process's own path to the inode, whatever became of its name.
    path: PathBuf,
    /// Keeps `path` valid.
    _file: File,
    /// Where on the file the pool begins: pools side by side on one file have marks of their own.
    offset_bytes: u64,
    witness: u64,
}

impl KernelMarks {
    /// Over an open file, at `offset_bytes` of which the pool begins.
    pub fn over(file: File, offset_bytes: u64) -> Result<KernelMarks> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let found = file.metadata().map_err(|source| presence_error("looking at", &path, source))?;
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot_id = std::fs::read_to_string(boot).map_err(|source| presence_error("reading", boot, source))?;
        let place = [found.dev().to_le_bytes(), found.ino().to_le_bytes()].concat();
        let digest = digest(&[b"cxl-pool witness", boot_id.trim().as_bytes(), &place]).0;
        let witness = digest.first_chunk().map_or(0, |half| u64::from_le_bytes(*half));
        Ok(KernelMarks { path, _file: file, offset_bytes, witness })
    }

    /// The kernel and the inode, as one number.
    pub fn witness(&self) -> u64 {
        self.witness
    }

    /// Marks this process as one of `machine`'s, and tells whether another one is marked as well. `None` where one is and this one wants
    /// to be `alone`.
    pub fn mark(&self, machine: MachineId, alone: bool) -> Result<Option<(MachineLockGuard, bool)>> {
        let byte = self.byte_of(machine);
        let mark = Mark { file: self.open()?, byte, pid: std::process::id() };
        // Alone, then shared: the kernel turns one lock of a description into the other without letting go of it.
        let kinds = if alone { &[libc::F_WRLCK, libc::F_RDLCK][..] } else { &[libc::F_RDLCK] };
        for &kind in kinds {
            if !set(&mark.file, kind, byte).map_err(|source| presence_error("marking this process on", &self.path, source))? {
                return Ok(None);
            }
        }
        // Asked when our own mark stands, so that from the other's mark to ours there is no moment without one.
        let has_others = is_held(&mark.file, byte).map_err(|source| presence_error("asking for marks on", &self.path, source))?;
        Ok(Some((Box::new(mark), has_others)))
    }

    /// Whether any process is marked as `machine`'s, this one included.
    pub fn is_marked(&self, machine: MachineId) -> Result<bool> {
        // Through a description of its own: the kernel does not tell a description about its own locks.
        is_held(&self.open()?, self.byte_of(machine)).map_err(|source| presence_error("asking for marks on", &self.path, source))
    }

    /// Takes the lock of this kernel's place among those that claim a seat; `None` when it is held.
    pub fn lock_place(&self) -> Result<Option<MachineLockGuard>> {
        let byte = byte_for(b"cxl-pool place", &[], self.offset_bytes);
        let lock = Mark { file: self.open()?, byte, pid: std::process::id() };
        let is_taken = set(&lock.file, libc::F_WRLCK, byte).map_err(|source| presence_error("locking", &self.path, source))?;
        Ok(is_taken.then(|| Box::new(lock) as MachineLockGuard))
    }

    fn byte_of(&self, machine: MachineId) -> u64 {
        byte_of(machine, self.offset_bytes)
    }

    fn open(&self) -> Result<File> {
        OpenOptions::new().read(true).write(true).open(&self.path).map_err(|source| presence_error("opening", &self.path, source))
    }
}

/// The byte that stands for a machine in the pool that begins at `offset_bytes`. Two machines with one byte would each count as the other's
/// twin, so it is a digest of the whole identity: operators number machines in any part of it.
fn byte_of(machine: MachineId, offset_bytes: u64) -> u64 {
    byte_for(b"cxl-pool mark", &machine.0, offset_bytes)
}

fn byte_for(what: &[u8], name: &[u8], offset_bytes: u64) -> u64 {
    // Programs that know no offsets know the byte of a pool at the start of its device.
    let digest = match offset_bytes {
        0 => digest(&[what, name]).0,
        _ => digest(&[what, name, &offset_bytes.to_le_bytes()]).0,
    };
    let half = digest.first_chunk().map_or(0, |half| u64::from_le_bytes(*half));
    FIRST_BYTE + half % FIRST_BYTE
}

fn request(kind: libc::c_int, byte: u64) -> libc::flock {
    // SAFETY: all fields are integers, for which zero is a value.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    request.l_start = byte as libc::off_t;
    request.l_len = 1;
    request
}

fn ask(file: &File, command: libc::c_int, request: &mut libc::flock) -> std::io::Result<()> {
    loop {
        // SAFETY: the descriptor is open for as long as `file` is borrowed, and the request is of the type that these commands take.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(request)) } != -1 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Takes or drops a lock; false when another description's is in the way.
fn set(file: &File, kind: libc::c_int, byte: u64) -> std::io::Result<bool> {
    match ask(file, libc::F_OFD_SETLK, &mut request(kind, byte)) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether another description has a lock on the byte.
fn is_held(file: &File, byte: u64) -> std::io::Result<bool> {
    let mut request = request(libc::F_WRLCK, byte);
    ask(file, libc::F_OFD_GETLK, &mut request)?;
    Ok(request.l_type != libc::F_UNLCK as libc::c_short)
}

/// A held mark. A forked child has a copy of it, which must not drop its parent's.
struct Mark {
    file: File,
    byte: u64,
    pid: u32,
}

impl Drop for Mark {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // By name, because a forked child may keep the description open. Closing comes next and does the rest.
            let _ = set(&self.file, libc::F_UNLCK, self.byte);
        }
    }
}

fn presence_error(doing: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Os { what: format!("{doing} {}", path.display()), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_that_differ_in_any_byte_have_marks_of_their_own() {
        let mut bytes: Vec<u64> = (0..16)
            .flat_map(|at| {
                (0..=255_u8).map(move |value| {
                    let mut id = [5; 16];
                    id[at] = value;
                    byte_of(MachineId(id), 0)
                })
            })
            .collect();
        bytes.sort_unstable();
        bytes.dedup();
        // 16 times 256 identities, of which 16 are one: all fives.
        assert_eq!(bytes.len(), 16 * 255 + 1);
        let at = |offset_bytes| byte_of(MachineId([5; 16]), offset_bytes);
        assert!(bytes.contains(&at(0)) && !bytes.contains(&at(2 << 20)) && at(2 << 20) != at(4 << 20));
        assert!(bytes.iter().all(|&byte| byte >= FIRST_BYTE && i64::try_from(byte).is_ok()));
    }
}
