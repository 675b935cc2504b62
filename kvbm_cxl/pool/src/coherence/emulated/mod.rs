// SPDX-License-Identifier: Apache-2.0
//! A host without coherence, emulated: one process, its own view of the pool, whole-line write-backs.
//!
//! Real programs, C++ and Python included, run on it unchanged as long as every flush, fence and non-temporal copy goes through
//! [`Coherence`]: [`Coherence::address`] points into the view, where plain loads and stores run at full speed and reach no other host.
//!
//! The emulator models
//! - One process is one host; its threads share one coherent view. Two processes never do, so those of one machine that are to share a slot
//!   cannot be told apart from two hosts and must not share one under the emulator.
//! - A dirty line is written back as a whole, when it is flushed or at a random moment: neighbours in a line overwrite each other.
//! - A flushed line is loaded from the memory again at the fence, as if prefetched at once, and then stays as it is: who does not flush
//!   again never sees a change, except where a random prefetch shows it.
//! - `write_line` and the whole lines of `copy_in` are pending until this thread fences, in any order. So are flushes: their write-back
//!   until the next fence, their refill until the next [`Coherence::fence_all`]. The host itself sees its own pending writes.
//! - A device's reads and writes go through the host's caches: they are made in the view. With [`EmulatorOptions::is_dma_uncached`] they
//!   go past them, to the memory ([`Coherence::device_address`]).
//! - Dirty lines are lost when the host is dropped; its pending writes arrive. A process that ends without dropping it loses both. (On a
//!   real machine they come out of its caches later. That a dead process leaves nothing there which could, only the simulator checks.)
//!
//! The emulator does not model
//! - Plain loads of a line never touched: the view holds the pool's content at the time of opening up to [`EmulatorOptions::copy_mib`];
//!   after that it holds zeros, as a cache might from before the first write. No fetch can tell.
//! - Plain stores of what the view holds already: they change nothing, so the line is not known to be dirty and is not written back.
//!   A caller that stores in place to lines that others wrote before gets their address from [`Coherence::address_for_stores`].
//! - Missing [`Coherence::fence_loads`], and fences made by instructions of the caller's own.
//! - Whole-line atomicity on CPUs without 64-byte loads and stores: there a line may rarely be seen torn.

mod options;
mod view;

pub use options::EmulatorOptions;

use super::faultmap::FaultMap;
use super::instructions::Instructions;
use super::{Coherence, Line, arch, lines_of};
use crate::error::Result;
use crate::limits::LINE_BYTES;
use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use view::View;

/// Locks over the lines; neighbouring lines have different ones.
const SHARDS: usize = 256;
/// Pending steps of one thread beyond which one, chosen at random, is applied early.
const MAX_PENDING: usize = 256;
/// Lines among which the noise chooses.
const RECENT: usize = 64;
/// How long a noisy step sometimes sleeps, to widen the window between two steps.
const STALL: Duration = Duration::from_micros(50);

struct Pending {
    line: u64,
    write: Option<Line>,
    write_back: bool,
    refill: bool,
}

type Shard = Vec<Pending>;

