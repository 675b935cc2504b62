// SPDX-License-Identifier: Apache-2.0
//! Huge pages under a pool that is a file in memory, as a device has them: devdax is mapped in units of 2 MiB or more.
//!
//! With pages of 4 KiB a processor looks one up for every 64 lines of a block, in a virtual machine through two sets of tables. The system
//! gives a file on tmpfs huge pages of its own accord only where an administrator has said so (`shmem_enabled`). Asked for them with
//! `MADV_COLLAPSE` (Linux 6.1, madvise(2)) it gives them unless they are denied, and who maps the file at a multiple of the huge page has
//! them as well.

use super::map::{Range, is_in_memory, map_ahead};
use super::{Device, DeviceKind, is_tmpfs};
use crate::limits::DEVICE_HEADER_BYTES;
use std::fs::File;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// The huge page. Pools are mapped at multiples of the header's length, so it is the largest that every mapping can use.
const PAGE_BYTES: u64 = DEVICE_HEADER_BYTES;
/// The deadline is looked at after so many bytes.
const STEP_BYTES: u64 = 32 * PAGE_BYTES;

/// Puts a fully allocated range of a file on tmpfs into huge pages until the system refuses or `timeout_ms` have passed
/// (other memory that is in pieces may have to be put together first, and that takes long). Returns how many bytes from `offset` lie in
/// them; the rest stays as it was. Its content is the same throughout.
pub fn collapse(file: &File, offset: u64, len_bytes: u64, timeout_ms: u64) -> u64 {
    if len_bytes < PAGE_BYTES || !is_tmpfs(file) || page_of_the_system() != Some(PAGE_BYTES) {
        return 0;
    }
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let mut done = 0;
    while Instant::now() < deadline {
        let step = STEP_BYTES.min((len_bytes - done) / PAGE_BYTES * PAGE_BYTES);
        if step == 0 || !collapse_range(file, offset + done, step) {
            break;
        }
        done += step;
    }
    done
}

/// How much of a device that is a file in memory lies in huge pages, in bytes. None of another kind of device, of a file with holes, and
/// where the system does not tell. The file is mapped for that, which takes no more memory than it has.
pub fn bytes_in_huge_pages(device: &Device) -> Option<u64> {
    const TIMEOUT_MS: u64 = 10_000;
    let info = device.info();
    if info.kind != DeviceKind::File || !is_in_memory(info) {
        return None;
    }
    let range = Range::reserve(info.len_bytes, PAGE_BYTES).ok()?;
    let start = range.place_file(0, info.len_bytes, &device.file, device.in_file(0), libc::PROT_READ).ok()?;
    map_ahead(NonNull::new(start.cast())?, info.len_bytes, TIMEOUT_MS);
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let head = format!("{:x}-", start.addr());
    let ours = maps.lines().skip_while(|line| !line.starts_with(&head));
    let pages = ours.skip(1).find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    Some(pages.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// The huge page of this processor and kernel, in bytes; None where there is none.
fn page_of_the_system() -> Option<u64> {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?.trim().parse().ok()
}

/// The same for a range of the file; false where the system did not do it for all of it.
fn collapse_range(file: &File, offset: u64, len_bytes: u64) -> bool {
    let Ok(range) = Range::reserve(len_bytes, PAGE_BYTES) else { return false };
    let Ok(address) = range.place_file(0, len_bytes, file, offset, libc::PROT_READ | libc::PROT_WRITE) else { return false };
    // SAFETY: exactly the pages mapped just now; what they hold stays as it is.
    unsafe { libc::madvise(address, len_bytes as usize, libc::MADV_COLLAPSE) == 0 }
}

#[cfg(test)]
mod tests;
