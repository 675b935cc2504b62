// SPDX-License-Identifier: Apache-2.0
//! The state directory: machine-wide locks and the memory that the processes of one machine share for one pool.

use super::random_bytes;
use crate::coherence::{FaultMap, LocalGuard};
use crate::device::{flock, trust};
use crate::error::{Error, Result, display_path};
use crate::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Environment variable with the directory below which state directories are made.
pub const ENV_STATE_DIR: &str = "CXL_STATE_DIR";
/// How long a process waits for another one to finish preparing the local memory, in milliseconds.
const PREPARE_TIMEOUT_MS: u64 = 10_000;

/// The directory that the processes of one machine share for one pool.
///
/// It must be on a file system of this machine (not a network share) and must not be cleaned while a process uses the pool.
#[derive(Clone, Debug)]
pub struct State {
    directory: PathBuf,
    prepare_timeout_ms: u64,
    /// The pool whose metadata is composed from the local memory: it is closed to this process when that memory is lost.
    guarded: Option<Arc<FaultMap>>,
    /// Device and number of the file that is mapped as the local memory, and its size in bytes.
    mapped: Arc<OnceLock<(u64, u64, u64)>>,
}

/// `CXL_STATE_DIR`, else `/dev/shm/cxl-pool-UID`.
pub(super) fn base_from_env() -> Result<PathBuf> {
    match std::env::var_os(ENV_STATE_DIR) {
        Some(path) if Path::new(&path).is_absolute() => Ok(PathBuf::from(path)),
        Some(path) => Err(Error::Invalid(format!("{ENV_STATE_DIR} is {path:?}, which is not an absolute path"))),
        None => Ok(PathBuf::from(format!("/dev/shm/cxl-pool-{}", trust::user()))),
    }
}

/// Makes a directory that is this user's alone; one that is there already has to be just that, for root as for any user: its owner could
/// put other lock files and another segment there, and this machine would write as a host that it is not.
pub(super) fn make_directory(path: &Path) -> Result<()> {
    let refused = |reason| Error::Invalid(format!("the state directory {}: {reason}; or set {ENV_STATE_DIR}", display_path(path)));
    trust::check_way(path).map_err(refused)?;
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|source| os("making the state directory", path, source))?;
    trust::check_directory(path).map_err(refused)
}

impl State {
    /// The state directory of `machine` for the pool `uuid`, below `base`; made when missing.
    pub fn open(base: &Path, uuid: &[u8; 16], machine: MachineId) -> Result<State> {
        let directory = base.join(format!("{}-{machine}", crate::media::uuid_text(uuid)));
        make_directory(base)?;
        make_directory(&directory)?;
        Ok(State { directory, prepare_timeout_ms: PREPARE_TIMEOUT_MS, guarded: None, mapped: Arc::default() })
    }

    /// Closes the pool of `faults` to this process as soon as its local memory is lost (its file truncated, its memory damaged): published
    /// lines are composed from that memory, and zeros in it must not reach the pool.
    pub(crate) fn guarding(mut self, faults: Arc<FaultMap>) -> State {
        self.guarded = Some(faults);
        self
    }

