// SPDX-License-Identifier: Apache-2.0
//! The one module with flushes, fences and non-temporal stores, and the hook layer for the implementations that stand in for them.
//!
//! [`Coherence`] has every operation on pool memory. Three types implement it: the CPU's own instructions on a
//! mapping (`Native`), the multi-process emulator of non-coherent hosts (`Emulated`), and the simulated hosts of `cxl-sim`. The methods
//! are single steps, not safe recipes: the recipes (publish, fetch, verified copy) are composed in [`crate::line`] and above, so that a
//! test can leave any one step out and see it noticed.
//!
//! Assumptions about the hardware (Intel SDM vol. 2 CLFLUSH, MFENCE, SFENCE, MOVDIR64B; docs/internals/design.md section 3):
//! - a line written by `write_line` reaches the memory as one unit, at some moment before the next `fence_stores` or `fence_all` orders
//!   anything after it; on the stores-and-flush fallback it may tear, which the CRC in the line shows;
//! - `flush_line` writes a dirty line back and drops it, but younger loads pass it unless `fence_all` stands between;
//! - a load can be answered from this host's cache for as long as nothing flushes the line, and a prefetcher may fill it at any time.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod arch;
mod bare;
mod emulated;
mod faultmap;
mod forward;
mod instructions;
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other processor has a copy that sums; the definition is tested on all")
)]
mod line;
// Only x86-64 has a copy that sums as it goes.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod line_sum;
mod mapping;
mod native;
mod options;
mod sigbus;
mod submission;

pub use bare::Bare;
pub use emulated::{Emulated, EmulatorOptions};
pub use faultmap::{BadRange, FaultMap, LocalGuard, LostDevice};
pub(crate) use forward::forward_coherence;
pub use instructions::{CpuFeatures, Instructions, LineCopy, LineFlush, LineLoad, LineWrite};
pub use line::Line;
pub use line_sum::LineSum;
pub use mapping::{MappedDevice, Mapping, Segment};
pub use native::Native;
pub use options::{CoherenceOptions, ENVIRONMENT, MappedMemory, over_mapping};
pub use sigbus::{GRANULE_BYTES, MAX_MAPPINGS};
pub use submission::Submission;

use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::ops::Range;
use std::ptr::NonNull;

/// Begins to bring a line of this process's own memory into the caches: a later look there need not wait. For the pool's there is
/// [`Coherence::prefetch_lines`].
#[inline]
pub(crate) fn prefetch(at: *const u8) {
    arch::prefetch(at);
}

/// The steps that touch pool memory. Offsets count from the start of the pool; line offsets are multiples of 64.
///
/// Every method that reaches memory checks its range and returns [`crate::Error::OutOfRange`], and turns a SIGBUS into
/// [`crate::Error::DeviceLost`] or [`crate::Error::Poisoned`].
pub trait Coherence: Send + Sync {
    /// Size of the pool in bytes.
    fn len_bytes(&self) -> u64;

    /// Loads 64 bytes as this host sees them now, cached or not.
    fn load_line(&self, offset: u64) -> Result<Line>;

    /// Writes a whole line as one unit where [`Coherence::keeps_lines_whole`]. Not ordered against anything until a fence.
    fn write_line(&self, offset: u64, line: &Line) -> Result<()>;

    /// Writes the line back if dirty and drops it from this host's caches. Younger loads may pass it until [`Coherence::fence_all`].
    fn flush_line(&self, offset: u64) -> Result<()>;

    /// Orders all earlier writes and flushes of this thread before all later writes (SFENCE).
    fn fence_stores(&self);

    /// Completes all earlier writes and flushes of this thread before any later load or store (MFENCE).
    fn fence_all(&self);

    /// Completes all earlier loads of this thread before any later step (LFENCE).
    fn fence_loads(&self);

    /// Flushes every line that the range touches; like [`Coherence::flush_line`], the caller fences.
    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()>;

