// SPDX-License-Identifier: Apache-2.0
//! Pulls compared with reads of NIXL UCX between two processes, in turn with them: whole blocks of 1 MiB, a block of 128 pieces of 20 KiB,
//! and sparse reads of 16 tokens, in pieces of 160 bytes and as three models have them (Beluga section 6.1, experiments 9 and 10).
//!
//! Both sides read from more memory than most last-level caches have, into 64 MiB of ordinary memory in turn, and compare every word
//! outside of the time. The time of UCX excludes the preparation of a read (descriptor lists, a handle), and that of a read of pieces
//! excludes the pin; a pull of a whole block is time from lookup to verification.

use crate::lab::{Destinations, Lab, Member, NAMESPACE, alone, fill, in_turn, key, time, wrong};
use crate::report::Bench;
use crate::ucx::Peer;
use ctl_common::stats::{Estimate, median};
use cxl_pool::cache::Pulled;
use cxl_pool::copy::ReadList;
use cxl_pool::{Error, Result};

const BLOCKS: u64 = 512;
const BLOCK_BYTES: usize = 1 << 20;
/// Blocks that pieces are read from.
const LARGE_BLOCKS: u64 = 24;
const LARGE_BYTES: usize = 8 << 20;
/// Pieces, bytes of each, and the name of the ratio. A token of a model has a key and a value of each layer, 8 heads of 128 numbers.
const LISTS: [(usize, usize, &str); 5] = [
    (128, 20 << 10, "scatter_128_vs_ucx_list"),
    (16 * 64, 160, "sparse_16_tokens_vs_ucx_list"),
    (16 * 2 * 32, 8 * 128 * 2, "sparse_16_tokens_llama_3_1_8b_vs_ucx_list"),
    (16 * 2 * 64, 8 * 128 * 2, "sparse_16_tokens_qwen3_32b_vs_ucx_list"),
    (16 * 2 * 64, 8 * 128, "sparse_16_tokens_qwen3_32b_fp8_vs_ucx_list"),
];

pub fn run(command: &str, batches: u64) -> Result<Bench> {
    let failed = |error: Error| Error::Invalid(format!("the UCX peer ({command}): {error}"));
    let mut peer = Peer::start(command).map_err(failed)?;
    let mut bench = Bench::new("pulls compared with NIXL UCX");
    bench.notes.push(format!("peer: {}", peer.description()));
    whole(&mut bench, &mut peer, batches.min(201))?;
    pieces(&mut bench, &mut peer, batches.min(101))?;
    Ok(bench)
}

/// A pool with `count` blocks of `len_bytes`, their owner and a reader.
fn publish_all(count: u64, len_bytes: usize) -> Result<(Lab, Member, Member)> {
    // Cells come in whole chunks: a pool has fewer than its share would hold.
    let lab = Lab::new(len_bytes as u64, count + 112, 2 << 20)?;
    let owner = lab.join(0, alone())?;
    let mut source = vec![0; len_bytes];
    for number in 0..count {
        fill(&mut source, number);
        owner.cache.publish(NAMESPACE, key(number), None, &source)?;
    }
    let reader = lab.join(1, alone())?;
    Ok((lab, owner, reader))
}

fn whole(bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    let (_lab, owner, reader) = publish_all(BLOCKS, BLOCK_BYTES)?;
    let (mut source, mut destinations) = (vec![0; BLOCK_BYTES], Destinations::new());
    // The first reads set the connection up.
    peer.request(&format!("read {BLOCK_BYTES} 8"))?;
    let [ours, theirs] = in_turn(batches, |batch, way| {
        if way == 1 {
            return Ok(median(&mut peer.request(&format!("read {BLOCK_BYTES} 1"))?));
        }
        let number = batch * 247 % BLOCKS;
        let to = destinations.next(BLOCK_BYTES, 0);
        let taken_ns = time(|| match reader.cache.pull(NAMESPACE, key(number), to)? {
            Pulled::Hit { .. } => Ok(()),
            missed => Err(wrong(format!("block {number} was not pulled: {missed:?}"))),
        })?;
        fill(&mut source, number);
        if *to == source[..] { Ok(taken_ns) } else { Err(wrong(format!("block {number} has other bytes"))) }
    })?;
    bench.speed("pull of 1 MiB out of 512 MiB", BLOCK_BYTES, &ours);
    bench.speed("read of 1 MiB out of 512 MiB by NIXL UCX", BLOCK_BYTES, &theirs);
    bench.at_least("pull_1m_vs_ucx", Estimate::of_ratios(&theirs, &ours), 1.0);
    [reader, owner].into_iter().try_for_each(Member::leave)
}

fn pieces(bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    let (_lab, owner, reader) = publish_all(LARGE_BLOCKS, LARGE_BYTES)?;
    let mut source = vec![0; LARGE_BYTES];
    for (count, piece_bytes, name) in LISTS {
        // Apart from each other in the block, so that no two become one.
        let stride = LARGE_BYTES / count / 8 * 8;
        let mut local = vec![0u8; count * piece_bytes];
        let request = format!("list {count} {piece_bytes} 1");
        peer.request(&request)?;
        let [ours, theirs] = in_turn(batches, |batch, way| {
            if way == 1 {
                return Ok(median(&mut peer.request(&request)?));
            }
            let number = batch * 5 % LARGE_BLOCKS;
            let pinned = reader.cache.pin(NAMESPACE, key(number))?;
            let pinned = pinned.map_err(|reason| wrong(format!("block {number} is missing: {reason}")))?;
            let taken_ns = time(|| {
                let mut list = ReadList::new();
                for (index, piece) in local.chunks_exact_mut(piece_bytes).enumerate() {
                    list.push(pinned.offset() + (index * stride) as u64, piece);
                }
                match pinned.copy(&mut list)? {
                    None => Ok(()),
                    Some(reason) => Err(wrong(format!("block {number} was not copied: {reason}"))),
                }
            })?;
            fill(&mut source, number);
            let is_right = |(index, piece): (usize, &[u8])| piece == &source[index * stride..][..piece_bytes];
            let are_right = local.chunks_exact(piece_bytes).enumerate().all(is_right);
            if are_right { Ok(taken_ns) } else { Err(wrong(format!("pieces of block {number} have other bytes"))) }
        })?;
        bench.time(format!("read of {count} pieces of {piece_bytes} bytes"), &ours);
        bench.time(format!("NIXL UCX, {count} descriptors of {piece_bytes} bytes"), &theirs);
        bench.ratio(name, Estimate::of_ratios(&theirs, &ours));
    }
    [reader, owner].into_iter().try_for_each(Member::leave)
}
