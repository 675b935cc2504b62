// SPDX-License-Identifier: Apache-2.0
//! Pulls beside reads of NIXL UCX between two processes, in turn with them: whole blocks of 1 MiB, a block of 128 pieces of 20 KiB, and
//! sparse reads of 16 tokens, in pieces of 160 bytes and as three models have them (Beluga section 6.1, experiments 9 and 10).
//!
//! Both sides read from more memory than most last-level caches have, into places of ordinary memory in turn (64 MiB), and compare every
//! word outside of the time. What UCX needs to prepare a read (descriptor lists, a handle) is outside of its time, and so is what leads to
//! a pin here where pieces are read; a pull of a whole block is timed from lookup to verification.

use super::{Lab, Member, NAMESPACE, alone, fill, join, key, refuse_emulated};
use crate::stats::{Estimate, median};
use crate::ucx::Peer;
use crate::{Bench, wrong};
use cxl_pool::cache::Pulled;
use cxl_pool::copy::ReadList;
use cxl_pool::{Error, Result};
use std::time::Instant;

/// Blocks of the working set.
const BLOCKS: u64 = 512;
const BLOCK_BYTES: usize = 1 << 20;
/// Places that blocks are read to in turn, on both sides: where a block goes is seldom in a cache.
const DESTINATIONS: usize = 64;
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

/// Measures.
pub fn run(command: &str, batches: u64) -> Result<Bench> {
    refuse_emulated()?;
    let failed = |error: Error| Error::Invalid(format!("the UCX peer ({command}): {error}"));
    let mut peer = Peer::start(command).map_err(failed)?;
    let mut bench = Bench { title: "pulls beside NIXL UCX".into(), ..Bench::default() };
    bench.notes.push(format!("peer: {}", peer.description()));
    whole(&mut bench, &mut peer, batches.min(201))?;
    pieces(&mut bench, &mut peer, batches.min(101))?;
    Ok(bench)
}

fn published(lab: &Lab, blocks: u64, bytes: usize) -> Result<Member> {
    let member = join(lab.pool(), &lab.state(), 0, alone(), false)?;
    let mut source = vec![0; bytes];
    for number in 0..blocks {
        fill(&mut source, number);
        member.cache.publish(NAMESPACE, key(number), None, &source)?;
    }
    Ok(member)
}

fn whole(bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    // Cells come in whole chunks, so that a pool has fewer than its share would hold.
    let lab = Lab::new(BLOCK_BYTES as u64, BLOCKS + 112, 2 << 20)?;
    let owner = published(&lab, BLOCKS, BLOCK_BYTES)?;
    let reader = join(lab.pool(), &lab.state(), 1, alone(), false)?;
    let (mut source, mut local) = (vec![0; BLOCK_BYTES], vec![1; DESTINATIONS * BLOCK_BYTES]);
    let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = Default::default();
    // The first reads set the connection up.
    peer.ask(&format!("read {BLOCK_BYTES} 8"))?;
    for batch in 0..batches {
        for turn in 0..2 {
            if (turn + batch) % 2 == 0 {
                let number = batch * 247 % BLOCKS;
                let destination = &mut local[batch as usize % DESTINATIONS * BLOCK_BYTES..][..BLOCK_BYTES];
                let start = Instant::now();
                let pulled = reader.cache.pull(NAMESPACE, key(number), destination)?;
                ours.push(start.elapsed().as_nanos() as f64);
                fill(&mut source, number);
                if pulled != (Pulled::Hit { len_bytes: BLOCK_BYTES as u64 }) || *destination != source[..] {
                    return Err(wrong(format!("block {number} was not pulled as it was published: {pulled:?}")));
                }
            } else {
                theirs.extend(peer.ask(&format!("read {BLOCK_BYTES} 1"))?);
            }
        }
    }
    let ratio = Estimate::of_ratios(&theirs, &ours);
    bench.figure("pull of 1 MiB out of 512 MiB", BLOCK_BYTES as f64 / median(&mut ours), "GB/s");
    bench.figure("read of 1 MiB out of 512 MiB by NIXL UCX", BLOCK_BYTES as f64 / median(&mut theirs), "GB/s");
    bench.at_least("pull of 1 MiB, speed beside NIXL UCX", &ratio, 1.0);
    bench.ratio("pull_1m_vs_ucx", ratio);
    [reader, owner].into_iter().try_for_each(Member::leave)
}

fn pieces(bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    let lab = Lab::new(LARGE_BYTES as u64, LARGE_BLOCKS + 8, 2 << 20)?;
    let owner = published(&lab, LARGE_BLOCKS, LARGE_BYTES)?;
    let reader = join(lab.pool(), &lab.state(), 1, alone(), false)?;
    let mut source = vec![0; LARGE_BYTES];
    for (count, piece_bytes, name) in LISTS {
        // Apart from each other in the block, so that no two become one.
        let stride = LARGE_BYTES / count / 8 * 8;
        let mut local = vec![0u8; count * piece_bytes];
        let request = format!("list {count} {piece_bytes} 1");
        peer.ask(&request)?;
        let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = Default::default();
        for batch in 0..batches {
            let number = batch * 5 % LARGE_BLOCKS;
            let pinned = match reader.cache.pin(NAMESPACE, key(number))? {
                Ok(pinned) => pinned,
                Err(reason) => return Err(wrong(format!("block {number} is not there: {reason}"))),
            };
            let start = Instant::now();
            let mut list = ReadList::new();
            for (index, piece) in local.chunks_exact_mut(piece_bytes).enumerate() {
                list.push(pinned.offset() + (index * stride) as u64, piece);
            }
            let missed = pinned.copy(&mut list)?;
            ours.push(start.elapsed().as_nanos() as f64);
            fill(&mut source, number);
            let is_right = |(index, piece): (usize, &[u8])| piece == &source[index * stride..][..piece_bytes];
            if missed.is_some() || !local.chunks_exact(piece_bytes).enumerate().all(is_right) {
                return Err(wrong(format!("pieces of block {number} have other bytes ({missed:?})")));
            }
            theirs.extend(peer.ask(&request)?);
        }
        let ratio = Estimate::of_ratios(&theirs, &ours);
        bench.figure(format!("read of {count} pieces of {piece_bytes} bytes"), median(&mut ours), "ns");
        bench.figure(format!("NIXL UCX, {count} descriptors of {piece_bytes} bytes"), median(&mut theirs), "ns");
        bench.ratio(name, ratio);
    }
    [reader, owner].into_iter().try_for_each(Member::leave)
}