    /// Flushes the line at each of `offsets`, in no order among them; the caller fences.
    fn flush_lines(&self, offsets: &[u64]) -> Result<()> {
        offsets.iter().try_for_each(|&offset| self.flush_range(offset, LINE_BYTES as u64))
    }

    /// Loads the line at each of `offsets` into `out`, as far as both go, in no order among them.
    fn load_lines(&self, offsets: &[u64], out: &mut [Line]) -> Result<()> {
        for (&offset, line) in offsets.iter().zip(out) {
            *line = self.load_line(offset)?;
        }
        Ok(())
    }

    /// Begins to bring the line at each of `offsets` into this host's caches, as a prefetcher may at any moment, and waits for none of
    /// them: a device that keeps the page of such a line in flash fetches it meanwhile. A later load may find the present content, so that
    /// a reader of newer bytes flushes, as ever. Memory that has no such step makes none.
    fn prefetch_lines(&self, _offsets: &[u64]) -> Result<()> {
        Ok(())
    }

    /// Copies `source` into the pool past the caches (non-temporal stores). The caller fences with [`Coherence::fence_stores`].
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()>;

    /// Copies from the pool with ordinary loads. The caller has flushed and fenced the range if it wants other hosts' bytes.
    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()>;

    /// As [`Coherence::copy_out`], but where it can, the stores to the destination go past the caches: for data too large to be useful
    /// there. [`Coherence::fence_all`] comes before another thread or a device reads the destination.
    fn copy_out_streaming(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.copy_out(offset, destination)
    }

    /// Copies between two stretches of local memory of the same length with the stores of [`Coherence::copy_out_streaming`]: its second
    /// half, for callers that look at the bytes on the way.
    fn store_streaming(&self, source: &[u8], destination: &mut [u8]) {
        destination.copy_from_slice(source);
    }

    /// Whether lines that this process writes and loads are one unit: the CPU needs an instruction for each. Where it has none, another
    /// host may see a part of a line that this one writes, and this one a part of another's: the CRC of the pool's own lines shows it.
    fn keeps_lines_whole(&self) -> bool {
        false
    }

    /// Whether [`Coherence::copy_out_summed`] is made here: the CPU needs the instructions for it.
    fn sums_copies(&self) -> bool {
        false
    }

    /// As [`Coherence::copy_out_streaming`], in one pass with a checksum of the bytes that are delivered. Only for whole lines whose
    /// destination starts a line, and where [`Coherence::sums_copies`]; anything else is [`crate::Error::Invalid`].
    fn copy_out_summed(&self, _offset: u64, _destination: &mut [u8], _sum: &mut LineSum) -> Result<()> {
        Err(Error::Invalid("no copy with a checksum is made here".into()))
    }

    /// Whether the range can be used, as far as it is known: an error where it was lost or marked bad. Touches nothing.
    fn check(&self, _offset: u64, _len_bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Where this process maps the range, for callers that work in place; `None` where there is no mapping (simulated hosts).
    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>>;

    /// As [`Coherence::address`], for a device that this process has read and write there. Only the emulator tells the two apart, where
    /// the platform that it stands for keeps I/O out of the caches.
    fn device_address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.address(offset, len_bytes)
    }

    /// As [`Coherence::address`], for a caller that is about to store there and has the range to itself. Only the emulator tells the two
    /// apart: it knows that a line was stored to by its having changed, so it has to hold first what the memory holds.
    fn address_for_stores(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.address(offset, len_bytes)
    }
}

/// The bits of a line's first word, as loaded from memory, that hold its CRC.
const CRC_BITS: u64 = u64::from_ne_bytes([0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);

fn lines_of(offset: u64, len_bytes: u64) -> Range<u64> {
    let line = LINE_BYTES as u64;
    if len_bytes == 0 { 0..0 } else { offset / line..(offset + len_bytes).div_ceil(line) }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("no flushes and non-temporal stores are known for this architecture: add a module like x86_64.rs");
