// SPDX-License-Identifier: Apache-2.0
//! The shared prefix cache.

mod local;

pub(crate) use local::local_len_bytes;
