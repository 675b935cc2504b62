// SPDX-License-Identifier: Apache-2.0
//! What a driver says of itself and its GPUs, for reports.

use super::driver::Driver;
use crate::error::Result;

/// A driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverInfo {
    /// The version of CUDA that it is of, major and minor, if it says so.
    pub version: Option<(u32, u32)>,
    /// Whether it launches kernels.
    pub has_kernels: bool,
    /// The GPUs that this process sees, in the order of their numbers.
    pub gpus: Vec<GpuInfo>,
}

/// A GPU, as far as its driver tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuInfo {
    /// What it is called.
    pub name: Option<String>,
    /// Its compute capability, major and minor: kernels need 8.0.
    pub capability: Option<(u32, u32)>,
    /// Its memory in bytes.
    pub memory_bytes: Option<u64>,
}

/// Loads the driver of this name and asks it.
///
/// # Errors
/// [`crate::Error::NotFound`] when there is no driver, it is too old, or it has no GPU.
pub fn describe(library: &str) -> Result<DriverInfo> {
    let driver = Driver::load(library)?;
    Ok(DriverInfo {
        version: driver.version(),
        has_kernels: driver.launching.is_ok(),
        gpus: (0..driver.devices()).map(|number| driver.describe(number)).collect(),
    })
}
