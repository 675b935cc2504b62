// SPDX-License-Identifier: Apache-2.0
//! `cxlctl`: the pool's command line.
fn main() {}
