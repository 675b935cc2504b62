// SPDX-License-Identifier: Apache-2.0
//! A model of a CXL device with flash: pages of a stretch of the pool lie in flash, the latest used ones in a little memory in front of it.
//!
//! It lies between the production code and the memory of the pool, and delays an access to a page outside the device's memory by the time
//! that flash takes. The bytes come from the pool: a measurement moves real data, only later.
//!
//! - A processor waits for one page at a time, as an ordinary load does, and reads on in order.
//! - A miss also brings the next pages, as many as the degree of the device's own prefetcher says (next-N).
//! - Flash reads or writes a limited number of pages at a time (ways); further pages wait for a free way.
//! - A prefetch instruction does not wait, but a processor has a limited number of buffers for prefetches under way; the next prefetch
//!   waits for a free buffer. Another processor than that of the copies issues the prefetches, in the order of the calls.
//! - The memory in front keeps the pages used last. A page that was written goes back to flash when it has to leave.
//! - Not modelled: the time of the bytes themselves beyond what this machine's memory takes, garbage collection, and a limit of the link.

use cxl_pool::Result;
use cxl_pool::coherence::{Coherence, LineSum};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub const PAGE_BYTES: u64 = 4096;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Pages of its memory.
    pub cache_pages: u32,
    /// What flash takes to read a page, in nanoseconds.
    pub read_ns: u64,
    /// And to write one.
    pub write_ns: u64,
    /// Pages that a miss brings besides its own.
    pub degree: u32,
    /// Pages that flash reads or writes at a time.
    pub ways: usize,
    /// Prefetches that a processor has under way.
    pub buffers: usize,
}

/// What the device did.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    /// Accesses that waited for a page.
    misses: u64,
    /// Pages that flash read.
    reads: u64,
    /// Pages that were brought by a prefetch instruction.
    asked: u64,
}

#[derive(Clone, Copy)]
struct Page {
    /// When it is in the device's memory; `u64::MAX` = it is not on its way.
    ready_ns: u64,
    before: u32,
    behind: u32,
    is_dirty: bool,
}

struct Inside {
    spec: Spec,
    pages: Vec<Page>,
    latest: u32,
    oldest: u32,
    cached: u32,
    /// When each way is free.
    ways: Vec<u64>,
    /// Pages of prefetches that have not gone out, and when they were made.
    asked: VecDeque<(u32, u64)>,
    /// When each buffer for a prefetch is free.
    buffers: Vec<u64>,
    done: Done,
}

/// The processor time of the thread that made it, which pulls and waits without giving the processor away: other programs do not count.
/// No other thread may wait for the device, since the clock stands still while that one rests.
#[derive(Clone, Copy)]
pub struct Clock(libc::clockid_t);

