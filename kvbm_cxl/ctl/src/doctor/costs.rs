// SPDX-License-Identifier: Apache-2.0
//! What each instruction costs on a device. The choices take turns, so that whatever else the machine does falls on all of them.

use crate::scratch::Scratch;
use crate::stats::median;
use cxl_pool::coherence::{Bare, CoherenceOptions, Instructions, LineCopy, LineFlush, LineWrite};
use cxl_pool::line::Line;
use cxl_pool::{Error, Result};
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;

/// Lines of the working set: more than a first-level cache holds.
const LINES: u64 = 4096;
/// Lines of one batch.
const BATCH: u64 = 256;
/// Sizes of the copies, in bytes.
const COPY_BYTES: [u64; 3] = [4 << 10, 64 << 10, 1 << 20];

/// Places that the copies go to in turn.
const COPY_PLACES: u64 = 4;

/// Cost of a step on a line.
#[derive(Debug, Serialize)]
pub struct LineCost {
    /// What was done.
    pub step: &'static str,
    /// With which instruction.
    pub instruction: &'static str,
    /// How long one takes, in nanoseconds: the median of the batches.
    pub ns: f64,
}

/// Speed of a copy.
#[derive(Debug, Serialize)]
pub struct CopyCost {
    /// `in` or `out`.
    pub direction: &'static str,
    /// With which instruction: that of the store, or of the flush that precedes the loads.
    pub instruction: &'static str,
    /// Length of one copy, in bytes.
    pub len_bytes: u64,
    /// How fast, in GB/s: the median.
    pub gb_per_s: f64,
}

/// All costs on one device.
#[derive(Debug, Default, Serialize)]
pub struct Costs {
    /// Of lines.
    pub lines: Vec<LineCost>,
    /// Of copies.
    pub copies: Vec<CopyCost>,
}

fn content(index: u64, batch: u64) -> Line {
    let mut words = [0u64; 8];
    words.iter_mut().enumerate().for_each(|(word, value)| *value = super::litmus::mixed(index << 20 ^ batch << 3 ^ word as u64));
    bytemuck::cast(words)
}

fn differs(what: &str) -> Error {
    Error::Invalid(format!("{what} gave other bytes than were written: the figures mean nothing, and this memory cannot be used"))
}

/// Measures lines and copies on `scratch`.
///
/// # Errors
/// [`Error::Invalid`] when something else comes back than was written.
pub fn measure(scratch: &Scratch, batches: u64) -> Result<Costs> {
    Ok(Costs { lines: lines(scratch, batches)?, copies: copies(scratch, batches)? })
}

/// A step of one choice on the `index`-th line.
type Step<'a> = Box<dyn Fn(u64, &Line) -> Line + 'a>;