    /// Looks whether the local memory that this process mapped is still the one that a process coming next would find.
    ///
    /// # Errors
    /// [`Error::Invalid`] when its file was removed, replaced or truncated.
    pub(crate) fn check_kept(&self) -> Result<()> {
        let Some(&(device, number, len_bytes)) = self.mapped.get() else { return Ok(()) };
        let path = self.local_path();
        let is_kept = |found: &std::fs::Metadata| (found.dev(), found.ino()) == (device, number) && found.len() >= len_bytes;
        if std::fs::symlink_metadata(&path).is_ok_and(|found| is_kept(&found)) {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} was removed, replaced or truncated under this host, so that the next process of this machine would be a second host with \
             its \
             identity: end this machine's processes of the pool and start them again; keep the state directory while the pool is in use",
            display_path(&path)
        )))
    }

    fn local_path(&self) -> PathBuf {
        self.directory.join("local")
    }

    /// The directory itself.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Tries to take a lock; `None` when it is held. Every call opens the file again, so that threads exclude each other as well.
    pub(super) fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>> {
        let name = match lock {
            MachineLock::Join => "join.lock",
            MachineLock::Members => "members.lock",
            MachineLock::Manager => "manager.lock",
            MachineLock::Claim => "claim.lock",
        };
        let path = self.directory.join(name);
        let file = open_kept(&path)?;
        let mode = if exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
        match flock(&file, mode | libc::LOCK_NB) {
            Ok(()) => {}
            Err(source) if source.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(source) => return Err(os("locking", &path, source)),
        }
        // A lock on a file that was removed excludes no later process.
        check_in_place(&file, &path)?;
        Ok(Some(Box::new(Held { file, pid: std::process::id() })))
    }

    /// The memory that the processes share: `len_bytes`, zeroed when made.
    ///
    /// # Errors
    /// [`Error::Invalid`] when processes with another size (another version of this program) or in another PID namespace are using it.
    pub(super) fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory> {
        if len_bytes == 0 {
            return Err(Error::Invalid("local memory of no bytes".into()));
        }
        let path = self.local_path();
        let namespace = pid_namespace()?;
        let deadline = Instant::now() + Duration::from_millis(self.prepare_timeout_ms);
        loop {
            let file = open_kept(&path)?;
            // Users hold the file's lock shared. A process that gets it alone knows that the memory is unused, and may prepare it.
            match flock(&file, libc::LOCK_EX | libc::LOCK_NB) {
                Ok(()) => self.prepare(&file, &path, len_bytes, &namespace)?,
                Err(source) if source.kind() == ErrorKind::WouldBlock => {}
                Err(source) => return Err(os("locking", &path, source)),
            }
            // Turning one lock into the other lets go of the first: another process may prepare the memory in between. Hence the checks.
            match flock(&file, libc::LOCK_SH | libc::LOCK_NB) {
                Ok(()) => {
                    check_in_place(&file, &path)?;
                    self.check_prepared(&file, &path, len_bytes, &namespace)?;
                    return self.map_local(file, &path, len_bytes);
                }
                Err(source) if source.kind() != ErrorKind::WouldBlock => return Err(os("locking", &path, source)),
                Err(_) if Instant::now() >= deadline => {
                    return Err(Error::Timeout {
                        what: format!("another process to prepare {}", display_path(&path)),
                        timeout_ms: self.prepare_timeout_ms,
                    });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn map_local(&self, file: File, path: &Path, len_bytes: usize) -> Result<LocalMemory> {
        let found = file.metadata().map_err(|source| os("looking at", path, source))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing; the file has `len_bytes` bytes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::last_os(format!("mapping {}", display_path(path))));
        }
        let start =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| Error::Invalid(format!("{} was mapped at address 0", display_path(path))))?;
        let mut local = Local { start, len_bytes, guard: None, _lock: Held { file, pid: std::process::id() } };
        if let Some(faults) = &self.guarded {
            local.guard = Some(faults.guard_local(start, len_bytes, display_path(path))?);
        }
        // A second mapping of the same process is of the same file, or `check_in_place` had refused it.
        let _ = self.mapped.set((found.dev(), found.ino(), len_bytes as u64));
        Ok(LocalMemory { start, len_bytes, owner: Arc::new(local) })
    }

    fn namespace_path(&self) -> PathBuf {
        self.directory.join("pid-namespace")
    }

    fn prepare(&self, file: &File, path: &Path, len_bytes: usize, namespace: &str) -> Result<()> {
        let found = file.metadata().map_err(|source| os("looking at", path, source))?.len();
        let note = self.namespace_path();
        let is_foreign = read_note(&note)? != namespace;
        if found != len_bytes as u64 || is_foreign {
            // Emptied first: another version's layout, or process ids that mean other processes by now, must not be left in it.
            file.set_len(0).and_then(|()| file.set_len(len_bytes as u64)).map_err(|source| os("resizing", path, source))?;
        }
        // Also when it has its size: an earlier version left it sparse.
        reserve(file, path, len_bytes)?;
        if is_foreign {
            let aside = self.directory.join(format!(".pid-namespace-{:016x}", u64::from_le_bytes(random_bytes()?)));
            std::fs::write(&aside, namespace)
                .and_then(|()| std::fs::rename(&aside, &note))
                .map_err(|source| os("writing", &note, source))?;
        }
        Ok(())
    }

    fn check_prepared(&self, file: &File, path: &Path, len_bytes: usize, namespace: &str) -> Result<()> {
        let found = file.metadata().map_err(|source| os("looking at", path, source))?.len();
        if found != len_bytes as u64 {
            return Err(Error::Invalid(format!(
                "{} has {found} bytes, this program needs {len_bytes}: it was truncated, or another version of this program is running on \
                 this pool; end this machine's processes of the pool and start them again",
                display_path(path)
            )));
        }
        if read_note(&self.namespace_path())? != namespace {
            return Err(Error::Invalid(format!(
                "processes of another PID namespace use {}: share the PID namespace with them, or set CXL_MACHINE_ID and \
                 {ENV_STATE_DIR} to be a host of its own",
                display_path(&self.directory)
            )));
        }
        Ok(())
    }
}

