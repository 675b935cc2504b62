// SPDX-License-Identifier: Apache-2.0
//! `cxlctl format`.

use crate::cli::{Coherence, FormatArgs};
use crate::info;
use crate::model::cell_bytes_of;
use crate::output::{Exit, Failure, Out};
use crate::pool::spec;
use cxl_pool::device::{Access, DevicePart, PoolSpec, Sysfs, parse_size};
use cxl_pool::media::CoherenceMode;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, Pool, Share};
use cxl_pool::{PartitionProblem, escaped};

/// Cells of a pool that is formatted without saying which.
const DEFAULT_CELL_BYTES: u64 = 1 << 20;
/// Part of the pool that cells take where no share is given, in hundredths.
const DEFAULT_SHARE: u32 = 75;
/// Cells below which a pool gets none unless they are asked for.
const LEAST_CELLS: u64 = 64;

/// One `--cells`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cells {
    /// No cache.
    None,
    /// An area; without a share it has to be the only one.
    Area { cell_bytes: u64, share: Option<Share> },
}

/// Reads a `--cells`.
pub fn cells(text: &str) -> Result<Cells, String> {
    if text == "none" {
        return Ok(Cells::None);
    }
    let (size, share) = text.split_once(':').map_or((text, None), |(size, share)| (size, Some(share)));
    let cell_bytes = parse_size(size).map_err(|error| error.to_string())?;
    let share = match share.map(|share| (share, share.strip_suffix('%'))) {
        None => None,
        Some((_, Some(percent))) => match percent.parse() {
            Ok(percent @ 1..=100) => Some(Share::Percent(percent)),
            _ => return Err(format!("{percent:?} is no share in hundredths: give 1% to 100%")),
        },
        Some((bytes, None)) => Some(Share::Bytes(parse_size(bytes).map_err(|error| error.to_string())?)),
    };
    Ok(Cells::Area { cell_bytes, share })
}

/// The areas that the options ask for, smallest cells first.
fn areas(args: &FormatArgs, spec: &PoolSpec) -> Result<Vec<CellArea>, Failure> {
    let mut areas = Vec::new();
    if let Some(model) = &args.model {
        let cell_bytes = cell_bytes_of(model, &args.engine)?;
        areas.push(CellArea { cell_bytes, share: Share::Percent(DEFAULT_SHARE) });
    }
    let count = areas.len() + args.cells.len();
    for cells in &args.cells {
        match *cells {
            Cells::None if count == 1 => return Ok(Vec::new()),
            Cells::None => return Err(Failure::usage("--cells none stands alone")),
            Cells::Area { share: None, .. } if count > 1 => {
                return Err(Failure::usage("give each of several --cells its share, such as 64K:20%"));
            }
            Cells::Area { cell_bytes, share } => {
                areas.push(CellArea { cell_bytes, share: share.unwrap_or(Share::Percent(DEFAULT_SHARE)) });
            }
        }
    }
    areas.sort_by_key(|area| area.cell_bytes);
    let fits = |len_bytes: u64| len_bytes / 100 * u64::from(DEFAULT_SHARE) / DEFAULT_CELL_BYTES >= LEAST_CELLS;
    if count == 0 && fits(len_bytes(spec)) {
        areas.push(CellArea { cell_bytes: DEFAULT_CELL_BYTES, share: Share::Percent(DEFAULT_SHARE) });
    }
    Ok(areas)
}

/// Approximate size of a pool over these devices: the smallest one decides. Zero if it cannot be read, which the format then reports.
fn len_bytes(spec: &PoolSpec) -> u64 {
    let each = spec.size_bytes().or_else(|| {
        let len_bytes = |part: DevicePart| part.open(Access::Read, &Sysfs::default()).map_or(0, |device| device.info().len_bytes);
        spec.payload_parts().map(len_bytes).min()
    });
    each.unwrap_or(0).saturating_mul(spec.devices().count() as u64)
}

