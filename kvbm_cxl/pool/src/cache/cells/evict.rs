// SPDX-License-Identifier: Apache-2.0
//! Eviction: by the owner of a cell alone, without a lock (CACHE.md section 6).
//!
//! Pin and eviction are Dekker's pair: a reader publishes its pin and then fetches the descriptor, the owner publishes EVICTING and then
//! fetches the pins, so one of them sees the other. The pins are also looked at beforehand, together with their ticks: most blocks that are
//! in use, or were used by another host lately, never become EVICTING at all.

use crate::cache::cells::FoundBlock;
use crate::cache::cells::adopt::Use;
use crate::cache::cells::store::CellStore;
use crate::cache::index::Index;
use crate::cache::observe::events::Change;
use crate::cache::policy::{Candidate, QueueEnd, Verdict};
use crate::cache::{BlockKey, Inner, Namespace};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::line::if_whole;
use crate::media::Descriptor;
use crate::metrics::EvictionReason;

/// Candidates that are examined before room counts as unavailable, because those before were in use: a chain that a host has pinned for
/// long lies at the front of the order.
const LOOKED_AT: usize = 8 * BATCH;
/// Candidates that may turn out to have been used since by other hosts before those of them go that are not pinned: each was put where
/// it belongs, so the next request finds a better order, and none is refused while there are blocks that could go.
pub(in crate::cache) const YOUNGER_AT: usize = 8 * LOOKED_AT;
/// Blocks of a namespace whose pins are looked at together.
const OFFERED: usize = 256;
/// Blocks evicted together.
pub(in crate::cache) const BATCH: usize = 32;

#[derive(Clone, Copy)]
pub(in crate::cache) struct Victim {
    pub cell: u64,
    pub descriptor: Descriptor,
    pub parent: Option<[u8; 16]>,
}

struct Chosen {
    victims: Vec<Victim>,
    /// How many stay because a host has used them since.
    younger: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) enum Reason {
    Room,
    /// Its namespace has more than it may have.
    Quota,
    /// Another host has the same block.
    Duplicate,
    Asked,
}

impl CellStore {
    /// Settles candidates: those that are not in use are taken out of the order; with `spares_younger`, not those that a host has used
    /// since.
    fn choose(&self, candidates: &[Candidate], spares_younger: bool) -> Result<Chosen> {
        let cells: Vec<u64> = candidates.iter().map(|candidate| candidate.cell).collect();
        let uses = match self.uses(&cells) {
            Ok(uses) => uses,
            Err(error) => {
                let mut own = self.cells();
                for &cell in &cells {
                    own.settle(cell, Verdict::Kept);
                }
                return Err(error);
            }
        };
        let mut chosen = Chosen { victims: Vec::with_capacity(candidates.len()), younger: 0 };
        let mut own = self.cells();
        for (candidate, seen) in candidates.iter().zip(&uses) {
            let verdict = match self.youngest(seen) {
                _ if seen.pinned => Verdict::InUse,
                Some(tick) if tick > candidate.tick && spares_younger => {
                    chosen.younger += 1;
                    Verdict::Younger { tick }
                }
                _ => Verdict::Evicted,
            };
            let parent = own.parent(candidate.cell);
            if let Some(descriptor) = own.settle(candidate.cell, verdict) {
                chosen.victims.push(Victim { cell: candidate.cell, descriptor, parent });
            }
        }
        Ok(chosen)
    }

    pub(in crate::cache) fn youngest(&self, seen: &Use) -> Option<u32> {
        let clock = self.clock();
        (1..8).filter(|tick| seen.ticks >> tick & 1 == 1).filter_map(|tick| clock.tick_of(tick)).max()
    }

    /// Publishes EVICTING for the victims, and looks at their pins and this host's fences after that; returns their descriptors, and the
    /// uses, or an error where the pins or the fences cannot be read.
    fn mark_evicting(&self, op: &Op<'_>, victims: &[Victim]) -> Result<(Vec<Descriptor>, Result<Vec<Use>>)> {
        let cells: Vec<u64> = victims.iter().map(|victim| victim.cell).collect();
        let early = if mutant!("cache.evict_scans_first") { Some(self.uses(&cells)?) } else { None };
        let truths = victims.iter().map(|victim| self.truth(victim)).collect::<Result<Vec<_>>>()?;
        point!("cache.evict");
        for (victim, truth) in victims.iter().zip(&truths) {
            self.host.lines().write(victim.cell, Descriptor { state: Descriptor::EVICTING, ..*truth })?;
        }
        self.host.lines().fence_published();
        point!("cache.evicting");
        let uses = match early {
            Some(uses) => Ok(uses),
            None => self.uses(&cells),
        };
        point!("cache.evict_scanned");
        let uses = match self.host.check_fences(op) {
            Err(fenced @ Error::Fenced { .. }) => return Err(fenced),
            // Where that is unknown they stay: READY of a fenced incarnation is void, and a cell that is left busy keeps its key.
            looked => looked.and(uses),
        };
        point!("cache.evict_decided");
        Ok((truths, uses))
    }

