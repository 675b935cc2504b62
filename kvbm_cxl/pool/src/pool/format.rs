// SPDX-License-Identifier: Apache-2.0
//! Formatting over what lies on the devices, and erasing it: the hosts of a pool there stop before the first line of the new one is
//! written.

use super::former::FormerHosts;
use super::{FormatOptions, OpenOptions, Pool, erase_superblocks, inspect_header};
use crate::coherence::{CoherenceOptions, over_mapping};
use crate::device::{Access, Device, PoolSpec, map_header};
use crate::error::{Error, Result};
use crate::host::HostConfig;
use crate::line::crc_seed;
use crate::machine::random_bytes;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long evicted hosts may take to end what they have under way, in milliseconds.
const EVICT_TIMEOUT_MS: u64 = 60_000;
/// Between two looks at their heartbeats.
const STEP: Duration = Duration::from_millis(10);

/// The pool that a format overwrites.
pub(super) enum Before {
    /// None.
    Nothing,
    /// One whose lines cannot be read: another version, or damaged. Its hosts cannot be seen.
    Unreadable,
    /// One whose hosts can be watched.
    Readable { hosts: FormerHosts, begun: Instant, seed: u32 },
}

impl Before {
    /// Opens the pool that is there and sees whether hosts use it.
    ///
    /// # Errors
    /// [`Error::InUse`] when some do, unless they are to be evicted.
    pub fn look(spec: &PoolSpec, options: &FormatOptions) -> Result<Before> {
        let reading = OpenOptions { read_only: true, memory: options.memory, sysfs: options.sysfs.clone() };
        let Ok(pool) = Pool::open(spec, &reading) else { return Ok(Before::Unreadable) };
        let seed = crc_seed(pool.superblock().uuid(), pool.superblock().incarnation());
        let (begun, patience_ns) = (Instant::now(), HostConfig::from_env()?.suspect_ms * 1_000_000);
        let mut hosts = FormerHosts::new(pool.lines().clone(), patience_ns, 0)?;
        while !options.evict_hosts && !hosts.look(since(begun))? {
            let slots = hosts.at_work();
            if !slots.is_empty() {
                return Err(Error::InUse { slots });
            }
            std::thread::sleep(STEP);
        }
        Ok(Before::Readable { hosts, begun, seed })
    }

    /// Whether a line of that pool could pass for one of a format with this seed.
    pub fn has_seed(&self, other: u32) -> bool {
        matches!(self, Before::Readable { seed, .. } if *seed == other)
    }

    /// Waits until all of its hosts have stopped. The superblocks are void, so each notices with its next heartbeat.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the slots that go on.
    pub fn wait_until_stopped(self) -> Result<()> {
        let (mut hosts, begun) = match self {
            Before::Nothing => return Ok(()),
            Before::Unreadable => {
                // What cannot be seen gets the time in which a host notices.
                std::thread::sleep(Duration::from_millis(HostConfig::from_env()?.suspect_ms));
                return Ok(());
            }
            Before::Readable { hosts, begun, .. } => (hosts, begun),
        };
        let deadline = Instant::now() + Duration::from_millis(EVICT_TIMEOUT_MS);
        while !hosts.look(since(begun))? {
            if Instant::now() >= deadline {
                let what = format!(
                    "the evicted hosts of slots {:?} to end what they have under way (the superblock is void; end their processes and \
                     format again)",
                    hosts.live()
                );
                return Err(Error::Timeout { what, timeout_ms: EVICT_TIMEOUT_MS });
            }
            std::thread::sleep(STEP);
        }
        Ok(())
    }
}

/// Makes the superblocks of a pool void, once its hosts have stopped: from then on its parts of the devices are free. Its blocks stay where
/// they are until a format or its hosts write there.
pub(super) fn erase(spec: &PoolSpec, options: &FormatOptions) -> Result<()> {
    let mut devices = Vec::with_capacity(spec.devices().len());
    for part in spec.parts() {
        let device = part.open(Access::Write, &options.sysfs)?;
        // The header alone, so that pools beside it are formatted meanwhile.
        let unit_bytes = device.info().unit_bytes();
        devices.push(device.part(part.offset_bytes, Some(unit_bytes))?);
    }
    super::refuse_duplicates(&devices)?;
    let _turns = devices.iter().map(Device::lock_for_format).collect::<Result<Vec<_>>>()?;
    let mut headers = Vec::with_capacity(devices.len());
    for device in &devices {
        let header = over_mapping(map_header(device)?, &CoherenceOptions::default())?;
        let found = inspect_header(&*header.memory, 0, &device.info().label())?;
        if !found.is_pool() {
            return Err(device.refuse(format!("it holds {found}, and no pool that could be erased")));
        }
        headers.push(header);
    }
    let before = Before::look(spec, options)?;
    headers.iter().try_for_each(|header| erase_superblocks(&*header.memory, 1))?;
    before.wait_until_stopped()
}

fn since(begun: Instant) -> u64 {
    begun.elapsed().as_nanos() as u64
}

/// An incarnation whose checksums begin elsewhere than those of the pool before.
pub(super) fn new_incarnation(uuid: &[u8; 16], before: &Before) -> Result<u64> {
    let first = u64::from_le_bytes(random_bytes()?).max(1);
    Ok((first..=u64::MAX).find(|&incarnation| !before.has_seed(crc_seed(uuid, incarnation))).unwrap_or(first))
}

/// Opens the devices of a new pool. Files that are made here go again unless the format succeeds.
pub(super) fn open_devices(spec: &PoolSpec, options: &FormatOptions) -> Result<(Vec<Device>, Made)> {
    let mut made = Made(Vec::new());
    let mut devices = Vec::with_capacity(spec.devices().len());
    for part in spec.parts() {
        // A file is made as one pool: how long one for several has to be, a part of it does not say.
        let (device, is_new) = match part.size_bytes {
            Some(len_bytes) if part.offset_bytes == 0 => Device::open_or_create(&part.path, len_bytes, &options.sysfs)?,
            _ => (Device::open(&part.path, Access::Write, &options.sysfs)?, false),
        };
        if is_new {
            made.0.push(part.path.clone());
        }
        devices.push(device.part(part.offset_bytes, part.size_bytes)?);
    }
    Ok((devices, made))
}

/// Files that a format made: removed when it fails, so that the next one, with other numbers, does not find them.
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    /// The format succeeded.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // The error that the format ends with says more than one that tells of a file left behind.
        self.0.iter().for_each(|path| drop(std::fs::remove_file(path)));
    }
}
