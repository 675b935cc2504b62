// SPDX-License-Identifier: Apache-2.0
//! Operations that one thread issued and that have not taken effect yet.

use crate::memory::Bytes;
use crate::random::Random;

/// Something issued that takes effect later.
pub(crate) struct Entry {
    pub(crate) line: u32,
    pub(crate) what: What,
}

/// Kinds of entries.
pub(crate) enum What {
    /// A non-temporal write of (part of) a line: weakly ordered, one unit, past the cache.
    Write { from: u8, len: u8, bytes: Bytes },
    /// An ordinary store into the cache: in order with the other stores of the thread.
    Store { from: u8, len: u8, bytes: Bytes },
    /// A flush. With `early_from`, loads before it are not fenced, so that it may have run since that moment.
    Flush { early_from: Option<u64> },
    /// A store fence: no later operation takes effect before every earlier one.
    Fence,
}

/// One thread's queue, in program order.
pub(crate) struct Queue {
    pub(crate) host: usize,
    /// Whether a load was done since the last fence that orders loads.
    pub(crate) loaded: bool,
    /// Moment of the memory at the last fence that orders loads.
    pub(crate) floor: u64,
    entries: Vec<Entry>,
    fences: usize,
}

impl Queue {
    pub(crate) fn new(host: usize) -> Self {
        Queue { host, loaded: false, floor: 0, entries: Vec::new(), fences: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn has_fence(&self) -> bool {
        self.fences > 0
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.fences = 0;
    }

    pub(crate) fn push(&mut self, line: u32, what: What) {
        self.entries.push(Entry { line, what });
    }

    pub(crate) fn push_flush(&mut self, line: u32) {
        let early_from = self.loaded.then_some(self.floor);
        self.push(line, What::Flush { early_from });
    }

    pub(crate) fn push_fence(&mut self) {
        if !matches!(self.entries.last(), None | Some(Entry { what: What::Fence, .. })) {
            self.fences += 1;
            self.push(0, What::Fence);
        }
    }

    /// Orders the loads so far before everything to come.
    pub(crate) fn fence_loads(&mut self, moment: u64) {
        self.loaded = false;
        self.floor = moment;
    }

    /// Whether a write or store to the line is pending.
    pub(crate) fn touches(&self, line: u32) -> bool {
        self.entries.iter().any(|entry| entry.line == line && matches!(entry.what, What::Write { .. } | What::Store { .. }))
    }

    /// Whether a write of the whole line is pending.
    pub(crate) fn covers(&self, line: u32) -> bool {
        self.entries.iter().any(|entry| entry.line == line && matches!(entry.what, What::Write { len: 64, .. }))
    }

    /// `base` with the pending writes of the line laid over it.
    pub(crate) fn overlay(&self, line: u32, mut base: Bytes) -> Bytes {
        for entry in self.entries.iter().filter(|entry| entry.line == line) {
            if let What::Write { from, len, bytes } | What::Store { from, len, bytes } = &entry.what {
                let range = *from as usize..*from as usize + *len as usize;
                base[range.clone()].copy_from_slice(&bytes[range]);
            }
        }
        base
    }

    /// Takes out one entry by chance, of those that may take effect next.
    pub(crate) fn take(&mut self, random: &mut Random) -> Option<Entry> {
        while matches!(self.entries.first(), Some(Entry { what: What::Fence, .. })) {
            self.entries.remove(0);
            self.fences -= 1;
        }
        if self.entries.is_empty() {
            return None;
        }
        let group = match self.fences {
            0 => self.entries.len(),
            _ => self.entries.iter().position(|entry| matches!(entry.what, What::Fence)).unwrap_or(self.entries.len()),
        };
        let mut at = random.below(group);
        // Walk back to an entry that nothing in front of it holds up.
        while let Some(before) = (0..at).rev().find(|&before| self.holds_up(before, at)) {
            at = before;
        }
        Some(self.entries.remove(at))
    }

    fn holds_up(&self, before: usize, entry: usize) -> bool {
        let (before, entry) = (&self.entries[before], &self.entries[entry]);
        let is_store = |entry: &Entry| matches!(entry.what, What::Store { .. });
        // Stores and the flushes of the fallback path stay in order per thread (TSO; CLFLUSH is ordered with stores).
        before.line == entry.line || (is_store(before) && is_store(entry))
    }
}
