// SPDX-License-Identifier: Apache-2.0
//! What takes a host of this machine: `cxlctl cache get`, `evict` and `clear`.

use super::list::{cell_json, claimant};
use super::{Block, namespace_of, view};
use crate::output::{Exit, Failure, Out};
use crate::text::list;
use crate::wait;
use cxl_pool::cache::survey::{BATCH, CacheView, CellInfo, CellState, ChunkState, Claimant};
use cxl_pool::cache::{BlockKey, Cache, Namespace, Pinned};
use cxl_pool::copy::checksum_of;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::metrics::MissReason;
use cxl_pool::pool::Pool;
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// Tries to copy a block that changes under the copy.
const TRIES: usize = 3;
/// Owners get the request again after so long: one request line serves all processes of a machine, and an owner may have missed it.
const REQUEST_AGAIN: Duration = Duration::from_millis(500);
/// Blocks that stay and are listed in the text.
const LISTED: usize = 20;

/// Joins the pool with a cache, does `work` and leaves.
fn with_cache<T>(pool: &Pool, work: impl FnOnce(&Host, &Cache) -> Result<T, Failure>) -> Result<T, Failure> {
    // Refused before anything is joined.
    view(pool)?;
    wait::with_cache(pool.join(HostConfig::from_env()?)?, work)
}

/// A block as it was pulled.
struct Copied {
    bytes: Vec<u8>,
    cell: u64,
    owner: u16,
}

/// A block's bytes, or why there are none.
fn pull(cache: &Cache, namespace: Namespace, key: BlockKey) -> Result<Result<Copied, MissReason>, Failure> {
    let mut miss = MissReason::Absent;
    for _ in 0..TRIES {
        let pinned: Pinned = match cache.pin(namespace, key)? {
            Ok(pinned) => pinned,
            Err(reason) => return Ok(Err(reason)),
        };
        let len_bytes = usize::try_from(pinned.len_bytes()).map_err(|_| Failure::new(Exit::Failed, "a block too long for this machine"))?;
        let mut bytes = vec![0; len_bytes];
        match pinned.copy_to(&mut bytes)? {
            None => return Ok(Ok(Copied { bytes, cell: pinned.cell(), owner: pinned.owner() })),
            Some(reason) => miss = reason,
        }
    }
    Ok(Err(miss))
}

pub fn get(pool: &Pool, block: &Block, output: Option<&str>, out: &mut Out) -> Result<Exit, Failure> {
    if out.is_json() && output == Some("-") {
        return Err(Failure::usage("the bytes and JSON cannot both go to standard output: leave --json out, or name a file"));
    }
    let pulled = match namespace_of(&view(pool)?, block)? {
        Some(namespace) => with_cache(pool, |_, cache| pull(cache, namespace, block.key))?.map(|found| (namespace, found)),
        None => Err(MissReason::Absent),
    };
    let (namespace, Copied { bytes, cell, owner }) = match pulled {
        Ok(found) => found,
        Err(reason) => {
            if output == Some("-") {
                return Err(Failure::new(Exit::Failed, format!("miss: {}", reason.text())));
            }
            out.answer(
                || json!({"hit": false, "key": block.key.to_string(), "reason": reason.text()}),
                || format!("miss: {} (cxlctl why {})\n", reason.text(), block.key),
            )?;
            return Ok(Exit::Failed);
        }
    };
    if output == Some("-") {
        out.bytes(&bytes)?;
        return Ok(Exit::Done);
    }
    if let Some(path) = output {
        let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("writing the block to {path}: {error}"));
        let mut file = std::fs::File::create(path).map_err(failed)?;
        file.write_all(&bytes).map_err(failed)?;
    }
    let checksum = checksum_of(&bytes);
    out.answer(
        || {
            json!({"hit": true, "namespace": namespace.to_string(), "key": block.key.to_string(), "len_bytes": bytes.len(),
                "cell": cell, "owner": owner, "xxh3": format!("{checksum:016x}"), "output": output})
        },
        || {
            let to = output.map_or(String::new(), |path| format!(", written to {path}"));
            format!("hit: {} bytes from cell {cell} of slot {owner}, xxh3 {checksum:016x}{to}\n", bytes.len())
        },
    )?;
    Ok(Exit::Done)
}

/// Blocks that were to go, and what they are.
struct Left {
    before: usize,
    stay: Vec<(CellInfo, String)>,
}

