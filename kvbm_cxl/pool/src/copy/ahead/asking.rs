// SPDX-License-Identifier: Apache-2.0
//! The thread that sends a device its hints.

use super::Pages;
use crate::background::{Background, held};
use crate::coherence::Coherence;
use crate::copy::ReadList;
use crate::cpus::CpuSet;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Lines that are flushed with one fence and then asked for: about as many as a processor waits for at a time.
const TOGETHER: usize = 16;
/// Lists that wait for their hints. A thread that lags so far is of no use to those that come later.
const MAX_WAITING: usize = 256;

/// The lists of one call of an engine.
pub(super) struct CopyCall {
    /// Of each list one line of every page.
    lines: Vec<Vec<u64>>,
    /// Pages of each list that were given and are neither used nor wasted so far.
    open: Vec<AtomicU64>,
    ended: AtomicUsize,
    pages: Arc<Pages>,
}

impl CopyCall {
    pub(super) fn of(lists: &[ReadList<'_>], page_bytes: u64, pool_bytes: u64, pages: Arc<Pages>) -> CopyCall {
        let lines: Vec<Vec<u64>> = lists.iter().map(|list| list.lines_by_page(page_bytes, pool_bytes)).collect();
        CopyCall { open: lines.iter().map(|_| AtomicU64::new(0)).collect(), lines, ended: AtomicUsize::new(0), pages }
    }

    pub(super) fn first_offset(&self) -> Option<u64> {
        self.lines.iter().flatten().next().copied()
    }

    /// Tells the device of the pages of a list, as long as its copy has not ended.
    pub(super) fn give(&self, list: usize, memory: &dyn Coherence) {
        for lines in self.lines.get(list).map(Vec::as_slice).unwrap_or_default().chunks(TOGETHER) {
            if self.has_ended(list) {
                return;
            }
            // What this host has in a cache, of an earlier copy, would keep the device from hearing of it.
            let asked = memory.flush_lines(lines).and_then(|()| {
                memory.fence_all();
                memory.prefetch_lines(lines)
            });
            if asked.is_err() {
                // The copy meets the same error, and says so to its caller.
                return;
            }
            self.pages.given.fetch_add(lines.len() as u64, Relaxed);
            if let Some(open) = self.open.get(list) {
                open.fetch_add(lines.len() as u64, AcqRel);
            }
            if self.has_ended(list) {
                self.settle(list, &self.pages.wasted);
            }
        }
    }

    fn has_ended(&self, list: usize) -> bool {
        self.ended.load(Acquire) > list
    }

    /// Each page is taken by one who looks, so that it counts once.
    fn settle(&self, list: usize, as_what: &AtomicU64) {
        if let Some(open) = self.open.get(list) {
            as_what.fetch_add(open.swap(0, AcqRel), Relaxed);
        }
    }

    /// The copy of a list, the next in their order, has ended; its pages that still wait for a hint get none.
    pub(super) fn end_list(&self, list: usize, is_copied: bool) {
        let Pages { used, wasted, .. } = &*self.pages;
        self.settle(list, if is_copied { used } else { wasted });
        self.ended.store(list + 1, Release);
        // Pages that were added between the two.
        self.settle(list, wasted);
    }
}

/// A thread that has nothing to do rests this long; it is woken.
const IDLE: Duration = Duration::from_secs(3600);

/// Lists of calls that wait for the thread.
type Waiting = Mutex<VecDeque<(Arc<CopyCall>, usize)>>;

/// The thread, while this lives.
pub(super) struct HintThread {
    waiting: Arc<Waiting>,
    /// `None` if it did not start: then no hints are given, and the copies wait for the device as they would without.
    thread: Option<Background>,
    process: u32,
}

impl HintThread {
    pub(super) fn start(memory: Arc<dyn Coherence>, cpus: Option<&CpuSet>) -> HintThread {
        let waiting = Arc::<Waiting>::default();
        let lists = waiting.clone();
        let round = move || {
            let Some((call, list)) = held(&lists).pop_front() else { return Some(IDLE) };
            call.give(list, &*memory);
            Some(Duration::ZERO)
        };
        let thread = Background::start("cxl-ahead", "start the thread that reads ahead", cpus, round);
        let thread = thread.inspect_err(|error| log::warn!("no thread to read ahead with: {error}")).ok();
        HintThread { waiting, thread, process: std::process::id() }
    }

    /// A forked process has no such thread, and its lock may be held for ever.
    fn is_of_another_process(&self) -> bool {
        self.process != std::process::id()
    }

    /// Gives it lists of a call.
    pub(super) fn add(&self, call: &Arc<CopyCall>, lists: Range<usize>) {
        let Some(thread) = self.thread.as_ref().filter(|_| !lists.is_empty() && !self.is_of_another_process()) else { return };
        let mut waiting = held(&self.waiting);
        let room = MAX_WAITING.saturating_sub(waiting.len());
        waiting.extend(lists.take(room).map(|list| (call.clone(), list)));
        drop(waiting);
        thread.wake();
    }
}

impl Drop for HintThread {
    fn drop(&mut self) {
        if self.is_of_another_process() {
            std::mem::forget(self.thread.take());
        }
    }
}
