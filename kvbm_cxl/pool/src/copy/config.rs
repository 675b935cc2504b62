// SPDX-License-Identifier: Apache-2.0
//! How copies are made, and how that is written.
//!
//! `CXL_COPY` is `name=value` pairs separated by commas; a name that is left out keeps its default:
//!
//! ```text
//! CXL_COPY=engine=cpu,workers=3,parallel_from=1M,window=2M,stream_from=64K
//! CXL_COPY=read_ahead=auto,ahead_page=4K
//! ```

use crate::device::parse_size;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::fmt;
use std::str::FromStr;

/// The environment variable that [`CopyConfig::from_env`] reads.
pub const ENVIRONMENT: &str = "CXL_COPY";

/// Which engine is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// The accelerator where there is a user work queue that can be opened, the CPU otherwise.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The accelerator; without one it is an error.
    Dsa,
}

impl EngineChoice {
    const ALL: [(EngineChoice, &'static str); 3] = [(Self::Auto, "auto"), (Self::Cpu, "cpu"), (Self::Dsa, "dsa")];
}

/// How many blocks of a list, after the one that is copied, a device gets hints for, so that it fetches their pages from its flash
/// meanwhile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadAhead {
    /// Of none: right for memory, which has nothing to fetch.
    #[default]
    Off,
    /// As many as it takes, found while blocks are copied; none where it takes none.
    Auto,
    /// So many, 1 to [`MAX_BLOCKS_AHEAD`].
    Blocks(usize),
}

/// Most blocks that a device gets hints for: those of a long list would push each other out of its memory.
pub const MAX_BLOCKS_AHEAD: usize = 8;

impl FromStr for ReadAhead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "off" => Ok(ReadAhead::Off),
            "auto" => Ok(ReadAhead::Auto),
            count => match count.parse() {
                Ok(count @ 1..=MAX_BLOCKS_AHEAD) => Ok(ReadAhead::Blocks(count)),
                _ => Err(Error::Invalid(format!("read_ahead={text}: want off, auto, or 1 to {MAX_BLOCKS_AHEAD} blocks"))),
            },
        }
    }
}

impl fmt::Display for ReadAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadAhead::Off => f.write_str("off"),
            ReadAhead::Auto => f.write_str("auto"),
            ReadAhead::Blocks(count) => count.fmt(f),
        }
    }
}

/// How copies are made. The defaults were measured on one socket with ordinary memory; [`CopyConfig::measure`] asks the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyConfig {
    /// Which engine [`super::engine`] makes.
    pub engine: EngineChoice,
    /// Threads that help the caller of a large copy, started when the first one is needed; 0 = the caller works alone.
    pub workers: usize,
    /// Copies of at least so many bytes are divided among the workers.
    pub parallel_from_bytes: u64,
    /// A pull flushes so many bytes ahead of those that it copies: a multiple of 64, at least 4096.
    pub window_bytes: usize,
    /// Pulls of at least so many bytes write their destination past the caches, piece by piece from 4 KiB on.
    pub stream_from_bytes: u64,
    /// The blocks that a device gets hints for before they are copied.
    pub read_ahead: ReadAhead,
    /// What the device fetches for one line of it, in bytes: a page of its flash, or more where it reads on by itself, as 36 KiB where a
    /// miss brings eight pages besides its own. A multiple of 4096, at most 1 MiB.
    pub ahead_page_bytes: usize,
}

/// Smallest window, in bytes: a fence for less costs more than the copy.
const MIN_WINDOW_BYTES: usize = 4096;
/// Most workers: more than any machine's memory channels can use.
const MAX_WORKERS: usize = 64;
/// Least and most that a device fetches for one line, in bytes.
const AHEAD_PAGES_BYTES: [usize; 2] = [4096, 1 << 20];

impl Default for CopyConfig {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        CopyConfig {
            engine: EngineChoice::Auto,
            workers: (processors - 1).min(3),
            parallel_from_bytes: 1 << 20,
            window_bytes: 2 << 20,
            stream_from_bytes: 64 << 10,
            read_ahead: ReadAhead::Off,
            ahead_page_bytes: 4096,
        }
    }
}

