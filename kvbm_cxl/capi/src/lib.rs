// SPDX-License-Identifier: Apache-2.0
//! C interface of the pool.
