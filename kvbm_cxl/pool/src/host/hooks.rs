// SPDX-License-Identifier: Apache-2.0
//! The layers above a host keep things in its machine: memory that its processes share, and stores that its caches have not written back.
//! The host reaches them through a table of functions, which `pool.rs` has and [`Host::join`](super::Host::join) gets.

use super::Inner;
use crate::error::{Error, Result};
use crate::line::Lines;
use crate::media::Layout;
use crate::platform::LocalMemory;

/// What one layer above lets the host call.
#[derive(Clone, Copy)]
pub struct Hooks {
    /// What errors call the layer.
    pub name: &'static str,
    /// Bytes that the layer takes of the memory that a host's processes share, for a pool of that layout; a multiple of 64. The parts lie
    /// in the order of the table.
    pub local_bytes: fn(&Layout) -> usize,
    /// Flushes the residue that the layer's part of the pool has in this machine's caches. After an error of the memory the host may not
    /// say yet that the work has ended.
    pub flush_residue: fn(&Residue<'_>) -> Result<()>,
}

/// Stores to the pool that may still be in this machine's caches: they would be written back at any later time, over newer data.
pub struct Residue<'a> {
    /// The pool.
    pub lines: &'a Lines,
    /// The layer's part of what this host's processes share.
    pub local: LocalMemory,
    /// The slot of the host that stored.
    pub slot: u16,
    /// Of which of its work.
    pub of: Work<'a>,
}

/// Work that has ended, or is about to be said to have.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// That of this machine's incarnation before, all of whose processes are gone.
    Former {
        /// That incarnation left, and flushed its blocks then.
        has_left: bool,
    },
    /// That of this host, which leaves.
    Leaving,
    /// That of this host, whose pool is being formatted again.
    Void,
    /// That of those processes of this host for whose tags the function holds; tag 0 stands for no process.
    Processes(&'a dyn Fn(u32) -> bool),
    /// That of another host of this machine, or of one before it that this host's memory does not know: only what its slot claims tells.
    Claimed,
}

/// The part of one layer of `above`, the memory that a host's processes share for the layers above it.
///
/// # Errors
/// [`Error::Invalid`] when the memory ends before it, or the host was joined without that layer.
pub(super) fn part_of(hooks: &[Hooks], name: &str, layout: &Layout, above: &LocalMemory) -> Result<LocalMemory> {
    let refused = |why: &str| Err(Error::Invalid(format!("the local memory has no room for {name}: {why}")));
    let mut before = 0;
    for layer in hooks {
        let len_bytes = (layer.local_bytes)(layout);
        if layer.name != name {
            before += len_bytes;
        } else if before + len_bytes <= above.len_bytes {
            // SAFETY: the part lies inside the memory, as just checked.
            let start = unsafe { above.start.byte_add(before) };
            return Ok(LocalMemory { start, len_bytes, owner: above.owner.clone() });
        } else {
            return refused("stop the older processes of this machine");
        }
    }
    refused("this host was joined without it")
}

/// Calls every layer's hook, in the order of the table; `above` is what the host's processes share for all of them.
pub(super) fn flush_residue(hooks: &[Hooks], lines: &Lines, above: &LocalMemory, slot: u16, of: Work<'_>) -> Result<()> {
    for layer in hooks {
        let local = part_of(hooks, layer.name, lines.layout(), above)?;
        (layer.flush_residue)(&Residue { lines, local, slot, of })?;
    }
    Ok(())
}

impl Inner {
    pub(super) fn flush_residue(&self, slot: u16, of: Work<'_>) -> Result<()> {
        flush_residue(self.hooks, &self.lines, &self.segment.behind(), slot, of)
    }
}
