// SPDX-License-Identifier: Apache-2.0
//! Writing and reading what makes a pool: empty regions, then the superblocks.
//!
//! Order of a format: erase the old superblocks, write every metadata line in its empty form, verify a sample of them, write the new
//! superblocks, each with its line 0 last. A crash anywhere in between leaves devices that are no pool.

use crate::coherence::{Coherence, Line};
use crate::error::{Error, Result};
use crate::limits::{DEVICE_HEADER_BYTES, LINE_BYTES};
use crate::line::{Lines, empty_line};
use crate::media::{MAGIC, SUPERBLOCK_BYTES, Superblock, uuid_text};

/// Lines of each region that a format fetches again and compares, besides the first and the last.
pub const FORMAT_SAMPLES: u64 = 16;

/// How the text of a [`HeaderContent::Unknown`] begins that says it is a pool.
const UNREADABLE: &str = "a pool that cannot be read";

/// What a device header holds.
#[derive(Debug)]
pub enum HeaderContent {
    /// Nothing: all of it is zero.
    Empty,
    /// A superblock that this program understands.
    Pool(Box<Superblock>),
    /// Anything else; the text says what.
    Unknown(String),
}

impl HeaderContent {
    /// Whether it is a pool, or says that it is one.
    pub fn is_pool(&self) -> bool {
        matches!(self, HeaderContent::Pool(_)) || matches!(self, HeaderContent::Unknown(what) if what.starts_with(UNREADABLE))
    }
}

impl std::fmt::Display for HeaderContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HeaderContent::Empty => f.write_str("nothing"),
            HeaderContent::Pool(superblock) => write!(
                f,
                "a pool (UUID {}, incarnation {:#x}, device {} of {})",
                uuid_text(superblock.uuid()),
                superblock.incarnation(),
                superblock.device_index(),
                superblock.devices().len()
            ),
            HeaderContent::Unknown(what) => f.write_str(what),
        }
    }
}

/// Reads `bytes.len()` bytes that are in the memory now, not in this host's caches.
fn fetch(memory: &dyn Coherence, offset: u64, bytes: &mut [u8]) -> Result<()> {
    memory.flush_range(offset, bytes.len() as u64)?;
    memory.fence_all();
    memory.copy_out(offset, bytes)?;
    memory.fence_loads();
    Ok(())
}

/// Fetches the superblock at `offset`; `device` names it in errors.
///
/// # Errors
/// [`Error::NotAPool`] and the errors of the memory.
pub fn fetch_superblock(memory: &dyn Coherence, offset: u64, device: &str) -> Result<Superblock> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    fetch(memory, offset, &mut bytes)?;
    Superblock::decode(device, &bytes)
}

/// Looks at the whole device header at `offset` to see whether a format would destroy something.
pub fn inspect_header(memory: &dyn Coherence, offset: u64, device: &str) -> Result<HeaderContent> {
    let mut header = vec![0; DEVICE_HEADER_BYTES as usize];
    fetch(memory, offset, &mut header)?;
    let Some(first) = header.iter().position(|&byte| byte != 0) else { return Ok(HeaderContent::Empty) };
    Ok(match Superblock::decode(device, &header) {
        Ok(superblock) => HeaderContent::Pool(Box::new(superblock)),
        Err(Error::NotAPool { reason, .. }) if header.starts_with(&MAGIC) => HeaderContent::Unknown(format!("{UNREADABLE} ({reason})")),
        Err(_) => HeaderContent::Unknown(format!("unknown data (from byte {first:#x} on)")),
    })
}

/// Clears the headers of `devices` devices, each one's line 0 first, so that a former pool is none from here on.
pub fn erase_superblocks(memory: &dyn Coherence, devices: usize) -> Result<()> {
    let headers = || (0..devices as u64).map(|device| device * DEVICE_HEADER_BYTES);
    for offset in headers() {
        memory.write_line(offset, &Line::ZERO)?;
    }
    memory.fence_stores();
    let zeros = vec![0; DEVICE_HEADER_BYTES as usize];
    for offset in headers() {
        memory.copy_in(offset, &zeros)?;
    }
    memory.fence_stores();
    Ok(())
}

/// Writes every line of every region in its empty form, then fetches a sample of them and compares.
///
/// # Errors
/// [`Error::BadLine`] when a line does not come back as it was written; the errors of the memory.
pub fn write_regions(lines: &Lines) -> Result<()> {
    // Pieces of a page's order: large enough for streaming stores, small enough to stay in the nearest cache while they are composed.
    const PIECE_LINES: u64 = 256;
    let mut piece = Vec::with_capacity(PIECE_LINES as usize * LINE_BYTES);
    for span in lines.layout().spans() {
        let mut next = 0;
        while next < span.lines {
            let end = span.lines.min(next + PIECE_LINES);
            piece.clear();
            (next..end).for_each(|index| piece.extend_from_slice(&empty_line(lines, span.region, index).0));
            lines.memory().copy_in(span.offset + next * LINE_BYTES as u64, &piece)?;
            next = end;
        }
    }
    lines.memory().fence_stores();
    for span in lines.layout().spans() {
        let step = (span.lines / FORMAT_SAMPLES).max(1) as usize;
        for index in (0..span.lines).step_by(step).chain(span.lines.checked_sub(1)) {
            let found = lines.fetch_raw(lines.layout().line_offset(span.region, index)?)?;
            if found != empty_line(lines, span.region, index) {
                return Err(Error::BadLine {
                    region: span.region.name(),
                    index,
                    reason: "the device did not keep what the format wrote; does a host still use the pool?",
                });
            }
        }
    }
    Ok(())
}

/// Writes the superblock of every device, lines last to first and line 0 after a fence, then reads each back.
pub fn write_superblocks(memory: &dyn Coherence, superblock: &Superblock) -> Result<()> {
    let devices = superblock.devices();
    for index in (0..devices.len()).rev() {
        let copy = superblock.for_device(index)?;
        let offset = index as u64 * DEVICE_HEADER_BYTES;
        for number in (0..SUPERBLOCK_BYTES / LINE_BYTES).rev() {
            let mut line = Line::ZERO;
            line.0.copy_from_slice(&copy.encode()[number * LINE_BYTES..][..LINE_BYTES]);
            memory.write_line(offset + (number * LINE_BYTES) as u64, &line)?;
            memory.fence_stores();
        }
        memory.fence_all();
        if fetch_superblock(memory, offset, &devices[index].name)? != copy {
            return Err(Error::NotAPool {
                device: devices[index].name.clone(),
                reason: "the device holds another superblock than the one just written: is another host formatting it?".into(),
            });
        }
    }
    Ok(())
}