impl Clock {
    /// That of the calling thread.
    pub fn of_this_thread() -> Result<Clock> {
        let mut clock = 0;
        // SAFETY: the calling thread is alive, and `clock` has room for the answer.
        match unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) } {
            0 => Ok(Clock(clock)),
            _ => Err(cxl_pool::Error::Invalid("the system does not count the processor time of a thread".into())),
        }
    }

    fn now_ns(self) -> u64 {
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the clock is that of a thread that lives as long as the device, and `now` has room for the answer.
        unsafe { libc::clock_gettime(self.0, &mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

pub struct Ssd {
    inner: Arc<dyn Coherence>,
    flash: Range<u64>,
    clock: Clock,
    inside: Mutex<Inside>,
}

impl Ssd {
    /// Over memory of which `flash` lies on flash, none of it in the device's memory.
    pub fn over(inner: Arc<dyn Coherence>, flash: Range<u64>, spec: Spec, clock: Clock) -> Arc<Ssd> {
        let flash = flash.start / PAGE_BYTES * PAGE_BYTES..flash.end;
        let count = (flash.end - flash.start).div_ceil(PAGE_BYTES) as usize;
        Arc::new(Ssd { inner, flash, clock, inside: Mutex::new(Inside::new(spec, count)) })
    }

    /// Makes it another device, whose memory is empty.
    pub fn become_new(&self, spec: Spec) {
        let mut inside = self.inside();
        let count = inside.pages.len();
        *inside = Inside::new(spec, count);
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time on its clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Waits as a processor does that has to: without giving itself away, which would take longer than flash does.
    fn wait_until(&self, ready_ns: u64) {
        while ready_ns > 0 && self.now_ns() < ready_ns {
            std::hint::spin_loop();
        }
    }

    /// Numbers of the pages of a range, as far as they lie on flash.
    fn pages_of(&self, offset: u64, len_bytes: u64) -> Range<u32> {
        let (start, end) = (offset.max(self.flash.start), (offset + len_bytes).min(self.flash.end));
        if start >= end {
            return 0..0;
        }
        let number = |offset: u64| ((offset - self.flash.start) / PAGE_BYTES) as u32;
        number(start)..number(end - 1) + 1
    }

    /// Reads or writes the page, and waits for it.
    fn access(&self, page: u32, is_write: bool) {
        let ready_ns = self.inside().access(page, self.now_ns(), is_write);
        self.wait_until(ready_ns);
    }

    fn access_all(&self, offset: u64, len_bytes: u64, is_write: bool) {
        self.pages_of(offset, len_bytes).for_each(|page| self.access(page, is_write));
    }

    /// Copies out the pages in the device's memory, waits for the next page, and continues.
    fn copy(&self, offset: u64, destination: &mut [u8], mut copy: impl FnMut(u64, &mut [u8]) -> Result<()>) -> Result<()> {
        let (mut at, mut rest) = (offset, destination);
        while !rest.is_empty() {
            // A part that ends where a page does, or where flash begins.
            let mut len = 0;
            let (now_ns, mut inside) = (self.now_ns(), self.inside());
            inside.go_on(now_ns);
            let mut missing = None;
            while len < rest.len() {
                let from = at + len as u64;
                let room = (PAGE_BYTES - from % PAGE_BYTES) as usize;
                let page = self.pages_of(from, room.min(rest.len() - len) as u64).next();
                match page {
                    Some(page) if inside.pages[page as usize].ready_ns > now_ns => {
                        missing = Some(page);
                        break;
                    }
                    Some(page) => {
                        inside.access(page, now_ns, false);
                    }
                    None => {}
                }
                len += room.min(rest.len() - len);
            }
            let ready_ns = match (len, missing) {
                (0, Some(page)) => inside.access(page, now_ns, false),
                _ => 0,
            };
            drop(inside);
            self.wait_until(ready_ns);
            if len > 0 {
                let (now, behind) = rest.split_at_mut(len);
                copy(at, now)?;
                (at, rest) = (at + len as u64, behind);
            }
        }
        Ok(())
    }
}

impl Inside {
    fn new(spec: Spec, count: usize) -> Inside {
        let page = Page { ready_ns: u64::MAX, before: NONE, behind: NONE, is_dirty: false };
        let (ways, buffers) = (vec![0; spec.ways], vec![0; spec.buffers]);
        let (asked, done) = (VecDeque::new(), Done::default());
        Inside { spec, pages: vec![page; count], latest: NONE, oldest: NONE, cached: 0, ways, asked, buffers, done }
    }

    /// When an access to a page is served.
    fn access(&mut self, page: u32, now_ns: u64, is_write: bool) -> u64 {
        self.go_on(now_ns);
        let ready_ns = self.pages[page as usize].ready_ns;
        if ready_ns != u64::MAX {
            self.unlink(page);
            self.link(page);
            self.pages[page as usize].is_dirty |= is_write;
            self.done.misses += u64::from(ready_ns > now_ns && !is_write);
            return ready_ns;
        }
        if is_write {
            // A write brings whole lines into the device's memory, so flash reads nothing.
            self.enter(page, now_ns, now_ns, true);
            return now_ns;
        }
        self.done.misses += 1;
        self.read(page, now_ns)
    }

    /// Makes flash read a page and those after it; returns when the page itself is in the device's memory.
    fn read(&mut self, page: u32, now_ns: u64) -> u64 {
        let last = page.saturating_add(self.spec.degree).min(self.pages.len() as u32 - 1);
        let mut first_ns = None;
        for next in page..=last {
            if self.pages[next as usize].ready_ns == u64::MAX {
                let ready_ns = self.on_flash(now_ns, self.spec.read_ns);
                self.done.reads += 1;
                self.enter(next, ready_ns, now_ns, false);
                first_ns.get_or_insert(ready_ns);
            }
        }
        first_ns.unwrap_or(now_ns)
    }

    /// When something that takes so long has ended on the way that is free first.
    fn on_flash(&mut self, now_ns: u64, takes_ns: u64) -> u64 {
        let Some(way) = self.ways.iter_mut().min() else { return now_ns + takes_ns };
        *way = (*way).max(now_ns) + takes_ns;
        *way
    }

    fn enter(&mut self, page: u32, ready_ns: u64, now_ns: u64, is_dirty: bool) {
        if self.cached == self.spec.cache_pages && self.oldest != NONE {
            let leaving = self.oldest;
            self.unlink(leaving);
            self.cached -= 1;
            let left = &mut self.pages[leaving as usize];
            left.ready_ns = u64::MAX;
            if std::mem::take(&mut left.is_dirty) {
                self.on_flash(now_ns, self.spec.write_ns);
            }
        }
        self.cached += 1;
        let entered = &mut self.pages[page as usize];
        (entered.ready_ns, entered.is_dirty) = (ready_ns, is_dirty);
        self.link(page);
    }

    fn link(&mut self, page: u32) {
        let latest = std::mem::replace(&mut self.latest, page);
        (self.pages[page as usize].before, self.pages[page as usize].behind) = (NONE, latest);
        match latest {
            NONE => self.oldest = page,
            latest => self.pages[latest as usize].before = page,
        }
    }

    fn unlink(&mut self, page: u32) {
        let Page { before, behind, .. } = self.pages[page as usize];
        match before {
            NONE => self.latest = behind,
            before => self.pages[before as usize].behind = behind,
        }
        match behind {
            NONE => self.oldest = before,
            behind => self.pages[behind as usize].before = before,
        }
    }

    /// Lets the prefetches go out that have by now.
    fn go_on(&mut self, now_ns: u64) {
        while let Some(&(page, made_ns)) = self.asked.front()
            && let Some(buffer) = (0..self.buffers.len()).min_by_key(|&buffer| self.buffers[buffer])
        {
            let out_ns = self.buffers[buffer].max(made_ns);
            if out_ns > now_ns {
                return;
            }
            self.asked.pop_front();
            let ready_ns = match self.pages[page as usize].ready_ns {
                u64::MAX => {
                    self.done.asked += 1;
                    self.read(page, out_ns)
                }
                ready_ns => ready_ns,
            };
            self.buffers[buffer] = ready_ns.max(out_ns);
        }
    }
}

impl Coherence for Ssd {
    cxl_pool::forward_coherence!(
        inner: len_bytes flush_line fence_stores fence_all fence_loads flush_range flush_lines store_streaming keeps_lines_whole
            sums_copies check address
    );

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.access_all(offset, LINE_BYTES as u64, false);
        self.inner.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.access_all(offset, LINE_BYTES as u64, true);
        self.inner.write_line(offset, line)
    }

    /// Loads that are independent of each other: their misses overlap, as far as there are buffers.
    fn load_lines(&self, offsets: &[u64], out: &mut [Line]) -> Result<()> {
        let buffers = self.inside().spec.buffers.max(1);
        for group in offsets.chunks(buffers) {
            let now_ns = self.now_ns();
            let pages = group.iter().flat_map(|&offset| self.pages_of(offset, LINE_BYTES as u64));
            let mut inside = self.inside();
            let ready_ns = pages.map(|page| inside.access(page, now_ns, false)).max();
            drop(inside);
            self.wait_until(ready_ns.unwrap_or(0));
        }
        self.inner.load_lines(offsets, out)
    }

    fn prefetch_lines(&self, offsets: &[u64]) -> Result<()> {
        let made_ns = self.now_ns();
        let pages = offsets.iter().flat_map(|&offset| self.pages_of(offset, LINE_BYTES as u64));
        self.inside().asked.extend(pages.map(|page| (page, made_ns)));
        self.inner.prefetch_lines(offsets)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.access_all(offset, source.len() as u64, true);
        self.inner.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.copy(offset, destination, |offset, part| self.inner.copy_out(offset, part))
    }

    fn copy_out_streaming(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.copy(offset, destination, |offset, part| self.inner.copy_out_streaming(offset, part))
    }

    fn copy_out_summed(&self, offset: u64, destination: &mut [u8], sum: &mut LineSum) -> Result<()> {
        self.copy(offset, destination, |offset, part| self.inner.copy_out_summed(offset, part, sum))
    }
}

#[cfg(test)]
mod tests;
