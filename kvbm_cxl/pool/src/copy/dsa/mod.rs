// SPDX-License-Identifier: Apache-2.0
//! Large copies by Intel's Data Streaming Accelerator, through a user work queue (Beluga sections 5.1 and 5.2: better than the CPU from
//! 16 KiB on, worse up to 4 KiB).
//!
//! **This has never run on such a device.** Descriptors, limits, errors and order were tested against a stand-in that executes descriptors
//! as the specification says; speed was not measured. `engine=cpu` in `CXL_COPY` leaves it out.
//!
//! - The device moves whole lines of pieces above 4 KiB; the CPU copies the rest meanwhile, and everything that the device did not.
//! - It is part of this host's coherence domain: what it reads may come from this host's caches, so a pull flushes first, as the CPU's
//!   does. That a write goes past the caches is a hint to it, so a publish flushes what it wrote, then fences (I4).
//! - A move that is not done in time is waited out by closing the queue before anything else is written in its place. From then on the CPU
//!   copies.
//! - One caller at a time uses the queue; a caller that finds it taken copies by the CPU.

mod descriptor;
mod queue;
mod transfer;

pub use descriptor::{Answer, Completion, Descriptor};
pub use queue::{HardwareQueue, Limits, UsableQueue, WorkQueue, discover};

use super::cpu::{CpuEngine, Pull, write_pieces};
use super::list::Piece;
use super::order::Order;
use super::{Checksum, Copied, CopyEngine, Outcome, ReadList, WriteList};
use crate::coherence::Coherence;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use descriptor::Target;
use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;
use transfer::Move;

/// Pieces up to this size are the CPU's (Beluga O4).
const CPU_PIECE_BYTES: usize = 4096;

/// Copies with an accelerator, and with the CPU what that cannot or does not do.
pub struct DsaEngine {
    queue: Mutex<Option<Box<dyn WorkQueue>>>,
    cpu: CpuEngine,
    timeout: Duration,
    /// Whether a move was given up that the device may make at any time, because the closed queue did not end it either.
    has_abandoned: AtomicBool,
    counters: super::counters::Counters,
}

/// What one list comes to: the part for the device, and the rest.
struct Divided<'l> {
    pieces: Cow<'l, [Piece]>,
    by_device: Vec<Piece>,
    by_cpu: Vec<Piece>,
    moves: Vec<Move>,
}

impl DsaEngine {
    /// An engine that submits to `queue`; a copy that the device has not done after `timeout_ms` ends its use.
    pub fn over(queue: Box<dyn WorkQueue>, cpu: CpuEngine, timeout_ms: u64) -> Self {
        DsaEngine {
            queue: Mutex::new(Some(queue)),
            cpu,
            timeout: Duration::from_millis(timeout_ms),
            has_abandoned: AtomicBool::new(false),
            counters: Default::default(),
        }
    }

    /// The queue, if it is open and not in use just now.
    fn queue(&self) -> Option<MutexGuard<'_, Option<Box<dyn WorkQueue>>>> {
        let queue = match self.queue.try_lock() {
            Ok(queue) => queue,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        queue.is_some().then_some(queue)
    }

    /// Has the device make moves, and does `meanwhile` while it works.
    fn run(&self, queue: &mut Option<Box<dyn WorkQueue>>, moves: &[Move], target: Target, meanwhile: impl FnOnce()) -> Result<Vec<usize>> {
        let ran = transfer::run(queue, moves, target, self.timeout, meanwhile);
        if ran.is_err() {
            self.has_abandoned.store(true, Ordering::Relaxed);
        }
        ran
    }

    /// Cuts a checked list into what the device moves and what it does not.
    fn divide<'l>(
        list: usize,
        memory: &dyn Coherence,
        pieces: Cow<'l, [Piece]>,
        whole_lines: bool,
        to_move: impl Fn(usize, usize, usize) -> Move,
    ) -> Divided<'l> {
        let (mut by_device, mut by_cpu, mut moves) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces.iter() {
            let head = if whole_lines { (piece.offset as usize).wrapping_neg() % LINE_BYTES } else { 0 };
            let middle = piece.len_bytes.saturating_sub(head);
            let middle = if whole_lines { middle - middle % LINE_BYTES } else { middle };
            // A device or memory that is known to be bad is left to the CPU, which reports the fault.
            let address = if middle > CPU_PIECE_BYTES { memory.address(piece.offset + head as u64, middle as u64) } else { None };
            let Some(address) = address else {
                by_cpu.push(*piece);
                continue;
            };
            let part = piece.part(head, middle);
            moves.push(Move { list, ..to_move(part.address(), address.as_ptr().expose_provenance(), middle) });
            by_device.push(part);
            by_cpu.extend(
                [piece.part(0, head), piece.part(head + middle, piece.len_bytes - head - middle)]
                    .into_iter()
                    .filter(|part| part.len_bytes > 0),
            );
        }
        Divided { pieces, by_device, by_cpu, moves }
    }

    fn count_bytes(&self, divided: &Divided<'_>, is_redone: bool, device: impl Fn(&super::counters::Counters, u64)) {
        let sum = |pieces: &[Piece]| pieces.iter().map(|piece| piece.len_bytes as u64).sum::<u64>();
        if is_redone {
            self.counters.failed(1);
            device(self.cpu.raw_counters(), sum(&divided.pieces));
        } else {
            device(&self.counters, sum(&divided.by_device));
            device(self.cpu.raw_counters(), sum(&divided.by_cpu));
        }
    }
}

