// SPDX-License-Identifier: Apache-2.0
//! A storage tier of Dynamo's KV block manager (KVBM) in a CXL shared-memory pool.
//!
//! Blocks of one worker's host memory (G2) go to the pool, and another worker's G2 gets them from there. The two workers share nothing but
//! the pool: no connection, no metadata exchange. A host that dies takes none of the blocks of other hosts with it, and of its own no part
//! of a block: a block is whole or missing.
//!
//! [`CxlBlocks`] is an [`ObjectBlockOps`](kvbm_engine::object::ObjectBlockOps), which is where the published crates (kvbm-engine 1.6.1,
//! unpatched) let a program put a tier of its own: `PhysicalWorker::builder().object_client(..)`,
//! `InstanceLeader::builder().object_client(..)` and `OffloadEngine::builder(..).with_object_ops(..)`. Protocol and memory ordering are
//! those of [`cxl_pool::cache::tier`]; this crate names blocks, finds their bytes and reports what became of each.
//!
//! | module | what it does |
//! |---|---|
//! | [`config`] | pool, checksums and water marks, from `DYN_KVBM_CXL_*` |
//! | [`tier`] | opens all of that in the right order |
//! | [`names`] | model, shape and rank: the namespace of a worker's blocks |
//! | [`keys`] | the key of a block and of its parent |
//! | `pieces` | which bytes of a layout a block consists of |
//! | [`blocks`] | has, put, get |
//! | [`counts`] | what became of every block that was asked for, by reason |
//! | [`presence`] | which blocks need no offload, as the pool says |
//! | [`events`] | which blocks came to the pool and went, in KVBM's format |
//! | `descriptions` | what a router needs of a block and its key does not hold, next to the block in the pool (feature `router`) |
//! | `router` | the pool's index for Dynamo's KV router in the same process, and events in its format (feature `router`) |
//! | [`memory`], [`worker`] | host memory as G2, and a worker that has nothing else |
//!
//! # What it needs
//! Memory of the host (KVBM's `System` and `Pinned`). Blocks in GPU memory (G1), on disk, or in the pool itself are refused, and counted as
//! [`Outcome::Memory`](counts::Outcome::Memory): KVBM brings them to G2 itself. A Tokio runtime, as KVBM has one.
//!
//! Upstream has announced that KVBM is deprecated. This crate is for programs that embed its crates today.

pub mod blocks;
pub mod config;
pub mod counts;
#[cfg(feature = "router")]
mod descriptions;
pub mod error;
pub mod events;
pub mod keys;
pub mod memory;
pub mod names;
mod pieces;
pub mod presence;
#[cfg(feature = "router")]
pub mod router;
pub mod tier;
pub mod worker;

pub use blocks::CxlBlocks;
pub use config::{RecordConfig, TierConfig};
pub use counts::{Counts, Outcome};
pub use error::{Error, Result};
pub use names::{BlockShape, Model, Ranks};
pub use tier::Tier;
