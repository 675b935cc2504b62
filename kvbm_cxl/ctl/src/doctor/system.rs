// SPDX-License-Identifier: Apache-2.0
//! What the CPU and the operating system offer.

use cxl_pool::coherence::CpuFeatures;
use serde::Serialize;
use std::ffi::CString;
use std::path::Path;

#[derive(Debug, Serialize)]
pub struct Cpu {
    /// As it calls itself.
    pub model: String,
    /// Whether it says that it runs under a hypervisor.
    pub is_virtual: bool,
    pub movdir64b: bool,
    pub avx512: bool,
    pub avx2: bool,
    pub clflushopt: bool,
    pub clwb: bool,
    /// What one flush covers, in bytes.
    pub line_bytes: usize,
}

impl Cpu {
    pub fn detect() -> Cpu {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            info.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':')).map(|(_, rest)| rest.trim())
        };
        let CpuFeatures { movdir64b, avx512, avx2, clflushopt, clwb, line_bytes, .. } = CpuFeatures::detect();
        Cpu {
            model: field("model name").unwrap_or(std::env::consts::ARCH).into(),
            is_virtual: field("flags").is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
            movdir64b,
            avx512,
            avx2,
            clflushopt,
            clwb,
            line_bytes,
        }
    }
}

/// Limits and resources of the operating system. What cannot be read is left out.
#[derive(Debug, Serialize)]
pub struct System {
    pub kernel: Option<String>,
    /// Huge pages: size in bytes, how many there are, how many are free.
    pub huge_pages: Option<(u64, u64, u64)>,
    /// How much this process may lock, in bytes; `None` = without limit.
    pub memlock_bytes: Option<u64>,
    pub max_map_count: Option<u64>,
    pub shm_bytes: Option<(u64, u64)>,
}

impl System {
    pub fn look() -> System {
        let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let rest = memory.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            rest.split_whitespace().next()?.parse::<u64>().ok()
        };
        let huge_pages = field("Hugepagesize").zip(field("HugePages_Total")).zip(field("HugePages_Free"));
        System {
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().into()),
            huge_pages: huge_pages.map(|((kib, total), free)| (kib << 10, total, free)),
            memlock_bytes: memlock_bytes(),
            max_map_count: number("/proc/sys/vm/max_map_count"),
            shm_bytes: room(Path::new("/dev/shm")),
        }
    }
}

fn memlock_bytes() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` has room for what the kernel writes.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    (is_known && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

pub fn room(directory: &Path) -> Option<(u64, u64)> {
    let path = CString::new(directory.as_os_str().as_encoded_bytes()).ok()?;
    let mut facts = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the path ends with a zero byte and `facts` has room for what the kernel writes.
    if unsafe { libc::statvfs(path.as_ptr(), facts.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so all of it is written.
    let facts = unsafe { facts.assume_init() };
    Some((facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize))
}

/// What a devdax node is bound to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaxBinding {
    /// device_dax: programs can map it.
    DeviceDax,
    /// Another driver, such as kmem, which makes system memory of it.
    Other(String),
    /// Nothing.
    Unbound,
}

impl DaxBinding {
    /// Why a program cannot map it, and what to do; `None` when it can.
    pub fn advice(&self, name: &str) -> Option<String> {
        match self {
            DaxBinding::DeviceDax => None,
            DaxBinding::Other(driver) => Some(format!(
                "{name} is bound to {driver}, not to device_dax (kmem = the kernel uses it as ordinary memory): \
                 daxctl reconfigure-device --mode=devdax --force {name}"
            )),
            DaxBinding::Unbound => Some(format!(
                "{name} has no driver: daxctl reconfigure-device --mode=devdax {name}, or \
                 echo {name} > /sys/bus/dax/drivers/device_dax/bind (new_id instead of bind where that says ENODEV)"
            )),
        }
    }
}

/// The dax devices that the kernel knows, by name.
pub fn dax_devices(sysfs: &Path) -> Vec<(String, DaxBinding)> {
    let Ok(entries) = std::fs::read_dir(sysfs.join("bus/dax/devices")) else { return Vec::new() };
    let mut found: Vec<(String, DaxBinding)> = entries
        .flatten()
        .map(|entry| {
            let driver = std::fs::read_link(entry.path().join("driver")).ok();
            let driver = driver.and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
            let binding = match driver {
                None => DaxBinding::Unbound,
                Some(driver) if driver == "device_dax" => DaxBinding::DeviceDax,
                Some(driver) => DaxBinding::Other(driver),
            };
            (entry.file_name().to_string_lossy().into_owned(), binding)
        })
        .collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    found
}

#[cfg(test)]
mod tests;