    /// What an owner knows of a block: its own memory, never the line, on which a stray may lie (CACHE.md C12).
    fn truth(&self, victim: &Victim) -> Result<Descriptor> {
        if mutant!("cache.owner_reads_back")
            && let Some(found) = if_whole(self.host.lines().fetch::<Descriptor>(victim.cell))?
        {
            let Descriptor { owner, incarnation, seq, .. } = victim.descriptor;
            return Ok(Descriptor { state: Descriptor::READY, owner, incarnation, seq, ..found });
        }
        Ok(victim.descriptor)
    }

    fn count_gone(&self, gone: &[Victim], reason: Reason) {
        let counted = match reason {
            Reason::Room => EvictionReason::Capacity,
            Reason::Quota => EvictionReason::Quota,
            Reason::Asked => EvictionReason::Cleared,
            Reason::Duplicate => EvictionReason::Duplicate,
        };
        self.metrics.evictions_total.of(counted).add(gone.len() as u64);
    }

    fn tell_gone(&self, gone: &[Victim], reason: Reason) {
        self.events.emit_all(gone.iter().map(|victim| {
            let (key, namespace, cell) = (BlockKey(victim.descriptor.key), Namespace(victim.descriptor.namespace), victim.cell);
            match reason {
                Reason::Room | Reason::Quota => Change::Evicted { key, namespace, cell },
                Reason::Asked | Reason::Duplicate => Change::Removed { key, namespace, cell },
            }
        }));
    }

    /// Takes those of the blocks that are still there out of the order: by now their cells may hold others.
    pub(in crate::cache) fn take(&self, blocks: &[FoundBlock]) -> Vec<Victim> {
        let mut own = self.cells();
        let victims = blocks.iter().filter_map(|&found| {
            let (cell, parent) = (found.cell, own.parent(found.cell));
            own.take_ready(found).map(|descriptor| Victim { cell, descriptor, parent })
        });
        victims.collect()
    }
}

impl Index {
    /// Removes the hints of blocks whose descriptors are FREE but whose cells are not given out yet (CACHE.md C10). A hint that cannot be
    /// removed now is stale, and overwritten by the next insert that needs its place.
    fn remove_hints(&self, gone: &[Victim]) -> Result<()> {
        let mut homes: Vec<_> = gone
            .iter()
            .map(|victim| (self.home(Namespace(victim.descriptor.namespace), BlockKey(victim.descriptor.key)), victim.cell))
            .collect();
        homes.sort_by_key(|(home, _)| home.stripe);
        let groups: Vec<_> = homes.chunk_by(|a, b| a.0.stripe == b.0.stripe).collect();
        let removed = self.lock_stripes(groups.iter().map(|group| &group[0].0), |place| {
            groups[place].iter().try_for_each(|(home, cell)| self.remove(home, *cell))
        });
        match removed {
            Err(Error::BadLine { .. } | Error::Timeout { .. }) => Ok(()),
            other => other,
        }
    }
}

impl Inner {
    /// Evicts up to `count` blocks of a class, in the order of the policy; returns how many cells are free now that were not.
    pub(in crate::cache) fn evict(&self, class: usize, count: usize) -> Result<usize> {
        let op = self.store.work()?;
        self.host.check_fences(&op)?;
        let (mut freed, mut looked_at, mut younger) = (0, 0, 0);
        let mut candidates: Vec<Candidate> = Vec::new();
        while freed < count && looked_at < LOOKED_AT {
            candidates.clear();
            let tick = self.store.clock_now();
            self.store.cells().victims(class, (count - freed).min(BATCH), tick, &mut candidates);
            if candidates.is_empty() {
                break;
            }
            let chosen = self.store.choose(&candidates, younger < YOUNGER_AT)?;
            looked_at += candidates.len() - chosen.younger;
            younger += chosen.younger;
            let victims = chosen.victims;
            freed += self.retire(&op, victims, Reason::Room)?;
        }
        Ok(freed)
    }

