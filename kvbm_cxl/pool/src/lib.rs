// SPDX-License-Identifier: Apache-2.0
//! A memory pool that several hosts map at once, **without cache coherence and without atomics between them**, made safe to use.
//!
//! Layers, each of which knows only those below it: [`coherence`] (flushes, fences, non-temporal stores), [`line`](mod@line) (publish and
//! fetch a 64-byte line), [`media`] (the on-media format), [`host`] (slots, liveness, fences), [`lock`] (the two-tier lock).

pub mod alloc;
pub mod coherence;
mod crc;
pub mod device;
mod error;
pub mod fault;
pub mod fsck;
pub mod host;
pub mod limits;
pub mod line;
pub mod lock;
pub mod lock_table;
pub mod machine;
pub mod media;
pub mod objects;
pub mod platform;
pub mod pool;
pub mod record;

pub use error::{Error, Result};
