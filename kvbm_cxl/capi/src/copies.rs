// SPDX-License-Identifier: Apache-2.0
//! Lists of copies in one call, with the fences of all made once.

use crate::handle;
use crate::pool::OpenPool;
use crate::status::{Failure, Outcome};
use crate::types::{COPY_IN, COPY_OUT, COPY_WITHIN, Copy};
use cxl_pool::coherence::Coherence;
use cxl_pool::copy::{Checksum, CopyEngine, LocalRange, ReadList, WriteList};
use std::num::NonZeroUsize;
use std::ptr::NonNull;

/// Bytes that are on their way between two places of the pool.
const BOUNCE_BYTES: usize = 256 << 10;
/// Copies out of a pool from this length on are the engine's: it flushes ahead of the copy, and copies larger ones past the caches.
const LARGE_BYTES: usize = 32 << 10;

/// Copies the current bytes from `offset` of `memory`.
pub fn copy_out<'e>(
    memory: &dyn Coherence,
    engine: impl FnOnce() -> Outcome<&'e dyn CopyEngine>,
    offset: u64,
    destination: &mut [u8],
) -> Outcome<()> {
    if destination.len() >= LARGE_BYTES {
        engine()?.pull(memory, &mut ReadList::scatter(offset, [destination]), Checksum::Off)?;
        return Ok(());
    }
    memory.flush_range(offset, destination.len() as u64)?;
    memory.fence_all();
    memory.copy_out(offset, destination)?;
    memory.fence_loads();
    Ok(())
}

fn local(address: usize, len_bytes: usize) -> Outcome<LocalRange> {
    match NonZeroUsize::new(address) {
        Some(address) => Ok(LocalRange { address: NonNull::with_exposed_provenance(address), len_bytes }),
        None => Err(Failure::invalid(format!("the pointer to {len_bytes} bytes of ordinary memory is NULL"))),
    }
}

/// The offset of a piece's bytes at `address`, which has to lie in the blocks of `pool`.
fn offset(pool: &OpenPool, address: usize, len_bytes: usize) -> Outcome<u64> {
    let Some(offset) = pool.offset_of(address) else {
        return Err(Failure::not_in_pool(format!("{address:#x} does not lie in the pool of the first piece")));
    };
    pool.check_range(offset, len_bytes)?;
    Ok(offset)
}

/// Copies the pieces.
///
/// # Safety
/// The ordinary memory of each piece may be read, or written by no other thread, as the direction demands.
pub unsafe fn copy(direction: u32, pieces: &[Copy]) -> Outcome<()> {
    if direction > COPY_WITHIN {
        return Err(Failure::invalid(format!("{direction} is no direction of a copy")));
    }
    let Some(first) = pieces.iter().find(|piece| piece.len_bytes > 0) else { return Ok(()) };
    handle::with_address(first.pool, first.len_bytes, |pool, _| {
        let (memory, engine) = (pool.pool().lines().memory(), pool.copy_engine()?);
        let used = pieces.iter().filter(|piece| piece.len_bytes > 0);
        match direction {
            COPY_IN => {
                let mut list = WriteList::new();
                for piece in used {
                    let to = offset(pool, piece.pool, piece.len_bytes)?;
                    // SAFETY: readable, as the caller says.
                    unsafe { list.push_raw(to, local(piece.memory, piece.len_bytes)?) };
                }
                engine.publish(&**memory, &list, Checksum::Off)?;
            }
            COPY_OUT => {
                let mut list = ReadList::new();
                for piece in used {
                    let from = offset(pool, piece.pool, piece.len_bytes)?;
                    // SAFETY: writable, as the caller says.
                    unsafe { list.push_raw(from, local(piece.memory, piece.len_bytes)?) };
                }
                engine.pull(&**memory, &mut list, Checksum::Off)?;
            }
            _ => {
                let moves = used.map(|piece| {
                    Ok((offset(pool, piece.pool, piece.len_bytes)?, offset(pool, piece.memory, piece.len_bytes)?, piece.len_bytes))
                });
                within(pool, engine, &moves.collect::<Outcome<Vec<_>>>()?)?;
            }
        }
        Ok(())
    })
}

/// Refuses moves (to, from, length) of which two write the same byte: who wins would be by chance. They go in several lists, of which
/// each is only looked at by itself.
fn check_destinations(moves: &[(u64, u64, usize)]) -> Outcome<()> {
    if moves.is_sorted_by(|one, other| one.0 + one.2 as u64 <= other.0) {
        return Ok(());
    }
    let mut places: Vec<(u64, usize)> = moves.iter().map(|&(to, _, len)| (to, len)).collect();
    places.sort_unstable();
    match places.windows(2).find(|pair| pair[0].0 + pair[0].1 as u64 > pair[1].0) {
        Some(pair) => Err(Failure::invalid(format!(
            "copying within the pool: the destinations at {:#x} (+{} bytes) and {:#x} overlap: give every byte of the pool once",
            pair[0].0, pair[0].1, pair[1].0
        ))),
        None => Ok(()),
    }
}

/// Copies (to, from, length) within the pool, through memory of this process: neither end may be touched but by the coherence layer.
fn within(pool: &OpenPool, engine: &dyn CopyEngine, moves: &[(u64, u64, usize)]) -> Outcome<()> {
    check_destinations(moves)?;
    let memory = pool.pool().lines().memory();
    let mut bounce = vec![0u8; BOUNCE_BYTES.min(moves.iter().fold(0, |sum: usize, (_, _, len)| sum.saturating_add(*len)))];
    let mut left = moves.iter().copied();
    let mut rest = left.next();
    while rest.is_some() {
        // As many as there is room for: (to, from, length), contiguous.
        let (mut taken, mut room) = (Vec::new(), bounce.len());
        while let Some((to, from, len)) = rest
            && room > 0
        {
            let now = len.min(room);
            taken.push((to, from, now));
            room -= now;
            rest = if now == len { left.next() } else { Some((to + now as u64, from + now as u64, len - now)) };
        }
        let (mut reads, mut free) = (ReadList::new(), bounce.as_mut_slice());
        for &(_, from, len) in &taken {
            let (now, behind) = free.split_at_mut(len);
            reads.push(from, now);
            free = behind;
        }
        engine.pull(&**memory, &mut reads, Checksum::Off)?;
        let (mut writes, mut full) = (WriteList::new(), bounce.as_slice());
        for &(to, _, len) in &taken {
            let (now, behind) = full.split_at(len);
            writes.push(to, now);
            full = behind;
        }
        engine.publish(&**memory, &writes, Checksum::Off)?;
    }
    Ok(())
}
