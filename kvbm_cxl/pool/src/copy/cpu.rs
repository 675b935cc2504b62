// SPDX-License-Identifier: Apache-2.0
//! Copies made by the CPU.

use super::checksum::{Checksum, Running};
use super::config::CopyConfig;
use super::counters::{Copied, Counters};
use super::list::{ListPieces, Piece, ReadList, WriteList};
use super::order::Order;
use super::thread_pool::{CopyThreads, Task};
use super::{CopyEngine, Outcome};
use crate::coherence::{Coherence, LineSum};
use crate::cpus::CpuSet;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use crate::media::Stripes;
use std::borrow::Cow;

/// Pieces shorter than this are put together to whole lines before they are written.
const DIRECT_BYTES: usize = 1024;
/// Where short pieces are put together.
const STAGE_BYTES: usize = 4096;
/// Bytes that are summed and copied in turn, while they are in the first-level cache.
const SUMMED_BYTES: usize = 16 << 10;
/// Pieces shorter than this are never written past the caches.
const STREAM_PIECE_BYTES: usize = 4096;

/// Copies with this process's CPUs, on any [`Coherence`].
///
/// Large copies are divided among worker threads, which start with the first one. Each fences its own stores and loads before it is done.
/// A list with a checksum is copied by one thread; several such lists are divided by list. Simulated memory, and a process that was forked
/// after the workers had started, is copied by the caller alone.
pub struct CpuEngine {
    config: CopyConfig,
    threads: CopyThreads,
    counters: Counters,
}

impl CpuEngine {
    /// An engine for a pool on one device. Numbers out of bounds are replaced by the nearest that can be; [`CopyConfig::check`] tells.
    pub fn new(config: CopyConfig) -> Self {
        Self::with(config, None)
    }

    /// An engine whose workers take different devices of a striped pool.
    pub fn striped(config: CopyConfig, stripes: Stripes) -> Self {
        Self::with(config, Some(stripes))
    }

    fn with(config: CopyConfig, stripes: Option<Stripes>) -> Self {
        let config = config.bounded();
        CpuEngine { threads: CopyThreads::new(config.workers, stripes), config, counters: Counters::default() }
    }

    /// The same with workers that run on these CPUs, where they are given.
    pub fn on(mut self, cpus: Option<CpuSet>) -> Self {
        self.threads = self.threads.on(cpus);
        self
    }

    /// How it copies.
    pub fn config(&self) -> &CopyConfig {
        &self.config
    }

    pub(super) fn raw_counters(&self) -> &Counters {
        &self.counters
    }

    fn is_divided(&self, total_bytes: u64) -> bool {
        self.config.workers > 0 && total_bytes >= self.config.parallel_from_bytes
    }

