// SPDX-License-Identifier: Apache-2.0
//! What listeners learn: of this process's own blocks by events, of all hosts' blocks by looking again.

pub mod events;
pub(super) mod watch;
