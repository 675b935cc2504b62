// SPDX-License-Identifier: Apache-2.0
//! `cxlctl erase`.

use crate::cli::EraseArgs;
use crate::format::{failed, parts_text, refuse_if_used};
use crate::output::{Exit, Failure, Out};
use crate::pool::spec;
use cxl_pool::pool::{FormatOptions, Pool};
use serde_json::json;

pub fn run(pool: Option<&str>, args: &EraseArgs, out: &mut Out) -> Result<Exit, Failure> {
    let spec = spec(pool)?;
    if !args.force && !args.evict_hosts {
        refuse_if_used(&spec, "erase overwrites it only with --force, and then it is lost")?;
    }
    Pool::erase(&spec, &FormatOptions { evict_hosts: args.evict_hosts, ..FormatOptions::default() }).map_err(failed)?;
    let parts = parts_text(&spec);
    out.answer(|| json!({"erased": parts}), || format!("erased {parts}\n"))?;
    Ok(Exit::Done)
}
