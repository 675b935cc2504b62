// SPDX-License-Identifier: Apache-2.0
//! Which way a call's bytes go: by a kernel, by the GPU's copy engines, or through buffers; and in what steps.

use super::config::CudaConfig;
use super::gpu::Entered;
use super::kernel::Kernels;
use super::lane::Move;
use super::registered::Registered;
use super::table::SUMMED_BYTES;
use super::transfer::Transfer;
use crate::coherence::Coherence;
use crate::copy::list::Piece;
use std::sync::Arc;

/// Moves longer than a step are cut where a page begins.
pub(super) const PAGE_BYTES: usize = 4096;

/// What an engine has for copies.
#[derive(Clone, Copy)]
pub(super) struct Means<'e> {
    pub(super) config: &'e CudaConfig,
    pub(super) registered: Option<&'e Registered>,
    pub(super) kernels: Option<&'e Arc<Kernels>>,
}

/// What makes the moves of a step where the GPU reaches the pool itself.
#[derive(Clone)]
pub(super) enum Mover {
    /// The GPU's copy engines.
    Engines,
    /// A kernel.
    Kernel(Arc<Kernels>),
    /// A kernel that takes the checksums, too.
    SummingKernel(Arc<Kernels>),
}

/// How a call's bytes go.
pub(super) enum Plan<'e> {
    /// The GPU reaches the pool itself.
    Direct(&'e Registered, Mover),
    /// Through pinned buffers of so many bytes.
    Buffers(usize),
}

impl<'e> Plan<'e> {
    /// The way for a transfer. Registers what of the pool that needs.
    pub(super) fn of(transfer: &Transfer<'_>, memory: &dyn Coherence, means: Means<'e>, entered: &Entered<'_>) -> Self {
        let buffers = Plan::Buffers(means.config.buffer_bytes);
        let Some(registered) = means.registered else { return buffers };
        let kernels = means.kernels.filter(|kernels| kernels.is_usable());
        let is_summed = transfer.has_checksums();
        let can_sum = || transfer.lists_len_bytes().all(|len_bytes| len_bytes == 0 || SUMMED_BYTES.contains(&len_bytes));
        if is_summed && (kernels.is_none() || !can_sum()) || !transfer.is_reached(memory, registered, entered) {
            return buffers;
        }
        let kernels = kernels.filter(|_| transfer.stretches().all(|(offset, len_bytes)| registered.is_mapped(offset, len_bytes)));
        match kernels {
            None if is_summed => buffers,
            Some(kernels) if is_summed => Plan::Direct(registered, Mover::SummingKernel(kernels.clone())),
            Some(kernels) => Plan::Direct(registered, Mover::Kernel(kernels.clone())),
            None => Plan::Direct(registered, Mover::Engines),
        }
    }

    /// What of the pool is registered for it.
    pub(super) fn is_direct(&self) -> bool {
        matches!(self, Plan::Direct(..))
    }
}

/// Moves that the GPU is given at a time.
pub(super) struct Step {
    pub(super) moves: Vec<Move>,
    pub(super) mover: Mover,
    /// Stretches of the pool that it moves, each with its list.
    pub(super) runs: Vec<(usize, Piece)>,
}

/// Cuts moves into steps of at most so many bytes; a list whose checksum is taken is in one of them.
pub(super) fn steps(moves: Vec<Move>, mover: &Mover, step_bytes: usize) -> Vec<Step> {
    let mut cut = Cut { steps: Vec::new(), mover, filled: usize::MAX };
    if let Mover::SummingKernel(_) = mover {
        for run in moves.chunk_by(|one, other| one.list == other.list) {
            let len_bytes = run.iter().fold(0usize, |sum, part| sum.saturating_add(part.len_bytes));
            if cut.filled.saturating_add(len_bytes) > step_bytes {
                cut.begin();
            }
            run.iter().for_each(|part| cut.put(*part));
        }
        return cut.steps;
    }
    for mut part in moves {
        while part.len_bytes > 0 {
            if step_bytes.saturating_sub(cut.filled) < part.len_bytes.min(PAGE_BYTES) {
                cut.begin();
            }
            let room = step_bytes - cut.filled;
            let taken = if part.len_bytes <= room { part.len_bytes } else { room / PAGE_BYTES * PAGE_BYTES };
            cut.put(Move { len_bytes: taken, ..part });
            part = part.without(taken);
        }
    }
    cut.steps
}

/// Steps that are being made.
struct Cut<'m> {
    steps: Vec<Step>,
    mover: &'m Mover,
    /// Bytes of the last step; more than any before the first.
    filled: usize,
}

impl Cut<'_> {
    fn begin(&mut self) {
        self.steps.push(Step { moves: Vec::new(), mover: self.mover.clone(), runs: Vec::new() });
        self.filled = 0;
    }

    fn put(&mut self, part: Move) {
        self.filled = self.filled.saturating_add(part.len_bytes);
        let Some(step) = self.steps.last_mut() else { return };
        step.moves.push(part);
        match step.runs.last_mut() {
            Some((list, run)) if *list == part.list && run.offset + run.len_bytes as u64 == part.offset => run.len_bytes += part.len_bytes,
            _ => step.runs.push((part.list, Piece::in_host(part.offset, 0, part.len_bytes))),
        }
    }
}
