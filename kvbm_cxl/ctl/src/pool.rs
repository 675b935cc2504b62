// SPDX-License-Identifier: Apache-2.0
//! Opening the pool that a command is about.

use crate::output::{Exit, Failure};
use cxl_pool::device::PoolSpec;
use cxl_pool::pool::{OpenOptions, Pool};

/// The pool named by `--pool`, or by the environment.
pub fn spec(text: Option<&str>) -> Result<PoolSpec, Failure> {
    let spec = match text {
        Some(text) => PoolSpec::parse(text),
        None => PoolSpec::from_env().map_err(|error| cxl_pool::Error::Invalid(format!("{error} (or give --pool)"))),
    };
    spec.map_err(|error| Failure::usage(error.to_string()))
}

pub fn open(text: Option<&str>, read_only: bool) -> Result<Pool, Failure> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    Pool::open(&spec(text)?, &options).map_err(|error| Failure::new(Exit::CannotOpen, error.to_string()))
}
