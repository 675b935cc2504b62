// SPDX-License-Identifier: Apache-2.0
//! A record of the requests to the cache and of its publishes, for `cxlctl record` and `cxl-plan`: lists of block ids, no prompts.
//!
//! An id is a hash of a secret salt and the block's name, so that a reader without the salt cannot find out the requests by guessing
//! prompts, while equal blocks have equal ids on all hosts that were given the same salt. Each process writes a file of its own:
//!
//! - the first line says by whom: `{"recorder": 1, "salt": "0f3a...", "block_tokens": 64, "host": "a", "process": 17}`, where `salt` is a
//!   fingerprint of the salt;
//! - a request: `{"at_us": 1764131234567890, "input_length": 700, "found": 640, "hash_ids": [1, 2, ...]}`, microseconds of the system's
//!   clock, tokens, tokens that were found, and an id for each whole block;
//! - the blocks published for one: `{"at_us": ..., "published": [2, ...]}`;
//! - the last line, where the process ended in good order: `{"at_us": ..., "dropped": 0, "failed": 0}`, entries that are missing.
//!
//! Callers never wait for the file: they leave a copy of the keys in a bounded queue, and a thread hashes and writes. Entries that do not
//! fit are dropped and counted. So are those that come once the file has its full length, and those that cannot be written; a file always
//! ends with a whole line.

use super::{BlockKey, Namespace};
use crate::background::{Background, FailedRounds, held};
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// First bytes of what an id digests.
const ID_DOMAIN: &[u8; 24] = b"kvbm-cxl trace id v1\0\0\0\0";
/// First bytes of what the fingerprint of a salt digests.
const SALT_DOMAIN: &[u8; 24] = b"kvbm-cxl trace salt v1\0\0";
/// Bits of an id: as many as every reader of JSON keeps exactly.
const ID_BITS: u32 = 53;
/// Bytes of entries that wait to be written.
const MOST_WAITING_BYTES: usize = 4 << 20;
/// Rest of the thread between two writes.
const REST: Duration = Duration::from_millis(200);
/// Bytes of a file at least.
const LEAST_BYTES: u64 = 1024;
/// Bytes that are kept free for the last line.
const END_BYTES: u64 = 128;
/// Bytes of lines that are composed before they are written.
const WRITTEN_TOGETHER: usize = 64 << 10;

/// Where and how a process records.
#[derive(Clone)]
pub struct TraceConfig {
    /// The folder that gets the file. It is made if it is not there.
    pub directory: PathBuf,
    /// The secret that ids depend on. Hosts whose files are to be merged have the same.
    pub salt: String,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Longest file, in bytes; at least 1024.
    pub most_bytes: u64,
}

impl std::fmt::Debug for TraceConfig {
    /// Without the salt.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TraceConfig { directory, block_tokens, most_bytes, .. } = self;
        write!(f, "TraceConfig {{ directory: {directory:?}, block_tokens: {block_tokens}, most_bytes: {most_bytes} }}")
    }
}

/// Entries so far, of a recorder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceCounts {
    /// In the file.
    pub written: u64,
    /// Not recorded, because the queue or the file was full.
    pub dropped: u64,
    /// Not recorded, because writing failed.
    pub failed: u64,
}

enum What {
    Asked { tokens: u64, found_tokens: u64 },
    Published,
}

struct Recorded {
    at_us: u64,
    what: What,
    namespace: Namespace,
    keys: Box<[BlockKey]>,
}

#[derive(Default)]
struct Queue {
    entries: Vec<Recorded>,
    len_bytes: usize,
}

#[derive(Default)]
struct Counted {
    written: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicU64,
}

/// Records lookups and publishes of this process. Dropping it writes what waits and ends the file.
pub struct TraceRecorder {
    queue: Arc<Mutex<Queue>>,
    counted: Arc<Counted>,
    failed_rounds: Arc<FailedRounds>,
    path: PathBuf,
    _thread: Background,
}

