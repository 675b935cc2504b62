// SPDX-License-Identifier: Apache-2.0
//! The prefix cache: what its blocks are called, and what happens to them.

pub mod events;
pub mod namespace;

pub use namespace::{BlockKey, Namespace, NamespaceFields, Salt, chain};
