// SPDX-License-Identifier: Apache-2.0
//! What a child tells its parent: lines appended to a file with one write each, so that a kill cuts between lines.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Something that a child did.
pub enum Event {
    /// Counted to this value under the lock.
    Counted(u64),
    /// Got through this many operations.
    Progress(u64),
    /// Found something that must not be.
    Wrong(String),
    /// An error that is no answer to a storm.
    Error(String),
}

/// Opens a log for appending.
pub fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// Appends one event.
pub fn append(log: &mut File, event: &Event) -> std::io::Result<()> {
    let line = match event {
        Event::Counted(value) => format!("counted {value}\n"),
        Event::Progress(operations) => format!("progress {operations}\n"),
        Event::Wrong(what) => format!("wrong {what}\n"),
        Event::Error(what) => format!("error {what}\n"),
    };
    log.write_all(line.as_bytes())
}

/// All that the logs tell together.
#[derive(Default)]
pub struct Summary {
    /// Each value counted, and how often.
    pub counted: HashMap<u64, u32>,
    /// Wrong findings and errors.
    pub bad: Vec<String>,
}

/// Reads a log.
pub fn read(path: &Path, summary: &mut Summary) {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    for line in text.lines() {
        match line.split_once(' ') {
            Some(("counted", value)) => *summary.counted.entry(value.parse().unwrap()).or_default() += 1,
            Some(("progress", _)) => {}
            _ => summary.bad.push(format!("{}: {line}", path.display())),
        }
    }
}

/// How many operations the log's process got through.
pub fn progress(path: &Path) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix("progress ")?.parse().ok()).next_back().unwrap_or(0)
}
