// SPDX-License-Identifier: Apache-2.0
//! The entry of a host in etcd: one key for each slot, below the key of its pool, tied to a lease.

use crate::error::{Error, Result};
use cxl_pool::media::{Superblock, uuid_text};
use serde::{Deserialize, Serialize};

/// Who has a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The machine, as the pool knows it: 32 hexadecimal digits.
    pub machine: String,
    /// Incarnation under which it has joined last; 0 before it has.
    pub incarnation: u32,
    /// The process that keeps the lease, and when it started in clock ticks since boot: they tell its successor on the same machine that it
    /// is gone.
    pub pid: u32,
    /// See `pid`.
    pub start: u32,
}

impl Holder {
    /// As it stands in etcd.
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

    /// The key of a slot.
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
mod tests {
    use super::*;

    #[test]
    fn only_keys_of_slots_are_slots() {
        let keys = Keys { folder: "kvbm-cxl/ab/slots/".into() };
        assert_eq!(keys.slot(&keys.of(63)), Some(63));
        for key in [
            "kvbm-cxl/ab/slots/",
            "kvbm-cxl/ab/slots/x",
            "kvbm-cxl/ab/slots/01",
            "kvbm-cxl/ab/slots/65536",
            "other/1",
            "kvbm-cxl/ac/slots/1",
        ] {
            assert_eq!(keys.slot(key), None, "{key}");
        }
    }

    #[test]
    fn what_is_no_holder_is_an_error_that_names_the_key() {
        let holder = Holder { machine: "0f".repeat(16), incarnation: 7, pid: 1, start: 2 };
        assert_eq!(Holder::from_json("k", holder.to_json().unwrap().as_bytes()).unwrap(), holder);
        for value in [&b""[..], b"{}", b"\xff\xfe", b"{\"machine\": 1}", b"[1"] {
            let error = Holder::from_json("some/key", value).unwrap_err().to_string();
            assert!(error.contains("some/key"), "{error}");
        }
    }
}
