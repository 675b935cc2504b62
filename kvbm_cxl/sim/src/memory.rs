// SPDX-License-Identifier: Apache-2.0
//! The memory and the private caches over it: what a load may return and when a write may arrive. Knows nothing of scheduling.

use crate::queue::{Entry, Queue, What};
use crate::random::Random;
use std::collections::VecDeque;

/// The bytes of a line.
pub(crate) type Bytes = [u8; 64];

const ABSENT: u8 = 0;
const CLEAN: u8 = 1;
const DIRTY: u8 = 2;

/// Changes of the memory that a flush which ran early can still look behind.
const LOG_CHANGES: usize = 512;
/// Lines touched last, the candidates of the prefetcher and of evictions.
const RECENT_LINES: usize = 16;

/// One host's private cache.
struct Cache {
    state: Vec<u8>,
    data: Vec<Bytes>,
    /// Moment of the memory that this host has seen the line at, at least: it never sees an older one again.
    seen: Vec<u64>,
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
    bytes: Vec<Bytes>,
    caches: Vec<Cache>,
    queues: Vec<Queue>,
    /// Per line, one bit for each host that ever changed it.
    writers: Vec<u32>,
    log: VecDeque<Change>,
    /// Counts the changes of the memory.
    moment: u64,
    recent: [u32; RECENT_LINES],
    touched: usize,
}

impl Memory {
    pub(crate) fn new(lines: usize) -> Self {
        Memory {
            bytes: vec![[0; 64]; lines],
            caches: Vec::new(),
            queues: Vec::new(),
            writers: vec![0; lines],
            log: VecDeque::with_capacity(LOG_CHANGES),
            moment: 1,
            recent: [0; RECENT_LINES],
            touched: 0,
        }
    }

    pub(crate) fn lines(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn add_host(&mut self) {
        let lines = self.bytes.len();
        self.caches.push(Cache { state: vec![ABSENT; lines], data: vec![[0; 64]; lines], seen: vec![0; lines], dirty: Vec::new() });
    }

    /// Adds a thread of `host`; threads are numbered from 0.
    pub(crate) fn add_thread(&mut self, host: usize) {
        self.queues.push(Queue::new(host));
    }

    /// What the memory itself holds.
    pub(crate) fn raw(&self, line: u32) -> &Bytes {
        &self.bytes[line as usize]
    }

    /// Changes the memory itself, past every cache and without a writer.
    pub(crate) fn set_raw(&mut self, line: u32, bytes: &Bytes) {
        self.bytes[line as usize] = *bytes;
    }

    /// One bit for each host that ever changed the line in memory.
    pub(crate) fn writers(&self, line: u32) -> u32 {
        self.writers[line as usize]
    }

    /// Whether `host` holds a copy that differs from the memory, and whether it is dirty.
    pub(crate) fn is_stale(&self, host: usize, line: u32) -> bool {
        let cache = &self.caches[host];
        cache.state[line as usize] != ABSENT && cache.data[line as usize] != self.bytes[line as usize]
    }

    pub(crate) fn queue(&self, thread: usize) -> &Queue {
        &self.queues[thread]
    }

    pub(crate) fn queue_mut(&mut self, thread: usize) -> &mut Queue {
        &mut self.queues[thread]
    }

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
        let index = line as usize;
        if self.caches[host].state[index] == ABSENT {
            self.caches[host].seen[index] = self.moment;
            if !keep {
                return self.bytes[index];
            }
            self.fill(host, line);
        }
        self.caches[host].data[index]
    }

    fn fill(&mut self, host: usize, line: u32) {
        let index = line as usize;
        let cache = &mut self.caches[host];
        cache.state[index] = CLEAN;
        cache.data[index] = self.bytes[index];
        cache.seen[index] = self.moment;
    }

    fn change(&mut self, host: usize, line: u32, bytes: Bytes) {
        let index = line as usize;
        if self.log.len() == LOG_CHANGES {
            self.log.pop_front();
        }
        self.moment += 1;
        self.log.push_back(Change { moment: self.moment, line, old: self.bytes[index] });
        self.bytes[index] = bytes;
        self.writers[index] |= 1 << (host % 32);
        self.caches[host].seen[index] = self.moment;
    }

