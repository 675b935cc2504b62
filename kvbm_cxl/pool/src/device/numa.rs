// SPDX-License-Identifier: Apache-2.0
//! What sysfs tells about devices and NUMA nodes, and binding a thread to a node's CPUs.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// A sysfs tree; tests bring their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
}

/// The most CPU numbers a list may name; larger than any kernel's limit, so that a strange file cannot make us allocate.
const MAX_CPUS: usize = 1 << 16;

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs { root: PathBuf::from("/sys") }
    }
}

/// What sysfs says about a devdax device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DaxFacts {
    pub len_bytes: u64,
    pub align_bytes: u64,
    pub numa_node: Option<u32>,
}

impl Sysfs {
    /// The tree at `root` instead of `/sys`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Sysfs { root: root.into() }
    }

    /// Whether there is such a tree. A container may have none.
    pub(super) fn is_mounted(&self) -> bool {
        self.root.join("dev/char").is_dir()
    }

    /// Size, alignment and node of the character device `major:minor`; `None` when it is not a devdax device.
    pub(super) fn dax(&self, major: u32, minor: u32) -> Result<Option<DaxFacts>> {
        let folder = self.root.join(format!("dev/char/{major}:{minor}"));
        // A device of another driver has neither file, so their absence tells it apart; unreadable ones are an error.
        let Some(size) = read_if_there(&folder.join("size"))? else { return Ok(None) };
        let Some(align) = read_if_there(&folder.join("align"))? else { return Ok(None) };
        let number = |name: &str, text: &str| {
            text.trim().parse::<u64>().map_err(|_| Error::Invalid(format!("{}: {text:?} is not a number", folder.join(name).display())))
        };
        Ok(Some(DaxFacts {
            len_bytes: number("size", &size)?,
            align_bytes: number("align", &align)?,
            numa_node: node_in(&folder.join("numa_node")),
        }))
    }

    /// Node of the block device under a file, where it has one (fsdax on pmem).
    pub(super) fn block_node(&self, major: u32, minor: u32) -> Option<u32> {
        node_in(&self.root.join(format!("dev/block/{major}:{minor}/device/numa_node")))
    }

    /// The CPUs of a NUMA node, in rising order.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such node.
    pub fn node_cpus(&self, node: u32) -> Result<Vec<usize>> {
        let path = self.root.join(format!("devices/system/node/node{node}/cpulist"));
        let text = read_if_there(&path)?.ok_or_else(|| Error::NotFound(format!("NUMA node {node}")))?;
        parse_cpulist(&text).ok_or_else(|| Error::Invalid(format!("{}: {text:?} is not a list of CPUs", path.display())))
    }

    /// Lets the calling thread run only on the CPUs of `node`.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a node that is not there, [`Error::Invalid`] for one without CPUs (memory only, as CXL memory often is),
    /// [`Error::Os`] when none of its CPUs is allowed to this process.
    pub fn bind_current_thread_to_node(&self, node: u32) -> Result<()> {
        let cpus = self.node_cpus(node)?;
        let Some(last) = cpus.last() else {
            return Err(Error::Invalid(format!("NUMA node {node} has memory but no CPUs: bind to the node nearest to it")));
        };
        // The kernel takes a mask of any length, so machines beyond the 1024 CPUs of cpu_set_t work too.
        let mut mask = vec![0u64; last / 64 + 1];
        for cpu in &cpus {
            mask[cpu / 64] |= 1 << (cpu % 64);
        }
        // SAFETY: the pointer and the length describe the words of `mask`, which outlives the call; the kernel only reads them.
        if unsafe { libc::sched_setaffinity(0, mask.len() * 8, mask.as_ptr().cast()) } != 0 {
            return Err(Error::last_os(format!("binding the thread to NUMA node {node}")));
        }
        Ok(())
    }
}

/// Lets the calling thread run only on the CPUs of `node`; see [`Sysfs::bind_current_thread_to_node`].
pub fn bind_current_thread_to_node(node: u32) -> Result<()> {
    Sysfs::default().bind_current_thread_to_node(node)
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Os { what: format!("reading {}", path.display()), source }),
    }
}

/// A node number, or `None` where the file is missing or says -1 (no affinity known). Affinity is advice: never an error.
fn node_in(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Parses the kernel's list form, such as `0-3,8,10-11`.
fn parse_cpulist(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CPUS || cpus.last().is_some_and(|&previous| previous >= first) {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpulists() {
        assert_eq!(parse_cpulist("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_cpulist("\n"), Some(vec![]));
        for text in ["3-1", "a", "1-", "0-4294967295", "2,1", "1,1", "-1"] {
            assert_eq!(parse_cpulist(text), None, "{text}");
        }
    }

    #[test]
    fn binds_to_every_node_there_is_and_says_why_not() {
        let mut bound = 0;
        for node in 0..64 {
            let Ok(cpus) = Sysfs::default().node_cpus(node) else { continue };
            // A thread of its own: the affinity must not leak into other tests.
            let outcome = std::thread::spawn(move || {
                bind_current_thread_to_node(node)?;
                let mut mask = [0u64; 1024];
                // SAFETY: the kernel writes at most the length given into `mask`.
                let len = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, size_of_val(&mask), mask.as_mut_ptr()) };
                assert!(len > 0);
                Ok::<_, Error>((0..mask.len() * 64).filter(|cpu| mask[cpu / 64] >> (cpu % 64) & 1 == 1).collect::<Vec<_>>())
            })
            .join()
            .unwrap();
            match outcome {
                Ok(now) => {
                    assert!(!now.is_empty() && now.iter().all(|cpu| cpus.contains(cpu)), "node {node}: {now:?} not within {cpus:?}");
                    bound += 1;
                }
                Err(error) => println!("node {node} skipped: {error}"),
            }
        }
        assert!(bound > 0 || !Path::new("/sys/devices/system/node/node0").exists(), "no node could be bound to");
        assert!(matches!(bind_current_thread_to_node(9999), Err(Error::NotFound(_))));
    }

    #[test]
    fn a_node_without_cpus_is_named_as_such() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join("devices/system/node/node7");
        std::fs::create_dir_all(&node).unwrap();
        std::fs::write(node.join("cpulist"), "\n").unwrap();
        let error = Sysfs::at(root.path()).bind_current_thread_to_node(7).unwrap_err().to_string();
        assert!(error.contains("no CPUs"), "{error}");
    }
}
