// SPDX-License-Identifier: Apache-2.0
//! Whose turn it is: how far each host has come, in memory that the processes of a replay share.

use cxl_pool::{Error, Result};
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Hosts of a replay, at most.
pub const MOST_HOSTS: usize = 8;
/// Longest wait for a turn without any host coming further.
const PATIENCE: Duration = Duration::from_secs(120);
/// Looks before a host that waits sleeps between them.
const LOOKS: u32 = 20;
/// Its first rest, which doubles, and its longest one.
const REST: Duration = Duration::from_micros(20);
const LONGEST_REST: Duration = Duration::from_micros(640);
/// A host that has no action left, and is still there.
const LEAVES: u64 = u64::MAX - 2;
/// A host that came to an end with an error.
const FAILED: u64 = u64::MAX - 1;
/// A host that has nothing left to do.
const DONE: u64 = u64::MAX;

/// A word for each host: its next action, by its place among those of all hosts.
pub struct Turns {
    words: *const AtomicU64,
    hosts: usize,
}

// SAFETY: the words are only used as atomics, and stay mapped until this value is dropped.
unsafe impl Send for Turns {}
// SAFETY: as above.
unsafe impl Sync for Turns {}

const LEN_BYTES: usize = MOST_HOSTS * 64;

impl Turns {
    /// Those in a file, which is made where there is none.
    pub fn open(path: &Path, hosts: usize) -> Result<Turns> {
        let failed = |source| Error::Os { what: format!("opening {}", path.display()), source };
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        file.set_len(LEN_BYTES as u64).map_err(failed)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping of an open file, of a length that the file has.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), LEN_BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if address == libc::MAP_FAILED {
            return Err(failed(std::io::Error::last_os_error()));
        }
        Ok(Turns { words: address.cast(), hosts: hosts.min(MOST_HOSTS) })
    }

    fn word(&self, host: usize) -> &AtomicU64 {
        let place = host.min(MOST_HOSTS - 1) * 8;
        // SAFETY: within the mapping, which is aligned to a page; zeros are a number.
        unsafe { &*self.words.add(place) }
    }

    /// This host's next action.
    pub fn set(&self, host: usize, next: u64) {
        self.word(host).store(next, Ordering::Release);
    }

    /// This host has no action left: none waits for one. It is still to leave.
    pub fn leaves(&self, host: usize) {
        self.set(host, LEAVES);
    }

    /// This host has done everything.
    pub fn end(&self, host: usize) {
        self.set(host, DONE);
    }

    /// This host cannot go on, so that none waits for it.
    pub fn fail(&self, host: usize) {
        self.set(host, FAILED);
    }

    fn others(&self, host: usize) -> Result<u64> {
        let mut least = DONE;
        for other in (0..self.hosts).filter(|&other| other != host) {
            let next = self.word(other).load(Ordering::Acquire);
            if next == FAILED {
                return Err(Error::Invalid(format!("host {other} of the replay ended with an error")));
            }
            least = least.min(next);
        }
        Ok(least)
    }

    /// Waits until no other host is more than `ahead` actions behind `next`.
    pub fn wait(&self, host: usize, next: u64, ahead: u64) -> Result<()> {
        let (mut round, mut rest, mut seen, mut since) = (0u32, REST, self.others(host)?, Instant::now());
        while seen.saturating_add(ahead) < next {
            round += 1;
            if round < LOOKS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(rest);
                rest = (rest * 2).min(LONGEST_REST);
            }
            let least = self.others(host)?;
            if least != seen {
                (seen, since) = (least, Instant::now());
            } else if since.elapsed() > PATIENCE {
                return Err(Error::Timeout { what: "a turn in the replay".into(), timeout_ms: PATIENCE.as_millis() as u64 });
            }
        }
        Ok(())
    }

    /// Waits until all other hosts have done everything.
    pub fn wait_for_all(&self, host: usize) -> Result<()> {
        self.wait(host, DONE, 0)
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        // SAFETY: the mapping that `open` made, which nothing refers to any more.
        unsafe { libc::munmap(self.words.cast_mut().cast(), LEN_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_leaves_lets_the_others_act_and_keeps_the_last_one() {
        let folder = tempfile::tempdir().unwrap();
        let turns = Turns::open(&folder.path().join("turns"), 2).unwrap();
        turns.leaves(1);
        turns.wait(0, u64::MAX - 3, 0).unwrap();
        std::thread::scope(|scope| {
            let last = scope.spawn(|| turns.wait_for_all(0));
            std::thread::sleep(10 * LONGEST_REST);
            assert!(!last.is_finished());
            turns.end(1);
            last.join().unwrap().unwrap();
        });
        turns.fail(1);
        assert!(turns.wait_for_all(0).unwrap_err().to_string().contains("host 1 of the replay ended with an error"));
    }
}