impl CopyConfig {
    /// The defaults without workers.
    pub fn alone() -> Self {
        CopyConfig { workers: 0, ..Self::default() }
    }

    /// What `CXL_COPY` says, or the defaults where it is not set.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the part that is wrong.
    pub fn from_env() -> Result<Self> {
        match std::env::var(ENVIRONMENT) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(error) => Err(Error::Invalid(format!("{ENVIRONMENT}: {error}"))),
        }
    }

    /// Refuses numbers that cannot be meant.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the number.
    pub fn check(&self) -> Result<()> {
        if self.window_bytes < MIN_WINDOW_BYTES || !self.window_bytes.is_multiple_of(LINE_BYTES) {
            return Err(Error::Invalid(format!(
                "window of a pull: {} bytes is no multiple of {LINE_BYTES} from {MIN_WINDOW_BYTES} on",
                self.window_bytes
            )));
        }
        if self.workers > MAX_WORKERS {
            return Err(Error::Invalid(format!("{} copy workers: at most {MAX_WORKERS} can be", self.workers)));
        }
        if !self.ahead_page_bytes.is_multiple_of(AHEAD_PAGES_BYTES[0])
            || !(AHEAD_PAGES_BYTES[0]..=AHEAD_PAGES_BYTES[1]).contains(&self.ahead_page_bytes)
        {
            return Err(Error::Invalid(format!(
                "what a device fetches for a line: {} bytes is no multiple of {} up to {}",
                self.ahead_page_bytes, AHEAD_PAGES_BYTES[0], AHEAD_PAGES_BYTES[1]
            )));
        }
        if matches!(self.read_ahead, ReadAhead::Blocks(count) if !(1..=MAX_BLOCKS_AHEAD).contains(&count)) {
            return Err(Error::Invalid(format!("read_ahead={}: want off, auto, or 1 to {MAX_BLOCKS_AHEAD} blocks", self.read_ahead)));
        }
        Ok(())
    }

    pub(super) fn bounded(self) -> Self {
        let window_bytes = self.window_bytes.clamp(MIN_WINDOW_BYTES, 1 << 40).next_multiple_of(LINE_BYTES);
        CopyConfig { window_bytes, workers: self.workers.min(MAX_WORKERS), ..self }
    }
}

impl FromStr for CopyConfig {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut config = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let wrong = || {
                Error::Invalid(format!(
                    "{ENVIRONMENT}: {pair:?}: want engine=auto|cpu|dsa, workers=, parallel_from=, window=, stream_from=, \
                     read_ahead=off|auto|1..{MAX_BLOCKS_AHEAD}, ahead_page="
                ))
            };
            match pair.split_once('=').ok_or_else(wrong)? {
                ("engine", name) => config.engine = EngineChoice::ALL.iter().find(|of| of.1 == name).ok_or_else(wrong)?.0,
                ("workers", count) => config.workers = count.parse().map_err(|_| wrong())?,
                ("parallel_from", size) => config.parallel_from_bytes = parse_size(size)?,
                ("window", size) => config.window_bytes = usize::try_from(parse_size(size)?).map_err(|_| wrong())?,
                ("stream_from", size) => config.stream_from_bytes = parse_size(size)?,
                ("read_ahead", blocks) => config.read_ahead = blocks.parse()?,
                ("ahead_page", size) => config.ahead_page_bytes = usize::try_from(parse_size(size)?).map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        config.check()?;
        Ok(config)
    }
}

impl fmt::Display for CopyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CopyConfig { workers, parallel_from_bytes, window_bytes, stream_from_bytes, read_ahead, ahead_page_bytes, .. } = self;
        let engine = EngineChoice::ALL.iter().find(|of| of.0 == self.engine).map_or("auto", |of| of.1);
        write!(
            f,
            "engine={engine},workers={workers},parallel_from={parallel_from_bytes},window={window_bytes},stream_from={stream_from_bytes},\
             read_ahead={read_ahead},ahead_page={ahead_page_bytes}"
        )
    }
}
