// SPDX-License-Identifier: Apache-2.0
//! Prefix cache.

pub mod policy;