    fn write_back(&mut self, host: usize, line: u32) {
        let index = line as usize;
        let cache = &mut self.caches[host];
        cache.state[index] = CLEAN;
        cache.dirty.retain(|&dirty| dirty != line);
        let bytes = cache.data[index];
        self.change(host, line, bytes);
    }

    fn drop_line(&mut self, host: usize, line: u32) {
        if self.caches[host].state[line as usize] == DIRTY {
            self.write_back(host, line);
        }
        self.caches[host].state[line as usize] = ABSENT;
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
        let index = line as usize;
        match entry.what {
            What::Write { from, len, bytes } => {
                self.drop_line(host, line);
                let mut whole = self.bytes[index];
                let range = from as usize..from as usize + len as usize;
                whole[range.clone()].copy_from_slice(&bytes[range]);
                self.change(host, line, whole);
            }
            What::Store { from, len, bytes } => {
                if self.caches[host].state[index] == ABSENT {
                    self.fill(host, line);
                }
                let cache = &mut self.caches[host];
                let range = from as usize..from as usize + len as usize;
                cache.data[index][range.clone()].copy_from_slice(&bytes[range]);
                if cache.state[index] != DIRTY {
                    cache.state[index] = DIRTY;
                    cache.dirty.push(line);
                }
            }
            What::Flush { early_from } => self.flush(host, line, early_from, random),
            What::Fence => {}
        }
    }

    /// A flush that no load fence keeps behind the loads before it may have run at any moment since `early_from`, and a prefetch may
    /// have brought the line back since: then the cache holds what the memory held at some moment in between.
    fn flush(&mut self, host: usize, line: u32, early_from: Option<u64>, random: &mut Random) {
        let index = line as usize;
        let dirty = self.caches[host].state[index] == DIRTY;
        self.drop_line(host, line);
        let Some(floor) = early_from else { return };
        if dirty || random.one_in(4) {
            return;
        }
        let least = floor.max(self.caches[host].seen[index]);
        let older: Vec<usize> =
            (0..self.log.len()).rev().take_while(|&at| self.log[at].moment > least).filter(|&at| self.log[at].line == line).collect();
        let chosen = random.below(older.len() + 1);
        self.fill(host, line);
        if let Some(&at) = older.get(chosen) {
            self.caches[host].data[index] = self.log[at].old;
            // The copy dates from some moment before this change; later early flushes may not go behind it.
            self.caches[host].seen[index] = least.max(self.log.get(at).map_or(least, |change| change.moment - 1));
        }
    }

    /// The present moment of the memory.
    pub(crate) fn moment(&self) -> u64 {
        self.moment
    }

    /// One random thing that hardware may do at any time: a prefetch, an eviction, a write-back.
    pub(crate) fn disturb(&mut self, host: usize, random: &mut Random) {
        let line = self.recent[random.below(RECENT_LINES)];
        let dirty = self.caches[host].dirty.len();
        if dirty > 0 && random.one_in(2) {
            let line = self.caches[host].dirty[random.below(dirty)];
            self.write_back(host, line);
            if random.one_in(2) {
                self.drop_line(host, line);
            }
            return;
        }
        match self.caches[host].state[line as usize] {
            ABSENT => self.fill(host, line),
            CLEAN if random.one_in(4) => self.caches[host].state[line as usize] = ABSENT,
            _ => {}
        }
    }

    /// The machine of `host` stops: each dirty line was written back in time or is lost, and the cache is gone.
    pub(crate) fn lose_cache(&mut self, host: usize, random: &mut Random) {
        while let Some(&line) = self.caches[host].dirty.first() {
            if random.one_in(2) {
                self.write_back(host, line);
            }
            let cache = &mut self.caches[host];
            cache.dirty.retain(|&dirty| dirty != line);
            cache.state[line as usize] = ABSENT;
        }
        self.caches[host].state.fill(ABSENT);
    }

    /// The thread stops with its machine: some of its queue arrived in an order that the fences allow, the rest is lost.
    pub(crate) fn lose_queue(&mut self, thread: usize, random: &mut Random) {
        let stop_one_in = random.pick(&[0, 1, 2, 8]);
        while !random.one_in(stop_one_in) && self.drain(thread, random) {}
        self.queues[thread].clear();
    }
}