    /// Divides the checked lists among the workers if that is worth while, and copies.
    fn copy(
        &self,
        memory: &dyn Coherence,
        lists: Vec<Result<Cow<'_, [Piece]>>>,
        checksum: Checksum,
        work: impl Fn(&[ListPieces<'_>]) -> Vec<(usize, Outcome)> + Sync,
    ) -> Vec<Outcome> {
        let shares: Vec<ListPieces<'_>> = lists
            .iter()
            .enumerate()
            .filter_map(|(list, pieces)| pieces.as_ref().ok().map(|pieces| ListPieces { list, pieces: pieces.as_ref() }))
            .collect();
        let total = total_bytes(&shares);
        let is_mapped =
            || shares.iter().flat_map(|share| share.pieces).next().is_some_and(|first| memory.address(first.offset, 1).is_some());
        let done = if self.is_divided(total) && is_mapped() {
            let tasks: Vec<Task> = self.threads.divide(&shares, total, checksum.is_on());
            self.threads.run(tasks, |task| work(&[ListPieces { list: task.list, pieces: &task.pieces }]))
        } else {
            work(&shares)
        };
        let mut outcomes: Vec<Outcome> = lists.iter().map(|_| Ok(None)).collect();
        for (outcome, checked) in outcomes.iter_mut().zip(lists) {
            if let Err(error) = checked {
                *outcome = Err(error);
            }
        }
        for (list, outcome) in done {
            match outcomes.get_mut(list) {
                // One part that failed is the list's failure.
                Some(known) if known.is_ok() => *known = outcome,
                _ => {}
            }
        }
        outcomes
    }
}

impl CopyEngine for CpuEngine {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let order = Order::now();
        let checked = lists.iter().map(|list| list.check(memory.len_bytes(), checksum.is_on())).collect();
        let outcomes = self.copy(memory, checked, checksum, |shares| publish(memory, shares, checksum, order));
        count(&outcomes, lists.iter().map(WriteList::len_bytes), |bytes| self.counters.published(bytes), &self.counters);
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let order = Order::now();
        let checked = lists.iter().map(|list| list.check(memory.len_bytes(), checksum.is_on())).collect();
        let total = lists.iter().fold(0u64, |sum, list| sum.saturating_add(list.len_bytes()));
        let pull = Pull::new(memory, &self.config, total, checksum, order);
        let outcomes = self.copy(memory, checked, checksum, |shares| pull.run(shares));
        count(&outcomes, lists.iter().map(ReadList::len_bytes), |bytes| self.counters.pulled(bytes), &self.counters);
        outcomes
    }

    fn publish(&self, memory: &dyn Coherence, list: &WriteList<'_>, checksum: Checksum) -> Outcome {
        if self.is_divided(list.len_bytes()) {
            return super::only(self.publish_each(memory, std::slice::from_ref(list), checksum));
        }
        // One list that is not divided needs none of the lists around lists.
        let order = Order::now();
        // Before the copy: after it, the instruction that counts would wait until all stores have arrived.
        self.counters.published(list.len_bytes());
        let mut sum = checksum.start();
        let done = list.check(memory.len_bytes(), checksum.is_on()).and_then(|pieces| write_pieces(memory, &pieces, sum.as_mut()));
        order.published(memory);
        if done.is_err() {
            self.counters.not_published(list.len_bytes());
        }
        done.map(|()| sum.map(|sum| sum.finish()))
    }

    fn pull(&self, memory: &dyn Coherence, list: &mut ReadList<'_>, checksum: Checksum) -> Outcome {
        if self.is_divided(list.len_bytes()) {
            return super::only(self.pull_each(memory, std::slice::from_mut(list), checksum));
        }
        let pull = Pull::new(memory, &self.config, list.len_bytes(), checksum, Order::now());
        let pulled = list.check(memory.len_bytes(), checksum.is_on()).and_then(|pieces| pull.run_one(&pieces));
        match pulled {
            Ok(_) => self.counters.pulled(list.len_bytes()),
            Err(_) => self.counters.failed(1),
        }
        pulled
    }

    fn is_settled(&self, _timeout_ms: u64) -> bool {
        true
    }

    fn counters(&self) -> Vec<Copied> {
        vec![self.counters.look(self.name())]
    }
}

pub(super) fn count(outcomes: &[Outcome], sizes: impl Iterator<Item = u64>, moved: impl Fn(u64), counters: &Counters) {
    let (mut bytes, mut failed) = (0u64, 0);
    for (outcome, size) in outcomes.iter().zip(sizes) {
        match outcome {
            Ok(_) => bytes = bytes.saturating_add(size),
            Err(_) => failed += 1,
        }
    }
    moved(bytes);
    if failed > 0 {
        counters.failed(failed);
    }
}

fn total_bytes(shares: &[ListPieces<'_>]) -> u64 {
    shares.iter().flat_map(|share| share.pieces).fold(0, |sum, piece| sum.saturating_add(piece.len_bytes as u64))
}

fn publish(memory: &dyn Coherence, shares: &[ListPieces<'_>], checksum: Checksum, order: Order) -> Vec<(usize, Outcome)> {
    let write = |share: &ListPieces<'_>| {
        let mut sum = checksum.start();
        write_pieces(memory, share.pieces, sum.as_mut()).map(|()| sum.map(|sum| sum.finish()))
    };
    let done = shares.iter().map(|share| (share.list, write(share))).collect();
    order.published(memory);
    done
}

pub(super) fn write_pieces(memory: &dyn Coherence, pieces: &[Piece], mut sum: Option<&mut Running>) -> Result<()> {
    let mut stage = Stage::default();
    for piece in pieces {
        // SAFETY: the pieces are of a write list that the engine's caller holds.
        let (mut rest, mut offset) = (unsafe { piece.source() }, piece.offset);
        while !rest.is_empty() {
            if stage.len > 0 && (stage.end() != offset || is_direct(offset, rest)) {
                stage.write(memory)?;
            }
            let taken = if stage.len == 0 && is_direct(offset, rest) {
                let lines = rest.len() - rest.len() % LINE_BYTES;
                let (now, _) = rest.split_at(if sum.is_some() { lines.min(SUMMED_BYTES) } else { lines });
                if let Some(sum) = &mut sum {
                    sum.add(now);
                }
                memory.copy_in(offset, now)?;
                now.len()
            } else {
                let taken = stage.take(offset, rest);
                if let Some(sum) = &mut sum {
                    sum.add(rest.get(..taken).unwrap_or(rest));
                }
                if stage.is_full() {
                    stage.write(memory)?;
                }
                taken
            };
            (rest, offset) = (rest.get(taken..).unwrap_or_default(), offset + taken as u64);
        }
    }
    stage.write(memory)
}

/// Whether bytes are written as they lie.
fn is_direct(offset: u64, bytes: &[u8]) -> bool {
    bytes.len() >= DIRECT_BYTES && offset.is_multiple_of(LINE_BYTES as u64)
}

/// Where short pieces that follow each other in the pool become whole lines: a line that is written in parts is fetched and flushed for
/// each of them.
#[derive(Default)]
struct Stage {
    bytes: Option<Box<[u8; STAGE_BYTES]>>,
    /// Pool offset of the first byte.
    offset: u64,
    len: usize,
}

impl Stage {
    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }

    fn room(&self) -> usize {
        STAGE_BYTES - (self.offset % LINE_BYTES as u64) as usize
    }

    fn is_full(&self) -> bool {
        self.len == self.room()
    }

    /// Takes some of the bytes that go to `offset`, which is where it ends unless it is empty.
    fn take(&mut self, offset: u64, bytes: &[u8]) -> usize {
        if self.len == 0 {
            self.offset = offset;
        }
        // The rest of a long piece after the end of the line is written as it lies.
        let wanted = if bytes.len() < DIRECT_BYTES { bytes.len() } else { LINE_BYTES - (offset % LINE_BYTES as u64) as usize };
        let taken = wanted.min(self.room() - self.len);
        let held = self.bytes.get_or_insert_with(|| Box::new([0; STAGE_BYTES]));
        if let (Some(to), Some(from)) = (held.get_mut(self.len..self.len + taken), bytes.get(..taken)) {
            to.copy_from_slice(from);
        }
        self.len += taken;
        taken
    }

    fn write(&mut self, memory: &dyn Coherence) -> Result<()> {
        if let Some(bytes) = self.bytes.as_ref().and_then(|bytes| bytes.get(..self.len)) {
            memory.copy_in(self.offset, bytes)?;
        }
        self.len = 0;
        Ok(())
    }
}

/// A walk over the bytes of shares, in steps of any length.
struct Walk<'s, 'p> {
    shares: &'s [ListPieces<'p>],
    share: usize,
    piece: usize,
    done: usize,
}

