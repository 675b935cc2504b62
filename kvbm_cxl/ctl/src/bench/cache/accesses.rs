// SPDX-License-Identifier: Apache-2.0
//! The accesses that CACHE.md sections 4 and 5 demand of a publish and of a pull, by bare instructions: what a program that computes
//! nothing would take.

use crate::lab::Lab;
use cxl_pool::Result;
use cxl_pool::coherence::Bare;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::line::Line;
use std::hint::black_box;

/// Distance of the lines: as far from each other as those of different regions are.
const STRIDE_LINES: u64 = 64;
/// The lines below are published; from here on they are fetched.
const PUBLISHED: u64 = 3;
/// Bytes that the lines are spread over.
const BYTES: u64 = 1 << 20;

/// Lines to publish and to fetch.
pub struct Accesses {
    bare: Bare,
    /// Seats, each of which has a line of fence words.
    seats: u64,
}

impl Accesses {
    /// On the memory from `offset`.
    pub fn at(lab: &Lab, offset: u64) -> Result<Accesses> {
        Ok(Accesses { bare: lab.bare(offset, BYTES)?, seats: lab.pool.superblock().seats().len() as u64 })
    }

    fn write(&self, number: u64) {
        self.bare.write(number * STRIDE_LINES, black_box(&Line([number as u8 + 1; LINE_BYTES])));
    }

    fn put(&self, number: u64) {
        self.write(number);
        self.bare.fence_stores();
    }

    /// A line of a block or of hints together with the fence words of a host.
    fn fetch(&self) {
        let lines = || (PUBLISHED..=PUBLISHED + self.seats).map(|number| number * STRIDE_LINES);
        lines().for_each(|line| self.bare.flush_range(line, LINE_BYTES));
        self.bare.fence_all();
        lines().for_each(|line| _ = black_box(self.bare.load(line)));
    }

    /// A publish: WRITING, which the full fence of the next fetch orders; hint and own fence; the hint; the payload, which `copy` fences;
    /// READY.
    pub fn publish(&self, copy: impl FnOnce()) {
        self.write(0);
        self.fetch();
        self.put(1);
        copy();
        self.put(2);
    }

    /// A pull: the pin; descriptor and fence of its owner; the payload; both again; the pin is released.
    pub fn pull(&self, copy: impl FnOnce() -> Result<()>) -> Result<()> {
        self.put(0);
        self.fetch();
        copy()?;
        self.fetch();
        self.put(0);
        Ok(())
    }
}
