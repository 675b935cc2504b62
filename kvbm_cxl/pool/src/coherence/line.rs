// SPDX-License-Identifier: Apache-2.0
//! The unit that hosts exchange: a cache line.

use crate::limits::LINE_BYTES;

/// The 64 bytes of a cache line, by value: never a reference into pool memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, PartialEq, Eq, Hash, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Line(pub [u8; LINE_BYTES]);

impl Line {
    /// All zero.
    pub const ZERO: Line = Line([0; LINE_BYTES]);
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.chunks(8).try_for_each(|word| {
            word.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            f.write_str(" ")
        })
    }
}
