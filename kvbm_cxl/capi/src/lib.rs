// SPDX-License-Identifier: Apache-2.0
//! C interface of the pool: `libcxl_shm.so` and `libcxl_shm.a`, declared in `include/cxl_shm.h`.
//!
//! The header is what callers read, so what each function means stands there and is not repeated here. `tests/header.rs` proves that the
//! two agree: names, signatures, constants, sizes and offsets.
//!
//! - `api`: the exported functions, thin: they check pointers, call one of the modules below, and turn the result into a status.
//! - [`status`]: statuses, the last error of each thread, and the wall that no panic passes.
//! - [`types`]: the structures of the header, and how structures of another version are read and written.
//! - `handle`: open pools by number, the default pool, which pool an address lies in.
//! - `pool`: a pool and this process's membership in it; `locks`: locks held across calls;
//!   `rings`: listeners and connections; `devices`: devices by themselves; `copies`: lists of copies; `gpus`, `queued`: memory of GPUs;
//!   `turns`: objects that calls use one at a time; `numbers`: what C knows by number; `counts`: counters; `upkeep`: background work.

mod api;
mod cache;
mod copies;
mod counts;
mod devices;
mod gpus;
mod handle;
mod locks;
mod numbers;
mod pool;
mod queued;
mod rings;
pub mod status;
mod turns;
pub mod types;
mod upkeep;
