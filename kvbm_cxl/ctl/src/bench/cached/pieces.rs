// SPDX-License-Identifier: Apache-2.0
//! Scattered pieces beside descriptor lists of NIXL UCX (Beluga section 6.1, experiments 9 and 10): a block of 128 pieces of 20 KiB, and a
//! sparse read of 16 tokens in pieces of 160 bytes. `cxlctl bench copy` has the same beside one memcpy per piece.

use super::lab::{Lab, NAMESPACE, fill, key};
use super::ucx::Peer;
use crate::bench::{Bench, wrong};
use crate::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::cache::Pinned;
use cxl_pool::copy::ReadList;
use std::time::Instant;

/// Pieces, bytes of each, name of the ratio, how often.
const CASES: [(usize, usize, &str); 2] = [(128, 20 << 10, "scatter_128_vs_ucx_list"), (16 * 64, 160, "sparse_16_tokens_vs_ucx_list")];
/// Size of the block that pieces come from.
const BLOCK_BYTES: usize = 4 << 20;

/// Measures.
pub fn beside_ucx(lab: &Lab, bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    const BLOCKS: u64 = 24;
    let mut source = vec![0; BLOCK_BYTES];
    for index in 0..BLOCKS {
        fill(&mut source, 11 << 40 | index);
        lab.cache.publish(NAMESPACE, key(11 << 40 | index), None, &source)?;
    }
    for (count, piece_bytes, name) in CASES {
        let mut local = vec![0u8; count * piece_bytes];
        let request = format!("list {count} {piece_bytes} 1");
        peer.ask(&request)?;
        let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = Default::default();
        for batch in 0..batches.min(101) {
            let number = (11 << 40) + batch * 5 % BLOCKS;
            let Ok(pinned) = lab.cache.pin(NAMESPACE, key(number))? else {
                return Err(wrong(format!("block {number} is not there")));
            };
            // Apart from each other in the block, so that no two become one.
            let stride = BLOCK_BYTES / count / 8 * 8;
            let start = Instant::now();
            read(&pinned, stride, piece_bytes, &mut local)?;
            ours.push(start.elapsed().as_nanos() as f64);
            fill(&mut source, number);
            for (index, piece) in local.chunks_exact(piece_bytes).enumerate() {
                if piece != &source[index * stride..][..piece_bytes] {
                    return Err(wrong(format!("piece {index} of block {number} has other bytes")));
                }
            }
            theirs.extend(peer.ask(&request)?);
        }
        let ratio = Estimate::of_ratios(&theirs, &ours);
        bench.figure(format!("read of {count} pieces of {piece_bytes} bytes"), median(&mut ours), "ns");
        bench.figure(format!("NIXL UCX, a list of {count} descriptors of {piece_bytes} bytes"), median(&mut theirs), "ns");
        bench.ratio(name, ratio);
    }
    lab.cache.clear(None)?;
    Ok(())
}

fn read(pinned: &Pinned, stride: usize, piece_bytes: usize, local: &mut [u8]) -> Result<()> {
    let mut list = ReadList::new();
    for (index, piece) in local.chunks_exact_mut(piece_bytes).enumerate() {
        list.push(pinned.offset() + (index * stride) as u64, piece);
    }
    match pinned.copy(&mut list)? {
        None => Ok(()),
        Some(reason) => Err(wrong(format!("a pinned block was not read: {reason}"))),
    }
}
