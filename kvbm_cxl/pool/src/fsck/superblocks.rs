// SPDX-License-Identifier: Apache-2.0
//! The superblock copies of an open pool.

use super::report::{Finding, FindingPlace, Remedy, Report, Severity};
use crate::error::{Error, Result};
use crate::limits::DEVICE_HEADER_BYTES;
use crate::line::Lines;
use crate::media::Superblock;
use crate::pool::fetch_superblock;

/// Fetches the copy of every device again and compares it with the one that the pool was opened by.
pub fn check_superblocks(lines: &Lines, superblock: &Superblock, report: &mut Report) -> Result<()> {
    for (index, device) in superblock.devices().iter().enumerate() {
        let meaning = match fetch_superblock(&**lines.memory(), index as u64 * DEVICE_HEADER_BYTES, &device.name) {
            Ok(copy) if copy.is_copy_of(superblock) && copy.device_index() == index => continue,
            Ok(copy) if copy.uuid() != superblock.uuid() || copy.incarnation() != superblock.incarnation() => {
                "the device was formatted again since the pool was opened".to_owned()
            }
            Ok(_) => "the copy on this device differs from the others".to_owned(),
            Err(Error::NotAPool { reason, .. }) => reason,
            Err(error @ (Error::Poisoned { .. } | Error::DeviceLost { .. })) => error.to_string(),
            Err(other) => return Err(other),
        };
        let remedy = Remedy::None("none: stop every host and open the pool again; format again the devices that hold no pool any more");
        report.add(Finding { severity: Severity::Error, rule: "superblock.copy", place: FindingPlace::Superblock(index), meaning, remedy });
    }
    Ok(())
}
