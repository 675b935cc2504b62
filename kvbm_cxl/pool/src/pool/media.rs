// SPDX-License-Identifier: Apache-2.0
//! Writing and reading what makes a pool: empty regions, then the superblocks.
//!
//! Order of a format: erase the old superblocks, mark the headers, write every metadata line in its empty form, verify a sample of them,
//! write the new superblocks, each with its line 0 last, take the marks away. A crash anywhere before the last line 0 leaves devices that
//! are no pool, and that a format takes as empty.

use super::content::name_of;
use crate::coherence::{Coherence, Line};
use crate::error::{Error, Result};
use crate::host::name_lines_end;
use crate::limits::{DEVICE_HEADER_BYTES, LINE_BYTES};
use crate::line::{Lines, empty_line};
use crate::media::{MAGIC, SUPERBLOCK_BYTES, Superblock, uuid_text};

/// Lines of each region that a format fetches again and compares, besides the first and the last.
pub const FORMAT_SAMPLES: u64 = 16;

/// Where a header has the mark of a format under way: after the names of hosts.
const MARK_OFFSET: u64 = 16 << 10;
/// What that mark begins with; the length of the part follows, then a checksum.
const MARK: [u8; 16] = *b"kvbmcxl formats\0";
const _: () = assert!(name_lines_end() <= MARK_OFFSET && MARK_OFFSET < DEVICE_HEADER_BYTES);

/// What a device header holds.
#[derive(Debug)]
pub enum HeaderContent {
    /// Nothing: all of it is zero.
    Empty,
    /// An interrupted format, which had found no data on this many bytes from the header on.
    Interrupted {
        /// Length of the part that was being formatted.
        len_bytes: u64,
    },
    /// A superblock that this program understands.
    Pool(Box<Superblock>),
    /// A pool that this program cannot open, of which it knows where the heartbeats are.
    Earlier(Box<Superblock>),
    /// A pool of which this program knows nothing.
    Unreadable {
        /// Its UUID, if it is where it was so far.
        uuid: [u8; 16],
        /// Why it cannot be read.
        reason: String,
        /// The superblock is sound: its version or its features are unknown.
        is_sound: bool,
    },
    /// Anything else.
    Unknown {
        /// What it is, as far as it is known.
        what: &'static str,
        /// The byte that tells.
        offset: u64,
    },
}

impl HeaderContent {
    /// Whether it is a pool, or says that it is one.
    pub fn is_pool(&self) -> bool {
        matches!(self, HeaderContent::Pool(_) | HeaderContent::Earlier(_) | HeaderContent::Unreadable { .. })
    }

    /// The superblock of a pool whose hosts can be watched.
    pub fn superblock(&self) -> Option<&Superblock> {
        match self {
            HeaderContent::Pool(superblock) | HeaderContent::Earlier(superblock) => Some(superblock),
            _ => None,
        }
    }

    /// Where in the header it is seen.
    pub fn offset(&self) -> u64 {
        if let HeaderContent::Unknown { offset, .. } = self { *offset } else { 0 }
    }
}

impl std::fmt::Display for HeaderContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HeaderContent::Empty => f.write_str("nothing"),
            HeaderContent::Interrupted { .. } => f.write_str("a format that was interrupted"),
            HeaderContent::Pool(superblock) | HeaderContent::Earlier(superblock) => write!(
                f,
                "a pool (format version {}.{}, UUID {}, incarnation {:#x}, device {} of {})",
                superblock.version().0,
                superblock.version().1,
                uuid_text(superblock.uuid()),
                superblock.incarnation(),
                superblock.device_index(),
                superblock.devices().len()
            ),
            HeaderContent::Unreadable { reason, .. } => write!(f, "a pool that cannot be read ({reason})"),
            HeaderContent::Unknown { what, .. } => f.write_str(what),
        }
    }
}

/// Reads `bytes.len()` bytes that are in the memory now, not in this host's caches.
pub(super) fn fetch(memory: &dyn Coherence, offset: u64, bytes: &mut [u8]) -> Result<()> {
    memory.flush_range(offset, bytes.len() as u64)?;
    memory.fence_all();
    memory.copy_out(offset, bytes)?;
    memory.fence_loads();
    Ok(())
}

/// Fetches the superblock at `offset`, also one of an earlier version; `device` names it in errors.
///
/// # Errors
/// As [`fetch_superblock`].
pub(super) fn fetch_any_superblock(memory: &dyn Coherence, offset: u64, device: &str) -> Result<Superblock> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    fetch(memory, offset, &mut bytes)?;
    Superblock::decode(device, &bytes).or_else(|error| Superblock::decode_earlier(&bytes).ok_or(error))
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
    let mark = &mut header[MARK_OFFSET as usize..][..LINE_BYTES];
    let len_bytes = u64::from_le_bytes(*mark[MARK.len()..].first_chunk().unwrap_or(&[0; 8]));
    let is_marked = *mark == mark_line(len_bytes).0;
    if is_marked {
        mark.fill(0);
    }
    let Some(first) = header.iter().position(|&byte| byte != 0) else {
        return Ok(if is_marked { HeaderContent::Interrupted { len_bytes } } else { HeaderContent::Empty });
    };
    Ok(match Superblock::decode(device, &header) {
        Ok(superblock) => HeaderContent::Pool(Box::new(superblock)),
        Err(Error::NotAPool { reason, .. }) if header.starts_with(&MAGIC) => match Superblock::decode_earlier(&header) {
            Some(superblock) => HeaderContent::Earlier(Box::new(superblock)),
            None => HeaderContent::Unreadable {
                uuid: *header[16..].first_chunk().unwrap_or(&[0; 16]),
                reason,
                is_sound: Superblock::is_sound(&header),
            },
        },
        Err(_) => {
            let (offset, what) = name_of(&header, first);
            HeaderContent::Unknown { what, offset: offset as u64 }
        }
    })
}

/// The mark of a format of so many bytes.
fn mark_line(len_bytes: u64) -> Line {
    let mut line = Line::ZERO;
    let bytes = [&MARK[..], &len_bytes.to_le_bytes()].concat();
    line.0[..bytes.len()].copy_from_slice(&bytes);
    line.0[bytes.len()..][..4].copy_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    line
}

/// Marks the headers, which are empty, as those of a format of these lengths that is under way: if it is interrupted, the next one finds
/// nothing there that it could destroy.
pub fn mark_format(memory: &dyn Coherence, len_bytes: impl Iterator<Item = u64>) -> Result<()> {
    for (index, len_bytes) in len_bytes.enumerate() {
        memory.write_line(index as u64 * DEVICE_HEADER_BYTES + MARK_OFFSET, &mark_line(len_bytes))?;
    }
    memory.fence_stores();
    Ok(())
}

/// Takes the marks away.
pub fn unmark_format(memory: &dyn Coherence, devices: usize) -> Result<()> {
    for index in 0..devices as u64 {
        memory.write_line(index * DEVICE_HEADER_BYTES + MARK_OFFSET, &Line::ZERO)?;
    }
    memory.fence_stores();
    Ok(())
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
