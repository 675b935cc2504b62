// SPDX-License-Identifier: Apache-2.0
//! Manual pages of the programs.

use crate::output::{Exit, Failure, Out};
use std::path::Path;

/// Writes the pages of a program, one for itself and one for each command, to `directory`, which is created if it is missing.
pub fn write(program: clap::Command, directory: &Path, out: &mut Out) -> Result<Exit, Failure> {
    let failed = |error| Failure::new(Exit::Failed, format!("writing manual pages to {}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(program, directory).map_err(failed)?;
    if !out.is_json() {
        out.line(format!("manual pages written to {}", directory.display()))?;
    }
    Ok(Exit::Done)
}
