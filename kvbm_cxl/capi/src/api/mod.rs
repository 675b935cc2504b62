// SPDX-License-Identifier: Apache-2.0
//! The exported functions, as `cxl_shm.h` declares and explains them.

mod args;
mod block;
mod cache;
mod coherence;
mod copy;
mod counts;
mod device;
mod error;
mod gpu;
mod lock;
mod log;
mod object;
mod open;
mod queued;
mod ring;
