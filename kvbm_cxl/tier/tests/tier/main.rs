// SPDX-License-Identifier: Apache-2.0
//! The tier over pools in files: hosts of this process with identities of their own, and processes that are killed.
//!
//! Every word of every block is unique in its test, so that a block, a piece or a word in the wrong place is seen.

mod answers;
mod bench;
mod chains;
mod child;
mod configure;
mod deaths;
mod drops;
mod events;
mod foreign;
mod instance;
mod layouts;
mod leaders;
#[path = "../../../pool/tests/common/load.rs"]
mod load;
mod lost;
mod ranks;
mod records;
#[cfg(feature = "router")]
mod router;

/// What a child process does; nothing in the parent.
#[test]
fn child() {
    child::run_if_child();
}
