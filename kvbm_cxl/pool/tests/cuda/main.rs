// SPDX-License-Identifier: Apache-2.0
//! The engine that copies to and from the memory of GPUs, over a driver that is faked: copies happen late, calls fail, streams do not end.
//! A CPU that follows an address of the fake's devices is ended.

mod ahead;
mod cache;
mod copies;
mod device;
mod failures;
mod fake;
mod kernels;
#[path = "../common/load.rs"]
mod load;
mod order;
mod paged;
mod queued;
mod queued_ends;
mod real;
mod scenes;
mod started;

#[path = "../cache/bench.rs"]
#[allow(dead_code)] // The tests of the cache use the rest.
mod bench;
