// SPDX-License-Identifier: Apache-2.0
//! The accesses that CACHE.md sections 4 and 5 demand of a publish and of a pull, by bare instructions and with nothing computed: what a
//! perfect program would take. What a goal leaves beyond that is what software may take.

use cxl_pool::Result;
use cxl_pool::coherence::Bare;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::hint::black_box;

use super::Lab;

/// Lines that the accesses go to: as far from each other as those of different regions are.
const STRIDE_LINES: u64 = 64;
/// Where the lines that are published lie: those that are fetched lie behind them.
const PUBLISHED: u64 = 3;

/// Lines of their own to publish and to fetch.
pub struct Accesses {
    bare: Bare,
    /// Seats, each of which has a line of fence words.
    seats: u64,
}

impl Accesses {
    /// Bytes that the lines are spread over.
    pub const BYTES: u64 = 1 << 20;

    /// On the [`Accesses::BYTES`] from `offset` on.
    pub fn at(lab: &Lab, offset: u64) -> Result<Accesses> {
        Ok(Accesses { bare: lab.bare(offset, Self::BYTES)?, seats: lab.pool().superblock().seats().len() as u64 })
    }

    fn write(&self, number: u64) {
        self.bare.write(number * STRIDE_LINES, black_box(&Line([number as u8 + 1; LINE_BYTES])));
    }

    fn put(&self, number: u64) {
        self.write(number);
        self.bare.fence_stores();
    }

    /// A line of a block or of hints, and the fence words of one host: together.
    fn fetch(&self) {
        let lines = || (PUBLISHED..=PUBLISHED + self.seats).map(|number| number * STRIDE_LINES);
        lines().for_each(|line| self.bare.flush_range(line, LINE_BYTES));
        self.bare.fence_all();
        for line in lines() {
            black_box(self.bare.load(line));
        }
    }

    /// A publish: WRITING, which the full fence of the fetch behind it orders; hint and own fence; the hint; the payload, which `copy`
    /// fences; READY.
    pub fn publish(&self, copy: impl FnOnce()) {
        self.write(0);
        self.fetch();
        self.put(1);
        copy();
        self.put(2);
    }

    /// A pull: the pin; descriptor and fence of its owner; the payload; both again; the pin taken back.
    pub fn pull(&self, copy: impl FnOnce() -> Result<()>) -> Result<()> {
        self.put(0);
        self.fetch();
        copy()?;
        self.fetch();
        self.put(0);
        Ok(())
    }
}
