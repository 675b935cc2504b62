// SPDX-License-Identifier: Apache-2.0
//! The pools that a format overwrites, and their hosts. Each is looked at as a whole, also where the format names only some of its devices:
//! the others have their names in its superblock.

use super::former::FormerHosts;
use super::media::fetch_any_superblock;
use super::{FormatOptions, HeaderContent, OpenOptions, Pool};
use crate::device::{DevicePart, PoolSpec};
use crate::error::{Error, Result};
use crate::host::HostConfig;
use crate::media::{Superblock, uuid_text};
use std::time::{Duration, Instant};

/// How long evicted hosts may take to end what they have under way, in milliseconds.
const EVICT_TIMEOUT_MS: u64 = 60_000;
/// Between two looks at their heartbeats.
const STEP: Duration = Duration::from_millis(10);

#[derive(Default)]
pub(super) struct Before {
    pools: Vec<Former>,
    /// There is one whose hosts cannot be watched: an unknown version, damaged, or in part on devices that were not found.
    has_unseen: bool,
}

struct Former {
    hosts: FormerHosts,
    begun: Instant,
    seed: u32,
}

impl Before {
    /// Opens the pools that are there and sees whether hosts use them. `contents` of the devices, in the order of [`PoolSpec::parts`].
    ///
    /// # Errors
    /// [`Error::InUse`] when some do, and [`Error::HostsUnseen`] where a device of a pool is not found or its version is unknown, unless
    /// hosts are to be evicted.
    pub fn look(spec: &PoolSpec, contents: &[HeaderContent], options: &FormatOptions) -> Result<Before> {
        let at_hand: Vec<_> = spec.parts().zip(contents).collect();
        let (mut before, mut seen) = (Before::default(), Vec::<&Superblock>::new());
        for (part, content) in &at_hand {
            let superblock = match content {
                HeaderContent::Unreadable { uuid, reason, is_sound: true } if !options.evict_hosts => {
                    let (device, pool) = (part.to_string(), uuid_text(uuid));
                    return Err(Error::HostsUnseen { device, pool, reason: reason.clone() });
                }
                _ => content.superblock(),
            };
            let Some(superblock) = superblock else {
                before.has_unseen |= content.is_pool();
                continue;
            };
            if seen.iter().any(|other| superblock.is_copy_of(other)) {
                continue;
            }
            seen.push(superblock);
            match all_parts(superblock, &at_hand).and_then(|parts| Pool::open_parts(parts, &reading(options), fetch_any_superblock)) {
                Ok(pool) => before.pools.push(Former::look(&pool, options)?),
                Err(error) if superblock.devices().len() > 1 && !options.evict_hosts => {
                    return Err(Error::HostsUnseen {
                        device: part.to_string(),
                        pool: uuid_text(superblock.uuid()),
                        reason: error.to_string(),
                    });
                }
                Err(_) => before.has_unseen = true,
            }
        }
        Ok(before)
    }

    /// Whether a line of one of these pools could pass for one of a format with this seed.
    pub fn has_seed(&self, other: u32) -> bool {
        self.pools.iter().any(|pool| pool.seed == other)
    }

    /// Waits until all of their hosts have stopped. The superblocks are void, so each notices with its next heartbeat.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the slots that still run.
    pub fn wait_until_stopped(self) -> Result<()> {
        if self.has_unseen {
            // What cannot be seen gets the time in which a host notices.
            std::thread::sleep(Duration::from_millis(HostConfig::from_env()?.suspect_ms));
        }
        self.pools.into_iter().try_for_each(Former::wait_until_stopped)
    }
}

impl Former {
    fn look(pool: &Pool, options: &FormatOptions) -> Result<Former> {
        let seed = pool.lines().crc_seed();
        let (begun, patience_ns) = (Instant::now(), HostConfig::from_env()?.suspect_ms * 1_000_000);
        let mut hosts = FormerHosts::new(pool.lines().clone(), patience_ns, 0)?;
        while !options.evict_hosts && !hosts.look(since(begun))? {
            let slots = hosts.at_work();
            if !slots.is_empty() {
                return Err(Error::InUse { slots });
            }
            std::thread::sleep(STEP);
        }
        Ok(Former { hosts, begun, seed })
    }

    fn wait_until_stopped(self) -> Result<()> {
        let Former { mut hosts, begun, .. } = self;
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

/// The parts of all devices of a pool: those at hand that are its, and the others by their names in its superblock.
fn all_parts(superblock: &Superblock, at_hand: &[(DevicePart, &HeaderContent)]) -> Result<Vec<DevicePart>> {
    let holds = |content: &HeaderContent, index| {
        content.superblock().is_some_and(|found| found.is_copy_of(superblock) && found.device_index() == index)
    };
    let part = |(index, name): (usize, String)| match at_hand.iter().find(|(_, content)| holds(content, index)) {
        Some((part, _)) => Ok(part.clone()),
        None => name.parse(),
    };
    superblock.devices().into_iter().map(|record| record.name).enumerate().map(part).collect()
}

pub(super) fn reading(options: &FormatOptions) -> OpenOptions {
    OpenOptions { read_only: true, memory: options.memory, sysfs: options.sysfs.clone() }
}

fn since(begun: Instant) -> u64 {
    begun.elapsed().as_nanos() as u64
}
