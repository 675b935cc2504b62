// SPDX-License-Identifier: Apache-2.0
//! Which blocks of a namespace are in the pool, of any publisher, told as changes: for those who tell others, such as routers.
//!
//! Events ([`super::events`]) are of one process's own blocks. Of all hosts' blocks there is no stream, but their descriptors can be
//! read: a look reads those of the cells in use, and compares. A block that came and went between two looks is not reported.

use crate::cache::survey::{CacheView, Listed};
use crate::cache::{BlockKey, Cache, Namespace};
use crate::error::{Error, Result};
use std::collections::{HashMap, HashSet};

/// What changed between two looks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Keys that are there now, with all companions, and were not before.
    pub added: Vec<BlockKey>,
    /// Keys of which this is no longer so.
    pub removed: Vec<BlockKey>,
    /// Keys of blocks of this process's host that were alone, without a companion, at this look and the one before.
    pub alone: Vec<BlockKey>,
}

/// A memory of the last look. It holds nothing in the pool.
pub struct Watch {
    namespace: Namespace,
    companions: Vec<Namespace>,
    classes: Vec<usize>,
    told: HashSet<BlockKey>,
    alone: HashSet<BlockKey>,
}

impl Cache {
    /// The blocks of a namespace that a pull may get, of any publisher, in cells of the size that a block of `len_bytes` takes; without
    /// a length those of all sizes. Advice: they may go right afterwards.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a length that no block can have; those of the memory, except where only single lines fail.
    pub fn list(&self, namespace: Namespace, len_bytes: impl Into<Option<u64>>) -> Result<Vec<Listed>> {
        let classes = self.classes_of(len_bytes.into())?;
        blocks_in(&CacheView::load(self.inner.lines())?, namespace, &classes)
    }

    /// The size of the cells that a block of a length takes, or all sizes, by their number.
    fn classes_of(&self, len_bytes: Option<u64>) -> Result<Vec<usize>> {
        let Some(len_bytes) = len_bytes else {
            return Ok((0..self.inner.geometry().cells.len()).collect());
        };
        if u32::try_from(len_bytes).is_err() {
            return Err(Error::Invalid(format!("no block has {len_bytes} bytes: the longest has {}", u32::MAX)));
        }
        Ok(self.inner.class_holding(len_bytes).into_iter().collect())
    }

    /// Begins to watch the blocks of a namespace that have `len_bytes` or lie in cells of the same size; without a length those of
    /// all sizes. A block counts while there is a block of the same key in every one of `companions`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a length that no block can have.
    pub fn watch(&self, namespace: Namespace, len_bytes: impl Into<Option<u64>>, companions: &[Namespace]) -> Result<Watch> {
        let classes = self.classes_of(len_bytes.into())?;
        Ok(Watch { namespace, companions: companions.to_vec(), classes, told: HashSet::new(), alone: HashSet::new() })
    }
}

fn blocks_in(view: &CacheView, namespace: Namespace, classes: &[usize]) -> Result<Vec<Listed>> {
    let mut listed = Vec::new();
    for &class in classes {
        listed.extend(view.blocks(namespace, class)?);
    }
    Ok(listed)
}

impl Watch {
    /// The changes since the last look; at the first one everything is new.
    ///
    /// # Errors
    /// Those of the memory; then the next look tells what this one would have.
    pub fn look(&mut self, cache: &Cache) -> Result<Changes> {
        let inner = &cache.inner;
        let listed = blocks_in(&CacheView::load(inner.lines())?, self.namespace, &self.classes)?;
        let owners: HashMap<BlockKey, u16> = listed.iter().map(|block| (block.key, block.owner)).collect();
        let keys: Vec<BlockKey> = owners.keys().copied().collect();
        let mut complete = vec![true; keys.len()];
        for &companion in &self.companions {
            let mut places = complete.iter_mut();
            inner.index.look_up_all(companion, &keys, |found| {
                if let Some(place) = places.next() {
                    *place &= found.is_some();
                }
                true
            })?;
        }
        let of = |wanted: bool| keys.iter().zip(&complete).filter(move |&(_, &is)| is == wanted).map(|(&key, _)| key);
        let there: HashSet<BlockKey> = of(true).collect();
        let alone: HashSet<BlockKey> = of(false).filter(|key| owners.get(key) == Some(&inner.host.slot())).collect();
        let changes = Changes {
            added: there.difference(&self.told).copied().collect(),
            removed: self.told.difference(&there).copied().collect(),
            alone: alone.intersection(&self.alone).copied().collect(),
        };
        (self.told, self.alone) = (there, alone);
        Ok(changes)
    }
}
