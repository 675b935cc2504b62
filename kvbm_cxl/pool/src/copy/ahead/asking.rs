// SPDX-License-Identifier: Apache-2.0
//! The thread that tells a device what is wanted next.

use super::Pages;
use crate::background::held;
use crate::coherence::Coherence;
use crate::copy::ReadList;
use crate::cpus::CpuSet;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Lines that are flushed with one fence and then asked for: about as many as a processor waits for at a time.
const TOGETHER: usize = 16;
/// Lists that wait to be told of. A thread that falls so far behind is of no use to those that come later.
const MAX_WAITING: usize = 256;

/// The lists of one call of an engine.
pub(super) struct Call {
    /// Of each list one line of every page.
    lines: Vec<Vec<u64>>,
    /// Pages of each list that were given and are neither used nor wasted so far.
    open: Vec<AtomicU64>,
    /// Lists whose copy has ended, from the first on.
    ended: AtomicUsize,
    pages: Arc<Pages>,
}

impl Call {
    pub(super) fn of(lists: &[ReadList<'_>], page_bytes: u64, pool_bytes: u64, pages: Arc<Pages>) -> Call {
        let lines: Vec<Vec<u64>> = lists.iter().map(|list| list.lines_by_page(page_bytes, pool_bytes)).collect();
        Call { open: lines.iter().map(|_| AtomicU64::new(0)).collect(), lines, ended: AtomicUsize::new(0), pages }
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

    /// The copy of a list, the next in their order, has ended; what of it is still waiting to be told is not any more.
    pub(super) fn ended(&self, list: usize, is_copied: bool) {
        let Pages { used, wasted, .. } = &*self.pages;
        self.settle(list, if is_copied { used } else { wasted });
        self.ended.store(list + 1, Release);
        // What was given between the two.
        self.settle(list, wasted);
    }
}

/// Lists that wait, and whether the thread has to end.
#[derive(Default)]
struct Waiting {
    lists: VecDeque<(Arc<Call>, usize)>,
    is_over: bool,
}

#[derive(Default)]
struct Desk {
    waiting: Mutex<Waiting>,
    bell: Condvar,
}

/// The thread, while this lives.
pub(super) struct Asker {
    desk: Arc<Desk>,
    /// None where no thread could be had: then no hints are given, and the copies wait for the device as they would without.
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Asker {
    pub(super) fn start(memory: Arc<dyn Coherence>, cpus: Option<&CpuSet>) -> Asker {
        let (desk, cpus) = (Arc::new(Desk::default()), cpus.cloned());
        let at = desk.clone();
        let run = move || {
            // They were tried when the pool was joined; a thread elsewhere asks as well.
            if let Some(Err(error)) = cpus.map(|cpus| cpus.bind_current_thread()) {
                log::warn!("the thread that reads ahead: {error}");
            }
            at.serve(&*memory);
        };
        let thread = std::thread::Builder::new().name("cxl-ahead".into()).spawn(run);
        let thread = thread.inspect_err(|error| log::warn!("no thread to read ahead with: {error}")).ok();
        Asker { desk, thread, process: std::process::id() }
    }

    /// A forked process has no such thread, and its lock may be held for ever.
    fn is_of_another_process(&self) -> bool {
        self.process != std::process::id()
    }

    /// Has it tell of lists of a call.
    pub(super) fn ask(&self, call: &Arc<Call>, lists: Range<usize>) {
        if self.thread.is_none() || lists.is_empty() || self.is_of_another_process() {
            return;
        }
        let mut waiting = held(&self.desk.waiting);
        let room = MAX_WAITING.saturating_sub(waiting.lists.len());
        waiting.lists.extend(lists.take(room).map(|list| (call.clone(), list)));
        drop(waiting);
        self.desk.bell.notify_one();
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        if self.is_of_another_process() {
            return;
        }
        held(&self.desk.waiting).is_over = true;
        self.desk.bell.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there is a bug of ours; it has been printed, and there is no caller to hand it to in a drop.
            let _ = thread.join();
        }
    }
}

impl Desk {
    fn serve(&self, memory: &dyn Coherence) {
        let mut waiting = held(&self.waiting);
        while !waiting.is_over {
            match waiting.lists.pop_front() {
                Some((call, list)) => {
                    drop(waiting);
                    call.give(list, memory);
                    drop(call);
                    waiting = held(&self.waiting);
                }
                None => waiting = self.bell.wait(waiting).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}
