// SPDX-License-Identifier: Apache-2.0
//! Read-ahead by hint, for devices that keep most of their pages in flash, with a small memory as their cache (CXL-SSD): who copies a list
//! of blocks knows which ones come next, and tells the device before it comes to them.
//!
//! A hint is a prefetch of one line in each page ([`Coherence::prefetch_lines`]), made by a thread of its own: the device answers it when
//! it has the page, and until then it takes a place in the queue of the processor that asked, where a copy would wait after it. It changes
//! no byte and no answer. The lines that it brings into this host's caches may be old by the time of the copy, like all others there: the
//! copy flushes first, as ever (I5). A hint that comes too late or fails costs time alone; the copy after it meets the same error and
//! reports it.

mod asking;
mod depth;

use super::config::{CopyConfig, ReadAhead};
use super::cuda::{QueueRoom, Reach};
use super::{Checksum, Copied, CopyEngine, Outcome, ReadList, WriteList};
use crate::background::held;
use crate::coherence::Coherence;
use crate::cpus::CpuSet;
use crate::error::Result;
use asking::{CopyCall, HintThread};
use depth::Depth;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// Lists that are copied with one call of the engine below, in bytes: the shorter, the sooner the device hears of the next ones; each costs
/// a flush and two fences.
const STEP_BYTES: u64 = 128 << 10;

/// Pages that a device got hints for, since the engine was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AheadPages {
    /// All of them.
    pub given: u64,
    /// Those of blocks that were copied afterwards, or were being copied.
    pub used: u64,
    /// Those whose hints were in vain: their copy failed, or had gone past them.
    pub wasted: u64,
}

#[derive(Default)]
struct Pages {
    given: AtomicU64,
    used: AtomicU64,
    wasted: AtomicU64,
}

/// An engine that tells the device of the blocks that come next, and has another one copy.
///
/// Blocks of a list are copied one after the other, so that the next ones are known; one block alone gets hints as a whole. Lists of a GPU
/// go to the engine below as they are, since all of them are one copy there.
pub struct AheadEngine {
    inner: Arc<dyn CopyEngine>,
    memory: Arc<dyn Coherence>,
    depth: Mutex<Depth>,
    page_bytes: u64,
    cpus: Option<CpuSet>,
    /// The thread that asks; a forked process has none, and gives no hints.
    hints: OnceLock<HintThread>,
    pages: Arc<Pages>,
}

impl AheadEngine {
    /// Over `inner`, for copies from the pool that `memory` is; the thread that asks runs on `cpus`, where they are given. `inner` itself
    /// where nothing is to be read ahead.
    pub fn over(inner: Arc<dyn CopyEngine>, memory: Arc<dyn Coherence>, config: &CopyConfig, cpus: Option<&CpuSet>) -> Arc<dyn CopyEngine> {
        if config.read_ahead == ReadAhead::Off {
            return inner;
        }
        Arc::new(AheadEngine {
            inner,
            memory,
            depth: Mutex::new(Depth::new(config.read_ahead)),
            page_bytes: config.ahead_page_bytes as u64,
            cpus: cpus.cloned(),
            hints: OnceLock::new(),
            pages: Arc::default(),
        })
    }

    /// Of how many blocks it tells the device now.
    pub fn blocks(&self) -> usize {
        held(&self.depth).blocks()
    }

    /// Tells the device of lists of a call, from one place to another.
    fn ask(&self, call: &Arc<CopyCall>, lists: std::ops::Range<usize>) {
        let Some(first) = call.first_offset() else { return };
        if self.memory.address(first, 1).is_none() {
            // Simulated hosts have no threads besides those of the scenario.
            lists.for_each(|list| call.give(list, &*self.memory));
            return;
        }
        self.hints.get_or_init(|| HintThread::start(self.memory.clone(), self.cpus.as_ref())).add(call, lists);
    }

    /// Copies by the engine below, and learns from how long that takes.
    fn measure(&self, lists: usize, len_bytes: u64, copy: impl FnOnce() -> Vec<Outcome>) -> Vec<Outcome> {
        let begun = Instant::now();
        let done = copy();
        let taken_ns = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        held(&self.depth).learn(lists, len_bytes, taken_ns);
        done
    }
}

fn len_of(lists: &[ReadList<'_>]) -> u64 {
    lists.iter().fold(0, |sum, list| sum.saturating_add(list.len_bytes()))
}

/// The first lists that are copied with one call: one, or as many as are short together.
fn step_of(lists: &[ReadList<'_>]) -> usize {
    let mut sum = 0u64;
    let within = lists.iter().take_while(|list| {
        sum = sum.saturating_add(list.len_bytes());
        sum <= STEP_BYTES
    });
    within.count().max(1).min(lists.len())
}

impl CopyEngine for AheadEngine {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        self.inner.publish_each(memory, lists, checksum)
    }

    fn publish(&self, memory: &dyn Coherence, list: &WriteList<'_>, checksum: Checksum) -> Outcome {
        self.inner.publish(memory, list, checksum)
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        if lists.iter().any(|list| list.place().gpu().is_some()) {
            return self.inner.pull_each(memory, lists, checksum);
        }
        let blocks = self.blocks();
        if blocks == 0 {
            return self.measure(lists.len(), len_of(lists), || self.inner.pull_each(memory, lists, checksum));
        }
        let call = Arc::new(CopyCall::of(lists, self.page_bytes, memory.len_bytes(), self.pages.clone()));
        let (mut outcomes, mut asked) = (Vec::with_capacity(lists.len()), 0);
        let mut left = lists;
        while !left.is_empty() {
            let (step, rest) = left.split_at_mut(step_of(left));
            let behind = outcomes.len() + step.len();
            let wanted = behind + blocks.min(rest.len());
            self.ask(&call, asked..wanted);
            asked = wanted;
            let done = self.measure(step.len(), len_of(step), || self.inner.pull_each(memory, step, checksum));
            done.iter().enumerate().for_each(|(place, outcome)| call.end_list(outcomes.len() + place, outcome.is_ok()));
            outcomes.extend(done);
            left = rest;
        }
        outcomes
    }

    fn is_settled(&self, timeout_ms: u64) -> bool {
        self.inner.is_settled(timeout_ms)
    }

    fn open_gpu(&self, device: u32) -> Result<Reach> {
        self.inner.open_gpu(device)
    }

    fn queue_room(&self, device: u32, len_bytes: u64) -> Result<QueueRoom> {
        self.inner.queue_room(device, len_bytes)
    }

    fn counters(&self) -> Vec<Copied> {
        self.inner.counters()
    }

    fn ahead_pages(&self) -> AheadPages {
        let Pages { given, used, wasted } = &*self.pages;
        AheadPages { given: given.load(Relaxed), used: used.load(Relaxed), wasted: wasted.load(Relaxed) }
    }
}

#[cfg(test)]
mod tests;
