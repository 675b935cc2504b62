// SPDX-License-Identifier: Apache-2.0
//! Who is there: fences, proofs and identities of every slot, as far as they can be read.

use super::fetch_all;
use crate::error::Result;
use crate::line::Lines;
use crate::media::{DeathLine, FenceLine, Identity, SLOTS_PER_FENCE};

/// An incarnation of a slot that a line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claimant {
    /// The slot.
    pub slot: u16,
    /// Its incarnation; `u32::MAX` where the line that would tell does not verify.
    pub incarnation: u32,
}

crate::named::named_enum! {
    /// How an incarnation of a slot stands.
    OwnerStatus {
        /// The line is as the format wrote it: no host wrote it.
        NoHost = "no host",
        /// Neither fenced nor over. It may be that its machine is gone and that this is not noticed yet.
        Live = "live",
        /// It left or was taken over without being fenced, and every operation of it has ended: what it published is served until a process
        /// adopts it.
        Left = "left",
        /// Fenced, and it may still write: what it published is void.
        Fenced = "fenced",
        /// Fenced, and every operation of it has ended.
        Over = "over",
        /// It cannot have existed: no such slot, or no such incarnation of the slot so far.
        Never = "never joined",
        /// The lines that would tell do not verify.
        Unknown = "unknown",
    }
}

impl OwnerStatus {
    /// What it claims or pins counts: it is not known to be fenced or over.
    pub fn is_there(self) -> bool {
        matches!(self, OwnerStatus::Live | OwnerStatus::Never)
    }

    /// Every operation of it has ended: nothing of it turns up any more.
    pub fn has_ended(self) -> bool {
        matches!(self, OwnerStatus::Left | OwnerStatus::Over)
    }
}

#[derive(Clone, Copy, Default)]
struct HostSlot {
    /// Fenced up to here, over all rows that verify.
    fenced: u32,
    /// A row that would tell of it does not verify.
    is_fence_hidden: bool,
    dead: u32,
    identity: Option<Identity>,
}

pub(super) struct Hosts {
    slots: Vec<HostSlot>,
}

impl Hosts {
    pub fn load(lines: &Lines) -> Result<Self> {
        let geometry = lines.layout().geometry();
        let mut slots = vec![HostSlot::default(); geometry.slots as usize];
        let rows: Vec<u64> = (0..geometry.all_seats() * geometry.fence_lines()).collect();
        let fences: Vec<Option<FenceLine>> = fetch_all(lines, &rows)?;
        let deaths: Vec<Option<DeathLine>> = fetch_all(lines, &rows)?;
        for (row, (fence, death)) in fences.iter().zip(&deaths).enumerate() {
            let first = row % geometry.fence_lines().max(1) as usize * SLOTS_PER_FENCE;
            for (place, slot) in slots.iter_mut().skip(first).take(SLOTS_PER_FENCE).enumerate() {
                slot.fenced = slot.fenced.max(fence.map_or(0, |line| line.fenced[place]));
                slot.is_fence_hidden |= fence.is_none();
                slot.dead = slot.dead.max(death.map_or(0, |line| line.dead[place]));
            }
        }
        let identities: Vec<Option<Identity>> = fetch_all(lines, &(0..u64::from(geometry.slots)).collect::<Vec<u64>>())?;
        for (slot, identity) in slots.iter_mut().zip(identities) {
            slot.identity = identity;
        }
        Ok(Hosts { slots })
    }

    pub fn was_joined(&self, slot: u16) -> bool {
        self.slots.get(usize::from(slot)).is_some_and(|slot| slot.identity.is_none_or(|identity| identity.incarnation > 0))
    }

    pub fn latest(&self, slot: u16) -> Claimant {
        let identity = self.slots.get(usize::from(slot)).and_then(|slot| slot.identity);
        Claimant { slot, incarnation: identity.map_or(u32::MAX, |identity| identity.incarnation) }
    }

    /// Whether the fences of a slot cannot be read.
    pub fn is_hidden(&self, slot: u16) -> bool {
        self.slots.get(usize::from(slot)).is_none_or(|slot| slot.is_fence_hidden)
    }

    /// The void rule (CACHE.md D2): unknown is void.
    pub fn is_void(&self, Claimant { slot, incarnation }: Claimant) -> bool {
        self.slots.get(usize::from(slot)).is_none_or(|slot| slot.is_fence_hidden || slot.fenced >= incarnation)
    }

    pub fn standing(&self, Claimant { slot, incarnation }: Claimant) -> OwnerStatus {
        let Some(slot) = self.slots.get(usize::from(slot)) else { return OwnerStatus::Never };
        if incarnation == 0 {
            return OwnerStatus::NoHost;
        }
        let has_ended = slot.dead >= incarnation
            || slot.identity.is_some_and(|identity| {
                let left = identity.state == Identity::LEFT && identity.incarnation >= incarnation;
                left || identity.acknowledged.max(identity.drained) >= incarnation
            });
        match (slot.fenced >= incarnation, has_ended) {
            (true, true) => OwnerStatus::Over,
            (true, false) => OwnerStatus::Fenced,
            _ if slot.is_fence_hidden => OwnerStatus::Unknown,
            (false, true) => OwnerStatus::Left,
            (false, false) => match slot.identity {
                None => OwnerStatus::Unknown,
                Some(identity) if identity.incarnation < incarnation => OwnerStatus::Never,
                Some(_) => OwnerStatus::Live,
            },
        }
    }
}