/// Sends the request, and waits until the blocks of `cells` that `wanted` accepts are gone.
fn wait_gone(
    pool: &Pool,
    cells: Vec<u64>,
    timeout_ms: u64,
    wanted: impl Fn(&CellInfo) -> bool,
    request: impl Fn(&Cache) -> cxl_pool::Result<()>,
) -> Result<Left, Failure> {
    let before = cells.len();
    if before == 0 {
        return Ok(Left { before, stay: Vec::new() });
    }
    with_cache(pool, |host, cache| {
        let (mut left, mut requested) = (cells, None::<Instant>);
        let mut stay = Vec::new();
        wait::until(timeout_ms, || {
            if requested.is_none_or(|at| at.elapsed() >= REQUEST_AGAIN) {
                request(cache)?;
                requested = Some(Instant::now());
            }
            let view = CacheView::load(host.lines())?;
            stay.clear();
            for cells in left.chunks(BATCH as usize) {
                stay.extend(view.look_at(cells)?.into_iter().filter(|found| is_block(found) && wanted(found)));
            }
            left = stay.iter().map(|found| found.cell).collect();
            Ok(left.is_empty().then_some(()))
        })?;
        let view = CacheView::load(host.lines())?;
        let stay = stay.into_iter().map(|cell| why_it_stays(&view, cell)).collect::<Result<_, Failure>>()?;
        Ok(Left { before, stay })
    })
}

fn is_block(cell: &CellInfo) -> bool {
    matches!(cell.state, CellState::Ready | CellState::Evicting)
}

fn why_it_stays(view: &CacheView, cell: CellInfo) -> Result<(CellInfo, String), Failure> {
    let chunk = view.chunk(cell.chunk)?;
    let stamp = Claimant { slot: cell.descriptor.owner, incarnation: cell.descriptor.incarnation };
    let reason = match chunk.state {
        _ if !cell.pinned_by.is_empty() => format!("pinned by slot {}", list(&cell.pinned_by)),
        ChunkState::Claimed(owner) if owner == stamp => format!("{} did not answer: does its cache run?", claimant(owner)),
        ChunkState::Claimed(owner) => format!("{} keeps the cell until {} is proven to have ended", claimant(owner), claimant(stamp)),
        ChunkState::Waiting => "no host may take the chunk before its owners are proven to have ended".into(),
        ChunkState::Unclaimed | ChunkState::Abandoned => "no host has adopted the chunk yet".into(),
        ChunkState::Contested => "several hosts claim the chunk (cxlctl fsck)".into(),
    };
    Ok((cell, reason))
}

fn report(left: &Left, out: &mut Out) -> Result<Exit, Failure> {
    let gone = left.before - left.stay.len();
    let stay = || {
        left.stay.iter().map(|(cell, reason)| {
            let mut value = cell_json(cell);
            value["reason"] = reason.as_str().into();
            value
        })
    };
    out.answer(
        || json!({"found": left.before, "gone": gone, "stay": stay().collect::<Vec<_>>()}),
        || {
            let mut text = match left.before {
                0 => String::from("there was no such block\n"),
                before => format!("{gone} of {before} blocks are gone\n"),
            };
            for (cell, reason) in left.stay.iter().take(LISTED) {
                text.push_str(&format!("  stays: cell {}, key {}: {reason}\n", cell.cell, cell.key()));
            }
            if left.stay.len() > LISTED {
                text.push_str(&format!("  and {} more (--json lists them)\n", left.stay.len() - LISTED));
            }
            text
        },
    )?;
    Ok(if left.stay.is_empty() { Exit::Done } else { Exit::Failed })
}

pub fn evict(pool: &Pool, block: &Block, timeout_ms: u64, out: &mut Out) -> Result<Exit, Failure> {
    let view = view(pool)?;
    let key = block.key;
    let Some(namespace) = namespace_of(&view, block)? else { return report(&Left { before: 0, stay: Vec::new() }, out) };
    let cells = view.blocks_that(|its, other| (its, other) == (namespace, key))?;
    let wanted = |cell: &CellInfo| (cell.namespace(), cell.key()) == (namespace, key);
    let left = wait_gone(pool, cells, timeout_ms, wanted, |cache| cache.evict(namespace, key).map(drop))?;
    report(&left, out)
}

pub fn clear(pool: &Pool, namespace: Option<Namespace>, timeout_ms: u64, out: &mut Out) -> Result<Exit, Failure> {
    let is_its = |its: Namespace| namespace.is_none_or(|namespace| its == namespace);
    let cells = view(pool)?.blocks_that(|its, _| is_its(its))?;
    let left = wait_gone(pool, cells, timeout_ms, |cell| is_its(cell.namespace()), |cache| cache.clear(namespace).map(drop))?;
    report(&left, out)
}
