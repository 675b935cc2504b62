// SPDX-License-Identifier: Apache-2.0
//! Regions whose process is gone (LENT.md section 5). What was lent stays lent, and right, until the memory is freed.
//!
//! A process that died has left stores in the caches of its machine, which may be written back at any later time. So memory of a region is
//! freed by a process of the same machine, which can bring them out, or by any process once that machine is stated to be off. And only by
//! the process that the allocator gave the dead one's chunk to: there is one of these in the whole pool.

use super::lines::Head;
use super::shape::{head_seal, place_of};
use super::void;
use crate::alloc::Allocator;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::line::Lines;
use crate::platform::ProcessId;

/// Frees the regions of dead processes among the kept blocks that this process has from them; returns how many. To be called now and then
/// by every process with an allocator.
///
/// # Errors
/// [`Error::Fenced`], [`Error::Timeout`]; those of the memory.
pub fn reap(host: &Host, allocator: &Allocator) -> Result<usize> {
    let lines = host.lines();
    let Some(_turn) = allocator.try_reap() else { return Ok(0) };
    let mut reaped = 0;
    for block in allocator.kept_blocks() {
        let Ok(head) = lines.fetch_in::<Head>(head_seal(lines, block.offset), 0, block.offset)? else { continue };
        let place = place_of(block.offset, &head);
        let fits = place.check(lines.layout()).is_ok() && place.end() <= block.offset + block.len_bytes;
        if !fits || !is_over(host, &head)? {
            continue;
        }
        point!("lent.reaping");
        void(lines, &place)?;
        match allocator.free(block.offset) {
            Ok(()) => reaped += 1,
            // Another process's by now, which a false statement of this host's death led to.
            Err(Error::NotFound(_)) => {}
            Err(error) => {
                // Still allocated: by its head the next reaper knows it.
                lines.publish_in(head_seal(lines, block.offset), 0, block.offset, head)?;
                return Err(error);
            }
        }
    }
    Ok(reaped)
}

/// Whether the block at a pool offset is a region: blocks that are lent lie in it, and a reaper frees it.
///
/// # Errors
/// Those of the memory.
pub fn is_region(lines: &Lines, offset: u64) -> Result<bool> {
    let Ok(head) = lines.fetch_in::<Head>(head_seal(lines, offset), 0, offset)? else { return Ok(false) };
    Ok(place_of(offset, &head).check(lines.layout()).is_ok())
}

/// Whether nothing that the process of a region wrote can still come: it is gone, and this host's caches are those it wrote into, or its
/// machine is off.
fn is_over(host: &Host, head: &Head) -> Result<bool> {
    if mutant!("lent.reaps_the_living") {
        return Ok(true);
    }
    if head.machine == host.platform().machine().0 {
        return Ok(!host.platform().is_alive(ProcessId { pid: head.pid, start: head.start }));
    }
    Ok(mutant!("lent.reaps_from_afar") || host.inner.dead_up_to(head.slot.into())? >= head.incarnation)
}
