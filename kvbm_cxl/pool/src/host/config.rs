// SPDX-License-Identifier: Apache-2.0
//! How a host behaves.

use crate::error::{Error, Result};
use crate::platform::MachineId;

/// The environment variable that [`HostConfig::from_env`] reads.
pub const ENV_SUSPECT_MS: &str = "CXL_SUSPECT_MS";
/// Longest patience, in milliseconds: eleven days.
const MAX_SUSPECT_MS: u64 = 1_000_000_000;

/// How a host behaves. The times are counted on this host's own clock.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Slot to ask for; a wish, the binding decides. `None` takes any free one.
    pub slot: Option<u16>,
    /// Machines that the superblock's seat table names, by seat; the rest is bound while the pool runs.
    pub seats: Vec<MachineId>,
    /// Deadline of a join, in milliseconds.
    pub join_timeout_ms: u64,
    /// Period of the heartbeat, in milliseconds. The same on every host.
    pub heartbeat_ms: u64,
    /// A host (or manager) whose heartbeat did not move for this long is suspected, in milliseconds. The same on every host.
    pub suspect_ms: u64,
    /// Period in which the service looks for recalls and fences, in microseconds.
    pub poll_us: u64,
    /// A sticky lock that nobody here used for this long is given back, in milliseconds.
    pub idle_release_ms: u64,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            slot: None,
            seats: Vec::new(),
            join_timeout_ms: 10_000,
            heartbeat_ms: 50,
            suspect_ms: 1_000,
            poll_us: 1_000,
            idle_release_ms: 10_000,
        }
    }
}

impl HostConfig {
    /// The defaults, with the patience that `CXL_SUSPECT_MS` says where it is set: machines whose processors are taken away for longer than
    /// a second (overcommitted virtual machines, suspended laptops) are taken for dead otherwise.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it says no number of milliseconds that can be meant.
    pub fn from_env() -> Result<Self> {
        match std::env::var(ENV_SUSPECT_MS) {
            Ok(text) => Self::with_patience(&text),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(error) => Err(Error::Invalid(format!("{ENV_SUSPECT_MS}: {error}"))),
        }
    }

    fn with_patience(text: &str) -> Result<Self> {
        let config = match text.trim().parse() {
            Ok(suspect_ms) if suspect_ms <= MAX_SUSPECT_MS => HostConfig { suspect_ms, ..Self::default() },
            _ => return Err(Error::Invalid(format!("{ENV_SUSPECT_MS}: {text:?} is no number of milliseconds up to {MAX_SUSPECT_MS}"))),
        };
        config.check().map_err(|error| Error::Invalid(format!("{ENV_SUSPECT_MS}: {error}")))?;
        Ok(config)
    }

    /// Refuses periods with which live hosts would be taken for dead.
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
    fn patience_is_a_number_that_lets_live_hosts_live() {
        assert_eq!(HostConfig::with_patience(" 4000 ").unwrap().suspect_ms, 4_000);
        assert_eq!(HostConfig::with_patience("100").unwrap().suspect_ms, 100);
        for wrong in ["", "4s", "-1", "99", "0", "1000000001", "1.5"] {
            let told = HostConfig::with_patience(wrong).unwrap_err().to_string();
            assert!(told.contains(ENV_SUSPECT_MS), "{wrong:?}: {told}");
        }
    }
}