impl TraceRecorder {
    /// Makes a file in the folder and begins.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a salt or with blocks of no tokens; [`Error::Os`] where there can be no file or no thread.
    pub fn start(config: &TraceConfig) -> Result<TraceRecorder> {
        if config.salt.is_empty() || config.block_tokens == 0 || config.most_bytes < LEAST_BYTES {
            let what = "a trace recorder needs a salt (one secret on all hosts whose files are to be merged), the tokens of a block, and \
                        1024 bytes";
            return Err(Error::Invalid(what.into()));
        }
        let (host, process) = (host_name(), std::process::id());
        let (file, path) = make_file(&config.directory, &host, process)?;
        let head = format!(
            "{{\"recorder\": 1, \"salt\": \"{}\", \"block_tokens\": {}, \"host\": \"{host}\", \"process\": {process}}}\n",
            fingerprint(&config.salt),
            config.block_tokens
        );
        let (queue, counted, failed_rounds) = (Arc::<Mutex<Queue>>::default(), Arc::<Counted>::default(), Arc::<FailedRounds>::default());
        let mut writer = Writer {
            file,
            path: path.clone(),
            len_bytes: 0,
            most_bytes: config.most_bytes,
            salt: config.salt.clone(),
            counted: counted.clone(),
            is_full: false,
        };
        writer.append(&head)?;
        let mut round = Round { writer, queue: queue.clone(), failed_rounds: failed_rounds.clone() };
        let thread = Background::start("cxl-trace", "start the thread of the trace recorder", None, move || {
            round.run();
            Some(REST)
        })?;
        Ok(TraceRecorder { queue, counted, failed_rounds, path, _thread: thread })
    }

    /// A request: the keys of its whole blocks, from its first block on, its tokens, and those of them that were found. Never waits.
    pub fn asked(&self, namespace: Namespace, keys: &[BlockKey], tokens: u64, found_tokens: u64) {
        self.enter(What::Asked { tokens, found_tokens: found_tokens.min(tokens) }, namespace, keys);
    }

    /// Blocks that were published. Never waits.
    pub fn published(&self, namespace: Namespace, keys: &[BlockKey]) {
        if !keys.is_empty() {
            self.enter(What::Published, namespace, keys);
        }
    }

    fn enter(&self, what: What, namespace: Namespace, keys: &[BlockKey]) {
        let needed = size_of::<Recorded>() + size_of_val(keys);
        // Only ever held for steps in memory.
        let mut queue = held(&self.queue);
        if queue.len_bytes + needed > MOST_WAITING_BYTES {
            drop(queue);
            self.counted.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.len_bytes += needed;
        queue.entries.push(Recorded { at_us: now_us(), what, namespace, keys: keys.into() });
    }

    /// Entries so far.
    pub fn counts(&self) -> TraceCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TraceCounts { written: of(&self.counted.written), dropped: of(&self.counted.dropped), failed: of(&self.counted.failed) }
    }

