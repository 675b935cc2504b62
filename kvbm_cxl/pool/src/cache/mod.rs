// SPDX-License-Identifier: Apache-2.0
//! The shared prefix cache.

pub mod events;
mod local;
pub mod namespace;
pub mod policy;

pub(crate) use local::local_len_bytes;
pub use namespace::{BlockKey, Namespace, NamespaceFields, Salt, chain};