impl<'s, 'p> Walk<'s, 'p> {
    fn new(shares: &'s [ListPieces<'p>]) -> Self {
        Walk { shares, share: 0, piece: 0, done: 0 }
    }

    /// The next bytes of one piece, at most `most_bytes`, and the number of their share. `None` at the end.
    fn next(&mut self, most_bytes: u64) -> Option<(usize, Piece)> {
        loop {
            let share = self.shares.get(self.share)?;
            let Some(piece) = share.pieces.get(self.piece) else {
                (self.share, self.piece, self.done) = (self.share + 1, 0, 0);
                continue;
            };
            let left = piece.len_bytes - self.done;
            let taken = left.min(usize::try_from(most_bytes).unwrap_or(usize::MAX));
            let part = piece.part(self.done, taken);
            self.done += taken;
            if taken == left {
                (self.piece, self.done) = (self.piece + 1, 0);
            }
            return Some((self.share, part));
        }
    }

    fn is_at_end(&self) -> bool {
        let rest = self.shares.get(self.share..).unwrap_or_default();
        match rest.split_first() {
            Some((first, others)) => self.piece >= first.pieces.len() && others.iter().all(|share| share.pieces.is_empty()),
            None => true,
        }
    }
}

/// The checksum of one list while it is pulled.
enum Sum {
    /// Of whole lines, in one pass with their copy.
    Lines(LineSum),
    /// Of anything, between two copies.
    Bytes(Box<Running>),
}

