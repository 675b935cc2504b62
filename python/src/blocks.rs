// SPDX-License-Identifier: Apache-2.0
//! Publishing and pulling in bounded batches, whose misses, fences and flushes overlap.

use crate::cache::OpenCache;
use crate::failure::{Failure, Outcome};
use cxl_pool::Cache;
use cxl_pool::cache::{BlockKey, Namespace, PublishRequest, Pulled, Reservation, Reserved};
use cxl_pool::copy::{LocalPlace, LocalRange};

/// Blocks that are reserved, filled and committed together: enough for their misses to overlap, few enough that the first of many is
/// there for others long before the last is copied.
pub const BATCH: usize = 64;
/// Cells that are to be filled, each with the place of its block in the call.
pub type ReservedCells = Vec<(usize, Reservation)>;
/// The words for a block that got a cell, and for one that is there.
pub const RESERVED: &str = "reserved";
pub const STORED: &str = "stored";

/// Reserves cells for blocks; one answer for each, as its word in Python, and the cells with the places of their blocks.
///
/// # Errors
/// Those of the library; earlier reservations are dropped.
pub fn reserve(
    cache: &Cache,
    namespace: Namespace,
    wanted: &[(BlockKey, Option<BlockKey>)],
    len_bytes: impl Fn(usize) -> u64,
) -> Outcome<(Vec<&'static str>, ReservedCells)> {
    let requests: Vec<PublishRequest> = wanted
        .iter()
        .enumerate()
        .map(|(place, &(key, parent))| PublishRequest { namespace, key, parent, len_bytes: len_bytes(place) })
        .collect();
    let (mut answers, mut reservations) = (Vec::with_capacity(wanted.len()), Vec::new());
    for (place, reserved) in cache.reserve_all(&requests)?.into_iter().enumerate() {
        answers.push(match reserved {
            Reserved::Cell(reservation) => {
                reservations.push((place, reservation));
                RESERVED
            }
            Reserved::Exists => "exists",
            Reserved::Busy => "busy",
            Reserved::NoCell => "no_cell",
            Reserved::NoHint => "no_hint",
            Reserved::OverQuota => "over_quota",
        });
    }
    Ok((answers, reservations))
}

/// Fills reserved cells from `pieces` of memory of `local`, and commits them.
///
/// # Errors
/// Those of the library; then all of them are given up.
pub fn fill_and_commit(
    cache: &Cache,
    reserved: ReservedCells,
    local: LocalPlace,
    pieces: impl Fn(usize) -> Vec<LocalRange>,
) -> Outcome<()> {
    let (places, mut reservations): (Vec<usize>, Vec<Reservation>) = reserved.into_iter().unzip();
    // SAFETY: the memory is that of objects which the caller of this function holds, it was checked to lie outside of the pool, and
    // that no thread writes to it meanwhile is what the documentation of the Python functions demands.
    unsafe { Reservation::fill_all_raw(&mut reservations, local, |place| pieces(places[place])) }?;
    Ok(cache.commit_all(reservations)?)
}

/// Publishes blocks; one outcome for each, as its word in Python. `len_bytes` says how long a block is, `pieces` what it consists of, in
/// memory of `local`.
///
/// # Errors
/// Those of the library; blocks of batches before are published then.
pub fn publish(
    open: &OpenCache,
    namespace: Namespace,
    wanted: &[(BlockKey, Option<BlockKey>)],
    len_bytes: impl Fn(usize) -> u64,
    local: LocalPlace,
    pieces: impl Fn(usize) -> Vec<LocalRange>,
) -> Outcome<Vec<&'static str>> {
    let cache = open.cache()?;
    let mut answers = Vec::with_capacity(wanted.len());
    for batch in wanted.chunks(BATCH) {
        let first = answers.len();
        let (answered, reserved) = reserve(cache, namespace, batch, |place| len_bytes(first + place))?;
        answers.extend(answered.into_iter().map(|answer| if answer == RESERVED { STORED } else { answer }));
        fill_and_commit(cache, reserved, local, |place| pieces(first + place))?;
    }
    Ok(answers)
}

/// Pulls blocks; one answer for each. `pieces` gets the place of a block and its length, and says where it goes, in memory of `local`.
///
/// # Errors
/// Those of the library.
pub fn pull(
    open: &OpenCache,
    namespace: Namespace,
    keys: &[BlockKey],
    local: LocalPlace,
    pieces: impl Fn(usize, u64) -> Vec<LocalRange>,
) -> Outcome<Vec<Pulled>> {
    // SAFETY: the memory is that of objects which the caller of this function holds, it was checked to lie outside of the pool and to be
    // named once, and that no other thread uses it meanwhile is what the documentation of the Python functions demands.
    Ok(unsafe { open.cache()?.pull_all_raw(namespace, keys, local, pieces) }?)
}

pub fn reasons(pulled: &[Pulled]) -> Vec<Option<&'static str>> {
    let reason = |pulled: &Pulled| match pulled {
        Pulled::Hit { .. } => None,
        Pulled::Miss(reason) => Some(reason.text()),
    };
    pulled.iter().map(reason).collect()
}

pub fn refusal(kind: &'static str) -> Failure {
    let reason = match kind {
        "no_cell" => "no cell is free and none can be evicted: release pins, wait until other hosts make room, or format with more cells",
        "no_hint" => "the part of the hint table where this key belongs is full: evict blocks",
        _ => "the namespace has used up its quota with blocks that are in use: raise it, or release pins",
    };
    Failure::Refused(kind, reason.into())
}