fn sum_of<'p>(checksum: Checksum, parts: impl Iterator<Item = &'p [u8]>) -> Option<u64> {
    let mut sum = checksum.start()?;
    parts.for_each(|part| sum.add(part));
    Some(sum.finish())
}

impl CopyEngine for DsaEngine {
    fn name(&self) -> &'static str {
        "dsa"
    }

    fn publish_each(&self, memory: &dyn Coherence, lists: &[WriteList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let Some(mut queue) = self.queue() else { return self.cpu.publish_each(memory, lists, checksum) };
        let order = Order::now();
        let to_pool = |local, pool, len_bytes| Move { list: 0, source: local, destination: pool, len_bytes };
        let divided: Vec<Result<Divided<'_>>> = lists
            .iter()
            .enumerate()
            .map(|(list, pieces)| {
                let pieces = pieces.check(memory.len_bytes(), checksum.is_on())?;
                Ok(Self::divide(list, memory, pieces, true, to_pool))
            })
            .collect();
        let moves: Vec<Move> = divided.iter().flatten().flat_map(|list| &list.moves).copied().collect();
        let mut rest: Vec<Outcome> = Vec::new();
        let meanwhile = || {
            let write = |list: &Divided<'_>| {
                write_pieces(memory, &list.by_cpu, None)?;
                // SAFETY: the pieces are of write lists that the caller holds.
                Ok(sum_of(checksum, list.pieces.iter().map(|piece| unsafe { piece.source() })))
            };
            rest = divided.iter().map(|list| list.as_ref().map_or(Ok(None), write)).collect();
        };
        let ran = self.run(&mut queue, &moves, Target::Memory, meanwhile);
        let redo = ran.as_ref().map_or(&[][..], |redo| redo);
        let finish = |(list, (divided, rest)): (usize, (Result<Divided<'_>>, Outcome))| {
            let (divided, sum) = (divided?, rest?);
            let is_redone = redo.contains(&list);
            match &ran {
                Err(Error::Timeout { what, timeout_ms }) if !divided.moves.is_empty() => {
                    return Err(Error::Timeout { what: what.clone(), timeout_ms: *timeout_ms });
                }
                _ if is_redone => write_pieces(memory, &divided.by_device, None)?,
                _ => divided.by_device.iter().try_for_each(|part| order.flush_moved(memory, part.offset, part.len_bytes as u64))?,
            }
            self.count_bytes(&divided, is_redone, super::counters::Counters::published);
            Ok(sum)
        };
        let outcomes = divided.into_iter().zip(rest).enumerate().map(finish).collect();
        order.published(memory);
        outcomes
    }

    fn pull_each(&self, memory: &dyn Coherence, lists: &mut [ReadList<'_>], checksum: Checksum) -> Vec<Outcome> {
        let Some(mut queue) = self.queue() else { return self.cpu.pull_each(memory, lists, checksum) };
        let order = Order::now();
        let from_pool = |local, pool, len_bytes| Move { list: 0, source: pool, destination: local, len_bytes };
        let divided: Vec<Result<Divided<'_>>> = lists
            .iter()
            .enumerate()
            .map(|(list, pieces)| {
                let pieces = pieces.check(memory.len_bytes(), checksum.is_on())?;
                let divided = Self::divide(list, memory, pieces, false, from_pool);
                divided.by_device.iter().try_for_each(|part| order.flush(memory, part.offset, part.len_bytes as u64))?;
                Ok(divided)
            })
            .collect();
        order.flushed(memory);
        let moves: Vec<Move> = divided.iter().flatten().flat_map(|list| &list.moves).copied().collect();
        let total: u64 = lists.iter().map(|list| list.len_bytes()).fold(0, u64::saturating_add);
        let target = if total >= self.cpu.config().stream_from_bytes { Target::Memory } else { Target::Cache };
        let pull = Pull::new(memory, self.cpu.config(), total, Checksum::Off, order);
        let copy = |pieces: &[Piece]| match pieces {
            [] => Ok(None),
            _ => pull.run_one(pieces),
        };
        let mut rest: Vec<Outcome> = Vec::new();
        let meanwhile = || rest = divided.iter().map(|list| list.as_ref().map_or(Ok(None), |list| copy(&list.by_cpu))).collect();
        let ran = self.run(&mut queue, &moves, target, meanwhile);
        let redo = ran.as_ref().map_or(&[][..], |redo| redo);
        let finish = |(list, (divided, rest)): (usize, (Result<Divided<'_>>, Outcome))| {
            let divided = divided?;
            rest?;
            let is_redone = redo.contains(&list);
            match &ran {
                Err(Error::Timeout { what, timeout_ms }) if !divided.moves.is_empty() => {
                    return Err(Error::Timeout { what: what.clone(), timeout_ms: *timeout_ms });
                }
                _ if is_redone => drop(copy(&divided.by_device)?),
                _ => {}
            }
            self.count_bytes(&divided, is_redone, super::counters::Counters::pulled);
            // SAFETY: the pieces are of read lists that the caller lent, and nothing writes to them any more.
            Ok(sum_of(checksum, divided.pieces.iter().map(|piece| unsafe { &*piece.destination() })))
        };
        let outcomes = divided.into_iter().zip(rest).enumerate().map(finish).collect();
        order.pulled(memory, true);
        outcomes
    }

    fn is_settled(&self, _timeout_ms: u64) -> bool {
        !self.has_abandoned.load(Ordering::Relaxed)
    }

    fn counters(&self) -> Vec<Copied> {
        let mut all = vec![self.counters.look(self.name())];
        all.extend(self.cpu.counters());
        all
    }
}

#[cfg(test)]
mod tests;
