// SPDX-License-Identifier: Apache-2.0
//! What each instruction costs on a device. The choices take turns, so that other load falls on all of them.

use super::litmus::mix;
use crate::scratch::Scratch;
use crate::stats::{in_turn, median};
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, Instructions, LineCopy, LineFlush, LineWrite};
use cxl_pool::line::Line;
use cxl_pool::{Error, Result};
use serde::Serialize;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Lines of the working set: more than a first-level cache holds.
const LINES: u64 = 4096;
/// Lines of one batch.
const BATCH: u64 = 256;
/// Length of a copy, in bytes, and the places that copies go to in turn.
const COPY_BYTES: usize = 1 << 20;
const COPY_PLACES: u64 = 4;

/// Cost of a step.
#[derive(Debug, Serialize)]
pub struct Cost {
    pub step: &'static str,
    /// With which instruction: for a copy out, that of the flush before it.
    pub instruction: &'static str,
    /// How long one takes, in nanoseconds: the median of the batches.
    pub ns: f64,
}

fn wrong_bytes(what: &str) -> Error {
    Error::Invalid(format!("{what} gave other bytes than were written: this memory cannot be used"))
}

/// Measures lines and copies on `scratch`.
///
/// # Errors
/// [`Error::Invalid`] when other bytes come back than were written.
pub fn measure(scratch: &Scratch, batches: u64) -> Result<Vec<Cost>> {
    Ok([lines(scratch, batches)?, copies(scratch, batches)?].into_iter().flatten().collect())
}

fn costs(names: impl Iterator<Item = (&'static str, &'static str)>, taken: Vec<Vec<f64>>) -> Vec<Cost> {
    names.zip(taken).map(|((step, instruction), mut taken)| Cost { step, instruction, ns: median(&mut taken) }).collect()
}

fn lines(scratch: &Scratch, batches: u64) -> Result<Vec<Cost>> {
    const STEPS: [&str; 2] = ["publish a line (write, store fence)", "fetch a line (flush, full fence, load)"];
    let best = Instructions::best()?;
    let memory = scratch.memory(&CoherenceOptions::default())?.memory;
    let writes = LineWrite::available().into_iter().map(|write| (STEPS[0], write.name(), Instructions { write, ..best }));
    let fetches = LineFlush::available().into_iter().map(|flush| (STEPS[1], flush.name(), Instructions { flush, ..best }));
    let bare = |(step, name, instructions)| Ok((step, name, Bare::over(memory.clone(), 0, LINES, instructions)?));
    let ways: Vec<(&str, &str, Bare)> = writes.chain(fetches).map(bare).collect::<Result<_>>()?;
    let check = Bare::over(memory.clone(), 0, LINES, best)?;
    let taken = in_turn(ways.len(), batches, |batch, way| {
        let (step, _, bare) = &ways[way];
        // Strides that no prefetcher follows; each line of a batch comes once.
        let indexes: Vec<u64> = (0..BATCH).map(|step| ((batch * BATCH + step) * 2477) % LINES).collect();
        let content = |&index: &u64| {
            bytemuck::cast([0, 1, 2, 3, 4, 5, 6, 7].map(|word: u64| mix(index << 20 ^ batch << 8 ^ (way as u64) << 3 ^ word)))
        };
        let contents: Vec<Line> = indexes.iter().map(content).collect();
        let publish = |bare: &Bare| indexes.iter().zip(&contents).for_each(|(&index, line)| bare.publish(index, black_box(line)));
        if *step == STEPS[1] {
            publish(&check);
        }
        let mut found = Vec::with_capacity(BATCH as usize);
        let start = Instant::now();
        if *step == STEPS[0] {
            publish(bare);
        } else {
            indexes.iter().for_each(|&index| found.push(bare.fetch(index)));
        }
        let taken_ns = start.elapsed().as_nanos() as f64 / BATCH as f64;
        if *step == STEPS[0] {
            indexes.iter().for_each(|&index| found.push(check.fetch(index)));
        }
        if found == contents { Ok(taken_ns) } else { Err(wrong_bytes(step)) }
    })?;
    Ok(costs(ways.iter().map(|(step, name, _)| (*step, *name)), taken))
}

fn copies(scratch: &Scratch, batches: u64) -> Result<Vec<Cost>> {
    const STEPS: [&str; 2] = ["copy 1 MiB in (stores, store fence)", "copy 1 MiB out (flush, full fence, loads)"];
    let best = Instructions::best()?;
    let ins = LineCopy::available().into_iter().map(|copy| (STEPS[0], copy.name(), Instructions { copy, ..best }));
    let outs = LineFlush::available().into_iter().map(|range| (STEPS[1], range.name(), Instructions { range, ..best }));
    let map = |(step, name, instructions)| {
        let options = CoherenceOptions { instructions: Some(instructions), ..CoherenceOptions::default() };
        Ok((step, name, scratch.memory(&options)?))
    };
    let ways: Vec<_> = ins.chain(outs).map(map).collect::<Result<_>>()?;
    let (mut source, mut found) = (vec![0u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    // Every mapping meets its page faults now.
    for (_, _, mapped) in &ways {
        (0..COPY_PLACES).try_for_each(|place| mapped.memory.copy_in(place * COPY_BYTES as u64, &source))?;
    }
    let taken = in_turn(ways.len(), batches.div_ceil(4), |batch, way| {
        let (step, _, mapped) = &ways[way];
        let (memory, offset): (&Arc<dyn Coherence>, u64) = (&mapped.memory, batch % COPY_PLACES * COPY_BYTES as u64);
        let word = |word: usize| mix(batch << 32 | (way as u64) << 24 | word as u64).to_le_bytes();
        source.chunks_exact_mut(8).enumerate().for_each(|(number, bytes)| bytes.copy_from_slice(&word(number)));
        found.fill(0);
        let start = Instant::now();
        memory.copy_in(offset, black_box(&source))?;
        memory.fence_stores();
        let copied_in_ns = start.elapsed().as_nanos() as f64;
        memory.fence_all();
        let start = Instant::now();
        memory.flush_range(offset, COPY_BYTES as u64)?;
        memory.fence_all();
        memory.copy_out(offset, black_box(&mut found))?;
        let copied_out_ns = start.elapsed().as_nanos() as f64;
        if found != source {
            return Err(wrong_bytes(step));
        }
        Ok(if *step == STEPS[0] { copied_in_ns } else { copied_out_ns })
    })?;
    Ok(costs(ways.iter().map(|(step, name, _)| (*step, *name)), taken))
}
