// SPDX-License-Identifier: Apache-2.0
//! Deterministic simulator of many hosts over one non-coherent memory.

mod config;
mod engine;
mod explore;
mod format;
mod hardware;
mod machine;
mod memory;
pub mod names;
mod outcome;
mod platform;
mod queue;
mod random;
mod sparse;
mod trace;
mod view;
mod world;

pub use config::{Chances, Fault, Planned, SimHost, SimProcess, When, WorldConfig, WritePath};
pub use explore::{Kill, Scenario, Summary, explore, mutation_table, run_mutant, search};
pub use outcome::{Failure, Stats};
pub use random::Random;
pub use view::View;
pub use world::{Env, POOL_UUID, World};
