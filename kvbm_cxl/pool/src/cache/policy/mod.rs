// SPDX-License-Identifier: Apache-2.0
//! Which cached block goes first when room is needed: one trait for the eviction orders, in the owner's own memory.
//!
//! A policy follows the READY cells that one process owns. It never touches the pool: what it holds can be lost and is rebuilt from the
//! descriptors, and a wrong order costs hits, never right bytes.
//!
//! | name | order | bytes per cell |
//! |---|---|---|
//! | `lru` | least recently used first, as TraCT (section 4.2) does | 16 |
//! | `leaf-lru` | [`LeafFirst`]: as `lru`, and no block before the blocks that continue it | 48, and 30 to 60 for the names |
//!
//! Memory grows with the cells followed, in pages of 256 cells, and stays at its highest mark.
//!
//! # Recency from two sources
//!
//! Touches of this process reach the policy at once. Uses by other hosts are known only as ticks in their pin lines, which the upkeep
//! reads in turn ([`EvictionPolicy::used_elsewhere`]), and the evictor when it already has a candidate. So eviction is a dialogue:
//!
//! ```
//! use cxl_pool::cache::policy::{Candidate, Entry, EvictionPolicy, PolicyKind, QueueEnd, Verdict};
//! # fn main() -> cxl_pool::Result<()> {
//! let mut policy = PolicyKind::Lru.build(1 << 20);
//! let now = 7; // ticks seen by this process, see TickClock
//! for cell in 0..4 {
//!     policy.on_insert(&Entry { cell, key: [cell as u8; 16], namespace: [0; 16], parent: None }, QueueEnd::Young, now)?;
//! }
//! policy.on_use(0, now + 1);
//! let mut candidates: Vec<Candidate> = Vec::new();
//! policy.victims(2, now + 2, &mut candidates);
//! assert_eq!(candidates.iter().map(|candidate| candidate.cell).collect::<Vec<_>>(), [1, 2]);
//! // Cell 1 was used by another host at tick 8, which is younger than the 7 known here. No host has cell 2.
//! assert!(!policy.settle(1, Verdict::Younger { tick: 8 }));
//! assert!(policy.settle(2, Verdict::Evicted));
//! # Ok(())
//! # }
//! ```
//!
//! A candidate is out of the order until it is settled: no second caller gets it. Every [`Verdict::Younger`] raises what the policy knows
//! of the cell, and ticks end at the present one, so an evictor that keeps asking ends.

mod cells;
mod leaf_first;
mod lru;
#[cfg(test)]
mod tests;
mod tick;

pub use leaf_first::LeafFirst;
pub use lru::Lru;
pub use tick::{CYCLE_TICKS, TickClock};

use crate::error::{Error, Result};
use std::fmt;

/// A block that entered a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of the cell in the pool.
    pub cell: u64,
    /// Chained hash of the block.
    pub key: [u8; 16],
    /// Digest of the namespace that the key belongs to.
    pub namespace: [u8; 16],
    /// Key of the block before it in the chain, in the same namespace; `None` of a first block, and where it is not known.
    pub parent: Option<[u8; 16]>,
}

/// Where a block enters the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueEnd {
    /// As just used.
    Young,
    /// As never used: a block adopted from another host, or found after a restart. It goes first unless some host has used it lately.
    Old,
}

/// A cell that the policy would evict next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the cell in the pool.
    pub cell: u64,
    /// Tick of the last use that the policy knows of; 0 where it knows of none. A host that used it at a later tick is news.
    pub tick: u32,
}

/// What the evictor found out about a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No host has it pinned, and none has used it later than the policy knows: it is to go.
    Evicted,
    /// A host has it pinned: it goes back to the young end.
    InUse,
    /// Another host has used it at this tick, after the last use that the policy knew of: it gets the place that this earns it.
    Younger {
        /// Tick of that use, as [`TickClock::tick_of`] gives it.
        tick: u32,
    },
    /// Not looked at, for example after an error: it goes back to the old end.
    Kept,
}

/// An order in which blocks are evicted. Cells that the policy does not follow are ignored, so that late or doubled news does no harm.
///
/// `tick` is always the present count of ticks of this process ([`TickClock`]); an earlier one is read as the latest seen.
pub trait EvictionPolicy: Send {
    /// A cell has become READY. A cell that was followed already is taken as removed before.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the number of the cell is not below the number of cells that the policy was made for.
    fn on_insert(&mut self, entry: &Entry, place: QueueEnd, tick: u32) -> Result<()>;

    /// A block was found and used by this process.
    fn on_use(&mut self, cell: u64, tick: u32);

    /// Another host used a block at `tick`, as its pin line says. Nothing where that is no news: it was used as late, or it is a candidate,
    /// which is looked at anyway.
    fn used_elsewhere(&mut self, cell: u64, tick: u32);

    /// A cell was given up for a reason other than eviction. It is no longer followed.
    fn on_remove(&mut self, cell: u64);

    /// Appends up to `count` cells to `out`, first the one to be evicted first. Each is out of the order until [`settle`](Self::settle).
    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>);

    /// Answers for a candidate, in the order in which candidates were given. True where this ends the following of the cell, and the caller
    /// is to free it. False where it stays, or was [removed](Self::on_remove) by another thread meanwhile.
    ///
    /// A policy can refuse [`Verdict::Evicted`]: one that offers a block because it has just offered the block that continues it keeps it
    /// where that one was kept. So settle before the descriptor says FREE.
    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool;

    /// Cells followed, candidates among them.
    fn len(&self) -> usize;

    /// True where no cell is followed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The policies by name. The numbers are those of the C interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// [`Lru`].
    #[default]
    Lru = 0,
    /// [`LeafFirst`].
    LeafLru = 3,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 2] = [PolicyKind::Lru, PolicyKind::LeafLru];

    /// Reads a name.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the names there are.
    pub fn parse(text: &str) -> Result<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let names: Vec<&str> = PolicyKind::ALL.iter().map(|kind| kind.name()).collect();
            Error::Invalid(format!("eviction policy {text:?} is not known: choose one of {}", names.join(", ")))
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::LeafLru => "leaf-lru",
        }
    }

    /// An empty policy for cells with numbers below `cells`.
    pub fn build(self, cells: u64) -> Box<dyn EvictionPolicy> {
        match self {
            PolicyKind::Lru => Box::new(Lru::new(cells)),
            PolicyKind::LeafLru => Box::new(LeafFirst::new(cells)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for PolicyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<PolicyKind> {
        PolicyKind::parse(text)
    }
}

/// A block's name in one word. Two blocks with the same one are taken for each other, which costs no more than a place in the order.
fn fingerprint(namespace: &[u8; 16], key: &[u8; 16]) -> u64 {
    let words: [[u64; 2]; 2] = [bytemuck::cast(*namespace), bytemuck::cast(*key)];
    words.iter().flatten().fold(0x51ce_5bd1_e995_0b17, |all: u64, word| {
        let mixed = (all ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
        mixed ^ (mixed >> 32)
    })
}
