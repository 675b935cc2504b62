// SPDX-License-Identifier: Apache-2.0
//! What a device holds that a first format would destroy. Of the part that is formatted, its header is read, and a page at every 2 MiB of
//! the device; the last 2 MiB of the device; and every page of a device of up to 64 MiB. Data between those pages alone is not seen.

use super::media::{HeaderContent, fetch, inspect_header};
use crate::coherence::{Coherence, CoherenceOptions, MappedMemory, over_mapping};
use crate::device::{Device, map_header, map_part};
use crate::error::{Error, Result};
use crate::limits::DEVICE_HEADER_BYTES;

/// Between two pages of the sample, and the length of a device's end that is read as a whole.
const STEP_BYTES: u64 = 2 << 20;
/// A page of the sample.
const PAGE_BYTES: u64 = 4096;
/// Largest device that is read as a whole.
const WHOLE_BYTES: u64 = 64 << 20;
/// Mapped at once.
const WINDOW_BYTES: u64 = 1 << 30;

/// What others write to devices: offset, magic, name. `blkid` has more of them, but does not read a devdax device.
const SIGNATURES: [(usize, &[u8], &str); 16] = [
    (0x200, b"EFI PART", "a GPT partition table"),
    (0x1000, b"EFI PART", "a GPT partition table"),
    (0x218, b"LVM2 001", "a physical volume of LVM"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (0x438, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0, b"XFSB", "an XFS file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
    (0x400, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (0x52, b"FAT32   ", "a FAT file system"),
    (0x36, b"FAT1", "a FAT file system"),
    (0xff6, b"SWAPSPACE2", "swap space"),
    (0x1fe, b"\x55\xaa", "an MBR partition table"),
];

/// What the first bytes of a device are, and at which of them that is seen; unknown data begins at `first`.
pub(super) fn name_of(header: &[u8], first: usize) -> (usize, &'static str) {
    let is_there = |(at, magic, _): &&(usize, &[u8], &str)| header.get(*at..).is_some_and(|rest| rest.starts_with(magic));
    SIGNATURES.iter().find(is_there).map_or((first, "unknown data"), |(at, _, name)| (*at, name))
}

/// Refuses a part of a device that holds anything. A format of this part that was interrupted counts as nothing: it looked before.
///
/// # Errors
/// [`Error::HasContent`]; those of the memory.
pub(super) fn refuse_used(device: &Device) -> Result<()> {
    let label = device.info().label();
    if device.next_data(0).is_some_and(|data| data < DEVICE_HEADER_BYTES) {
        let header = over_mapping(map_header(device)?, &CoherenceOptions::default())?;
        match inspect_header(&*header.memory, 0, &label)? {
            HeaderContent::Empty => {}
            HeaderContent::Interrupted { len_bytes } if len_bytes >= device.info().len_bytes => return Ok(()),
            HeaderContent::Interrupted { .. } => {}
            found => return Err(Error::HasContent { device: label, offset: found.offset(), found: found.to_string() }),
        }
    }
    each_page(device, |_, _, offset, page| match page.iter().position(|&byte| byte != 0) {
        Some(first) => Err(Error::HasContent { device: label.clone(), offset: offset + first as u64, found: "data".into() }),
        None => Ok(()),
    })
}

/// Zeroes the pages of a part of a device that [`refuse_used`] reads, but for its header.
///
/// # Errors
/// Those of the memory.
pub(super) fn clear(device: &Device) -> Result<()> {
    each_page(device, |memory, place, _, page| match page.iter().all(|&byte| byte == 0) {
        true => Ok(()),
        false => memory.copy_in(place, &[0; PAGE_BYTES as usize]).map(|()| memory.fence_stores()),
    })
}

/// Calls `each` with the pages that are read: memory, place in it, offset on the part, bytes. Holes of a file stay holes, and pages that
/// cannot be read hold nothing.
fn each_page(device: &Device, mut each: impl FnMut(&dyn Coherence, u64, u64, &[u8]) -> Result<()>) -> Result<()> {
    let align = device.info().align_bytes.max(PAGE_BYTES);
    let end = device.info().len_bytes / align * align;
    let whole_bytes = device.whole()?.info().len_bytes;
    let step = if whole_bytes <= WHOLE_BYTES { PAGE_BYTES } else { STEP_BYTES };
    let last = (whole_bytes / align * align - device.info().offset_bytes)
        .saturating_sub(STEP_BYTES)
        .clamp(DEVICE_HEADER_BYTES, end.max(DEVICE_HEADER_BYTES));
    let pages = (DEVICE_HEADER_BYTES..end).step_by(step as usize).take_while(|&at| at < last);
    let mut window: Option<(u64, MappedMemory)> = None;
    let mut page = vec![0; PAGE_BYTES as usize];
    for at in pages.chain((last..end).step_by(PAGE_BYTES as usize)) {
        if device.next_data(at).is_none_or(|data| data >= at + PAGE_BYTES) {
            continue;
        }
        let start = at / align.max(WINDOW_BYTES) * align.max(WINDOW_BYTES);
        let (start, mapped) = match window.take() {
            Some(known) if known.0 == start => known,
            _ => {
                let part = map_part(device, start, (end - start).min(align.max(WINDOW_BYTES)))?;
                (start, over_mapping(part, &CoherenceOptions::default())?)
            }
        };
        match fetch(&*mapped.memory, at - start, &mut page) {
            Ok(()) => each(&*mapped.memory, at - start, at, &page)?,
            Err(Error::Poisoned { .. }) => {}
            Err(other) => return Err(other),
        }
        window = Some((start, mapped));
    }
    Ok(())
}
