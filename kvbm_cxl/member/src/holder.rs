// SPDX-License-Identifier: Apache-2.0
//! The entry of a host in etcd: one key for each slot, below the key of its pool, tied to a lease.

use crate::error::{Error, Result};
use cxl_pool::media::{Superblock, uuid_text};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The machine, as the pool knows it: 32 hexadecimal digits.
    pub machine: String,
    /// Incarnation under which it has joined last; 0 before it has.
    pub incarnation: u32,
    /// The process that keeps the lease, and when it started in clock ticks since boot: they tell its successor on the same machine that it
    /// is gone.
    pub pid: u32,
    pub start: u32,
}

impl Holder {
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Value { key: "(own)".into(), reason: error.to_string() })
    }

    /// Reads the value of `key`.
    ///
    /// # Errors
    /// [`Error::Value`] when that is not a holder.
    pub fn from_json(key: &str, value: &[u8]) -> Result<Holder> {
        serde_json::from_slice(value).map_err(|error| Error::Value { key: key.into(), reason: error.to_string() })
    }
}

/// Where the slots of one pool stand.
#[derive(Clone, Debug)]
pub struct Keys {
    folder: String,
}

impl Keys {
    /// Those of a pool, below `prefix`.
    pub fn new(prefix: &str, superblock: &Superblock) -> Keys {
        let uuid = uuid_text(superblock.uuid());
        Keys { folder: format!("{}/{uuid}/slots/", prefix.trim_end_matches('/')) }
    }

    /// What all of them begin with.
    pub fn folder(&self) -> &str {
        &self.folder
    }

    pub fn of(&self, slot: u16) -> String {
        format!("{}{slot}", self.folder)
    }

    /// The slot that a key is of; `None` for a key that is no slot's.
    pub fn slot(&self, key: &str) -> Option<u16> {
        let number = key.strip_prefix(&self.folder)?;
        number.parse().ok().filter(|slot: &u16| slot.to_string() == number)
    }
}

#[cfg(test)]
mod tests;
