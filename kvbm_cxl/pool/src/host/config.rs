// SPDX-License-Identifier: Apache-2.0
//! How a host behaves.

use crate::cpus::CpuBinding;
use crate::error::{Error, Result};
use crate::platform::MachineId;

/// Environment variable with the silence after which a host is suspected, in milliseconds.
pub const ENV_SUSPECT_MS: &str = "CXL_SUSPECT_MS";
/// Environment variable with the period in which a member looks for recalls and fences, in microseconds.
pub const ENV_POLL_US: &str = "CXL_POLL_US";
/// Longest patience, in milliseconds: eleven days.
const MAX_SUSPECT_MS: u64 = 1_000_000_000;
/// Least wait for a manager where none is given, in milliseconds.
const LEAST_TIMEOUT_MS: u64 = 10_000;
/// What the wait for two failovers has to spare, in milliseconds.
const SPARE_MS: u64 = 5_000;
/// Longest period, in microseconds: a host that learns of its fence no sooner than that has to be safe all the same, and is only late.
const MAX_POLL_US: u64 = 1_000_000;

/// How a host behaves. The times are counted on this host's own clock.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Slot to ask for; a wish, the binding decides. `None` takes any free one.
    pub slot: Option<u16>,
    /// Machines that the superblock reserves seats for, by seat; the rest is claimed while the pool runs.
    pub seats: Vec<MachineId>,
    /// Deadline of a join, in milliseconds; `None` = [`HostConfig::default_timeout_ms`].
    pub join_timeout_ms: Option<u64>,
    /// Period of the heartbeat, in milliseconds. The same on every host.
    pub heartbeat_ms: u64,
    /// A host (or manager) whose heartbeat did not move for this long is suspected, in milliseconds. The same on every host.
    pub suspect_ms: u64,
    /// A line of locks, fences or bindings that did not verify for so long counts as damaged: calls that need it fail at once from then on,
    /// until the service finds it whole again. In milliseconds.
    pub damage_ms: u64,
    /// Period in which the service looks for recalls and fences, in microseconds; its thread looks half as often once it found nothing for
    /// some hundred rounds, twice a heartbeat while no lock is held or wanted that it would look after, and four times as often for some
    /// rounds after a lock changed hands.
    pub poll_us: u64,
    /// A sticky lock that was unused here for this long is given back, in milliseconds.
    pub idle_release_ms: u64,
    /// Where the threads of this process run that work for the pool. Choices that name a node or the device are replaced by sets of CPUs
    /// when a pool is joined ([`crate::Pool::join`]).
    pub cpus: CpuBinding,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            slot: None,
            seats: Vec::new(),
            join_timeout_ms: None,
            heartbeat_ms: 50,
            suspect_ms: 1_000,
            damage_ms: 1_000,
            poll_us: 1_000,
            idle_release_ms: 10_000,
            cpus: CpuBinding::default(),
        }
    }
}

impl HostConfig {
    /// The defaults, but for what the environment says.
    ///
    /// `CXL_SUSPECT_MS`: machines whose processors are taken away for longer than a second (overcommitted virtual machines, suspended
    /// laptops) are taken for dead otherwise. `CXL_POLL_US`: where looking is dear (emulated processors), an idle member does little else.
    ///
    /// `CXL_CPUS`: on which CPUs the threads of the pool run.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one of them says nothing that can be meant.
    pub fn from_env() -> Result<Self> {
        let config = Self::from(|name| match std::env::var(name) {
            Ok(text) => Ok(Some(text)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(error) => Err(Error::Invalid(format!("{name}: {error}"))),
        })?;
        Ok(HostConfig { cpus: CpuBinding::from_env()?, ..config })
    }

    fn from(said: impl Fn(&str) -> Result<Option<String>>) -> Result<Self> {
        let number = |name: &str, otherwise: u64, least: u64, most: u64| match said(name)? {
            None => Ok(otherwise),
            Some(text) => match text.trim().parse() {
                Ok(number) if (least..=most).contains(&number) => Ok(number),
                _ => Err(Error::Invalid(format!("{name} is {text:?}, and has to be a number from {least} to {most}"))),
            },
        };
        let config = Self::default();
        // Less would let live hosts be taken for dead.
        let suspect_ms = number(ENV_SUSPECT_MS, config.suspect_ms, 2 * config.heartbeat_ms, MAX_SUSPECT_MS)?;
        let poll_us = number(ENV_POLL_US, config.poll_us, 1, MAX_POLL_US)?;
        Ok(HostConfig { suspect_ms, poll_us, ..config })
    }

    /// Longest wait for a manager (for a lock, for a slot) where the caller gives none: the manager may be killed, and its successor,
    /// too, each of which costs half as much again as [`HostConfig::suspect_ms`] (LOCKS.md 12.21).
    pub fn default_timeout_ms(&self) -> u64 {
        self.suspect_ms.saturating_mul(3).saturating_add(SPARE_MS).max(LEAST_TIMEOUT_MS)
    }

    /// Deadline of a join.
    pub fn join_timeout_ms(&self) -> u64 {
        self.join_timeout_ms.unwrap_or_else(|| self.default_timeout_ms())
    }

    /// Refuses periods with which live hosts would be taken for dead, as a join does.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming them.
    pub fn check(&self) -> Result<()> {
        if self.suspect_ms / 2 < self.heartbeat_ms {
            return Err(Error::Invalid(format!(
                "suspect_ms ({}) has to be a multiple of heartbeat_ms ({}), or live hosts would be taken for dead",
                self.suspect_ms, self.heartbeat_ms
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_numbers_that_let_live_hosts_live() {
        let with = |name: &'static str, text: &'static str| HostConfig::from(move |asked| Ok((asked == name).then(|| text.into())));
        assert_eq!(with(ENV_SUSPECT_MS, " 4000 ").unwrap().suspect_ms, 4_000);
        assert_eq!(with(ENV_SUSPECT_MS, "100").unwrap().suspect_ms, 100);
        assert_eq!(with(ENV_POLL_US, "40000").unwrap().poll_us, 40_000);
        for (name, wrong) in [(ENV_SUSPECT_MS, "99"), (ENV_SUSPECT_MS, "1000000001"), (ENV_POLL_US, "0"), (ENV_POLL_US, "1000001")] {
            let told = with(name, wrong).unwrap_err().to_string();
            assert!(told.contains(name) && told.contains(wrong), "{told}");
        }
        for wrong in ["", "4s", "-1", "1.5"] {
            assert!(with(ENV_SUSPECT_MS, wrong).is_err() && with(ENV_POLL_US, wrong).is_err(), "{wrong:?}");
        }
        let patient = |suspect_ms| HostConfig { suspect_ms, ..HostConfig::default() }.default_timeout_ms();
        assert_eq!([100, 1_000, 5_000, 60_000].map(patient), [10_000, 10_000, 20_000, 185_000]);
        assert!(HostConfig { suspect_ms: 99, ..HostConfig::default() }.check().is_err());
    }
}
