// SPDX-License-Identifier: Apache-2.0
//! What a child tells its parent: lines appended to a file with one write each, so that a kill cuts between lines.
//!
//! `counts START name=value ...` says what a start has counted so far; the last one of a start is its sum. `calm START` says that it got
//! on after the storm. Anything else is something that must not be.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The log of one start.
pub struct Log {
    start: u64,
    file: Mutex<File>,
}

impl Log {
    /// Opens a log for appending.
    pub fn open(path: &Path, start: u64) -> std::io::Result<Log> {
        Ok(Log { start, file: Mutex::new(OpenOptions::new().create(true).append(true).open(path)?) })
    }

    fn append(&self, line: &str) -> std::io::Result<()> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(line.as_bytes())
    }

    /// What was counted so far.
    pub fn counts(&self, counts: impl Iterator<Item = (String, u64)>) -> std::io::Result<()> {
        let counts = counts.filter(|(_, value)| *value != 0).map(|(name, value)| format!(" {name}={value}"));
        self.append(&format!("counts {}{}\n", self.start, counts.collect::<String>()))
    }

    /// This start gets on.
    pub fn calm(&self) -> std::io::Result<()> {
        self.append(&format!("calm {}\n", self.start))
    }

    /// Something that must not be.
    pub fn bad(&self, what: &str) -> std::io::Result<()> {
        self.append(&format!("bad {} {what}\n", self.start))
    }
}

/// All that logs tell together.
#[derive(Default)]
pub struct Summary {
    /// What every start counted last.
    last: HashMap<u64, Vec<(String, u64)>>,
    /// Starts that got on after the storm.
    pub calm: Vec<u64>,
    /// What must not be.
    pub bad: Vec<String>,
}

impl Summary {
    /// Adds a log.
    pub fn read(&mut self, path: &Path) {
        for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
            let mut words = line.split(' ');
            let (kind, start) = (words.next(), words.next().and_then(|start| start.parse::<u64>().ok()));
            match (kind, start) {
                (Some("counts"), Some(start)) => {
                    let counts = words.filter_map(|word| word.split_once('='));
                    self.last.insert(start, counts.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect());
                }
                (Some("calm"), Some(start)) => self.calm.push(start),
                _ => self.bad.push(line.to_owned()),
            }
        }
    }

    /// What the last starts counted that did not get on.
    pub fn others(&self) -> Vec<(u64, String)> {
        let first = self.calm.iter().min().copied().unwrap_or(0).saturating_sub(8);
        let others = self.last.iter().filter(|(start, _)| **start >= first && !self.calm.contains(start));
        others.map(|(start, counts)| (*start, format!("{counts:?}"))).collect()
    }

    /// The sums over all starts, by name.
    pub fn sums(&self) -> BTreeMap<&str, u64> {
        let mut sums = BTreeMap::new();
        for (name, value) in self.last.values().flatten() {
            *sums.entry(name.as_str()).or_default() += value;
        }
        sums
    }
}
