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
mod tests;
