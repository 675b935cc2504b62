// SPDX-License-Identifier: Apache-2.0
//! Files mapped as devices, and further processes.

use cxl_pool::coherence::{MappedDevice, Mapping, Segment};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitStatus};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// Names the role of a child process.
pub const ROLE: &str = "CXL_POOL_TEST_ROLE";
/// Exit status of a child that does not know its role.
pub const BAD_ROLE: i32 = 99;

struct Reserved {
    start: *mut u8,
    len_bytes: usize,
}

// SAFETY: an address range, unmapped once.
unsafe impl Send for Reserved {}
// SAFETY: as above.
unsafe impl Sync for Reserved {}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: reserved by `map_files` with this length.
        unsafe { libc::munmap(self.start.cast(), self.len_bytes) };
    }
}

pub fn new_file(len_bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(len_bytes).unwrap();
    file
}

/// Maps files of one size as devices named `device0`, `device1`, …, striped over each other.
pub fn map_files(files: &[&File], len_bytes: u64, stripe_bytes: u64) -> Mapping {
    let total = len_bytes * files.len() as u64;
    // SAFETY: a new range, then files over parts of it.
    let start = unsafe { libc::mmap(null_mut(), total as usize, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let segments: Vec<_> = (0..total / stripe_bytes)
        .map(|stripe| Segment { start: stripe * stripe_bytes, len_bytes: stripe_bytes, device: stripe as usize % files.len() })
        .collect();
    for segment in &segments {
        let within = segment.start / stripe_bytes / files.len() as u64 * stripe_bytes;
        // SAFETY: as above.
        let at = unsafe {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
            let at = start.cast::<u8>().add(segment.start as usize).cast();
            libc::mmap(at, stripe_bytes as usize, protection, flags, files[segment.device].as_raw_fd(), within as i64)
        };
        assert_ne!(at, libc::MAP_FAILED);
    }
    Mapping {
        base: NonNull::new(start.cast()).unwrap(),
        len_bytes: total,
        devices: (0..files.len()).map(|index| MappedDevice { name: format!("device{index}"), offset_bytes: 0 }).collect(),
        segments,
        owner: Arc::new(Reserved { start: start.cast(), len_bytes: total as usize }),
    }
}

/// One file of its own as a pool.
pub fn map_new(len_bytes: u64) -> Mapping {
    map_files(&[&new_file(len_bytes)], len_bytes, len_bytes)
}

/// This test program again, in another role.
pub fn child(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command
}

/// Runs a child to its end, which comes soon or never.
pub fn finish(mut command: Command) -> ExitStatus {
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(240);
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status,
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                return child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|index| ((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index * 0x0100_0193) >> 24) as u8).collect()
}
