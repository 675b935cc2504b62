// SPDX-License-Identifier: Apache-2.0
//! `cxlctl completions` and `cxlctl man`.

use crate::cli::{Cli, CompletionsArgs, ManArgs};
use crate::output::{Exit, Failure, Out};
use clap::CommandFactory;

/// `cxlctl completions`.
pub fn completions(args: &CompletionsArgs, out: &mut Out) -> Result<Exit, Failure> {
    // Into memory first: the generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "cxlctl", &mut script);
    out.bytes(&script)?;
    Ok(Exit::Done)
}

/// `cxlctl man`.
pub fn man(args: &ManArgs, out: &mut Out) -> Result<Exit, Failure> {
    let failed = |error| Failure::new(Exit::Failed, format!("writing manual pages to {}: {error}", args.directory.display()));
    std::fs::create_dir_all(&args.directory).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), &args.directory).map_err(failed)?;
    if !out.is_json() {
        out.line(format!("manual pages written to {}", args.directory.display()))?;
    }
    Ok(Exit::Done)
}
