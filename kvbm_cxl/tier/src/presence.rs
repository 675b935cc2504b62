// SPDX-License-Identifier: Apache-2.0
//! Which blocks need no offload: those that the pool has, whichever host stored them.
//!
//! KVBM's filters before an offload ask a [`PresenceChecker`]. It needs no `ObjectLockManager`: a reservation in the pool already
//! makes one writer of each key, and ends with its process.

use crate::blocks::CxlBlocks;
use futures::future::BoxFuture;
use kvbm_engine::SequenceHash;
use kvbm_engine::object::ObjectBlockOps;
use kvbm_engine::offload::PresenceChecker;

impl PresenceChecker for CxlBlocks {
    fn check_presence(&self, keys: Vec<SequenceHash>) -> BoxFuture<'static, Vec<(SequenceHash, bool)>> {
        let found = self.has_blocks(keys);
        Box::pin(async move { found.await.into_iter().map(|(key, size)| (key, size.is_some())).collect() })
    }
}
