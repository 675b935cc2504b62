// SPDX-License-Identifier: Apache-2.0
//! What `cxl-plan` simulates with, for other programs that hold it against the real cache: recorded requests, a rack, and the simulation.

pub mod arrivals;
pub mod error;
pub mod keys;
pub mod presets;
pub mod rack;
pub mod sim;
pub mod trace;
