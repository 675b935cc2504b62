// SPDX-License-Identifier: Apache-2.0
//! `cxlctl format`.

use crate::cli::{Coherence, FormatArgs};
use crate::info;
use crate::output::{Exit, Failure, Out};
use crate::pool::spec;
use cxl_pool::coherence::{CoherenceOptions, over_mapping};
use cxl_pool::device::{Access, Device, PoolSpec, Sysfs, map_header};
use cxl_pool::media::{CoherenceMode, Found, inspect_header};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{FormatOptions, Pool};
use std::path::Path;

/// `cxlctl format`.
pub fn run(pool: Option<&str>, args: &FormatArgs, out: &mut Out) -> Result<Exit, Failure> {
    let mut spec = spec(pool)?;
    if let Some(size) = args.size {
        let devices = spec.devices().map(Path::to_path_buf).collect();
        spec = PoolSpec::new(devices, Some(size)).map_err(|error| Failure::usage(error.to_string()))?;
    }
    if args.seat_machine.len() as u64 + 1 > u64::from(args.seats) {
        return Err(Failure::usage(format!("{} machines for seats 1 and up, but {} seats", args.seat_machine.len(), args.seats)));
    }
    let options = FormatOptions {
        stripe_bytes: args.stripe,
        seat_count: args.seats,
        slots: args.slots,
        locks: args.locks,
        objects: args.objects,
        chunk_bytes: args.chunk,
        machine: args.machine.as_deref().map(machine).transpose()?,
        seats: args.seat_machine.iter().map(|text| machine(text)).collect::<Result<_, _>>()?,
        coherence: match args.coherence {
            Coherence::Software => CoherenceMode::Software,
            Coherence::Hardware => CoherenceMode::Hardware,
        },
        force: args.force,
        ..FormatOptions::default()
    };
    if !args.force {
        refuse_if_used(&spec)?;
    }
    let pool = Pool::format(&spec, &options).map_err(failed)?;
    out.answer(
        || info::json(&pool, None),
        || {
            format!(
                "formatted {}\n{}",
                spec.devices().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
                info::text(&pool, None)
            )
        },
    )?;
    Ok(Exit::Done)
}

/// Why a format failed.
pub fn failed(error: cxl_pool::Error) -> Failure {
    let exit = match error {
        cxl_pool::Error::Invalid(_) => Exit::Usage,
        cxl_pool::Error::NotAPool { .. } | cxl_pool::Error::Os { .. } => Exit::CannotOpen,
        _ => Exit::Failed,
    };
    Failure::new(exit, error.to_string())
}

/// Looks at each device that is there, so that a refusal tells what would be lost.
pub fn refuse_if_used(spec: &PoolSpec) -> Result<(), Failure> {
    for path in spec.devices() {
        // What cannot be opened or mapped is the format's to refuse, with its reason; an empty or missing file it may still create.
        let Ok(device) = Device::open(path, Access::Read, &Sysfs::default()) else { continue };
        let Ok(mapping) = map_header(&device) else { continue };
        let header = over_mapping(mapping, &CoherenceOptions::default())?;
        let found = inspect_header(&*header.memory, 0, &device.info().name)?;
        if !matches!(found, Found::Empty) {
            let message = format!("{}: it holds {found}; format overwrites it only with --force, and then it is lost", path.display());
            return Err(Failure::new(Exit::Refused, message));
        }
    }
    Ok(())
}

/// A machine id as `cxlctl hosts` prints it.
fn machine(text: &str) -> Result<MachineId, Failure> {
    let id = u128::from_str_radix(text, 16).ok().filter(|id| *id != 0);
    let id = id.filter(|_| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let wrong = || Failure::usage(format!("{text:?} is not a machine id: give 32 hexadecimal digits, not all zero"));
    Ok(MachineId(id.ok_or_else(wrong)?.to_be_bytes()))
}
