// SPDX-License-Identifier: Apache-2.0
//! The allocator on simulated hosts.

use cxl_sim::explore;
use cxl_sim::scenarios::alloc;

#[test]
fn no_block_has_two_owners_and_none_is_lost() {
    explore("alloc", 200, alloc::run);
}
