// SPDX-License-Identifier: Apache-2.0
//! What the operator's tool `cxlctl`, the benchmark program `cxl-bench` and the planner `cxl-plan` share: how a command answers and ends,
//! how it opens a pool, a second process of itself, scratch memory, statistics, a cache that only counts, and random numbers.

#![allow(missing_docs, reason = "the programs of this crate share it: it is no interface for others")]

pub mod counted;
pub mod manual;
pub mod output;
pub mod peer;
pub mod planner;
pub mod pool;
pub mod random;
pub mod scratch;
pub mod stats;
pub mod text;