    /// Takes blocks out, unless a host has pinned them. They are busy, in no list; afterwards each is free or READY again.
    /// Returns how many are free.
    pub(in crate::cache) fn retire(&self, op: &Op<'_>, victims: Vec<Victim>, reason: Reason) -> Result<usize> {
        if victims.is_empty() {
            return Ok(0);
        }
        let (truths, uses) = match self.store.mark_evicting(op, &victims) {
            Ok(marked) => marked,
            Err(error) => {
                // They are in no list any more, unless a re-join brings some back, which emits events then.
                self.store.tell_gone(&victims, reason);
                return Err(error);
            }
        };
        // An unknown use counts as pinned.
        let in_use = Use { pinned: true, ..Use::default() };
        let (uses, failure) = match uses {
            Ok(uses) => (uses, None),
            Err(error) => (vec![in_use; victims.len()], Some(error)),
        };
        let gone: Vec<Victim> = victims.iter().zip(&uses).filter(|(_, seen)| !seen.pinned).map(|(victim, _)| *victim).collect();
        // Before any process can publish them again, and emit that.
        self.store.tell_gone(&gone, reason);
        for ((victim, truth), seen) in victims.iter().zip(&truths).zip(&uses) {
            let line = if seen.pinned { *truth } else { self.store.stamp(op.incarnation(), Descriptor::FREE, Descriptor::default()) };
            self.lines().write(victim.cell, line)?;
        }
        self.lines().fence_published();
        let early = mutant!("cache.freed_before_hint_removed");
        if early {
            gone.iter().for_each(|victim| self.store.cells().set_free(victim.cell));
        }
        point!("cache.evicted");
        let tick = self.store.clock_now();
        for (victim, _) in victims.iter().zip(&uses).filter(|(_, seen)| seen.pinned) {
            self.metrics.evictions_pinned_total.inc();
            self.store.cells().set_ready(victim.cell, victim.descriptor, victim.parent, QueueEnd::Young, tick)?;
        }
        self.store.count_gone(&gone, reason);
        self.index.remove_hints(&gone)?;
        if !early {
            gone.iter().for_each(|victim| self.store.cells().set_free(victim.cell));
        }
        failure.map_or(Ok(gone.len()), Err)
    }

    /// Takes out those of this process's blocks that `wanted` says, as far as they are not pinned; returns how many went.
    pub(in crate::cache) fn remove_blocks(&self, wanted: impl FnMut(&Descriptor) -> bool) -> Result<usize> {
        let blocks = self.store.cells().blocks(wanted);
        self.remove_each(blocks, Reason::Asked)
    }

    pub(in crate::cache) fn clear_own(&self, namespace: Option<Namespace>) -> Result<usize> {
        let removed = self.remove_blocks(|block| namespace.is_none_or(|namespace| block.namespace == namespace.0))?;
        if let Some(namespace) = namespace {
            let own = self.store.cells();
            if own.share(&namespace.0).blocks == 0 {
                self.store.events.emit(Change::Cleared { namespace });
            }
        }
        Ok(removed)
    }

    /// Evicts blocks of one namespace that are not pinned, until `bytes` of cells are free: those first that no host has used for
    /// longest, as far as ticks tell, and of these the ones published first. The policy orders the blocks of all namespaces, so it is not
    /// asked.
    pub(in crate::cache) fn evict_of(&self, namespace: Namespace, bytes: u64) -> Result<()> {
        let op = self.store.work()?;
        self.host.check_fences(&op)?;
        let blocks = self.store.cells().blocks_of(&namespace.0);
        let mut missing = bytes;
        for offered in blocks.chunks(OFFERED) {
            let cells: Vec<u64> = offered.iter().map(|(found, _)| found.cell).collect();
            let uses = self.store.uses(&cells)?;
            let mut unused: Vec<_> = offered.iter().zip(&uses).filter(|(_, seen)| !seen.pinned).collect();
            unused.sort_by_key(|(_, seen)| self.store.youngest(seen));
            let wanted = unused.into_iter().map_while(|(&(found, cell_bytes), _)| {
                let is_wanted = missing > 0;
                missing = missing.saturating_sub(cell_bytes);
                is_wanted.then_some(found)
            });
            let wanted: Vec<FoundBlock> = wanted.collect();
            for batch in wanted.chunks(BATCH) {
                let victims = self.store.take(batch);
                self.retire(&op, victims, Reason::Quota)?;
            }
            if missing == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Takes these blocks of this process out, as far as they are not pinned; returns how many went.
    pub(in crate::cache) fn remove_each(&self, blocks: Vec<FoundBlock>, reason: Reason) -> Result<usize> {
        let op = self.store.work()?;
        self.host.check_fences(&op)?;
        let mut removed = 0;
        for batch in blocks.chunks(BATCH) {
            let victims = self.store.take(batch);
            removed += self.retire(&op, victims, reason)?;
        }
        Ok(removed)
    }
}
