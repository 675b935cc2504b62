// SPDX-License-Identifier: Apache-2.0
//! What is in the cache of a pool, for tools.
