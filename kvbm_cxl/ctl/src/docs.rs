// SPDX-License-Identifier: Apache-2.0
//! `cxlctl completions` and `cxlctl man`.

use crate::cli::Cli;
use crate::output::{Exit, Failure, Out};
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::Path;

pub fn completions(shell: Shell, out: &mut Out) -> Result<Exit, Failure> {
    // Into memory first: the generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cxlctl", &mut script);
    out.bytes(&script)?;
    Ok(Exit::Done)
}

pub fn man(directory: &Path, out: &mut Out) -> Result<Exit, Failure> {
    let failed = |error| Failure::new(Exit::Failed, format!("writing manual pages to {}: {error}", directory.display()));
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), directory).map_err(failed)?;
    if !out.is_json() {
        out.line(format!("manual pages written to {}", directory.display()))?;
    }
    Ok(Exit::Done)
}
