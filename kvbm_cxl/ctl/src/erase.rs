// SPDX-License-Identifier: Apache-2.0
//! `cxlctl erase`.

use crate::cli::EraseArgs;
use crate::format::{failed, parts_text};
use crate::output::{Exit, Failure, Out};
use crate::pool::spec;
use crate::scratch::header_of;
use cxl_pool::device::{Access, PoolSpec, Sysfs};
use cxl_pool::escaped;
use cxl_pool::pool::{FormatOptions, Pool};
use serde_json::json;

pub fn run(pool: Option<&str>, args: &EraseArgs, out: &mut Out) -> Result<Exit, Failure> {
    let spec = spec(pool)?;
    if !args.force && !args.evict_hosts {
        refuse(&spec)?;
    }
    Pool::erase(&spec, &FormatOptions { evict_hosts: args.evict_hosts, ..FormatOptions::default() }).map_err(failed)?;
    let parts = parts_text(&spec);
    out.answer(|| json!({"erased": parts}), || format!("erased {parts}\n"))?;
    Ok(Exit::Done)
}

/// Says what would be lost.
fn refuse(spec: &PoolSpec) -> Result<(), Failure> {
    for part in spec.parts() {
        let device = part.open(Access::Read, &Sysfs::default())?;
        let found = header_of(&device)?;
        if found.is_pool() {
            let label = device.info().label();
            let message = format!("{}: it holds {found}; erase overwrites it only with --force, and then it is lost", escaped(&label));
            return Err(Failure::new(Exit::Refused, message));
        }
    }
    Ok(())
}
