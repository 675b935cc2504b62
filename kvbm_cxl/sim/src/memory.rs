// SPDX-License-Identifier: Apache-2.0
//! The memory and the private caches over it: what a load may return and when a write may arrive. Knows nothing of scheduling.

use crate::queue::{Entry, Queue, What};
use crate::random::Random;
use crate::sparse::Sparse;
use std::collections::VecDeque;

/// The bytes of a line.
pub(crate) type Bytes = [u8; 64];

/// How a host holds a line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LineState {
    Absent,
    Clean,
    Dirty,
}

/// Changes of the memory before which an early flush may still have run.
const LOG_CHANGES: usize = 512;
/// Lines touched last, the candidates of the prefetcher and of evictions.
const RECENT_LINES: usize = 16;

/// A line of the memory.
#[derive(Clone, Copy)]
struct Stored {
    bytes: Bytes,
    /// One bit for each host that ever changed it.
    writers: u32,
}

/// A line as one host holds it.
#[derive(Clone, Copy)]
struct Copied {
    state: LineState,
    data: Bytes,
    /// Moment of the memory that this host has seen the line at, at least: it never sees an older one again.
    seen: u64,
}

/// One host's private cache.
struct Cache {
    lines: Sparse<Copied>,
    dirty: Vec<u32>,
}

/// A change of the memory: the line held `old` until `moment`.
struct Change {
    moment: u64,
    line: u32,
    old: Bytes,
}

/// The shared memory, every host's cache, and every thread's writes and flushes that have not taken effect yet.
pub(crate) struct Memory {
    lines: usize,
    stored: Sparse<Stored>,
    caches: Vec<Cache>,
    queues: Vec<Queue>,
    log: VecDeque<Change>,
    /// Counts the changes of the memory.
    moment: u64,
    recent: [u32; RECENT_LINES],
    touched: usize,
}

impl Memory {
    pub(crate) fn new(lines: usize) -> Self {
        Memory {
            lines,
            stored: Sparse::new(lines, Stored { bytes: [0; 64], writers: 0 }),
            caches: Vec::new(),
            queues: Vec::new(),
            log: VecDeque::with_capacity(LOG_CHANGES),
            moment: 1,
            recent: [0; RECENT_LINES],
            touched: 0,
        }
    }

    pub(crate) fn lines(&self) -> usize {
        self.lines
    }

    pub(crate) fn add_host(&mut self) {
        let absent = Copied { state: LineState::Absent, data: [0; 64], seen: 0 };
        self.caches.push(Cache { lines: Sparse::new(self.lines, absent), dirty: Vec::new() });
    }

    /// Adds a thread of `host`; threads are numbered from 0.
    pub(crate) fn add_thread(&mut self, host: usize) {
        self.queues.push(Queue::new(host));
    }

    /// What the memory itself holds.
    pub(crate) fn raw(&self, line: u32) -> &Bytes {
        &self.stored.get(line).bytes
    }

    /// Changes the memory itself, past every cache and without a writer.
    pub(crate) fn set_raw(&mut self, line: u32, bytes: &Bytes) {
        self.stored.get_mut(line).bytes = *bytes;
    }

    /// One bit for each host that ever changed the line in memory.
    pub(crate) fn writers(&self, line: u32) -> u32 {
        self.stored.get(line).writers
    }

    /// Whether `host` holds a copy that differs from the memory.
    pub(crate) fn is_stale(&self, host: usize, line: u32) -> bool {
        let held = self.caches[host].lines.get(line);
        held.state != LineState::Absent && held.data != *self.raw(line)
    }

    /// The present moment of the memory.
    pub(crate) fn moment(&self) -> u64 {
        self.moment
    }

    pub(crate) fn queue(&self, thread: usize) -> &Queue {
        &self.queues[thread]
    }

    pub(crate) fn queue_mut(&mut self, thread: usize) -> &mut Queue {
        &mut self.queues[thread]
    }

    /// Makes the line a candidate of prefetches and evictions.
    pub(crate) fn touch(&mut self, line: u32) {
        self.recent[self.touched % RECENT_LINES] = line;
        self.touched += 1;
    }

    /// Loads a line as `thread` sees it now; with `keep`, a miss leaves a copy in the cache.
    pub(crate) fn load(&mut self, thread: usize, line: u32, keep: bool) -> Bytes {
        let queue = &mut self.queues[thread];
        queue.loaded = true;
        let host = queue.host;
        if queue.touches(line) {
            // The thread's own writes: the newest whole line, or else the cache's copy, with everything younger laid over it.
            let base = if queue.covers(line) { [0; 64] } else { self.read_cached(host, line, keep) };
            return self.queues[thread].overlay(line, base);
        }
        self.read_cached(host, line, keep)
    }

    fn read_cached(&mut self, host: usize, line: u32, keep: bool) -> Bytes {
        let stored = self.stored.get(line).bytes;
        let held = self.caches[host].lines.get_mut(line);
        if held.state == LineState::Absent {
            *held = Copied { state: if keep { LineState::Clean } else { LineState::Absent }, data: stored, seen: self.moment };
        }
        held.data
    }

    /// Brings a line into the cache of the thread's host, unless it is there.
    pub(crate) fn prefetch(&mut self, thread: usize, line: u32) {
        let host = self.queues[thread].host;
        if self.caches[host].lines.get(line).state == LineState::Absent {
            self.fill(host, line);
        }
    }

    fn fill(&mut self, host: usize, line: u32) {
        let data = self.stored.get(line).bytes;
        *self.caches[host].lines.get_mut(line) = Copied { state: LineState::Clean, data, seen: self.moment };
    }