    /// Why entries could not be written, the last time that this was so.
    pub fn last_error(&self) -> Option<String> {
        self.failed_rounds.last().map(|failed| failed.message)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The id of a block under a salt.
pub fn trace_id(salt: &str, namespace: Namespace, key: BlockKey) -> u64 {
    let mut hash = Sha256::new();
    hash.update(ID_DOMAIN);
    hash.update((salt.len() as u64).to_le_bytes());
    hash.update(salt.as_bytes());
    hash.update(namespace.0);
    hash.update(key.0);
    let digest = hash.finalize();
    digest.iter().take(8).fold(0, |id, &byte| id << 8 | u64::from(byte)) >> (64 - ID_BITS)
}

fn fingerprint(salt: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(SALT_DOMAIN);
    hash.update(salt.as_bytes());
    hash.finalize().iter().take(8).fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// The machine's name as far as it may stand in a file's name and in JSON.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let plain: String = name.trim().chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).take(64).collect();
    if plain.is_empty() { "host".into() } else { plain }
}

fn make_file(directory: &Path, host: &str, process: u32) -> Result<(File, PathBuf)> {
    let failed = |path: &Path, source| Error::Os { what: format!("making the trace file {}", path.display()), source };
    std::fs::create_dir_all(directory).map_err(|source| failed(directory, source))?;
    let mut last = None;
    for number in 0..1000u32 {
        let path = directory.join(format!("{host}-{process}-{}-{number}.trace.jsonl", now_us()));
        // For its owner alone: lengths and times of requests tell something, too.
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => last = Some((path, error)),
            Err(error) => return Err(failed(&path, error)),
        }
    }
    Err(last.map_or_else(|| Error::Invalid("no name for a trace file".into()), |(path, error)| failed(&path, error)))
}

/// The thread's part. Dropped with the thread, it writes what waits.
struct Round {
    writer: Writer,
    queue: Arc<Mutex<Queue>>,
    failed_rounds: Arc<FailedRounds>,
}

impl Round {
    fn run(&mut self) {
        let taken = std::mem::take(&mut *held(&self.queue));
        if let Err(error) = self.writer.write(&taken.entries) {
            self.failed_rounds.record("the trace recorder", &error);
        }
    }
}

impl Drop for Round {
    fn drop(&mut self) {
        self.run();
        if let Err(error) = self.writer.end() {
            self.failed_rounds.record("the trace recorder", &error);
        }
    }
}

struct Writer {
    file: File,
    path: PathBuf,
    len_bytes: u64,
    most_bytes: u64,
    salt: String,
    counted: Arc<Counted>,
    is_full: bool,
}

impl Writer {
    fn write(&mut self, entries: &[Recorded]) -> Result<()> {
        let (mut text, mut lines, mut done) = (String::new(), 0, Ok(()));
        for entry in entries {
            let start = text.len();
            self.line(entry, &mut text);
            if self.is_full || self.len_bytes + text.len() as u64 + END_BYTES > self.most_bytes {
                // Nothing after it either: a record with holes would be another trace.
                self.is_full = true;
                text.truncate(start);
                self.counted.dropped.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            lines += 1;
            if text.len() >= WRITTEN_TOGETHER {
                done = done.and(self.append_lines(&text, lines));
                (text, lines) = (String::new(), 0);
            }
        }
        done.and(self.append_lines(&text, lines))
    }

    /// The last line.
    fn end(&mut self) -> Result<()> {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (dropped, failed) = (of(&self.counted.dropped), of(&self.counted.failed));
        self.append(&format!("{{\"at_us\": {}, \"dropped\": {dropped}, \"failed\": {failed}}}\n", now_us()))
    }

    fn append_lines(&mut self, text: &str, lines: u64) -> Result<()> {
        let appended = self.append(text);
        let counter = if appended.is_ok() { &self.counted.written } else { &self.counted.failed };
        counter.fetch_add(lines, Ordering::Relaxed);
        appended
    }

    fn append(&mut self, text: &str) -> Result<()> {
        let written = self.file.write_all(text.as_bytes());
        let Err(source) = written else {
            self.len_bytes += text.len() as u64;
            return Ok(());
        };
        // Where even that fails, the next line begins in the middle of another, and `cxlctl record` names it.
        let _ = self.file.set_len(self.len_bytes).and_then(|()| self.file.seek(SeekFrom::Start(self.len_bytes)));
        Err(Error::Os { what: format!("writing the trace file {}", self.path.display()), source })
    }

    fn line(&self, entry: &Recorded, text: &mut String) {
        let name = match &entry.what {
            What::Asked { tokens, found_tokens } => {
                // Writing to a string cannot fail.
                let _ = write!(text, "{{\"at_us\": {}, \"input_length\": {tokens}, \"found\": {found_tokens}, ", entry.at_us);
                "hash_ids"
            }
            What::Published => {
                let _ = write!(text, "{{\"at_us\": {}, ", entry.at_us);
                "published"
            }
        };
        let _ = write!(text, "\"{name}\": [");
        for (place, &key) in entry.keys.iter().enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            let _ = write!(text, "{comma}{}", trace_id(&self.salt, entry.namespace, key));
        }
        text.push_str("]}\n");
    }
}

#[cfg(test)]
mod tests;