thread_local! {
    /// Lines with pending steps of this thread, for each emulated host. May name lines whose steps were applied meanwhile.
    static QUEUES: RefCell<Vec<(u64, Vec<u64>)>> = const { RefCell::new(Vec::new()) };
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// One emulated host over a shared mapping.
pub struct Emulated {
    id: u64,
    shared: Arc<FaultMap>,
    view: View,
    shards: Box<[Mutex<Shard>]>,
    noise: u64,
    is_dma_uncached: bool,
    random: AtomicU64,
    recent: [AtomicU64; RECENT],
    steps: AtomicU64,
}

impl Emulated {
    /// A host that sees the mapping of `shared` through a view of its own.
    pub fn new(shared: Arc<FaultMap>, options: EmulatorOptions) -> Result<Self> {
        let view = View::new(shared.clone(), Instructions::best()?.load, u64::from(options.copy_mib) << 20)?;
        Ok(Emulated {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            shared,
            view,
            shards: (0..SHARDS).map(|_| Mutex::new(Vec::new())).collect(),
            noise: options.noise.into(),
            is_dma_uncached: options.is_dma_uncached,
            random: AtomicU64::new(options.seed),
            recent: [const { AtomicU64::new(0) }; RECENT],
            steps: AtomicU64::new(0),
        })
    }

    /// The next number of a SplitMix64 sequence: one atomic addition, so that threads need no state of their own.
    fn random(&self) -> u64 {
        let mut x = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn shard(&self, line: u64) -> MutexGuard<'_, Shard> {
        self.shards[line as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pending(shard: &mut Shard, line: u64) -> &mut Pending {
        let index = shard.iter().position(|pending| pending.line == line).unwrap_or_else(|| {
            shard.push(Pending { line, write: None, write_back: false, refill: false });
            shard.len() - 1
        });
        &mut shard[index]
    }

    /// Applies the pending operations of a line; without `refill`, only those that a store fence orders. True when something stays pending.
    fn settle(&self, shard: &mut Shard, line: u64, refill: bool) -> bool {
        let Some(index) = shard.iter().position(|pending| pending.line == line) else { return false };
        let pending = &mut shard[index];
        if let Some(content) = pending.write.take() {
            self.view.set_memory(line, &content);
        }
        if std::mem::take(&mut pending.write_back) {
            self.view.write_back(line);
        }
        if pending.refill && !refill {
            return true;
        }
        if shard.swap_remove(index).refill {
            self.view.refill(line);
        }
        false
    }

    fn queue(&self, line: u64) {
        let excess = QUEUES.try_with(|queues| {
            let mut queues = queues.borrow_mut();
            let index = queues.iter().position(|(id, _)| *id == self.id).unwrap_or_else(|| {
                queues.push((self.id, Vec::new()));
                queues.len() - 1
            });
            let queue = &mut queues[index].1;
            queue.push(line);
            (queue.len() > MAX_PENDING).then(|| queue.swap_remove(self.random() as usize % queue.len()))
        });
        // A thread that is ending has no queue any more.
        if let Some(line) = excess.unwrap_or(Some(line)) {
            self.settle(&mut self.shard(line), line, true);
        }
    }

    fn take_queue(&self) -> Vec<u64> {
        let take = |queues: &RefCell<Vec<(u64, Vec<u64>)>>| {
            queues.borrow_mut().iter_mut().find(|(id, _)| *id == self.id).map(|(_, queue)| std::mem::take(queue))
        };
        QUEUES.try_with(take).ok().flatten().unwrap_or_default()
    }

    fn fence(&self, refill: bool) {
        let mut queue = self.take_queue();
        let mut left = Vec::new();
        while !queue.is_empty() {
            let line = queue.swap_remove(self.random() as usize % queue.len());
            let stays = self.settle(&mut self.shard(line), line, refill);
            if stays {
                left.push(line);
            }
            self.disturb(line);
        }
        left.sort_unstable();
        left.dedup();
        left.into_iter().for_each(|line| self.queue(line));
        // The stores to the shared mapping are ordinary ones.
        arch::fence_all();
    }

    fn disturb(&self, line: u64) {
        let step = self.steps.fetch_add(1, Ordering::Relaxed);
        self.recent[step as usize % RECENT].store(line, Ordering::Relaxed);
        if self.noise == 0 {
            return;
        }
        let dice = self.random();
        if !(dice >> 32).is_multiple_of(self.noise) {
            return;
        }
        let victim = self.recent[(dice >> 16) as usize % RECENT].load(Ordering::Relaxed);
        {
            let mut shard = self.shard(victim);
            self.settle(&mut shard, victim, true);
            self.view.write_back(victim);
            if dice & 1 == 0 {
                self.view.refill(victim);
            }
        }
        match dice & 0xff0 {
            0 => std::thread::sleep(STALL),
            0x10..0x200 => std::thread::yield_now(),
            _ => {}
        }
    }

    fn write_pending(&self, line: u64, content: &Line) {
        {
            let mut shard = self.shard(line);
            self.view.set(line, content);
            Self::pending(&mut shard, line).write = Some(*content);
        }
        self.queue(line);
        self.disturb(line);
    }

    fn flush_pending(&self, line: u64) {
        {
            let mut shard = self.shard(line);
            let pending = Self::pending(&mut shard, line);
            (pending.write_back, pending.refill) = (true, true);
        }
        self.queue(line);
        self.disturb(line);
    }

    fn take_anew(&self, shard: &mut Shard, line: u64) {
        self.settle(shard, line, true);
        self.view.write_back(line);
        self.view.refill(line);
    }

    /// Writes a part of a line as the CPU would: through the cache, on top of the line's present content, then flushed.
    fn copy_part(&self, offset: u64, part: &[u8]) {
        let line = offset / LINE_BYTES as u64;
        {
            let mut shard = self.shard(line);
            self.take_anew(&mut shard, line);
            // SAFETY: the part lies inside a line of the view; the source is the caller's memory.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), self.view.address(offset), part.len()) };
        }
        self.flush_pending(line);
    }
}

impl Coherence for Emulated {
    fn len_bytes(&self) -> u64 {
        self.shared.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.shared.enter_line(offset)?;
        let line = offset / LINE_BYTES as u64;
        self.disturb(line);
        let content = {
            let _shard = self.shard(line);
            self.view.get(line)
        };
        self.shared.leave(offset, LINE_BYTES as u64)?;
        Ok(content)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.shared.enter_line(offset)?;
        self.write_pending(offset / LINE_BYTES as u64, line);
        self.shared.leave(offset, LINE_BYTES as u64)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.shared.enter_line(offset)?;
        self.flush_pending(offset / LINE_BYTES as u64);
        self.shared.leave(offset, LINE_BYTES as u64)
    }

    fn fence_stores(&self) {
        self.fence(false);
    }

    fn fence_all(&self) {
        self.fence(true);
    }

    fn fence_loads(&self) {
        arch::fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.shared.enter(offset, len_bytes)?;
        lines_of(offset, len_bytes).for_each(|line| self.flush_pending(line));
        self.shared.leave(offset, len_bytes)
    }

    /// Every line of the view counts as cached, so that this is an eviction, then a prefetch: the line keeps the content it gets then.
    fn prefetch_lines(&self, offsets: &[u64]) -> Result<()> {
        for &offset in offsets {
            self.shared.enter_line(offset)?;
            let line = offset / LINE_BYTES as u64;
            self.take_anew(&mut self.shard(line), line);
            self.shared.leave(offset, LINE_BYTES as u64)?;
        }
        Ok(())
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.shared.enter(offset, source.len() as u64)?;
        let (mut at, mut rest) = (offset, source);
        while !rest.is_empty() {
            let room = LINE_BYTES - at as usize % LINE_BYTES;
            let (part, behind) = rest.split_at(room.min(rest.len()));
            match <[u8; LINE_BYTES]>::try_from(part) {
                Ok(bytes) => self.write_pending(at / LINE_BYTES as u64, &Line(bytes)),
                Err(_) => self.copy_part(at, part),
            }
            at += part.len() as u64;
            rest = behind;
        }
        self.shared.leave(offset, source.len() as u64)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.shared.enter(offset, destination.len() as u64)?;
        // SAFETY: the range lies in the view, and the destination is the caller's memory.
        unsafe { std::ptr::copy_nonoverlapping(self.view.address(offset), destination.as_mut_ptr(), destination.len()) };
        self.shared.leave(offset, destination.len() as u64)
    }

    fn check(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.shared.enter(offset, len_bytes).map(drop)
    }

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.shared.enter(offset, len_bytes).ok()?;
        NonNull::new(self.view.address(offset))
    }

    fn device_address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        let address = self.address(offset, len_bytes)?;
        if self.is_dma_uncached { NonNull::new(self.view.memory_address(offset)) } else { Some(address) }
    }

    fn keeps_lines_whole(&self) -> bool {
        self.view.keeps_lines_whole()
    }

    fn address_for_stores(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        let address = self.address(offset, len_bytes)?;
        lines_of(offset, len_bytes).for_each(|line| self.take_anew(&mut self.shard(line), line));
        Some(address)
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        for shard in &mut self.shards {
            let shard = shard.get_mut().unwrap_or_else(PoisonError::into_inner);
            for pending in shard.drain(..) {
                if let Some(content) = pending.write {
                    self.view.set_memory(pending.line, &content);
                }
            }
        }
        let _ = QUEUES.try_with(|queues| queues.borrow_mut().retain(|(id, _)| *id != self.id));
    }
}