impl Sum {
    fn finish(self) -> Result<u64> {
        match self {
            Sum::Lines(sum) => sum.finish().ok_or_else(|| Error::Invalid("a list was summed in part".into())),
            Sum::Bytes(sum) => Ok(sum.finish()),
        }
    }
}

fn outcome_of(failed: Option<Error>, sum: Option<Sum>) -> Outcome {
    failed.map_or(sum.map(Sum::finish).transpose(), Err)
}

pub(super) struct Pull<'c> {
    memory: &'c dyn Coherence,
    window_bytes: u64,
    checksum: Checksum,
    order: Order,
    streams: bool,
}

impl<'c> Pull<'c> {
    /// For lists of `total_bytes` together.
    pub(super) fn new(memory: &'c dyn Coherence, config: &CopyConfig, total_bytes: u64, checksum: Checksum, order: Order) -> Self {
        Pull { memory, window_bytes: config.window_bytes as u64, checksum, order, streams: total_bytes >= config.stream_from_bytes }
    }

    pub(super) fn run(&self, shares: &[ListPieces<'_>]) -> Vec<(usize, Outcome)> {
        let mut failed: Vec<Option<Error>> = shares.iter().map(|_| None).collect();
        let mut sums: Vec<Option<Sum>> = shares.iter().map(|share| self.sum_of(share)).collect();
        self.copy_windows(shares, &mut failed, &mut sums);
        let fates = failed.into_iter().zip(sums).map(|(failed, sum)| outcome_of(failed, sum));
        shares.iter().map(|share| share.list).zip(fates).collect()
    }

    pub(super) fn run_one(&self, pieces: &[Piece]) -> Outcome {
        let share = ListPieces { list: 0, pieces };
        let (mut failed, mut sum) = ([None], [self.sum_of(&share)]);
        self.copy_windows(&[share], &mut failed, &mut sum);
        let ([failed], [sum]) = (failed, sum);
        outcome_of(failed, sum)
    }

    /// Copies shares, each of which has a place for its failure and one for its checksum: while one window is copied, the flushes of the
    /// next are under way.
    fn copy_windows(&self, shares: &[ListPieces<'_>], failed: &mut [Option<Error>], sums: &mut [Option<Sum>]) {
        let (mut flushing, mut copying) = (Walk::new(shares), Walk::new(shares));
        self.flush_window(&mut flushing, failed);
        while !copying.is_at_end() {
            self.order.flushed(self.memory);
            self.flush_window(&mut flushing, failed);
            let mut left = self.window_bytes;
            while left > 0
                && let Some((share, part)) = copying.next(left)
            {
                left -= part.len_bytes as u64;
                if let (Some(fate @ None), Some(sum)) = (failed.get_mut(share), sums.get_mut(share)) {
                    *fate = self.copy_part(&part, sum.as_mut()).err();
                }
            }
        }
        self.order.pulled(self.memory, self.streams);
    }

    fn flush_window(&self, walk: &mut Walk<'_, '_>, failed: &mut [Option<Error>]) {
        let mut left = self.window_bytes;
        let mut gathered: Option<(usize, u64, u64)> = None;
        while left > 0
            && let Some((share, part)) = walk.next(left)
        {
            left -= part.len_bytes as u64;
            let (start, end) = (part.offset, part.offset + part.len_bytes as u64);
            gathered = match gathered {
                Some((of, from, to)) if of == share && from <= start && start <= to.next_multiple_of(LINE_BYTES as u64) => {
                    Some((of, from, to.max(end)))
                }
                other => {
                    self.flush(other, failed);
                    Some((share, start, end))
                }
            };
        }
        self.flush(gathered, failed);
    }

    fn flush(&self, range: Option<(usize, u64, u64)>, failed: &mut [Option<Error>]) {
        if let Some((share, start, end)) = range
            && let Some(fate @ None) = failed.get_mut(share)
        {
            *fate = self.order.flush(self.memory, start, end - start).err();
        }
    }

    /// A checksum for a list, if one is wanted: in the same pass as the copy where every piece is whole lines for the destination.
    fn sum_of(&self, share: &ListPieces<'_>) -> Option<Sum> {
        if !self.checksum.is_on() {
            return None;
        }
        let is_lines = |piece: &Piece| {
            let ends = [piece.address(), piece.len_bytes];
            piece.len_bytes >= STREAM_PIECE_BYTES && ends.iter().all(|end| end.is_multiple_of(LINE_BYTES))
        };
        let summed = self.streams && self.memory.sums_copies() && share.pieces.iter().all(is_lines);
        let lines = summed.then(|| LineSum::of(total_bytes(std::slice::from_ref(share)))).flatten();
        lines.map(Sum::Lines).or_else(|| self.checksum.start().map(|sum| Sum::Bytes(Box::new(sum))))
    }

    fn copy_part(&self, part: &Piece, sum: Option<&mut Sum>) -> Result<()> {
        // SAFETY: a part of a read list that the engine's caller holds mutably; the parts of a walk do not overlap.
        let destination = unsafe { part.destination() };
        let streams = self.streams && destination.len() >= STREAM_PIECE_BYTES;
        let Some(sum) = sum else {
            return match streams {
                true => self.memory.copy_out_streaming(part.offset, destination),
                false => self.memory.copy_out(part.offset, destination),
            };
        };
        let sum = match sum {
            Sum::Lines(sum) => return self.memory.copy_out_summed(part.offset, destination, sum),
            Sum::Bytes(sum) => sum,
        };
        let mut bounce = streams.then_some([0u8; STREAM_PIECE_BYTES]);
        let mut offset = part.offset;
        for chunk in destination.chunks_mut(if streams { STREAM_PIECE_BYTES } else { SUMMED_BYTES }) {
            // The bytes that are summed are those that are delivered: never the pool's once more, which may have changed meanwhile.
            match bounce.as_mut().and_then(|bounce| bounce.get_mut(..chunk.len())) {
                Some(bounce) => {
                    self.memory.copy_out(offset, bounce)?;
                    sum.add(bounce);
                    self.memory.store_streaming(bounce, chunk);
                }
                None => {
                    self.memory.copy_out(offset, chunk)?;
                    sum.add(chunk);
                }
            }
            offset += chunk.len() as u64;
        }
        Ok(())
    }
}
