// SPDX-License-Identifier: Apache-2.0
//! Which tests run, with which instructions, and their results.

use cxl_pool::Result;
use cxl_pool::coherence::{CpuFeatures, Instructions, LineCopy, LineFlush, LineLoad, LineWrite};
use serde::Serialize;

cxl_pool::named_enum! {
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    Test {
        /// Lines published one after the other are seen in that order, whole, and never older than before.
        Order = "publish order",
        /// Payload that was copied in before its flag is what a reader of the flag copies out.
        Payload = "payload before flag",
        /// Both publish a line of their own, then fetch the other's: at least one must see the other (CACHE.md section 11).
        Buffering = "publish then fetch",
        /// The same, and each fetches its own line back in between.
        BufferingReadBack = "publish, read back, fetch",
        /// The same, and the GPU of a side that has one copies its payloads: past its host's caches or not, as CXL_CUDA_DMA says.
        GpuPayload = "payload by GPU before flag",
    }
}

/// One test with one choice of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trial {
    pub test: Test,
    /// What the steps are made of; each side takes its own best where its CPU lacks one.
    pub instructions: Instructions,
}

impl Trial {
    /// Every test with `best`, the choice in force, and then with every other one that matters to it if `all`; that of a GPU if `has_gpu`.
    pub fn plan(best: Instructions, all: bool, has_gpu: bool) -> Vec<Trial> {
        let tests = Test::ALL.iter().filter(|&&test| test != Test::GpuPayload || has_gpu);
        let mut trials: Vec<Trial> = tests.map(|&test| Trial { test, instructions: best }).collect();
        let mut add = |trial: Trial| {
            if all && !trials.contains(&trial) {
                trials.push(trial);
            }
        };
        for write in LineWrite::available() {
            for flush in LineFlush::available() {
                for test in [Test::Order, Test::Buffering, Test::BufferingReadBack] {
                    add(Trial { test, instructions: Instructions { write, flush, ..best } });
                }
            }
        }
        for copy in LineCopy::available() {
            for range in LineFlush::available() {
                add(Trial { test: Test::Payload, instructions: Instructions { copy, range, ..best } });
            }
        }
        trials
    }

    /// As one word of a line.
    pub fn encode(&self) -> u64 {
        let place = |index: Option<usize>| index.unwrap_or(0) as u64;
        let Instructions { write, flush, range, copy, load } = self.instructions;
        [
            place(Test::ALL.iter().position(|&test| test == self.test)),
            place(LineWrite::ALL.iter().position(|&choice| choice == write)),
            place(LineFlush::ALL.iter().position(|&choice| choice == flush)),
            place(LineFlush::ALL.iter().position(|&choice| choice == range)),
            place(LineCopy::ALL.iter().position(|&choice| choice == copy)),
            place(LineLoad::ALL.iter().position(|&choice| choice == load)),
        ]
        .iter()
        .fold(0, |word, &byte| word << 8 | byte)
    }

    /// The reverse, with this machine's best in the place of what its CPU lacks; `None` for a word that is no trial.
    pub fn decode(word: u64) -> Result<Option<Trial>> {
        let byte = |place: u32| (word >> (8 * place) & 0xff) as usize;
        let chosen = (|| {
            Some(Trial {
                test: *Test::ALL.get(byte(5))?,
                instructions: Instructions {
                    write: *LineWrite::ALL.get(byte(4))?,
                    flush: *LineFlush::ALL.get(byte(3))?,
                    range: *LineFlush::ALL.get(byte(2))?,
                    copy: *LineCopy::ALL.get(byte(1))?,
                    load: *LineLoad::ALL.get(byte(0))?,
                },
            })
        })();
        let Some(mut trial) = chosen.filter(|_| word >> 48 == 0) else { return Ok(None) };
        let (cpu, best) = (CpuFeatures::detect(), Instructions::best()?);
        let wanted = &mut trial.instructions;
        wanted.write = if wanted.write.is_available(&cpu) { wanted.write } else { best.write };
        wanted.flush = if wanted.flush.is_available(&cpu) { wanted.flush } else { best.flush };
        wanted.range = if wanted.range.is_available(&cpu) { wanted.range } else { best.range };
        wanted.copy = if wanted.copy.is_available(&cpu) { wanted.copy } else { best.copy };
        wanted.load = if wanted.load.is_available(&cpu) { wanted.load } else { best.load };
        Ok(Some(trial))
    }
}

cxl_pool::named_enum! {
    /// What must not happen.
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    Violation {
        /// A fetch gave an older line than an earlier fetch, or than a line published before one already seen.
        OutOfOrder = "lines were seen out of order",
        /// A fetch did not give a line that had been published long before.
        Stale = "a published line was not seen",
        NeitherSaw = "neither side saw the other's line",
        /// A line verified but holds what neither side published, or one's own published line is not there.
        WrongLine = "a line holds what neither side published",
        /// A payload differs from what its flag names.
        WrongPayload = "a payload differs from what its flag names",
    }
}

impl Violation {
    pub fn code(self) -> u64 {
        1 + Violation::ALL.iter().position(|&violation| violation == self).unwrap_or(0) as u64
    }

    /// The reverse; 0 is none.
    pub fn from_code(code: u64) -> Option<Violation> {
        Violation::ALL.get(usize::try_from(code).ok()?.checked_sub(1)?).copied()
    }
}

/// What one side, or both together, saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    /// Checks that could have failed.
    pub checks: u64,
    /// Those of them that fell into a moment when the other side was at work as well: how sharp the test was.
    pub overlapping: u64,
    pub violations: u64,
    /// How the first one failed.
    pub first: Option<Violation>,
    /// Lines that were seen half written. Their checksum shows it, and the pool fetches again.
    pub torn: u64,
}

impl Outcome {
    /// Notes a failed check.
    pub fn violated(&mut self, violation: Violation) {
        self.violations += 1;
        self.first.get_or_insert(violation);
    }

    /// Adds what another run or side saw.
    pub fn add(&mut self, other: &Outcome) {
        self.checks += other.checks;
        self.overlapping += other.overlapping;
        self.violations += other.violations;
        self.first = self.first.or(other.first);
        self.torn += other.torn;
    }
}

#[cfg(test)]
mod tests;