/// `cxlctl format`.
pub fn run(pool: Option<&str>, args: &FormatArgs, out: &mut Out) -> Result<Exit, Failure> {
    let mut spec = spec(pool)?;
    if let Some(size) = args.size {
        spec = spec.with_size(Some(size)).map_err(|error| Failure::usage(error.to_string()))?;
    }
    if let Some(part) = &args.metadata {
        if spec.metadata().is_some() {
            return Err(Failure::usage("--metadata is given, and the pool's name has a metadata= as well: give one of them"));
        }
        spec = spec.with_metadata(Some(part.clone())).map_err(|error| Failure::usage(error.to_string()))?;
    }
    let mut options = FormatOptions {
        slots: args.slots,
        cells: areas(args, &spec)?,
        coherence: match args.coherence {
            Coherence::Software => CoherenceMode::Software,
            Coherence::Hardware => CoherenceMode::Hardware,
        },
        force: args.force || args.evict_hosts,
        evict_hosts: args.evict_hosts,
        ..FormatOptions::default()
    };
    args.advanced.iter().try_for_each(|text| set_advanced(&mut options, text))?;
    if options.seats.len() as u64 + 1 > u64::from(options.seat_count) {
        return Err(Failure::usage(format!("{} machines for seats 1 and up, but {} seats", options.seats.len(), options.seat_count)));
    }
    let pool = Pool::format(&spec, &options).map_err(failed)?;
    out.answer(|| info::json(&pool, None), || format!("formatted {}\n{}", parts_text(&spec), info::text(&pool, None)))?;
    Ok(Exit::Done)
}

/// Applies one `--advanced`.
fn set_advanced(options: &mut FormatOptions, text: &str) -> Result<(), Failure> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    let size = || parse_size(value).map_err(|error| Failure::usage(format!("--advanced {text}: {error}")));
    let count = || value.parse().map_err(|_| Failure::usage(format!("--advanced {text}: {value:?} is not a whole number")));
    match key {
        "chunk" => options.chunk_bytes = size()?,
        "locks" => options.locks = count()?,
        "machine" => options.machine = Some(machine(value)?),
        "objects" => options.objects = count()?,
        "seat_machine" => options.seats.push(machine(value)?),
        "seats" => options.seat_count = count()?,
        "stripe" => options.stripe_bytes = Some(size()?),
        _ => {
            let known = "chunk, locks, machine, objects, seat_machine, seats, stripe";
            return Err(Failure::usage(format!("--advanced {text}: {key:?} is not one of {known}")));
        }
    }
    Ok(())
}

/// The parts of devices that a name gives, for people.
pub fn parts_text(spec: &PoolSpec) -> String {
    spec.parts().map(|part| escaped(&part.to_string()).into_owned()).collect::<Vec<_>>().join(", ")
}

/// Why a format failed.
pub fn failed(error: cxl_pool::Error) -> Failure {
    let exit = match error {
        cxl_pool::Error::Invalid(_) => Exit::Usage,
        cxl_pool::Error::Partition { problem: PartitionProblem::Unaligned { .. }, .. } => Exit::Usage,
        cxl_pool::Error::Partition { problem: PartitionProblem::Overlaps { .. }, .. } => Exit::Refused,
        cxl_pool::Error::Partition { .. } => Exit::CannotOpen,
        cxl_pool::Error::NotAPool { .. } | cxl_pool::Error::Os { .. } => Exit::CannotOpen,
        cxl_pool::Error::HasContent { .. } | cxl_pool::Error::InUse { .. } | cxl_pool::Error::HostsUnseen { .. } => Exit::Refused,
        _ => Exit::Failed,
    };
    Failure::new(exit, error.to_string())
}

/// A machine id as `cxlctl hosts` prints it.
pub fn machine(text: &str) -> Result<MachineId, Failure> {
    let id = u128::from_str_radix(text, 16).ok().filter(|id| *id != 0);
    let id = id.filter(|_| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let wrong = || Failure::usage(format!("{text:?} is not a machine id: give 32 hexadecimal digits, not all zero"));
    Ok(MachineId(id.ok_or_else(wrong)?.to_be_bytes()))
}

#[cfg(test)]
mod tests;
