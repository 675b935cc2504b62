// SPDX-License-Identifier: Apache-2.0
//! What each namespace has of this process's cells, and was promised of its quota.

use crate::cache::Namespace;
use crate::cache::hashing::Spread;
use std::collections::HashMap;

/// Blocks and bytes of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Blocks.
    pub blocks: u64,
    /// Bytes of their cells.
    pub cell_bytes: u64,
}

#[derive(Default)]
struct UsageEntry {
    share: Share,
    /// Blocks of it that were taken out, and are neither gone nor back.
    going: u64,
    /// Bytes of cells that a namespace with a quota was promised, for blocks that are not READY yet.
    promised_bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cache) struct Excess {
    /// Bytes that it has, or was promised, beyond it.
    pub bytes: u64,
    /// Blocks of it are just on their way out.
    pub are_going: bool,
    /// Grows with every block, of whatever namespace, that was on its way out and is gone, or back.
    pub settled: u64,
}

/// What all namespaces have, of those that have something.
#[derive(Default)]
pub(in crate::cache) struct NamespaceUsage {
    of: HashMap<[u8; 16], UsageEntry, Spread>,
    settled: u64,
}

impl NamespaceUsage {
    /// A block in a cell of `cell_bytes` is a namespace's.
    pub fn add(&mut self, namespace: [u8; 16], cell_bytes: u64) {
        let share = &mut self.of.entry(namespace).or_default().share;
        share.blocks += 1;
        share.cell_bytes += cell_bytes;
    }

    /// One of its blocks was taken out. It counts until it is known what becomes of it.
    pub fn is_going(&mut self, namespace: &[u8; 16]) {
        self.change(namespace, |holding| holding.going += 1);
    }

    /// One of its blocks that was taken out is gone, or about to be added again.
    pub fn settle(&mut self, namespace: &[u8; 16], cell_bytes: u64) {
        self.settled += 1;
        self.change(namespace, |holding| {
            holding.share.blocks -= 1;
            holding.share.cell_bytes -= cell_bytes;
            holding.going -= 1;
        });
    }

    fn change(&mut self, namespace: &[u8; 16], change: impl FnOnce(&mut UsageEntry)) {
        let Some(holding) = self.of.get_mut(namespace) else { return };
        change(holding);
        if holding.share.blocks == 0 && holding.promised_bytes == 0 {
            self.of.remove(namespace);
        }
    }

    pub fn share(&self, namespace: &[u8; 16]) -> Share {
        self.of.get(namespace).map(|holding| holding.share).unwrap_or_default()
    }

    /// What every namespace has here.
    pub fn shares(&self) -> Vec<(Namespace, Share)> {
        let with_blocks = self.of.iter().filter(|(_, holding)| holding.share.blocks > 0);
        with_blocks.map(|(namespace, holding)| (Namespace(*namespace), holding.share)).collect()
    }

    /// Promises a namespace `bytes` of cells, if what it was promised then is no more than its quota: there may be blocks in the way.
    pub fn promise(&mut self, namespace: &[u8; 16], bytes: u64, quota_bytes: u64) -> bool {
        let holding = self.of.entry(*namespace).or_default();
        let fits = holding.promised_bytes.saturating_add(bytes) <= quota_bytes;
        self.change(namespace, |holding| holding.promised_bytes += if fits { bytes } else { 0 });
        fits
    }

    /// Ends a promise: it was kept, or there is nothing to keep it for.
    pub fn end_promise(&mut self, namespace: &[u8; 16], bytes: u64) {
        self.change(namespace, |holding| holding.promised_bytes -= bytes);
    }

    pub fn excess(&self, namespace: &[u8; 16], quota_bytes: u64) -> Excess {
        let Some(of) = self.of.get(namespace) else { return Excess { settled: self.settled, ..Excess::default() } };
        let bytes = of.share.cell_bytes.saturating_add(of.promised_bytes).saturating_sub(quota_bytes);
        Excess { bytes, are_going: of.going > 0, settled: self.settled }
    }
}

#[cfg(test)]
mod tests;
