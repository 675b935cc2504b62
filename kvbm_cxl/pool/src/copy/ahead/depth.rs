// SPDX-License-Identifier: Apache-2.0
//! How many blocks a device gets hints for: as few as hide its flash, none where it has no flash.
//!
//! Copies that take much longer than their bytes do at best have waited for pages: after a few of them, twice as many blocks get hints.
//! After a long time without one, half as many do. Where the most hints do not make copies shorter than none did, the copies wait for
//! something else, such as a processor: then no block gets hints for a while, each time a longer one.

use crate::copy::config::{MAX_BLOCKS_AHEAD, ReadAhead};

/// What 4 KiB of memory take at most where nothing waits, in nanoseconds.
const MAX_HIT_NS: f64 = 1_000.0;
/// A wait for flash is no shorter, in nanoseconds: a page takes 40 us and more, and is asked for a little ahead.
const WAIT_NS: f64 = 10_000.0;
/// Most nanoseconds for a page that count: the slowest flash. What takes longer waited for something else.
const MAX_PAGE_NS: f64 = 250_000.0;
/// Copies that wait, before more blocks get hints.
const WAITED: usize = 3;
/// Copies without a wait, before fewer blocks get hints: at first, and at most.
const CALM: [usize; 2] = [64, 8192];
/// Copies at the most blocks that wait all the same, before it is asked whether telling helps.
const TRIED: usize = 128;
/// The part of the time without hints that copies with hints must take less than, to be worth it.
const HELPED: f64 = 0.9;
/// Copies without hints, after hints were of no help: at first, and at most.
const HELD_BACK: [usize; 2] = [1024, 1 << 20];

/// How many blocks, and the measurements of the copies so far.
#[derive(Debug)]
pub(super) struct Depth {
    blocks: usize,
    is_fixed: bool,
    /// Nanoseconds for 4 KiB: the best of late, the mean with as many blocks as now, and the mean without hints.
    best_ns: f64,
    mean_ns: f64,
    without_ns: f64,
    waited: usize,
    calm: usize,
    calm_wanted: usize,
    tried: usize,
    held_back: usize,
    hold: usize,
}

impl Depth {
    pub(super) fn new(ahead: ReadAhead) -> Depth {
        let (blocks, is_fixed) = match ahead {
            ReadAhead::Off => (0, true),
            ReadAhead::Auto => (0, false),
            ReadAhead::Blocks(count) => (count.min(MAX_BLOCKS_AHEAD), true),
        };
        Depth {
            blocks,
            is_fixed,
            best_ns: MAX_HIT_NS,
            mean_ns: 0.0,
            without_ns: 0.0,
            waited: 0,
            calm: 0,
            calm_wanted: CALM[0],
            tried: 0,
            held_back: 0,
            hold: HELD_BACK[0],
        }
    }

    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Takes note of `count` lists of `len_bytes` together, whose copy took `taken_ns`.
    pub(super) fn learn(&mut self, count: usize, len_bytes: u64, taken_ns: u64) {
        let pages = len_bytes as f64 / 4096.0;
        // Of less than a page the calls around it take most of the time.
        if self.is_fixed || pages < 1.0 {
            return;
        }
        let taken_ns = taken_ns as f64;
        let page_ns = (taken_ns / pages).min(MAX_PAGE_NS);
        self.best_ns = page_ns.min(self.best_ns * 1.002).min(MAX_HIT_NS);
        self.mean_ns = if self.mean_ns == 0.0 { page_ns } else { self.mean_ns + (page_ns - self.mean_ns) / 16.0 };
        if self.blocks == 0 {
            self.without_ns = self.mean_ns;
            if self.held_back > 0 {
                self.held_back = self.held_back.saturating_sub(count);
                return;
            }
        }
        let least_ns = self.best_ns * pages;
        if taken_ns > 2.0 * least_ns && taken_ns - least_ns > WAIT_NS {
            self.calm = 0;
            self.waited += count;
            if self.waited >= WAITED {
                self.deepen(count);
            }
        } else {
            self.calm += count;
            // Waits that come one by one, long after each other, are no reason.
            if self.calm >= 4 * WAITED {
                self.waited = 0;
            }
            if self.calm >= self.calm_wanted && self.blocks > 0 {
                self.become_shallower();
            }
        }
    }

    fn set(&mut self, blocks: usize) {
        (self.blocks, self.mean_ns) = (blocks, 0.0);
        (self.waited, self.calm, self.tried) = (0, 0, 0);
    }

    fn deepen(&mut self, count: usize) {
        if self.blocks < MAX_BLOCKS_AHEAD {
            self.set((self.blocks * 2).clamp(1, MAX_BLOCKS_AHEAD));
            return;
        }
        (self.waited, self.tried) = (0, self.tried + count.max(WAITED));
        if self.tried >= TRIED {
            self.tried = 0;
            if self.mean_ns > HELPED * self.without_ns {
                self.set(0);
                self.held_back = self.hold;
                self.hold = (self.hold * 4).min(HELD_BACK[1]);
            } else {
                self.hold = HELD_BACK[0];
            }
        }
    }

    fn become_shallower(&mut self) {
        self.set(self.blocks / 2);
        // It is tried less and less often what happens with fewer.
        self.calm_wanted = (self.calm_wanted * 2).min(CALM[1]);
    }
}
