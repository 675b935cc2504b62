// SPDX-License-Identifier: Apache-2.0
//! What sysfs tells about devices and NUMA nodes, and which CPUs a configuration means by them.

use crate::cpus::{CpuBinding, CpuChoice, CpuSet};
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

/// A sysfs tree; tests bring their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
}

/// The most NUMA nodes that are looked at, as many as any kernel has.
const MAX_NODES: u32 = 1024;

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs { root: PathBuf::from("/sys") }
    }
}

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

    /// The CPUs of a NUMA node.
    ///
    /// # Errors
    /// [`Error::NotFound`] when there is no such node.
    pub fn node_cpus(&self, node: u32) -> Result<CpuSet> {
        let path = self.root.join(format!("devices/system/node/node{node}/cpulist"));
        let text = read_if_there(&path)?.ok_or_else(|| Error::NotFound(format!("NUMA node {node}")))?;
        CpuSet::parse(&text).ok_or_else(|| Error::Invalid(format!("{}: {text:?} is not a list of CPUs", path.display())))
    }

    fn cpus_to_bind(&self, node: u32) -> Result<CpuSet> {
        match self.node_cpus(node)? {
            none if none.is_empty() => {
                Err(Error::Invalid(format!("NUMA node {node} has memory but no CPUs: bind to the node nearest to it")))
            }
            cpus => Ok(cpus),
        }
    }

    /// The node nearest to `node` that has CPUs: itself where it has, as a node of CXL memory often has not. None where that is not told.
    pub fn nearest_with_cpus(&self, node: u32) -> Option<u32> {
        let has_cpus = |node: u32| self.node_cpus(node).is_ok_and(|cpus| !cpus.is_empty());
        if has_cpus(node) {
            return Some(node);
        }
        let path = self.root.join(format!("devices/system/node/node{node}/distance"));
        let distances = std::fs::read_to_string(path).ok()?;
        // One number for each node that is there, in the order of their numbers.
        let nodes = (0..MAX_NODES).filter(|node| self.root.join(format!("devices/system/node/node{node}")).exists());
        let near = nodes.zip(distances.split_ascii_whitespace()).filter_map(|(node, text)| Some((text.parse::<u32>().ok()?, node)));
        near.filter(|&(_, node)| has_cpus(node)).min().map(|(_, node)| node)
    }

    /// A configuration's choices as sets of CPUs, for a pool whose first device is near `device_node`; each set is tried.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a set is not available, and for a node without CPUs; [`Error::NotFound`] for one that is not there.
    pub fn resolve(&self, binding: &CpuBinding, device_node: Option<u32>) -> Result<CpuBinding> {
        binding.map(|choice| {
            let set = match choice {
                CpuChoice::Any => return Ok(CpuChoice::Any),
                CpuChoice::Device => match device_node.and_then(|node| self.nearest_with_cpus(node)) {
                    Some(node) => self.cpus_to_bind(node)?,
                    None => return Ok(CpuChoice::Any),
                },
                CpuChoice::Node(node) => self.cpus_to_bind(*node)?,
                CpuChoice::Set(set) => set.clone(),
            };
            set.check()?;
            Ok(CpuChoice::Set(set))
        })
    }

    /// Lets the calling thread run only on the CPUs of `node`.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a node that is not there, [`Error::Invalid`] for one without CPUs (memory only, as CXL memory often is), and
    /// when none of its CPUs is allowed to this process.
    pub fn bind_current_thread_to_node(&self, node: u32) -> Result<()> {
        self.cpus_to_bind(node)?.bind_current_thread()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_to_every_node_there_is_and_says_why_not() {
        let mut bound = 0;
        for node in 0..64 {
            let Ok(cpus) = Sysfs::default().node_cpus(node) else { continue };
            // A thread of its own: the affinity must not leak into other tests.
            let outcome = std::thread::spawn(move || {
                bind_current_thread_to_node(node)?;
                CpuSet::of_current_thread()
            })
            .join()
            .unwrap();
            match outcome {
                Ok(now) => {
                    let cpus: Vec<usize> = cpus.numbers().collect();
                    assert!(!now.is_empty() && now.numbers().all(|cpu| cpus.contains(&cpu)), "node {node}: {now} not within {cpus:?}");
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

    /// A tree with nodes 0 and 1, which have CPUs, and node 2, which has memory alone and lies nearer to node 1.
    fn three_nodes() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let here = CpuSet::of_current_thread().unwrap().numbers().next().unwrap();
        for (node, cpus, distance) in [(0, "60000".into(), "10 21 17"), (1, here.to_string(), "21 10 14"), (2, String::new(), "17 14 10")] {
            let folder = root.path().join(format!("devices/system/node/node{node}"));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("cpulist"), format!("{cpus}\n")).unwrap();
            std::fs::write(folder.join("distance"), format!("{distance}\n")).unwrap();
        }
        root
    }

    #[test]
    fn a_device_without_cpus_takes_those_nearest_to_it() {
        let root = three_nodes();
        let sysfs = Sysfs::at(root.path());
        assert_eq!([0, 1, 2, 3].map(|node| sysfs.nearest_with_cpus(node)), [Some(0), Some(1), Some(1), None]);
        let binding: CpuBinding = "device".parse().unwrap();
        let near = sysfs.resolve(&binding, Some(2)).unwrap();
        assert_eq!(near, sysfs.resolve(&"node:1".parse().unwrap(), None).unwrap());
        for unknown in [None, Some(7)] {
            assert_eq!(sysfs.resolve(&binding, unknown).unwrap(), CpuBinding::default(), "not known: where the process runs");
        }
    }

    #[test]
    fn what_cannot_be_bound_to_is_refused_with_its_kind() {
        let root = three_nodes();
        let sysfs = Sysfs::at(root.path());
        let refused = |text: &str| sysfs.resolve(&text.parse().unwrap(), Some(0)).unwrap_err();
        assert!(matches!(refused("node:9"), Error::NotFound(_)));
        // A node whose CPUs are not there, one without any, and a list of such.
        for text in ["node:0", "device", "workers=60000", "copy=node:2"] {
            assert!(matches!(refused(text), Error::Invalid(_)), "{text}");
        }
    }
}
