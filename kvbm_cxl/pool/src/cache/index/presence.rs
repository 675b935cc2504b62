// SPDX-License-Identifier: Apache-2.0
//! Whether a block that is not there is on its way, for readers that would rather wait for it than do without.
//!
//! A reservation is in the table before its first byte is written, so that a reader can tell a block that is being written from one that
//! never was. The answer is advice, as that of a lookup: no byte is read for it, and a block that comes is pulled as any other.

use crate::cache::index::Index;
use crate::cache::{BlockKey, Cache, Namespace};
use crate::error::Result;
use crate::fault::mutant;
use crate::media::Descriptor;

/// The state of a block, as a look without a pin shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// There is none, or it is about to go.
    Absent,
    /// A host that is not known to be fenced has reserved a cell for it, and has not committed it yet.
    Coming,
    /// It can be pulled.
    There,
}

impl Index {
    fn presence(&self, namespace: Namespace, key: BlockKey, cells: &mut Vec<u64>) -> Result<Presence> {
        cells.clear();
        self.candidates(&self.home(namespace, key), cells)?;
        let mut presence = Presence::Absent;
        for &cell in cells.iter() {
            let Some(found) = self.descriptor(cell)? else { continue };
            let is_lost = self.known_fences.is_fenced(found.owner, found.incarnation) && !mutant!("cache.the_fenced_still_write");
            if found.key != key.0 || found.namespace != namespace.0 || is_lost {
                continue;
            }
            match found.state {
                Descriptor::READY => return Ok(Presence::There),
                Descriptor::WRITING => presence = Presence::Coming,
                _ => {}
            }
        }
        Ok(presence)
    }
}

impl Cache {
    /// The states of several blocks: there, on their way, or neither; one answer for each key, in order. A block of a host that dies in the
    /// middle of writing it is absent once that host is fenced; one of a process that dies, once another process of its host has given its
    /// cell up.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn presence(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Presence>> {
        self.inner.index.renew_fences();
        let mut cells = Vec::new();
        keys.iter().map(|&key| self.inner.index.presence(namespace, key, &mut cells)).collect()
    }
}