fn lines(scratch: &Scratch, batches: u64) -> Result<Vec<LineCost>> {
    let best = Instructions::best()?;
    let memory = scratch.memory(&CoherenceOptions::default())?.memory;
    let bare = |instructions| Bare::over(memory.clone(), 0, LINES, instructions);
    let writers = LineWrite::available().into_iter().map(|write| Ok((write, bare(Instructions { write, ..best })?)));
    let writers: Vec<(LineWrite, Bare)> = writers.collect::<Result<_>>()?;
    let flushers = LineFlush::available().into_iter().map(|flush| Ok((flush, bare(Instructions { flush, ..best })?)));
    let flushers: Vec<(LineFlush, Bare)> = flushers.collect::<Result<_>>()?;

    let mut steps: Vec<(&'static str, &'static str, Step<'_>)> = Vec::new();
    for (write, bare) in &writers {
        let publish = move |index: u64, line: &Line| {
            bare.publish(index, line);
            *line
        };
        let read_back = move |index: u64, line: &Line| {
            bare.publish(index, line);
            bare.fetch(index)
        };
        steps.push(("publish (write, store fence)", write.name(), Box::new(publish)));
        steps.push(("publish and read back", write.name(), Box::new(read_back)));
    }
    for (flush, bare) in &flushers {
        steps.push(("fetch (flush, full fence, load)", flush.name(), Box::new(move |index, _| bare.fetch(index))));
    }
    let mut taken = vec![Vec::new(); steps.len()];
    for batch in 0..batches {
        // Strides that no prefetcher follows; each line of a batch comes once.
        let indexes: Vec<u64> = (0..BATCH).map(|step| ((batch * BATCH + step) * 2477) % LINES).collect();
        let contents: Vec<Line> = indexes.iter().map(|&index| content(index, batch)).collect();
        // Every fetch then finds what was published last.
        indexes.iter().zip(&contents).for_each(|(&index, line)| writers[0].1.publish(index, line));
        for turn in 0..steps.len() {
            let number = (turn + batch as usize) % steps.len();
            let mut last = Line::ZERO;
            let start = Instant::now();
            for (&index, line) in indexes.iter().zip(&contents) {
                last = black_box(steps[number].2(index, black_box(line)));
            }
            taken[number].push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            let check = &flushers[0].1;
            if last != contents[BATCH as usize - 1] || indexes.iter().zip(&contents).any(|(&index, line)| check.fetch(index) != *line) {
                return Err(differs(steps[number].0));
            }
        }
    }
    let cost = |((step, instruction, _), mut taken): ((_, _, Step<'_>), Vec<f64>)| LineCost { step, instruction, ns: median(&mut taken) };
    Ok(steps.into_iter().zip(taken).map(cost).collect())
}

fn copies(scratch: &Scratch, batches: u64) -> Result<Vec<CopyCost>> {
    let best = Instructions::best()?;
    let with = |instructions| scratch.memory(&CoherenceOptions { instructions: Some(instructions), ..CoherenceOptions::default() });
    let mut found = Vec::new();
    let mut source = vec![0u8; COPY_BYTES[2] as usize];
    for len_bytes in COPY_BYTES {
        let ins = LineCopy::available().into_iter().map(|copy| Ok((copy.name(), with(Instructions { copy, ..best })?)));
        let ins: Vec<_> = ins.collect::<Result<_>>()?;
        let outs = LineFlush::available().into_iter().map(|range| Ok((range.name(), with(Instructions { range, ..best })?)));
        let outs: Vec<_> = outs.collect::<Result<_>>()?;
        let all: Vec<_> = ins.iter().chain(&outs).collect();
        // Every mapping meets its page faults now.
        for (_, mapped) in &all {
            (0..COPY_PLACES).try_for_each(|place| mapped.memory.copy_in(place * COPY_BYTES[2], &source))?;
            mapped.memory.fence_all();
        }
        let mut taken = vec![Vec::new(); all.len()];
        let mut copied = vec![0u8; len_bytes as usize];
        for batch in 0..batches.div_ceil(4) {
            let offset = batch % COPY_PLACES * COPY_BYTES[2];
            for turn in 0..all.len() {
                let number = (turn + batch as usize) % all.len();
                let (name, mapped) = all[number];
                let memory = &mapped.memory;
                if number < ins.len() || turn == 0 {
                    source.chunks_exact_mut(8).enumerate().for_each(|(word, bytes)| {
                        bytes.copy_from_slice(&super::litmus::mixed(batch << 32 | (number as u64) << 24 | word as u64).to_le_bytes());
                    });
                }
                let bytes = &source[..len_bytes as usize];
                if turn == 0 && number >= ins.len() {
                    memory.copy_in(offset, bytes)?;
                    memory.fence_all();
                }
                let start = Instant::now();
                if number < ins.len() {
                    memory.copy_in(offset, black_box(bytes))?;
                    memory.fence_stores();
                } else {
                    memory.flush_range(offset, len_bytes)?;
                    memory.fence_all();
                    memory.copy_out(offset, black_box(&mut copied))?;
                }
                taken[number].push(start.elapsed().as_nanos() as f64);
                if number < ins.len() {
                    memory.flush_range(offset, len_bytes)?;
                    memory.fence_all();
                    memory.copy_out(offset, &mut copied)?;
                }
                if copied != bytes {
                    return Err(differs(name));
                }
                copied.fill(0);
            }
        }
        let directions = ins.iter().map(|(name, _)| ("in", *name)).chain(outs.iter().map(|(name, _)| ("out", *name)));
        found.extend(directions.zip(taken).map(|((direction, instruction), mut taken)| CopyCost {
            direction,
            instruction,
            len_bytes,
            gb_per_s: len_bytes as f64 / median(&mut taken).max(1.0),
        }));
    }
    Ok(found)
}