/// A held lock. A forked child has a copy of it, which must not release its parent's.
struct Held {
    file: File,
    pid: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // Released by name, because a forked child may keep the open file description alive. Closing comes next and does the rest.
            let _ = flock(&self.file, libc::LOCK_UN);
        }
    }
}

/// The mapped local memory, with the lock that says it is in use.
struct Local {
    start: NonNull<u8>,
    len_bytes: usize,
    guard: Option<LocalGuard>,
    _lock: Held,
}

// SAFETY: an address, a length and a file; unmapping and unlocking work from any thread.
unsafe impl Send for Local {}
// SAFETY: as above; nothing is reachable through a shared reference.
unsafe impl Sync for Local {}

impl Drop for Local {
    fn drop(&mut self) {
        // The guard ends before the memory is unmapped, which another mapping may take at once.
        drop(self.guard.take());
        // SAFETY: this value owns exactly this mapping, and users of the address keep this value alive (`LocalMemory::owner`).
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}

/// Gives the file its memory now, so that a full file system is an error here and not a SIGBUS in the middle of the work.
fn reserve(file: &File, path: &Path, len_bytes: usize) -> Result<()> {
    let len = libc::off_t::try_from(len_bytes).map_err(|_| Error::Invalid(format!("local memory of {len_bytes} bytes is too large")))?;
    // SAFETY: a plain call on an open descriptor; it touches no memory of ours.
    let source = match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => return Ok(()),
        code => std::io::Error::from_raw_os_error(code),
    };
    // Allocated pages are of no use to this process, and others may need them.
    let _ = file.set_len(0);
    if !matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::OutOfMemory) {
        return Err(os("reserving", path, source));
    }
    Err(Error::Invalid(format!(
        "the memory that this machine's processes share takes {len_bytes} bytes in {}, and its file system has no room for it ({source}): \
         free some, enlarge it (docker run --shm-size, a larger emptyDir), or set {ENV_STATE_DIR} to another local file system",
        display_path(path)
    )))
}

/// Opens a file that is made when missing and never removed, as this user's alone.
fn open_kept(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        // Not a link's target, and no waiting for the other end of a FIFO.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .map_err(|source| os("opening", path, source))?;
    let found = file.metadata().map_err(|source| os("looking at", path, source))?;
    let checked = if found.is_file() { trust::check_own(&found) } else { Err("it is not a file".into()) };
    checked.map_err(|reason| Error::Invalid(format!("{}: {reason}", display_path(path))))?;
    Ok(file)
}

/// Refuses a file that is no longer the one that its path names.
fn check_in_place(file: &File, path: &Path) -> Result<()> {
    let held = file.metadata().map_err(|source| os("looking at", path, source))?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => Ok(()),
        _ => Err(Error::Invalid(format!(
            "{} was removed or replaced: keep the state directory while the pool is in use",
            display_path(path)
        ))),
    }
}

/// Names the boot and the PID namespace of this process: a process id and its start time mean something within one of them only.
fn pid_namespace() -> Result<String> {
    let link = Path::new("/proc/self/ns/pid");
    let name = std::fs::read_link(link).map_err(|source| os("reading", link, source))?;
    let boot = Path::new("/proc/sys/kernel/random/boot_id");
    let boot_id = std::fs::read_to_string(boot).map_err(|source| os("reading", boot, source))?;
    Ok(format!("{} {}", name.display(), boot_id.trim()))
}

fn read_note(path: &Path) -> Result<String> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text),
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(os("reading", path, source)),
    }
}

fn os(doing: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Os { what: format!("{doing} {}", display_path(path)), source }
}

#[cfg(test)]
impl State {
    /// Waits for less time than a test may take.
    pub(super) fn with_prepare_timeout_ms(mut self, timeout_ms: u64) -> Self {
        self.prepare_timeout_ms = timeout_ms;
        self
    }

    pub(super) fn pretend_namespace(&self, name: &str) {
        std::fs::write(self.namespace_path(), name).unwrap();
    }
}