    fn change(&mut self, host: usize, line: u32, bytes: Bytes) {
        if self.log.len() == LOG_CHANGES {
            self.log.pop_front();
        }
        self.moment += 1;
        let stored = self.stored.get_mut(line);
        self.log.push_back(Change { moment: self.moment, line, old: stored.bytes });
        stored.bytes = bytes;
        stored.writers |= 1 << (host % 32);
        self.caches[host].lines.get_mut(line).seen = self.moment;
    }

    fn write_back(&mut self, host: usize, line: u32) {
        let cache = &mut self.caches[host];
        cache.dirty.retain(|&dirty| dirty != line);
        let held = cache.lines.get_mut(line);
        held.state = LineState::Clean;
        let bytes = held.data;
        self.change(host, line, bytes);
    }

    fn drop_line(&mut self, host: usize, line: u32) {
        match self.caches[host].lines.get(line).state {
            LineState::Absent => return,
            LineState::Clean => {}
            LineState::Dirty => self.write_back(host, line),
        }
        self.caches[host].lines.get_mut(line).state = LineState::Absent;
    }

    /// Lets one entry of the thread's queue take effect, chosen by chance among those that order allows. False when there is none.
    pub(crate) fn drain(&mut self, thread: usize, random: &mut Random) -> bool {
        match self.queues[thread].take(random) {
            Some(entry) => {
                self.apply(self.queues[thread].host, entry, random);
                true
            }
            None => false,
        }
    }

    /// Lets everything of the thread's queue take effect.
    pub(crate) fn drain_all(&mut self, thread: usize, random: &mut Random) {
        while self.drain(thread, random) {}
    }

    /// Lets everything before the thread's last fence take effect.
    pub(crate) fn drain_fenced(&mut self, thread: usize, random: &mut Random) {
        while self.queues[thread].has_fence() && self.drain(thread, random) {}
    }

    fn apply(&mut self, host: usize, entry: Entry, random: &mut Random) {
        let line = entry.line;
        match entry.what {
            What::Write { from, len, bytes } => {
                self.drop_line(host, line);
                let mut whole = self.stored.get(line).bytes;
                let range = from as usize..from as usize + len as usize;
                whole[range.clone()].copy_from_slice(&bytes[range]);
                self.change(host, line, whole);
            }
            What::Store { from, len, bytes } => {
                if self.caches[host].lines.get(line).state == LineState::Absent {
                    self.fill(host, line);
                }
                let cache = &mut self.caches[host];
                let held = cache.lines.get_mut(line);
                let range = from as usize..from as usize + len as usize;
                held.data[range.clone()].copy_from_slice(&bytes[range]);
                if held.state != LineState::Dirty {
                    held.state = LineState::Dirty;
                    cache.dirty.push(line);
                }
            }
            What::Flush { early_from } => self.flush(host, line, early_from, random),
            What::Fence => {}
        }
    }

    /// A flush that no load fence keeps after the loads before it may have run at any moment since `early_from`, and a prefetch may
    /// have brought the line back since: then the cache holds what the memory held at some moment in between.
    fn flush(&mut self, host: usize, line: u32, early_from: Option<u64>, random: &mut Random) {
        let dirty = self.caches[host].lines.get(line).state == LineState::Dirty;
        self.drop_line(host, line);
        let Some(floor) = early_from else { return };
        if dirty || random.one_in(4) {
            return;
        }
        let least = floor.max(self.caches[host].lines.get(line).seen);
        let since = self.log.iter().rev().take_while(|change| change.moment > least);
        let older: Vec<&Change> = since.filter(|change| change.line == line).collect();
        let chosen = older.get(random.below(older.len() + 1)).map(|change| (change.old, change.moment));
        self.fill(host, line);
        if let Some((data, until)) = chosen {
            // The copy dates from some moment before the change that ended it; a later early flush may not precede it.
            *self.caches[host].lines.get_mut(line) = Copied { state: LineState::Clean, data, seen: until - 1 };
        }
    }

    /// One random thing that hardware may do at any time: a prefetch, an eviction, a write-back.
    pub(crate) fn disturb(&mut self, host: usize, random: &mut Random) {
        let dirty = self.caches[host].dirty.len();
        if dirty > 0 && random.one_in(2) {
            let line = self.caches[host].dirty[random.below(dirty)];
            self.write_back(host, line);
            if random.one_in(2) {
                self.drop_line(host, line);
            }
            return;
        }
        let line = self.recent[random.below(RECENT_LINES)];
        match self.caches[host].lines.get(line).state {
            LineState::Absent => self.fill(host, line),
            LineState::Clean if random.one_in(4) => self.drop_line(host, line),
            _ => {}
        }
    }

    /// The machine of `host` stops: each dirty line was written back in time or is lost, and the cache is gone.
    pub(crate) fn lose_cache(&mut self, host: usize, random: &mut Random) {
        for line in std::mem::take(&mut self.caches[host].dirty) {
            if random.one_in(2) {
                self.write_back(host, line);
            }
        }
        self.caches[host].lines.touched().for_each(|held| held.state = LineState::Absent);
    }

    /// The thread stops with its machine: some of its queue arrived in an order that the fences allow, the rest is lost.
    pub(crate) fn lose_queue(&mut self, thread: usize, random: &mut Random) {
        let stop_one_in = random.pick(&[0, 1, 2, 8]);
        while !random.one_in(stop_one_in) && self.drain(thread, random) {}
        self.queues[thread].clear();
    }
}
