// SPDX-License-Identifier: Apache-2.0
//! The other hosts' leases: one that runs out leads to a fence of the incarnation that it stood for.
//!
//! A fence is all it leads to. A host that is fenced wrongly, because etcd lost it and the memory did not, joins again under a new
//! incarnation; nothing here is a proof of death (docs/internals/protocols/LOCKS.md section 6).

use crate::error::Result;
use crate::etcd::{Change, Etcd, changes};
use crate::holder::{Holder, Keys};
use etcd_client::WatchStream;
use std::collections::BTreeMap;

/// The known state of the leases.
pub struct Watcher {
    etcd: Etcd,
    keys: Keys,
    known: BTreeMap<u16, Holder>,
    stream: WatchStream,
}

impl Watcher {
    /// Begins with who is there now.
    ///
    /// # Errors
    /// Those of etcd.
    pub async fn start(mut etcd: Etcd, keys: Keys) -> Result<Watcher> {
        let (leased, revision) = etcd.leased(&keys).await?;
        let known = leased.into_iter().map(|(slot, (holder, _))| (slot, holder)).collect();
        let stream = etcd.watch(&keys, revision).await?;
        Ok(Watcher { etcd, keys, known, stream })
    }

    /// The holders whose lease has ended since; waits for news. `None` when etcd ended the watch: [`Watcher::resume`] then.
    ///
    /// # Errors
    /// Those of etcd; after one, too, only [`Watcher::resume`] is of use.
    pub async fn gone(&mut self) -> std::result::Result<Option<Vec<(u16, Holder)>>, etcd_client::Error> {
        let Some(answer) = self.stream.message().await? else { return Ok(None) };
        if answer.canceled() {
            return Ok(None);
        }
        let told = changes(&self.keys, &answer);
        Ok(Some(told.into_iter().filter_map(|change| self.note(change)).collect()))
    }

    fn note(&mut self, change: Change) -> Option<(u16, Holder)> {
        match change {
            Change::Held(slot, holder) => {
                // A holder that gave way to another without a word between: the key was there all along, the one before is gone.
                let before = self.known.insert(slot, holder.clone())?;
                (before.machine != holder.machine).then_some((slot, before))
            }
            Change::Gone(slot) => self.known.remove(&slot).map(|holder| (slot, holder)),
        }
    }

    /// Switches to another connection, from the next [`Watcher::resume`] on.
    pub fn follow(&mut self, etcd: Etcd) {
        self.etcd = etcd;
    }

    /// Watches again after the connection was lost or history was compacted away. The present holders show which leases ended meanwhile.
    ///
    /// # Errors
    /// Those of etcd; nothing is lost by trying again.
    pub async fn resume(&mut self) -> Result<Vec<(u16, Holder)>> {
        let (leased, revision) = self.etcd.leased(&self.keys).await?;
        self.stream = self.etcd.watch(&self.keys, revision).await?;
        let ended = self.known.keys().copied().filter(|slot| !leased.contains_key(slot)).map(Change::Gone);
        let held = leased.iter().map(|(slot, (holder, _))| Change::Held(*slot, holder.clone()));
        let told: Vec<Change> = ended.chain(held).collect();
        Ok(told.into_iter().filter_map(|change| self.note(change)).collect())
    }
}
