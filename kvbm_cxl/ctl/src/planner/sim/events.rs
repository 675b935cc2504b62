// SPDX-License-Identifier: Apache-2.0
//! What happens next.

use super::Ns;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Something that happens to a request, by its number, at an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// Its time has come, as recorded.
    Due { request: u32 },
    /// It comes: it is due, and the one before it in its session is answered.
    Arrived { request: u32 },
    /// Its prefill is done.
    Computed { request: u32, instance: u32 },
    /// The missing blocks are in own DRAM.
    Saved { request: u32, instance: u32 },
    /// The missing blocks are in the pool.
    Published { request: u32, instance: u32 },
}

/// Events by time; those of one time in the order in which they were entered.
#[derive(Default)]
pub struct Events {
    heap: BinaryHeap<Reverse<(Ns, u64, Event)>>,
    entered: u64,
}

impl Events {
    pub fn at(&mut self, time: Ns, event: Event) {
        self.entered += 1;
        self.heap.push(Reverse((time, self.entered, event)));
    }

    pub fn next(&mut self) -> Option<(Ns, Event)> {
        self.heap.pop().map(|Reverse((time, _, event))| (time, event))
    }
}
