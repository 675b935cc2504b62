// SPDX-License-Identifier: Apache-2.0
//! The name of each host's machine, for people. It lies in the header of the first device, after the superblock, where programs that do
//! not know of it neither read nor write. A name is a hint: a missing, old or damaged one shows as none (LOCKS.md section 4, J4).

use crate::error::{Error, Result};
use crate::limits::{LINE_BYTES, MAX_SLOTS};
use crate::line::{BlockLine, FIRST_BLOCK_KIND, Line, Lines};
use crate::machine_id::MachineId;
use crate::media::{Identity, SUPERBLOCK_BYTES};

/// Lines of a slot's name.
pub const LINES_PER_NAME: usize = 2;
/// Bytes of a name in one line.
const PART_BYTES: usize = 56;
/// Longest name, in bytes; a longer one is cut.
pub const MAX_NAME_BYTES: usize = LINES_PER_NAME * PART_BYTES;

crate::media::line_structure! {
    /// NAME\[s\]\[i\]: bytes 56i to 56i+55 of the name of the machine of slot s.
    NameLine {
        /// Incarnation of the slot's owner.
        @4 incarnation: u32,
        /// Bytes of the name; zero after its end.
        @8 part: [u8; PART_BYTES],
    }
}

impl BlockLine for NameLine {
    const KIND: u32 = FIRST_BLOCK_KIND + 0x80;
}

/// Where the lines of all names end.
pub(crate) const fn name_lines_end() -> u64 {
    (SUPERBLOCK_BYTES + MAX_SLOTS * LINES_PER_NAME * LINE_BYTES) as u64
}

/// The numbers of the lines of a slot's name, and where each lies in the pool.
pub fn name_lines(slot: u32) -> impl Iterator<Item = (u64, u64)> {
    let first = u64::from(slot) * LINES_PER_NAME as u64;
    (first..first + LINES_PER_NAME as u64).map(|index| (index, (SUPERBLOCK_BYTES + index as usize * LINE_BYTES) as u64))
}

/// Publishes the name of the machine of `incarnation` of `slot`. The caller owns the slot.
pub(crate) fn publish_name(lines: &Lines, slot: u32, incarnation: u32, name: &[u8]) -> Result<()> {
    let mut bytes = [0; MAX_NAME_BYTES];
    let len = name.len().min(MAX_NAME_BYTES);
    bytes[..len].copy_from_slice(&name[..len]);
    for ((index, offset), part) in name_lines(slot).zip(bytes.as_chunks().0) {
        lines.publish_in(lines.seal_of(&[]), index, offset, NameLine { crc: 0, incarnation, part: *part })?;
    }
    Ok(())
}

/// The name of the machine of `incarnation` of `slot`, in printable ASCII: other bytes are escapes. `None` where there is none that can be
/// read.
pub fn machine_name(lines: &Lines, slot: u32, incarnation: u32) -> Option<String> {
    if incarnation == 0 {
        return None;
    }
    let mut bytes = Vec::with_capacity(MAX_NAME_BYTES);
    for (index, offset) in name_lines(slot) {
        let line: NameLine = lines.fetch_in(lines.seal_of(&[]), index, offset).ok()?.ok()?;
        if line.incarnation != incarnation {
            return None;
        }
        bytes.extend_from_slice(&line.part);
    }
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    (end > 0).then(|| bytes[..end].escape_ascii().to_string())
}

/// A machine as a sentence names it: with its name, where the machine has a slot and its name can be read.
pub(crate) fn machine_text(lines: &Lines, machine: MachineId) -> String {
    let name = (0..lines.layout().geometry().slots).find_map(|slot| {
        let identity = lines.fetch::<Identity>(slot.into()).ok().filter(|identity| identity.machine == machine.0)?;
        machine_name(lines, slot, identity.incarnation)
    });
    name_and_id(machine, name.as_deref())
}

/// A machine as a sentence names it, with its name if that is known.
pub(crate) fn name_and_id(machine: MachineId, name: Option<&str>) -> String {
    name.map_or_else(|| machine.to_string(), |name| format!("{name} ({machine})"))
}

/// Whether a line of the slot's name is neither empty nor verifies.
///
/// # Errors
/// Those of the memory, but for poison and loss, which are damage.
pub(crate) fn is_name_damaged(lines: &Lines, slot: u32) -> Result<bool> {
    for (index, offset) in name_lines(slot) {
        match lines.fetch_in::<NameLine>(lines.seal_of(&[]), index, offset) {
            Ok(Ok(_)) => {}
            Ok(Err(_)) if lines.fetch_raw(offset)? == Line::ZERO => {}
            Ok(Err(_)) | Err(Error::Poisoned { .. } | Error::DeviceLost { .. }) => return Ok(true),
            Err(other) => return Err(other),
        }
    }
    Ok(false)
}
